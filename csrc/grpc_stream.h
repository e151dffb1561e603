// Streams of environments over gRPC. Only grpc_*.cc include gRPC's headers.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "env_stream.h"

namespace beast {

struct GrpcOptions {
  std::string address;            // "unix:/path" or "host:port"
  std::string token;              // what the server's --token_file holds
  std::string root_certificates;  // PEM; if given, host:port is reached over TLS. Unix sockets never use TLS
  std::string env;                // the environment id that the server must have; empty accepts any
  bool insecure = false;          // allows a token to cross a network in plain text
  std::chrono::milliseconds env_timeout{60000};      // for one message
  std::chrono::milliseconds connect_timeout{30000};  // for connecting and the server's hello, retries included
  bool only_hello = false;                           // the stream ends after open()
};

// Throws std::invalid_argument if the address is malformed, or if a token would cross a network in plain text.
void check(const GrpcOptions& options);

class GrpcLoop;

// Makes streams to servers that listen, each with a connection of its own, and serves all of them on a few threads. It is
// destroyed after they are lost.
class GrpcStreams {
 public:
  explicit GrpcStreams(size_t num_streams);
  ~GrpcStreams();
  std::shared_ptr<EnvStream> connect(const GrpcOptions& options);

 private:
  std::unique_ptr<GrpcLoop> loop_;
};

// What a server says it has. Calls `interrupt` about every 100 ms, which may throw. Throws the errors of env_stream.h.
StreamSpec ask_for_hello(GrpcOptions options, const std::function<void()>& interrupt);

}  // namespace beast

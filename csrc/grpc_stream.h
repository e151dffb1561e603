// Streams of environments over gRPC. The only part of libbeast that knows gRPC, and only grpc_stream.cc sees its
// headers.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "env_stream.h"

namespace beast {

struct GrpcOptions {
  std::string address;            // "unix:/path" or "host:port"
  std::string token;              // what the server's --token_file holds
  std::string root_certificates;  // PEM; with them host:port is spoken to over TLS, unix sockets never are
  std::string env;                // the environment id that is expected; empty takes any
  bool insecure = false;          // a token may cross a network in plain text
  std::chrono::milliseconds env_timeout{60000};      // for one message
  std::chrono::milliseconds connect_timeout{30000};  // for reaching the server and its hello, retries included
  bool only_hello = false;                           // nothing but `open` is called
};

// To be called before the first stream is made, when the module is imported: it writes to the environment, where gRPC
// reads it, and no other thread may do so at the time.
void poll_idle_connections();

// Throws std::invalid_argument for an address that cannot be one, and where a token would cross a network in plain
// text.
void check(const GrpcOptions& options);

// A stream that is yet to be opened. Every one has a connection of its own.
std::unique_ptr<EnvStream> make_grpc_stream(const GrpcOptions& options);

}  // namespace beast

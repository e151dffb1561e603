// Streams of environments over gRPC. Only grpc_stream.cc includes gRPC's headers.
#pragma once

#include <chrono>
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
  bool only_hello = false;                           // only open() will be called
};

// Makes gRPC look at idle connections often enough for their keepalive. Call it before the first stream is made and
// while no other thread uses environment variables: it sets one that gRPC reads.
void poll_idle_connections();

// Throws std::invalid_argument if the address is malformed, or if a token would cross a network in plain text.
void check(const GrpcOptions& options);

// Returns a stream that is not open yet. Every stream has its own connection.
std::unique_ptr<EnvStream> make_grpc_stream(const GrpcOptions& options);

}  // namespace beast

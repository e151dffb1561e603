// Where environment servers dial in. Only grpc_*.cc include gRPC's headers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "env_stream.h"

namespace beast {

struct ListenerOptions {
  std::string address;      // "unix:/path" or "host:port"
  std::string token;        // that a caller must send; empty takes every caller
  std::string certificate;  // PEM; if given with a key, host:port is TLS
  std::string key;
  std::chrono::milliseconds env_timeout{60000};  // for one row
  size_t max_streams = 256;
};

// Takes streams of environments from servers that call. It learns from the first caller what the environments are, and
// takes no message then that is longer than theirs. The token is compared before a message is read.
class GrpcListener {
 public:
  using Admit = std::function<bool(std::shared_ptr<EnvStream> stream, std::string name)>;  // false: no place is free

  // Binds the address. Throws std::invalid_argument.
  explicit GrpcListener(const ListenerOptions& options);
  ~GrpcListener();

  const std::string& address() const { return address_; }  // with the port that is taken
  size_t max_streams() const { return options_.max_streams; }
  // Waits for a caller, and returns what it has. Calls `interrupt` about every 100 ms, which may throw.
  StreamSpec first_hello(const std::function<void()>& interrupt);
  // From now on, gives streams to `admit`; null ends that, and all calls must have ended.
  void serve(Admit admit);
  // Why callers were refused since the last call: at most 20 messages, and how many more there were.
  std::pair<std::vector<std::string>, int64_t> refusals();

 private:
  class Server;

  void replace_server(std::unique_ptr<Server> server);

  const ListenerOptions options_;
  std::string address_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable said_hello_;
  std::optional<StreamSpec> spec_;
  std::unique_ptr<Server> server_;  // ends before what it tells
};

}  // namespace beast

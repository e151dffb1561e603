// Where environment servers dial in. Only grpc_*.cc include gRPC's headers.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "callers.h"
#include "env_stream.h"
#include "listening_sockets.h"

namespace beast {

struct ListenerOptions {
  std::string address;      // "unix:/path" or "host:port"
  std::string token;        // that a caller must send; empty takes every caller
  std::string certificate;  // PEM; if given with a key, host:port is TLS
  std::string key;
  std::chrono::milliseconds env_timeout{60000};  // for one row
  size_t max_streams = 256;
};

// Takes streams of environments from servers that call. It learns from the first caller of use what the environments
// are, and takes no message then that is longer than theirs. The token is compared before a message is read. Some
// descriptors are left for the rest of the process: a connection that would take one of them is closed. Who has said no
// hello yields to new connections, and who sends wrong tokens has to wait.
class GrpcListener {
 public:
  using Check = std::function<std::string(const StreamSpec& spec)>;  // why it is of no use, else empty

  // Binds the address. Throws std::invalid_argument.
  explicit GrpcListener(const ListenerOptions& options);
  ~GrpcListener();

  const std::string& address() const { return sockets_.address(); }  // with the port that is taken
  size_t max_streams() const { return options_.max_streams; }
  // Waits for a caller whose hello passes the check, and returns what it has; refuses the others. None if there was none
  // within `timeout`. Calls `interrupt` about every 100 ms, which may throw, as the check may.
  std::optional<StreamSpec> first_hello(const Check& check, std::chrono::milliseconds timeout,
                                        const std::function<void()>& interrupt);
  // From now on, gives streams to `admit`; null ends that, and all calls must have ended. Throws std::invalid_argument
  // where it cannot give any.
  void serve(Admit admit);
  // Ends calls that wait for first_hello(), and frees the address. Throws std::runtime_error while a pool takes streams:
  // they would not end.
  void close();
  // Why callers were refused since the last call: at most 20 messages, and how many more there were.
  std::pair<std::vector<std::string>, int64_t> refusals();

 private:
  class Server;

  // Of a caller that waits for its answer: a refusal, or "" where it shall dial again.
  struct Hello {
    StreamSpec spec;
    std::function<void(const std::string& refusal)> answer;
  };

  void replace_server(std::unique_ptr<Server> server);
  void log_refusal(const std::string& message);

  const ListenerOptions options_;
  ListeningSockets sockets_;
  Connections connections_;
  Guesses guesses_;  // of the one thread that takes calls
  std::mutex mutex_;  // guards what follows
  std::condition_variable said_hello_;
  std::deque<Hello> hellos_;  // that first_hello() has to look at
  bool is_asking_ = true;     // for hellos
  std::optional<StreamSpec> spec_;
  bool is_serving_ = false;
  bool is_closed_ = false;
  std::vector<std::string> refusals_;
  int64_t num_more_refusals_ = 0;
  std::unique_ptr<Server> server_;  // ends before what it tells
};

}  // namespace beast

// Who connects to a listener: which of them are ended for others, and who guesses tokens. Knows no transport.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace beast {

// A peer's name as gRPC has it, "ipv4:10.0.0.1:4431" or "ipv6:%5Bfd00::1%5D:4431", as peer_of() has it.
std::string decoded_peer(std::string name);
// "ipv4:10.0.0.1:4431" or "ipv6:[fd00::1]:4431"; empty for a unix socket.
std::string peer_of(int connection);
// What a peer connects from: its address without the port, and of IPv6 the network of 64 bits, all of which one host may
// have.
std::string source_of(const std::string& peer);

// The connections of a listener, by descriptor. A peer is unknown until know() is told of it. It is not told when a
// connection is closed, but looks. May be called from any thread.
class Connections {
 public:
  // Counts a connection. Where there are more than `most` of unknown peers now, ends the oldest one of the source that
  // has most of them, and returns its peer. A unix socket's peers are known: only its owner can open it.
  std::string add(int connection, size_t most);
  void know(const std::string& peer);
  // Ends those that are still open, without their owner's knowledge.
  void end_all();

 private:
  struct Open {
    std::string peer;
    ino_t inode = 0;  // the descriptor may be another connection's since
    int64_t number = 0;  // in the order in which they came
    bool is_known = false;
  };

  size_t num_unknown() const;
  void forget_closed();

  std::mutex mutex_;
  std::map<int, Open> open_;
  int64_t num_added_ = 0;
};

// Slows those who guess: a source has 20 wrong tries, and one more each second. For one thread.
class Guesses {
 public:
  using Clock = std::chrono::steady_clock;

  bool may_try(const std::string& source, Clock::time_point now = Clock::now());
  void was_wrong(const std::string& source, Clock::time_point now = Clock::now());

 private:
  std::map<std::string, Clock::time_point> all_paid_;  // when the source has all of its tries again
};

}  // namespace beast

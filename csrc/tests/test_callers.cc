#include "callers.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

namespace beast {
namespace {

// Both ends of a connection of this source to 127.0.0.1.
class Pair {
 public:
  explicit Pair(const char* source) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener, generic, length), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    getsockname(listener, generic, &length);
    theirs_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in from{};
    from.sin_family = AF_INET;
    inet_pton(AF_INET, source, &from.sin_addr);
    EXPECT_EQ(bind(theirs_, reinterpret_cast<sockaddr*>(&from), sizeof(from)), 0);
    EXPECT_EQ(connect(theirs_, generic, length), 0);
    ours_ = accept(listener, nullptr, nullptr);
    close(listener);
  }
  Pair(Pair&& other) : ours_(std::exchange(other.ours_, -1)), theirs_(std::exchange(other.theirs_, -1)) {}
  ~Pair() {
    close(ours_);
    close(theirs_);
  }
  int ours() const { return ours_; }
  void close_ours() { close(std::exchange(ours_, -1)); }
  bool is_open() const {
    pollfd polled{theirs_, POLLIN, 0};
    return poll(&polled, 1, 0) == 0;
  }

 private:
  int ours_ = -1, theirs_ = -1;
};

TEST(Connections, TheOldestUnknownOneOfTheSourceThatHasMostYields) {
  Connections connections;
  std::vector<Pair> pairs;
  const auto add = [&](const char* source) {
    pairs.emplace_back(source);
    return connections.add(pairs.back().ours(), /*most=*/4);
  };
  EXPECT_EQ(add("127.0.0.3"), "");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(add("127.0.0.2"), "");
  connections.know(peer_of(pairs[1].ours()));
  EXPECT_EQ(add("127.0.0.2"), "");
  const std::string oldest = peer_of(pairs[2].ours());
  EXPECT_EQ(oldest.rfind("ipv4:127.0.0.2:", 0), 0u);
  EXPECT_EQ(add("127.0.0.4"), oldest);
  const bool open[] = {true, true, false, true, true, true};
  for (size_t i = 0; i < pairs.size(); ++i) EXPECT_EQ(pairs[i].is_open(), open[i]) << i;
  pairs[3].close_ours();
  EXPECT_EQ(add("127.0.0.2"), "") << "what is closed counts no more";
  connections.end_all();
  for (const Pair& pair : pairs) EXPECT_FALSE(pair.is_open());
}

TEST(Connections, ADescriptorThatSomethingElseHasIsLeftAlone) {
  Connections connections;
  Pair first("127.0.0.1");
  const int descriptor = first.ours();
  connections.add(descriptor, 4);
  Pair other("127.0.0.1");
  dup2(other.ours(), descriptor);
  connections.end_all();
  EXPECT_TRUE(other.is_open());
}

TEST(Callers, SourcesAreAddressesAndNetworksOf64Bits) {
  EXPECT_EQ(source_of("ipv4:10.0.0.1:4431"), "ipv4:10.0.0.1");
  EXPECT_EQ(source_of(decoded_peer("ipv6:%5Bfd00:1:2:3:4::1%5D:4431")), "ipv6:[fd00:1:2:3::]/64");
  EXPECT_EQ(decoded_peer("ipv6:%5Bfe80::1%252%5D:7"), "ipv6:[fe80::1]:7");
  EXPECT_EQ(source_of("unix:"), "unix");
}

TEST(Callers, WhoGuessesHas20TriesAndOneMoreEachSecond) {
  Guesses guesses;
  auto now = Guesses::Clock::now();
  for (int i = 0; i < 20; ++i) {
    EXPECT_TRUE(guesses.may_try("a", now));
    guesses.was_wrong("a", now);
  }
  EXPECT_FALSE(guesses.may_try("a", now));
  EXPECT_TRUE(guesses.may_try("b", now));
  now += std::chrono::seconds(1);
  EXPECT_TRUE(guesses.may_try("a", now));
  guesses.was_wrong("a", now);
  EXPECT_FALSE(guesses.may_try("a", now));
  EXPECT_TRUE(guesses.may_try("a", now + std::chrono::seconds(21)));
}

}  // namespace
}  // namespace beast

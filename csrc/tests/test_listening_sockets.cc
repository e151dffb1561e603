#include "listening_sockets.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <vector>

namespace beast {
namespace {

using std::chrono::milliseconds;

int connect_to(const std::string& address) {
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(static_cast<in_port_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(connect(connection, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  return connection;
}

TEST(ListeningSockets, GoesOnWhenThereAreDescriptorsAgain) {
  ListeningSockets sockets("127.0.0.1:0");
  EXPECT_EQ(sockets.accept(milliseconds(10)), -1);  // nobody has called
  const int caller = connect_to(sockets.address());
  std::vector<int> taken;
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{static_cast<rlim_t>(caller + 1), before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  EXPECT_EQ(max_descriptors(), caller + 1);
  for (int descriptor; (descriptor = open("/dev/null", O_RDONLY)) >= 0;) taken.push_back(descriptor);
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(sockets.accept(milliseconds(100)), -1);
  EXPECT_GE(std::chrono::steady_clock::now() - began, milliseconds(100));  // it does not burn a core
  setrlimit(RLIMIT_NOFILE, &before);
  const int connection = sockets.accept(milliseconds(1000));
  EXPECT_GE(connection, 0);
  EXPECT_TRUE(fcntl(connection, F_GETFL) & O_NONBLOCK);
  EXPECT_TRUE(fcntl(connection, F_GETFD) & FD_CLOEXEC);
  unsigned timeout = 0;  // after which a host that reads nothing loses its connection
  socklen_t length = sizeof(timeout);
  EXPECT_EQ(getsockopt(connection, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, &length), 0);
  EXPECT_EQ(timeout, 20000u);
  close(connection);
  close(caller);
  for (const int descriptor : taken) close(descriptor);
}

}  // namespace
}  // namespace beast

#include "listening_sockets.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <thread>

namespace beast {
namespace {

constexpr char kUnix[] = "unix:";
constexpr unsigned kReadTimeout = 20000;  // milliseconds, as for the answer to a ping

// A socket that listens there; -1 with errno.
int listen_at(const sockaddr* address, socklen_t length) {
  const int descriptor = socket(address->sa_family, SOCK_STREAM, 0);
  if (descriptor < 0) return -1;
  const int yes = 1, no = 0;
  setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));  // of connections that a former process had
  if (address->sa_family == AF_INET6) setsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
  fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  fcntl(descriptor, F_SETFL, O_NONBLOCK);
  if (bind(descriptor, address, length) == 0 && listen(descriptor, SOMAXCONN) == 0) return descriptor;
  const int error = errno;
  close(descriptor);
  errno = error;
  return -1;
}

in_port_t& port_of(sockaddr* address) {
  return address->sa_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(address)->sin6_port
                                        : reinterpret_cast<sockaddr_in*>(address)->sin_port;
}

}  // namespace

ListeningSockets::ListeningSockets(const std::string& address) : address_(address) {
  const bool is_path = address_.rfind(kUnix, 0) == 0;
  if (const int error = is_path ? listen_on_path() : listen_on_host()) {
    close();
    throw std::invalid_argument("cannot listen on " + address + ": " + std::strerror(error));
  }
}

void ListeningSockets::close() {
  for (const int descriptor : sockets_) ::close(descriptor);
  if (!sockets_.empty() && address_.rfind(kUnix, 0) == 0) unlink(address_.c_str() + std::strlen(kUnix));
  sockets_.clear();
}

int ListeningSockets::listen_on_path() {
  const std::string path = address_.substr(std::strlen(kUnix));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    throw std::invalid_argument("cannot listen on " + address_ + ": a socket's path has 1 to " +
                                std::to_string(sizeof(address.sun_path) - 1) + " bytes");
  }
  path.copy(address.sun_path, path.size());
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  const int probe = socket(AF_UNIX, SOCK_STREAM, 0);
  const bool is_abandoned = connect(probe, generic, sizeof(address)) < 0 && errno == ECONNREFUSED;
  ::close(probe);
  struct stat found;
  if (is_abandoned && stat(path.c_str(), &found) == 0 && S_ISSOCK(found.st_mode)) unlink(path.c_str());
  const mode_t mask = umask(077);  // it is its owner's alone, so that it needs no token
  const int descriptor = listen_at(generic, sizeof(address));
  const int error = errno;
  umask(mask);
  if (descriptor < 0) return error;
  sockets_.push_back(descriptor);
  return 0;
}

int ListeningSockets::listen_on_host() {
  const size_t colon = address_.rfind(':');
  std::string host = address_.substr(0, colon), port = colon == std::string::npos ? "" : address_.substr(colon + 1);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const bool is_any = host == "0.0.0.0" || host == "::";
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  if (const int error = getaddrinfo(is_any ? nullptr : host.c_str(), port.c_str(), &hints, &found)) {
    throw std::invalid_argument("cannot listen on " + address_ + ": " + gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> results(found, &freeaddrinfo);
  std::vector<addrinfo*> wanted;
  for (addrinfo* result = found; result; result = result->ai_next) wanted.push_back(result);
  // A socket for all addresses of IPv6 takes those of IPv4, too.
  const auto is_ipv6 = [](const addrinfo* result) { return result->ai_family == AF_INET6; };
  std::stable_partition(wanted.begin(), wanted.end(), is_ipv6);
  in_port_t taken = 0;
  int error = 0;
  for (addrinfo* result : wanted) {
    if (taken) port_of(result->ai_addr) = taken;
    const int descriptor = listen_at(result->ai_addr, result->ai_addrlen);
    if (descriptor < 0) {
      error = errno;
      if (error == EADDRINUSE) return error;
      continue;  // a machine without IPv6 may have names for addresses of it
    }
    sockets_.push_back(descriptor);
    sockaddr_storage bound{};
    socklen_t length = sizeof(bound);
    getsockname(descriptor, reinterpret_cast<sockaddr*>(&bound), &length);
    taken = port_of(reinterpret_cast<sockaddr*>(&bound));
    if (is_any) break;
  }
  address_ = address_.substr(0, colon + 1) + std::to_string(ntohs(taken));
  return sockets_.empty() ? error : 0;
}

int ListeningSockets::accept(std::chrono::milliseconds timeout) {
  std::vector<pollfd> polled;
  for (const int descriptor : sockets_) polled.push_back({descriptor, POLLIN, 0});
  if (poll(polled.data(), polled.size(), static_cast<int>(timeout.count())) <= 0) return -1;
  for (size_t i = 0; i < polled.size(); ++i) {
    const pollfd& from = polled[++next_ % polled.size()];
    if (!from.revents) continue;
    const int connection = ::accept(from.fd, nullptr, nullptr);
    if (connection >= 0) {
      // Which a unix socket does not know. The second closes the connection of a host that reads nothing, as gRPC waits
      // for what it has begun to write, whoever cancels the call.
      const int yes = 1;
      setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
#ifdef TCP_USER_TIMEOUT  // of Linux
      setsockopt(connection, IPPROTO_TCP, TCP_USER_TIMEOUT, &kReadTimeout, sizeof(kReadTimeout));
#endif
      fcntl(connection, F_SETFD, FD_CLOEXEC);
      fcntl(connection, F_SETFL, O_NONBLOCK);
      return connection;
    }
    // The connection stays where it is until a descriptor is free.
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) std::this_thread::sleep_for(timeout);
  }
  return -1;
}

int max_descriptors() {
  rlimit limit{};
  const rlim_t most = std::numeric_limits<int>::max();
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<int>(std::min(limit.rlim_cur, most)) : most;
}

}  // namespace beast

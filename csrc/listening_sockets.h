// The sockets of an address that others connect to. gRPC 1.51 accepts no connection ever again once accept() has failed
// for want of descriptors (grpc issue 20418).
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace beast {

class ListeningSockets {
 public:
  // `address` is "unix:/path", whose socket of a process that was killed is replaced, or "host:port", which listens on
  // all addresses of the host; 0.0.0.0 and [::] are those of IPv4 and IPv6. Throws std::invalid_argument.
  explicit ListeningSockets(const std::string& address);
  ~ListeningSockets() { close(); }
  ListeningSockets(const ListeningSockets&) = delete;
  ListeningSockets& operator=(const ListeningSockets&) = delete;

  const std::string& address() const { return address_; }  // with the port that is taken
  // The descriptor of a connection, which the caller owns; -1 where none came within `timeout` or there is no free
  // descriptor.
  int accept(std::chrono::milliseconds timeout);
  // Frees the address, and removes the file of a unix one.
  void close();

 private:
  int listen_on_path();  // 0, or why not as in errno
  int listen_on_host();

  std::string address_;
  std::vector<int> sockets_;
  size_t next_ = 0;  // the socket that is asked first
};

// How many descriptors this process may have.
int max_descriptors();

}  // namespace beast

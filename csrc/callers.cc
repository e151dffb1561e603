#include "callers.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace beast {
namespace {

constexpr int kFreeGuesses = 20;
constexpr std::chrono::seconds kPause{1};  // for one more
constexpr size_t kMaxSources = 4096;       // that are remembered

ino_t inode_of(int descriptor) {  // 0 if it is closed
  struct stat found;
  return fstat(descriptor, &found) ? 0 : found.st_ino;
}

// The owner may close the descriptor at any moment, and another thread take its number: a copy stays what it is.
void end(int connection, ino_t inode) {
  const int copy = fcntl(connection, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return;
  if (inode_of(copy) == inode) shutdown(copy, SHUT_RDWR);
  ::close(copy);
}

void replace(std::string& text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  if (at != std::string::npos) text.replace(at, from.size(), to);
}

}  // namespace

std::string decoded_peer(std::string name) {
  replace(name, "%5B", "[");
  replace(name, "%5D", "]");
  const size_t zone = name.find('%'), end = name.find(']');  // of a link-local address
  return zone < end && end != std::string::npos ? name.erase(zone, end - zone) : name;
}

std::string peer_of(int connection) {
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  if (getpeername(connection, reinterpret_cast<sockaddr*>(&peer), &length)) return "";
  char name[INET6_ADDRSTRLEN];
  if (peer.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(peer);
    inet_ntop(AF_INET, &four.sin_addr, name, sizeof(name));
    return std::string("ipv4:") + name + ":" + std::to_string(ntohs(four.sin_port));
  }
  if (peer.ss_family != AF_INET6) return "";
  const auto& six = reinterpret_cast<const sockaddr_in6&>(peer);
  const std::string port = ":" + std::to_string(ntohs(six.sin6_port));
  if (IN6_IS_ADDR_V4MAPPED(&six.sin6_addr)) {
    inet_ntop(AF_INET, six.sin6_addr.s6_addr + 12, name, sizeof(name));
    return std::string("ipv4:") + name + port;
  }
  inet_ntop(AF_INET6, &six.sin6_addr, name, sizeof(name));
  return std::string("ipv6:[") + name + "]" + port;
}

std::string source_of(const std::string& peer) {
  const std::string host = peer.substr(0, peer.rfind(':'));
  in6_addr address;
  if (host.size() < 7 || inet_pton(AF_INET6, host.substr(6, host.size() - 7).c_str(), &address) != 1) return host;
  std::memset(address.s6_addr + 8, 0, 8);
  char network[INET6_ADDRSTRLEN];
  inet_ntop(AF_INET6, &address, network, sizeof(network));
  return std::string("ipv6:[") + network + "]/64";
}

std::string Connections::add(int connection, size_t most) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string peer = peer_of(connection);
  open_[connection] = {peer, inode_of(connection), num_added_++, peer.empty()};
  if (num_unknown() <= most) return "";
  forget_closed();
  if (num_unknown() <= most) return "";
  std::map<std::string, size_t> counts;
  for (const auto& [descriptor, open] : open_) {
    if (!open.is_known) ++counts[source_of(open.peer)];
  }
  auto yields = open_.end();
  size_t highest = 0;
  for (auto it = open_.begin(); it != open_.end(); ++it) {
    if (it->second.is_known) continue;
    const size_t count = counts[source_of(it->second.peer)];
    if (count < highest || (count == highest && it->second.number > yields->second.number)) continue;
    yields = it;
    highest = count;
  }
  end(yields->first, yields->second.inode);
  const std::string ended = yields->second.peer;
  open_.erase(yields);
  return ended;
}

void Connections::know(const std::string& peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [descriptor, open] : open_) open.is_known |= open.peer == peer;
}

void Connections::end_all() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [descriptor, open] : open_) end(descriptor, open.inode);
  open_.clear();
}

size_t Connections::num_unknown() const {
  return std::count_if(open_.begin(), open_.end(), [](const auto& each) { return !each.second.is_known; });
}

void Connections::forget_closed() {
  for (auto it = open_.begin(); it != open_.end();) {
    it = inode_of(it->first) == it->second.inode ? std::next(it) : open_.erase(it);
  }
}

bool Guesses::may_try(const std::string& source, Clock::time_point now) {
  const auto found = all_paid_.find(source);
  return found == all_paid_.end() || found->second <= now + (kFreeGuesses - 1) * kPause;
}

void Guesses::was_wrong(const std::string& source, Clock::time_point now) {
  if (all_paid_.size() >= kMaxSources) {
    for (auto it = all_paid_.begin(); it != all_paid_.end();) it = it->second <= now ? all_paid_.erase(it) : std::next(it);
    if (all_paid_.size() >= kMaxSources) all_paid_.clear();
  }
  Clock::time_point& all_paid = all_paid_[source];
  all_paid = std::max(all_paid, now) + kPause;
}

}  // namespace beast

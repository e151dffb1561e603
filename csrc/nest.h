// A nest is a leaf, a tuple of nests, or a dict of nests in the order of their keys.
#pragma once

#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace beast {

template <typename T>
class Nest {
 public:
  using Tuple = std::vector<Nest>;
  using Dict = std::map<std::string, Nest>;

  Nest() : value_(Tuple{}) {}
  Nest(T leaf) : value_(std::move(leaf)) {}
  Nest(Tuple parts) : value_(std::move(parts)) {}
  Nest(Dict parts) : value_(std::move(parts)) {}

  bool is_leaf() const { return std::holds_alternative<T>(value_); }
  bool is_tuple() const { return std::holds_alternative<Tuple>(value_); }
  bool is_dict() const { return std::holds_alternative<Dict>(value_); }
  const T& leaf() const { return std::get<T>(value_); }
  const Tuple& tuple() const { return std::get<Tuple>(value_); }
  const Dict& dict() const { return std::get<Dict>(value_); }

  // Calls function(leaf) for every leaf in order: tuples by index, dicts by key.
  template <typename Function>
  void for_each(Function&& function) const {
    if (is_leaf()) {
      function(leaf());
    } else if (is_tuple()) {
      for (const Nest& part : tuple()) part.for_each(function);
    } else {
      for (const auto& [name, part] : dict()) part.for_each(function);
    }
  }

  // A nest of the same structure whose leaves are function(leaf).
  template <typename Function>
  auto map(Function&& function) const -> Nest<std::decay_t<decltype(function(std::declval<const T&>()))>> {
    using Out = Nest<std::decay_t<decltype(function(std::declval<const T&>()))>>;
    if (is_leaf()) return Out(function(leaf()));
    if (is_tuple()) {
      typename Out::Tuple parts;
      parts.reserve(tuple().size());
      for (const Nest& part : tuple()) parts.push_back(part.map(function));
      return Out(std::move(parts));
    }
    typename Out::Dict parts;
    for (const auto& [name, part] : dict()) parts.emplace(name, part.map(function));
    return Out(std::move(parts));
  }

  std::vector<T> flatten() const {
    std::vector<T> leaves;
    for_each([&](const T& leaf) { leaves.push_back(leaf); });
    return leaves;
  }

  // A nest of this structure with `leaves` in the order of flatten(). Throws std::invalid_argument on a wrong count.
  template <typename U>
  Nest<U> pack_as(const std::vector<U>& leaves) const {
    size_t next = 0;
    for_each([&](const T&) { ++next; });
    if (next != leaves.size()) {
      throw std::invalid_argument("the nest has " + std::to_string(next) + " leaves, got " +
                                  std::to_string(leaves.size()));
    }
    next = 0;
    return map([&](const T&) { return leaves[next++]; });
  }

  // The first leaf. Throws std::invalid_argument if there is none.
  const T& front() const {
    const T* first = nullptr;
    for_each([&](const T& leaf) { first = first ? first : &leaf; });
    if (!first) throw std::invalid_argument("the nest has no leaf");
    return *first;
  }

  friend bool operator==(const Nest& a, const Nest& b) { return a.value_ == b.value_; }

 private:
  std::variant<T, Tuple, Dict> value_;
};

}  // namespace beast

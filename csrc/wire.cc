#include "wire.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>

#include "rpcenv.pb.h"

namespace beast {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::ZeroCopyInputStream;

constexpr int kMaxFields = 4096;
constexpr int kMaxDims = 30;   // numpy 1 allows 32, and two are needed for time and environment
constexpr int kMaxDepth = 32;  // of the observation's structure
constexpr size_t kMaxTextBytes = 64 << 10;
constexpr size_t kMaxNameBytes = 200;
constexpr int64_t kMaxStack = 8;  // frames of a stack

constexpr uint32_t tag_of(int field_number) {
  return WireFormatLite::MakeTag(field_number, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

// The fields that rpcenv.proto gives every row beside the observation, all of shape []. A row may have others.
const std::pair<const char*, DType> kRequired[] = {{"reward", DType::kFloat32},     {"done", DType::kBool},
                                                   {"episode_step", DType::kInt32}, {"episode_return", DType::kFloat32},
                                                   {"terminated", DType::kBool},    {"truncated", DType::kBool}};

// A name that is shown to people, and becomes part of others.
void check_name(const char* what, const std::string& name) {
  if (name.size() <= kMaxNameBytes && name.find_first_of("\n\t") == std::string::npos && readable(name) == name) return;
  throw HandshakeError(std::string(what) + " \"" + readable(name.substr(0, kMaxNameBytes)) +
                       "\" has characters that cannot be shown, or more than " + std::to_string(kMaxNameBytes) +
                       " bytes");
}

Field check_field(const rpc::Field& field, int64_t num_envs) {
  check_name("the field", field.name());
  const std::string name = "field \"" + field.name() + "\"";
  Field checked{field.name(), DType::kBool, Shape(field.shape().begin(), field.shape().end())};
  try {
    checked.dtype = dtype_from_name(field.dtype());
  } catch (const std::invalid_argument& error) {
    throw HandshakeError(name + ": " + error.what());
  }
  if (checked.shape.size() > kMaxDims) {
    throw HandshakeError(name + " has " + std::to_string(checked.shape.size()) + " dimensions, at most " +
                         std::to_string(kMaxDims) + " are allowed");
  }
  // Dimensions of size 0 count as 1 here. So the product of the others is limited, too, and never overflows later.
  int64_t bytes = num_envs * static_cast<int64_t>(item_size(checked.dtype));
  for (int64_t size : checked.shape) {
    if (size < 0) throw HandshakeError(name + " has shape " + to_string(checked.shape) + ": sizes must be 0 or more");
    if (size > kMaxRowBytes / bytes) {
      throw HandshakeError(name + " has shape " + to_string(checked.shape) + ", which for " + std::to_string(num_envs) +
                           " environments exceeds the largest row (" + std::to_string(kMaxRowBytes) +
                           " bytes): serve fewer environments per stream");
    }
    bytes *= std::max<int64_t>(size, 1);
  }
  return checked;
}

Nest<int64_t> check_structure(const rpc::Structure& structure, std::vector<bool>& used, int depth) {
  if (depth > kMaxDepth) {
    throw HandshakeError("the observation is nested deeper than " + std::to_string(kMaxDepth) + " levels");
  }
  switch (structure.kind_case()) {
    case rpc::Structure::kField: {
      const uint32_t index = structure.field();
      if (index >= used.size()) {
        throw HandshakeError("the observation uses field number " + std::to_string(index) + ", but there are only " +
                             std::to_string(used.size()) + " fields");
      }
      if (used[index]) {
        throw HandshakeError("the observation uses field number " + std::to_string(index) +
                             ", which is used already or belongs to every row (reward, done, …)");
      }
      used[index] = true;
      return Nest<int64_t>(int64_t{index});
    }
    case rpc::Structure::kTuple: {
      Nest<int64_t>::Tuple parts;
      for (const auto& part : structure.tuple().parts()) parts.push_back(check_structure(part, used, depth + 1));
      return Nest<int64_t>(std::move(parts));
    }
    case rpc::Structure::kDict: {
      Nest<int64_t>::Dict parts;
      for (const auto& [name, part] : structure.dict().parts()) {
        parts.emplace(name, check_structure(part, used, depth + 1));
      }
      return Nest<int64_t>(std::move(parts));
    }
    default:
      throw HandshakeError("a part of the observation is neither a field nor a tuple nor a dict");
  }
}

StreamSpec check_hello(const rpc::ServerHello& hello) {
  if (hello.protocol() != kProtocol) {
    throw HandshakeError("the server speaks protocol " + std::to_string(hello.protocol()) + ", the learner protocol " +
                         std::to_string(kProtocol) + ": install the same version of Beast on both sides");
  }
  StreamSpec spec;
  check_name("the environment's id", hello.env());
  spec.env = hello.env();
  spec.num_envs = hello.num_envs();
  if (spec.num_envs < 1 || spec.num_envs > kMaxEnvs) {
    throw HandshakeError("the stream has " + std::to_string(spec.num_envs) + " environments, must be 1 to " +
                         std::to_string(kMaxEnvs));
  }
  if (hello.fields_size() > kMaxFields) {
    throw HandshakeError("a row has " + std::to_string(hello.fields_size()) + " fields, at most " +
                         std::to_string(kMaxFields) + " are allowed");
  }
  std::set<std::string> names;
  for (const rpc::Field& field : hello.fields()) {
    if (!names.insert(field.name()).second) throw HandshakeError("two fields are called \"" + field.name() + "\"");
    spec.fields.push_back(check_field(field, spec.num_envs));
  }
  if (const size_t bytes = row_bytes(spec); bytes > size_t{kMaxRowBytes}) {  // of 4096 fields below 2 GiB each
    throw HandshakeError("a row has " + std::to_string(bytes) + " bytes, at most " + std::to_string(kMaxRowBytes) +
                         " are allowed: serve fewer environments per stream");
  }
  std::vector<bool> used(spec.fields.size(), false);
  for (const auto& [name, dtype] : kRequired) {
    const int64_t index = spec.index_of(name);
    if (index < 0) throw HandshakeError(std::string("a row has no field \"") + name + "\", which every row must have");
    const Field& field = spec.fields[index];
    if (field.dtype != dtype || !field.shape.empty()) {
      throw HandshakeError(std::string("field \"") + name + "\" is " + dtype_name(field.dtype) + " of shape " +
                           to_string(field.shape) + ", expected " + dtype_name(dtype) + " of shape []");
    }
    used[index] = true;
  }
  spec.observation = check_structure(hello.observation(), used, 1);
  spec.takes_any_action = hello.action().dtype().empty();
  if (!spec.takes_any_action) spec.action = check_field(hello.action(), spec.num_envs);
  spec.observation_space = hello.observation_space();
  spec.action_space = hello.action_space();
  spec.frames_per_step = std::max<int64_t>(hello.frames_per_step(), 1);
  return spec;
}

[[noreturn]] void throw_malformed() {
  throw ConnectionError("received a message that is not one of rpcenv.proto: is this an environment server?");
}

[[noreturn]] void throw_damaged() {
  throw ConnectionError("received a deflated row that is damaged, or not of the length that the hello announced");
}

// Inflates into `into`, and throws if it does not fit. Returns the length.
size_t inflate(const std::string& deflated, std::vector<char>& into) {
  uLongf size = into.size();
  uLong used = deflated.size();
  const int result = uncompress2(reinterpret_cast<Bytef*>(into.data()), &size,
                                 reinterpret_cast<const Bytef*>(deflated.data()), &used);
  if (result != Z_OK || used != deflated.size()) throw_damaged();
  return size;
}

// to[i] = a[i] XOR b[i], eight bytes at a time.
void exclusive_or(const std::byte* a, const char* b, size_t size, std::byte* to) {
  size_t i = 0;
  for (; i + 8 <= size; i += 8) {
    uint64_t x, y;
    std::memcpy(&x, a + i, 8);
    std::memcpy(&y, b + i, 8);
    x ^= y;
    std::memcpy(to + i, &x, 8);
  }
  for (; i < size; ++i) to[i] = a[i] ^ std::byte(b[i]);
}

// Bytes of a frame, where the field is a stack of the newest frames, newest last; else 0. wire.py has the same rule.
size_t frame_bytes(const Field& field) {
  const bool is_stack = field.dtype == DType::kUInt8 && field.shape.size() == 3 && field.shape[0] >= 2 &&
                        field.shape[0] <= kMaxStack;
  return is_stack ? static_cast<size_t>(field.shape[1] * field.shape[2]) : 0;
}

void fill(rpc::Array& message, const Array& array) {
  message.set_dtype(dtype_name(array.dtype()));
  message.mutable_shape()->Add(array.shape().begin(), array.shape().end());
  message.set_data(array.data(), array.num_bytes());
}

// Adds the arrays of a nest to the message's parts, and returns how they are nested.
rpc::Structure add_parts(const Nest<Array>& nest, rpc::Array& message) {
  rpc::Structure structure;
  if (nest.is_leaf()) {
    structure.set_field(message.parts_size());
    fill(*message.add_parts(), nest.leaf());
  } else if (nest.is_tuple()) {
    auto* parts = structure.mutable_tuple()->mutable_parts();
    for (const Nest<Array>& part : nest.tuple()) *parts->Add() = add_parts(part, message);
  } else {
    auto* parts = structure.mutable_dict()->mutable_parts();
    for (const auto& [name, part] : nest.dict()) (*parts)[name] = add_parts(part, message);
  }
  return structure;
}

// The number of bytes of the UTF-8 character that begins at `text`, or 0 if it is not valid.
size_t utf8_length(const unsigned char* text, size_t available) {
  const unsigned char first = text[0];
  if (first < 0x80) return 1;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || length > available) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((text[i] & 0xc0) != 0x80) return 0;
  }
  const unsigned char second = text[1];  // no overlong forms, no surrogates, nothing above U+10FFFF
  if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f)) return 0;
  if ((first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f)) return 0;
  return length;
}

}  // namespace

std::vector<std::string> required_fields() {
  std::vector<std::string> names;
  for (const auto& [name, dtype] : kRequired) names.push_back(name);
  return names;
}

std::string learner_hello(uint64_t seed, const std::string& env, bool only_hello, const std::string& progress) {
  rpc::LearnerHello hello;
  hello.set_protocol(kProtocol);
  hello.set_seed(seed);
  hello.set_env(env);
  hello.set_only_hello(only_hello);
  hello.set_progress(progress);
  return hello.SerializeAsString();
}

std::string authorization(const std::string& token) { return "Bearer " + token; }

std::string actions_message(const Nest<Array>& actions, const std::string& progress) {
  rpc::Array message;
  message.set_progress(progress);
  if (actions.is_leaf()) {
    fill(message, actions.leaf());
  } else {
    *message.mutable_structure() = add_parts(actions, message);
  }
  return message.SerializeAsString();
}

StreamSpec read_hello(ZeroCopyInputStream* input, size_t length) {
  if (length > kMaxHelloBytes) {
    throw HandshakeError("the server's hello has " + std::to_string(length) + " bytes, at most " +
                         std::to_string(kMaxHelloBytes) + " are allowed");
  }
  rpc::FromServer message;
  if (!message.ParseFromZeroCopyStream(input)) throw_malformed();
  if (message.has_error()) throw EnvError(readable(message.error()));
  if (!message.has_hello()) throw HandshakeError("the server's first message is not its hello");
  return check_hello(message.hello());
}

std::vector<size_t> field_bytes(const StreamSpec& spec) {
  std::vector<size_t> sizes;
  for (const Field& field : spec.fields) {
    sizes.push_back(spec.num_envs * num_items(field.shape) * item_size(field.dtype));
  }
  return sizes;
}

size_t row_bytes(const StreamSpec& spec) {
  const std::vector<size_t> sizes = field_bytes(spec);
  return std::accumulate(sizes.begin(), sizes.end(), size_t{0});
}

RowReader::RowReader(const StreamSpec& spec)
    : num_envs_(spec.num_envs), sizes_(field_bytes(spec)), stacks_(sizes_.size()) {
  for (const Field& field : spec.fields) frames_.push_back(frame_bytes(field));
}

// Checks the lengths of what the first `length` bytes of `packed_` hold (rpcenv.proto), or writes it to the destinations.
void RowReader::unpack(size_t length, const std::vector<std::byte*>& destinations, bool writes) const {
  const char* next = packed_.data();
  const char* const end = next + length;
  const auto take = [&](size_t size) {
    if (size > static_cast<size_t>(end - next)) throw_damaged();
    return std::exchange(next, next + size);
  };
  for (size_t i = 0; i < sizes_.size(); ++i) {
    std::byte* to = destinations[i];
    if (!frames_[i]) {
      const char* from = take(sizes_[i]);
      if (writes && sizes_[i]) std::memcpy(to, from, sizes_[i]);
      continue;
    }
    const size_t stack = sizes_[i] / num_envs_, frame = frames_[i];
    const char* are_shifted = take(num_envs_);
    for (size_t env = 0; env < num_envs_; ++env, to += stack) {
      const bool is_shifted = are_shifted[env] != 0;
      if (is_shifted && (are_shifted[env] != 1 || stacks_[i].empty())) throw_damaged();
      const char* from = take(is_shifted ? frame : stack);
      if (!writes) continue;
      if (!is_shifted) {
        std::memcpy(to, from, stack);
        continue;
      }
      const std::byte* last = stacks_[i].data() + env * stack;
      std::memcpy(to, last + frame, stack - frame);
      exclusive_or(last + stack - frame, from, frame, to + stack - frame);
    }
  }
  if (next != end) throw_damaged();
}

std::string RowReader::read(ZeroCopyInputStream* input, size_t length, const std::vector<std::byte*>& destinations) {
  const size_t row_bytes = std::accumulate(sizes_.begin(), sizes_.end(), size_t{0});
  CodedInputStream coded(input);
  bool found = false;
  std::string metrics;
  while (const uint32_t tag = coded.ReadTag()) {
    uint32_t size = 0;
    switch (tag) {
      case tag_of(rpc::FromServer::kRowFieldNumber):
        if (found) throw ConnectionError("received two rows in one message");
        if (!coded.ReadVarint32(&size)) throw_malformed();
        if (size != row_bytes) {
          throw ConnectionError("received a row of " + std::to_string(size) + " bytes, but the hello announced " +
                                std::to_string(row_bytes));
        }
        if (length - coded.CurrentPosition() < row_bytes) throw ConnectionError("received a message that is cut off");
        for (size_t i = 0; i < sizes_.size(); ++i) {
          if (sizes_[i] && !coded.ReadRaw(destinations[i], static_cast<int>(sizes_[i]))) throw_malformed();
          stacks_[i].clear();
        }
        found = true;
        break;
      case tag_of(rpc::FromServer::kDeflatedFieldNumber): {
        if (found) throw ConnectionError("received two rows in one message");
        std::string deflated;
        if (!coded.ReadVarint32(&size) || size > length - coded.CurrentPosition() ||
            !coded.ReadString(&deflated, static_cast<int>(size))) {
          throw_malformed();
        }
        const size_t num_stacks = std::count_if(frames_.begin(), frames_.end(), [](size_t frame) { return frame > 0; });
        packed_.resize(row_bytes + num_stacks * num_envs_);
        const size_t packed = inflate(deflated, packed_);
        unpack(packed, destinations, false);
        unpack(packed, destinations, true);
        for (size_t i = 0; i < sizes_.size(); ++i) {
          if (frames_[i]) stacks_[i].assign(destinations[i], destinations[i] + sizes_[i]);
        }
        found = true;
        break;
      }
      case tag_of(rpc::FromServer::kErrorFieldNumber): {
        std::string text;
        // Within the message, whose length is limited, so that no more memory is taken than has come.
        if (!coded.ReadVarint32(&size) || size > length - coded.CurrentPosition() ||
            !coded.ReadString(&text, static_cast<int>(size))) {
          throw_malformed();
        }
        throw EnvError(readable(text));
      }
      case tag_of(rpc::FromServer::kMetricsFieldNumber):
        if (!coded.ReadVarint32(&size)) throw_malformed();
        if (size > kMaxMetricsBytes) {
          throw ConnectionError("received metrics of " + std::to_string(size) + " bytes, at most " +
                                std::to_string(kMaxMetricsBytes) + " are allowed");
        }
        if (!coded.ReadString(&metrics, static_cast<int>(size))) throw_malformed();
        break;
      case tag_of(rpc::FromServer::kHelloFieldNumber):
        throw ConnectionError("received a second hello instead of a row");
      default:
        if (!WireFormatLite::SkipField(&coded, tag)) throw_malformed();
    }
  }
  if (!coded.ConsumedEntireMessage()) throw_malformed();
  if (!found) throw ConnectionError("received an empty message instead of a row");
  return metrics;
}

std::string readable(const std::string& text) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  std::string result;
  for (size_t i = text.size() > kMaxTextBytes ? text.size() - kMaxTextBytes : 0; i < text.size();) {
    const size_t length = utf8_length(bytes + i, text.size() - i);
    // Of one byte, or U+0080 to U+009F of two, which some terminals obey too.
    const bool control =
        (length == 1 && (bytes[i] < 0x20 || bytes[i] == 0x7f) && bytes[i] != '\n' && bytes[i] != '\t') ||
        (length == 2 && bytes[i] == 0xc2 && bytes[i + 1] < 0xa0);
    result += length == 0 || control ? "?" : text.substr(i, length);
    i += std::max<size_t>(length, 1);
  }
  return result;
}

}  // namespace beast

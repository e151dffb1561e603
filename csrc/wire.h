// Encodes and decodes the learner's side of rpcenv.proto. Knows protobuf, but no transport.
#pragma once

#include <google/protobuf/io/zero_copy_stream.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "array.h"
#include "env_stream.h"
#include "nest.h"

namespace beast {

inline constexpr uint32_t kProtocol = 6;
inline constexpr int64_t kMaxEnvs = 65536;           // of one stream
inline constexpr int64_t kMaxRowBytes = 0x7ff00000;  // just below 2 GiB, protobuf's limit
inline constexpr int64_t kMaxMessageBytes = 0x7fffffff;
inline constexpr size_t kMaxHelloBytes = 1 << 20;
inline constexpr size_t kMaxErrorBytes = 64 << 10;  // of a message beside a row: an environment's traceback
inline constexpr size_t kMaxMetricsBytes = 32 << 10;  // of one row
inline constexpr size_t kMaxProgressBytes = 4000;     // headers have 8 KB

// The names of the fields that ServerHello requires of every row, in the order that env_outputs have by default.
std::vector<std::string> required_fields();

// The values of the headers of a call: `hello-bin` and `authorization`.
std::string learner_hello(uint64_t seed, const std::string& env, bool only_hello, const std::string& progress = "");
std::string authorization(const std::string& token);
std::string actions_message(const Nest<Array>& actions, const std::string& progress = "");

// Reads the server's first message, which has `length` bytes, and checks everything that the memory layout depends on.
// Throws HandshakeError if it cannot be used, EnvError if it is an environment's traceback.
StreamSpec read_hello(google::protobuf::io::ZeroCopyInputStream* input, size_t length);

// Bytes of each field of a row, for all K environments.
std::vector<size_t> field_bytes(const StreamSpec& spec);
size_t row_bytes(const StreamSpec& spec);

// Reads the rows of one stream, in their order.
class RowReader {
 public:
  explicit RowReader(const StreamSpec& spec);

  // Reads a row from a message of `length` bytes: field i goes straight to destinations[i], or through memory of a row's
  // size where the row is deflated. Checks the lengths before it writes. Throws ConnectionError if the message is not
  // such a row, EnvError if it is an environment's traceback. Returns the metrics that came with the row, or "".
  std::string read(google::protobuf::io::ZeroCopyInputStream* input, size_t length,
                   const std::vector<std::byte*>& destinations);

 private:
  void unpack(size_t length, const std::vector<std::byte*>& destinations, bool writes) const;

  size_t num_envs_;
  std::vector<size_t> sizes_;                   // bytes of each field
  std::vector<size_t> frames_;                  // bytes of one frame of it; 0 where it is no stack of frames
  std::vector<std::vector<std::byte>> stacks_;  // of the last row, if that was deflated
  std::vector<char> packed_;                    // what was behind zlib, kept as fresh memory would cost more than zlib
};

// Makes text from another host safe to show: valid UTF-8 without control characters, at most the last 64 KiB.
std::string readable(const std::string& text);

}  // namespace beast

// The messages of rpcenv.proto as bytes: what the learner writes and reads. Knows protobuf, but not what carries it.
#pragma once

#include <google/protobuf/io/zero_copy_stream.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "array.h"
#include "env_stream.h"

namespace beast {

inline constexpr uint32_t kProtocol = 1;
inline constexpr int64_t kMaxEnvs = 65536;           // of one stream
inline constexpr int64_t kMaxRowBytes = 0x7ff00000;  // just below 2 GiB, where protobuf's lengths end
inline constexpr int64_t kMaxMessageBytes = 0x7fffffff;
inline constexpr size_t kMaxHelloBytes = 16 << 20;

std::string learner_hello(const std::string& token, uint64_t seed, const std::string& env, bool only_hello);
std::string actions_message(const Array& actions);

// Reads the server's first message, of `length` bytes, and checks all that memory will be laid out by.
// Throws HandshakeError if it cannot be used, EnvError if it is an environment's traceback.
StreamSpec read_hello(google::protobuf::io::ZeroCopyInputStream* input, size_t length);

// Bytes of each field of a row: K environments of it.
std::vector<size_t> field_bytes(const StreamSpec& spec);

// Reads a row, from a message of `length` bytes, straight into the destinations, each of as many bytes as `sizes` says.
// The lengths are compared before any destination is touched. Throws ConnectionError if the message is no such row,
// EnvError if it is an environment's traceback.
void read_row(google::protobuf::io::ZeroCopyInputStream* input, size_t length, const std::vector<size_t>& sizes,
              const std::vector<std::byte*>& destinations);

// Text from another host as it may be shown: valid UTF-8, of bounded length (its end is kept).
std::string readable(const std::string& text);

}  // namespace beast

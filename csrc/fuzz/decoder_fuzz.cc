// libFuzzer target for the decoder of env servers' messages (csrc/wire.h). Whatever bytes a server sends, the learner
// must not crash, must not allocate more than the bytes justify, and must not write to a rollout unless a whole row is
// there.
//
// The input is split into a stream of messages. Its first byte is the size of the pieces in which the messages arrive.
// Each message follows its length in two bytes. The first message is read as a hello, the others as rows.
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/stubs/common.h>
#if GOOGLE_PROTOBUF_VERSION < 4022000
#include <google/protobuf/stubs/logging.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../wire.h"
#include "rpcenv.pb.h"

using google::protobuf::io::ArrayInputStream;

namespace {

constexpr int64_t kMaxRow = 1 << 16;  // bytes; with larger rows only the hello is tested, to save time
constexpr auto kUntouched = std::byte{0xab};

struct Message {
  const uint8_t* data;
  size_t size;
};

Message next_message(const uint8_t*& data, size_t& size) {
  size_t length = size;  // a message without a length extends to the end
  if (size >= 2) {
    length = std::min<size_t>(data[0] | data[1] << 8, size - 2);
    data += 2;
    size -= 2;
  }
  const Message message{data, length};
  data += length;
  size -= length;
  return message;
}

void require(bool condition) {
  if (!condition) std::abort();
}

// Whether the message contains the row's bytes in one piece.
bool holds(const Message& message, const std::vector<std::byte>& row) {
  const auto* begin = reinterpret_cast<const std::byte*>(message.data);
  return std::search(begin, begin + message.size, row.begin(), row.end()) != begin + message.size || row.empty();
}

// Whether the message has a row behind zlib, whose bytes it need not contain.
bool is_deflated(const Message& message) {
  beast::rpc::FromServer parsed;
  parsed.ParseFromArray(message.data, static_cast<int>(message.size));
  return !parsed.deflated().empty();
}

void read_rows(const beast::StreamSpec& spec, const uint8_t* data, size_t size, int piece) {
  const std::vector<size_t> sizes = beast::field_bytes(spec);
  size_t row_bytes = 0;
  for (size_t bytes : sizes) row_bytes += bytes;
  if (row_bytes > kMaxRow) return;
  beast::RowReader rows(spec);
  while (size > 0) {
    const Message message = next_message(data, size);
    std::vector<std::vector<std::byte>> fields;  // separate allocations, so that the sanitizer sees an overrun
    std::vector<std::byte*> destinations;
    for (size_t bytes : sizes) fields.emplace_back(bytes, kUntouched);
    for (auto& field : fields) destinations.push_back(field.data());
    bool was_read = true;
    try {
      ArrayInputStream input(message.data, static_cast<int>(message.size), piece);
      rows.read(&input, message.size, destinations);
    } catch (const beast::ConnectionError& error) {
      was_read = false;
      require(beast::readable(error.what()) == error.what());
    }
    std::vector<std::byte> row;
    for (const auto& field : fields) row.insert(row.end(), field.begin(), field.end());
    const bool untouched = std::all_of(row.begin(), row.end(), [](std::byte byte) { return byte == kUntouched; });
    // A message that is refused for what follows its row has been written, too.
    require(holds(message, row) || is_deflated(message) || (!was_read && untouched));
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
#if GOOGLE_PROTOBUF_VERSION < 4022000
  google::protobuf::SetLogHandler(nullptr);  // it logs every string that is not UTF-8
#endif
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const int piece = 1 + *data;
  ++data, --size;
  const Message first = next_message(data, size);
  beast::StreamSpec spec;
  try {
    ArrayInputStream input(first.data, static_cast<int>(first.size), piece);
    spec = beast::read_hello(&input, first.size);
  } catch (const beast::ConnectionError& error) {
    return 0;
  } catch (const beast::HandshakeError& error) {
    return 0;
  }
  require(spec.num_envs >= 1 && spec.num_envs <= beast::kMaxEnvs);
  int64_t row_bytes = 0;
  for (size_t bytes : beast::field_bytes(spec)) row_bytes += static_cast<int64_t>(bytes);
  require(row_bytes > 0 && row_bytes <= beast::kMaxRowBytes);
  std::vector<int64_t> indices = spec.observation.flatten();
  std::sort(indices.begin(), indices.end());
  require(std::adjacent_find(indices.begin(), indices.end()) == indices.end());
  for (int64_t index : indices) require(index >= 0 && index < static_cast<int64_t>(spec.fields.size()));
  for (const std::string& name : beast::required_fields()) require(spec.index_of(name) >= 0);
  require(spec.frames_per_step >= 1);
  read_rows(spec, data, size, piece);
  return 0;
}

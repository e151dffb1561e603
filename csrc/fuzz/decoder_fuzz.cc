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
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
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

using Row = std::vector<std::vector<std::byte>>;  // its fields

// The row that a message has behind zlib, read the plain way; none if it has no such row. `last` is the row before, if
// that was behind zlib, too.
std::optional<Row> deflated_row(const beast::StreamSpec& spec, const Message& message, const std::optional<Row>& last) {
  beast::rpc::FromServer parsed;
  parsed.ParseFromArray(message.data, static_cast<int>(message.size));
  std::vector<Bytef> data(2 * kMaxRow);  // no row is longer
  uLongf size = data.size();
  uLong used = parsed.deflated().size();
  const auto* deflated = reinterpret_cast<const Bytef*>(parsed.deflated().data());
  if (uncompress2(data.data(), &size, deflated, &used) != Z_OK || used != parsed.deflated().size()) return {};
  data.resize(size);
  size_t next = 0;
  bool is_short = false;
  const auto take = [&](size_t count) {
    std::vector<std::byte> taken;
    for (; count > 0 && next < data.size(); --count) taken.push_back(std::byte(data[next++]));
    is_short |= count > 0;
    return taken;
  };
  Row row;
  for (const beast::Field& field : spec.fields) {
    const size_t bytes = beast::num_items(field.shape) * beast::item_size(field.dtype);
    const bool is_stack = field.dtype == beast::DType::kUInt8 && field.shape.size() == 3 && field.shape[0] > 1 &&
                          field.shape[0] < 9 && bytes > 0;
    const size_t frame = is_stack ? bytes / field.shape[0] : 0;
    const std::vector<std::byte> flags = is_stack ? take(spec.num_envs) : std::vector<std::byte>(spec.num_envs);
    if (is_short) return {};
    std::vector<std::byte> whole;
    for (size_t env = 0; env < flags.size(); ++env) {
      const bool is_shifted = flags[env] == std::byte{1};
      if (flags[env] > std::byte{1} || (is_shifted && !last)) return {};
      std::vector<std::byte> part = take(is_shifted ? frame : bytes);
      if (is_short) return {};
      if (is_shifted) {
        const std::byte* before = (*last)[row.size()].data() + env * bytes;
        for (size_t i = 0; i < frame; ++i) part[i] ^= before[bytes - frame + i];
        part.insert(part.begin(), before + frame, before + bytes);
      }
      whole.insert(whole.end(), part.begin(), part.end());
    }
    row.push_back(whole);
  }
  if (next != data.size()) return {};
  return row;
}

void read_rows(const beast::StreamSpec& spec, const uint8_t* data, size_t size, int piece) {
  const std::vector<size_t> sizes = beast::field_bytes(spec);
  size_t row_bytes = 0;
  for (size_t bytes : sizes) row_bytes += bytes;
  if (row_bytes > kMaxRow) return;
  beast::RowReader rows(spec);
  std::optional<Row> last;
  while (size > 0) {
    const Message message = next_message(data, size);
    Row fields;  // separate allocations, so that the sanitizer sees an overrun
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
    last = deflated_row(spec, message, last);
    const bool is_row = holds(message, row) || (last && *last == fields);
    if (was_read) {
      require(is_row);
      continue;
    }
    // A message that is refused for what follows its row has been written, too. Of two deflated rows `last` is the other.
    constexpr uint8_t kDeflatedTag = 5 << 3 | 2;
    require(untouched || is_row || std::count(message.data, message.data + message.size, kDeflatedTag) > 1);
    return;  // the stream ends
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

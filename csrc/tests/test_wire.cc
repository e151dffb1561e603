// The encoder and the decoder. csrc/fuzz feeds the decoder arbitrary bytes; the Python tests cover its error messages.
#include "wire.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include "rpcenv.pb.h"

namespace beast {
namespace {

using google::protobuf::io::ArrayInputStream;

constexpr auto kUntouched = std::byte{0xab};

rpc::FromServer hello() {
  rpc::FromServer message;
  rpc::ServerHello& hello = *message.mutable_hello();
  hello.set_protocol(kProtocol);
  hello.set_num_envs(2);
  const auto add = [&](const char* name, const char* dtype) {
    rpc::Field& field = *hello.add_fields();
    field.set_name(name);
    field.set_dtype(dtype);
  };
  add("x", "int16");
  add("reward", "float32");
  for (const char* name : {"done", "terminated", "truncated"}) add(name, "bool");
  add("episode_return", "float32");
  add("episode_step", "int32");
  hello.mutable_observation()->set_field(0);
  return message;
}

constexpr size_t kRowBytes = 2 * (2 + 4 + 3 + 4 + 4);

StreamSpec decoded(const rpc::FromServer& message) {
  const std::string bytes = message.SerializeAsString();
  ArrayInputStream input(bytes.data(), static_cast<int>(bytes.size()));
  return read_hello(&input, bytes.size());
}

std::string row_message(size_t size) {
  rpc::FromServer message;
  for (size_t i = 0; i < size; ++i) message.mutable_row()->push_back(static_cast<char>(i));
  return message.SerializeAsString();
}

struct Memory {
  std::vector<std::vector<std::byte>> fields;
  std::vector<std::byte*> destinations;

  explicit Memory(const std::vector<size_t>& sizes) {
    for (size_t size : sizes) fields.emplace_back(size, kUntouched);
    for (auto& field : fields) destinations.push_back(field.data());
  }

  bool untouched() const {
    for (const auto& field : fields) {
      for (std::byte byte : field) {
        if (byte != kUntouched) return false;
      }
    }
    return true;
  }
};

std::string read(RowReader& rows, const std::string& bytes, Memory& memory, int piece = -1) {
  ArrayInputStream input(bytes.data(), static_cast<int>(bytes.size()), piece);
  return rows.read(&input, bytes.size(), memory.destinations);
}

// The first row of a stream.
std::string read(const std::string& bytes, Memory& memory, int piece = -1) {
  RowReader rows(decoded(hello()));
  return read(rows, bytes, memory, piece);
}

TEST(Wire, FieldsOfARowArriveWholeHoweverItsBytesAreDivided) {
  const std::vector<size_t> sizes = field_bytes(decoded(hello()));
  ASSERT_EQ(sizes, (std::vector<size_t>{4, 8, 2, 2, 2, 8, 8}));
  for (int piece : {-1, 1, 2, 3, 7, 1000}) {
    Memory memory(sizes);
    read(row_message(kRowBytes), memory, piece);
    size_t next = 0;
    for (const auto& field : memory.fields) {
      for (std::byte byte : field) EXPECT_EQ(byte, std::byte(next++));
    }
  }
}

TEST(Wire, AServerThatDoesNotKnowItsFramesAStepHasOne) {
  rpc::FromServer message = hello();
  EXPECT_EQ(decoded(message).frames_per_step, 1);
  message.mutable_hello()->set_frames_per_step(4);
  EXPECT_EQ(decoded(message).frames_per_step, 4);
  EXPECT_EQ(difference(decoded(message), decoded(hello())), "4 frames a step instead of 1");
}

TEST(Wire, MemoryIsNotTouchedByARowOfAnotherLength) {
  const std::vector<size_t> sizes = field_bytes(decoded(hello()));
  for (size_t size : {size_t{0}, size_t{1}, kRowBytes - 1, kRowBytes + 1, 2 * kRowBytes, size_t{1} << 20}) {
    Memory memory(sizes);
    EXPECT_THROW(read(row_message(size), memory), ConnectionError);
    EXPECT_TRUE(memory.untouched());
  }
}

TEST(Wire, MemoryIsNotTouchedByARowThatIsCutOff) {
  const std::vector<size_t> sizes = field_bytes(decoded(hello()));
  const std::string whole = row_message(kRowBytes);
  for (size_t size = 0; size < whole.size(); ++size) {
    Memory memory(sizes);
    EXPECT_THROW(read(whole.substr(0, size), memory), ConnectionError);
    EXPECT_TRUE(memory.untouched());
  }
}

std::string deflated_message(const std::string& row) {
  std::string deflated(compressBound(row.size()), '\0');
  uLongf size = deflated.size();
  compress(reinterpret_cast<Bytef*>(deflated.data()), &size, reinterpret_cast<const Bytef*>(row.data()), row.size());
  rpc::FromServer message;
  message.set_deflated(deflated.substr(0, size));
  return message.SerializeAsString();
}

TEST(Wire, ADeflatedRowArrivesAsItWasAndOneThatIsDamagedOrOfAnotherLengthDoesNotTouchMemory) {
  const std::vector<size_t> sizes = field_bytes(decoded(hello()));
  std::string row;
  for (size_t i = 0; i < kRowBytes; ++i) row.push_back(static_cast<char>(i));
  const std::string whole = deflated_message(row);
  for (int piece : {-1, 1, 7}) {
    Memory memory(sizes);
    read(whole, memory, piece);
    size_t next = 0;
    for (const auto& field : memory.fields) {
      for (std::byte byte : field) EXPECT_EQ(byte, std::byte(next++));
    }
  }
  Memory memory(sizes);
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW(read(whole.substr(0, size), memory), ConnectionError);
  }
  std::string damaged = whole;
  damaged[whole.size() - 1] ^= 1;  // of the checksum
  const std::string bomb(size_t{64} << 20, 'x');
  for (const std::string& bad : {damaged, deflated_message(row + "x"), deflated_message(row.substr(1)),
                                 deflated_message(""), deflated_message(bomb)}) {
    EXPECT_THROW(read(bad, memory), ConnectionError);
  }
  EXPECT_TRUE(memory.untouched());
  for (const std::string& twice : {row_message(kRowBytes) + whole, whole + row_message(kRowBytes), whole + whole}) {
    EXPECT_THROW(read(twice, memory), ConnectionError);
  }
}

TEST(Wire, OfAStackThatHasShiftedComesTheNewestFrameAndAnythingElseDoesNotTouchMemory) {
  rpc::FromServer message = hello();
  rpc::Field& field = *message.mutable_hello()->mutable_fields(0);  // of two environments: 3 frames of 4 bytes
  field.set_dtype("uint8");
  for (int64_t size : {3, 2, 2}) field.add_shape(size);
  const StreamSpec spec = decoded(message);
  const std::string rest(kRowBytes - 4, '\5'), first = "aaaabbbbccccAAAABBBBCCCC";
  const auto flags = [](char a, char b) { return std::string{a, b}; };
  const auto stacks = [](const Memory& memory) {
    return std::string(reinterpret_cast<const char*>(memory.fields[0].data()), memory.fields[0].size());
  };
  RowReader rows(spec);
  Memory memory(field_bytes(spec));
  const std::string shifted = deflated_message(flags(1, 0) + std::string("\0\1\0\0", 4) + "AAAAAAAAAAAA" + rest);
  EXPECT_THROW(read(rows, shifted, memory), ConnectionError) << "there is none before";
  for (const std::string& bad : {first + rest, flags(0, 2) + first + rest, flags(0, 0) + first + rest + "x",
                                 flags(0, 0) + first + rest.substr(1), flags(0, 0), std::string(1, '\0')}) {
    EXPECT_THROW(read(rows, deflated_message(bad), memory), ConnectionError);
  }
  EXPECT_TRUE(memory.untouched());
  read(rows, deflated_message(flags(0, 0) + first + rest), memory);
  EXPECT_EQ(stacks(memory), first);
  EXPECT_EQ(memory.fields[6].back(), std::byte{5});

  Memory second(field_bytes(spec));
  for (const std::string& bad : {flags(1, 1) + "1234123" + rest.substr(1), flags(1, 1) + "12341234x" + rest,
                                 flags(1, 2) + "1234" + first.substr(12) + rest}) {
    EXPECT_THROW(read(rows, deflated_message(bad), second), ConnectionError);
  }
  EXPECT_TRUE(second.untouched());
  read(rows, shifted, second);
  EXPECT_EQ(stacks(second), "bbbbcccccbccAAAAAAAAAAAA");
  read(rows, deflated_message(flags(1, 1) + std::string(8, '\0') + rest), memory);
  EXPECT_EQ(stacks(memory), "cccccbcccbccAAAAAAAAAAAA");

  rpc::FromServer plain;
  plain.set_row(first + rest);
  read(rows, plain.SerializeAsString(), memory);
  EXPECT_EQ(stacks(memory), first);
  EXPECT_THROW(read(rows, shifted, memory), ConnectionError) << "the last message was not deflated";
}

TEST(Wire, MetricsComeWithARowAndTakeNoMoreMemoryThanTheyMay) {
  const std::vector<size_t> sizes = field_bytes(decoded(hello()));
  const auto message = [](const std::string& metrics) {
    rpc::FromServer more;
    more.set_metrics(metrics);
    return row_message(kRowBytes) + more.SerializeAsString();
  };
  for (int piece : {-1, 1, 7}) {
    Memory memory(sizes);
    EXPECT_EQ(read(message(std::string(kMaxMetricsBytes, 'x')), memory, piece),
              std::string(kMaxMetricsBytes, 'x'));
    EXPECT_FALSE(memory.untouched());
    EXPECT_EQ(read(row_message(kRowBytes), memory, piece), "");
  }
  Memory memory(sizes);
  EXPECT_THROW(read(message(std::string(kMaxMetricsBytes + 1, 'x')), memory), ConnectionError);
  const std::string cut = message("abcdef");
  EXPECT_THROW(read(cut.substr(0, cut.size() - 1), memory), ConnectionError);
  rpc::FromServer alone;
  alone.set_metrics("{}");
  EXPECT_THROW(read(alone.SerializeAsString(), memory), ConnectionError) << "there is no row";
}

TEST(Wire, ErrorsOfAnEnvironmentAreReadable) {
  rpc::FromServer message;
  message.set_error(
      "Traceback: F\xc3\xbc\xc3\x9f"
      "e");
  Memory memory(field_bytes(decoded(hello())));
  try {
    read(message.SerializeAsString(), memory);
    FAIL();
  } catch (const EnvError& error) {
    EXPECT_STREQ(error.what(), "Traceback: Füße");
  }
  EXPECT_EQ(readable("a\xff\xc3(\xed\xa0\x80\x01z\n"), std::string("a?") + "?(?" + "???z\n");
  EXPECT_EQ(readable("\x1b]0;title\x07 \x7f \xc2\x9b"
                     "1m\xc2\xa0"),
            std::string("?]0;title? ? ?1m\xc2\xa0"));
  EXPECT_EQ(readable(std::string(1 << 20, 'x') + "the end").substr(65529), "the end");
}

TEST(Wire, ActionsAndHelloOfTheLearnerAreMessagesOfTheProto) {
  Array actions = Array::allocate(DType::kInt64, {2, 1});
  reinterpret_cast<int64_t*>(actions.data())[0] = 3;
  reinterpret_cast<int64_t*>(actions.data())[1] = -1;
  rpc::Array message;
  ASSERT_TRUE(message.ParseFromString(actions_message(actions)));
  EXPECT_EQ(message.dtype(), "int64");
  EXPECT_EQ(message.shape_size(), 2);
  EXPECT_EQ(message.data(), std::string("\3\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", 16));
  EXPECT_FALSE(message.has_structure());

  const Nest<Array> nest = Nest<Array>::Tuple{
      Nest<Array>::Dict{{"b", actions}, {"a", Array::allocate(DType::kBool, {2})}}, Nest<Array>::Tuple{}};
  ASSERT_TRUE(message.ParseFromString(actions_message(nest)));
  ASSERT_EQ(message.parts_size(), 2);
  EXPECT_EQ(message.parts(0).dtype(), "bool");
  EXPECT_EQ(message.parts(1).data().size(), 16u);
  const auto& parts = message.structure().tuple().parts();
  ASSERT_EQ(parts.size(), 2);
  EXPECT_EQ(parts[0].dict().parts().at("a").field(), 0u);
  EXPECT_EQ(parts[0].dict().parts().at("b").field(), 1u);
  EXPECT_TRUE(parts[1].has_tuple());
  rpc::LearnerHello hello;
  ASSERT_TRUE(hello.ParseFromString(learner_hello(7, "Pong", true)));
  EXPECT_EQ(hello.protocol(), kProtocol);
  EXPECT_EQ(hello.env(), "Pong");
  EXPECT_EQ(hello.seed(), 7u);
  EXPECT_TRUE(hello.only_hello());
  EXPECT_EQ(hello.progress(), "");
  ASSERT_TRUE(hello.ParseFromString(learner_hello(7, "Pong", true, "far")));
  EXPECT_EQ(hello.progress(), "far");
  ASSERT_TRUE(message.ParseFromString(actions_message(actions, "farther")));
  EXPECT_EQ(message.progress(), "farther");
}

}  // namespace
}  // namespace beast

// Where a pool's streams come from, with a pool that is told and does nothing else.
#include "stream_source.h"

#include <gtest/gtest.h>

#include <vector>

namespace beast {
namespace {

using Seconds = std::chrono::duration<double>;

// Loses the stream at once, as another thread would that begins its next life while begin_after() returns.
class HastyOwner final : public StreamSource::Owner {
 public:
  explicit HastyOwner(StreamSource& source) : source_(source) {}

  void lose_stream() {
    const ConnectionError lost("lost");
    source_.go_on_after(0, {Ending::Kind::kLost, lost.what(), std::make_exception_ptr(lost)}, {});
  }

  bool begin(size_t) override { return true; }
  void begin_after(size_t, Seconds pause) override {
    pauses.push_back(pause.count());
    if (pauses.size() < 7) lose_stream();
  }
  void end_place() override { FAIL(); }
  void say(std::string) override {}
  void fail(std::exception_ptr) override { FAIL(); }

  std::vector<double> pauses;

 private:
  StreamSource& source_;
};

TEST(StreamSource, ARestIsTwiceAsLongAsTheOneBeforeHoweverSoonTheStreamIsLostAgain) {
  DialOptions options;
  options.max_restarts = 0;
  options.min_streams = 0;
  const auto source = dialed_streams({"here"}, [](const std::string&) { return nullptr; }, options);
  HastyOwner owner(*source);
  source->start(&owner);
  source->accepted(0);
  owner.lose_stream();
  EXPECT_EQ(owner.pauses, (std::vector<double>{30, 60, 120, 240, 480, 600, 600}));
}

}  // namespace
}  // namespace beast

// The actor pool over streams that are this process's own threads, for the sanitizers: gRPC is not there to be blamed.
#include "actor_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <thread>

namespace beast {
namespace {

using std::chrono::milliseconds;

const Interrupt kNever;

// K environments that count their steps, and all of them in `steps`. Breaks or hangs in the step that it is told to.
class CountingStream : public EnvStream {
 public:
  enum class Fault { kNone, kBreaks, kHangs, kIsRefused };

  explicit CountingStream(int64_t num_envs, Fault fault = Fault::kNone, int64_t fault_step = 0)
      : num_envs_(num_envs), fault_(fault), fault_step_(fault_step) {}

  StreamSpec open(uint64_t seed) override {
    if (fault_ == Fault::kIsRefused) throw HandshakeError("nobody is let in");
    seed_ = static_cast<int64_t>(seed);
    StreamSpec spec;
    spec.env = "counting";
    spec.num_envs = num_envs_;
    spec.fields = {{"x", DType::kInt64, {2}},          {"reward", DType::kFloat32, {}},
                   {"done", DType::kBool, {}},         {"terminated", DType::kBool, {}},
                   {"truncated", DType::kBool, {}},    {"episode_return", DType::kFloat32, {}},
                   {"episode_step", DType::kInt32, {}}};
    spec.observation = Nest<int64_t>(int64_t{0});
    spec.takes_any_action = true;
    return spec;
  }

  void read_row(const std::vector<std::byte*>& destinations) override {
    if (step_ > 0 && step_ == fault_step_) {
      if (fault_ == Fault::kBreaks) throw EnvError("broken in step " + std::to_string(step_));
      if (fault_ == Fault::kHangs) wait_for_cancel();
    }
    auto* x = reinterpret_cast<int64_t*>(destinations[0]);
    for (int64_t k = 0; k < num_envs_; ++k) {
      x[2 * k] = seed_ + k;
      x[2 * k + 1] = step_;
    }
    ++step_;
  }

  void write_actions(const Array& actions) override {
    EXPECT_EQ(actions.shape(), (Shape{num_envs_}));
    EXPECT_EQ(reinterpret_cast<const int64_t*>(actions.data())[0], step_ - 1) << "the agent saw the row before";
  }

  void cancel() override {
    std::lock_guard<std::mutex> lock(mutex_);
    cancelled_ = true;
    changed_.notify_all();
  }

 private:
  void wait_for_cancel() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return cancelled_; });
    throw ConnectionError("cancelled");
  }

  const int64_t num_envs_;
  const Fault fault_;
  const int64_t fault_step_;
  int64_t seed_ = 0, step_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool cancelled_ = false;
};

using Fault = CountingStream::Fault;

BatchingOptions batches(int64_t minimum, int64_t maximum, std::optional<int64_t> queue = std::nullopt) {
  BatchingOptions options;
  options.minimum_batch_size = minimum;
  options.maximum_batch_size = maximum;
  options.maximum_queue_size = queue;
  options.timeout = std::nullopt;
  return options;
}

// A pool, the agent that answers it in a thread, and what its run() threw.
class Learner {
 public:
  Learner(size_t num_streams, ActorPool::Connect connect, int64_t max_env_restarts = 0)
      : queue_(std::make_shared<BatchingQueue>(batches(4, 4, 8))),
        batcher_(std::make_shared<DynamicBatcher>(batches(1, 64))),
        pool_({3, 1, max_env_restarts}, queue_, batcher_, std::vector<std::string>(num_streams, "here"),
              ArrayNest::Tuple{}, std::move(connect)),
        agent_([this] { answer(); }),
        runner_([this] { run(); }) {}

  ~Learner() {
    close();
    wait();
    agent_.join();
  }

  ActorPool& pool() { return pool_; }
  const std::vector<std::string>& log() const { return log_; }

  ArrayNest next() { return queue_->dequeue(kNever); }

  void close() {
    if (!closed_.exchange(true)) {
      queue_->close(Pending::kDrop);
      batcher_->close(Pending::kDrop);
    }
  }

  // What run() threw, or "" if it just ended.
  std::string wait() {
    if (runner_.joinable()) runner_.join();
    return failure_;
  }

 private:
  void run() {
    try {
      pool_.run(kNever, [this](const std::string& message) { log_.push_back(message); });
    } catch (const std::exception& error) {
      failure_ = error.what();
    }
    close();
  }

  void answer() {  // each environment's step as its action
    try {
      for (;;) {
        const std::shared_ptr<Batch> batch = batcher_->next(kNever);
        const Array& x = batch->inputs().tuple()[0].tuple()[0].leaf();
        Array action = Array::allocate(DType::kInt64, {1, batch->num_rows()});
        for (int64_t row = 0; row < batch->num_rows(); ++row) {
          reinterpret_cast<int64_t*>(action.data())[row] = reinterpret_cast<const int64_t*>(x.data())[2 * row + 1];
        }
        batch->set_outputs(ArrayNest::Tuple{ArrayNest::Tuple{action}, ArrayNest::Tuple{}});
      }
    } catch (const ClosedBatchingQueue&) {
    }
  }

  const std::shared_ptr<BatchingQueue> queue_;
  const std::shared_ptr<DynamicBatcher> batcher_;
  std::vector<std::string> log_;
  std::string failure_;
  std::atomic<bool> closed_{false};
  ActorPool pool_;
  std::thread agent_, runner_;
};

ActorPool::Connect always(int64_t num_envs, Fault fault = Fault::kNone, int64_t step = 0) {
  return [=](const std::string&) { return std::make_unique<CountingStream>(num_envs, fault, step); };
}

TEST(ActorPool, ColumnsOfABatchAreRolloutsOfOneEnvironmentEach) {
  Learner learner(8, always(2));
  std::map<int64_t, int64_t> last;  // step by environment
  for (int i = 0; i < 400; ++i) {
    const ArrayNest item = learner.next();
    const Array x = item.tuple()[0].tuple()[0].tuple()[0].leaf(), action = item.tuple()[0].tuple()[1].front();
    ASSERT_EQ(x.shape(), (Shape{4, 4, 2}));
    const auto* numbers = reinterpret_cast<const int64_t*>(x.data());
    for (int64_t column = 0; column < 4; ++column) {
      const int64_t environment = numbers[2 * column], first = numbers[2 * column + 1];
      const auto [seen, is_new] = last.emplace(environment, 0);
      EXPECT_EQ(first, seen->second);
      for (int64_t row = 0; row < 4; ++row) {
        EXPECT_EQ(numbers[(row * 4 + column) * 2], environment);
        EXPECT_EQ(numbers[(row * 4 + column) * 2 + 1], first + row);
        const int64_t led_here = reinterpret_cast<const int64_t*>(action.data())[row * 4 + column];
        EXPECT_EQ(led_here, std::max<int64_t>(first + row - 1, 0));
      }
      seen->second = first + 3;
    }
  }
  EXPECT_EQ(last.size(), 16u);
  EXPECT_GE(learner.pool().count(), 400 * 4 * 3);
  EXPECT_EQ(learner.pool().counters().streams_connected, 8);
}

TEST(ActorPool, StreamsThatBreakAgainAndAgainEndTheRunWithTheFirstReason) {
  Learner learner(3, always(4, Fault::kBreaks, 2), 2);
  EXPECT_NE(learner.wait().find("broken in step 2"), std::string::npos);
  EXPECT_GE(learner.log().size(), 2u);
  EXPECT_EQ(learner.pool().counters().streams_connected, 0);
}

TEST(ActorPool, StreamsThatAreRefusedAreNotTriedAgain) {
  std::atomic<int> tries{0};
  Learner learner(
      1,
      [&](const std::string&) {
        ++tries;
        return std::make_unique<CountingStream>(1, Fault::kIsRefused);
      },
      5);
  EXPECT_EQ(learner.wait(), "nobody is let in");
  EXPECT_EQ(tries, 1);
}

TEST(ActorPool, ClosingBothQueuesEndsStreamsThatHang) {
  Learner learner(4, always(1, Fault::kHangs, 2));
  while (learner.pool().count() < 4) std::this_thread::sleep_for(milliseconds(1));
  learner.close();
  EXPECT_EQ(learner.wait(), "");
}

TEST(ActorPool, StoppingEndsItWhateverItsThreadsDo) {
  for (int i = 0; i < 10; ++i) {
    Learner learner(4, always(4));  // nobody takes its rollouts: it gets no further than 4 streams x 3 steps x 4
    while (learner.pool().count() < 5 * i) std::this_thread::sleep_for(std::chrono::microseconds(10));
    learner.pool().stop();
    EXPECT_EQ(learner.wait(), "");
  }
}

TEST(ActorPool, APoolThatNeverRanGoesQuietly) {
  ActorPool pool({3}, std::make_shared<BatchingQueue>(batches(4, 4)), std::make_shared<DynamicBatcher>(batches(1, 64)),
                 {"here"}, ArrayNest::Tuple{}, always(1));
  pool.stop();
}

TEST(ActorPool, NoRolloutIsOfTwoLives) {
  Learner learner(2, always(4, Fault::kBreaks, 8), 1);  // two rollouts of 3 steps, and 1 step of a third
  for (int i = 0; i < 6; ++i) {
    const Array x = learner.next().tuple()[0].tuple()[0].tuple()[0].leaf();
    const auto* numbers = reinterpret_cast<const int64_t*>(x.data());
    for (int64_t item = 4; item < 16; ++item) {
      EXPECT_EQ(numbers[2 * item], numbers[2 * (item - 4)]);
      EXPECT_EQ(numbers[2 * item + 1], numbers[2 * (item - 4) + 1] + 1);
    }
  }
  EXPECT_GE(learner.pool().counters().dropped_rollouts, 1);
}

TEST(ActorPool, AnInterruptIsWhatRunThrows) {
  const auto queue = std::make_shared<BatchingQueue>(batches(4, 4));
  const auto batcher = std::make_shared<DynamicBatcher>(batches(1, 64));
  ActorPool pool({3}, queue, batcher, {"here", "there"}, ArrayNest::Tuple{}, always(1));
  EXPECT_THROW(pool.run([] { throw std::domain_error("Ctrl-C"); }, nullptr), std::domain_error);
  EXPECT_THROW(pool.run(kNever, nullptr), std::runtime_error);
}

TEST(ActorPool, SeedsOfStreamsAndLivesDiffer) {
  std::mutex mutex;
  std::multiset<uint64_t> seeds;
  struct Seeded : CountingStream {
    using CountingStream::CountingStream;
    std::function<void(uint64_t)> tell;
    StreamSpec open(uint64_t seed) override {
      tell(seed);
      return CountingStream::open(seed);
    }
  };
  Learner learner(
      4,
      [&](const std::string&) {
        auto stream = std::make_unique<Seeded>(4, Fault::kBreaks, 1);
        stream->tell = [&](uint64_t seed) {
          std::lock_guard<std::mutex> lock(mutex);
          seeds.insert(seed);
        };
        return stream;
      },
      1);
  learner.wait();
  EXPECT_GE(seeds.size(), 5u);
  for (uint64_t seed : seeds) {
    EXPECT_EQ(seeds.count(seed), 1u);
    EXPECT_LT(seed, uint64_t{1} << 30);
  }
}

}  // namespace
}  // namespace beast

// The actor pool with streams that are threads of this process, so that the sanitizers see no gRPC.
#include "actor_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <thread>

#include "wire.h"

namespace beast {
namespace {

using std::chrono::milliseconds;

const Interrupt kNever;
const std::vector<std::string> kRowFields = required_fields();

Executor& transport() {  // whose threads tell the streams' events
  static auto* executor = new Executor(3);
  return *executor;
}

// K environments that count their steps. Breaks or hangs in step `fault_step`.
class CountingStream : public EnvStream, public std::enable_shared_from_this<CountingStream> {
 public:
  enum class Fault { kNone, kBreaks, kHangs, kIsRefused, kSaysNaN, kBeginsLate };

  explicit CountingStream(int64_t num_envs, Fault fault = Fault::kNone, int64_t fault_step = 0)
      : num_envs_(num_envs), fault_(fault), fault_step_(fault_step) {}

  void open(uint64_t seed, Owner* owner) override {
    owner_ = owner;
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
    tell([this, spec] {
      if (fault_ == Fault::kIsRefused) return owner_->lost(std::make_exception_ptr(HandshakeError("nobody is let in")));
      owner_->opened(spec);
    });
  }

  void read_first_row(std::vector<std::byte*> destinations) override { read_row(std::move(destinations)); }

  void step(const Nest<Array>& actions, std::vector<std::byte*> destinations) override {
    ASSERT_TRUE(actions.is_leaf());
    EXPECT_EQ(actions.leaf().shape(), (Shape{num_envs_}));
    EXPECT_EQ(reinterpret_cast<const int64_t*>(actions.leaf().data())[0], step_ - 1) << "the agent saw the row before";
    read_row(std::move(destinations));
  }

  void cancel() override {
    std::lock_guard<std::mutex> lock(mutex_);
    is_cancelled_ = true;
    if (std::exchange(is_hanging_, false)) tell([] {});
  }

  void refuse(const std::string&) override {}
  bool has_left() const override { return has_left_ || says_so_once_.exchange(false); }
  void leave() { has_left_ = true; }  // while the owner awaits nothing
  void seem_to_leave() { says_so_once_ = true; }  // as one that was at this place before
  bool seems_to_leave() const { return says_so_once_; }

 private:
  void read_row(std::vector<std::byte*> destinations) {
    const bool has_fault = step_ > 0 && step_ == fault_step_;
    if (has_fault && fault_ == Fault::kHangs) {
      std::lock_guard<std::mutex> lock(mutex_);
      is_hanging_ = !is_cancelled_;
      if (is_hanging_) return;
    }
    tell([=, this_step = step_] {
      if (has_fault && fault_ == Fault::kBreaks) {
        return owner_->lost(std::make_exception_ptr(EnvError("broken in step " + std::to_string(this_step))));
      }
      write_row(destinations);
      owner_->row_came();
    });
  }

  void write_row(const std::vector<std::byte*>& destinations) {
    auto* x = reinterpret_cast<int64_t*>(destinations[0]);
    for (int64_t k = 0; k < num_envs_; ++k) {
      x[2 * k] = seed_ + k;
      x[2 * k + 1] = step_;
      destinations[2][k] = std::byte{step_ == 0};  // done
    }
    for (const auto& [field, bytes] : {std::pair{1, 4}, {3, 1}, {4, 1}, {5, 4}, {6, 4}}) {
      std::memset(destinations[field], 0, num_envs_ * bytes);
    }
    if (fault_ == Fault::kSaysNaN && step_ == fault_step_) {
      reinterpret_cast<float*>(destinations[1])[num_envs_ - 1] = std::numeric_limits<float>::quiet_NaN();
    }
    if (fault_ == Fault::kBeginsLate) destinations[2][num_envs_ - 1] = std::byte{0};
    ++step_;
  }

  void tell(std::function<void()> event) {
    transport().post([self = shared_from_this(), event = std::move(event)] {
      if (self->is_cancelled_) return self->owner_->lost(std::make_exception_ptr(ConnectionError("cancelled")));
      event();
    });
  }

  const int64_t num_envs_;
  const Fault fault_;
  const int64_t fault_step_;
  Owner* owner_ = nullptr;
  int64_t seed_ = 0, step_ = 0;
  std::atomic<bool> is_cancelled_{false}, has_left_{false};
  mutable std::atomic<bool> says_so_once_{false};
  std::mutex mutex_;
  bool is_hanging_ = false;
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

Array counts(const Shape& shape) {
  Array result = Array::allocate(DType::kInt64, shape);
  std::memset(result.data(), 0, result.num_bytes());
  return result;
}

// A pool, a thread that answers it as an agent, and a thread that calls run(). The agent's state counts its answers.
class Learner {
 public:
  Learner(size_t num_streams, Connect connect, int64_t max_env_restarts = 0,
          milliseconds forgiven_after = std::chrono::minutes(10))
      : Learner(dialed_streams(std::vector<std::string>(num_streams, "here"), std::move(connect),
                               {max_env_restarts, 1 << 30, forgiven_after})) {}
  Learner(size_t num_places, int64_t min_streams, Listen listen)
      : Learner(admitted_streams(num_places, std::move(listen), min_streams)) {}
  explicit Learner(std::unique_ptr<StreamSource> source, std::vector<std::string> row_fields = kRowFields)
      : queue_(std::make_shared<BatchingQueue>(batches(4, 4, 8))),
        batcher_(std::make_shared<DynamicBatcher>(batches(1, 64))),
        pool_({3, std::move(row_fields)}, queue_, batcher_, ArrayNest::Tuple{counts({1, 1})}, std::move(source)),
        agent_([this] { answer(); }),
        runner_([this] { run(); }) {}

  ~Learner() {
    close();
    wait();
    agent_.join();
  }

  ActorPool& pool() { return pool_; }
  const std::vector<std::string>& log() const { return log_; }

  ArrayNest next() { return *queue_->dequeue(kNever); }

  void close() {
    if (!closed_.exchange(true)) {
      queue_->close();
      batcher_->close();
    }
  }

  // Returns the message of what run() threw, or "".
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

  void answer() {  // the action is the environment's step
    try {
      for (;;) {
        const std::shared_ptr<Batch> batch = batcher_->next(kNever);
        const Array& x = batch->inputs().tuple()[0].tuple()[0].leaf();
        const int64_t num_rows = x.shape()[1];
        Array action = Array::allocate(DType::kInt64, {1, num_rows});
        for (int64_t row = 0; row < num_rows; ++row) {
          reinterpret_cast<int64_t*>(action.data())[row] = reinterpret_cast<const int64_t*>(x.data())[2 * row + 1];
        }
        const Array& before = batch->inputs().tuple()[1].front();
        Array state = Array::allocate(DType::kInt64, before.shape());
        for (int64_t row = 0; row < num_rows; ++row) {
          reinterpret_cast<int64_t*>(state.data())[row] = reinterpret_cast<const int64_t*>(before.data())[row] + 1;
        }
        batch->set_outputs(ArrayNest::Tuple{ArrayNest::Tuple{action}, ArrayNest::Tuple{state}});
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

Connect always(int64_t num_envs, Fault fault = Fault::kNone, int64_t step = 0) {
  return [=](const std::string&) { return std::make_shared<CountingStream>(num_envs, fault, step); };
}

// One item [row, column] of leaf `index` of env_outputs, int32 [4, 4].
int32_t env_output(const ArrayNest& item, size_t index, int64_t row, int64_t column) {
  const ArrayNest::Tuple& env_outputs = item.tuple()[0].tuple()[0].tuple();
  EXPECT_EQ(env_outputs.size(), 10u);
  const Array& array = env_outputs[index].leaf();
  EXPECT_EQ(array.dtype(), DType::kInt32);
  EXPECT_EQ(array.shape(), (Shape{4, 4}));
  return reinterpret_cast<const int32_t*>(array.data())[row * 4 + column];
}

// Group and life, leaves 7 and 8 of env_outputs, of one item [row, column] of a rollout.
std::pair<int32_t, int32_t> origin(const ArrayNest& item, int64_t row, int64_t column) {
  return {env_output(item, 7, row, column), env_output(item, 8, row, column)};
}

// The last leaf: which of its stream's environments a column belongs to.
int32_t env_number(const ArrayNest& item, int64_t row, int64_t column) { return env_output(item, 9, row, column); }

// A rollout of a stream of 4 environments: consecutive rows of one life, and the state before the first of them.
void check_rollout(const ArrayNest& rollout) {
  const Array x = rollout.tuple()[0].tuple()[0].tuple()[0].leaf(), state = rollout.tuple()[1].front();
  ASSERT_EQ(x.shape(), (Shape{4, 4, 2}));
  ASSERT_EQ(state.shape(), (Shape{1, 4}));
  const auto* numbers = reinterpret_cast<const int64_t*>(x.data());
  for (int64_t item = 0; item < 16; ++item) {
    EXPECT_EQ(numbers[2 * item], numbers[0] + item % 4);
    EXPECT_EQ(numbers[2 * item + 1], numbers[1] + item / 4);
    EXPECT_EQ(origin(rollout, item / 4, item % 4), origin(rollout, 0, 0));
    EXPECT_EQ(env_number(rollout, item / 4, item % 4), item % 4);
    EXPECT_EQ(reinterpret_cast<const int64_t*>(state.data())[item % 4], numbers[1]);
  }
}

// Calls a pool that listens.
class Callers {
 public:
  Listen listen() {
    return [this](Admit admit) {
      std::lock_guard<std::mutex> lock(mutex_);
      admit_ = std::move(admit);
      has_ended_ = !admit_;
    };
  }

  bool dial(std::shared_ptr<EnvStream> stream) {  // whether it has a place
    std::lock_guard<std::mutex> lock(mutex_);
    return admit_ && admit_(std::move(stream), "here");
  }

  bool has_ended() {
    std::lock_guard<std::mutex> lock(mutex_);
    return has_ended_;
  }

 private:
  std::mutex mutex_;
  Admit admit_;
  bool has_ended_ = false;
};

void wait_until(const std::function<bool()>& is_so) {
  while (!is_so()) std::this_thread::sleep_for(milliseconds(1));
}

TEST(ActorPool, StreamsThatComeAndGoGiveRolloutsOfOneLifeEach) {
  Callers callers;
  Learner learner(3, /*min_streams=*/2, callers.listen());
  const auto alone = std::make_shared<CountingStream>(4);
  wait_until([&] { return callers.dial(alone); });
  wait_until([&] { return learner.pool().counters().streams_connected == 1; });
  alone->leave();  // while it waits for a second one
  wait_until([&] { return learner.pool().counters().streams_connected == 0; });
  std::thread dialer([&] {
    for (int64_t i = 0; !callers.has_ended(); ++i) {
      callers.dial(std::make_shared<CountingStream>(4, Fault::kBreaks, 3 + i % 9));
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  });
  std::set<std::pair<int32_t, int32_t>> lives;
  for (int i = 0; i < 200; ++i) {
    const ArrayNest rollout = learner.next();
    check_rollout(rollout);
    lives.insert(origin(rollout, 0, 0));
  }
  EXPECT_GE(lives.size(), 50u);
  EXPECT_EQ(std::prev(lives.end())->first, 2);  // all three places were taken
  learner.close();
  EXPECT_EQ(learner.wait(), "");
  dialer.join();
  EXPECT_GE(learner.pool().counters().streams_come, 50);
}

TEST(ActorPool, AStreamThatWaitsIsNotEndedForTheOneBeforeIt) {
  Callers callers;
  Learner learner(3, /*min_streams=*/2, callers.listen());
  const auto alone = std::make_shared<CountingStream>(4);
  wait_until([&] { return callers.dial(alone); });
  wait_until([&] { return learner.pool().counters().streams_connected == 1; });
  alone->seem_to_leave();
  wait_until([&] { return !alone->seems_to_leave(); });
  std::this_thread::sleep_for(milliseconds(200));
  ASSERT_EQ(learner.pool().counters().streams_connected, 1);
  wait_until([&] { return callers.dial(std::make_shared<CountingStream>(4)); });
  check_rollout(learner.next());  // it still waits for the second one, and goes on with it
  learner.close();
  EXPECT_EQ(learner.wait(), "");
}

TEST(ActorPool, ColumnsOfABatchAreRolloutsOfOneEnvironmentEach) {
  Learner learner(8, always(2));
  std::map<int64_t, int64_t> last;                                      // step by environment
  std::map<int64_t, std::set<std::pair<int32_t, int32_t>>> origins;     // by environment
  std::map<int32_t, std::set<std::pair<int32_t, int64_t>>> numbers_of;  // the environments of a group, by number
  std::set<std::pair<int32_t, int32_t>> streams;
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
        origins[environment].insert(origin(item, row, column));
        numbers_of[origin(item, row, column).first].insert({env_number(item, row, column), environment});
        streams.insert(origin(item, row, column));
      }
      seen->second = first + 3;
    }
  }
  EXPECT_EQ(last.size(), 16u);
  for (const auto& [environment, of_environment] : origins) EXPECT_EQ(of_environment.size(), 1u) << environment;
  for (int32_t group = 0; group < 8; ++group) {
    EXPECT_EQ(streams.count({group, 0}), 1u) << group;
    ASSERT_EQ(numbers_of[group].size(), 2u) << group;
    const auto first = *numbers_of[group].begin(), second = *numbers_of[group].rbegin();
    EXPECT_EQ(first.first, 0);
    EXPECT_EQ(second, std::pair(1, first.second + 1)) << "seeds of a stream's environments follow each other";
  }
  EXPECT_EQ(streams.size(), 8u);
  EXPECT_GE(learner.pool().count(), 400 * 4 * 3);
  EXPECT_EQ(learner.pool().counters().streams_connected, 8);
}

TEST(ActorPool, StreamsThatBreakAgainAndAgainEndTheRunWithTheFirstReason) {
  Learner learner(3, always(4, Fault::kBreaks, 2), 2);
  EXPECT_NE(learner.wait().find("broken in step 2"), std::string::npos);
  EXPECT_GE(learner.log().size(), 2u);
  EXPECT_EQ(learner.pool().counters().streams_connected, 0);
}

TEST(ActorPool, RestartsAreForgivenAfterALongLifeAndNotAfterALongTryToConnect) {
  struct Slow : CountingStream {
    using CountingStream::CountingStream;
    void step(const Nest<Array>& actions, std::vector<std::byte*> destinations) override {
      std::this_thread::sleep_for(milliseconds(100));
      CountingStream::step(actions, std::move(destinations));
    }
  };
  struct Gone : CountingStream {
    using CountingStream::CountingStream;
    void open(uint64_t, Owner* owner) override {
      transport().post([owner, self = shared_from_this()] {
        std::this_thread::sleep_for(milliseconds(300));
        owner->lost(std::make_exception_ptr(ConnectionError("not reached")));
      });
    }
  };
  std::atomic<int> tries{0};
  Learner learner(
      1,
      [&](const std::string&) -> std::shared_ptr<EnvStream> {
        if (tries++ < 4) return std::make_shared<Slow>(4, Fault::kBreaks, 3);  // before a rollout is whole
        return std::make_shared<Gone>(4);
      },
      2, milliseconds(150));
  EXPECT_NE(learner.wait().find("not reached\nThe stream was reconnected 2 times in a row"), std::string::npos);
  EXPECT_EQ(tries, 4 + 2) << "four lives, each of which was forgiven, and two tries";
  EXPECT_EQ(learner.pool().counters().restarts, 3 + 2);
}

TEST(ActorPool, StreamsThatAreRefusedAreNotTriedAgain) {
  std::atomic<int> tries{0};
  Learner learner(
      1,
      [&](const std::string&) {
        ++tries;
        return std::make_shared<CountingStream>(1, Fault::kIsRefused);
      },
      5);
  EXPECT_EQ(learner.wait(), "nobody is let in");
  EXPECT_EQ(tries, 1);
}

TEST(ActorPool, ARowWithNaNAndAFirstRowThatIsNotDoneEndTheirStream) {
  Learner nan(1, always(3, Fault::kSaysNaN, 2));
  EXPECT_NE(nan.wait().find("environment server here: received a row whose field \"reward\" is not finite"),
            std::string::npos);
  EXPECT_EQ(nan.pool().count(), 3);
  Learner late(1, always(3, Fault::kBeginsLate));
  EXPECT_NE(late.wait().find("a first row that is not done everywhere"), std::string::npos);
}

TEST(ActorPool, AStreamThatHasOtherEnvironmentsThanTheFirstIsRefused) {
  std::atomic<int64_t> num_envs{4};
  Learner learner(2, [&](const std::string&) { return std::make_shared<CountingStream>(num_envs++); });
  EXPECT_NE(learner.wait().find(" environments instead of "), std::string::npos);
}

TEST(ActorPool, AStreamWithoutAFieldThatTheLearnerHasNamedIsRefused) {
  Learner learner(dialed_streams({"here"}, always(4)), {"reward", "ghost"});
  EXPECT_NE(learner.wait().find("environment server here: a row has no field \"ghost\""), std::string::npos);
}

TEST(ActorPool, AFailureToMakeAStreamEndsTheRun) {
  Learner learner(1,
                  [](const std::string&) -> std::shared_ptr<EnvStream> { throw HandshakeError("no such transport"); });
  EXPECT_EQ(learner.wait(), "no such transport");
}

TEST(ActorPool, EnvOutputsHaveTheFieldsThatTheLearnerHasNamedInItsOrder) {
  Learner learner(dialed_streams({"here"}, always(4)), {"episode_step", "done"});
  const ArrayNest item = learner.next();
  const ArrayNest::Tuple& env_outputs = item.tuple()[0].tuple()[0].tuple();
  ASSERT_EQ(env_outputs.size(), 6u);
  EXPECT_EQ(env_outputs[1].leaf().dtype(), DType::kInt32);
  EXPECT_EQ(env_outputs[2].leaf().dtype(), DType::kBool);
}

TEST(ActorPool, RowFieldsThatWouldShareMemoryAreRefused) {
  Learner observed(dialed_streams({"here"}, always(4)), {"reward", "x"});
  EXPECT_NE(observed.wait().find("row_fields have \"x\", which belongs to the observation"), std::string::npos);
  EXPECT_THROW(Learner(dialed_streams({"here"}, always(4)), {"reward", "reward"}), std::invalid_argument);
}

TEST(ActorPool, ClosingBothQueuesEndsStreamsThatHang) {
  Learner learner(4, always(1, Fault::kHangs, 2));
  while (learner.pool().count() < 4) std::this_thread::sleep_for(milliseconds(1));
  learner.close();
  EXPECT_EQ(learner.wait(), "");
}

TEST(ActorPool, StoppingEndsRunWhateverItsThreadsDo) {
  for (int i = 0; i < 10; ++i) {
    Learner learner(4, always(4));  // nobody takes its rollouts: it stops after 4 streams x 3 steps x 4
    while (learner.pool().count() < 5 * i) std::this_thread::sleep_for(std::chrono::microseconds(10));
    learner.pool().stop();
    EXPECT_EQ(learner.wait(), "");
  }
}

TEST(ActorPool, APoolThatNeverRanCanBeStoppedAndDestroyed) {
  ActorPool pool({3, kRowFields}, std::make_shared<BatchingQueue>(batches(4, 4)),
                 std::make_shared<DynamicBatcher>(batches(1, 64)), ArrayNest::Tuple{},
                 dialed_streams({"here"}, always(1)));
  pool.stop();
}

TEST(ActorPool, ARolloutHasRowsOfOneLifeOnly) {
  Learner learner(2, always(4, Fault::kBreaks, 8), 100);  // two rollouts of 3 steps, and 1 step of a third
  std::map<int32_t, std::vector<int64_t>> seeds;          // of each life, by group
  for (int i = 0; i < 10; ++i) {
    const ArrayNest rollout = learner.next();  // of one stream: it is as wide as a batch
    const Array x = rollout.tuple()[0].tuple()[0].tuple()[0].leaf();
    const auto* numbers = reinterpret_cast<const int64_t*>(x.data());
    for (int64_t item = 4; item < 16; ++item) {
      EXPECT_EQ(numbers[2 * item], numbers[2 * (item - 4)]);
      EXPECT_EQ(numbers[2 * item + 1], numbers[2 * (item - 4) + 1] + 1);
      EXPECT_EQ(origin(rollout, item / 4, item % 4), origin(rollout, 0, 0));
    }
    const auto [group, life] = origin(rollout, 0, 0);
    ASSERT_TRUE(group == 0 || group == 1) << group;
    if (numbers[1] == 0) seeds[group].push_back(numbers[0]);  // step 0 begins a life
    ASSERT_EQ(life, static_cast<int32_t>(seeds[group].size()) - 1);
    EXPECT_EQ(numbers[0], seeds[group].back());
  }
  EXPECT_GE(seeds[0].size() + seeds[1].size(), 5u);
  EXPECT_GE(learner.pool().counters().dropped_rollouts, 1);
}

TEST(ActorPool, RunThrowsWhatItsInterruptThrows) {
  const auto queue = std::make_shared<BatchingQueue>(batches(4, 4));
  const auto batcher = std::make_shared<DynamicBatcher>(batches(1, 64));
  ActorPool pool({3, kRowFields}, queue, batcher, ArrayNest::Tuple{}, dialed_streams({"here", "there"}, always(1)));
  EXPECT_THROW(pool.run([] { throw std::domain_error("Ctrl-C"); }, nullptr), std::domain_error);
  EXPECT_THROW(pool.run(kNever, nullptr), std::runtime_error);
}

TEST(ActorPool, SeedsOfStreamsAndLivesDiffer) {
  std::mutex mutex;
  std::multiset<uint64_t> seeds;
  struct Seeded : CountingStream {
    using CountingStream::CountingStream;
    std::function<void(uint64_t)> tell_seed;
    void open(uint64_t seed, Owner* owner) override {
      tell_seed(seed);
      CountingStream::open(seed, owner);
    }
  };
  Learner learner(
      4,
      [&](const std::string&) {
        auto stream = std::make_shared<Seeded>(4, Fault::kBreaks, 1);
        stream->tell_seed = [&](uint64_t seed) {
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

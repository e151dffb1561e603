#include "actor_pool.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "rollout.h"
#include "wire.h"

namespace beast {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMaxUnrollLength = 1'000'000;
constexpr size_t kMaxMetricsWaiting = 4 << 20;  // bytes

// For what follows on the answers of inference and of the learner queue.
size_t num_threads() { return std::clamp<size_t>(std::thread::hardware_concurrency() / 4, 2, 8); }

int64_t nanoseconds_since(Clock::time_point began) { return std::chrono::nanoseconds(Clock::now() - began).count(); }

uint64_t mixed(uint64_t x) {  // splitmix64: https://prng.di.unimi.it/splitmix64.c
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A different seed for every stream and every attempt to connect it. It is below 2^30, because environments take seeds
// below 2^31 and the K environments of a stream have consecutive ones.
uint64_t env_seed(uint64_t seed, uint64_t stream, uint64_t attempt) {
  return mixed(mixed(mixed(seed) ^ stream) ^ attempt) >> 34;
}

// [L, 1, ...] -> [L, K, ...], in new memory.
Array repeated(const Array& array, int64_t num_envs) {
  Shape shape = array.shape();
  shape[1] = num_envs;
  Array result = Array::allocate(array.dtype(), shape);
  const size_t layers = shape[0], bytes = layers ? array.num_bytes() / layers : 0;
  for (size_t i = 0; bytes && i < layers * num_envs; ++i) {
    std::memcpy(result.data() + i * bytes, array.data() + i / num_envs * bytes, bytes);
  }
  return result;
}

void check_state(const ArrayNest& state, const ArrayNest& expected) {
  const std::vector<Array> leaves = state.flatten(), wanted = expected.flatten();
  if (leaves.size() != wanted.size()) {
    throw std::invalid_argument("inference answered an agent state of " + std::to_string(leaves.size()) +
                                " arrays, initial_agent_state has " + std::to_string(wanted.size()));
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (leaves[i].dtype() != wanted[i].dtype() || leaves[i].shape() != wanted[i].shape()) {
      throw std::invalid_argument("array " + std::to_string(i) + " of the agent state that inference answered is " +
                                  describe(leaves[i]) + ", expected " + describe(wanted[i]) +
                                  " as in initial_agent_state");
    }
  }
}

const ArrayNest& first_entry(const ArrayNest& nest) {
  if (nest.is_tuple() && !nest.tuple().empty()) return nest.tuple()[0];
  if (nest.is_dict() && !nest.dict().empty()) return nest.dict().begin()->second;
  return nest;
}

Array without_time(const Array& output) {  // [1, K, ...] -> [K, ...]
  return output.reshaped(Shape(output.shape().begin() + 1, output.shape().end()));
}

// The first of the agent's outputs without its time dimension. It may be a nest for servers that take any action: none
// of it may be lost on the way.
ArrayNest actions_of(const ArrayNest& agent_outputs, const StreamSpec& spec) {
  if (spec.takes_any_action) {
    const ArrayNest& first = first_entry(agent_outputs);
    if (first.flatten().empty()) {
      throw std::invalid_argument(
          "the first of the agent outputs, the action, has no array: inference must answer "
          "with ((action, ...), agent_state)");
    }
    return first.map(without_time);
  }
  const Array& output = agent_outputs.front();
  Shape expected = {1, spec.num_envs};
  expected.insert(expected.end(), spec.action.shape.begin(), spec.action.shape.end());
  if (output.dtype() != spec.action.dtype || output.shape() != expected) {
    throw std::invalid_argument("the first of the agent outputs, the action, is " + describe(output) + ", expected " +
                                dtype_name(spec.action.dtype) + " " + to_string(expected));
  }
  return without_time(output);
}

}  // namespace

// One thread at a time works for an actor: a thread of the stream's transport when an event has come, one of the
// executor when inference or the learner queue has answered. Only cancel() and has_left() may come in between. An actor
// waits for one thing at a time.
class ActorPool::Actor : public EnvStream::Owner {
 public:
  Actor(ActorPool& pool, size_t place) : pool_(pool), place_(place) {}

  // Begins a life with the next stream of the source.
  void begin() {
    in_rollout_ = is_accepted_ = false;
    life_ = {env_seed(pool_.options_.seed, place_, num_attempts_++)};
    guarded([&] {
      auto [stream, name] = pool_.source_->take(place_);
      name_ = std::move(name);
      open(std::move(stream));
    });
  }

  // For the pool, while this one waits for others, and when enough have come.
  bool has_left() {
    const auto stream = current_stream();
    return stream && stream->has_left();
  }
  void leave() { end_life(lost_because("it has left while others were waited for")); }
  void go_on() {
    guarded([&] { act(); });
  }

  void cancel() {  // from any thread
    if (const auto stream = current_stream()) stream->cancel();
  }

  void drop_stream() {
    std::shared_ptr<EnvStream> dropped;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      dropped.swap(stream_);
    }
    // Here the stream may be destroyed, which calls the transport: the lock is released before.
  }

 private:
  // The functions of a life, in the order in which they follow each other.

  void open(std::shared_ptr<EnvStream> stream) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::lock_guard<std::mutex> pool_lock(pool_.mutex_);
      if (pool_.stopping()) return;
      stream_ = stream;
    }
    num_told_ = 0;
    tell_progress();
    await([&] { stream->open(life_.seed, this); });
  }

  void opened(const StreamSpec& spec) override {
    const Event event(pool_);
    guarded([&] {
      accept(spec);
      check_memory(spec, pool_.options_.unroll_length);
      spec_ = spec;
      initial_agent_state_ =
          pool_.initial_agent_state_.map([&](const Array& array) { return repeated(array, spec.num_envs); });
      set_agent_state(initial_agent_state_);
      rollout_.emplace(spec, pool_.options_.row_fields, pool_.options_.unroll_length,
                       Origin{static_cast<int32_t>(place_), num_lives_ - 1});
      row_ = 0;
      asked_ = Clock::now();
      await([&] { current_stream()->read_first_row(rollout_->destinations(row_)); });
    });
  }

  // Refuses a stream that has not what the first stream of the pool had, in any life: the learner takes them together.
  void accept(const StreamSpec& spec) {
    const std::string unfit = fault_of_fields(spec, pool_.options_.row_fields);
    if (!unfit.empty()) throw HandshakeError(server() + ": " + unfit);
    const std::string other = pool_.compare_with_first(spec);
    if (!other.empty()) throw HandshakeError(server() + " has " + other);
    ++num_lives_;
    pool_.source_->accepted(place_);
    is_accepted_ = true;
    accepted_ = Clock::now();
    pool_.count_connected(1);
  }

  void row_came(std::string metrics) override {
    const Event event(pool_);
    if (!metrics.empty()) pool_.keep_metrics(std::move(metrics));
    pool_.environment_ns_ += nanoseconds_since(asked_);
    guarded([&] {
      if (const std::string fault = fault_of_row(); !fault.empty()) return end_life(lost_because(fault));
      life_.worked = Clock::now() - accepted_;
      if (row_ > 0) pool_.steps_ += spec_.num_envs;
      if (row_ == pool_.options_.unroll_length) {
        hand_on();
      } else {
        act();
      }
    });
  }

  // Why the learner must not get this row, or empty. One number that is not finite would spoil a whole update, and
  // nobody would know whose it was.
  std::string fault_of_row() const {
    if (const std::string fault = rollout_->find_fault(row_); !fault.empty()) {
      return "received a row whose " + readable(fault);
    }
    if (row_ == 0 && !rollout_->begins_episodes()) return "received a first row that is not done everywhere";
    return "";
  }

  void act() {
    if (pool_.keeps_waiting(*this)) return;
    asked_ = Clock::now();
    pool_.inference_batcher_->compute_later(
        ArrayNest::Tuple{rollout_->env_outputs(row_, 1), agent_state_},
        [this, executor = pool_.executor_](ArrayNest outputs, std::exception_ptr failure, bool is_last) {
          auto task = [this, outputs = std::move(outputs), failure] { answered(outputs, failure); };
          if (is_last) {
            executor->run_here(task);  // saves a wake-up, which one stream alone would wait for
          } else {
            executor->post(std::move(task));
          }
        });
  }

  void answered(const ArrayNest& answer, const std::exception_ptr& failure) {
    pool_.inference_ns_ += nanoseconds_since(asked_);
    guarded([&] {
      if (failure) std::rethrow_exception(failure);
      if (!answer.is_tuple() || answer.tuple().size() != 2) {
        throw std::invalid_argument(
            "inference must answer with a tuple (agent_outputs, agent_state); an agent without a "
            "state answers with (agent_outputs, ())");
      }
      const ArrayNest& agent_outputs = answer.tuple()[0];
      agent_state_ = answer.tuple()[1];
      check_state(agent_state_, initial_agent_state_);
      asked_ = Clock::now();
      rollout_->set_agent_outputs(++row_, agent_outputs);
      in_rollout_ = true;
      const ArrayNest actions = actions_of(agent_outputs, spec_);
      tell_progress();
      await([&] { current_stream()->step(actions, rollout_->destinations(row_)); });
    });
  }

  void hand_on() {
    asked_ = Clock::now();
    Rollout next = rollout_->next();  // before the learner gets this one: it may write to it
    ArrayNest item = rollout_->item(std::move(state_before_row_0_));
    rollout_ = std::move(next);
    row_ = 0;
    auto entered_later = [this, executor = pool_.executor_](std::exception_ptr failure) {
      executor->post([this, failure] { entered(failure); });
    };
    pool_.learner_queue_->enqueue_later(std::move(item), std::move(entered_later));
  }

  void entered(const std::exception_ptr& failure) {
    pool_.enqueue_ns_ += nanoseconds_since(asked_);
    guarded([&] {
      if (failure) std::rethrow_exception(failure);
      in_rollout_ = false;
      set_agent_state(agent_state_);
      act();
    });
  }

  void lost(std::exception_ptr why) override {
    const Event event(pool_);
    end_life(*ending_of([&] { std::rethrow_exception(why); }));
  }

  // The source may begin the next life at once, in another thread: nothing here comes after its go_on_after().
  void end_life(const Ending& ending) {
    drop_stream();
    rollout_.reset();
    if (std::exchange(is_accepted_, false)) pool_.count_connected(-1);
    if (ending.kind == Ending::Kind::kFailed) return pool_.fail(ending.error);
    if (pool_.stopping()) return;
    if (in_rollout_) ++pool_.dropped_rollouts_;
    const auto failure = ending_of([&] { pool_.source_->go_on_after(place_, ending, life_); });
    if (failure) pool_.fail(failure->error);
  }

  // Helpers of these.

  void tell_progress() {
    if (num_told_ == pool_.num_told_) return;
    std::string progress;
    {
      std::lock_guard<std::mutex> lock(pool_.mutex_);
      num_told_ = pool_.num_told_;
      progress = pool_.progress_;
    }
    current_stream()->set_progress(progress);
  }

  std::string server() const { return "environment server " + name_; }

  Ending lost_because(const std::string& what) const {
    const ConnectionError error(server() + ": " + what);
    return {Ending::Kind::kLost, error.what(), std::make_exception_ptr(error)};
  }

  // The rows of an answer keep the memory of its whole batch alive. A copy does not.
  void set_agent_state(const ArrayNest& agent_state) {
    agent_state_ = agent_state;
    state_before_row_0_ = agent_state.map([](const Array& array) { return array.copied(); });
  }

  std::shared_ptr<EnvStream> current_stream() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stream_;
  }

  // An event of the stream, which the pool waits for before it ends.
  class Event {
   public:
    explicit Event(ActorPool& pool) : pool_(pool) {}
    ~Event() {
      std::lock_guard<std::mutex> lock(pool_.mutex_);
      if (--pool_.num_awaited_ == 0 && pool_.stopping()) pool_.changed_.notify_all();
    }

   private:
    ActorPool& pool_;
  };

  // Calls what leads to an event.
  template <typename Start>
  void await(Start&& start) {
    {
      std::lock_guard<std::mutex> lock(pool_.mutex_);
      ++pool_.num_awaited_;
    }
    try {
      start();
    } catch (...) {
      const Event event(pool_);  // instead of the one that will not come
      throw;
    }
  }

  // What `function` throws ends the life. The peer is told of a refusal that is this side's.
  template <typename Function>
  void guarded(Function&& function) {
    const std::optional<Ending> ending = ending_of(function);
    if (!ending) return;
    if (ending->kind == Ending::Kind::kRefused) {
      if (const auto stream = current_stream()) stream->refuse(ending->why);  // null where the source had none
    }
    end_life(*ending);
  }

  ActorPool& pool_;
  const size_t place_;
  std::string name_;          // of the stream, for messages
  int64_t num_attempts_ = 0;  // to open one, each with a seed of its own
  int32_t num_lives_ = 0;     // accepted so far, including this one
  int64_t num_told_ = 0;      // the pool's when the stream was last told
  // Of this life:
  StreamSource::Life life_;
  Clock::time_point accepted_, asked_;  // asked_: when what it waits for was asked for
  StreamSpec spec_;
  bool is_accepted_ = false;
  std::optional<Rollout> rollout_;
  int64_t row_ = 0;          // of the rollout: the newest, or the one that comes next
  bool in_rollout_ = false;  // the rollout has steps, which would be lost with the stream
  ArrayNest initial_agent_state_, agent_state_, state_before_row_0_;
  std::mutex mutex_;                   // guards stream_, which other threads cancel
  std::shared_ptr<EnvStream> stream_;  // until it is lost
};

ActorPool::ActorPool(const ActorPoolOptions& options, std::shared_ptr<BatchingQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher, ArrayNest initial_agent_state,
                     std::unique_ptr<StreamSource> source)
    : options_(options),
      learner_queue_(std::move(learner_queue)),
      inference_batcher_(std::move(inference_batcher)),
      initial_agent_state_(std::move(initial_agent_state)),
      source_(std::move(source)),
      expected_(options.expected) {
  check_arguments();
  while (actors_.size() < source_->num_places()) actors_.push_back(std::make_unique<Actor>(*this, actors_.size()));
}

void ActorPool::check_arguments() const {
  if (options_.unroll_length < 1 || options_.unroll_length > kMaxUnrollLength) {
    throw std::invalid_argument("unroll_length is " + std::to_string(options_.unroll_length) + ", must be 1 to " +
                                std::to_string(kMaxUnrollLength) + " steps");
  }
  std::set<std::string> names;
  for (const std::string& name : options_.row_fields) {
    if (!names.insert(name).second) {
      throw std::invalid_argument("row_fields has \"" + name + "\" twice: the two would share memory");
    }
  }
  initial_agent_state_.for_each([](const Array& array) {
    if (array.shape().size() < 2 || array.shape()[1] != 1) {
      throw std::invalid_argument("initial_agent_state has an array of shape " + to_string(array.shape()) +
                                  ", expected [L, 1, ...]: the state of one environment");
    }
  });
}

ActorPool::~ActorPool() { stop_and_wait(); }

void ActorPool::run(const Interrupt& interrupt, const Log& log) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (started_) throw std::runtime_error("run() was called already: a pool runs once");
    executor_ = std::make_shared<Executor>(num_threads());
    started_ = true;
    num_places_ = actors_.size();
  }
  try {
    source_->start(this);
    while (wait_and_begin_those_due()) {
      end_those_that_left();
      log_messages(log);
      if (interrupt) interrupt();
      if (source_->ends_with(learner_queue_->is_closed(), inference_batcher_->is_closed())) break;
    }
  } catch (...) {
    fail(std::current_exception());
  }
  stop();
  const auto wait_for_events = [this] {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return num_awaited_ == 0; });
  };
  wait_for_events();
  executor_->stop();
  wait_for_events();  // of what its last tasks have started
  for (const auto& actor : actors_) actor->drop_stream();
  try {
    source_->end();
    log_messages(log);
  } catch (...) {
    fail(std::current_exception());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  num_connected_ = 0;
  ended_ = true;
  changed_.notify_all();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

bool ActorPool::wait_and_begin_those_due() {
  std::unique_lock<std::mutex> lock(mutex_);
  Time next = Clock::now() + std::chrono::milliseconds(100);
  for (const auto& [time, actor] : resting_) next = std::min(next, time);
  changed_.wait_until(lock, next, [&] { return stopping_ || num_places_ == 0 || !messages_.empty(); });
  if (stopping_ || num_places_ == 0) return false;
  const auto is_due = [now = Clock::now()](const auto& resting) { return resting.first <= now; };
  const auto due = std::stable_partition(resting_.begin(), resting_.end(), std::not_fn(is_due));
  for (auto it = due; it != resting_.end(); ++it) executor_->post([actor = it->second] { actor->begin(); });
  resting_.erase(due, resting_.end());
  return true;
}

void ActorPool::log_messages(const Log& log) {
  std::vector<std::string> messages;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    messages.swap(messages_);
  }
  for (const std::string& message : messages) {
    if (log) log(message);
  }
}

void ActorPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (const auto& actor : actors_) actor->cancel();
}

void ActorPool::stop_and_wait() {
  stop();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !started_ || ended_; });
}

ActorPoolCounters ActorPool::counters() const {
  ActorPoolCounters counters;
  counters.restarts = source_->num_restarts();
  counters.dropped_rollouts = dropped_rollouts_;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    counters.streams_connected = num_connected_;
  }
  counters.streams_come = source_->num_come();
  counters.seconds_inference = inference_ns_ * 1e-9;
  counters.seconds_environment = environment_ns_ * 1e-9;
  counters.seconds_enqueue = enqueue_ns_ * 1e-9;
  return counters;
}

void ActorPool::tell(std::string progress) {
  std::lock_guard<std::mutex> lock(mutex_);
  progress_ = std::move(progress);
  ++num_told_;
}

std::vector<std::string> ActorPool::take_metrics() {
  std::lock_guard<std::mutex> lock(mutex_);
  metrics_bytes_ = 0;
  return std::exchange(metrics_, {});
}

void ActorPool::keep_metrics(std::string metrics) {
  std::lock_guard<std::mutex> lock(mutex_);
  metrics_bytes_ += metrics.size();
  if (metrics_bytes_ <= kMaxMetricsWaiting) metrics_.push_back(std::move(metrics));
}

std::string ActorPool::compare_with_first(const StreamSpec& spec) {
  std::lock_guard<std::mutex> lock(mutex_);
  StreamSpec expected = expected_.value_or(spec);
  // Unknown to who expects it, the number is that of the first stream which has no other difference.
  if (!expected.frames_per_step) expected.frames_per_step = spec.frames_per_step;
  std::string other = difference(spec, expected);
  if (other.empty()) expected_ = std::move(expected);
  return other;
}

void ActorPool::fail(std::exception_ptr failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_) failure_ = std::move(failure);
  stopping_ = true;
  changed_.notify_all();
}

void ActorPool::say(std::string message) {
  std::lock_guard<std::mutex> lock(mutex_);
  messages_.push_back(std::move(message));
  changed_.notify_all();
}

bool ActorPool::begin(size_t place) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return false;
  executor_->post([actor = actors_[place].get()] { actor->begin(); });
  return true;
}

void ActorPool::begin_after(size_t place, std::chrono::duration<double> pause) {
  std::lock_guard<std::mutex> lock(mutex_);
  resting_.emplace_back(Clock::now() + std::chrono::duration_cast<Clock::duration>(pause), actors_[place].get());
  changed_.notify_all();
}

void ActorPool::end_place() {
  std::lock_guard<std::mutex> lock(mutex_);
  --num_places_;
  changed_.notify_all();
}

bool ActorPool::keeps_waiting(Actor& actor) {
  const int64_t num_needed = source_->num_needed();
  if (num_needed == 0) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_connected_ >= num_needed) return false;
  waiting_.push_back(&actor);
  return true;
}

void ActorPool::end_those_that_left() {
  std::vector<Actor*> left;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    left = waiting_;
  }
  for (Actor* actor : left) {
    if (!actor->has_left()) continue;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto waiting = std::find(waiting_.begin(), waiting_.end(), actor);
    if (waiting == waiting_.end()) continue;  // it acts
    waiting_.erase(waiting);  // nothing else lets it go on now, but it may have been in another life before
    executor_->post([actor] { actor->has_left() ? actor->leave() : actor->go_on(); });
  }
}

void ActorPool::count_connected(int64_t change) {
  std::lock_guard<std::mutex> lock(mutex_);
  num_connected_ += change;
  if (num_connected_ < source_->num_needed()) return;
  for (Actor* actor : waiting_) executor_->post([actor] { actor->go_on(); });
  waiting_.clear();
}

}  // namespace beast

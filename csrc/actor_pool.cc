#include "actor_pool.h"

#include <unistd.h>  // sysconf

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "wire.h"

namespace beast {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMaxUnrollLength = 1'000'000;
constexpr double kFirstPause = 0.1, kLongestPause = 10;  // seconds before a stream is connected again
constexpr double kFirstRest = 30, kLongestRest = 600;    // the same, after max_env_restarts in a row

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

std::string describe(const Array& array) {
  return std::string(dtype_name(array.dtype())) + " " + to_string(array.shape());
}

// Whether all items are finite. It has no branches, so that the compiler makes wide instructions of it.
template <typename Bits>
bool is_finite(const std::byte* data, size_t count, Bits exponent) {
  bool infinite = false;
  for (size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, data + i * sizeof(bits), sizeof(bits));
    infinite |= (bits & exponent) == exponent;
  }
  return !infinite;
}

// Compiled code may take the negation of a bool that is 2 for 3.
bool are_bools(const std::byte* data, size_t count) {
  std::byte bits{0};
  for (size_t i = 0; i < count; ++i) bits |= data[i];
  return bits <= std::byte{1};
}

// What no array of a row may have; empty if this one has nothing of it.
std::string fault_of(const Array& array) {
  const size_t count = num_items(array.shape());
  const auto unless = [](bool is_good, const char* fault) { return is_good ? "" : fault; };
  switch (array.dtype()) {
    case DType::kFloat16:
      return unless(is_finite<uint16_t>(array.data(), count, 0x7c00), "is not finite");
    case DType::kFloat32:
      return unless(is_finite<uint32_t>(array.data(), count, 0x7f800000), "is not finite");
    case DType::kFloat64:
      return unless(is_finite<uint64_t>(array.data(), count, 0x7ff0000000000000), "is not finite");
    case DType::kBool:
      return unless(are_bools(array.data(), count), "has bools other than 0 and 1");
    default:
      return "";
  }
}

Shape with_rows(int64_t num_rows, const Shape& row) {  // row: [1, K, ...]
  Shape shape = row;
  shape[0] = num_rows;
  return shape;
}

void copy_row(const Array& from, int64_t from_row, const Array& to, int64_t to_row) {
  const Array source = from.slice_first(from_row, 1);
  if (source.num_bytes()) std::memcpy(to.slice_first(to_row, 1).data(), source.data(), source.num_bytes());
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

Array filled(const Shape& shape, int32_t value) {
  Array result = Array::allocate(DType::kInt32, shape);
  std::fill_n(reinterpret_cast<int32_t*>(result.data()), num_items(shape), value);
  return result;
}

// Where a rollout comes from.
struct Origin {
  int32_t group;  // index of the stream in the pool's address list
  int32_t life;   // how many connections this stream has had before
};

// T+1 rows of one stream, filled one after another.
class Rollout {
 public:
  Rollout(const StreamSpec& spec, int64_t unroll_length, Origin origin)
      : spec_(spec),
        num_rows_(unroll_length + 1),
        origin_(origin),
        group_(filled({num_rows_, spec.num_envs}, origin.group)),
        life_(filled({num_rows_, spec.num_envs}, origin.life)) {
    for (const Field& field : spec.fields) {
      Shape shape = {num_rows_, spec.num_envs};
      shape.insert(shape.end(), field.shape.begin(), field.shape.end());
      fields_.push_back(Array::allocate(field.dtype, std::move(shape)));
    }
  }

  // The rollout after this one, whose row 0 is this one's last row.
  Rollout next() const {
    Rollout next(spec_, num_rows_ - 1, origin_);
    for (size_t i = 0; i < fields_.size(); ++i) copy_row(fields_[i], num_rows_ - 1, next.fields_[i], 0);
    next.agent_outputs_ = agent_outputs_->map([&](const Array& output) {
      Array rows = Array::allocate(output.dtype(), output.shape());
      copy_row(output, num_rows_ - 1, rows, 0);
      return rows;
    });
    return next;
  }

  // Where the stream writes row `row`.
  std::vector<std::byte*> destinations(int64_t row) const {
    std::vector<std::byte*> result;
    for (const Array& field : fields_) result.push_back(field.slice_first(row, 1).data());
    return result;
  }

  // What the learner must not get of row `row`: "field "reward" is not finite"; empty if there is nothing.
  std::string find_fault(int64_t row) const {
    for (size_t i = 0; i < fields_.size(); ++i) {
      const std::string fault = fault_of(fields_[i].slice_first(row, 1));
      if (!fault.empty()) return "field \"" + spec_.fields[i].name + "\" " + fault;
    }
    return "";
  }

  // Whether row 0 begins an episode in each environment.
  bool begins_episodes() const {
    const Array done = fields_[spec_.index_of("done")].slice_first(0, 1);
    return std::all_of(done.data(), done.data() + done.num_bytes(), [](std::byte byte) { return byte != std::byte{0}; });
  }

  ArrayNest env_outputs(int64_t begin, int64_t count) const {
    ArrayNest::Tuple outputs = {spec_.observation.map([&](int64_t i) { return fields_[i].slice_first(begin, count); })};
    for (const char* name : {"reward", "done", "episode_step", "episode_return", "terminated", "truncated"}) {
      outputs.push_back(fields_[spec_.index_of(name)].slice_first(begin, count));
    }
    outputs.push_back(group_.slice_first(begin, count));
    outputs.push_back(life_.slice_first(begin, count));
    return outputs;
  }

  // Copies outputs [1, K, ...]. All later outputs must have the structure, shapes and dtypes of the first ones.
  void set_agent_outputs(int64_t row, const ArrayNest& outputs) {
    if (!agent_outputs_) {
      agent_outputs_ = outputs.map([&](const Array& output) {
        if (output.shape().size() < 2 || output.shape()[0] != 1 || output.shape()[1] != spec_.num_envs) {
          throw std::invalid_argument("inference answered agent outputs of shape " + to_string(output.shape()) +
                                      ", expected [1, " + std::to_string(spec_.num_envs) +
                                      ", ...]: set_outputs takes ((action, ...), agent_state), leaves [1, rows, ...]");
        }
        Array rows = Array::allocate(output.dtype(), with_rows(num_rows_, output.shape()));
        std::memset(rows.data(), 0, rows.slice_first(0, 1).num_bytes());
        return rows;
      });
    }
    const std::vector<Array> rows = agent_outputs_->flatten(), answers = outputs.flatten();
    if (rows.size() != answers.size()) {
      throw std::invalid_argument("inference answered " + std::to_string(answers.size()) +
                                  " agent outputs, its first answer had " + std::to_string(rows.size()));
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      if (answers[i].dtype() != rows[i].dtype() || with_rows(num_rows_, answers[i].shape()) != rows[i].shape()) {
        throw std::invalid_argument("agent output " + std::to_string(i) + " is " + describe(answers[i]) +
                                    ", in the first answer it was " + describe(rows[i].slice_first(0, 1)));
      }
      copy_row(answers[i], 0, rows[i], row);
    }
  }

  ArrayNest item(ArrayNest initial_agent_state) const {
    return ArrayNest::Tuple{ArrayNest::Tuple{env_outputs(0, num_rows_), *agent_outputs_},
                            std::move(initial_agent_state)};
  }

 private:
  StreamSpec spec_;
  int64_t num_rows_;
  Origin origin_;
  Array group_, life_;                      // int32 [T+1, K]; not shared by rollouts: the learner may write to them
  std::vector<Array> fields_;               // [T+1, K, ...] each
  std::optional<ArrayNest> agent_outputs_;  // [T+1, K, ...] each; made when the first answer shows what they are
};

// Refuses rollouts that this machine cannot hold before memory is allocated for one.
void check_memory(const StreamSpec& spec, int64_t unroll_length) {
  double row_bytes = 0;
  for (const Field& field : spec.fields) {
    row_bytes += static_cast<double>(spec.num_envs) * num_items(field.shape) * item_size(field.dtype);
  }
  const double rollout_bytes = (unroll_length + 1) * row_bytes;
  const double memory_bytes = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  if (memory_bytes <= 0 || rollout_bytes <= memory_bytes) return;
  const auto gigabytes = [](double bytes) { return std::to_string(static_cast<int64_t>(bytes / 1e9)) + " GB"; };
  throw std::invalid_argument("a rollout of unroll_length " + std::to_string(unroll_length) + " and " +
                              std::to_string(spec.num_envs) + " environments needs " + gigabytes(rollout_bytes) +
                              ", this machine has " + gigabytes(memory_bytes) +
                              ": lower unroll_length, or serve fewer environments per stream");
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
      throw std::invalid_argument("the first of the agent outputs, the action, has no array: inference must answer "
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
// executor when inference or the learner queue has answered. The functions stand in the order in which they follow each
// other. Only cancel() may come in between. An actor waits for one thing at a time.
class ActorPool::Actor : public EnvStream::Owner {
 public:
  Actor(ActorPool& pool, size_t index, std::string name) : pool_(pool), index_(index), name_(std::move(name)) {}

  void connect() {
    guarded([&] { begin(pool_.connect_(name_)); });
  }

  void admit(std::shared_ptr<EnvStream> stream, std::string name) {
    name_ = std::move(name);
    guarded([&] { begin(std::move(stream)); });
  }

  void cancel() {  // from any thread
    if (const auto stream = current_stream()) stream->cancel();
  }

  void drop_stream() {
    std::shared_ptr<EnvStream> dropped;  // which may be told so without the lock
    std::lock_guard<std::mutex> lock(mutex_);
    dropped.swap(stream_);
  }

  bool is_free = true;  // to admit(); the pool's mutex guards it

 private:
  void begin(std::shared_ptr<EnvStream> stream) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::lock_guard<std::mutex> pool_lock(pool_.mutex_);
      if (pool_.stopping()) return;
      stream_ = stream;
    }
    in_rollout_ = is_accepted_ = false;
    worked_ = Clock::duration(0);
    seed_ = env_seed(pool_.options_.seed, index_, num_attempts_++);
    await([&] { stream->open(seed_, this); });
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
      rollout_.emplace(spec, pool_.options_.unroll_length, Origin{static_cast<int32_t>(index_), num_lives_ - 1});
      row_ = 0;
      asked_ = Clock::now();
      await([&] { current_stream()->read_first_row(rollout_->destinations(row_)); });
    });
  }

  // Refuses a stream that has not what the first stream of the pool had, in any life: the learner takes them together.
  void accept(const StreamSpec& spec) {
    const StreamSpec expected = pool_.expect(spec);
    const std::string other = difference(spec, expected);
    if (!other.empty()) throw HandshakeError("environment server " + name_ + " has " + other);
    ++num_lives_;
    if (std::exchange(is_retired_, false)) --pool_.num_retired_;
    is_accepted_ = true;
    accepted_ = Clock::now();
    pool_.count_connected(1);
  }

  void row_came() override {
    const Event event(pool_);
    pool_.environment_ns_ += nanoseconds_since(asked_);
    guarded([&] {
      check_row();
      worked_ = Clock::now() - accepted_;
      if (row_ > 0) pool_.steps_ += spec_.num_envs;
      if (row_ == pool_.options_.unroll_length) {
        hand_on();
      } else {
        act();
      }
    });
  }

  // Refuses numbers that are not finite: one of them would spoil a whole update, and nobody would know whose it was.
  void check_row() const {
    const auto refuse = [&](const std::string& why) {
      throw ConnectionError("environment server " + name_ + ": " + why);
    };
    const std::string fault = rollout_->find_fault(row_);
    if (!fault.empty()) refuse("received a row whose " + readable(fault));
    if (row_ == 0 && !rollout_->begins_episodes()) refuse("received a first row that is not done everywhere");
  }

 public:
  // For the pool, while this one waits for others, and when enough have come.
  bool has_left() {
    const auto stream = current_stream();
    return stream && stream->has_left();
  }
  void leave() {
    guarded([&] { throw ConnectionError("environment server " + name_ + ": it has left while others were waited for"); });
  }
  void go_on() {
    guarded([&] { act(); });
  }

 private:
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
      await([&] { current_stream()->step(actions, rollout_->destinations(row_)); });
    });
  }

  void hand_on() {
    asked_ = Clock::now();
    Rollout next = rollout_->next();  // before the learner gets this one: it may write to it
    ArrayNest item = rollout_->item(std::move(state_before_row_0_));
    rollout_ = std::move(next);
    row_ = 0;
    pool_.learner_queue_->enqueue_later(std::move(item), [this, executor = pool_.executor_](std::exception_ptr failure) {
      executor->post([this, failure] { entered(failure); });
    });
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
    end_life(why);
  }

  void end_life(const std::exception_ptr& why) {
    drop_stream();
    rollout_.reset();
    if (std::exchange(is_accepted_, false)) pool_.count_connected(-1);
    try {
      if (!pool_.stopping()) go_on_after(why);
    } catch (...) {
      pool_.fail(std::current_exception());
    }
    std::lock_guard<std::mutex> lock(pool_.mutex_);
    is_free = true;
  }

  // Connects again, soon or after a rest, or ends the run.
  void go_on_after(const std::exception_ptr& why) {
    if (in_rollout_) ++pool_.dropped_rollouts_;
    try {
      std::rethrow_exception(why);
    } catch (const ClosedBatchingQueue&) {
      if (pool_.listen_) return;  // others may dial, which end as soon, until run() sees it
      std::lock_guard<std::mutex> lock(pool_.mutex_);
      --pool_.num_running_;
      pool_.changed_.notify_all();
    } catch (const HandshakeError& error) {
      if (pool_.listen_) return pool_.say(std::string(error.what()) + "\nIt was refused.");
      if (num_lives_ == 0 || !retire(error.what())) pool_.fail(why);
    } catch (const ConnectionError& error) {
      if (pool_.listen_) return pool_.say(error.what());
      if (num_lives_ == 0) return pool_.fail(why);  // open() has retried already
      if (worked_ > pool_.options_.forgiven_after) {
        num_restarts_ = 0;
        rest_ = kFirstRest;
      }
      const std::string limit = std::to_string(pool_.options_.max_env_restarts);
      if (num_restarts_ < pool_.options_.max_env_restarts) {
        const double jitter = 0.75 + 0.5 * (seed_ % 1024) / 1024.0;  // spreads the streams of a server in time
        const double pause = jitter * std::min(kFirstPause * std::exp2(num_restarts_), kLongestPause);
        ++num_restarts_;
        ++pool_.restarts_;
        pool_.say(std::string(error.what()) + "\nReconnecting (" + std::to_string(num_restarts_) +
                  " of max_env_restarts " + limit + ").");
        return pool_.connect_later(*this, std::chrono::duration<double>(pause));
      }
      const std::string text = std::string(error.what()) + "\nThe stream was reconnected " +
                               std::to_string(num_restarts_) + " times in a row (max_env_restarts " + limit + ").";
      if (!retire(text)) pool_.fail(std::make_exception_ptr(ConnectionError(text)));
    }
  }

  // What restarts do not mend costs the run this stream alone, while enough others are left. Returns whether to try
  // again, after a rest.
  bool retire(const std::string& why) {
    if (!is_retired_) ++pool_.num_retired_;
    is_retired_ = true;
    const int64_t num_left = pool_.actors_.size() - pool_.num_retired_;
    if (num_left < pool_.options_.min_streams) return false;
    pool_.say(why + "\nThis stream rests for " + std::to_string(static_cast<int64_t>(rest_)) + " s; " +
              std::to_string(num_left) + " of " + std::to_string(pool_.actors_.size()) + " are left.");
    pool_.connect_later(*this, std::chrono::duration<double>(rest_));
    rest_ = std::min(2 * rest_, kLongestRest);
    return true;
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

  // Ends the life if `function` throws, or the pool where no other life would do better.
  template <typename Function>
  void guarded(Function&& function) {
    try {
      function();
    } catch (const HandshakeError& error) {
      current_stream()->refuse(error.what());
      end_life(std::current_exception());
    } catch (const ConnectionError&) {
      end_life(std::current_exception());
    } catch (const ClosedBatchingQueue&) {
      end_life(std::current_exception());
    } catch (...) {
      pool_.fail(std::current_exception());
    }
  }

  ActorPool& pool_;
  const size_t index_;
  std::string name_;                // the address, for messages
  int64_t num_attempts_ = 0;        // to connect, each with a seed of its own
  int64_t num_restarts_ = 0;        // in a row
  int32_t num_lives_ = 0;           // connections so far, including this one; failed attempts do not count
  bool is_retired_ = false;         // it rests, or connects after a rest
  double rest_ = kFirstRest;        // seconds
  // Of this life:
  uint64_t seed_ = 0;
  Clock::time_point accepted_, asked_;  // asked_: when what it waits for was asked for
  Clock::duration worked_{0};       // from accepted_ to the newest row; 0 without any
  StreamSpec spec_;
  bool is_accepted_ = false;
  std::optional<Rollout> rollout_;
  int64_t row_ = 0;                 // of the rollout: the newest, or the one that comes next
  bool in_rollout_ = false;         // the rollout has steps, which would be lost with the stream
  ArrayNest initial_agent_state_, agent_state_, state_before_row_0_;
  std::mutex mutex_;                // guards stream_, which other threads cancel
  std::shared_ptr<EnvStream> stream_;  // until it is lost
};

ActorPool::ActorPool(const ActorPoolOptions& options, std::shared_ptr<BatchingQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher, std::vector<std::string> addresses,
                     ArrayNest initial_agent_state, Connect connect)
    : options_(options),
      learner_queue_(std::move(learner_queue)),
      inference_batcher_(std::move(inference_batcher)),
      initial_agent_state_(std::move(initial_agent_state)),
      connect_(std::move(connect)),
      expected_(options.expected) {
  check_arguments();
  if (addresses.empty()) throw std::invalid_argument("env_server_addresses is empty: a pool needs at least one");
  for (std::string& address : addresses) {
    actors_.push_back(std::make_unique<Actor>(*this, actors_.size(), std::move(address)));
  }
}

ActorPool::ActorPool(const ActorPoolOptions& options, std::shared_ptr<BatchingQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher, size_t num_places,
                     ArrayNest initial_agent_state, Listen listen)
    : options_(options),
      learner_queue_(std::move(learner_queue)),
      inference_batcher_(std::move(inference_batcher)),
      initial_agent_state_(std::move(initial_agent_state)),
      listen_(std::move(listen)),
      expected_(options.expected) {
  check_arguments();
  if (options_.min_streams > static_cast<int64_t>(num_places)) {
    throw std::invalid_argument("min_streams is " + std::to_string(options_.min_streams) + ", and the listener takes " +
                                std::to_string(num_places) + " streams at most: raise max_streams");
  }
  while (actors_.size() < num_places) actors_.push_back(std::make_unique<Actor>(*this, actors_.size(), ""));
}

void ActorPool::check_arguments() const {
  if (options_.unroll_length < 1 || options_.unroll_length > kMaxUnrollLength) {
    throw std::invalid_argument("unroll_length is " + std::to_string(options_.unroll_length) + ", must be 1 to " +
                                std::to_string(kMaxUnrollLength) + " steps");
  }
  if (options_.max_env_restarts < 0) {
    throw std::invalid_argument("max_env_restarts is " + std::to_string(options_.max_env_restarts) +
                                ", must be 0 or more");
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
    num_running_ = actors_.size();
    for (const auto& actor : actors_) {
      if (!listen_) executor_->post([actor = actor.get()] { actor->connect(); });
    }
  }
  const auto log_messages = [&] {
    std::vector<std::string> messages;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      messages.swap(messages_);
    }
    for (const std::string& message : messages) {
      if (log) log(message);
    }
  };
  bool is_listening = false;  // or another pool may be
  try {
    if (listen_) {
      listen_([this](auto stream, auto name) { return admit(std::move(stream), std::move(name)); });
      is_listening = true;
    }
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        Time next = Clock::now() + std::chrono::milliseconds(100);
        for (const auto& [time, actor] : resting_) next = std::min(next, time);
        changed_.wait_until(lock, next, [&] { return stopping_ || num_running_ == 0 || !messages_.empty(); });
        if (stopping_ || num_running_ == 0) break;
        const auto is_due = [now = Clock::now()](const auto& resting) { return resting.first <= now; };
        const auto due = std::stable_partition(resting_.begin(), resting_.end(), std::not_fn(is_due));
        for (auto it = due; it != resting_.end(); ++it) {
          executor_->post([actor = it->second] { actor->connect(); });
        }
        resting_.erase(due, resting_.end());
      }
      end_those_that_left();
      log_messages();
      if (interrupt) interrupt();
      const bool queue_closed = learner_queue_->is_closed(), batcher_closed = inference_batcher_->is_closed();
      if (listen_ ? queue_closed || batcher_closed : queue_closed && batcher_closed) break;
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
    if (is_listening) listen_(nullptr);
    connect_ = nullptr;  // with the threads of its transport
    log_messages();
  } catch (...) {
    fail(std::current_exception());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  num_connected_ = 0;
  ended_ = true;
  changed_.notify_all();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void ActorPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (const auto& actor : actors_) actor->cancel();
}

bool ActorPool::admit(std::shared_ptr<EnvStream> stream, std::string name) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_ || !started_) return false;
  for (const auto& actor : actors_) {
    if (!actor->is_free) continue;
    actor->is_free = false;
    ++streams_come_;
    executor_->post([actor = actor.get(), stream, name] { actor->admit(stream, name); });
    return true;
  }
  return false;
}

void ActorPool::stop_and_wait() {
  stop();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !started_ || ended_; });
}

ActorPoolCounters ActorPool::counters() const {
  ActorPoolCounters counters;
  counters.restarts = restarts_;
  counters.dropped_rollouts = dropped_rollouts_;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    counters.streams_connected = num_connected_;
  }
  counters.streams_come = streams_come_;
  counters.seconds_inference = inference_ns_ * 1e-9;
  counters.seconds_environment = environment_ns_ * 1e-9;
  counters.seconds_enqueue = enqueue_ns_ * 1e-9;
  return counters;
}

StreamSpec ActorPool::expect(const StreamSpec& spec) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!expected_) expected_ = spec;
  return *expected_;
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

void ActorPool::connect_later(Actor& actor, std::chrono::duration<double> pause) {
  std::lock_guard<std::mutex> lock(mutex_);
  resting_.emplace_back(Clock::now() + std::chrono::duration_cast<Clock::duration>(pause), &actor);
  changed_.notify_all();
}

bool ActorPool::keeps_waiting(Actor& actor) {
  if (!listen_) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  if (num_connected_ >= options_.min_streams) return false;
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
    waiting_.erase(waiting);
    executor_->post([actor] { actor->leave(); });
  }
}

void ActorPool::count_connected(int64_t change) {
  std::lock_guard<std::mutex> lock(mutex_);
  num_connected_ += change;
  if (!listen_ || num_connected_ < options_.min_streams) return;
  for (Actor* actor : waiting_) executor_->post([actor] { actor->go_on(); });
  waiting_.clear();
}

}  // namespace beast

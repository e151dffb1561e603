// ActorPool: one thread per stream of environments, which asks the inference batcher for actions and gives the learner
// queue whole rollouts. Knows neither Python nor what carries the streams.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "batching.h"
#include "env_stream.h"

namespace beast {

struct ActorPoolOptions {
  int64_t unroll_length = 0;  // T
  uint64_t seed = 1;
  int64_t max_env_restarts = 5;  // of one stream, in a row
};

struct ActorPoolCounters {
  int64_t steps = 0;  // of environments: rows x K, without the rows that begin a life
  int64_t restarts = 0;
  int64_t rollouts = 0;
  int64_t dropped_rollouts = 0;
  int64_t streams_connected = 0;
  int64_t rows_waiting = 0;  // in the learner queue
  // Of all streams together, waiting included.
  double seconds_inference = 0;
  double seconds_environment = 0;
  double seconds_enqueue = 0;
};

// An item of the learner queue is ((env_outputs, agent_outputs), initial_agent_state), its leaves [T+1, K, ...]:
// - env_outputs: (observation, reward, done, episode_step, episode_return, terminated, truncated);
// - agent_outputs: what inference answered, in row t what led to row t, so zeros in the first row of a stream's life;
// - row 0 repeats row T of the rollout before; the state is the one before row 0.
// Inference is given (env_outputs, agent_state), leaves [1, K, ...], and answers (agent_outputs, agent_state); the
// action is the first leaf.
class ActorPool {
 public:
  using Connect = std::function<std::unique_ptr<EnvStream>(const std::string& address)>;
  using Log = std::function<void(const std::string& message)>;

  // An address may be listed more than once. Leaves of `initial_agent_state` are [L, 1, ...]. Throws
  // std::invalid_argument.
  ActorPool(const ActorPoolOptions& options, std::shared_ptr<BatchingQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher, std::vector<std::string> addresses,
            ArrayNest initial_agent_state, Connect connect);
  ~ActorPool();

  // Until both queues are closed or stop() is called; then, and only then, it throws the first failure, if there was
  // one. Calls `interrupt` about every 100 ms and `log` for every environment that is lost. No thread is left when it
  // is done.
  void run(const Interrupt& interrupt, const Log& log);
  void stop();           // from any thread
  void stop_and_wait();  // until run() has no thread left; returns at once where run() was not called

  int64_t count() const { return steps_; }  // steps of environments so far
  ActorPoolCounters counters() const;
  std::vector<std::optional<StreamSpec>> specs() const;  // of each stream, once it was connected

 private:
  class Actor;  // one stream and its thread

  bool stopping() const { return stopping_; }
  void fail(std::exception_ptr failure);  // the first one counts
  void say(std::string message);
  bool pause(std::chrono::duration<double> duration);  // false if the pool stops meanwhile

  const ActorPoolOptions options_;
  const std::shared_ptr<BatchingQueue> learner_queue_;
  const std::shared_ptr<DynamicBatcher> inference_batcher_;
  const ArrayNest initial_agent_state_;
  const Connect connect_;

  std::atomic<int64_t> steps_{0}, restarts_{0}, rollouts_{0}, dropped_rollouts_{0}, streams_connected_{0};
  std::atomic<int64_t> inference_ns_{0}, environment_ns_{0}, enqueue_ns_{0};

  std::vector<std::unique_ptr<Actor>> actors_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  bool started_ = false;  // run() was called, and has
  bool ended_ = false;    // no thread any more
  size_t num_running_ = 0;
  std::exception_ptr failure_;
  std::vector<std::string> messages_;  // for run() to log
};

}  // namespace beast

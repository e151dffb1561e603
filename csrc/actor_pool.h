// ActorPool: steps many streams of environments on a few threads. It asks the inference batcher for actions and puts
// whole rollouts into the learner queue. Knows neither Python nor the streams' transport.
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
#include <utility>
#include <vector>

#include "batching.h"
#include "env_stream.h"
#include "executor.h"

namespace beast {

struct ActorPoolOptions {
  int64_t unroll_length = 0;  // T
  uint64_t seed = 1;
  int64_t max_env_restarts = 5;  // of a stream, in a row
  int64_t min_streams = 1 << 30;  // fewer that work end the run; by default the loss of any does. Where streams come
                                  // by themselves, the others wait while there are fewer
  std::optional<StreamSpec> expected = std::nullopt;  // of every stream; by default that of the first one
  std::chrono::milliseconds forgiven_after = std::chrono::minutes(10);  // a life that works this long resets its
                                                                        // stream's count of restarts, and its rest
};

struct ActorPoolCounters {
  int64_t restarts = 0;
  int64_t dropped_rollouts = 0;
  int64_t streams_connected = 0;
  int64_t streams_come = 0;  // so far, those that have gone too
  // Sums over all streams, including the time that they wait.
  double seconds_inference = 0;
  double seconds_environment = 0;
  double seconds_enqueue = 0;
};

// An item of the learner queue is ((env_outputs, agent_outputs), initial_agent_state), its leaves [T+1, K, ...]:
// - env_outputs: (observation, reward, done, episode_step, episode_return, terminated, truncated, group, life). `group`
//   (int32) is the index of the stream in the address list; `life` (int32) counts the stream's reconnections, 0 in its
//   first life. Both are constant in a rollout;
// - agent_outputs: inference's answers. Row t has the answer that led to row t, so the first row of a life has zeros;
// - row 0 repeats row T of the previous rollout; the state is the one before row 0.
// Inference gets (env_outputs, agent_state), leaves [1, K, ...], and answers (agent_outputs, agent_state). The first
// leaf of agent_outputs is the action; for a server that takes any action, all of the first entry is.
class ActorPool {
 public:
  using Connect = std::function<std::shared_ptr<EnvStream>(const std::string& address)>;
  // Takes a stream that has come, whose peer has this name. False if no place is free.
  using Admit = std::function<bool(std::shared_ptr<EnvStream> stream, std::string name)>;
  // Lets streams come, from now on; with null, no more. May throw.
  using Listen = std::function<void(Admit admit)>;
  using Log = std::function<void(const std::string& message)>;

  // Opens a stream for each address; an address may be listed more than once. Leaves of `initial_agent_state` are
  // [L, 1, ...]. Throws std::invalid_argument.
  ActorPool(const ActorPoolOptions& options, std::shared_ptr<BatchingQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher, std::vector<std::string> addresses,
            ArrayNest initial_agent_state, Connect connect);
  // Has room for `num_places` streams, which come and go by themselves.
  ActorPool(const ActorPoolOptions& options, std::shared_ptr<BatchingQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher, size_t num_places, ArrayNest initial_agent_state,
            Listen listen);
  ~ActorPool();

  // Runs until both queues are closed (of a pool that listens: one), stop() is called, or a stream fails for good. Then
  // it ends all streams, joins all
  // threads and throws the first failure, if any. Calls `interrupt` about every 100 ms, and `log` for every stream that
  // is lost.
  void run(const Interrupt& interrupt, const Log& log);
  void stop();           // may be called from any thread
  void stop_and_wait();  // waits until run() has joined its threads; returns at once if run() was not called

  // Environment steps so far: rows x K, without the rows that begin a life.
  int64_t count() const { return steps_; }
  ActorPoolCounters counters() const;

 private:
  class Actor;  // one stream after the other at one place

  using Time = std::chrono::steady_clock::time_point;

  void check_arguments() const;
  bool admit(std::shared_ptr<EnvStream> stream, std::string name);
  bool stopping() const { return stopping_; }
  StreamSpec expect(const StreamSpec& spec);  // the pool's first spec, which all others must equal
  void fail(std::exception_ptr failure);  // stops the pool; the first failure is the one that run() throws
  void say(std::string message);
  void connect_later(Actor& actor, std::chrono::duration<double> pause);
  bool keeps_waiting(Actor& actor);  // whether the actor has to wait until min_streams are there
  void count_connected(int64_t change);
  void end_those_that_left();  // while they waited for others: nothing else tells that they have

  const ActorPoolOptions options_;
  const std::shared_ptr<BatchingQueue> learner_queue_;
  const std::shared_ptr<DynamicBatcher> inference_batcher_;
  const ArrayNest initial_agent_state_;
  Connect connect_;  // null where streams come by themselves
  Listen listen_;    // else null

  std::atomic<int64_t> steps_{0}, restarts_{0}, dropped_rollouts_{0}, streams_come_{0}, num_retired_{0};
  std::atomic<int64_t> inference_ns_{0}, environment_ns_{0}, enqueue_ns_{0};

  std::vector<std::unique_ptr<Actor>> actors_;
  std::shared_ptr<Executor> executor_;  // what follows after an answer of inference or of the learner queue runs here
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool started_ = false;  // run() was called
  bool ended_ = false;    // run() has joined its threads
  size_t num_awaited_ = 0;  // events of streams
  size_t num_running_ = 0;  // actors that have not ended
  int64_t num_connected_ = 0;
  std::vector<std::pair<Time, Actor*>> resting_;  // until they connect again
  std::vector<Actor*> waiting_;                   // for other streams
  std::optional<StreamSpec> expected_;
  std::exception_ptr failure_;
  std::vector<std::string> messages_;  // for run() to log
};

}  // namespace beast

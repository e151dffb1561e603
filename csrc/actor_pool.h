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
#include "stream_source.h"

namespace beast {

struct ActorPoolOptions {
  int64_t unroll_length = 0;            // T
  std::vector<std::string> row_fields;  // those that env_outputs have (rollout.h), by name
  uint64_t seed = 1;
  std::optional<StreamSpec> expected = std::nullopt;  // of every stream; by default that of the first one
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

// Items of the learner queue, and what inference gets, are those of rollout.h. Inference answers (agent_outputs,
// agent_state), leaves [1, K, ...]. The first leaf of agent_outputs is the action; for a server that takes any action,
// all of the first entry is.
class ActorPool final : private StreamSource::Owner {
 public:
  using Log = std::function<void(const std::string& message)>;

  // Leaves of `initial_agent_state` are [L, 1, ...]. Throws std::invalid_argument.
  ActorPool(const ActorPoolOptions& options, std::shared_ptr<BatchingQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher, ArrayNest initial_agent_state,
            std::unique_ptr<StreamSource> source);
  ~ActorPool();

  // Runs until the queues are closed (both, or one: the source knows), stop() is called, or a stream fails for good.
  // Then it ends all streams, joins all threads and throws the first failure, if any. Calls `interrupt` about every
  // 100 ms, and `log` for every stream that is lost.
  void run(const Interrupt& interrupt, const Log& log);
  void stop();           // may be called from any thread
  void stop_and_wait();  // waits until run() has joined its threads; returns at once if run() was not called

  // Environment steps so far: rows x K, without the rows that begin a life.
  int64_t count() const { return steps_; }
  ActorPoolCounters counters() const;

  // From any thread. `progress` reaches each stream with its next hello or actions.
  void tell(std::string progress);
  // What the streams' rows have brought since the last call, oldest first. 4 MiB wait at most; more is dropped.
  std::vector<std::string> take_metrics();

 private:
  class Actor;  // one stream after the other at one place

  using Time = std::chrono::steady_clock::time_point;

  // For the source of the streams.
  bool begin(size_t place) override;
  void begin_after(size_t place, std::chrono::duration<double> pause) override;
  void end_place() override;
  void say(std::string message) override;
  void fail(std::exception_ptr failure) override;  // the first failure is the one that run() throws

  void check_arguments() const;
  bool wait_and_begin_those_due();  // waits for 100 ms at most; false if the run is over
  void log_messages(const Log& log);
  bool stopping() const { return stopping_; }
  // What `spec` has otherwise than the pool's first one, which all others must equal; empty if it is the first.
  std::string compare_with_first(const StreamSpec& spec);
  bool keeps_waiting(Actor& actor);  // whether the actor has to wait until enough others are there
  void count_connected(int64_t change);
  void keep_metrics(std::string metrics);
  void end_those_that_left();  // while they waited for others: nothing else tells that they have

  const ActorPoolOptions options_;
  const std::shared_ptr<BatchingQueue> learner_queue_;
  const std::shared_ptr<DynamicBatcher> inference_batcher_;
  const ArrayNest initial_agent_state_;
  const std::unique_ptr<StreamSource> source_;

  std::atomic<int64_t> steps_{0}, dropped_rollouts_{0};
  std::atomic<int64_t> inference_ns_{0}, environment_ns_{0}, enqueue_ns_{0};

  std::vector<std::unique_ptr<Actor>> actors_;  // one for each place
  std::shared_ptr<Executor> executor_;  // what follows after an answer of inference or of the learner queue runs here
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> num_told_{0};  // how often progress_ was set
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool started_ = false;    // run() was called
  bool ended_ = false;      // run() has joined its threads
  size_t num_awaited_ = 0;  // events of streams
  size_t num_places_ = 0;   // that have not ended
  int64_t num_connected_ = 0;
  std::vector<std::pair<Time, Actor*>> resting_;  // until they begin again
  std::vector<Actor*> waiting_;                   // for other streams
  std::optional<StreamSpec> expected_;
  std::exception_ptr failure_;
  std::vector<std::string> messages_;  // for run() to log
  std::string progress_;
  std::vector<std::string> metrics_;
  size_t metrics_bytes_ = 0;  // of all that wait
};

}  // namespace beast

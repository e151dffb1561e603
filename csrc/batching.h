// BatchingQueue and DynamicBatcher: many threads add rows of nests, other threads take them in batches. Nothing here
// knows Python. The bindings call it without the GIL, and pass an `Interrupt` through which Ctrl-C ends a wait.
//
// Every method may be called from any thread. The rows of an item are the elements of dimension `batch_dim`; all its
// leaves have the same number of rows. Misuse throws std::invalid_argument (ValueError in Python) with the value.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "array.h"
#include "nest.h"

namespace beast {

using ArrayNest = Nest<Array>;

struct ClosedBatchingQueue : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct AsyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct TimeoutError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A blocking call runs this about every 100 ms, without a lock. It throws to end the wait (Ctrl-C), and may be empty.
using Interrupt = std::function<void()>;

struct BatchingOptions {
  int64_t batch_dim = 1;
  int64_t minimum_batch_size = 1;  // rows that a consumer waits for
  int64_t maximum_batch_size = 1024;
  std::optional<std::chrono::milliseconds> timeout;  // once the first row is this old, fewer rows make a batch, too
  bool check_inputs = true;
  std::optional<int64_t> maximum_queue_size;  // rows; enqueue() waits while this many are queued
  // TorchBeast's rules, for compat/: the timeout begins when a consumer waits for a batch; a batch never shares memory
  // with an item; after outputs that do not fit, others may be set; a full batch at the closing of the queue goes to a
  // consumer that waits for it.
  bool as_torchbeast = false;
};

// What an item counts as: its rows, or one row, whatever its leaves have in dimension `batch_dim`. Such an item stays
// whole, and is answered with one row.
enum class Counts { kRows, kAsOne };

class Call;  // one compute() of a DynamicBatcher

// Items in order of arrival: the part that BatchingQueue and DynamicBatcher share.
class RowQueue {
 public:
  struct Part {  // rows [begin, begin + rows) of an item, or all of one that counts as one row
    ArrayNest item;
    Counts counts;
    int64_t begin;
    int64_t rows;
    std::chrono::steady_clock::time_point arrival;
    std::shared_ptr<Call> call;  // waits for the outputs of these rows; null in a BatchingQueue
  };

  RowQueue(const BatchingOptions& options, bool may_split);

  // Gets null when an item is queued, else why it never will be. Called with the queue's lock, which it may not use.
  using Entered = std::function<void(std::exception_ptr failure)>;

  // Adds an item, and waits while the queue is full. Throws std::invalid_argument if it cannot be queued.
  void put(ArrayNest item, Counts counts, std::shared_ptr<Call> call, const Interrupt& interrupt);
  // The same without waiting: a consumer that makes room lets the item in. Throws std::invalid_argument.
  void put_later(ArrayNest item, Counts counts, Entered entered);
  // The rows of a batch; none if they have not come by `give_up`.
  std::vector<Part> take(const Interrupt& interrupt,
                         std::optional<std::chrono::steady_clock::time_point> give_up = std::nullopt);
  void remove(const Call* call);  // if its rows are still queued
  int64_t size() const;
  bool is_closed() const;
  void close();

  const BatchingOptions& options() const { return options_; }

 private:
  using Time = std::chrono::steady_clock::time_point;

  int64_t count_rows(const ArrayNest& item, Counts counts) const;
  // When fewer rows than the minimum make a batch, for a consumer that waits since `since`; none if never.
  std::optional<Time> deadline(Time since) const;
  bool is_full() const;
  void let_in(Part part);  // throws what put() throws
  void let_in_waiting();
  void check_joins(const ArrayNest& item) const;

  const BatchingOptions options_;
  const bool may_split_;
  mutable std::mutex mutex_;
  std::condition_variable rows_came_;
  std::deque<Part> parts_;
  int64_t num_rows_ = 0;
  int64_t num_waiting_ = 0;  // consumers
  // Items that wait for room, in order of arrival: otherwise others could overtake a rollout again and again while its
  // policy lag grows. There are none while there is room.
  struct Waiting {
    Part part;
    Entered entered;
  };
  std::list<Waiting> waiting_;
  bool closed_ = false;
};

// A queue of rows that are taken in batches of `minimum_batch_size` to `maximum_batch_size`. An item that does not fit
// into a batch is split; its rows keep their order. An item that is a whole batch is handed on without a copy.
class BatchingQueue {
 public:
  explicit BatchingQueue(const BatchingOptions& options);

  // Waits while `maximum_queue_size` rows are queued; calls proceed in order of arrival. Throws ClosedBatchingQueue.
  void enqueue(ArrayNest item, const Interrupt& interrupt, Counts counts = Counts::kRows);
  // The same without waiting. `entered` is called once the item is queued or the queue is closed, in any thread, which
  // may be this one. Throws std::invalid_argument.
  void enqueue_later(ArrayNest item, RowQueue::Entered entered);
  // The next batch, its leaves joined along batch_dim. None if it has not come within `timeout`; what has come of it
  // stays queued. Throws ClosedBatchingQueue.
  std::optional<ArrayNest> dequeue(const Interrupt& interrupt,
                                   std::optional<std::chrono::milliseconds> timeout = std::nullopt);

  int64_t size() const { return rows_.size(); }  // rows waiting
  const BatchingOptions& options() const { return rows_.options(); }
  bool is_closed() const { return rows_.is_closed(); }
  void close() { rows_.close(); }  // drops what is queued and wakes every waiter; std::runtime_error the second time

 private:
  RowQueue rows_;
};

// The joined inputs of several compute() calls, for a consumer to answer. If it is destroyed before, the calls throw
// AsyncError.
class Batch {
 public:
  Batch(std::vector<RowQueue::Part> parts, const BatchingOptions& options, bool check_outputs);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  const ArrayNest& inputs() const { return inputs_; }
  // Gives each caller its rows. Throws std::invalid_argument if the outputs do not fit, and then the callers throw
  // AsyncError with the same message (see refuse()). Throws std::runtime_error if the batch was answered before.
  void set_outputs(const ArrayNest& outputs);
  // Outputs do not fit: makes the callers throw AsyncError with this message. They wait for others `as_torchbeast`.
  // Does nothing if the batch was answered before.
  void refuse(const std::string& message);

 private:
  struct Caller {
    std::shared_ptr<Call> call;
    int64_t rows;
  };

  std::vector<ArrayNest> split(const ArrayNest& outputs) const;  // one part for each caller
  void fail(const std::string& message);

  const int64_t batch_dim_;
  const bool as_torchbeast_;
  const bool check_outputs_;
  std::vector<Caller> callers_;
  ArrayNest inputs_;
  int64_t num_rows_ = 0;
  std::atomic<bool> answered_{false};
};

// A function call that is answered in batches: many threads call compute(), a consumer takes their inputs as one Batch
// and sets its outputs. An item is never split.
class DynamicBatcher {
 public:
  // Ignores `options.check_inputs` and `options.maximum_queue_size`: it always checks inputs, and callers wait anyway.
  explicit DynamicBatcher(BatchingOptions options, bool check_outputs = true);
  ~DynamicBatcher();

  // Waits for the outputs of this item's rows. Throws ClosedBatchingQueue, AsyncError (the consumer failed),
  // TimeoutError, std::invalid_argument.
  ArrayNest compute(ArrayNest inputs, const Interrupt& interrupt,
                    std::optional<std::chrono::milliseconds> timeout = std::chrono::minutes(10),
                    Counts counts = Counts::kRows);
  // The two steps of compute(): it queues the inputs without waiting, and waits for the outputs.
  struct Pending;
  std::shared_ptr<Pending> start(ArrayNest inputs, Counts counts);
  ArrayNest wait(const Pending& pending, const Interrupt& interrupt, std::optional<std::chrono::milliseconds> timeout);
  // compute() without waiting: `answered` gets the outputs, or what compute() would have thrown, once, in any thread.
  // `is_last` says that it is the last of a batch's answers: no other waits for it to return.
  using Answered = std::function<void(ArrayNest outputs, std::exception_ptr failure, bool is_last)>;
  void compute_later(ArrayNest inputs, Answered answered);
  // The next batch. Throws ClosedBatchingQueue.
  std::shared_ptr<Batch> next(const Interrupt& interrupt);

  int64_t size() const { return rows_.size(); }  // rows waiting to be taken
  const BatchingOptions& options() const { return rows_.options(); }
  bool is_closed() const { return rows_.is_closed(); }
  // Wakes every consumer and ends every compute(), the taken but unanswered ones too. std::runtime_error the second
  // time.
  void close();

 private:
  // The calls in progress. A batch may be answered when its batcher is gone.
  struct Calls {
    std::mutex mutex;
    std::set<std::shared_ptr<Call>> calls;

    void add(std::shared_ptr<Call> call);
    void remove(const std::shared_ptr<Call>& call);
  };

  RowQueue rows_;
  const bool check_outputs_;
  const std::shared_ptr<Calls> calls_;
};

}  // namespace beast

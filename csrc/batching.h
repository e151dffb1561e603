// BatchingQueue and DynamicBatcher: rows of nests, brought together by many threads, taken away in batches by others.
// Everything here blocks without Python: the bindings release the GIL and poll `Interrupt` for Ctrl-C.
//
// All methods may be called from any thread. An item's rows are the elements of dimension `batch_dim`, of which all its
// leaves have equally many. Errors of use are std::invalid_argument (Python's ValueError) and name what they saw.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
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

// Called about every 100 ms in every blocking wait, with no lock held; it throws to end the wait (a Python thread's
// KeyboardInterrupt). An empty one is never called.
using Interrupt = std::function<void()>;

enum class Pending { kDrop, kDrain };  // what close() does with what is still queued

struct BatchingOptions {
  int64_t batch_dim = 1;
  int64_t minimum_batch_size = 1;  // rows that a waiting consumer is given at once
  int64_t maximum_batch_size = 1024;
  std::optional<std::chrono::milliseconds> timeout;  // after which a first row waits for no minimum any more
  bool check_inputs = true;
  std::optional<int64_t> maximum_queue_size;  // rows; enqueue() waits while there are so many
};

class Call;  // one DynamicBatcher::compute() on its way

// Items of rows in order of arrival: what BatchingQueue and DynamicBatcher have in common.
class RowQueue {
 public:
  struct Part {  // rows [begin, begin + rows) of an item
    ArrayNest item;
    int64_t begin;
    int64_t rows;
    std::chrono::steady_clock::time_point arrival;
    std::shared_ptr<Call> call;  // who waits for these rows' outputs; null in a BatchingQueue
  };

  RowQueue(const BatchingOptions& options, bool may_split);

  int64_t count_rows(const ArrayNest& item) const;  // throws std::invalid_argument on what cannot be queued
  void put(ArrayNest item, int64_t rows, std::shared_ptr<Call> call, const Interrupt& interrupt);
  std::vector<Part> take(const Interrupt& interrupt);
  void remove(const Call* call);  // if it is still waiting
  int64_t size() const;
  bool is_closed() const;
  void close(Pending pending);

  const BatchingOptions& options() const { return options_; }

 private:
  bool ready(std::chrono::steady_clock::time_point now) const;
  void check_joins(const ArrayNest& item) const;

  const BatchingOptions options_;
  const bool may_split_;
  mutable std::mutex mutex_;
  std::condition_variable rows_came_;
  std::condition_variable rows_went_;
  std::deque<Part> parts_;
  int64_t num_rows_ = 0;
  std::set<uint64_t> turns_;  // of those who wait in put() for room
  uint64_t next_turn_ = 0;
  bool closed_ = false;
};

// What many threads enqueue, iterated over in batches of `minimum_batch_size` to `maximum_batch_size` rows. An item
// that does not fit is split, its rows in order; one that is a batch by itself is handed on without a copy.
class BatchingQueue {
 public:
  explicit BatchingQueue(const BatchingOptions& options);

  // Waits while `maximum_queue_size` rows are there; who came first goes first. Throws ClosedBatchingQueue.
  void enqueue(ArrayNest item, const Interrupt& interrupt);
  // The next batch, its leaves joined along batch_dim. Throws ClosedBatchingQueue after the last one.
  ArrayNest dequeue(const Interrupt& interrupt);

  int64_t size() const { return rows_.size(); }  // rows waiting
  bool is_closed() const { return rows_.is_closed(); }
  void close(Pending pending) { rows_.close(pending); }  // wakes every waiter; std::runtime_error the second time

 private:
  RowQueue rows_;
};

// Inputs of several compute() calls, joined; whoever has it owes them an answer. One that is destroyed unanswered
// gives them AsyncError.
class Batch {
 public:
  Batch(std::vector<RowQueue::Part> parts, int64_t batch_dim, bool check_outputs);
  ~Batch();
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  const ArrayNest& inputs() const { return inputs_; }
  int64_t num_rows() const { return num_rows_; }
  // Gives each caller its rows. Outputs that do not fit throw std::invalid_argument here and AsyncError with the same
  // message in the callers; an answer to an answered batch is a std::runtime_error.
  void set_outputs(const ArrayNest& outputs);
  // Callers get AsyncError with this message. Does nothing to a batch that was answered.
  void set_error(const std::string& message);

 private:
  struct Caller {
    std::shared_ptr<Call> call;
    int64_t rows;
  };

  std::vector<ArrayNest> split(const ArrayNest& outputs) const;  // by callers

  const int64_t batch_dim_;
  const bool check_outputs_;
  std::vector<Caller> callers_;
  ArrayNest inputs_;
  int64_t num_rows_ = 0;
  std::atomic<bool> answered_{false};
};

// A function call that is answered in batches: many threads compute(), another takes their inputs as one Batch and sets
// its outputs. Never splits an item.
class DynamicBatcher {
 public:
  // `options.check_inputs` and `.maximum_queue_size` are ignored: inputs are always checked, and callers wait anyway.
  explicit DynamicBatcher(BatchingOptions options, bool check_outputs = true);
  ~DynamicBatcher();

  // Waits for this item's rows of the outputs. Throws ClosedBatchingQueue (closed before, or dropped by closing),
  // AsyncError (the consumer failed), TimeoutError, std::invalid_argument.
  ArrayNest compute(ArrayNest inputs, const Interrupt& interrupt,
                    std::optional<std::chrono::milliseconds> timeout = std::chrono::minutes(10));
  // The next batch. Throws ClosedBatchingQueue after the last one.
  std::shared_ptr<Batch> next(const Interrupt& interrupt);

  int64_t size() const { return rows_.size(); }  // rows waiting to be taken
  bool is_closed() const { return rows_.is_closed(); }
  // Wakes every consumer. kDrop also ends every compute(), the taken but unanswered ones too; kDrain leaves them to the
  // consumer. std::runtime_error the second time.
  void close(Pending pending);

 private:
  RowQueue rows_;
  const bool check_outputs_;
  std::mutex mutex_;
  std::set<std::shared_ptr<Call>> calls_;  // in compute() now
};

}  // namespace beast

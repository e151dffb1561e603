#include "batching.h"

#include <algorithm>
#include <utility>

namespace beast {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPollInterval = std::chrono::milliseconds(100);  // how long a Ctrl-C may go unnoticed

// The waits of one blocking call. If there is an interrupt, it is called between slices of a wait.
class Waiter {
 public:
  explicit Waiter(const Interrupt& interrupt) : interrupt_(interrupt), next_poll_(Clock::now() + kPollInterval) {}

  // Returns after a notification, at the deadline, or earlier: the caller has to check its condition again.
  void wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock,
            std::optional<Clock::time_point> deadline = std::nullopt) {
    if (interrupt_ && Clock::now() >= next_poll_) {
      lock.unlock();  // the interrupt takes the GIL, whose holder may be waiting for this lock
      interrupt_();
      lock.lock();
      next_poll_ = Clock::now() + kPollInterval;
      return;  // a notification may have been missed
    }
    if (interrupt_) deadline = deadline ? std::min(*deadline, next_poll_) : next_poll_;
    if (deadline) {
      condition.wait_until(lock, *deadline);
    } else {
      condition.wait(lock);
    }
  }

 private:
  const Interrupt& interrupt_;
  Clock::time_point next_poll_;
};

void check_options(const BatchingOptions& options) {
  const auto got = [](const char* rule, int64_t value) {
    return std::invalid_argument(rule + (", but got " + std::to_string(value)));
  };
  if (options.batch_dim < 0) throw got("Batch dim must be >= 0", options.batch_dim);
  if (options.minimum_batch_size < 1) throw got("Min batch size must be >= 1", options.minimum_batch_size);
  if (options.maximum_batch_size < options.minimum_batch_size) {
    throw got("Max batch size must be >= min batch size", options.maximum_batch_size);
  }
  if (options.timeout && options.timeout->count() < 0) throw got("Timeout must be >= 0 ms", options.timeout->count());
  if (options.maximum_queue_size && *options.maximum_queue_size < options.maximum_batch_size) {
    throw got("Max queue size must be >= max batch size", *options.maximum_queue_size);
  }
}

// Why two items cannot be joined along batch_dim; empty if they can.
std::string why_not_joined(const ArrayNest& a, const ArrayNest& b, size_t batch_dim) {
  if (a.is_leaf() && b.is_leaf()) {
    Shape shape = a.leaf().shape();
    if (batch_dim < shape.size() && batch_dim < b.leaf().shape().size()) shape[batch_dim] = b.leaf().shape()[batch_dim];
    if (a.leaf().dtype() == b.leaf().dtype() && shape == b.leaf().shape()) return "";
    return std::string(dtype_name(a.leaf().dtype())) + to_string(a.leaf().shape()) + " and " +
           dtype_name(b.leaf().dtype()) + to_string(b.leaf().shape());
  }
  if (a.is_tuple() && b.is_tuple()) {
    if (a.tuple().size() != b.tuple().size()) {
      return "tuples of lengths " + std::to_string(a.tuple().size()) + " and " + std::to_string(b.tuple().size());
    }
    for (size_t i = 0; i < a.tuple().size(); ++i) {
      if (std::string why = why_not_joined(a.tuple()[i], b.tuple()[i], batch_dim); !why.empty()) return why;
    }
    return "";
  }
  if (a.is_dict() && b.is_dict()) {
    auto other = b.dict().begin();
    for (const auto& [name, part] : a.dict()) {
      if (other == b.dict().end() || other->first != name)
        return "dicts with different keys: only one has \"" + name + "\"";
      if (std::string why = why_not_joined(part, other->second, batch_dim); !why.empty()) return why;
      ++other;
    }
    return other == b.dict().end() ? "" : "dicts with different keys: only one has \"" + other->first + "\"";
  }
  return "different structures";
}

Columns columns_of(const RowQueue::Part& part, const Array& leaf, int64_t batch_dim) {
  if (part.counts == Counts::kRows) return {leaf, part.begin, part.rows};
  const Shape& shape = leaf.shape();  // concatenate() refuses a leaf without this dimension
  return {leaf, 0, batch_dim < static_cast<int64_t>(shape.size()) ? shape[batch_dim] : 1};
}

// Joins the parts, copying each once. A part that is a whole item is not copied if it is the only one, except
// `as_torchbeast`.
ArrayNest join(const std::vector<RowQueue::Part>& parts, const BatchingOptions& options) {
  const int64_t batch_dim = options.batch_dim;
  std::vector<std::vector<Array>> leaves;
  for (const RowQueue::Part& part : parts) {
    if (std::string why = why_not_joined(parts[0].item, part.item, batch_dim); !why.empty()) {
      throw std::invalid_argument("items cannot be batched along dimension " + std::to_string(batch_dim) + ": " + why);
    }
    leaves.push_back(part.item.flatten());
  }
  std::vector<Array> joined;
  for (size_t leaf = 0; leaf < leaves[0].size(); ++leaf) {
    std::vector<Columns> columns;
    for (size_t i = 0; i < parts.size(); ++i) columns.push_back(columns_of(parts[i], leaves[i][leaf], batch_dim));
    joined.push_back(concatenate(columns, batch_dim));
    if (options.as_torchbeast && joined.back().owner() == leaves[0][leaf].owner()) {
      joined.back() = joined.back().copied();
    }
  }
  return parts[0].item.pack_as(joined);
}

}  // namespace

RowQueue::RowQueue(const BatchingOptions& options, bool may_split) : options_(options), may_split_(may_split) {
  check_options(options_);
}

int64_t RowQueue::count_rows(const ArrayNest& item, Counts counts) const {
  const bool as_one = counts == Counts::kAsOne;
  if (as_one && !options_.check_inputs) return 1;
  const int64_t dim = options_.batch_dim;
  std::optional<int64_t> rows;
  item.for_each([&](const Array& leaf) {
    if (rows && !options_.check_inputs) return;  // unchecked: only the first leaf's rows are counted
    const Shape& shape = leaf.shape();
    if (static_cast<int64_t>(shape.size()) <= dim) {
      throw std::invalid_argument("Enqueued tensors must have more than batch_dim == " + std::to_string(dim) +
                                  " dimensions, but got " + std::to_string(shape.size()) + ", shape " +
                                  to_string(shape));
    }
    if (rows && *rows != shape[dim] && !as_one) {
      throw std::invalid_argument("Enqueued tensors must have equally many rows in dimension " + std::to_string(dim) +
                                  ", but got " + std::to_string(*rows) + " and " + std::to_string(shape[dim]) +
                                  ", shape " + to_string(shape));
    }
    rows = shape[dim];
  });
  if (!rows) throw std::invalid_argument("Cannot enqueue empty vector of tensors: the nest has no leaf");
  if (as_one) return 1;
  if (*rows == 0)
    throw std::invalid_argument("Cannot enqueue no rows: dimension " + std::to_string(dim) + " has size 0");
  if (!may_split_ && *rows > options_.maximum_batch_size) {
    throw std::invalid_argument("Inputs of " + std::to_string(*rows) + " rows exceed the maximum batch size of " +
                                std::to_string(options_.maximum_batch_size) +
                                ": raise maximum_batch_size or compute fewer rows at once");
  }
  return *rows;
}

// Refuses an item that cannot be joined with those in the queue. If it were let in, a whole batch would fail.
void RowQueue::check_joins(const ArrayNest& item) const {
  if (!options_.check_inputs || options_.maximum_batch_size == 1 || parts_.empty()) return;
  if (std::string why = why_not_joined(parts_.back().item, item, options_.batch_dim); !why.empty()) {
    throw std::invalid_argument("Cannot be batched along dimension " + std::to_string(options_.batch_dim) +
                                " with what is waiting: " + why);
  }
}

void RowQueue::put(ArrayNest item, Counts counts, std::shared_ptr<Call> call, const Interrupt& interrupt) {
  const int64_t rows = count_rows(item, counts);
  Waiter waiter(interrupt);
  std::unique_lock lock(mutex_);
  Part part{std::move(item), counts, 0, rows, Clock::now(), std::move(call)};
  if (!is_full()) return let_in(std::move(part));
  // A condition of its own: a notification of all of a thousand that let one in would cost 17 ms.
  std::condition_variable ended;
  bool has_ended = false;
  std::exception_ptr failure;
  const auto place = waiting_.insert(waiting_.end(), {std::move(part), [&](std::exception_ptr why) {
                                                        has_ended = true;
                                                        failure = std::move(why);
                                                        ended.notify_one();
                                                      }});
  try {
    while (!has_ended) waiter.wait(ended, lock);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    if (!has_ended) waiting_.erase(place);
    throw;
  }
  if (failure) std::rethrow_exception(failure);
}

void RowQueue::put_later(ArrayNest item, Counts counts, Entered entered) {
  const int64_t rows = count_rows(item, counts);
  std::unique_lock lock(mutex_);
  waiting_.push_back({{std::move(item), counts, 0, rows, Clock::now(), nullptr}, std::move(entered)});
  let_in_waiting();
}

bool RowQueue::is_full() const {
  return options_.maximum_queue_size && !closed_ && num_rows_ >= *options_.maximum_queue_size;
}

void RowQueue::let_in(Part part) {
  if (closed_) throw ClosedBatchingQueue("Enqueue to closed queue");
  check_joins(part.item);
  num_rows_ += part.rows;
  part.arrival = Clock::now();
  parts_.push_back(std::move(part));
  // A consumer has to wake up when the minimum is reached, or to wait for the timeout that a first row starts.
  if (num_rows_ >= options_.minimum_batch_size || (options_.timeout && parts_.size() == 1)) rows_came_.notify_one();
}

void RowQueue::let_in_waiting() {
  while (!waiting_.empty() && !is_full()) {
    Waiting next = std::move(waiting_.front());
    waiting_.pop_front();
    std::exception_ptr failure;
    try {
      let_in(std::move(next.part));
    } catch (...) {
      failure = std::current_exception();
    }
    next.entered(failure);
  }
}

std::optional<RowQueue::Time> RowQueue::deadline(Time since) const {
  if (!options_.timeout || parts_.empty()) return std::nullopt;
  const Time arrival = parts_.front().arrival;
  return (options_.as_torchbeast ? std::max(arrival, since) : arrival) + *options_.timeout;
}

std::vector<RowQueue::Part> RowQueue::take(const Interrupt& interrupt, std::optional<Time> give_up) {
  Waiter waiter(interrupt);
  const Time since = Clock::now();
  std::deque<Part> dropped;  // freed after the lock is released
  std::unique_lock lock(mutex_);
  if (closed_) throw ClosedBatchingQueue("Dequeue from closed queue");
  ++num_waiting_;
  const auto leave = [&] {
    if (--num_waiting_ || !closed_) return;
    dropped.swap(parts_);
    num_rows_ = 0;
  };
  const auto leave_without = [&] {
    leave();
    rows_came_.notify_one();  // this thread may have consumed a notification that another consumer needs
  };
  try {
    while (parts_.empty() || num_rows_ < options_.minimum_batch_size) {
      if (closed_) throw ClosedBatchingQueue("Dequeue from closed queue");
      const Time now = Clock::now();
      std::optional<Time> end = deadline(since);
      if (end && now >= *end) break;
      if (give_up && now >= *give_up) {
        leave_without();
        return {};
      }
      if (give_up) end = end ? std::min(*end, *give_up) : *give_up;
      waiter.wait(rows_came_, lock, end);
    }
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    leave_without();
    throw;
  }

  std::vector<Part> taken;
  int64_t room = options_.maximum_batch_size;
  while (!parts_.empty() && room > 0) {
    Part& front = parts_.front();
    if (front.rows > room && !may_split_) break;  // never the first: put() refuses items wider than a batch
    const int64_t rows = std::min(front.rows, room);
    room -= rows;
    num_rows_ -= rows;
    if (rows == front.rows) {
      taken.push_back(std::move(front));
      parts_.pop_front();
    } else {
      taken.push_back(front);
      taken.back().rows = rows;
      front.begin += rows;
      front.rows -= rows;
    }
  }
  leave();
  if (!parts_.empty()) rows_came_.notify_one();
  let_in_waiting();
  return taken;
}

void RowQueue::remove(const Call* call) {
  std::deque<Part> removed;  // freed after the lock is released
  std::lock_guard lock(mutex_);
  const auto part = std::find_if(parts_.begin(), parts_.end(), [&](const Part& p) { return p.call.get() == call; });
  if (part == parts_.end()) return;
  num_rows_ -= part->rows;
  removed.push_back(std::move(*part));
  parts_.erase(part);
}

int64_t RowQueue::size() const {
  std::lock_guard lock(mutex_);
  return num_rows_;
}

bool RowQueue::is_closed() const {
  std::lock_guard lock(mutex_);
  return closed_;
}

void RowQueue::close() {
  std::deque<Part> dropped;  // freed after the lock is released
  std::lock_guard lock(mutex_);
  if (closed_) throw std::runtime_error("Queue was closed already");
  closed_ = true;
  // The consumers in take() have been woken for a full batch: it would depend on the scheduler who is the first.
  if (!options_.as_torchbeast || num_waiting_ == 0 || num_rows_ < options_.minimum_batch_size) {
    dropped.swap(parts_);
    num_rows_ = 0;
  }
  rows_came_.notify_all();
  let_in_waiting();  // tells them that the queue is closed
}

BatchingQueue::BatchingQueue(const BatchingOptions& options) : rows_(options, /*may_split=*/true) {}

void BatchingQueue::enqueue(ArrayNest item, const Interrupt& interrupt, Counts counts) {
  rows_.put(std::move(item), counts, nullptr, interrupt);
}

void BatchingQueue::enqueue_later(ArrayNest item, RowQueue::Entered entered) {
  rows_.put_later(std::move(item), Counts::kRows, std::move(entered));
}

std::optional<ArrayNest> BatchingQueue::dequeue(const Interrupt& interrupt,
                                                std::optional<std::chrono::milliseconds> timeout) {
  const std::vector<RowQueue::Part> parts =
      rows_.take(interrupt, timeout ? std::optional(Clock::now() + *timeout) : std::nullopt);
  return parts.empty() ? std::nullopt : std::optional(join(parts, rows_.options()));
}

// A compute() that waits for its answer. Only the first answer counts.
class Call : public std::enable_shared_from_this<Call> {
 public:
  using Ended = std::function<void(const std::shared_ptr<Call>& call, bool is_last)>;

  explicit Call(Ended ended = nullptr) : ended_(std::move(ended)) {}

  void answer(ArrayNest&& outputs, bool is_last) { end(std::move(outputs), nullptr, is_last); }
  void fail(const std::string& message) { end({}, std::make_exception_ptr(AsyncError(message))); }
  void close() { end({}, std::make_exception_ptr(ClosedBatchingQueue("Batching queue closed during compute"))); }

  ArrayNest wait(const Interrupt& interrupt, std::optional<std::chrono::milliseconds> timeout) {
    Waiter waiter(interrupt);
    std::optional<Clock::time_point> deadline;
    if (timeout) deadline = Clock::now() + *timeout;
    std::unique_lock lock(mutex_);
    while (!has_ended_) {
      if (deadline && Clock::now() >= *deadline) {
        throw TimeoutError("Compute timeout reached. No consumer set outputs within " +
                           std::to_string(timeout->count()) + " ms");
      }
      waiter.wait(changed_, lock, deadline);
    }
    if (failure_) std::rethrow_exception(failure_);
    return std::move(outputs_);
  }

  // For `ended`, which is called without a lock.
  ArrayNest outputs() { return std::move(outputs_); }
  std::exception_ptr failure() const { return failure_; }

 private:
  void end(ArrayNest&& outputs, std::exception_ptr failure, bool is_last = false) {
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(has_ended_, true)) return;
      outputs_ = std::move(outputs);
      failure_ = std::move(failure);
      changed_.notify_one();
    }
    if (ended_) ended_(shared_from_this(), is_last);
  }

  const Ended ended_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_ended_ = false;
  ArrayNest outputs_;
  std::exception_ptr failure_;
};

Batch::Batch(std::vector<RowQueue::Part> parts, const BatchingOptions& options, bool check_outputs)
    : batch_dim_(options.batch_dim), as_torchbeast_(options.as_torchbeast), check_outputs_(check_outputs) {
  for (const RowQueue::Part& part : parts) {
    callers_.push_back({part.call, part.rows});
    num_rows_ += part.rows;
  }
  try {
    inputs_ = join(parts, options);
  } catch (const std::exception& error) {  // ~Batch() does not run if the constructor throws
    fail(error.what());
    throw;
  }
}

Batch::~Batch() { fail("The batch was dropped unanswered: its consumer did not call set_outputs"); }

void Batch::refuse(const std::string& message) {
  if (!as_torchbeast_) fail(message);
}

void Batch::fail(const std::string& message) {
  if (answered_.exchange(true)) return;
  for (const Caller& caller : callers_) caller.call->fail(message);
}

void Batch::set_outputs(const ArrayNest& outputs) {
  if (answered_) throw std::runtime_error("set_outputs called twice");
  std::vector<ArrayNest> parts;
  try {
    parts = split(outputs);
  } catch (const std::exception& error) {
    refuse(error.what());
    throw;
  }
  if (answered_.exchange(true)) throw std::runtime_error("set_outputs called twice");
  for (size_t i = 0; i < parts.size(); ++i) callers_[i].call->answer(std::move(parts[i]), i + 1 == parts.size());
}

std::vector<ArrayNest> Batch::split(const ArrayNest& outputs) const {
  if (check_outputs_) {
    outputs.for_each([&](const Array& leaf) {
      const Shape& shape = leaf.shape();
      if (static_cast<int64_t>(shape.size()) <= batch_dim_) {
        throw std::invalid_argument("With batch dimension " + std::to_string(batch_dim_) +
                                    ", output shape must have at least " + std::to_string(batch_dim_ + 1) +
                                    " dimensions, but got " + to_string(shape));
      }
      if (shape[batch_dim_] != num_rows_) {
        throw std::invalid_argument(
            "Output shape must have the same batch dimension as the input batch size. Expected: " +
            std::to_string(num_rows_) + ". Observed: " + std::to_string(shape[batch_dim_]));
      }
    });
  }
  std::vector<ArrayNest> parts;
  int64_t begin = 0;
  for (const Caller& caller : callers_) {
    parts.push_back(outputs.map([&](const Array& leaf) { return slice(leaf, batch_dim_, begin, caller.rows); }));
    begin += caller.rows;
  }
  return parts;
}

namespace {

BatchingOptions batcher_options(BatchingOptions options) {
  options.check_inputs = true;
  options.maximum_queue_size.reset();
  return options;
}

}  // namespace

DynamicBatcher::DynamicBatcher(BatchingOptions options, bool check_outputs)
    : rows_(batcher_options(std::move(options)), /*may_split=*/false),
      check_outputs_(check_outputs),
      calls_(std::make_shared<Calls>()) {}

DynamicBatcher::~DynamicBatcher() {
  std::set<std::shared_ptr<Call>> calls;  // freed after the lock is released; a call owns the set that it is in
  std::lock_guard lock(calls_->mutex);
  calls.swap(calls_->calls);
}

ArrayNest DynamicBatcher::compute(ArrayNest inputs, const Interrupt& interrupt,
                                  std::optional<std::chrono::milliseconds> timeout, Counts counts) {
  return wait(*start(std::move(inputs), counts), interrupt, timeout);
}

void DynamicBatcher::Calls::add(std::shared_ptr<Call> call) {
  std::lock_guard lock(mutex);
  calls.insert(std::move(call));
}

void DynamicBatcher::Calls::remove(const std::shared_ptr<Call>& call) {
  std::lock_guard lock(mutex);
  calls.erase(call);
}

// Lets close() find a call while it lasts, and takes its rows off the queue however it ends.
struct DynamicBatcher::Pending {
  explicit Pending(DynamicBatcher& b) : batcher(b), call(std::make_shared<Call>()) { batcher.calls_->add(call); }
  ~Pending() {
    batcher.rows_.remove(call.get());
    batcher.calls_->remove(call);
  }

  DynamicBatcher& batcher;
  const std::shared_ptr<Call> call;
};

std::shared_ptr<DynamicBatcher::Pending> DynamicBatcher::start(ArrayNest inputs, Counts counts) {
  const auto pending = std::make_shared<Pending>(*this);
  rows_.put(std::move(inputs), counts, pending->call, nullptr);  // which does not wait: the queue has no maximum
  return pending;
}

void DynamicBatcher::compute_later(ArrayNest inputs, Answered answered) {
  const auto call =
      std::make_shared<Call>([calls = calls_, answered = std::move(answered)](const auto& ended, bool is_last) {
        calls->remove(ended);
        answered(ended->outputs(), ended->failure(), is_last);
      });
  calls_->add(call);
  try {
    rows_.put(std::move(inputs), Counts::kRows, call, nullptr);
  } catch (const ClosedBatchingQueue&) {
    call->close();
  } catch (...) {
    calls_->remove(call);
    throw;
  }
}

ArrayNest DynamicBatcher::wait(const Pending& pending, const Interrupt& interrupt,
                               std::optional<std::chrono::milliseconds> timeout) {
  return pending.call->wait(interrupt, timeout);
}

std::shared_ptr<Batch> DynamicBatcher::next(const Interrupt& interrupt) {
  return std::make_shared<Batch>(rows_.take(interrupt), rows_.options(), check_outputs_);
}

void DynamicBatcher::close() {
  rows_.close();
  std::set<std::shared_ptr<Call>> calls;  // a copy, as calls leave the set when they end
  {
    std::lock_guard lock(calls_->mutex);
    calls = calls_->calls;
  }
  for (const std::shared_ptr<Call>& call : calls) call->close();
}

}  // namespace beast

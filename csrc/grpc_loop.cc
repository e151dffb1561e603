#include "grpc_loop.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>

#include "wire.h"

#ifdef __SANITIZE_THREAD__  // by gcc
#include <sanitizer/tsan_interface.h>
#else
#define __tsan_release(address)
#define __tsan_acquire(address)
#endif

namespace beast {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLookInterval{50};  // at the streams' timeouts

}  // namespace

std::string seconds(milliseconds duration) {
  std::string text = std::to_string(duration.count() / 1000.0);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

gpr_timespec deadline_after(milliseconds timeout) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(timeout.count(), GPR_TIMESPAN));
}

size_t num_loop_threads(size_t num_streams) {
  return std::clamp<size_t>(num_streams, 1, std::clamp<size_t>(std::thread::hardware_concurrency() / 4, 2, 8));
}

GrpcLoop::GrpcLoop(size_t num_threads) {
  try {
    for (size_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
  } catch (...) {  // the process may have no more threads
    end();
    throw;
  }
}

GrpcLoop::~GrpcLoop() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return num_calls_ == 0; });
  }
  end();
}

void GrpcLoop::end() {
  queue_.Shutdown();
  for (std::thread& thread : threads_) thread.join();
  void* tag;
  bool ok;
  while (queue_.Next(&tag, &ok)) {  // gRPC wants to be told that it is empty, where there was no thread
  }
}

// What comes before an operation comes before its event. ThreadSanitizer is told, as it does not see into gRPC.
void* GrpcLoop::tag(Then then) {
  void* tag = new Then(std::move(then));
  __tsan_release(tag);
  return tag;
}

std::unique_ptr<Then> GrpcLoop::then_of(void* tag) {
  __tsan_acquire(tag);
  return std::unique_ptr<Then>(static_cast<Then*>(tag));
}

void GrpcLoop::watch(std::weak_ptr<GrpcStream> stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back(std::move(stream));
}

void GrpcLoop::count_calls(int change) {
  std::lock_guard<std::mutex> lock(mutex_);
  num_calls_ += change;
  changed_.notify_all();
}

void GrpcLoop::run() {
  std::unique_ptr<Then> then;
  bool ok = false;
  const auto follow = [&] {
    if (then) (*then)(ok);
    then.reset();
  };
  for (;;) {
    look_at_timeouts();
    void* tag;
    // A write that `then` starts usually ends at once. This thread gets its event, too, and wakes no other for it.
    switch (queue_.DoThenAsyncNext(follow, &tag, &ok, deadline_after(kLookInterval))) {
      case grpc::CompletionQueue::SHUTDOWN:
        return;
      case grpc::CompletionQueue::GOT_EVENT:
        then = then_of(tag);
        break;
      case grpc::CompletionQueue::TIMEOUT:
        break;
    }
  }
}

void GrpcLoop::look_at_timeouts() {
  const Clock::time_point now = Clock::now();
  std::vector<std::shared_ptr<GrpcStream>> streams;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (now < next_look_) return;
    next_look_ = now + kLookInterval;
    for (auto it = streams_.begin(); it != streams_.end();) {
      if (auto stream = it->lock()) {
        streams.push_back(std::move(stream));
        ++it;
      } else {
        it = streams_.erase(it);
      }
    }
  }
  for (const auto& stream : streams) stream->look_at_timeout(now);
}

GrpcCall::GrpcCall(GrpcLoop& loop) : loop_(loop) { loop_.count_calls(1); }
GrpcCall::~GrpcCall() { loop_.count_calls(-1); }

void GrpcCall::operate(const std::function<void(void* tag)>& start, Then then) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++num_operations_;
  }
  start(GrpcLoop::tag([self = shared_from_this(), then = std::move(then)](bool ok) {
    then(ok);
    self->operation_ended();
  }));
}

void GrpcCall::operation_ended() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--num_operations_ > 0 || !finished_) return;
  }
  really_finish();
}

void GrpcCall::read(grpc::ByteBuffer* message, Then then) {
  operate([&](void* tag) { start_read(message, tag); }, std::move(then));
}

void GrpcCall::write(const std::string& message, Then then) {
  const grpc::Slice slice(message);
  operate([&](void* tag) { start_write(grpc::ByteBuffer(&slice, 1), tag); }, std::move(then));
}

void GrpcCall::finish(std::function<void(const grpc::Status& status)> then) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    finished_ = std::move(then);
    if (num_operations_ > 0) return;  // gRPC wants it to be the last
  }
  really_finish();
}

void GrpcCall::really_finish() {
  start_finish(&status_, GrpcLoop::tag([self = shared_from_this()](bool) {
                 const auto finished = std::move(self->finished_);  // it may hold the stream, which holds the call
                 finished(self->status_);
               }));
}

GrpcStream::GrpcStream(GrpcLoop& loop, std::string name, milliseconds env_timeout)
    : loop_(loop), name_(std::move(name)), env_timeout_(env_timeout) {}

void GrpcStream::set_row(const StreamSpec& spec) { rows_.emplace(spec); }

void GrpcStream::set_timeout(milliseconds timeout) {
  timeout_ = timeout;
  deadline_ = Clock::now() + timeout;
}

void GrpcStream::step(const Nest<Array>& actions, std::vector<std::byte*> destinations) {
  const std::string message = actions_message(actions, std::exchange(progress_, ""));
  exchange([&](GrpcCall& call, Then then) { call.write(message, std::move(then)); }, std::move(destinations));
}

void GrpcStream::exchange(const std::function<void(GrpcCall& call, Then then)>& send,
                          std::vector<std::byte*> destinations, milliseconds more_time) {
  std::lock_guard<std::mutex> lock(mutex_);
  destinations_ = std::move(destinations);
  num_awaited_ = send ? 2 : 1;
  set_timeout(env_timeout_ + more_time);
  const auto self = shared_from_this();
  if (send) send(*call_, [self](bool ok) { self->operation_ended(false, ok); });
  call_->read(&message_, [self](bool ok) { self->operation_ended(true, ok); });
}

void GrpcStream::operation_ended(bool is_read, bool ok) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_read) row_came_ = ok;
    if (--num_awaited_ > 0) return;
    deadline_.reset();
  }
  // Where sending has failed, the stream has ended, but the peer's last message may have come: why it has.
  if (!row_came_) return end(nullptr);
  std::string metrics;
  try {
    grpc::ProtoBufferReader reader(&message_);
    metrics = rows_->read(&reader, message_.Length(), destinations_);
  } catch (...) {
    return end(std::current_exception());
  }
  owner_->row_came(std::move(metrics));
}

void GrpcStream::cancel() {
  std::shared_ptr<GrpcCall> call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_cancelled_ = true;
    cancelled();
    call = call_;
  }
  if (call) call->cancel();
}

// Whoever destroys it has lost interest: the call ends by itself.
GrpcStream::~GrpcStream() {
  if (!call_ || has_ended_) return;
  call_->cancel();
  call_->finish([](const grpc::Status&) {});
}

void GrpcStream::end_politely() {
  std::shared_ptr<GrpcCall> call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(has_ended_, true)) return;
    call = call_;
  }
  call->finish([](const grpc::Status&) {});
}

void GrpcStream::look_at_timeout(Clock::time_point now) {
  std::shared_ptr<GrpcCall> call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!deadline_ || now < *deadline_) return;
    deadline_.reset();
    is_late_ = !has_ended_;
    call = call_;
  }
  if (call) call->cancel();
}

void GrpcStream::end(std::exception_ptr why) {
  std::shared_ptr<GrpcCall> call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(has_ended_, true)) return;
    if (is_late_) why = std::make_exception_ptr(ConnectionError("no answer within " + seconds(timeout_)));
    set_timeout(kStatusTimeout);
    call = call_;
  }
  if (why) call->cancel();
  call->finish([self = shared_from_this(), why](const grpc::Status& status) {
    {
      std::lock_guard<std::mutex> lock(self->mutex_);
      self->deadline_.reset();
    }
    self->tell_lost(why ? why : self->error_of(status));
  });
}

// Adds the name to every error, and makes what the peer sent safe to show.
void GrpcStream::tell_lost(std::exception_ptr why) {
  const std::string server = "environment server " + name_ + ": ";
  const auto shown = [](const std::exception& error) { return readable(std::string(error.what()).substr(0, 2000)); };
  try {
    std::rethrow_exception(why);
  } catch (const EnvError& error) {
    why = std::make_exception_ptr(EnvError(server + error.what()));  // which is readable, and may be long
  } catch (const HandshakeError& error) {
    why = std::make_exception_ptr(HandshakeError(server + shown(error)));
  } catch (const ConnectionError& error) {
    why = std::make_exception_ptr(ConnectionError(server + shown(error)));
  } catch (...) {
  }
  owner_->lost(why);
}

}  // namespace beast

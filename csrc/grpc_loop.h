// What both directions share: the threads (GrpcLoop), one call (GrpcCall), and a stream of rows over it (GrpcStream).
// Only grpc_*.cc include this.
#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "env_stream.h"
#include "wire.h"

namespace beast {

inline constexpr char kStreamMethod[] = "/beast.rpc.Environments/Stream";
inline constexpr char kDialMethod[] = "/beast.rpc.Environments/Dial";
inline constexpr std::chrono::milliseconds kStatusTimeout{1000};  // for the status of a stream that has ended

using Clock = std::chrono::steady_clock;
using Then = std::function<void(bool ok)>;  // what follows on an operation of gRPC

class GrpcStream;

// A few threads that serve all calls of a pool.
class GrpcLoop {
 public:
  explicit GrpcLoop(size_t num_threads);
  ~GrpcLoop();  // waits until all calls have ended

  grpc::CompletionQueue& queue() { return queue_; }
  static void* tag(Then then);
  static std::unique_ptr<Then> then_of(void* tag);  // of an event
  void watch(std::weak_ptr<GrpcStream> stream);                      // for its timeouts
  void count_calls(int change);

 private:
  void run();
  void end();
  void look_at_timeouts();

  grpc::CompletionQueue queue_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::list<std::weak_ptr<GrpcStream>> streams_;
  Clock::time_point next_look_ = Clock::now();
  int64_t num_calls_ = 0;
  std::vector<std::thread> threads_;
};

// The number of threads for a pool. A second one would only delay a stream that is alone: they wake each other.
size_t num_loop_threads(size_t num_streams);

// One gRPC call. At most one read and one write or start are in progress. It lives until all of them have ended.
class GrpcCall : public std::enable_shared_from_this<GrpcCall> {
 public:
  explicit GrpcCall(GrpcLoop& loop);
  virtual ~GrpcCall();

  void read(grpc::ByteBuffer* message, Then then);
  void write(const std::string& message, Then then);
  // Ends the call when all operations have, and tells its status. Called once.
  void finish(std::function<void(const grpc::Status& status)> then);
  virtual void cancel() = 0;  // from any thread

 protected:
  virtual void start_read(grpc::ByteBuffer* message, void* tag) = 0;
  virtual void start_write(const grpc::ByteBuffer& message, void* tag) = 0;
  virtual void start_finish(grpc::Status* status, void* tag) = 0;
  void operate(const std::function<void(void* tag)>& start, Then then);

  GrpcLoop& loop_;

 private:
  void operation_ended();
  void really_finish();

  std::mutex mutex_;  // guards what follows
  int num_operations_ = 0;
  std::function<void(const grpc::Status& status)> finished_;
  grpc::Status status_;
};

// A stream of rows and actions over a call, whoever made it.
class GrpcStream : public EnvStream, public std::enable_shared_from_this<GrpcStream> {
 public:
  void set_progress(const std::string& progress) override { progress_ = progress; }
  void step(const Nest<Array>& actions, std::vector<std::byte*> destinations) override;
  ~GrpcStream() override;
  void cancel() override;
  void look_at_timeout(Clock::time_point now);

 protected:
  // `name` is the peer's for messages.
  GrpcStream(GrpcLoop& loop, std::string name, std::chrono::milliseconds env_timeout);

  // Reads a row, after what `send` sends; null sends nothing.
  void exchange(const std::function<void(GrpcCall& call, Then then)>& send, std::vector<std::byte*> destinations,
                std::chrono::milliseconds more_time = {});
  void set_row(const StreamSpec& spec);
  // Tells that the stream is lost when its call has ended. A null `why` is that of the call's status.
  void end(std::exception_ptr why);
  void end_politely();  // the same without telling the owner, and without cancelling the call
  void tell_lost(std::exception_ptr why);  // once the call, if there was one, has ended
  virtual std::exception_ptr error_of(const grpc::Status& status) = 0;
  // Sets the time until when the next event must come; mutex_ is held.
  void set_timeout(std::chrono::milliseconds timeout);
  void end_timeout() { deadline_.reset(); }
  bool is_late() const { return is_late_; }  // mutex_ is held
  void forget_lateness() { is_late_ = false; }
  virtual void cancelled() {}  // by cancel(), with mutex_: ends a pause between two tries

  GrpcLoop& loop_;
  const std::string name_;
  const std::chrono::milliseconds env_timeout_;
  Owner* owner_ = nullptr;
  grpc::ByteBuffer message_;  // the last one that came
  std::optional<RowReader> rows_;
  std::string progress_;  // to be sent

  std::mutex mutex_;  // guards what follows
  std::shared_ptr<GrpcCall> call_;
  bool is_cancelled_ = false;

 private:
  void operation_ended(bool is_read, bool ok);

  std::vector<std::byte*> destinations_;
  int num_awaited_ = 0;  // operations
  bool row_came_ = false;
  bool has_ended_ = false;
  std::optional<Clock::time_point> deadline_;
  std::chrono::milliseconds timeout_{0};
  bool is_late_ = false;
};

std::string seconds(std::chrono::milliseconds duration);  // "1.5 s"
// On gRPC's monotonic clock: changes of the system time do not move it.
gpr_timespec deadline_after(std::chrono::milliseconds timeout);

}  // namespace beast

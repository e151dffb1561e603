// Measures streams of environments alone, without Python: actions of zeros go up, rows of observations come down.
//
//     round_trips SECONDS CERTIFICATES ADDRESS...
//
// opens a stream per address, steps all of them at a time for so many seconds, and prints the seconds that each round
// trip took, one per line. Standard error gets how many the slowest and the fastest stream made. CERTIFICATES is a PEM
// file for TLS, or "". benchmarks/transport.py builds and runs this.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "grpc_stream.h"
#include "wire.h"

namespace {

using Clock = std::chrono::steady_clock;

// Steps a stream in the threads that bring its events.
class SteppedStream : public beast::EnvStream::Owner {
 public:
  SteppedStream(beast::GrpcStreams& streams, const std::string& address, const std::string& certificates)
      : stream_(streams.connect({address, /*token=*/"", certificates})) {
    stream_->open(/*seed=*/1, this);
  }
  ~SteppedStream() {
    stream_->cancel();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return is_resting_ || why_lost_; });  // nothing is awaited then
  }

  // Waits until the stream has its first row, or has made all of its round trips. Throws if it is lost.
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return is_resting_ || why_lost_; });
    if (why_lost_) std::rethrow_exception(why_lost_);
  }

  void step_until(Clock::time_point end) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_resting_ = false;
    }
    end_ = end;
    trips_.clear();
    step();
  }

  const std::vector<double>& trips() const { return trips_; }  // seconds of each

 private:
  void opened(const beast::StreamSpec& spec) override {
    beast::Shape shape = spec.action.shape;
    shape.insert(shape.begin(), spec.num_envs);
    actions_ = beast::Array::allocate(spec.action.dtype, shape);
    std::memset(actions_.data(), 0, actions_.num_bytes());
    for (const size_t bytes : beast::field_bytes(spec)) {
      fields_.push_back(beast::Array::allocate(beast::DType::kUInt8, {static_cast<int64_t>(bytes)}));
      destinations_.push_back(fields_.back().data());
    }
    stream_->read_first_row(destinations_);
  }

  void step() {
    began_ = Clock::now();
    stream_->step(actions_, destinations_);
  }

  void row_came(std::string) override {
    if (is_stepping_) trips_.push_back(std::chrono::duration<double>(Clock::now() - began_).count());
    if (std::exchange(is_stepping_, true) && Clock::now() < end_) return step();
    std::lock_guard<std::mutex> lock(mutex_);
    is_resting_ = true;
    changed_.notify_all();
  }

  void lost(std::exception_ptr why) override {
    std::lock_guard<std::mutex> lock(mutex_);
    why_lost_ = why;
    changed_.notify_all();
  }

  std::mutex mutex_;  // guards what the main thread waits for
  std::condition_variable changed_;
  bool is_resting_ = false;
  std::exception_ptr why_lost_;

  Clock::time_point began_, end_;
  bool is_stepping_ = false;  // the first row has come
  beast::Array actions_;
  std::vector<beast::Array> fields_;
  std::vector<std::byte*> destinations_;
  std::vector<double> trips_;
  std::shared_ptr<beast::EnvStream> stream_;
};

using Streams = std::vector<std::unique_ptr<SteppedStream>>;

void step_all(const Streams& streams, double seconds) {
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (const auto& stream : streams) stream->step_until(end);
  for (const auto& stream : streams) stream->wait();
}

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 4) {
    std::fprintf(stderr, "usage: round_trips SECONDS CERTIFICATES ADDRESS...\n");
    return 2;
  }
  const double seconds = std::stod(argv[1]);
  const std::string certificates = *argv[2] ? contents(argv[2]) : "";
  beast::GrpcStreams grpc_streams(argc - 3);
  Streams streams;
  for (int i = 3; i < argc; ++i) {
    streams.push_back(std::make_unique<SteppedStream>(grpc_streams, argv[i], certificates));
  }
  for (const auto& stream : streams) stream->wait();
  step_all(streams, std::min(seconds, 0.5));  // warms the caches
  step_all(streams, seconds);
  std::vector<size_t> counts;
  for (const auto& stream : streams) {
    for (const double trip : stream->trips()) std::printf("%.9f\n", trip);
    counts.push_back(stream->trips().size());
  }
  const auto [lowest, highest] = std::minmax_element(counts.begin(), counts.end());
  std::fprintf(stderr, "round trips of a stream: lowest %zu, highest %zu\n", *lowest, *highest);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "round_trips: %s\n", error.what());
  return 1;
}

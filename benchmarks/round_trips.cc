// Measures streams of environments alone, without Python: actions of zeros go up, rows of observations come down.
//
//     round_trips SECONDS CERTIFICATES ADDRESS...
//
// opens a stream per address, steps all of them at a time for so many seconds, and prints the seconds that each round
// trip took, one per line. CERTIFICATES is a PEM file for TLS, or "". benchmarks/transport.py builds and runs this.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <future>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "grpc_stream.h"
#include "wire.h"

namespace {

using Clock = std::chrono::steady_clock;

class SteppedStream {
 public:
  SteppedStream(const std::string& address, const std::string& certificates)
      : stream_(beast::make_grpc_stream({address, /*token=*/"", certificates})) {
    const beast::StreamSpec spec = stream_->open(/*seed=*/1);
    beast::Shape shape = spec.action.shape;
    shape.insert(shape.begin(), spec.num_envs);
    actions_ = beast::Array::allocate(spec.action.dtype, shape);
    std::memset(actions_.data(), 0, actions_.num_bytes());
    for (const size_t bytes : beast::field_bytes(spec)) {
      fields_.push_back(beast::Array::allocate(beast::DType::kUInt8, {static_cast<int64_t>(bytes)}));
      destinations_.push_back(fields_.back().data());
    }
    stream_->read_row(destinations_);
  }

  // Returns the seconds of each round trip.
  std::vector<double> step_for(double seconds) {
    std::vector<double> result;
    for (const auto end = Clock::now() + std::chrono::duration<double>(seconds); Clock::now() < end;) {
      const auto began = Clock::now();
      stream_->write_actions(actions_);
      stream_->read_row(destinations_);
      result.push_back(std::chrono::duration<double>(Clock::now() - began).count());
    }
    return result;
  }

 private:
  std::unique_ptr<beast::EnvStream> stream_;
  beast::Array actions_;
  std::vector<beast::Array> fields_;
  std::vector<std::byte*> destinations_;
};

// The round trips of all streams, each of which is stepped by a thread of its own.
std::vector<double> step_all(std::vector<SteppedStream>& streams, double seconds) {
  std::vector<std::future<std::vector<double>>> threads;
  for (SteppedStream& stream : streams) {
    threads.push_back(std::async(std::launch::async, [&stream, seconds] { return stream.step_for(seconds); }));
  }
  std::vector<double> all;
  for (auto& thread : threads) {
    const std::vector<double> trips = thread.get();
    all.insert(all.end(), trips.begin(), trips.end());
  }
  return all;
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
  beast::poll_idle_connections();  // as libbeast does when it is imported
  const double seconds = std::stod(argv[1]);
  const std::string certificates = *argv[2] ? contents(argv[2]) : "";
  std::vector<SteppedStream> streams;
  for (int i = 3; i < argc; ++i) streams.emplace_back(argv[i], certificates);
  step_all(streams, std::min(seconds, 0.5));  // warms the caches
  for (const double trip : step_all(streams, seconds)) std::printf("%.9f\n", trip);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "round_trips: %s\n", error.what());
  return 1;
}

#include "stream_source.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace beast {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kFirstPause{0.1}, kLongestPause{10};  // before a stream is connected again
constexpr Seconds kFirstRest{30}, kLongestRest{600};    // the same, after max_restarts in a row

class DialedStreams : public StreamSource {
 public:
  DialedStreams(std::vector<std::string> addresses, Connect connect, const DialOptions& options)
      : options_(options), connect_(std::move(connect)) {
    if (addresses.empty()) throw std::invalid_argument("env_server_addresses is empty: a pool needs at least one");
    for (std::string& address : addresses) places_.push_back({std::move(address)});
  }

  size_t num_places() const override { return places_.size(); }
  int64_t num_needed() const override { return 0; }
  bool ends_with(bool learner_queue_is_closed, bool inference_batcher_is_closed) const override {
    return learner_queue_is_closed && inference_batcher_is_closed;
  }

  void start(Owner* owner) override {
    owner_ = owner;
    for (size_t place = 0; place < places_.size(); ++place) owner_->begin(place);
  }

  NamedStream take(size_t place) override {
    const std::string& address = places_[place].address;
    return {connect_(address), address};
  }

  void accepted(size_t place) override {
    places_[place].was_accepted = true;
    if (std::exchange(places_[place].is_retired, false)) --num_retired_;
  }

  void go_on_after(size_t index, const Ending& ending, const Life& life) override {
    Place& place = places_[index];
    if (ending.kind == Ending::Kind::kClosed) return owner_->end_place();
    if (!place.was_accepted) return owner_->fail(ending.error);  // open() has retried already
    if (ending.kind == Ending::Kind::kRefused) return rest(index, ending.why, ending.error);
    if (life.worked > options_.forgiven_after) {
      place.num_restarts = 0;
      place.rest = kFirstRest;
    }
    const std::string limit = std::to_string(options_.max_restarts);
    if (place.num_restarts < options_.max_restarts) {
      const double jitter = 0.75 + 0.5 * (life.seed % 1024) / 1024.0;  // spreads the streams of a server in time
      const Seconds pause = jitter * std::min<Seconds>(kFirstPause * std::exp2(place.num_restarts), kLongestPause);
      ++place.num_restarts;
      ++num_restarts_;
      owner_->say(ending.why + "\nReconnecting (" + std::to_string(place.num_restarts) + " of max_env_restarts " +
                  limit + ").");
      return owner_->begin_after(index, pause);
    }
    const std::string text = ending.why + "\nThe stream was reconnected " + std::to_string(place.num_restarts) +
                             " times in a row (max_env_restarts " + limit + ").";
    rest(index, text, std::make_exception_ptr(ConnectionError(text)));
  }

  void end() override { connect_ = nullptr; }

  int64_t num_restarts() const override { return num_restarts_; }

 private:
  struct Place {  // used by one thread at a time, the one that its stream's life is in
    std::string address;
    int64_t num_restarts = 0;   // in a row
    bool was_accepted = false;  // in any life
    bool is_retired = false;    // it rests, or connects after a rest
    Seconds rest = kFirstRest;
  };

  // What restarts do not mend costs the run this stream alone, while enough others are left. It connects after a rest.
  void rest(size_t index, const std::string& why, std::exception_ptr error) {
    Place& place = places_[index];
    if (!std::exchange(place.is_retired, true)) ++num_retired_;
    const int64_t num_left = places_.size() - num_retired_;
    if (num_left < options_.min_streams) return owner_->fail(std::move(error));
    const Seconds pause = std::exchange(place.rest, std::min(2 * place.rest, kLongestRest));
    owner_->say(why + "\nThis stream rests for " + std::to_string(static_cast<int64_t>(pause.count())) + " s; " +
                std::to_string(num_left) + " of " + std::to_string(places_.size()) + " are left.");
    owner_->begin_after(index, pause);  // last: from now on another thread has the place
  }

  const DialOptions options_;
  Connect connect_;
  Owner* owner_ = nullptr;
  std::vector<Place> places_;
  std::atomic<int64_t> num_retired_{0}, num_restarts_{0};
};

class AdmittedStreams : public StreamSource {
 public:
  AdmittedStreams(size_t num_places, Listen listen, int64_t min_streams)
      : num_places_(num_places), min_streams_(min_streams), listen_(std::move(listen)), places_(num_places) {
    if (min_streams > static_cast<int64_t>(num_places)) {
      throw std::invalid_argument("min_streams is " + std::to_string(min_streams) + ", and the listener takes " +
                                  std::to_string(num_places) + " streams at most: raise max_streams");
    }
  }

  size_t num_places() const override { return num_places_; }
  int64_t num_needed() const override { return min_streams_; }
  // One is enough: a stream that ends there frees its place for others, which would come and end again and again.
  bool ends_with(bool learner_queue_is_closed, bool inference_batcher_is_closed) const override {
    return learner_queue_is_closed || inference_batcher_is_closed;
  }

  void start(Owner* owner) override {
    owner_ = owner;
    listen_([this](std::shared_ptr<EnvStream> stream, std::string name) {
      return admit({std::move(stream), std::move(name)});
    });
    is_listening_ = true;
  }

  NamedStream take(size_t place) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(places_[place].admitted, {});
  }

  void go_on_after(size_t place, const Ending& ending, const Life&) override {
    if (ending.kind == Ending::Kind::kLost) owner_->say(ending.why);
    if (ending.kind == Ending::Kind::kRefused) owner_->say(ending.why + "\nIt was refused.");
    // After kClosed others may dial, which end as soon, until the pool sees it.
    std::lock_guard<std::mutex> lock(mutex_);
    places_[place].is_free = true;
  }

  void end() override {
    std::vector<Place> dropped;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      dropped.swap(places_);
    }
    dropped.clear();                      // streams that the run's end came before; not under the lock
    if (is_listening_) listen_(nullptr);  // otherwise another pool may be
  }

  int64_t num_come() const override { return num_come_; }

 private:
  struct Place {
    bool is_free = true;
    NamedStream admitted;  // until take()
  };

  bool admit(NamedStream stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < places_.size(); ++i) {
      if (!places_[i].is_free) continue;
      if (!owner_->begin(i)) return false;
      places_[i] = {false, std::move(stream)};
      ++num_come_;
      return true;
    }
    return false;
  }

  const size_t num_places_;
  const int64_t min_streams_;
  const Listen listen_;
  Owner* owner_ = nullptr;
  bool is_listening_ = false;
  std::atomic<int64_t> num_come_{0};
  std::mutex mutex_;  // guards what follows; taken before the pool's
  std::vector<Place> places_;
};

}  // namespace

std::unique_ptr<StreamSource> dialed_streams(std::vector<std::string> addresses, Connect connect,
                                             const DialOptions& options) {
  return std::make_unique<DialedStreams>(std::move(addresses), std::move(connect), options);
}

std::unique_ptr<StreamSource> admitted_streams(size_t num_places, Listen listen, int64_t min_streams) {
  return std::make_unique<AdmittedStreams>(num_places, std::move(listen), min_streams);
}

}  // namespace beast

// StreamSource: where the streams of a pool come from. The pool dials them, or they dial in. Knows neither what the
// pool does with a stream nor its transport.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "batching.h"
#include "env_stream.h"

namespace beast {

// Why a stream's life has ended.
struct Ending {
  enum class Kind {
    kLost,     // ConnectionError: another life may do better
    kRefused,  // HandshakeError: another life would end the same way
    kClosed,   // ClosedBatchingQueue: nobody wants what it has
    kFailed,   // anything else: it ends the run
  };
  Kind kind;
  std::string why;  // of kLost and kRefused
  std::exception_ptr error;
};

// Calls `function`, and returns what it throws: here, and nowhere else, the exception's type decides.
template <typename Function>
std::optional<Ending> ending_of(Function&& function) {
  try {
    function();
    return std::nullopt;
  } catch (const ConnectionError& error) {
    return Ending{Ending::Kind::kLost, error.what(), std::current_exception()};
  } catch (const HandshakeError& error) {
    return Ending{Ending::Kind::kRefused, error.what(), std::current_exception()};
  } catch (const ClosedBatchingQueue&) {
    return Ending{Ending::Kind::kClosed, "", std::current_exception()};
  } catch (...) {
    return Ending{Ending::Kind::kFailed, "", std::current_exception()};
  }
}

// A pool has a number of places, with one stream after the other at each. The pool calls a source's functions in this
// order: start(), then in turn for each place take(), accepted() if the stream is of use, and go_on_after() once it is
// lost; end() when no place has a stream. Once the run is about to end, or after kFailed, go_on_after() is not called.
class StreamSource {
 public:
  // The pool. Its functions may be called from any thread.
  class Owner {
   public:
    virtual bool begin(size_t place) = 0;  // another life, soon; false, and none, if the run is about to end
    virtual void begin_after(size_t place, std::chrono::duration<double> pause) = 0;
    virtual void end_place() = 0;  // no other life at one of the places; the last one's end is the run's
    virtual void say(std::string message) = 0;
    virtual void fail(std::exception_ptr failure) = 0;  // ends the run with this failure

   protected:
    ~Owner() = default;
  };

  struct NamedStream {
    std::shared_ptr<EnvStream> stream;
    std::string name;  // the address, for messages
  };

  struct Life {
    uint64_t seed = 0;
    std::chrono::steady_clock::duration worked{0};  // from accepted() to the newest row; 0 without any
  };

  virtual ~StreamSource() = default;
  virtual size_t num_places() const = 0;
  virtual int64_t num_needed() const = 0;  // while fewer streams are connected, those that are wait; 0 for no waiting
  virtual bool ends_with(bool learner_queue_is_closed, bool inference_batcher_is_closed) const = 0;  // the run

  virtual void start(Owner* owner) = 0;
  virtual NamedStream take(size_t place) = 0;  // the stream of the life that begins; throws what EnvStream tells
  virtual void accepted(size_t) {}
  virtual void go_on_after(size_t place, const Ending& ending, const Life& life) = 0;  // any ending but kFailed
  virtual void end() = 0;  // frees the transport, with its threads

  virtual int64_t num_restarts() const { return 0; }
  virtual int64_t num_come() const { return 0; }
};

// Opens a stream for each address, which may be listed more than once.
using Connect = std::function<std::shared_ptr<EnvStream>(const std::string& address)>;

struct DialOptions {
  int64_t max_restarts = 5;       // of a stream, in a row; then it rests
  int64_t min_streams = 1 << 30;  // fewer that work end the run; by default the loss of any does
  std::chrono::milliseconds forgiven_after = std::chrono::minutes(10);  // a life that works this long resets its
                                                                        // stream's count of restarts, and its rest
};

// Throws std::invalid_argument.
std::unique_ptr<StreamSource> dialed_streams(std::vector<std::string> addresses, Connect connect,
                                             const DialOptions& options = {});

// Lets streams come, from now on; with null, no more. May throw.
using Listen = std::function<void(Admit admit)>;

// Has room for streams that come and go by themselves. While there are fewer than `min_streams`, the others wait.
// Throws std::invalid_argument.
std::unique_ptr<StreamSource> admitted_streams(size_t num_places, Listen listen, int64_t min_streams = 1);

}  // namespace beast

// The interface of a stream of K environments. gRPC implements it (grpc_stream.h), as do threads in the native tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "array.h"
#include "nest.h"

namespace beast {

struct Field {
  std::string name;
  DType dtype = DType::kBool;
  Shape shape;  // of one environment

  friend bool operator==(const Field& a, const Field& b) {
    return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape;
  }
};
std::string describe(const Field& field);  // "reward float32 []"

// What a server's hello says, checked. `fields` are those of a row, in their order on the wire.
struct StreamSpec {
  std::string env;
  int64_t num_envs = 0;  // K
  std::vector<Field> fields;
  Nest<int64_t> observation;      // indices into fields
  bool takes_any_action = false;  // then `action` is unset
  Field action;
  std::string observation_space;  // JSON; empty for environments of the old gym
  std::string action_space;
  int64_t frames_per_step = 1;  // frames of the emulator in one step of the agent; 0 where nobody has said it

  int64_t index_of(const std::string& name) const {  // into fields, or -1
    for (size_t i = 0; i < fields.size(); ++i) {
      if (fields[i].name == name) return static_cast<int64_t>(i);
    }
    return -1;
  }
};

// What `spec` has otherwise than `expected`, with both values ("8 environments instead of 4"); empty if they are equal.
std::string difference(const StreamSpec& spec, const StreamSpec& expected);

// The server is lost, hung or unreachable, or sent data that its hello did not announce. Another try may succeed.
struct ConnectionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The environment raised an exception and is lost. The message contains its traceback.
struct EnvError : ConnectionError {
  using ConnectionError::ConnectionError;
};
// The two sides do not fit together (token, protocol, environment, fields). Another try would fail the same way.
struct HandshakeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A stream of K environments. Nothing here waits: open(), read_first_row() and step() start what they are named for,
// and the owner is told of its end by one event, which another thread may bring, or open() itself. They are called in
// turn, each when the event before has come. While none is awaited, the owner may destroy the stream.
class EnvStream {
 public:
  class Owner {
   public:
    virtual void opened(const StreamSpec& spec) = 0;
    virtual void row_came(std::string metrics = "") = 0;
    virtual void lost(std::exception_ptr why) = 0;  // one of the errors above, instead of the other two

   protected:
    ~Owner() = default;
  };

  virtual ~EnvStream() = default;
  // Before open() and step(): how far training is, which goes with the hello or the actions.
  virtual void set_progress(const std::string& progress) { (void)progress; }
  // Connects, and learns what the environments are. Called once. `seed` is the first environment's.
  virtual void open(uint64_t seed, Owner* owner) = 0;
  // Reads the first row: field i goes to destinations[i], which has room for it from all K environments.
  virtual void read_first_row(std::vector<std::byte*> destinations) = 0;
  // Sends actions, [K, *shape] or a nest where any action is taken, and reads the row that they lead to.
  virtual void step(const Nest<Array>& actions, std::vector<std::byte*> destinations) = 0;
  // From any thread: whether the peer is known to have left, which is told only to an owner who awaits an event.
  virtual bool has_left() const { return false; }
  // From any thread: what was started, or will be, ends soon, with lost().
  virtual void cancel() = 0;
  // Instead of another call, where the stream is of no use: tells a peer that has called why.
  virtual void refuse(const std::string& why) = 0;
};

// Takes a stream that has come, whose peer has this name. False if no place is free.
using Admit = std::function<bool(std::shared_ptr<EnvStream> stream, std::string name)>;

}  // namespace beast

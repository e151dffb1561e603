// The interface of a stream of K environments. gRPC implements it (grpc_stream.h), as do threads in the native tests.
#pragma once

#include <cstddef>
#include <cstdint>
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

// One thread calls all methods but cancel(). They throw the errors above.
class EnvStream {
 public:
  virtual ~EnvStream() = default;
  // Connects and exchanges hellos. Called once. `seed` is the first environment's.
  virtual StreamSpec open(uint64_t seed) = 0;
  // Reads the next row: field i goes to destinations[i], which has room for it from all K environments.
  virtual void read_row(const std::vector<std::byte*>& destinations) = 0;
  virtual void write_actions(const Nest<Array>& actions) = 0;  // [K, *shape]; a nest where any action is taken
  // May be called from any thread. Makes a blocked call, and all later calls, throw ConnectionError.
  virtual void cancel() = 0;
};

}  // namespace beast

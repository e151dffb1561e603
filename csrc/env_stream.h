// One stream of K environments, whatever carries it: gRPC (grpc_stream.h) or, in the native tests, a thread.
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
  DType dtype;
  Shape shape;  // of one environment
};

// What the server's hello said, checked: the fields of a row in their order on the wire.
struct StreamSpec {
  std::string env;
  int64_t num_envs = 0;  // K
  std::vector<Field> fields;
  Nest<int64_t> observation;      // indices into fields
  bool takes_any_action = false;  // then `action` says nothing
  Field action;
  std::string observation_space;  // JSON; empty from servers of old four-value environments
  std::string action_space;

  int64_t index_of(const std::string& name) const {  // into fields, or -1
    for (size_t i = 0; i < fields.size(); ++i) {
      if (fields[i].name == name) return static_cast<int64_t>(i);
    }
    return -1;
  }
};

// The server is lost, hung or unreachable, or sends what its hello did not announce: may be tried again.
struct ConnectionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The environment raised, and is lost with that; the message holds its traceback.
struct EnvError : ConnectionError {
  using ConnectionError::ConnectionError;
};
// The two sides will never fit (token, protocol, environment, fields): not to be tried again.
struct HandshakeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// All but cancel() is called by one thread, and throws the errors above.
class EnvStream {
 public:
  virtual ~EnvStream() = default;
  // Connects and exchanges hellos; called once. `seed` is that of the first environment.
  virtual StreamSpec open(uint64_t seed) = 0;
  // Reads the next row, each field straight into destinations[i] (K * item bytes of fields[i]).
  virtual void read_row(const std::vector<std::byte*>& destinations) = 0;
  virtual void write_actions(const Array& actions) = 0;  // [K, *shape]
  // From any thread: ends a call that blocks, and all later ones, with ConnectionError.
  virtual void cancel() = 0;
};

}  // namespace beast

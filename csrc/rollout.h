// Rollout: T+1 rows of one stream of K environments, and the checks of what comes into them. Knows no threads.
//
// An item of the learner queue is ((env_outputs, agent_outputs), initial_agent_state), its leaves [T+1, K, ...]:
// - env_outputs: (observation, *row fields, group, life, env_number). The pool's owner names the row fields; a server
//   may send more, which nobody gets. The last three are int32. `group` is the index of the stream in the pool, `life`
//   counts the stream's reconnections, 0 in its first life, and `env_number` is the environment's index in its stream,
//   0 to K-1. They are constant in a rollout;
// - agent_outputs: inference's answers. Row t has the answer that led to row t, so the first row of a life has zeros;
// - row 0 repeats row T of the previous rollout; the state is the one before row 0.
// Inference gets (env_outputs, agent_state), leaves [1, K, ...].
//
// The learner may write to an item: no two of them share memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "array.h"
#include "batching.h"
#include "env_stream.h"

namespace beast {

// Why env_outputs cannot have these fields of such a stream, for a message: its rows lack one of them, or `done`, or
// one belongs to the observation, with which it would share memory. Empty if they can.
std::string fault_of_fields(const StreamSpec& spec, const std::vector<std::string>& row_fields);

// Refuses rollouts that this machine cannot hold before memory is allocated for one. Throws std::invalid_argument.
void check_memory(const StreamSpec& spec, int64_t unroll_length);

// Where a rollout comes from.
struct Origin {
  int32_t group;  // index of the stream in the pool
  int32_t life;   // how many connections this stream has had before
};

class Rollout {
 public:
  // fault_of_fields() has found none.
  Rollout(const StreamSpec& spec, const std::vector<std::string>& row_fields, int64_t unroll_length, Origin origin);

  // The rollout after this one, whose row 0 is this one's last row.
  Rollout next() const;

  // Where the stream writes row `row`: memory for each of its fields.
  std::vector<std::byte*> destinations(int64_t row) const;

  // What the learner must not get of row `row`: "field "reward" is not finite"; empty if there is nothing.
  std::string find_fault(int64_t row) const;

  // Whether row 0 begins an episode in each environment.
  bool begins_episodes() const;

  // Rows [begin, begin + count), without a copy.
  ArrayNest env_outputs(int64_t begin, int64_t count) const;

  // Copies outputs [1, K, ...]. All later outputs must have the structure, shapes and dtypes of the first ones. Throws
  // std::invalid_argument.
  void set_agent_outputs(int64_t row, const ArrayNest& outputs);

  // The item of the learner queue.
  ArrayNest item(ArrayNest initial_agent_state) const;

 private:
  // What the rollouts of one life have in common.
  struct Layout {
    StreamSpec spec;
    std::vector<size_t> row_fields;  // indices into spec.fields, in the order of env_outputs
    size_t done;                     // index into spec.fields, too
    int64_t num_rows;                // T+1
    Origin origin;
  };

  explicit Rollout(std::shared_ptr<const Layout> layout);

  std::shared_ptr<const Layout> layout_;
  Array group_, life_, env_number_;         // int32 [T+1, K]
  std::vector<Array> fields_;               // [T+1, K, ...] each
  std::optional<ArrayNest> agent_outputs_;  // [T+1, K, ...] each; made when the first answer shows what they are
};

}  // namespace beast

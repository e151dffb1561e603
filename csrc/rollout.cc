#include "rollout.h"

#include <unistd.h>  // sysconf

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace beast {
namespace {

// The only field that csrc/ reads itself, beyond the protocol's check of a hello (wire.cc): the first row of a life
// must begin episodes, or the learner would carry an agent's state from one game into another.
constexpr const char* kDone = "done";

// Whether all items are finite. It has no branches, so that the compiler makes wide instructions of it.
template <typename Bits>
bool is_finite(const std::byte* data, size_t count, Bits exponent) {
  bool infinite = false;
  for (size_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, data + i * sizeof(bits), sizeof(bits));
    infinite |= (bits & exponent) == exponent;
  }
  return !infinite;
}

// Compiled code may take the negation of a bool that is 2 for 3.
bool are_bools(const std::byte* data, size_t count) {
  std::byte bits{0};
  for (size_t i = 0; i < count; ++i) bits |= data[i];
  return bits <= std::byte{1};
}

// What no array of a row may have; empty if this one has nothing of it.
std::string fault_of(const Array& array) {
  const size_t count = num_items(array.shape());
  const auto unless = [](bool is_good, const char* fault) { return is_good ? "" : fault; };
  switch (array.dtype()) {
    case DType::kFloat16:
      return unless(is_finite<uint16_t>(array.data(), count, 0x7c00), "is not finite");
    case DType::kFloat32:
      return unless(is_finite<uint32_t>(array.data(), count, 0x7f800000), "is not finite");
    case DType::kFloat64:
      return unless(is_finite<uint64_t>(array.data(), count, 0x7ff0000000000000), "is not finite");
    case DType::kBool:
      return unless(are_bools(array.data(), count), "has bools other than 0 and 1");
    default:
      return "";
  }
}

Shape with_rows(int64_t num_rows, const Shape& row) {  // row: [1, K, ...]
  Shape shape = row;
  shape[0] = num_rows;
  return shape;
}

void copy_row(const Array& from, int64_t from_row, const Array& to, int64_t to_row) {
  const Array source = from.slice_first(from_row, 1);
  if (source.num_bytes()) std::memcpy(to.slice_first(to_row, 1).data(), source.data(), source.num_bytes());
}

int32_t* int32s(const Array& array) { return reinterpret_cast<int32_t*>(array.data()); }

Array filled(const Shape& shape, int32_t value) {
  Array result = Array::allocate(DType::kInt32, shape);
  std::fill_n(int32s(result), num_items(shape), value);
  return result;
}

Array numbered(int64_t num_rows, int64_t num_columns) {  // each row is 0, 1, 2, ...
  Array result = Array::allocate(DType::kInt32, {num_rows, num_columns});
  for (int64_t row = 0; row < num_rows; ++row) {
    int32_t* const first = int32s(result) + row * num_columns;
    std::iota(first, first + num_columns, 0);
  }
  return result;
}

}  // namespace

std::string fault_of_fields(const StreamSpec& spec, const std::vector<std::string>& row_fields) {
  const std::vector<int64_t> observed = spec.observation.flatten();
  for (const std::string& name : row_fields) {
    const int64_t index = spec.index_of(name);
    if (index < 0) {
      return "a row has no field \"" + name + "\", which is one of the learner's row_fields: serve environments that " +
             "write it, or leave it out of row_fields";
    }
    if (std::find(observed.begin(), observed.end(), index) != observed.end()) {
      return "the learner's row_fields have \"" + name + "\", which belongs to the observation: leave it out, or the " +
             "two would share memory";
    }
  }
  const int64_t done = spec.index_of(kDone);
  if (done >= 0 && spec.fields[done].dtype == DType::kBool) return "";
  return std::string("a row has no field \"") + kDone + "\" of bools, which says where episodes begin";
}

void check_memory(const StreamSpec& spec, int64_t unroll_length) {
  double row_bytes = 0;
  for (const Field& field : spec.fields) {
    row_bytes += static_cast<double>(spec.num_envs) * num_items(field.shape) * item_size(field.dtype);
  }
  const double rollout_bytes = (unroll_length + 1) * row_bytes;
  const double memory_bytes = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  if (memory_bytes <= 0 || rollout_bytes <= memory_bytes) return;
  const auto gigabytes = [](double bytes) { return std::to_string(static_cast<int64_t>(bytes / 1e9)) + " GB"; };
  throw std::invalid_argument("a rollout of unroll_length " + std::to_string(unroll_length) + " and " +
                              std::to_string(spec.num_envs) + " environments needs " + gigabytes(rollout_bytes) +
                              ", this machine has " + gigabytes(memory_bytes) +
                              ": lower unroll_length, or serve fewer environments per stream");
}

Rollout::Rollout(const StreamSpec& spec, const std::vector<std::string>& row_fields, int64_t unroll_length,
                 Origin origin)
    : Rollout([&] {
        std::vector<size_t> indices;
        for (const std::string& name : row_fields) indices.push_back(spec.index_of(name));
        const size_t done = spec.index_of(kDone);
        return std::make_shared<const Layout>(Layout{spec, std::move(indices), done, unroll_length + 1, origin});
      }()) {}

Rollout::Rollout(std::shared_ptr<const Layout> layout)
    : layout_(std::move(layout)),
      group_(filled({layout_->num_rows, layout_->spec.num_envs}, layout_->origin.group)),
      life_(filled({layout_->num_rows, layout_->spec.num_envs}, layout_->origin.life)),
      env_number_(numbered(layout_->num_rows, layout_->spec.num_envs)) {
  for (const Field& field : layout_->spec.fields) {
    Shape shape = {layout_->num_rows, layout_->spec.num_envs};
    shape.insert(shape.end(), field.shape.begin(), field.shape.end());
    fields_.push_back(Array::allocate(field.dtype, std::move(shape)));
  }
}

Rollout Rollout::next() const {
  Rollout next(layout_);
  const int64_t last = layout_->num_rows - 1;
  for (size_t i = 0; i < fields_.size(); ++i) copy_row(fields_[i], last, next.fields_[i], 0);
  next.agent_outputs_ = agent_outputs_->map([&](const Array& output) {
    Array rows = Array::allocate(output.dtype(), output.shape());
    copy_row(output, last, rows, 0);
    return rows;
  });
  return next;
}

std::vector<std::byte*> Rollout::destinations(int64_t row) const {
  std::vector<std::byte*> result;
  for (const Array& field : fields_) result.push_back(field.slice_first(row, 1).data());
  return result;
}

std::string Rollout::find_fault(int64_t row) const {
  for (size_t i = 0; i < fields_.size(); ++i) {
    const std::string fault = fault_of(fields_[i].slice_first(row, 1));
    if (!fault.empty()) return "field \"" + layout_->spec.fields[i].name + "\" " + fault;
  }
  return "";
}

bool Rollout::begins_episodes() const {
  const Array done = fields_[layout_->done].slice_first(0, 1);
  const auto is_true = [](std::byte byte) { return byte != std::byte{0}; };
  return std::all_of(done.data(), done.data() + done.num_bytes(), is_true);
}

ArrayNest Rollout::env_outputs(int64_t begin, int64_t count) const {
  const auto rows = [&](const Array& array) { return array.slice_first(begin, count); };
  ArrayNest::Tuple outputs = {layout_->spec.observation.map([&](int64_t i) { return rows(fields_[i]); })};
  for (const size_t i : layout_->row_fields) outputs.push_back(rows(fields_[i]));
  outputs.push_back(rows(group_));
  outputs.push_back(rows(life_));
  outputs.push_back(rows(env_number_));
  return outputs;
}

void Rollout::set_agent_outputs(int64_t row, const ArrayNest& outputs) {
  const int64_t num_rows = layout_->num_rows, num_envs = layout_->spec.num_envs;
  if (!agent_outputs_) {
    agent_outputs_ = outputs.map([&](const Array& output) {
      if (output.shape().size() < 2 || output.shape()[0] != 1 || output.shape()[1] != num_envs) {
        throw std::invalid_argument("inference answered agent outputs of shape " + to_string(output.shape()) +
                                    ", expected [1, " + std::to_string(num_envs) +
                                    ", ...]: set_outputs takes ((action, ...), agent_state), leaves [1, rows, ...]");
      }
      Array rows = Array::allocate(output.dtype(), with_rows(num_rows, output.shape()));
      std::memset(rows.data(), 0, rows.slice_first(0, 1).num_bytes());
      return rows;
    });
  }
  const std::vector<Array> rows = agent_outputs_->flatten(), answers = outputs.flatten();
  if (rows.size() != answers.size()) {
    throw std::invalid_argument("inference answered " + std::to_string(answers.size()) +
                                " agent outputs, its first answer had " + std::to_string(rows.size()));
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    if (answers[i].dtype() != rows[i].dtype() || with_rows(num_rows, answers[i].shape()) != rows[i].shape()) {
      throw std::invalid_argument("agent output " + std::to_string(i) + " is " + describe(answers[i]) +
                                  ", in the first answer it was " + describe(rows[i].slice_first(0, 1)));
    }
    copy_row(answers[i], 0, rows[i], row);
  }
}

ArrayNest Rollout::item(ArrayNest initial_agent_state) const {
  return ArrayNest::Tuple{ArrayNest::Tuple{env_outputs(0, layout_->num_rows), *agent_outputs_},
                          std::move(initial_agent_state)};
}

}  // namespace beast

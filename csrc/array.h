// Array: typed, shaped, C-contiguous memory with shared ownership. Independent of Python and torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace beast {

enum class DType : uint8_t {
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kFloat32,
  kFloat64
};

size_t item_size(DType dtype);                   // bytes
const char* dtype_name(DType dtype);             // numpy's: "uint8"
DType dtype_from_name(const std::string& name);  // throws std::invalid_argument that lists all names

using Shape = std::vector<int64_t>;

inline int64_t num_items(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}
std::string to_string(const Shape& shape);  // "[20, 8]"

// A view of memory that `owner` keeps alive. Copying an Array copies the view, not the memory. Nothing in csrc/ writes
// to an Array that it has handed on, except that a stream writes row t+1 of a rollout after inference has row t.
class Array {
 public:
  Array() = default;
  Array(DType dtype, Shape shape, void* data, std::shared_ptr<void> owner)
      : dtype_(dtype), shape_(std::move(shape)), data_(static_cast<std::byte*>(data)), owner_(std::move(owner)) {}

  static Array allocate(DType dtype, Shape shape);  // uninitialized, 64-byte aligned
  // The memory at `data` with these strides (bytes, also negative or zero): a view if it is C-contiguous, else a copy.
  static Array from_strided(DType dtype, Shape shape, const Shape& strides, void* data, std::shared_ptr<void> owner);

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::byte* data() const { return data_; }
  const std::shared_ptr<void>& owner() const { return owner_; }
  size_t num_bytes() const { return num_items(shape_) * item_size(dtype_); }

  // Elements [begin, begin + count) of the first dimension, without a copy.
  Array slice_first(int64_t begin, int64_t count) const;
  Array reshaped(Shape shape) const;  // the same number of items, without a copy
  Array copied() const;               // in memory of its own

 private:
  DType dtype_ = DType::kFloat32;
  Shape shape_;
  std::byte* data_ = nullptr;
  std::shared_ptr<void> owner_;
};

std::string describe(const Array& array);  // "float32 [20, 8]"

// Columns [begin, begin + count) along `dim`: a view where all dimensions before `dim` have size 1, else a copy.
Array slice(const Array& array, int64_t dim, int64_t begin, int64_t count);

// Columns [begin, begin + count) of `array`.
struct Columns {
  Array array;
  int64_t begin;
  int64_t count;
};
// Joins columns of several arrays along `dim`. Each column is copied once; a single part is sliced. Throws
// std::invalid_argument if the arrays differ in dtype or in another dimension, and names both.
Array concatenate(const std::vector<Columns>& parts, int64_t dim);

}  // namespace beast

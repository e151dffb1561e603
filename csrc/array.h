// Typed, shaped, C-contiguous memory with shared ownership: what libbeast moves about. It knows no Python, no torch.
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
DType dtype_from_name(const std::string& name);  // throws std::invalid_argument that lists the names there are

using Shape = std::vector<int64_t>;

inline int64_t num_items(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}
std::string to_string(const Shape& shape);  // "[20, 8]"

// A view of memory that `owner` keeps alive. Copying an Array copies the view; nothing here is ever written to after
// it was handed on, but for rollouts, which are filled row by row by the one thread that has them.
class Array {
 public:
  Array() = default;
  Array(DType dtype, Shape shape, void* data, std::shared_ptr<void> owner)
      : dtype_(dtype), shape_(std::move(shape)), data_(static_cast<std::byte*>(data)), owner_(std::move(owner)) {}

  static Array allocate(DType dtype, Shape shape);  // uninitialized, 64-byte aligned
  // What lies at `data` with these strides (bytes; negative and zero ones too): a view if it is C-contiguous, else a
  // copy.
  static Array from_strided(DType dtype, Shape shape, const Shape& strides, void* data, std::shared_ptr<void> owner);

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::byte* data() const { return data_; }
  const std::shared_ptr<void>& owner() const { return owner_; }
  size_t num_bytes() const { return num_items(shape_) * item_size(dtype_); }

  // Elements [begin, begin + count) of the first dimension, without a copy.
  Array slice_first(int64_t begin, int64_t count) const;
  Array reshaped(Shape shape) const;  // the same number of items, without a copy

 private:
  DType dtype_ = DType::kFloat32;
  Shape shape_;
  std::byte* data_ = nullptr;
  std::shared_ptr<void> owner_;
};

// Arrays of equal dtype and shape, but for dimension `dim`, side by side along it. A single one is returned as it is.
// Throws std::invalid_argument that names both shapes or dtypes.
Array concatenate(const std::vector<Array>& parts, int64_t dim);

// Columns [begin, begin + count) along `dim`: a view where all dimensions before `dim` have size 1, else a copy.
Array slice(const Array& array, int64_t dim, int64_t begin, int64_t count);

// Columns [begin, begin + count) of `array`, for the above: pieces of several arrays are joined with one copy of each.
struct Columns {
  Array array;
  int64_t begin;
  int64_t count;
};
Array concatenate_columns(const std::vector<Columns>& parts, int64_t dim);

}  // namespace beast

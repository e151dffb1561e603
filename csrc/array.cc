#include "array.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>

namespace beast {
namespace {

struct DTypeInfo {
  const char* name;
  size_t size;
};

constexpr DTypeInfo kDTypes[] = {
    // in the order of DType
    {"bool", 1},   {"int8", 1},   {"int16", 2},  {"int32", 4},   {"int64", 8},   {"uint8", 1},
    {"uint16", 2}, {"uint32", 4}, {"uint64", 8}, {"float16", 2}, {"float32", 4}, {"float64", 8},
};

constexpr std::align_val_t kAlignment{64};  // a cache line, and the widest vector register

// An array's layout along dimension `dim`: `outer` runs of columns, each column of `inner` bytes.
struct Runs {
  int64_t outer;
  int64_t inner;
};

Runs runs_along(const Array& array, int64_t dim) {
  const Shape& shape = array.shape();
  Runs runs{1, static_cast<int64_t>(item_size(array.dtype()))};
  for (int64_t i = 0; i < dim; ++i) runs.outer *= shape[i];
  for (size_t i = dim + 1; i < shape.size(); ++i) runs.inner *= shape[i];
  return runs;
}

void copy_columns(const Array& from, int64_t from_begin, const Array& to, int64_t to_begin, int64_t count,
                  int64_t dim) {
  const Runs runs = runs_along(from, dim);
  const int64_t num_bytes = count * runs.inner;
  if (num_bytes == 0) return;
  const int64_t from_step = from.shape()[dim] * runs.inner;
  const int64_t to_step = to.shape()[dim] * runs.inner;
  const std::byte* source = from.data() + from_begin * runs.inner;
  std::byte* target = to.data() + to_begin * runs.inner;
  for (int64_t i = 0; i < runs.outer; ++i, source += from_step, target += to_step) {
    std::memcpy(target, source, num_bytes);
  }
}

void check_columns(const Array& array, int64_t dim, int64_t begin, int64_t count) {
  if (dim < 0 || dim >= static_cast<int64_t>(array.shape().size())) {
    throw std::invalid_argument("an array of shape " + to_string(array.shape()) + " has no dimension " +
                                std::to_string(dim));
  }
  if (begin < 0 || count < 0 || count > array.shape()[dim] - begin) {
    throw std::invalid_argument("cannot take " + std::to_string(count) + " elements from index " +
                                std::to_string(begin) + " in dimension " + std::to_string(dim) +
                                " of an array of shape " + to_string(array.shape()));
  }
}

bool is_contiguous(const Shape& shape, const Shape& strides, int64_t item_bytes) {
  int64_t expected = item_bytes;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

// Recurses over the dimensions. Copies the last one item by item, or in one piece if its items are adjacent.
std::byte* copy_strided(std::byte* target, const std::byte* source, const Shape& shape, const Shape& strides,
                        size_t dim, size_t item_bytes) {
  if (dim == shape.size() || (dim + 1 == shape.size() && strides[dim] == static_cast<int64_t>(item_bytes))) {
    const size_t num_bytes = dim == shape.size() ? item_bytes : shape[dim] * item_bytes;
    std::memcpy(target, source, num_bytes);
    return target + num_bytes;
  }
  for (int64_t i = 0; i < shape[dim]; ++i) {
    target = copy_strided(target, source + i * strides[dim], shape, strides, dim + 1, item_bytes);
  }
  return target;
}

}  // namespace

size_t item_size(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].size; }

const char* dtype_name(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }

DType dtype_from_name(const std::string& name) {
  std::string names;
  for (size_t i = 0; i < std::size(kDTypes); ++i) {
    if (name == kDTypes[i].name) return static_cast<DType>(i);
    names += (i ? ", " : "") + std::string(kDTypes[i].name);
  }
  throw std::invalid_argument("dtype " + name + " is not one of " + names);
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string describe(const Array& array) {
  return std::string(dtype_name(array.dtype())) + " " + to_string(array.shape());
}

Array Array::allocate(DType dtype, Shape shape) {
  const size_t num_bytes = num_items(shape) * item_size(dtype);
  std::shared_ptr<void> memory(::operator new(num_bytes, kAlignment),
                               [](void* p) { ::operator delete(p, kAlignment); });
  void* data = memory.get();
  return Array(dtype, std::move(shape), data, std::move(memory));
}

Array Array::from_strided(DType dtype, Shape shape, const Shape& strides, void* data, std::shared_ptr<void> owner) {
  if (num_items(shape) == 0 || is_contiguous(shape, strides, item_size(dtype))) {
    return Array(dtype, std::move(shape), data, std::move(owner));
  }
  Array copy = allocate(dtype, std::move(shape));
  copy_strided(copy.data(), static_cast<const std::byte*>(data), copy.shape(), strides, 0, item_size(dtype));
  return copy;
}

Array Array::slice_first(int64_t begin, int64_t count) const {
  check_columns(*this, 0, begin, count);
  Shape shape = shape_;
  shape[0] = count;
  return Array(dtype_, std::move(shape), data_ + begin * runs_along(*this, 0).inner, owner_);
}

Array Array::reshaped(Shape shape) const {
  if (num_items(shape) != num_items(shape_)) {
    throw std::invalid_argument("an array of shape " + to_string(shape_) + " cannot be reshaped to " +
                                to_string(shape));
  }
  return Array(dtype_, std::move(shape), data_, owner_);
}

Array Array::copied() const {
  Array copy = allocate(dtype_, shape_);
  if (num_bytes()) std::memcpy(copy.data(), data_, num_bytes());
  return copy;
}

Array slice(const Array& array, int64_t dim, int64_t begin, int64_t count) {
  check_columns(array, dim, begin, count);
  if (begin == 0 && count == array.shape()[dim]) return array;
  Shape shape = array.shape();
  shape[dim] = count;
  const Runs runs = runs_along(array, dim);
  if (runs.outer == 1) {
    return Array(array.dtype(), std::move(shape), array.data() + begin * runs.inner, array.owner());
  }
  Array part = Array::allocate(array.dtype(), std::move(shape));
  copy_columns(array, begin, part, 0, count, dim);
  return part;
}

Array concatenate(const std::vector<Columns>& parts, int64_t dim) {
  if (parts.empty()) throw std::invalid_argument("no arrays to concatenate");
  const Array& first = parts[0].array;
  int64_t total = 0;
  for (const auto& [array, begin, count] : parts) {
    check_columns(array, dim, begin, count);
    if (array.dtype() != first.dtype()) {
      throw std::invalid_argument(std::string("arrays of different dtypes cannot be batched: ") +
                                  dtype_name(first.dtype()) + " and " + dtype_name(array.dtype()));
    }
    Shape shape = array.shape();
    shape[dim] = first.shape()[dim];
    if (shape != first.shape()) {
      throw std::invalid_argument("arrays of shapes " + to_string(first.shape()) + " and " + to_string(array.shape()) +
                                  " cannot be batched along dimension " + std::to_string(dim) +
                                  ": all other dimensions must be equal");
    }
    total += count;
  }
  if (parts.size() == 1) return slice(first, dim, parts[0].begin, parts[0].count);

  Shape shape = first.shape();
  shape[dim] = total;
  Array whole = Array::allocate(first.dtype(), std::move(shape));
  int64_t next = 0;
  for (const auto& [array, begin, count] : parts) {
    copy_columns(array, begin, whole, next, count, dim);
    next += count;
  }
  return whole;
}

}  // namespace beast

#include "array.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <stdexcept>

namespace beast {
namespace {

// An array of this shape with items 0, 1, 2, …
Array counting(const Shape& shape) {
  Array array = Array::allocate(DType::kInt32, shape);
  auto* items = reinterpret_cast<int32_t*>(array.data());
  std::iota(items, items + num_items(shape), 0);
  return array;
}

std::vector<int32_t> items(const Array& array) {
  const auto* begin = reinterpret_cast<const int32_t*>(array.data());
  return {begin, begin + num_items(array.shape())};
}

using Items = std::vector<int32_t>;

TEST(Array, EveryDTypeHasItsNumpyNameAndSize) {
  const std::vector<std::pair<const char*, size_t>> expected = {
      {"bool", 1},   {"int8", 1},   {"int16", 2},  {"int32", 4},   {"int64", 8},   {"uint8", 1},
      {"uint16", 2}, {"uint32", 4}, {"uint64", 8}, {"float16", 2}, {"float32", 4}, {"float64", 8}};
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_STREQ(dtype_name(dtype), expected[i].first);
    EXPECT_EQ(item_size(dtype), expected[i].second);
    EXPECT_EQ(dtype_from_name(expected[i].first), dtype);
  }
  try {
    dtype_from_name("bfloat16");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("bfloat16 is not one of bool, int8"), std::string::npos);
  }
}

TEST(Array, MemoryIsAlignedAndOutlivesTheArrayItCameFrom) {
  Array view;
  {
    const Array whole = counting({4, 3});
    EXPECT_EQ(reinterpret_cast<uintptr_t>(whole.data()) % 64, 0u);
    view = whole.slice_first(1, 2);
  }
  EXPECT_EQ(items(view), (Items{3, 4, 5, 6, 7, 8}));
}

TEST(Array, StridedMemoryIsReadAsItLooks) {
  const Array whole = counting({2, 3});
  const auto strided = [&](Shape shape, Shape strides, int64_t offset = 0) {
    return Array::from_strided(DType::kInt32, std::move(shape), strides, whole.data() + offset, whole.owner());
  };
  EXPECT_EQ(strided({2, 3}, {12, 4}).data(), whole.data());
  EXPECT_EQ(strided({1, 3}, {999, 4}).data(), whole.data());  // the stride of a dimension of size 1 is irrelevant
  EXPECT_EQ(strided({}, {}).data(), whole.data());
  EXPECT_EQ(items(strided({3, 2}, {4, 12})), (Items{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(items(strided({2, 3}, {-12, 4}, 12)), (Items{3, 4, 5, 0, 1, 2}));
  EXPECT_EQ(items(strided({2, 2}, {12, -8}, 8)), (Items{2, 0, 5, 3}));
  EXPECT_EQ(items(strided({3, 2}, {0, 4})), (Items{0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(items(strided({2, 0}, {4, 4})), Items{});
}

TEST(Array, ReshapingKeepsTheMemoryAndTheNumberOfItems) {
  const Array whole = counting({2, 3});
  EXPECT_EQ(whole.reshaped({3, 1, 2}).data(), whole.data());
  EXPECT_EQ(whole.reshaped({6}).shape(), (Shape{6}));
  EXPECT_THROW(whole.reshaped({5}), std::invalid_argument);
}

TEST(Array, SlicesAreViewsWhereColumnsLieTogetherElseCopies) {
  const Array whole = counting({2, 3, 2});
  EXPECT_EQ(slice(whole, 1, 0, 3).data(), whole.data());
  EXPECT_EQ(slice(whole, 0, 1, 1).data(), whole.data() + 24);
  const Array part = slice(whole, 1, 1, 2);
  EXPECT_EQ(part.shape(), (Shape{2, 2, 2}));
  EXPECT_EQ(items(part), (Items{2, 3, 4, 5, 8, 9, 10, 11}));
  const Array row = counting({1, 3, 2});
  EXPECT_EQ(slice(row, 1, 1, 2).data(), row.data() + 8);
  EXPECT_EQ(slice(whole, 2, 0, 0).shape(), (Shape{2, 3, 0}));
}

TEST(Array, WhatIsNotThereCannotBeSliced) {
  const Array whole = counting({2, 3});
  for (const auto& [dim, begin, count] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {2, 0, 1}, {-1, 0, 1}, {1, 2, 2}, {1, -1, 1}, {1, 0, -1}, {0, INT64_MAX, 1}, {0, 1, INT64_MAX}}) {
    EXPECT_THROW(slice(whole, dim, begin, count), std::invalid_argument) << dim << ", " << begin << ", " << count;
  }
  EXPECT_THROW(whole.slice_first(1, 2), std::invalid_argument);
  EXPECT_THROW(counting({}).slice_first(0, 1), std::invalid_argument);
}

Array joined(const std::vector<Array>& wholes, int64_t dim) {
  std::vector<Columns> parts;
  for (const Array& whole : wholes) parts.push_back({whole, 0, whole.shape()[dim]});
  return concatenate(parts, dim);
}

TEST(Array, ConcatenationPutsColumnsSideBySideInEveryDimension) {
  const Array a = counting({2, 1, 2});
  const Array b = slice(counting({2, 3, 2}), 1, 1, 2);
  EXPECT_EQ(items(joined({a, b}, 1)), (Items{0, 1, 2, 3, 4, 5, 2, 3, 8, 9, 10, 11}));
  EXPECT_EQ(joined({a, a, a}, 0).shape(), (Shape{6, 1, 2}));
  EXPECT_EQ(items(joined({a, a}, 2)), (Items{0, 1, 0, 1, 2, 3, 2, 3}));
  EXPECT_EQ(joined({a}, 1).data(), a.data());
  EXPECT_EQ(items(concatenate({{b, 1, 1}, {a, 0, 1}, {b, 0, 0}}, 1)), (Items{4, 5, 0, 1, 10, 11, 2, 3}));
}

TEST(Array, WhatDiffersElsewhereCannotBeConcatenated) {
  const Array a = counting({2, 3});
  const auto message = [&](const Array& other, int64_t dim) -> std::string {
    try {
      concatenate({{a, 0, 1}, {other, 0, 1}}, dim);
      return "no error";
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
  };
  EXPECT_EQ(
      message(counting({2, 4}), 0),
      "arrays of shapes [2, 3] and [2, 4] cannot be batched along dimension 0: all other dimensions must be equal");
  EXPECT_NE(message(counting({2, 3, 1}), 0).find("[2, 3] and [2, 3, 1]"), std::string::npos);
  EXPECT_NE(message(Array::allocate(DType::kFloat32, {2, 3}), 0).find("int32 and float32"), std::string::npos);
  EXPECT_NE(message(counting({3}), 1).find("shape [3] has no dimension 1"), std::string::npos);
  EXPECT_THROW(concatenate({}, 0), std::invalid_argument);
}

}  // namespace
}  // namespace beast

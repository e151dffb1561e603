// What one pixel of a scaled image is: the mean of the area that it covers, as OpenCV's INTER_AREA has it, to the bit.
// It is taken in integers, and in OpenCV's order of float32 operations only where those could decide the rounding.
//
// Compile with -ffp-contract=off: a fused multiply-add rounds once where OpenCV rounds twice.
#pragma once

#include <math.h>
#include <stdint.h>

#include "device.h"

namespace beast::atari {

// Which pixels of an axis one output covers.
struct Taps {
  int32_t begin;        // first pixel that is covered
  int32_t count;        // pixels that are covered
  int32_t offset;       // of the first weight
  int32_t float_begin;  // the same for OpenCV's weights, whose first pixel may differ by rounding
  int32_t float_count;
  int32_t float_offset;
};

// One axis of a scaled image.
struct AreaAxis {
  const Taps* taps;         // one for each output
  const uint32_t* weights;  // those of an output add up to the axis' total
  const float* float_weights;
};

// How the weighted sum of the pixels that an output covers becomes its mean. Sums are whole numbers below 2^24, which
// floats hold exactly.
struct AreaMean {
  float total, one_over_total;  // of the weights
  float nearly_half;            // a sum so far from a mean may be a tie
  bool whole_scales;            // both scales are whole numbers, for which OpenCV takes another way
  bool is_half;                 // both are 2, which rounds ties up
};

// The mean where both scales are whole numbers, but for 2.
HD inline uint8_t whole_mean(const AreaMean& area, float sum) {
  return static_cast<uint8_t>(to_int(multiply(sum, area.one_over_total)));
}
// The mean of other scales, unless it is nearly a tie.
HD inline int rounded_mean(const AreaMean& area, float sum) {
  return static_cast<int>(plus(multiply(sum, area.one_over_total), 0.5f));
}
HD inline bool is_nearly_tie(const AreaMean& area, float sum, int mean) {
  return fabsf(sum - multiply(static_cast<float>(mean), area.total)) >= area.nearly_half;
}

// A pixel as OpenCV computes it: the products of a row from left to right, then the rows from top to bottom.
// `pixel_at(y, x)` is a pixel of the image.
template <class Pixels>
HD inline uint8_t mean_in_floats(const AreaAxis& rows, const AreaAxis& columns, int j, int i, const Pixels& pixel_at) {
  const Taps &row = rows.taps[j], &column = columns.taps[i];
  float sum = 0;
  for (int k = 0; k < row.float_count; ++k) {
    float of_row = 0;
    for (int l = 0; l < column.float_count; ++l) {
      const float pixel = static_cast<float>(pixel_at(row.float_begin + k, column.float_begin + l));
      of_row = plus(of_row, multiply(pixel, columns.float_weights[column.float_offset + l]));
    }
    sum = plus(sum, multiply(rows.float_weights[row.float_offset + k], of_row));
  }
  const int mean = to_int(sum);  // rounds half to even
  return static_cast<uint8_t>(mean < 0 ? 0 : mean > 255 ? 255 : mean);
}

// Output pixel (j, i). An image of the same size is a case of it, with one tap of weight 1.
template <class Pixels>
HD inline uint8_t area_pixel(const AreaMean& area, const AreaAxis& rows, const AreaAxis& columns, int j, int i,
                             const Pixels& pixel_at) {
  const Taps &row = rows.taps[j], &column = columns.taps[i];
  uint32_t whole = 0;
  for (int k = 0; k < row.count; ++k) {
    uint32_t of_row = 0;
    for (int l = 0; l < column.count; ++l) {
      of_row += columns.weights[column.offset + l] * pixel_at(row.begin + k, column.begin + l);
    }
    whole += rows.weights[row.offset + k] * of_row;
  }
  const float sum = static_cast<float>(whole);
  if (area.whole_scales && !area.is_half) return whole_mean(area, sum);
  const int mean = rounded_mean(area, sum);
  if (area.is_half || !is_nearly_tie(area, sum, mean)) return static_cast<uint8_t>(mean);
  return mean_in_floats(rows, columns, j, i, pixel_at);
}

}  // namespace beast::atari

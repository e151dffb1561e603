// Scales screens down as OpenCV's INTER_AREA does, to the bit. What a pixel becomes stands in area.h; here are the tables
// of an axis, and loops over whole images that are fast on a CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "area.h"

#if defined(__GNUC__) && defined(__x86_64__)
#include <immintrin.h>
#define BEAST_ATARI_SSSE3 1
#endif

namespace beast::atari {

// One axis of a scaled image: which of `in` pixels each of `out` pixels covers, and how much of each.
struct Axis {
  int in = 0, out = 0, total = 0;  // the integer weights of an output pixel add up to `total`
  std::vector<Taps> taps;          // [out]
  std::vector<uint32_t> weights;
  std::vector<float> float_weights;

  AreaAxis area() const { return {taps.data(), weights.data(), float_weights.data()}; }

  // Throws std::invalid_argument where there would be more pixels than before.
  Axis(int in, int out) : in(in), out(out) {
    if (out < 1 || out > in) {
      throw std::invalid_argument(std::to_string(out) + " pixels in height or width of an image are not between 1 and " +
                                  std::to_string(in));
    }
    const int divisor = std::gcd(in, out), whole = out / divisor;
    total = in / divisor;
    const double scale = 1.0 / (static_cast<double>(out) / in);
    for (int j = 0; j < out; ++j) {
      Taps t{};
      t.begin = j * total / whole;
      t.offset = static_cast<int>(weights.size());
      for (int i = t.begin; i * whole < (j + 1) * total; ++i, ++t.count) {
        weights.push_back(std::min((i + 1) * whole, (j + 1) * total) - std::max(i * whole, j * total));
      }
      // OpenCV's rule: shares of pixels below 0.001 are left out, quotients are taken in double.
      const double begin = j * scale, end = begin + scale, cell = std::min(scale, in - begin);
      const int last = std::min(static_cast<int>(std::floor(end)), in - 1);
      const int first = std::min(static_cast<int>(std::ceil(begin)), last);
      t.float_begin = first;
      t.float_offset = static_cast<int>(float_weights.size());
      if (first - begin > 1e-3) {
        --t.float_begin;
        float_weights.push_back(static_cast<float>((first - begin) / cell));
      }
      for (int i = first; i < last; ++i) float_weights.push_back(static_cast<float>(1.0 / cell));
      if (end - last > 1e-3) {
        float_weights.push_back(static_cast<float>(std::min(std::min(end - last, 1.0), cell) / cell));
      }
      t.float_count = static_cast<int>(float_weights.size()) - t.float_offset;
      taps.push_back(t);
    }
  }
};

class Resizer {
 public:
  // What one thread needs while it scales.
  using Scratch = std::vector<float>;

  // Images [in_height, in_width, channels] become [out_height, out_width, channels]. Throws std::invalid_argument
  // where they would become larger.
  Resizer(int in_height, int in_width, int out_height, int out_width, int channels)
      : channels_(channels), rows_(in_height, out_height), columns_(in_width, out_width) {
    is_copy_ = in_height == out_height && in_width == out_width;
    mean_.total = static_cast<float>(rows_.total) * static_cast<float>(columns_.total);
    mean_.one_over_total = 1.0f / mean_.total;
    if (mean_.total * 255 >= 1 << 24) throw std::invalid_argument("images of this size are not scaled exactly to that one");
    mean_.whole_scales = in_height % out_height == 0 && in_width % out_width == 0;
    mean_.is_half = rows_.total == 2 && columns_.total == 2 && mean_.whole_scales;
    // OpenCV's float32 sum of bytes is off by less than 1e-4 here: only within this of a tie can it round otherwise.
    mean_.nearly_half = 0.5f * mean_.total - std::floor(mean_.total * 2e-4f);
    make_sums_across();
#ifdef BEAST_ATARI_SSSE3
    is_usual_ = channels == 1 && in_height == 210 && in_width == 160 && out_height == 84 && out_width == 84 &&
                __builtin_cpu_supports("ssse3");
    if (is_usual_) make_shuffles();
#endif
  }

  Scratch scratch() const {
    const size_t row = static_cast<size_t>(columns_.out) * channels_;
    return Scratch(std::max(2 * row, static_cast<size_t>(210) * kStride / 2 + 16));  // usual() has sums of 16 bits
  }

  // What area_pixel() takes.
  const AreaMean& mean() const { return mean_; }
  const Axis& rows() const { return rows_; }
  const Axis& columns() const { return columns_; }

  void operator()(const uint8_t* image, uint8_t* out, Scratch& scratch) const {
    if (is_copy_) {
      std::memcpy(out, image, static_cast<size_t>(rows_.in) * columns_.in * channels_);
    } else if (is_usual_) {
      usual(image, out, reinterpret_cast<uint16_t*>(scratch.data()));
    } else {
      any(image, out, scratch.data());
    }
  }

 private:
  static constexpr int kStride = 88;  // of usual()'s sums: 12 blocks of 7, and room for the eighth of the last one

  // Every shape: a row of outputs is the weighted sum of sums across the rows of pixels that it covers. All sums are
  // whole numbers below 2^24, which floats hold exactly. Pictures of games have many equal rows, one below the other,
  // whose sums are the same.
  void any(const uint8_t* image, uint8_t* out, float* sums) const {
    const int width = columns_.in * channels_, out_width = columns_.out * channels_;
    float* const across = sums + out_width;
    const uint8_t* summed = nullptr;  // the row of pixels that `across` is of
    for (int j = 0; j < rows_.out; ++j) {
      const Taps& row = rows_.taps[j];
      std::fill(sums, sums + out_width, 0.0f);
      for (int k = 0; k < row.count; ++k) {
        const uint8_t* const pixels = image + static_cast<size_t>(row.begin + k) * width;
        if (!summed || std::memcmp(pixels, summed, width)) sum_across(pixels, across);
        summed = pixels;
        const float weight = static_cast<float>(rows_.weights[row.offset + k]);
        for (int x = 0; x < out_width; ++x) sums[x] += weight * across[x];
      }
      round(image, j, sums, out + static_cast<size_t>(j) * out_width);
    }
  }

  void sum_across(const uint8_t* pixels, float* across) const {
    switch (most_across_) {  // constants, so that no branch depends on the output
      case 2: return sum_across(pixels, across, std::integral_constant<int, 2>());
      case 3: return sum_across(pixels, across, std::integral_constant<int, 3>());
      default: return sum_across(pixels, across, most_across_);
    }
  }
  template <class Count>
  void sum_across(const uint8_t* pixels, float* across, Count count) const {
    const uint32_t* weights = weights_across_.data();
    for (const int begin : begins_across_) {
      uint32_t sum = 0;
      for (int k = 0; k < count; ++k) sum += weights[k] * pixels[begin + k * channels_];
      *across++ = static_cast<float>(sum);
      weights += count;
    }
  }

  // All outputs get equally many pixels, some of them with a weight of 0.
  void make_sums_across() {
    for (const Taps& column : columns_.taps) most_across_ = std::max(most_across_, column.count);
    for (const Taps& column : columns_.taps) {
      const int begin = std::min(column.begin, columns_.in - most_across_);
      for (int c = 0; c < channels_; ++c) {
        begins_across_.push_back(begin * channels_ + c);
        for (int k = 0; k < most_across_; ++k) {
          const int tap = begin + k - column.begin;
          weights_across_.push_back(tap < 0 || tap >= column.count ? 0 : columns_.weights[column.offset + tap]);
        }
      }
    }
  }

  // Row j of the outputs, from its sums.
  void round(const uint8_t* image, int j, const float* sums, uint8_t* out) const {
    const int out_width = columns_.out * channels_;
    const AreaMean mean = mean_;
    if (mean.whole_scales && !mean.is_half) {
      for (int x = 0; x < out_width; ++x) out[x] = whole_mean(mean, sums[x]);
      return;
    }
    int ties = 0;  // or nearly so
    for (int x = 0; x < out_width; ++x) {
      const int rounded = rounded_mean(mean, sums[x]);
      out[x] = static_cast<uint8_t>(rounded);
      ties |= is_nearly_tie(mean, sums[x], rounded);
    }
    if (!ties || mean.is_half) return;
    for (int x = 0; x < out_width; ++x) {
      if (is_nearly_tie(mean, sums[x], out[x])) out[x] = in_floats(image, j, x / channels_, x % channels_);
    }
  }

  uint8_t in_floats(const uint8_t* image, int j, int i, int c) const {
    return mean_in_floats(rows_.area(), columns_.area(), j, i, [&](int y, int x) {
      return image[(static_cast<size_t>(y) * columns_.in + x) * channels_ + c];
    });
  }

#ifdef BEAST_ATARI_SSSE3
  // 210 x 160 -> 84 x 84. Across: 7 outputs cover 13 1/3 pixels, so that 16 pixels at a time give 7 sums of weight 40.
  // Down: weights 2 2 1 and 1 2 2. All sums fit into 16 bits (200 * 255 = 51,000).
  __attribute__((target("ssse3"))) void usual(const uint8_t* image, uint8_t* out, uint16_t* sums) const {
    for (int y = 0; y < 210; ++y) {
      for (int block = 0; block < 12; ++block) {
        const Shuffle& shuffle = shuffles_[block];
        const __m128i pixels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(image + y * 160 + shuffle.begin));
        const auto part = [&](const int8_t* where, const int8_t* weights) __attribute__((target("ssse3"))) {
          return _mm_maddubs_epi16(
              _mm_shuffle_epi8(pixels, _mm_loadu_si128(reinterpret_cast<const __m128i*>(where))),
              _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights)));
        };
        const __m128i sum = _mm_add_epi16(part(shuffle.first_two, shuffle.first_two_weights),
                                          part(shuffle.third, shuffle.third_weights));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(sums + y * kStride + 7 * block), sum);
      }
    }
    const __m128i hundred = _mm_set1_epi16(100), two_hundred = _mm_set1_epi16(200), reciprocal = _mm_set1_epi16(20972);
    for (int j = 0; j < 84; ++j) {
      const uint16_t* rows[3] = {sums + (5 * j / 2) * kStride, sums + (5 * j / 2 + 1) * kStride,
                                 sums + (5 * j / 2 + 2) * kStride};
      if (j & 1) std::swap(rows[0], rows[2]);  // the row of weight 1 comes last
      for (int i = 0; i < 88; i += 8) {
        const auto load = [&](int k) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[k] + i)); };
        const __m128i doubled = _mm_slli_epi16(_mm_add_epi16(load(0), load(1)), 1);
        const __m128i sum = _mm_add_epi16(_mm_add_epi16(doubled, load(2)), hundred);
        // floor(sum / 200) = floor((sum / 8) / 25), exact for all sums up to 51,100.
        const __m128i mean = _mm_srli_epi16(_mm_mulhi_epu16(_mm_srli_epi16(sum, 3), reciprocal), 3);
        const __m128i ties = _mm_cmpeq_epi16(sum, _mm_mullo_epi16(mean, two_hundred));
        const __m128i bytes = _mm_packus_epi16(mean, mean);
        if (i < 80) {
          _mm_storel_epi64(reinterpret_cast<__m128i*>(out + j * 84 + i), bytes);
        } else {
          const int four = _mm_cvtsi128_si32(bytes);
          std::memcpy(out + j * 84 + i, &four, 4);
        }
        for (int mask = _mm_movemask_epi8(ties) & 0x5555; mask; mask &= mask - 1) {
          const int k = i + __builtin_ctz(mask) / 2;
          if (k < 84) out[j * 84 + k] = in_floats(image, j, k, 0);
        }
      }
    }
  }

  struct Shuffle {  // of the 16 pixels at `begin`: pixels and weights of 7 sums
    int begin;
    int8_t first_two[16], first_two_weights[16], third[16], third_weights[16];
  };

  void make_shuffles() {
    for (int block = 0; block < 12; ++block) {
      Shuffle& s = shuffles_[block];
      s.begin = std::min(columns_.taps[7 * block].begin, 160 - 16);
      std::memset(s.first_two, -1, 16);  // -1: 0
      std::memset(s.third, -1, 16);
      for (int k = 0; k < 7; ++k) {
        const Taps& t = columns_.taps[7 * block + k];
        for (int l = 0; l < t.count; ++l) {
          int8_t* where = l < 2 ? s.first_two + 2 * k + l : s.third + 2 * k;
          int8_t* weights = l < 2 ? s.first_two_weights + 2 * k + l : s.third_weights + 2 * k;
          *where = static_cast<int8_t>(t.begin + l - s.begin);
          *weights = static_cast<int8_t>(columns_.weights[t.offset + l]);
        }
      }
    }
  }

  Shuffle shuffles_[12] = {};
#else
  void usual(const uint8_t*, uint8_t*, uint16_t*) const {}
#endif

  int channels_ = 1;
  Axis rows_, columns_;
  int most_across_ = 0;                   // pixels of an output
  std::vector<int> begins_across_;        // [out, channels]
  std::vector<uint32_t> weights_across_;  // [out, channels, most_across_]
  AreaMean mean_{};
  bool is_copy_ = false, is_usual_ = false;
};

}  // namespace beast::atari

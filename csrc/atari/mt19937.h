// MT19937, the generator that ALE draws from: bit-identical to std::mt19937, but usable in device code and copyable.
#pragma once

#include <stdint.h>

#include "device.h"

namespace beast::atari {

struct Mt19937 {
  static constexpr int kDrawsPerFrame = 2;  // ALE draws for player B, too

  uint32_t words[624];
  uint32_t position;

  HD void seed(uint32_t value) {
    words[0] = value;
    for (uint32_t i = 1; i < 624; ++i) words[i] = 1812433253u * (words[i - 1] ^ (words[i - 1] >> 30)) + i;
    position = 624;
  }

  HD uint32_t draw() {
    if (position >= 624) refill();
    uint32_t y = words[position++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9D2C5680u;
    y ^= (y << 15) & 0xEFC60000u;
    return y ^ (y >> 18);
  }

 private:
  HD void refill() {
    for (int i = 0; i < 624; ++i) {
      const int next = i == 623 ? 0 : i + 1;
      const int middle = i < 227 ? i + 397 : i - 227;
      const uint32_t y = (words[i] & 0x80000000u) | (words[next] & 0x7FFFFFFFu);
      words[i] = words[middle] ^ (y >> 1) ^ (y & 1 ? 0x9908B0DFu : 0u);
    }
    position = 0;
  }
};

}  // namespace beast::atari

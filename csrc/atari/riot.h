// The 6532: its timer and the two ports with the joysticks and the console's switches. Its 128 bytes of RAM are in Vcs.
#pragma once

#include <stdint.h>

#include "device.h"

namespace beast::atari {

struct Riot {
  int32_t set_cycle;   // when the timer was written; moves back with each frame
  int32_t late;        // cycles past zero at the first read that came late
  uint8_t value;       // what was written
  uint8_t shift;       // the timer counts every 2^shift cycles: 0, 3, 6, 10
  uint8_t has_latched;  // whether `late` is valid
  uint8_t direction_a;  // SWACNT, which is only ever read back
  uint8_t joysticks;    // SWCHA: right, left, down, up of port 0 in bits 7..4, of port 1 in bits 3..0; 0 = pressed
  uint8_t switches;     // SWCHB
};

TABLE uint8_t kTimerShifts[4] = {0, 3, 6, 10};

HD inline void set_timer(Riot& riot, uint8_t value, int shift, int cycle) {
  riot.set_cycle = cycle;
  riot.value = value;
  riot.shift = static_cast<uint8_t>(shift);
  riot.has_latched = 0;
  riot.late = 0;
}

HD inline uint8_t read_riot(Riot& riot, int address, int cycle) {
  if (address & 4) {
    const int passed = cycle - riot.set_cycle - 1;
    const int past_zero = passed - (riot.value << riot.shift);
    if (address & 1) return past_zero >= 0 && !riot.has_latched ? 0x80 : 0;  // INSTAT
    if (past_zero < 0) return static_cast<uint8_t>(riot.value - 1 - (passed >> riot.shift));
    // ALE counts on at full speed below zero, from where the first late read was.
    const int offset = riot.has_latched ? riot.late : past_zero;
    if (past_zero >= 1 && !riot.has_latched) {
      riot.late = past_zero;
      riot.has_latched = 1;
    }
    return static_cast<uint8_t>(-1 - (past_zero >> riot.shift) - offset);
  }
  switch (address & 3) {
    case 0: return riot.joysticks;
    case 1: return riot.direction_a;
    case 2: return riot.switches;
    default: return 0;  // SWBCNT
  }
}

HD inline void write_riot(Riot& riot, int address, uint8_t value, int cycle) {
  if ((address & 0x14) == 0x14) {
    set_timer(riot, value, kTimerShifts[address & 3], cycle);
  } else if ((address & 7) == 1) {
    riot.direction_a = value;
  }
}

// Moves the origin of time forward. The timer repeats every 2^18 cycles at most once it has run out.
HD inline void rebase(Riot& riot, int cycles) {
  riot.set_cycle -= cycles;
  if (riot.set_cycle < -(1 << 29)) riot.set_cycle += 1 << 28;
}

}  // namespace beast::atari

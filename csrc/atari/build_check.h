// Refuses a build in which one instruction's call of the next is no jump: see cpu6507.h.
#pragma once

#include <stdexcept>
#include <string>

#include "vcs.h"

namespace beast::atari {

// Bytes of stack from the start of `count` instructions to their end, of a program that goes every way from an
// instruction to the next.
inline int64_t stack_of_instructions(int count) {
  constexpr uint8_t kProgram[] = {
      0xA5, 0x80,        // LDA $80
      0x85, 0x09,        // STA COLUBK
      0x85, 0x20,        // STA HMP0
      0x85, 0x02,        // STA WSYNC
      0x8D, 0x96, 0x02,  // STA TIM64T
      0xAD, 0x84, 0x02,  // LDA INTIM
      0x48, 0x68,        // PHA, PLA
      0xE6, 0x80,        // INC $80
      0xD0, 0x00,        // BNE to the next instruction
      0x4C, 0x90, 0x00,  // JMP into RAM
  };
  constexpr uint8_t kProgramInRam[] = {0x4C, 0x00, 0xF0};  // JMP back
  Rom rom{};
  rom.cart = kCart4K;
  memcpy(rom.bytes, kProgram, sizeof kProgram);
  Vcs vcs{};
  memcpy(vcs.ram + 0x10, kProgramInRam, sizeof kProgramInRam);
  vcs.cpu.pc = 0xF000;
  vcs.cpu.sp = 0xFF;
  Bus<kFlat> bus(rom, vcs, Canvas{}, {34, 210, kMostLines, true});
  run_cpu(vcs.cpu, bus, count);
  return bus.stack_bytes;
}

// Throws std::runtime_error if instructions nest calls. It takes microseconds.
inline void check_build() {
  constexpr int kInstructions = 1000, kMostBytes = 1024;  // where calls are jumps, 1,000 take about as many as one does
  const int64_t bytes = stack_of_instructions(kInstructions) - stack_of_instructions(1);
  if (bytes <= kMostBytes) return;
  throw std::runtime_error("the Atari emulator was compiled so that instructions nest calls: " +
                           std::to_string(kInstructions) + " of them take " + std::to_string(bytes) +
                           " bytes of stack, and a frame has up to " + std::to_string(kMaxInstructions) +
                           "; compile with -O2 or -O3, or with -foptimize-sibling-calls, which gcc's -O1 lacks");
}

}  // namespace beast::atari

// The 6507: a 6502 with 13 address lines, all 256 opcodes as ALE runs them.
//
// ALE counts the cycles of a whole instruction before its operand is read or written, and makes no accesses that the
// instruction does not need. All accesses of an instruction therefore happen at its last cycle.
#pragma once

#include <stdint.h>

#include "mt19937.h"

namespace beast::atari {

struct Cpu {
  uint16_t pc;
  uint8_t a, x, y, sp;
  uint8_t status;  // NV11DIZC
  int32_t cycle;   // since the start of the frame's line 0
};

constexpr int kBne = 0xD0, kBpl = 0x10, kDex = 0xCA, kDey = 0x88;

// Bytes that an instruction fetches before it does anything else.
struct Lengths {
  uint8_t of[256];
};
constexpr Lengths make_lengths() {
  Lengths lengths{};
  for (int opcode = 0; opcode < 256; ++opcode) {
    const int column = opcode & 0x1F;
    const bool is_long = column >= 0x0C ? column < 0x10 || column == 0x19 || column >= 0x1B : false;
    const bool is_short = column == 0x08 || column == 0x0A || column == 0x18 || column == 0x1A || column == 0x12;
    lengths.of[opcode] = is_long ? 3 : is_short ? 1 : 2;
  }
  for (int opcode = 0x00; opcode < 0x80; opcode += 0x20) lengths.of[opcode] = lengths.of[opcode | 2] = 1;
  lengths.of[0x20] = 2;  // JSR, which pushes before it fetches the third
  return lengths;
}
TABLE Lengths kLengths = make_lengths();

enum Status : uint8_t { kCarry = 1, kZero = 2, kInterrupt = 4, kDecimal = 8, kAlwaysSet = 0x30, kOverflow = 0x40, kNegative = 0x80 };

struct Sum {
  uint8_t result;
  uint8_t carry;
  uint8_t overflow;
};

HD inline int from_bcd(int byte) { return 10 * (byte >> 4) + (byte & 15); }
HD inline int to_bcd(int value) { return value / 10 << 4 | value % 10; }

HD inline Sum add_decimal(int a, int m, int carry) {
  const int sum = from_bcd(a) + from_bcd(m) + carry;
  const int result = to_bcd((sum & 0xFF) % 100);
  return {static_cast<uint8_t>(result), sum > 99, ((a ^ result) & (m ^ result) & 0x80) != 0};
}

HD inline Sum subtract_decimal(int a, int m, int carry) {
  int difference = from_bcd(a) - from_bcd(m) - (1 - carry);
  if (difference < 0) difference += 100;
  // Only invalid digits leave it negative.
  const int result = difference >= 0 ? to_bcd(difference % 100) : from_bcd(difference + 256);
  return {static_cast<uint8_t>(result), a >= m + 1 - carry, ((a ^ result) & (m ^ result) & 0x80) != 0};
}

HD inline Sum add(int a, int m, int carry, bool decimal) {
  if (decimal) return add_decimal(a, m, carry);
  const int sum = a + m + carry;
  return {static_cast<uint8_t>(sum), sum > 0xFF, ((a ^ sum) & (m ^ sum) & 0x80) != 0};
}

HD inline Sum subtract(int a, int m, int carry, bool decimal) {
  return decimal ? subtract_decimal(a, m, carry) : add(a, m ^ 0xFF, carry, false);
}

// ARR in decimal mode. `overflow` and `carry` as usual; N is the old carry, Z is that of the unadjusted result.
HD inline Sum rotate_decimal(int t, int rotated) {
  int result = rotated;
  if ((t & 15) + (t & 1) > 5) result = (result & 0xF0) | ((result + 6) & 15);
  const bool carry = ((t + (t & 0x10)) & 0x1F0) > 0x50;
  if (carry) result += 0x60;
  return {static_cast<uint8_t>(result), carry, ((t ^ rotated) & 0x40) != 0};
}

// Runs up to `left` instructions. The bus ends it earlier: its write_tia returns ~cycle instead of the next cycle once
// the frame is over. Returns false at a JAM opcode.
//
// A bus has: ram(), read_cart(address), write_cart(address, value), read_riot(address, cycle), write_riot(address,
// value, cycle), read_tia(address, cycle, undriven), write_tia(address, value, cycle), and fetch(pc, undriven), which
// reads any of them for the CPU. Without side effects are:
// - code(pc): where an instruction of the cartridge lies, or null where its bytes have to be fetched;
// - peek(pc): a byte of the cartridge, or -1;
// - loads_timer(pc): whether the instruction there loads INTIM to a register;
// - until_timer_is(value, most, cycle): if INTIM is in (value, most] in that cycle, where value is 0 or -1, at most the
//   cycles until it is `value`; else 0 or less.
template <class Bus>
HD bool run_cpu(Cpu& cpu, Bus& bus, int left) {
  // The registers live in locals: a byte written to RAM could alias any of them in memory.
  uint8_t* const ram = bus.ram();
  int pc = cpu.pc, a = cpu.a, x = cpu.x, y = cpu.y, sp = cpu.sp;
  int negative = cpu.status, zero = ~cpu.status & kZero;  // N is bit 7 of `negative`; Z is set if `zero` is 0
  int carry = cpu.status & kCarry, overflow = cpu.status & kOverflow;
  int decimal = cpu.status & kDecimal, interrupt = cpu.status & kInterrupt;
  int cycle = cpu.cycle;
  int seen = 0;     // the last byte that the CPU read: it shows where a read drives too few bits
  int address = 0;  // of the operand
  int m = 0;        // the operand
  bool running = true;

#define FETCH() (++pc, seen = *++code)
#define READ_ZERO_PAGE(where) \
  ((where) & 0x80 ? ram[(where) & 0x7F] : bus.read_tia((where), cycle, static_cast<uint8_t>(seen)))
#define READ(where)                                                                            \
  (((where) & 0x1000)  ? bus.read_cart(where)                                                  \
   : !((where) & 0x80) ? bus.read_tia((where), cycle, static_cast<uint8_t>(seen))              \
   : !((where) & 0x200) ? ram[(where) & 0x7F]                                                  \
                        : bus.read_riot((where), cycle))
#define WRITE_TIA(where, value)                                            \
  do {                                                                     \
    cycle = bus.write_tia((where), static_cast<uint8_t>(value), cycle);    \
    if (cycle < 0) cycle = ~cycle, left = 0;                               \
  } while (0)
#define WRITE(where, value)                                                  \
  do {                                                                       \
    if ((where) & 0x1000) {                                                  \
      bus.write_cart((where), static_cast<uint8_t>(value));                  \
    } else if (!((where) & 0x80)) {                                          \
      WRITE_TIA(where, value);                                               \
    } else if (!((where) & 0x200)) {                                         \
      ram[(where) & 0x7F] = static_cast<uint8_t>(value);                     \
    } else {                                                                 \
      bus.write_riot((where), static_cast<uint8_t>(value), cycle);           \
    }                                                                        \
  } while (0)
#define WRITE_ZERO_PAGE(where, value)                          \
  do {                                                         \
    if ((where) & 0x80) {                                      \
      ram[(where) & 0x7F] = static_cast<uint8_t>(value);       \
    } else {                                                   \
      WRITE_TIA(where, value);                                 \
    }                                                          \
  } while (0)
// The stack: $100-$17F is the TIA, $180-$1FF is RAM. ALE ignores a WSYNC that is written right behind another write.
#define PUSH(value)                       \
  do {                                    \
    WRITE_ZERO_PAGE(sp, value);           \
    sp = (sp - 1) & 0xFF;                 \
  } while (0)
#define PUSH_AGAIN(value)                                                        \
  do {                                                                           \
    if ((sp & 0xBF) != 0x02) WRITE_ZERO_PAGE(sp, value);                         \
    sp = (sp - 1) & 0xFF;                                                        \
  } while (0)
#define PULL() (sp = (sp + 1) & 0xFF, seen = READ_ZERO_PAGE(sp))
// PLA and PLP first read where the stack pointer is. It shows where they then read the TIA, from SP = FF.
#define PULL_ONE() (seen = READ_ZERO_PAGE(sp), PULL())

// Addressing modes set `address`. Indexed reads take a cycle more where they cross a page.
#define ZP (address = FETCH())
#define ZPX (address = (FETCH() + x) & 0xFF)
#define ZPY (address = (FETCH() + y) & 0xFF)
#define ABS (address = FETCH(), address |= FETCH() << 8)
#define INDEXED(index) (ABS, high = address >> 8, address = (address + (index)) & 0xFFFF)
#define CROSSED (cycle += (address >> 8) != high)
#define ABX INDEXED(x)
#define ABY INDEXED(y)
#define ABX_READ (ABX, CROSSED)
#define ABY_READ (ABY, CROSSED)
#define POINTER(where)                                            \
  do {                                                            \
    const int pointer = (where);                                  \
    address = seen = READ_ZERO_PAGE(pointer);                     \
    seen = READ_ZERO_PAGE((pointer + 1) & 0xFF);                  \
    address |= seen << 8;                                         \
  } while (0)
#define IZX POINTER((FETCH() + x) & 0xFF)
#define IZY                                \
  POINTER(FETCH());                        \
  high = address >> 8;                     \
  address = (address + y) & 0xFFFF
#define IZY_READ \
  IZY;           \
  CROSSED

#define FLAGS(value) (negative = zero = (value))
#define STATUS                                                                                                  \
  (kAlwaysSet | (negative & kNegative) | (zero ? 0 : kZero) | carry | overflow | decimal | interrupt)
#define SET_STATUS(value)               \
  do {                                  \
    const int status = (value);         \
    negative = status;                  \
    zero = ~status & kZero;             \
    carry = status & kCarry;            \
    overflow = status & kOverflow;      \
    decimal = status & kDecimal;        \
    interrupt = status & kInterrupt;    \
  } while (0)

// One opcode: its cycles, its addressing mode, what it does with the operand `m`.
#define OPCODE(code, cycles, ...) \
  case code: {                    \
    cycle += cycles;              \
    __VA_ARGS__;                  \
    break;                        \
  }
#define READ_IMM(code, cycles, OPERATION) OPCODE(code, cycles, m = FETCH(); OPERATION)
#define READ_ZP(code, cycles, MODE, OPERATION) OPCODE(code, cycles, MODE; m = READ_ZERO_PAGE(address); OPERATION)
#define READ_ANY(code, cycles, MODE, OPERATION) OPCODE(code, cycles, MODE; m = READ(address); OPERATION)
#define READ_8(base, OPERATION)                 \
  READ_ANY(base + 0x01, 6, IZX, OPERATION)      \
  READ_ZP(base + 0x05, 3, ZP, OPERATION)        \
  READ_IMM(base + 0x09, 2, OPERATION)           \
  READ_ANY(base + 0x0D, 4, ABS, OPERATION)      \
  READ_ANY(base + 0x11, 5, IZY_READ, OPERATION) \
  READ_ZP(base + 0x15, 4, ZPX, OPERATION)       \
  READ_ANY(base + 0x19, 4, ABY_READ, OPERATION) \
  READ_ANY(base + 0x1D, 4, ABX_READ, OPERATION)
#define STORE_ZP(code, cycles, MODE, value) OPCODE(code, cycles, MODE; WRITE_ZERO_PAGE(address, value))
#define STORE_ANY(code, cycles, MODE, value) OPCODE(code, cycles, MODE; WRITE(address, value))
// Read, modify, write: OPERATION changes m.
#define MODIFY_ZP(code, cycles, MODE, OPERATION) \
  OPCODE(code, cycles, MODE; m = READ_ZERO_PAGE(address); OPERATION; WRITE_ZERO_PAGE(address, m))
#define MODIFY_ANY(code, cycles, MODE, OPERATION) \
  OPCODE(code, cycles, MODE; m = READ(address); OPERATION; WRITE(address, m))
#define MODIFY_4(base, OPERATION)           \
  MODIFY_ZP(base + 0x06, 5, ZP, OPERATION)  \
  MODIFY_ANY(base + 0x0E, 6, ABS, OPERATION) \
  MODIFY_ZP(base + 0x16, 6, ZPX, OPERATION) \
  MODIFY_ANY(base + 0x1E, 7, ABX, OPERATION)
#define MODIFY_7(base, OPERATION)            \
  MODIFY_ANY(base + 0x03, 8, IZX, OPERATION) \
  MODIFY_ZP(base + 0x07, 5, ZP, OPERATION)   \
  MODIFY_ANY(base + 0x0F, 6, ABS, OPERATION) \
  MODIFY_ANY(base + 0x13, 8, IZY, OPERATION) \
  MODIFY_ZP(base + 0x17, 6, ZPX, OPERATION)  \
  MODIFY_ANY(base + 0x1B, 7, ABY, OPERATION) \
  MODIFY_ANY(base + 0x1F, 7, ABX, OPERATION)
#define BRANCH(code, condition)                                 \
  OPCODE(                                                       \
      code, 2, const int offset = static_cast<int8_t>(FETCH()); \
      if (condition) {                                          \
        const int target = (pc + offset) & 0xFFFF;              \
        const int took = 3 + (((target ^ pc) & 0xFF00) != 0);   \
        cycle += took - 2;                                      \
        pc = target;                                            \
        if (code == kBne) WAIT(1, 256, offset, took);           \
        if (code == kBpl) WAIT(0, 128, offset, took);           \
      })

#define ADC                                                  \
  do {                                                       \
    const Sum sum = add(a, m, carry, decimal);               \
    a = sum.result;                                          \
    carry = sum.carry;                                       \
    overflow = sum.overflow ? kOverflow : 0;                 \
    FLAGS(a);                                                \
  } while (0)
#define SBC                                                  \
  do {                                                       \
    const Sum sum = subtract(a, m, carry, decimal);          \
    a = sum.result;                                          \
    carry = sum.carry;                                       \
    overflow = sum.overflow ? kOverflow : 0;                 \
    FLAGS(a);                                                \
  } while (0)
#define COMPARE(with) (carry = (with) >= m, FLAGS(((with) - m) & 0xFF))
#define ASL (carry = m >> 7, m = (m << 1) & 0xFF)
#define LSR (carry = m & 1, m >>= 1)
#define ROL (m = m << 1 | carry, carry = m >> 8, m &= 0xFF)
#define ROR (m |= carry << 8, carry = m & 1, m >>= 1)

// Programs wait in loops of two instructions until a register or the timer is 0 (BNE), or less than 0 (BPL). Behind the
// branch that ends a round, having taken `took` cycles, this passes the rounds that are certain to follow. `least` is
// what the last of them has, `most` what the first may have.
#define WAIT(least, most, offset, took)                                                                            \
  do {                                                                                                       \
    int rounds = 0, cycles = 2 + (took);                                                                     \
    if ((offset) == -3) {                                                                                    \
      const int opcode = bus.peek(pc);                                                                       \
      if (opcode == kDex && x > (least) && x <= (most) && 2 * x < left) rounds = x - (least), x = (least);   \
      if (opcode == kDey && y > (least) && y <= (most) && 2 * y < left) rounds = y - (least), y = (least);   \
    } else if ((offset) == -5 && bus.loads_timer(pc)) {                                                      \
      cycles = 4 + (took);                                                                                   \
      rounds = bus.until_timer_is((least) - 1, (most) - 1, cycle + 4) / cycles;                              \
      if (2 * rounds >= left) rounds = 0;                                                                    \
    }                                                                                                        \
    if (rounds > 0) cycle += rounds * cycles, left -= 2 * rounds;                                            \
  } while (0)

  while (left-- > 0) {
    int high = 0;  // the unindexed address's high byte
    uint8_t fetched[3];
    const uint8_t* code = bus.code(pc);
    if (!code) {
      fetched[0] = bus.fetch(pc, seen);
      for (int i = 1; i < kLengths.of[fetched[0]]; ++i) fetched[i] = bus.fetch(pc + i, fetched[i - 1]);
      code = fetched;
    }
    ++pc;
    seen = *code;
    switch (static_cast<uint8_t>(seen)) {
      READ_8(0x00, a |= m; FLAGS(a))
      READ_8(0x20, a &= m; FLAGS(a))
      READ_8(0x40, a ^= m; FLAGS(a))
      READ_8(0x60, ADC)
      READ_8(0xA0, a = m; FLAGS(a))
      READ_8(0xC0, COMPARE(a))
      READ_8(0xE0, SBC)
      READ_IMM(0xEB, 2, SBC)

      READ_IMM(0xA2, 2, x = m; FLAGS(x))
      READ_ZP(0xA6, 3, ZP, x = m; FLAGS(x))
      READ_ZP(0xB6, 4, ZPY, x = m; FLAGS(x))
      READ_ANY(0xAE, 4, ABS, x = m; FLAGS(x))
      READ_ANY(0xBE, 4, ABY_READ, x = m; FLAGS(x))
      READ_IMM(0xA0, 2, y = m; FLAGS(y))
      READ_ZP(0xA4, 3, ZP, y = m; FLAGS(y))
      READ_ZP(0xB4, 4, ZPX, y = m; FLAGS(y))
      READ_ANY(0xAC, 4, ABS, y = m; FLAGS(y))
      READ_ANY(0xBC, 4, ABX_READ, y = m; FLAGS(y))
      READ_IMM(0xE0, 2, COMPARE(x))
      READ_ZP(0xE4, 3, ZP, COMPARE(x))
      READ_ANY(0xEC, 4, ABS, COMPARE(x))
      READ_IMM(0xC0, 2, COMPARE(y))
      READ_ZP(0xC4, 3, ZP, COMPARE(y))
      READ_ANY(0xCC, 4, ABS, COMPARE(y))
      READ_ZP(0x24, 3, ZP, negative = m; zero = a & m; overflow = m & kOverflow)
      READ_ANY(0x2C, 4, ABS, negative = m; zero = a & m; overflow = m & kOverflow)

      STORE_ANY(0x81, 6, IZX, a)
      STORE_ZP(0x85, 3, ZP, a)
      STORE_ANY(0x8D, 4, ABS, a)
      STORE_ANY(0x91, 6, IZY, a)
      STORE_ZP(0x95, 4, ZPX, a)
      STORE_ANY(0x99, 5, ABY, a)
      STORE_ANY(0x9D, 5, ABX, a)
      STORE_ZP(0x86, 3, ZP, x)
      STORE_ZP(0x96, 4, ZPY, x)
      STORE_ANY(0x8E, 4, ABS, x)
      STORE_ZP(0x84, 3, ZP, y)
      STORE_ZP(0x94, 4, ZPX, y)
      STORE_ANY(0x8C, 4, ABS, y)

      MODIFY_4(0x00, ASL; FLAGS(m))
      MODIFY_4(0x20, ROL; FLAGS(m))
      MODIFY_4(0x40, LSR; FLAGS(m))
      MODIFY_4(0x60, ROR; FLAGS(m))
      MODIFY_4(0xC0, m = (m - 1) & 0xFF; FLAGS(m))
      MODIFY_4(0xE0, m = (m + 1) & 0xFF; FLAGS(m))
      OPCODE(0x0A, 2, m = a; ASL; FLAGS(a = m))
      OPCODE(0x2A, 2, m = a; ROL; FLAGS(a = m))
      OPCODE(0x4A, 2, m = a; LSR; FLAGS(a = m))
      OPCODE(0x6A, 2, m = a; ROR; FLAGS(a = m))

      OPCODE(0x88, 2, FLAGS(y = (y - 1) & 0xFF))
      OPCODE(0xC8, 2, FLAGS(y = (y + 1) & 0xFF))
      OPCODE(0xCA, 2, FLAGS(x = (x - 1) & 0xFF))
      OPCODE(0xE8, 2, FLAGS(x = (x + 1) & 0xFF))
      OPCODE(0xAA, 2, FLAGS(x = a))
      OPCODE(0xA8, 2, FLAGS(y = a))
      OPCODE(0x8A, 2, FLAGS(a = x))
      OPCODE(0x98, 2, FLAGS(a = y))
      OPCODE(0xBA, 2, FLAGS(x = sp))
      OPCODE(0x9A, 2, sp = x)
      OPCODE(0x18, 2, carry = 0)
      OPCODE(0x38, 2, carry = kCarry)
      OPCODE(0x58, 2, interrupt = 0)
      OPCODE(0x78, 2, interrupt = kInterrupt)
      OPCODE(0xB8, 2, overflow = 0)
      OPCODE(0xD8, 2, decimal = 0)
      OPCODE(0xF8, 2, decimal = kDecimal)

      BRANCH(0x10, !(negative & kNegative))
      BRANCH(0x30, negative & kNegative)
      BRANCH(0x50, !overflow)
      BRANCH(0x70, overflow)
      BRANCH(0x90, !carry)
      BRANCH(0xB0, carry)
      BRANCH(0xD0, zero)
      BRANCH(0xF0, !zero)

      OPCODE(0x4C, 3, ABS; pc = address)
      OPCODE(
          0x6C, 5, ABS; seen = READ(address); m = seen; address = (address & 0xFF00) | ((address + 1) & 0xFF);
          seen = READ(address); pc = m | seen << 8)
      OPCODE(
          0x20, 6, m = FETCH(); PUSH(pc >> 8); PUSH_AGAIN(pc); seen = bus.fetch(pc, seen); pc = m | seen << 8)
      OPCODE(0x60, 6, m = PULL(); pc = m | PULL() << 8; pc = (pc + 1) & 0xFFFF)
      OPCODE(
          0x00, 7, pc = (pc + 1) & 0xFFFF; PUSH(pc >> 8); PUSH_AGAIN(pc); PUSH_AGAIN(STATUS);
          interrupt = kInterrupt; m = READ(0xFFFE); pc = m | READ(0xFFFF) << 8)
      OPCODE(0x40, 6, SET_STATUS(PULL()); m = PULL(); pc = m | PULL() << 8)
      OPCODE(0x48, 3, PUSH(a))
      OPCODE(0x08, 3, PUSH(STATUS))
      OPCODE(0x68, 4, FLAGS(a = PULL_ONE()))
      OPCODE(0x28, 4, SET_STATUS(PULL_ONE()))

      // What the data sheet does not name.
      MODIFY_7(0x00, ASL; FLAGS(a |= m))
      MODIFY_7(0x20, ROL; FLAGS(a &= m))
      MODIFY_7(0x40, LSR; FLAGS(a ^= m))
      MODIFY_7(0x60, ROR; ADC)
      MODIFY_7(0xC0, m = (m - 1) & 0xFF; COMPARE(a))
      MODIFY_7(0xE0, m = (m + 1) & 0xFF; SBC)
      READ_ANY(0xA3, 6, IZX, FLAGS(a = x = m))
      READ_ZP(0xA7, 4, ZP, FLAGS(a = x = m))  // 3 cycles on hardware
      READ_ANY(0xAF, 4, ABS, FLAGS(a = x = m))
      READ_ANY(0xB3, 5, IZY_READ, FLAGS(a = x = m))
      READ_ZP(0xB7, 4, ZPY, FLAGS(a = x = m))
      READ_ANY(0xBF, 4, ABY_READ, FLAGS(a = x = m))
      STORE_ANY(0x83, 6, IZX, a & x)
      STORE_ZP(0x87, 3, ZP, a & x)
      STORE_ANY(0x8F, 4, ABS, a & x)
      STORE_ZP(0x97, 4, ZPY, a & x)
      READ_IMM(0x0B, 2, FLAGS(a &= m); carry = a >> 7)
      READ_IMM(0x2B, 2, FLAGS(a &= m); carry = a >> 7)
      READ_IMM(0x4B, 2, m &= a; LSR; FLAGS(a = m))
      READ_IMM(0x8B, 2, FLAGS(a = (a | 0xEE) & x & m))
      READ_IMM(0xAB, 2, FLAGS(a = x = (a | 0xEE) & m))
      READ_IMM(0xCB, 2, const int both = a & x; carry = both >= m; FLAGS(x = (both - m) & 0xFF))
      READ_ANY(0xBB, 4, ABY_READ, FLAGS(a = x = sp = m & sp))
      OPCODE(0x93, 6, IZY; WRITE(address, a& x&(high + 1)))
      OPCODE(0x9F, 5, ABY; WRITE(address, a& x&(high + 1)))
      OPCODE(0x9E, 5, ABY; WRITE(address, x&(high + 1)))
      OPCODE(0x9C, 5, ABX; WRITE(address, y&(high + 1)))
      OPCODE(0x9B, 5, ABY; sp = a & x; WRITE(address, sp&(high + 1)))
      case 0x6B: {  // ARR
        cycle += 2;
        const int t = a & FETCH();
        const int rotated = t >> 1 | carry << 7;
        if (decimal) {
          const Sum sum = rotate_decimal(t, rotated);
          negative = carry ? kNegative : 0;
          zero = rotated;
          carry = sum.carry;
          overflow = sum.overflow ? kOverflow : 0;
          a = sum.result;
        } else {
          FLAGS(a = rotated);
          carry = rotated >> 6 & 1;
          overflow = ((rotated >> 6) ^ (rotated >> 5)) & 1 ? kOverflow : 0;
        }
        break;
      }
      case 0xEA:
      case 0x1A:
      case 0x3A:
      case 0x5A:
      case 0x7A:
      case 0xDA:
      case 0xFA: {
        cycle += 2;
        break;
      }
      case 0x80:
      case 0x82:
      case 0x89:
      case 0xC2:
      case 0xE2: {
        cycle += 2;
        (void)FETCH();
        break;
      }
      case 0x04:
      case 0x44:
      case 0x64: {
        cycle += 3;
        ZP;
        (void)READ_ZERO_PAGE(address);
        break;
      }
      case 0x14:
      case 0x34:
      case 0x54:
      case 0x74:
      case 0xD4:
      case 0xF4: {
        cycle += 4;
        ZPX;
        (void)READ_ZERO_PAGE(address);
        break;
      }
      case 0x0C: {
        cycle += 4;
        ABS;
        (void)READ(address);
        break;
      }
      case 0x1C:
      case 0x3C:
      case 0x5C:
      case 0x7C:
      case 0xDC:
      case 0xFC: {
        cycle += 4;
        ABX_READ;
        (void)READ(address);
        break;
      }
      default:  // x2: JAM
        pc = (pc - 1) & 0xFFFF;
        left = 0;
        running = false;
        break;
    }
  }

  cpu.pc = static_cast<uint16_t>(pc);
  cpu.a = static_cast<uint8_t>(a);
  cpu.x = static_cast<uint8_t>(x);
  cpu.y = static_cast<uint8_t>(y);
  cpu.sp = static_cast<uint8_t>(sp);
  cpu.status = static_cast<uint8_t>(STATUS);
  cpu.cycle = cycle;
  return running;

#undef FETCH
#undef READ_ZERO_PAGE
#undef READ
#undef WRITE_TIA
#undef WRITE
#undef WRITE_ZERO_PAGE
#undef PUSH
#undef PUSH_AGAIN
#undef PULL
#undef PULL_ONE
#undef ZP
#undef ZPX
#undef ZPY
#undef ABS
#undef INDEXED
#undef CROSSED
#undef ABX
#undef ABY
#undef ABX_READ
#undef ABY_READ
#undef POINTER
#undef IZX
#undef IZY
#undef IZY_READ
#undef FLAGS
#undef STATUS
#undef SET_STATUS
#undef OPCODE
#undef READ_IMM
#undef READ_ZP
#undef READ_ANY
#undef READ_8
#undef STORE_ZP
#undef STORE_ANY
#undef MODIFY_ZP
#undef MODIFY_ANY
#undef MODIFY_4
#undef MODIFY_7
#undef BRANCH
#undef ADC
#undef SBC
#undef COMPARE
#undef ASL
#undef LSR
#undef ROL
#undef ROR
#undef WAIT
}

}  // namespace beast::atari

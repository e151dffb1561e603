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

// Memory in which the CPU can execute instructions without fetching their bytes one by one.
struct Code {
  const uint8_t* begin;
  const uint8_t* end;     // instructions that begin before it lie in this memory with all their bytes; null: look anew
  const uint8_t* origin;  // where address 0 would lie
  uint8_t fetched[3];     // the bytes of an instruction elsewhere
};

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

HD NOINLINE inline Sum add_decimal(int a, int m, int carry) {
  const int sum = from_bcd(a) + from_bcd(m) + carry;
  const int result = to_bcd((sum & 0xFF) % 100);
  return {static_cast<uint8_t>(result), sum > 99, ((a ^ result) & (m ^ result) & 0x80) != 0};
}

HD NOINLINE inline Sum subtract_decimal(int a, int m, int carry) {
  int difference = from_bcd(a) - from_bcd(m) - (1 - carry);
  if (difference < 0) difference += 100;
  // Only invalid digits leave it negative.
  const int result = difference >= 0 ? to_bcd(difference % 100) : from_bcd(difference + 256);
  return {static_cast<uint8_t>(result), a >= m + 1 - carry, ((a ^ result) & (m ^ result) & 0x80) != 0};
}

HD inline Sum add(int a, int m, int carry) {
  const int sum = a + m + carry;
  return {static_cast<uint8_t>(sum), sum > 0xFF, ((a ^ sum) & (m ^ sum) & 0x80) != 0};
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
// reads any of them for the CPU. Besides:
// - code: where instructions lie;
// - find_code(pc): makes `code` the memory around pc, and returns where pc's byte lies;
// - until_timer_is(value, most, cycle): if INTIM is in (value, most] in that cycle, where value is 0 or -1, at most the
//   cycles until it is `value`; else 0 or less.
template <class Bus>
HD bool run_cpu(Cpu& cpu, Bus& bus, int left) {
  // The registers live in locals: a byte written to RAM could alias any of them in memory.
  uint8_t* const ram = bus.ram();
  int a = cpu.a, x = cpu.x, y = cpu.y, sp = cpu.sp;
  int result = 0;  // N is set if its bit 7 or 8 is, Z if its low byte is 0
  int carry = 0, overflow = 0, decimal = 0, interrupt = 0;
  int cycle = cpu.cycle;
  const uint8_t* code = bus.find_code(cpu.pc);  // the next byte to execute
  int seen = 0;  // the last byte that the CPU read, kept where the next one may be fetched
  bool running = true;

// What leads to calls is called unlikely, so that the compiler keeps the registers in those of the processor.
#define IS_LIKELY(condition) __builtin_expect((condition) != 0, 1)
// `undriven`: the byte that the CPU read before. It shows where a read drives too few bits.
#define FETCH() (*code++)
#define PC() (static_cast<int>(code - bus.code.origin) & 0xFFFF)
#define READ_ZERO_PAGE(where, undriven) \
  (IS_LIKELY((where) & 0x80) ? ram[(where) - 0x80] : bus.read_tia((where), cycle, static_cast<uint8_t>(undriven)))
#define READ(where, undriven)                                                                  \
  (IS_LIKELY((where) & 0x1000)                     ? bus.read_cart(where)                      \
   : IS_LIKELY(((where) & 0x280) == 0x80)          ? ram[(where) & 0x7F]                       \
   : (where) & 0x80                                ? bus.read_riot((where), cycle)             \
                                                   : bus.read_tia((where), cycle, static_cast<uint8_t>(undriven)))
#define WRITE_TIA(where, value)                                            \
  do {                                                                     \
    cycle = bus.write_tia((where), static_cast<uint8_t>(value), cycle);    \
    if (cycle < 0) cycle = ~cycle, left = 0;                               \
  } while (0)
#define WRITE(where, value)                                                  \
  do {                                                                       \
    if (IS_LIKELY(((where) & 0x1280) == 0x80)) {                             \
      ram[(where) & 0x7F] = static_cast<uint8_t>(value);                     \
    } else if ((where) & 0x1000) {                                           \
      bus.write_cart((where), static_cast<uint8_t>(value));                  \
    } else if ((where) & 0x80) {                                             \
      bus.write_riot((where), static_cast<uint8_t>(value), cycle);           \
    } else {                                                                 \
      WRITE_TIA(where, value);                                               \
    }                                                                        \
  } while (0)
#define WRITE_ZERO_PAGE(where, value)                          \
  do {                                                         \
    if (IS_LIKELY((where) & 0x80)) {                           \
      ram[(where) - 0x80] = static_cast<uint8_t>(value);       \
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
#define PULL(undriven) (sp = (sp + 1) & 0xFF, seen = READ_ZERO_PAGE(sp, undriven))
// PLA and PLP first read where the stack pointer is. It shows where they then read the TIA, from SP = FF.
#define PULL_ONE() (seen = READ_ZERO_PAGE(sp, code[-1]), PULL(seen))

// Addressing modes set `address`, and `high` to its high byte before indexing. Indexed reads take a cycle more where
// they cross a page.
#define ZP (address = FETCH())
#define ZPX (address = (FETCH() + x) & 0xFF)
#define ZPY (address = (FETCH() + y) & 0xFF)
#define ABS (address = FETCH(), high = FETCH(), address |= high << 8)
#define INDEXED(index) (ABS, address = (address + (index)) & 0xFFFF)
#define CROSSED (cycle += (address >> 8) != high)
#define ABX INDEXED(x)
#define ABY INDEXED(y)
#define ABX_READ (ABX, CROSSED)
#define ABY_READ (ABY, CROSSED)
#define POINTER(where)                                            \
  do {                                                            \
    const int pointer = (where), next = (pointer + 1) & 0xFF;     \
    address = READ_ZERO_PAGE(pointer, code[-1]);                  \
    high = seen = READ_ZERO_PAGE(next, address);                  \
    address |= high << 8;                                         \
  } while (0)
#define IZX POINTER((FETCH() + x) & 0xFF)
#define IZY                                \
  POINTER(FETCH());                        \
  address = (address + y) & 0xFFFF
#define IZY_READ \
  IZY;           \
  CROSSED

#define FLAGS(value) (result = (value))
#define NEGATIVE (result & 0x180)
#define NOT_ZERO (result & 0xFF)
#define STATUS                                                                                                  \
  (kAlwaysSet | (NEGATIVE ? kNegative : 0) | (NOT_ZERO ? 0 : kZero) | carry | overflow | decimal | interrupt)
#define SET_STATUS(value)                                           \
  do {                                                              \
    const int status = (value);                                     \
    result = (status & kNegative) << 1 | (~status & kZero);         \
    carry = status & kCarry;                                        \
    overflow = status & kOverflow;                                  \
    decimal = status & kDecimal;                                    \
    interrupt = status & kInterrupt;                                \
  } while (0)
#define TEST_BITS (result = (a & m) | (m & kNegative) << 1, overflow = m & kOverflow)

// `last`: the byte of which the CPU knows where to go on.
#define GO_TO(where, last)                               \
  do {                                                   \
    code = (where);                                      \
    seen = (last);                                       \
    if (code < bus.code.begin) bus.code.end = nullptr;   \
  } while (0)
#define JUMP(address, last) GO_TO(bus.code.origin + (address), last)

// One opcode: its cycles, its addressing mode, what it does with the operand `m`.
#define OPCODE(opcode, cycles, ...) \
  case opcode: {                    \
    cycle += cycles;                \
    __VA_ARGS__;                    \
    break;                          \
  }
#define READ_IMM(opcode, cycles, OPERATION) OPCODE(opcode, cycles, m = FETCH(); OPERATION)
#define READ_ZP(opcode, cycles, MODE, OPERATION) \
  OPCODE(opcode, cycles, MODE; m = READ_ZERO_PAGE(address, code[-1]); OPERATION)
#define READ_ANY(opcode, cycles, MODE, OPERATION) OPCODE(opcode, cycles, MODE; m = READ(address, high); OPERATION)
#define READ_8(base, OPERATION)                 \
  READ_ANY(base + 0x01, 6, IZX, OPERATION)      \
  READ_ZP(base + 0x05, 3, ZP, OPERATION)        \
  READ_IMM(base + 0x09, 2, OPERATION)           \
  READ_ANY(base + 0x0D, 4, ABS, OPERATION)      \
  READ_ANY(base + 0x11, 5, IZY_READ, OPERATION) \
  READ_ZP(base + 0x15, 4, ZPX, OPERATION)       \
  READ_ANY(base + 0x19, 4, ABY_READ, OPERATION) \
  READ_ANY(base + 0x1D, 4, ABX_READ, OPERATION)
#define STORE_ZP(opcode, cycles, MODE, value) OPCODE(opcode, cycles, MODE; WRITE_ZERO_PAGE(address, value))
#define STORE_ANY(opcode, cycles, MODE, value) OPCODE(opcode, cycles, MODE; WRITE(address, value))
// Read, modify, write: OPERATION changes m.
#define MODIFY_ZP(opcode, cycles, MODE, OPERATION) \
  OPCODE(opcode, cycles, MODE; m = READ_ZERO_PAGE(address, code[-1]); OPERATION; WRITE_ZERO_PAGE(address, m))
#define MODIFY_ANY(opcode, cycles, MODE, OPERATION) \
  OPCODE(opcode, cycles, MODE; m = READ(address, high); OPERATION; WRITE(address, m))
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
#define BRANCH(opcode, condition)                                              \
  OPCODE(                                                                      \
      opcode, 2, const int offset = static_cast<int8_t>(FETCH());              \
      if (condition) {                                                         \
        const int took = 3 + (((PC() & 0xFF) + offset) >> 8 != 0);             \
        cycle += took - 2;                                                     \
        GO_TO(code + offset, offset);                                          \
        if (opcode == kBne) WAIT(1, 256, offset, took);                        \
        if (opcode == kBpl) WAIT(0, 128, offset, took);                        \
      })

#define SUM(in_decimal, in_binary)                           \
  do {                                                       \
    const Sum sum = decimal ? in_decimal : in_binary;        \
    a = sum.result;                                          \
    carry = sum.carry;                                       \
    overflow = sum.overflow ? kOverflow : 0;                 \
    FLAGS(a);                                                \
  } while (0)
#define ADC SUM(add_decimal(a, m, carry), add(a, m, carry))
#define SBC SUM(subtract_decimal(a, m, carry), add(a, m ^ 0xFF, carry))
#define COMPARE(with) (carry = (with) >= m, FLAGS(((with) - m) & 0xFF))
#define ASL (carry = m >> 7, m = (m << 1) & 0xFF)
#define LSR (carry = m & 1, m >>= 1)
#define ROL (m = m << 1 | carry, carry = m >> 8, m &= 0xFF)
#define ROR (m |= carry << 8, carry = m & 1, m >>= 1)

// Programs wait in loops of two instructions until a register or the timer is 0 (BNE), or less than 0 (BPL). Behind the
// branch that ends a round, having taken `took` cycles, this passes the rounds that are certain to follow. `least` is
// what the last of them has, `most` what the first may have.
#define WAIT(least, most, offset, took)                                                                      \
  do {                                                                                                       \
    int rounds = 0, cycles = 2 + (took);                                                                     \
    if (((offset) != -3 && (offset) != -5) || code < bus.code.begin) break;                                  \
    if ((offset) == -3) {                                                                                    \
      if (*code == kDex && x > (least) && x <= (most) && 2 * x + 1 < left) rounds = x - (least), x = (least); \
      if (*code == kDey && y > (least) && y <= (most) && 2 * y + 1 < left) rounds = y - (least), y = (least); \
    } else if ((*code == 0xAD || *code == 0xAE || *code == 0xAC) && code[1] == 0x84 && code[2] == 0x02) {    \
      cycles = 4 + (took); /* a load of INTIM */                                                             \
      rounds = bus.until_timer_is((least) - 1, (most) - 1, cycle + 4) / cycles;                              \
      if (2 * rounds + 1 >= left) rounds = 0;                                                                \
    }                                                                                                        \
    if (rounds > 0) cycle += rounds * cycles, left -= 2 * rounds;                                            \
  } while (0)

  SET_STATUS(cpu.status);
  for (; left > 0; --left) {
    int address, high;  // of the operand
    int m;              // the operand
    if (!IS_LIKELY(code < bus.code.end)) {
      const int pc = PC();
      code = bus.find_code(pc);
      if (code >= bus.code.end) {
        uint8_t* const fetched = bus.code.fetched;
        fetched[0] = bus.fetch(pc, seen);
        const int length = kLengths.of[fetched[0]];
        for (int i = 1; i < length; ++i) fetched[i] = bus.fetch(pc + i, fetched[i - 1]);
        seen = fetched[length - 1];
        code = fetched;
        bus.code.begin = fetched + 3, bus.code.end = nullptr, bus.code.origin = fetched - pc;
      }
    }
    switch (FETCH()) {
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
      READ_ZP(0x24, 3, ZP, TEST_BITS)
      READ_ANY(0x2C, 4, ABS, TEST_BITS)

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

      BRANCH(0x10, !NEGATIVE)
      BRANCH(0x30, NEGATIVE)
      BRANCH(0x50, !overflow)
      BRANCH(0x70, overflow)
      BRANCH(0x90, !carry)
      BRANCH(0xB0, carry)
      BRANCH(0xD0, NOT_ZERO)
      BRANCH(0xF0, !NOT_ZERO)

      OPCODE(0x4C, 3, ABS; JUMP(address, high))
      OPCODE(
          0x6C, 5, ABS; m = READ(address, high); address = (address & 0xFF00) | ((address + 1) & 0xFF);
          high = READ(address, m); JUMP(m | high << 8, high))
      OPCODE(
          0x20, 6, m = FETCH(); const int pc = PC(); PUSH(pc >> 8); PUSH_AGAIN(pc); high = bus.fetch(pc, m);
          JUMP(m | high << 8, high))
      OPCODE(0x60, 6, m = PULL(code[-1]); high = PULL(m); JUMP(((m | high << 8) + 1) & 0xFFFF, high))
      OPCODE(
          0x00, 7, const int pc = PC() + 1; PUSH(pc >> 8); PUSH_AGAIN(pc); PUSH_AGAIN(STATUS); interrupt = kInterrupt;
          m = READ(0xFFFE, 0); JUMP(m | READ(0xFFFF, 0) << 8, 0))
      OPCODE(0x40, 6, SET_STATUS(PULL(code[-1])); m = PULL(seen); high = PULL(m); JUMP(m | high << 8, high))
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
          FLAGS(rotated);
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
        (void)READ_ZERO_PAGE(address, code[-1]);
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
        (void)READ_ZERO_PAGE(address, code[-1]);
        break;
      }
      case 0x0C: {
        cycle += 4;
        ABS;
        (void)READ(address, high);
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
        (void)READ(address, high);
        break;
      }
      default:  // x2: JAM
        --code;
        left = 0;
        running = false;
        break;
    }
  }

  cpu.pc = static_cast<uint16_t>(PC());
  cpu.a = static_cast<uint8_t>(a);
  cpu.x = static_cast<uint8_t>(x);
  cpu.y = static_cast<uint8_t>(y);
  cpu.sp = static_cast<uint8_t>(sp);
  cpu.status = static_cast<uint8_t>(STATUS);
  cpu.cycle = cycle;
  return running;

#undef IS_LIKELY
#undef FETCH
#undef PC
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
#undef NEGATIVE
#undef NOT_ZERO
#undef STATUS
#undef SET_STATUS
#undef TEST_BITS
#undef GO_TO
#undef JUMP
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
#undef SUM
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

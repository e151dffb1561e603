// The 6507: a 6502 with 13 address lines, all 256 opcodes as ALE runs them.
//
// ALE counts the cycles of a whole instruction before its operand is read or written, and makes no accesses that the
// instruction does not need. All accesses of an instruction therefore happen at its last cycle.
#pragma once

#include <stdint.h>

#include "device.h"

// Whether calls at the end of a function become jumps: only then each instruction can call the next.
#if defined(__CUDACC__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#elif defined(__clang__)
#define TAIL [[clang::musttail]]
#define NO_IPA __attribute__((noinline))
#elif defined(__GNUC__) && defined(__OPTIMIZE__)
#define TAIL
#define NO_IPA __attribute__((noipa))
#endif

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
  const uint8_t* end;     // instructions that begin before it lie in this memory with all their bytes; null: look anew
  const uint8_t* begin;
  const uint8_t* origin;  // where address 0 would lie
  uint8_t fetched[3];     // the bytes of an instruction elsewhere
};

// The part of the CPU's state that stays in memory while it runs.
struct Flags {
  int32_t result;  // N is set if its bit 7 or 8 is, Z if its low byte is 0
  uint8_t carry, overflow, decimal, interrupt;  // 0 or their bit of the status
  uint8_t sp;
  uint8_t seen;     // the last byte that the CPU read, where the next fetch may be from the TIA, which shows it
  uint8_t stopped;  // no instruction follows, and
  uint8_t jammed;   // none ever will
};

// A write to the TIA that ends an instruction.
struct Write {
  uint8_t address, value;
};

// A byte, or an address, in a register of the processor.
using Word = uint64_t;

// What instructions need all the time.
struct Registers {
  const uint8_t* code;  // the next byte to execute
  int64_t time;         // cycle * kCycle + a count of instructions, which ends at kLastInstruction
  Word a, x, y;
};
constexpr int kCycleBits = 16;
constexpr int64_t kCycle = 1 << kCycleBits;
// The CPU stops when the count reaches this. Jumps look at bit 15 of the count: after the first that finds it set, the
// count is compared before each instruction. Code without a jump soon leaves its 4 KB, where it is compared, too.
constexpr int kLastInstruction = 0x8000 + 5000;

// Bytes that an instruction fetches before it does anything else.
struct Lengths {
  uint8_t of[256];
};
constexpr Lengths make_lengths() {
  Lengths lengths{};
  for (int opcode = 0; opcode < 256; ++opcode) {
    const int column = opcode & 0x1F;
    const bool is_long = (column >= 0x0C && column < 0x10) || column == 0x19 || column >= 0x1B;
    const bool is_short = column == 0x08 || column == 0x0A || column == 0x18 || column == 0x1A || column == 0x12;
    lengths.of[opcode] = is_long ? 3 : is_short ? 1 : 2;
  }
  for (int opcode = 0x00; opcode < 0x80; opcode += 0x20) lengths.of[opcode] = lengths.of[opcode | 2] = 1;
  lengths.of[0x20] = 2;  // JSR, which pushes before it fetches the third
  return lengths;
}
TABLE Lengths kLengths = make_lengths();

enum Status : uint8_t {
  kCarry = 1, kZero = 2, kInterrupt = 4, kDecimal = 8, kAlwaysSet = 0x30, kOverflow = 0x40, kNegative = 0x80
};

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

// ARR in decimal mode: `t` is A & operand, `rotated` is that after ROR. The caller sets N and Z by `rotated`.
HD inline Sum rotate_decimal(int t, int rotated) {
  int result = rotated;
  if ((t & 15) + (t & 1) > 5) result = (result & 0xF0) | ((result + 6) & 15);
  const bool carry = ((t + (t & 0x10)) & 0x1F0) > 0x50;
  if (carry) result += 0x60;
  return {static_cast<uint8_t>(result), carry, ((t ^ rotated) & 0x40) != 0};
}

HD inline int status(const Flags& flags) {
  return kAlwaysSet | (flags.result & 0x180 ? kNegative : 0) | (flags.result & 0xFF ? 0 : kZero) | flags.carry |
         flags.overflow | flags.decimal | flags.interrupt;
}
HD inline void set_status(Flags& flags, int status) {
  flags.result = (status & kNegative) << 1 | (~status & kZero);
  flags.carry = status & kCarry;
  flags.overflow = status & kOverflow;
  flags.decimal = status & kDecimal;
  flags.interrupt = status & kInterrupt;
}

// A bus has, for the CPU:
// - code, flags, write, and saved: the registers while the CPU does not run;
// - zero_page, 256 bytes of which the upper half is the RAM;
// - has_code(address), read_code(address): reads of the cartridge that switch no bank and reach none of its RAM;
// - read_cart(address), write_cart(address, value), read_riot(address, cycle), write_riot(address, value, cycle),
//   read_tia(address, cycle, undriven), and fetch(pc, undriven, cycle), which reads any of them for the CPU;
// - absorb_write(time): whether `write` changes nothing but the time, to which it adds a WSYNC's wait;
//   write_motion(time): does most writes of HMxx and HMCLR, and returns whether this was one; write_register(): does
//   any write, at saved.time, and stops the CPU once the frame is over;
// - find_code(pc): makes `code` the memory around pc, and returns where pc's byte lies;
// - until_timer_is(value, most, cycle): how many cycles after `cycle` INTIM first is `value` (0 or -1), if it is in
//   (value, most] in `cycle`; else 0 or less.

// How an instruction has ended.
enum Outcome {
  kDone,
  kWrites,   // done but for bus.write
  kUnusual,  // nothing but `registers` has changed: run it again from the old ones, with kUsual = false
};

#define IS_LIKELY(condition) __builtin_expect((condition) != 0, 1)

// Writes bus.write, and moves `time` to where the CPU goes on.
template <class Bus>
HD NOINLINE void write_now(Bus& bus, int64_t& time) {
  if (bus.absorb_write(time)) return;
  bus.saved.time = time;
  bus.write_register();
  time = bus.saved.time;
}

// One instruction. With kUsual it has no function calls, so that the compiler can use all registers of the processor,
// and returns kUnusual where it would need one.
template <int kOpcode, bool kUsual, class Bus>
HD ALWAYS_INLINE Outcome execute(Bus& bus, Registers& registers) {
  const uint8_t*& code = registers.code;
  int64_t& time = registers.time;
  Word &a = registers.a, &x = registers.x, &y = registers.y;
  uint8_t* const zero_page = bus.zero_page;
  Flags& flags = bus.flags;
  uint8_t &carry = flags.carry, &overflow = flags.overflow, &decimal = flags.decimal, &interrupt = flags.interrupt;
  uint8_t &sp = flags.sp, &seen = flags.seen;
  [[maybe_unused]] Word address, high;  // of the operand
  [[maybe_unused]] Word m;              // the operand

// With kUsual: gives up unless the condition holds. It comes before any change but those of `registers`.
#define REQUIRE(condition)                                \
  do {                                                    \
    if (kUsual && !IS_LIKELY(condition)) return kUnusual; \
  } while (0)
#define NOT_USUAL REQUIRE(false)
#define CYCLE static_cast<int>(time >> kCycleBits)
#define FETCH() code[length++]
#define PC() (static_cast<int>(code + length - bus.code.origin) & 0xFFFF)
// `undriven`: the byte that the CPU read before. It shows where a read drives too few bits.
#define READ_ZERO_PAGE(value, where, undriven)                              \
  do {                                                                      \
    REQUIRE((where) & 0x80);                                                \
    if (kUsual || ((where) & 0x80)) {                                       \
      value = zero_page[where];                                             \
    } else {                                                                \
      value = bus.read_tia((where), CYCLE, static_cast<uint8_t>(undriven)); \
    }                                                                       \
  } while (0)
#define READ(value, where, undriven)                                                           \
  do {                                                                                         \
    if (IS_LIKELY(bus.has_code(where))) {                                                      \
      value = bus.read_code(where);                                                            \
    } else if (IS_LIKELY(((where) & 0x1280) == 0x80)) {                                        \
      value = zero_page[((where) & 0x7F) | 0x80];                                              \
    } else {                                                                                   \
      NOT_USUAL;                                                                               \
      value = (where) & 0x1000 ? bus.read_cart(where)                                          \
              : (where) & 0x80 ? bus.read_riot((where), CYCLE)                                 \
                               : bus.read_tia((where), CYCLE, static_cast<uint8_t>(undriven)); \
    }                                                                                          \
  } while (0)
#define DONE(outcome)         \
  do {                        \
    code += length;           \
    if (kUsual) time += cost; \
    return outcome;           \
  } while (0)
#define WRITE_TIA(where, value)                                             \
  do {                                                                      \
    bus.write = {static_cast<uint8_t>(where), static_cast<uint8_t>(value)}; \
    DONE(kWrites);                                                          \
  } while (0)
#define WRITE_ZERO_PAGE(where, value)               \
  do {                                              \
    if (!((where) & 0x80)) WRITE_TIA(where, value); \
    zero_page[where] = static_cast<uint8_t>(value); \
  } while (0)
#define WRITE(where, value)                                             \
  do {                                                                  \
    if (IS_LIKELY(((where) & 0x1280) == 0x80)) {                        \
      zero_page[((where) & 0x7F) | 0x80] = static_cast<uint8_t>(value); \
    } else if ((where) & 0x1000) {                                      \
      NOT_USUAL;                                                        \
      bus.write_cart((where), static_cast<uint8_t>(value));             \
    } else if ((where) & 0x80) {                                        \
      NOT_USUAL;                                                        \
      bus.write_riot((where), static_cast<uint8_t>(value), CYCLE);      \
    } else {                                                            \
      WRITE_TIA(where, value);                                          \
    }                                                                   \
  } while (0)
// The stack: $100-$17F is the TIA, $180-$1FF is RAM. Requires RAM from SP + first to SP + last.
#define REQUIRE_STACK(first, last) REQUIRE((sp + (first)) & (sp + (last)) & 0x80)
#define PUSH(value)                                  \
  do {                                               \
    if (kUsual || (sp & 0x80)) {                     \
      zero_page[sp] = static_cast<uint8_t>(value);   \
    } else {                                         \
      bus.write = {sp, static_cast<uint8_t>(value)}; \
      write_now(bus, time);                          \
    }                                                \
    --sp;                                            \
  } while (0)
// A push right behind another: ALE then ignores a write of WSYNC.
#define PUSH_AGAIN(value)      \
  do {                         \
    if ((sp & 0xBF) != 0x02) { \
      PUSH(value);             \
    } else {                   \
      --sp;                    \
    }                          \
  } while (0)
#define PULL(value, undriven)              \
  do {                                     \
    ++sp;                                  \
    if (kUsual) {                          \
      value = zero_page[sp];               \
    } else {                               \
      READ_ZERO_PAGE(value, sp, undriven); \
    }                                      \
    seen = static_cast<uint8_t>(value);    \
  } while (0)
// PLA and PLP read at SP before they increment it. That byte shows where they then read the TIA, which is from SP = FF.
#define PULL_ONE(value)                          \
  do {                                           \
    REQUIRE_STACK(0, 1);                         \
    READ_ZERO_PAGE(value, sp, code[length - 1]); \
    PULL(value, value);                          \
  } while (0)

// Addressing modes set `address`, and `high` to its high byte before indexing. Indexed reads take a cycle more where
// they cross a page.
#define ZP address = FETCH()
#define ZPX address = (FETCH() + x) & 0xFF
#define ZPY address = (FETCH() + y) & 0xFF
#define ABS               \
  do {                    \
    address = FETCH();    \
    high = FETCH();       \
    address |= high << 8; \
  } while (0)
#define INDEXED(index) \
  ABS;                 \
  address = (address + (index)) & 0xFFFF
#define CROSSED time += (address >> 8) != high ? kCycle : 0
#define ABX INDEXED(x)
#define ABY INDEXED(y)
#define ABX_READ \
  ABX;           \
  CROSSED
#define ABY_READ \
  ABY;           \
  CROSSED
#define POINTER(where)                                    \
  do {                                                    \
    const Word pointer = (where);                         \
    REQUIRE(pointer - 0x80 < 0x7F);                       \
    if (kUsual) {                                         \
      address = zero_page[pointer];                       \
      high = zero_page[pointer + 1];                      \
    } else {                                              \
      READ_ZERO_PAGE(address, pointer, code[length - 1]); \
      const Word next = (pointer + 1) & 0xFF;             \
      READ_ZERO_PAGE(high, next, address);                \
      seen = static_cast<uint8_t>(high);                  \
    }                                                     \
    address |= high << 8;                                 \
  } while (0)
#define IZX POINTER((FETCH() + x) & 0xFF)
#define IZY         \
  POINTER(FETCH()); \
  address = (address + y) & 0xFFFF
#define IZY_READ \
  IZY;           \
  CROSSED

#define FLAGS(value) (flags.result = (value))
#define NEGATIVE (flags.result & 0x180)
#define NOT_ZERO (flags.result & 0xFF)
#define STATUS status(flags)
#define TEST_BITS (FLAGS((a & m) | (m & kNegative) << 1), overflow = m & kOverflow)

// `last`: the last byte that the CPU read before it goes on.
#define GO_TO(where, last)                                                                          \
  do {                                                                                              \
    code = (where);                                                                                 \
    length = 0;                                                                                     \
    seen = static_cast<uint8_t>(last);                                                              \
    if (!IS_LIKELY(code >= bus.code.begin) || !IS_LIKELY(!(time & 0x8000))) bus.code.end = nullptr; \
  } while (0)
#define JUMP(address, last) GO_TO(bus.code.origin + (address), last)

// One opcode: its cycles, its addressing mode, what it does with the operand `m`.
#define OPCODE(opcode, cycles, ...)                 \
  if constexpr (kOpcode == (opcode)) {              \
    constexpr int64_t cost = (cycles) * kCycle + 1; \
    int length = 1;                                 \
    if (!kUsual) time += cost;                      \
    __VA_ARGS__;                                    \
    DONE(kDone);                                    \
  }
#define READ_IMM(opcode, cycles, OPERATION) OPCODE(opcode, cycles, m = FETCH(); OPERATION)
#define READ_ZP(opcode, cycles, MODE, OPERATION) \
  OPCODE(opcode, cycles, MODE; READ_ZERO_PAGE(m, address, code[length - 1]); OPERATION)
#define READ_ANY(opcode, cycles, MODE, OPERATION) OPCODE(opcode, cycles, MODE; READ(m, address, high); OPERATION)
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
  OPCODE(opcode, cycles, MODE; READ_ZERO_PAGE(m, address, code[length - 1]); OPERATION; WRITE_ZERO_PAGE(address, m))
#define MODIFY_ANY(opcode, cycles, MODE, OPERATION) \
  OPCODE(opcode, cycles, MODE; REQUIRE((address & 0x1280) == 0x80); READ(m, address, high); OPERATION; WRITE(address, m))
#define MODIFY_4(base, OPERATION)            \
  MODIFY_ZP(base + 0x06, 5, ZP, OPERATION)   \
  MODIFY_ANY(base + 0x0E, 6, ABS, OPERATION) \
  MODIFY_ZP(base + 0x16, 6, ZPX, OPERATION)  \
  MODIFY_ANY(base + 0x1E, 7, ABX, OPERATION)
#define MODIFY_7(base, OPERATION)            \
  MODIFY_ANY(base + 0x03, 8, IZX, OPERATION) \
  MODIFY_ZP(base + 0x07, 5, ZP, OPERATION)   \
  MODIFY_ANY(base + 0x0F, 6, ABS, OPERATION) \
  MODIFY_ANY(base + 0x13, 8, IZY, OPERATION) \
  MODIFY_ZP(base + 0x17, 6, ZPX, OPERATION)  \
  MODIFY_ANY(base + 0x1B, 7, ABY, OPERATION) \
  MODIFY_ANY(base + 0x1F, 7, ABX, OPERATION)
// A branch may end a round of a loop that waits.
#define BRANCH(opcode, condition)                                                            \
  OPCODE(                                                                                    \
      opcode, 2, const int64_t offset = static_cast<int8_t>(FETCH());                        \
      if (condition) {                                                                       \
        constexpr bool kMayWait = (opcode) == kBne || (opcode) == kBpl;                      \
        if (kMayWait) REQUIRE(offset != -3 && offset != -5);                                 \
        const int64_t from = kUsual ? reinterpret_cast<intptr_t>(code + length) : PC();      \
        const int64_t took = kCycle + (((from + offset) ^ from) & 0x100) * (kCycle / 0x100); \
        time += took;                                                                        \
        if (kMayWait && !kUsual) WAIT((opcode) == kBne, offset, 2 + took / kCycle);          \
        GO_TO(code + length + offset, offset);                                               \
      })

#define SUM(in_decimal, in_binary)                               \
  do {                                                           \
    REQUIRE(!decimal);                                           \
    const Sum sum = !kUsual && decimal ? in_decimal : in_binary; \
    a = sum.result;                                              \
    carry = sum.carry;                                           \
    overflow = sum.overflow ? kOverflow : 0;                     \
    FLAGS(a);                                                    \
  } while (0)
#define ADC SUM(add_decimal(a, m, carry), add(a, m, carry))
#define SBC SUM(subtract_decimal(a, m, carry), add(a, m ^ 0xFF, carry))
#define COMPARE(with) (carry = (with) >= m, FLAGS(((with) - m) & 0xFF))
#define ASL (carry = static_cast<uint8_t>(m >> 7), m = (m << 1) & 0xFF)
#define LSR (carry = m & 1, m >>= 1)
#define ROL (m = m << 1 | carry, carry = static_cast<uint8_t>(m >> 8), m &= 0xFF)
#define ROR (m |= carry << 8, carry = m & 1, m >>= 1)

// Programs wait in loops of two instructions until a register or the timer is 0 (BNE), or less than 0 (BPL). At the
// branch that ends a round, which takes `took` cycles, this passes the rounds that are certain to follow. `least` is the
// smallest value with which the branch is taken: 1 for BNE, 0 for BPL.
#define WAIT(least, offset, took)                                                                        \
  do {                                                                                                   \
    constexpr int most = (least) ? 256 : 128;                                                            \
    const int left = kLastInstruction - static_cast<int>(time & (kCycle - 1));                           \
    const uint8_t* const body = code + length + (offset);                                                \
    int rounds = 0, cycles = 2 + static_cast<int>(took);                                                 \
    if (((offset) != -3 && (offset) != -5) || body < bus.code.begin) break;                              \
    if ((offset) == -3 && (*body == kDex || *body == kDey)) {                                            \
      Word& counter = *body == kDex ? x : y;                                                             \
      const int count = static_cast<int>(counter);                                                       \
      if (count <= (least) || count > most || 2 * count + 1 >= left) break;                              \
      rounds = count - (least), counter = (least);                                                       \
    } else if ((offset) == -5 && (*body == 0xAD || *body == 0xAE || *body == 0xAC) && body[1] == 0x84 && \
               body[2] == 0x02) { /* a load of INTIM */                                                  \
      cycles += 2;                                                                                       \
      rounds = bus.until_timer_is((least) - 1, most - 1, CYCLE + 4) / cycles;                            \
      if (2 * rounds + 1 >= left) break;                                                                 \
    }                                                                                                    \
    if (rounds > 0) time += rounds * (cycles * kCycle + 2);                                              \
  } while (0)

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
  OPCODE(0x9A, 2, sp = static_cast<uint8_t>(x))
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
      0x6C, 5, ABS; READ(m, address, high); address = (address & 0xFF00) | ((address + 1) & 0xFF);
      READ(high, address, m); JUMP(m | high << 8, high))
  OPCODE(
      0x20, 6, REQUIRE_STACK(0, -1); m = FETCH(); const int pc = PC(); PUSH(pc >> 8);
      PUSH_AGAIN(pc); high = kUsual ? code[2] : bus.fetch(pc, m, CYCLE); JUMP(m | high << 8, high))
  OPCODE(0x60, 6, REQUIRE_STACK(1, 2); PULL(m, code[length - 1]); PULL(high, m); JUMP(((m | high << 8) + 1) & 0xFFFF, high))
  OPCODE(
      0x00, 7, NOT_USUAL; const int pc = PC() + 1; PUSH(pc >> 8); PUSH_AGAIN(pc); PUSH_AGAIN(STATUS);
      interrupt = kInterrupt; READ(m, 0xFFFE, 0); READ(high, 0xFFFF, 0); JUMP(m | high << 8, 0))
  OPCODE(
      0x40, 6, NOT_USUAL; PULL(m, code[length - 1]); set_status(flags, m); PULL(m, seen); PULL(high, m);
      JUMP(m | high << 8, high))
  OPCODE(0x48, 3, const int where = sp--; WRITE_ZERO_PAGE(where, a))
  OPCODE(0x08, 3, const int where = sp--; WRITE_ZERO_PAGE(where, STATUS))
  OPCODE(0x68, 4, PULL_ONE(a); FLAGS(a))
  OPCODE(0x28, 4, PULL_ONE(m); set_status(flags, m))

  // Undocumented opcodes.
  MODIFY_7(0x00, ASL; FLAGS(a |= m))
  MODIFY_7(0x20, ROL; FLAGS(a &= m))
  MODIFY_7(0x40, LSR; FLAGS(a ^= m))
  MODIFY_7(0x60, REQUIRE(!decimal); ROR; ADC)
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
  READ_IMM(0xCB, 2, const Word both = a & x; carry = both >= m; FLAGS(x = (both - m) & 0xFF))
  READ_ANY(0xBB, 4, ABY_READ, FLAGS(a = x = sp = static_cast<uint8_t>(m & sp)))
  OPCODE(0x93, 6, IZY; WRITE(address, a& x&((address >> 8) + 1)))
  OPCODE(0x9F, 5, ABY; WRITE(address, a& x&((address >> 8) + 1)))
  OPCODE(0x9E, 5, ABY; WRITE(address, x&((address >> 8) + 1)))
  OPCODE(0x9C, 5, ABX; WRITE(address, y&((address >> 8) + 1)))
  OPCODE(0x9B, 5, NOT_USUAL; ABY; sp = static_cast<uint8_t>(a & x); WRITE(address, sp&((address >> 8) + 1)))
  OPCODE(
      0x6B, 2, m = a & FETCH(); high = m >> 1 | carry << 7; FLAGS(high);  // ARR
      if (decimal) {
        const Sum sum = rotate_decimal(m, high);
        carry = sum.carry;
        overflow = sum.overflow ? kOverflow : 0;
        a = sum.result;
      } else {
        a = high;
        carry = high >> 6 & 1;
        overflow = ((high >> 6) ^ (high >> 5)) & 1 ? kOverflow : 0;
      })
  OPCODE(0xEA, 2, )
  OPCODE(0x1A, 2, )
  OPCODE(0x3A, 2, )
  OPCODE(0x5A, 2, )
  OPCODE(0x7A, 2, )
  OPCODE(0xDA, 2, )
  OPCODE(0xFA, 2, )
  READ_IMM(0x80, 2, )
  READ_IMM(0x82, 2, )
  READ_IMM(0x89, 2, )
  READ_IMM(0xC2, 2, )
  READ_IMM(0xE2, 2, )
  READ_ZP(0x04, 3, ZP, )
  READ_ZP(0x44, 3, ZP, )
  READ_ZP(0x64, 3, ZP, )
  READ_ZP(0x14, 4, ZPX, )
  READ_ZP(0x34, 4, ZPX, )
  READ_ZP(0x54, 4, ZPX, )
  READ_ZP(0x74, 4, ZPX, )
  READ_ZP(0xD4, 4, ZPX, )
  READ_ZP(0xF4, 4, ZPX, )
  READ_ANY(0x0C, 4, ABS, )
  READ_ANY(0x1C, 4, ABX_READ, )
  READ_ANY(0x3C, 4, ABX_READ, )
  READ_ANY(0x5C, 4, ABX_READ, )
  READ_ANY(0x7C, 4, ABX_READ, )
  READ_ANY(0xDC, 4, ABX_READ, )
  READ_ANY(0xFC, 4, ABX_READ, )

  // x2: JAM
  flags.stopped = flags.jammed = 1;
  bus.code.end = nullptr;
  return kDone;

#undef REQUIRE
#undef NOT_USUAL
#undef CYCLE
#undef FETCH
#undef PC
#undef READ_ZERO_PAGE
#undef READ
#undef DONE
#undef WRITE_TIA
#undef WRITE_ZERO_PAGE
#undef WRITE
#undef REQUIRE_STACK
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

// Finds the next instruction where it does not lie in bus.code. Returns false if the CPU stops.
template <class Bus>
HD NOINLINE bool find_instruction(Bus& bus, Registers& registers) {
  if (bus.flags.stopped || (registers.time & (kCycle - 1)) >= kLastInstruction) return false;
  const int pc = static_cast<int>(registers.code - bus.code.origin) & 0xFFFF;
  registers.code = bus.find_code(pc);
  if (registers.code >= bus.code.end) {
    uint8_t* const fetched = bus.code.fetched;
    const int cycle = static_cast<int>(registers.time >> kCycleBits);
    fetched[0] = bus.fetch(pc, bus.flags.seen, cycle);
    const int length = kLengths.of[fetched[0]];
    for (int i = 1; i < length; ++i) fetched[i] = bus.fetch(pc + i, fetched[i - 1], cycle + i);
    bus.flags.seen = fetched[length - 1];
    registers.code = fetched;
    bus.code.begin = fetched + 3, bus.code.end = nullptr, bus.code.origin = fetched - pc;
  }
  if (registers.time & 0x8000) bus.code.end = nullptr;
  return true;
}

// Sixteen and 256 times ONE(opcode).
#define SIXTEEN(ONE, base)                                                                                    \
  ONE(base) ONE(base + 1) ONE(base + 2) ONE(base + 3) ONE(base + 4) ONE(base + 5) ONE(base + 6) ONE(base + 7) \
  ONE(base + 8) ONE(base + 9) ONE(base + 10) ONE(base + 11) ONE(base + 12) ONE(base + 13) ONE(base + 14) ONE(base + 15)
#define ALL_OPCODES(ONE)                                                                                            \
  SIXTEEN(ONE, 0x00) SIXTEEN(ONE, 0x10) SIXTEEN(ONE, 0x20) SIXTEEN(ONE, 0x30) SIXTEEN(ONE, 0x40) SIXTEEN(ONE, 0x50) \
  SIXTEEN(ONE, 0x60) SIXTEEN(ONE, 0x70) SIXTEEN(ONE, 0x80) SIXTEEN(ONE, 0x90) SIXTEEN(ONE, 0xA0) SIXTEEN(ONE, 0xB0) \
  SIXTEEN(ONE, 0xC0) SIXTEEN(ONE, 0xD0) SIXTEEN(ONE, 0xE0) SIXTEEN(ONE, 0xF0)

#ifdef TAIL

// A function for each opcode. All have the registers as arguments, and end with a jump to the next one's.
template <class Bus>
struct Interpreter {
#define ARGUMENTS Bus &bus, const uint8_t *code, int64_t time, Word a, Word x, Word y
#define REGISTERS bus, registers.code, registers.time, registers.a, registers.x, registers.y
#define GO_ON                                                                 \
  if (!IS_LIKELY(registers.code < bus.code.end)) TAIL return find(REGISTERS); \
  TAIL return kSteps[*registers.code](REGISTERS)
  using Step = void (*)(ARGUMENTS);
  static const Step kSteps[256], kUnusualSteps[256];

  template <int kOpcode>
  static void step(ARGUMENTS) {
    Registers registers = {code, time, a, x, y};
    const Outcome outcome = execute<kOpcode, true>(bus, registers);
    if (outcome == kUnusual) TAIL return unusual<kOpcode>(bus, code, time, a, x, y);
    if (outcome == kWrites) TAIL return write(REGISTERS);
    GO_ON;
  }
  template <int kOpcode>
  NO_IPA static void unusual(ARGUMENTS) {
    Registers registers = {code, time, a, x, y};
    if (execute<kOpcode, false>(bus, registers) == kWrites) TAIL return write(REGISTERS);
    GO_ON;
  }
  NO_IPA static void write(ARGUMENTS) {
    Registers registers = {code, time, a, x, y};
    if (!bus.absorb_write(registers.time)) TAIL return write_register(bus, code, time, a, x, y);
    GO_ON;
  }
  NO_IPA static void write_register(ARGUMENTS) {
    if (bus.write_motion(time)) {
      const Registers registers = {code, time, a, x, y};
      GO_ON;
    }
    bus.saved = {code, time, a, x, y};
    bus.write_register();
    const Registers registers = bus.saved;
    GO_ON;
  }
  // Without bus.code (its end is null) instructions run with kUsual = false.
  NO_IPA static void find(ARGUMENTS) {
    Registers registers = {code, time, a, x, y};
    if (!find_instruction(bus, registers)) {
      bus.saved = registers;
      return;
    }
    TAIL return (bus.code.end ? kSteps : kUnusualSteps)[*registers.code](REGISTERS);
  }

  static void run(Bus& bus, Registers& registers) {
    find(REGISTERS);
    registers = bus.saved;
  }
};
#define STEP(opcode) step<opcode>,
template <class Bus>
const typename Interpreter<Bus>::Step Interpreter<Bus>::kSteps[256] = {ALL_OPCODES(STEP)};
#undef STEP
#define STEP(opcode) unusual<opcode>,
template <class Bus>
const typename Interpreter<Bus>::Step Interpreter<Bus>::kUnusualSteps[256] = {ALL_OPCODES(STEP)};
#undef STEP
#undef GO_ON
#undef REGISTERS
#undef ARGUMENTS

#else

template <class Bus>
struct Interpreter {
  HD static void run(Bus& bus, Registers& registers) {
    for (;;) {
      if (!IS_LIKELY(registers.code < bus.code.end) && !find_instruction(bus, registers)) return;
      Outcome outcome = kDone;
      switch (*registers.code) {
#define STEP(opcode)                                    \
  case opcode:                                          \
    outcome = execute<(opcode), false>(bus, registers); \
    break;
        ALL_OPCODES(STEP)
#undef STEP
      }
      if (outcome == kDone) continue;
      write_now(bus, registers.time);
    }
  }
};

#endif

#undef ALL_OPCODES
#undef SIXTEEN
#undef IS_LIKELY

// Runs up to `count` instructions, or until the bus stops. Returns false at a JAM opcode.
template <class Bus>
HD bool run_cpu(Cpu& cpu, Bus& bus, int count) {
  Flags& flags = bus.flags;
  flags = Flags{};
  flags.sp = cpu.sp;
  set_status(flags, cpu.status);
  Registers registers = {bus.find_code(cpu.pc), cpu.cycle * kCycle + kLastInstruction - count, cpu.a, cpu.x, cpu.y};
  Interpreter<Bus>::run(bus, registers);
  cpu.pc = static_cast<uint16_t>(registers.code - bus.code.origin);
  cpu.a = static_cast<uint8_t>(registers.a);
  cpu.x = static_cast<uint8_t>(registers.x);
  cpu.y = static_cast<uint8_t>(registers.y);
  cpu.sp = flags.sp;
  cpu.status = static_cast<uint8_t>(status(flags));
  cpu.cycle = static_cast<int32_t>(registers.time >> kCycleBits);
  return !flags.jammed;
}

}  // namespace beast::atari

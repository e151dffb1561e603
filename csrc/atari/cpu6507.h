// The 6507: a 6502 with 13 address lines, all 256 opcodes as ALE runs them.
//
// ALE counts the cycles of a whole instruction before its operand is read or written, and makes no accesses that the
// instruction does not need. All accesses of an instruction therefore happen at its last cycle.
//
// Each opcode is a function that ends with a call of the next opcode's, and the compiler makes a jump of that call.
// Clang does so because `musttail` asks for it, GCC under -foptimize-sibling-calls, which belongs to -O2 and -O3 but
// not to -O1. Without it a frame would nest up to 25,000 calls. No macro tells, so check_build() (build_check.h)
// measures the stack when the module is loaded. At -O0, under GCC's sanitizers and on GPUs nothing nests: there a loop
// calls the opcodes.
#pragma once

#include <stdint.h>

#include "device.h"

// TAIL is defined where each instruction calls the next.
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
  uint8_t seen;    // as in Flags, where the next instruction is fetched from the TIA
  int32_t cycle;   // since the start of the frame's line 0
};

constexpr int kBne = 0xD0, kBpl = 0x10, kDex = 0xCA, kDey = 0x88;

// Memory in which the CPU can execute instructions without fetching their bytes one by one.
struct Code {
  const uint8_t* end;     // instructions that begin before it lie in this memory with all their bytes; null: look anew
  const uint8_t* begin;
  intptr_t origin;        // where address 0 would lie: a number, because no memory of ours need be there
  uint8_t fetched[3];     // the bytes of an instruction elsewhere
};

HD inline intptr_t place_of(const uint8_t* code) { return reinterpret_cast<intptr_t>(code); }
// A jump may lead out of the memory that `Code` describes. The next instruction is then looked up anew.
HD inline const uint8_t* code_at(intptr_t place) { return reinterpret_cast<const uint8_t*>(place); }

// The part of the CPU's state that stays in memory while it runs.
struct Flags {
  int32_t result;  // N is set if its bit 7 or 8 is, Z if its low byte is 0
  uint8_t carry, overflow, decimal, interrupt;  // 0 or their bit of the status
  uint8_t sp;
  uint8_t seen;     // the byte that was last read or written, where the next fetch may be from the TIA, which shows it
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

constexpr int cycles_of(int which) {
#define OPCODE(opcode, cycles, ...) \
  if (which == (opcode)) return cycles;
#include "opcodes.inc"
  return 2;
}

// Bytes that an instruction fetches before it does anything else, and cycles that it takes but for crossing a page.
struct Lengths {
  uint8_t of[256];
  uint8_t cycles[256];
};
constexpr Lengths make_lengths() {
  Lengths lengths{};
  for (int opcode = 0; opcode < 256; ++opcode) {
    const int column = opcode & 0x1F;
    const bool is_long = (column >= 0x0C && column < 0x10) || column == 0x19 || column >= 0x1B;
    const bool is_short = column == 0x08 || column == 0x0A || column == 0x18 || column == 0x1A || column == 0x12;
    lengths.of[opcode] = is_long ? 3 : is_short ? 1 : 2;
    lengths.cycles[opcode] = static_cast<uint8_t>(cycles_of(opcode));
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

HD inline bool is_negative(const Flags& flags) { return flags.result & 0x180; }
HD inline bool is_zero(const Flags& flags) { return !(flags.result & 0xFF); }
HD inline int status(const Flags& flags) {
  return kAlwaysSet | (is_negative(flags) ? kNegative : 0) | (is_zero(flags) ? kZero : 0) | flags.carry |
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
// - stack_bytes: how much of the stack the instructions took, see check_build();
// - kLineTime: how long a scan line is; lanes(): those of a GPU's warp that run instructions, this one among them;
// - zero_page, 256 bytes of which the upper half is the RAM;
// - has_code(address), read_code(address): reads of the cartridge that switch no bank and reach none of its RAM;
// - read_cart(address), write_cart(address, value), read_riot(address, cycle), write_riot(address, value, cycle),
//   read_tia(address, cycle, undriven), and fetch(pc, undriven, cycle), which reads any of them for the CPU;
// - draw_before_write(time): draws up to where `write` begins to show, before another in the same cycle;
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

// Programs wait in loops of two instructions until a register or the timer is 0 (BNE), or less than 0 (BPL). At the
// branch that ends a round, which takes `branch_cycles`, this passes the rounds that are certain to follow. `target` is
// what the branch leads to, `offset` bytes away. kLeast is the smallest value with which it is taken: 1 for BNE, 0 for
// BPL.
template <int kLeast, class Bus>
HD ALWAYS_INLINE void pass_rounds(Bus& bus, Registers& registers, const uint8_t* target, int64_t offset,
                                  int branch_cycles) {
  constexpr int kMost = kLeast ? 256 : 128;
  const int left = kLastInstruction - static_cast<int>(registers.time & (kCycle - 1));
  int rounds = 0, cycles = 2 + branch_cycles;
  if ((offset != -3 && offset != -5) || target < bus.code.begin) return;
  if (offset == -3 && (*target == kDex || *target == kDey)) {
    Word& counter = *target == kDex ? registers.x : registers.y;
    const int count = static_cast<int>(counter);
    if (count <= kLeast || count > kMost || 2 * count + 1 >= left) return;
    rounds = count - kLeast;
    counter = kLeast;
  } else if (offset == -5 && (*target == 0xAD || *target == 0xAE || *target == 0xAC) && target[1] == 0x84 &&
             target[2] == 0x02) {  // a load of INTIM
    cycles += 2;
    const int cycle = static_cast<int>(registers.time >> kCycleBits);
    rounds = bus.until_timer_is(kLeast - 1, kMost - 1, cycle + 4) / cycles;
    if (2 * rounds + 1 >= left) return;
  }
  if (rounds > 0) registers.time += rounds * (cycles * kCycle + 2);
}

// One instruction. With kUsual it has no function calls, so that the compiler can use all registers of the processor,
// and returns kUnusual where it would need one.
//
// Why macros: REQUIRE returns from this function, so whatever may give up has to be one, and so has what is written in
// such terms: the accesses to memory, the indirect addressing modes, and the table in opcodes.inc, whose lines become
// `if constexpr` blocks of this function. All else is a function or a lambda. INLINE_LAMBDA: a lambda that is called
// holds the addresses of variables, and then the call at the end of the function could not become a jump.
template <int kOpcode, bool kUsual, class Bus>
HD ALWAYS_INLINE Outcome execute(Bus& bus, Registers& registers) {
  const uint8_t*& code = registers.code;
  int64_t& time = registers.time;
  Word &a = registers.a, &x = registers.x, &y = registers.y;
  uint8_t* const zero_page = bus.zero_page;
  Flags& flags = bus.flags;
  uint8_t &carry = flags.carry, &overflow = flags.overflow, &decimal = flags.decimal, &interrupt = flags.interrupt;
  uint8_t &sp = flags.sp, &seen = flags.seen;
  [[maybe_unused]] int length = 1;      // bytes that are fetched
  [[maybe_unused]] Word address, high;  // of the operand; `high`: the address's high byte before it is indexed
  [[maybe_unused]] Word m;              // the operand

  [[maybe_unused]] const auto cycle = [&]() INLINE_LAMBDA { return static_cast<int>(time >> kCycleBits); };
  [[maybe_unused]] const auto fetch = [&]() INLINE_LAMBDA -> Word { return code[length++]; };
  [[maybe_unused]] const auto last_fetched = [&]() INLINE_LAMBDA -> Word { return code[length - 1]; };
  [[maybe_unused]] const auto pc = [&]() INLINE_LAMBDA {
    return static_cast<int>(place_of(code) + length - bus.code.origin) & 0xFFFF;
  };

  // Addressing modes. Indexed reads take a cycle more where they cross a page.
  [[maybe_unused]] const auto page_0 = [&](Word index) INLINE_LAMBDA { address = (fetch() + index) & 0xFF; };
  [[maybe_unused]] const auto absolute = [&](Word index) INLINE_LAMBDA {
    address = fetch();
    high = fetch();
    address = ((address | high << 8) + index) & 0xFFFF;
  };
  [[maybe_unused]] const auto cross_page = [&]() INLINE_LAMBDA { time += (address >> 8) != high ? kCycle : 0; };
  [[maybe_unused]] const auto absolute_read = [&](Word index) INLINE_LAMBDA {
    absolute(index);
    cross_page();
  };

  // N and Z are those of the value.
  [[maybe_unused]] const auto test = [&](Word value) INLINE_LAMBDA { flags.result = static_cast<int32_t>(value); };
  [[maybe_unused]] const auto test_bits = [&]() INLINE_LAMBDA {
    test((a & m) | (m & kNegative) << 1);
    overflow = m & kOverflow;
  };
  [[maybe_unused]] const auto compare = [&](Word with) INLINE_LAMBDA {
    carry = with >= m;
    test((with - m) & 0xFF);
  };
  [[maybe_unused]] const auto asl = [&]() INLINE_LAMBDA {
    carry = static_cast<uint8_t>(m >> 7);
    m = (m << 1) & 0xFF;
  };
  [[maybe_unused]] const auto lsr = [&]() INLINE_LAMBDA {
    carry = m & 1;
    m >>= 1;
  };
  [[maybe_unused]] const auto rol = [&]() INLINE_LAMBDA {
    m = m << 1 | carry;
    carry = static_cast<uint8_t>(m >> 8);
    m &= 0xFF;
  };
  [[maybe_unused]] const auto ror = [&]() INLINE_LAMBDA {
    m |= carry << 8;
    carry = m & 1;
    m >>= 1;
  };
  [[maybe_unused]] const auto dec = [&]() INLINE_LAMBDA { m = (m - 1) & 0xFF; };
  [[maybe_unused]] const auto inc = [&]() INLINE_LAMBDA { m = (m + 1) & 0xFF; };
  [[maybe_unused]] const auto set_sum = [&](const Sum& sum) INLINE_LAMBDA {
    a = sum.result;
    carry = sum.carry;
    overflow = sum.overflow ? kOverflow : 0;
  };

  // `undriven`: the byte that the CPU read before. It shows where a read drives too few bits.
  [[maybe_unused]] const auto read_page_0 = [&](Word where, Word undriven) INLINE_LAMBDA -> Word {
    if (kUsual || (where & 0x80)) return zero_page[where];
    return bus.read_tia(static_cast<int>(where), cycle(), static_cast<uint8_t>(undriven));
  };
  [[maybe_unused]] const auto see = [&](Word value) INLINE_LAMBDA {
    if (!kUsual) seen = static_cast<uint8_t>(value);
  };

  // The stack: $100-$17F is the TIA, $180-$1FF is RAM.
  [[maybe_unused]] const auto push = [&](int value) INLINE_LAMBDA {
    see(static_cast<Word>(value));
    if (kUsual || (sp & 0x80)) {
      zero_page[sp] = static_cast<uint8_t>(value);
    } else {
      bus.write = {sp, static_cast<uint8_t>(value)};
      bus.draw_before_write(time);
      write_now(bus, time);
    }
    --sp;
  };
  // A push right behind another: ALE then ignores a write of WSYNC.
  [[maybe_unused]] const auto push_again = [&](int value) INLINE_LAMBDA {
    if ((sp & 0xBF) != 0x02) {
      push(value);
    } else {
      see(static_cast<Word>(value));
      --sp;
    }
  };
  [[maybe_unused]] const auto pull = [&](Word undriven) INLINE_LAMBDA -> Word {
    ++sp;
    const Word value = read_page_0(sp, undriven);
    seen = static_cast<uint8_t>(value);
    return value;
  };

  // `last`: the last byte that the CPU read before it goes on.
  [[maybe_unused]] const auto go_to = [&](intptr_t place, Word last) INLINE_LAMBDA {
    code = code_at(place);
    length = 0;
    seen = static_cast<uint8_t>(last);
    if (!IS_LIKELY(code >= bus.code.begin) || !IS_LIKELY(!(time & 0x8000))) bus.code.end = nullptr;
  };
  [[maybe_unused]] const auto jump = [&](int64_t to, Word last) INLINE_LAMBDA { go_to(bus.code.origin + to, last); };
  // A branch that is taken. It may end a round of a loop that waits.
  constexpr bool kMayWait = kOpcode == kBne || kOpcode == kBpl;
  [[maybe_unused]] const auto branch = [&](int64_t offset) INLINE_LAMBDA {
    const intptr_t target = place_of(code) + length + offset;
    const int64_t from = kUsual ? place_of(code) + length : pc();
    const int64_t took = kCycle + (((from + offset) ^ from) & 0x100) * (kCycle / 0x100);
    time += took;
    if constexpr (kMayWait && !kUsual) {
      pass_rounds<kOpcode == kBne>(bus, registers, code_at(target), offset, static_cast<int>(2 + took / kCycle));
    }
    go_to(target, static_cast<Word>(offset));
  };

// With kUsual: gives up unless the condition holds. It comes before any change but those of `registers`.
#define REQUIRE(condition)                                \
  do {                                                    \
    if (kUsual && !IS_LIKELY(condition)) return kUnusual; \
  } while (0)
#define NOT_USUAL REQUIRE(false)
#define DONE(outcome)         \
  do {                        \
    code += length;           \
    if (kUsual) time += cost; \
    return outcome;           \
  } while (0)
#define READ_PAGE_0(value, where, undriven) \
  do {                                      \
    REQUIRE((where) & 0x80);                \
    value = read_page_0(where, undriven);   \
    see(value);                             \
  } while (0)
#define READ(value, where, undriven)                                                         \
  do {                                                                                       \
    const Word from = (where);                                                               \
    if (IS_LIKELY(bus.has_code(from))) {                                                     \
      value = bus.read_code(from);                                                           \
    } else if (IS_LIKELY((from & 0x1280) == 0x80)) {                                         \
      value = zero_page[(from & 0x7F) | 0x80];                                               \
    } else {                                                                                 \
      NOT_USUAL;                                                                             \
      const int other = static_cast<int>(from);                                              \
      value = other & 0x1000 ? bus.read_cart(other)                                          \
              : other & 0x80 ? bus.read_riot(other, cycle())                                 \
                             : bus.read_tia(other, cycle(), static_cast<uint8_t>(undriven)); \
    }                                                                                        \
    see(value);                                                                              \
  } while (0)
#define WRITE_TIA(where, value)                                             \
  do {                                                                      \
    bus.write = {static_cast<uint8_t>(where), static_cast<uint8_t>(value)}; \
    DONE(kWrites);                                                          \
  } while (0)
#define WRITE_PAGE_0(where, value)                  \
  do {                                              \
    see(value);                                     \
    if (!((where) & 0x80)) WRITE_TIA(where, value); \
    zero_page[where] = static_cast<uint8_t>(value); \
  } while (0)
#define WRITE(where, value)                                             \
  do {                                                                  \
    see(value);                                                         \
    if (IS_LIKELY(((where) & 0x1280) == 0x80)) {                        \
      zero_page[((where) & 0x7F) | 0x80] = static_cast<uint8_t>(value); \
    } else if ((where) & 0x1000) {                                      \
      NOT_USUAL;                                                        \
      bus.write_cart((where), static_cast<uint8_t>(value));             \
    } else if ((where) & 0x80) {                                        \
      NOT_USUAL;                                                        \
      bus.write_riot((where), static_cast<uint8_t>(value), cycle());    \
    } else {                                                            \
      WRITE_TIA(where, value);                                          \
    }                                                                   \
  } while (0)
// Requires RAM from SP + first to SP + last.
#define REQUIRE_STACK(first, last) REQUIRE((sp + (first)) & (sp + (last)) & 0x80)
// Sets `address` to what lies at a place in page 0, and `high` to its high byte.
#define POINTER(where)                                   \
  do {                                                   \
    const Word pointer = (where);                        \
    REQUIRE(pointer - 0x80 < 0x7F);                      \
    address = read_page_0(pointer, last_fetched());      \
    if (kUsual) {                                        \
      high = zero_page[pointer + 1];                     \
    } else {                                             \
      high = read_page_0((pointer + 1) & 0xFF, address); \
      seen = static_cast<uint8_t>(high);                 \
    }                                                    \
    address |= high << 8;                                \
  } while (0)

#include "opcodes.inc"

  // x2: JAM
  flags.stopped = flags.jammed = 1;
  bus.code.end = nullptr;
  return kDone;

#undef REQUIRE
#undef NOT_USUAL
#undef DONE
#undef READ_PAGE_0
#undef READ
#undef WRITE_TIA
#undef WRITE_PAGE_0
#undef WRITE
#undef REQUIRE_STACK
#undef POINTER
}

// Finds the next instruction where it does not lie in bus.code. Returns false if the CPU stops.
template <class Bus>
HD NOINLINE bool find_instruction(Bus& bus, Registers& registers) {
  if (bus.flags.stopped || (registers.time & (kCycle - 1)) >= kLastInstruction) return false;
  const int pc = static_cast<int>(place_of(registers.code) - bus.code.origin) & 0xFFFF;
  registers.code = bus.find_code(pc);
  if (registers.code >= bus.code.end) {
    uint8_t* const fetched = bus.code.fetched;
    const int cycle = static_cast<int>(registers.time >> kCycleBits);
    fetched[0] = bus.fetch(pc, bus.flags.seen, cycle);
    const int length = kLengths.of[fetched[0]];
    const int last_cycle = cycle + kLengths.cycles[fetched[0]];
    for (int i = 1; i < length; ++i) fetched[i] = bus.fetch(pc + i, fetched[i - 1], last_cycle);
    bus.flags.seen = fetched[length - 1];
    registers.code = fetched;
    bus.code.begin = fetched + 3;
    bus.code.end = nullptr;
    bus.code.origin = place_of(fetched) - pc;
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
    if (!find_instruction(bus, registers)) TAIL return stop(REGISTERS);
    TAIL return (bus.code.end ? kSteps : kUnusualSteps)[*registers.code](REGISTERS);
  }
  // The last function of a run: where its frame lies on the stack tells whether those before it were jumped to.
  NO_IPA static void stop(ARGUMENTS) {
    bus.saved = {code, time, a, x, y};
    bus.stack_bytes = reinterpret_cast<intptr_t>(__builtin_frame_address(0));
  }

  static void run(Bus& bus, Registers& registers) {
    find(REGISTERS);
    registers = bus.saved;
    bus.stack_bytes = reinterpret_cast<intptr_t>(__builtin_frame_address(0)) - bus.stack_bytes;
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

// A warp executes the different opcodes of its lanes one after the other. Lanes that run free drift apart, until nearly
// each has another opcode. Lanes that wait for each other at the end of each scan line stay more in step. Nothing but
// `time` decides when an instruction runs: the wait changes no state.
template <class Bus>
struct Interpreter {
  HD static void run(Bus& bus, Registers& registers) {
    bool runs = true;
    for (int64_t line_end = Bus::kLineTime; lanes_where(bus.lanes(), runs); line_end += Bus::kLineTime) {
      while (runs && registers.time < line_end) {
        if (!IS_LIKELY(registers.code < bus.code.end) && !find_instruction(bus, registers)) {
          runs = false;
          continue;
        }
        Outcome outcome = kDone;
        switch (*registers.code) {
#define STEP(opcode)                                    \
  case opcode:                                          \
    outcome = execute<(opcode), false>(bus, registers); \
    break;
          ALL_OPCODES(STEP)
#undef STEP
        }
        if (outcome != kDone) write_now(bus, registers.time);
      }
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
  flags.seen = cpu.seen;
  set_status(flags, cpu.status);
  Registers registers = {bus.find_code(cpu.pc), cpu.cycle * kCycle + kLastInstruction - count, cpu.a, cpu.x, cpu.y};
  Interpreter<Bus>::run(bus, registers);
  cpu.pc = static_cast<uint16_t>(place_of(registers.code) - bus.code.origin);
  cpu.a = static_cast<uint8_t>(registers.a);
  cpu.x = static_cast<uint8_t>(registers.x);
  cpu.y = static_cast<uint8_t>(registers.y);
  cpu.sp = flags.sp;
  cpu.seen = cpu.pc & 0x1080 ? 0 : flags.seen;
  cpu.status = static_cast<uint8_t>(status(flags));
  cpu.cycle = static_cast<int32_t>(registers.time >> kCycleBits);
  return !flags.jammed;
}

}  // namespace beast::atari

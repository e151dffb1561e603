// An Atari 2600 as ALE (ale-py 0.12.1) emulates it: the state, the frame loop, resets.
//
//   Rom rom;
//   if (!make_rom(rom, bytes, size, "pong")) ...
//   Vcs vcs;
//   Generators generators;
//   load(rom, vcs, generators, seed, ScreenOutput{canvas});
//   int reward = act(rom, vcs, generators.user, action, sticky_draws(0.25), ScreenOutput{canvas});
//
// A Rom is shared by all consoles that run it. A Vcs holds no pointers: memcpy saves it, restores it and clones it.
#pragma once

#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "cart.h"
#include "cpu6507.h"
#include "games.h"
#include "mt19937.h"
#include "riot.h"
#include "tia.h"

namespace beast::atari {

constexpr int kScreenWidth = kWidth;  // pixels
constexpr int kMaxScreenHeight = 250;
constexpr int kNumActions = 18;
constexpr int kMaxInstructions = 25000;  // after so many a call of ALE's emulator returns, also in mid-frame
constexpr uint32_t kSystemSeed = 4753849;
constexpr int kLeastTimer = 25, kNumTimers = 75;  // a reset draws the timer from so many values
constexpr int kPaddleLeast = 27450, kPaddleMostOfAll = 1000000, kPaddleStep = 23000;  // ohms, per frame

// Why a console has stopped; once set, `act` does nothing until the next reset.
enum Error : uint8_t { kNoError, kJam, kEndlessReset };

struct Vcs {
  Cpu cpu;
  Riot riot;
  Tia tia;
  CartState cart;
  uint8_t ram[128];
  Tally tally;
  int32_t paddle;                 // ohms, of player A
  uint32_t frame_number;          // frames of `act` since the ROM was loaded
  uint32_t episode_frame_number;  // since the last reset
  uint8_t last_action;            // what a sticky action repeats
  Error error;
};
static_assert(std::is_trivially_copyable<Vcs>::value, "states are saved by memcpy");
static_assert(sizeof(Vcs) <= 1024, "states stay small enough for a GPU's shared memory");

struct Generators {
  Mt19937 system;  // RAM and timers at resets; ALE always seeds it with the same number
  Mt19937 user;    // its draws decide about sticky actions
};

// An output says what a frame is drawn into: nothing, palette indices (ALE's getScreen) or luminances
// (getScreenGrayscale). Collisions are right in each. ALE alternates between two screens: the rows that a frame does not
// reach because it ends early, as some do while a game boots, still show the frame two before. Where that matters, give
// another canvas for each frame that `begins`. A frame that is not over after kMaxInstructions goes on in the next call.
struct NoOutput {
  HD Canvas canvas(bool) const { return {nullptr, 0, false}; }
};

struct ScreenOutput {
  Canvas screen;

  HD Canvas canvas(bool) const { return screen; }
};

// Two screens in turn.
struct AlternatingOutput {
  uint8_t* screens[2];
  int height;
  bool gray;
  int* current;  // the screen of the newest frame

  HD Canvas canvas(bool begins) const {
    *current ^= begins;
    return {screens[*current], height, gray};
  }
};

// What the CPU sees of a cartridge: all of it; one bank of 4 KB at a time, but for the hotspots at its end; or slices of
// 1 KB, some of them RAM.
enum Wiring { kFlat, kBanked, kSliced };
HD inline Wiring wiring_of([[maybe_unused]] Cart cart) {
#ifdef WIRING  // that of the only game for which this is compiled: a third of the code
  return WIRING;
#else
  return is_flat(cart) ? kFlat : cart == kCartF8 || cart == kCartF6 ? kBanked : kSliced;
#endif
}

// The most ohms of a game's paddles.
HD constexpr int paddle_most(const Game& game) {
  return game.rules == kBackgammon ? kPaddleMostOfAll : game.rules == kBlackjack ? 795000 : 790196;
}
HD constexpr int paddle_middle(const Game& game) { return (kPaddleLeast + paddle_most(game)) / 2; }

template <Wiring kWiring>
struct Bus {
  static constexpr int64_t kLineTime = kLineCycles * kCycle;

  // What each instruction needs comes first, and near.
  Code code;
  Flags flags;
  const uint8_t* bank;
  int64_t frame_end;  // from here on a write to the TIA may end the frame
  Write write;
  int64_t last_write = 0;  // when the TIA was last written to; `write` is what
  int last_read = 0;       // in which cycle it was last read
  Registers saved;         // the CPU's while it does not run
  uint8_t zero_page[256];  // the upper half: RAM
  const Rom& rom;
  Vcs& vcs;
  const Canvas canvas;
  TiaSettings settings;
  // By bits 10 to 13 of the address: 1 KB of the cartridge, and how many of its bytes switch no bank and are no RAM.
  const uint8_t* slices[16];
  uint16_t sizes[16];
  intptr_t stack_bytes = 0;

  HD Bus(const Rom& rom, Vcs& vcs, const Canvas& canvas, const TiaSettings& settings)
      : rom(rom), vcs(vcs), canvas(canvas), settings(settings) {
    memcpy(zero_page + 0x80, vcs.ram, sizeof(vcs.ram));
    frame_end = settings.line_limit * kLineTime;
    find_slices();
  }
  HD void find_slices() {
    bank = rom.bytes + 1024 * (kWiring == kBanked ? vcs.cart.quarters[0] & 12 : 0);
    for (int i = 0; kWiring == kSliced && i < 16; ++i) {
      const bool is_plain = (i & 4) && !(has_cart_ram(rom.cart) && (i & 3) == 0);
      slices[i] = rom.bytes + 1024 * (vcs.cart.quarters[(i & 3) | (i >> 1 & 4)] & 15);
      sizes[i] = static_cast<uint16_t>(!is_plain ? 0 : (i & 3) == 3 ? kHotspots & 0x3FF : 0x400);
    }
    code.end = nullptr;
  }

  HD Lanes lanes() const { return canvas.lanes; }
  HD const uint8_t* find_code(int pc) {
    const int i = pc >> 10 & 15, offset = pc & (kWiring == kSliced ? 0x3FF : 0xFFF);
    const int size = kWiring == kSliced ? sizes[i] : !(pc & 0x1000) ? 0 : kWiring == kBanked ? kHotspots : 0x1000;
    code.begin = kWiring == kSliced ? slices[i] : bank;
    // What runs on behind the window has to be fetched.
    code.end = size ? code.begin + size - 3 : nullptr;
    code.origin = place_of(code.begin) + offset - pc;
    return code.begin + offset;
  }

  HD uint8_t fetch(int pc, uint8_t seen, int cycle) {
    if (pc & 0x1000) return read_cart(pc);
    if (!(pc & 0x80)) return read_tia(pc, cycle, seen);
    return pc & 0x200 ? read_riot(pc, cycle) : zero_page[(pc & 0x7F) | 0x80];
  }
  HD bool has_code(Word address) const {
    if (kWiring == kSliced) return (address & 0x3FF) < sizes[address >> 10 & 15];
    return (address & 0x1000) && (kWiring == kFlat || (address & 0xFFF) < kHotspots);
  }
  HD uint8_t read_code(Word address) const {
    return kWiring == kSliced ? slices[address >> 10 & 15][address & 0x3FF] : bank[address & 0xFFF];
  }
  HD uint8_t read_cart(int address) { return has_code(address) ? read_code(address) : read_special(address); }
  HD NOINLINE uint8_t read_special(int address) {
    const uint64_t banks = quarters();
    const uint8_t value = atari::read_cart(rom, vcs.cart, address);
    if (quarters() != banks) find_slices();
    return value;
  }
  HD NOINLINE void write_cart(int address, uint8_t value) {
    if (kWiring == kFlat) return;
    const uint64_t banks = quarters();
    atari::write_cart(rom, vcs.cart, address, value);
    if (quarters() != banks) find_slices();
  }
  HD uint64_t quarters() const {
    uint64_t all;
    memcpy(&all, vcs.cart.quarters, sizeof all);
    return all;
  }
  HD int until_timer_is(int value, int most, int cycle) {
    const int passed = cycle - vcs.riot.set_cycle - 1;
    if (vcs.riot.value - 1 - (passed >> vcs.riot.shift) > most) return 0;
    return (vcs.riot.value - 1 - value) * (1 << vcs.riot.shift) - passed;
  }
  HD NOINLINE uint8_t read_riot(int address, int cycle) { return atari::read_riot(vcs.riot, address, cycle); }
  HD void write_riot(int address, uint8_t value, int cycle) { atari::write_riot(vcs.riot, address, value, cycle); }
  HD NOINLINE uint8_t read_tia(int address, int cycle, uint8_t undriven) {
    last_read = cycle;
    return atari::read_tia(vcs.tia, settings, canvas, address, cycle, undriven);
  }
  // ALE draws before each write, also where it changes nothing. JSR and BRK write two or three times in one cycle.
  HD NOINLINE void draw_before_write(int64_t time) {
    const int cycle = static_cast<int>(time >> kCycleBits);
    draw_to(vcs.tia, settings, canvas, 3 * cycle + write_delay(write.address, cycle));
    draw_ahead(vcs.tia, settings, canvas);
  }
  HD bool absorb_write(int64_t& time) {
    last_write = time;
    if (time >= frame_end) return false;
    if (register_of(write.address) != kWsync) return is_repeated(vcs.tia, write.address, write.value);
    const uint32_t cycle = static_cast<uint32_t>(time >> kCycleBits);
    time += ((cycle + kLineCycles - 1) / kLineCycles * kLineCycles - cycle) * kCycle;
    return true;
  }
  HD bool write_motion(int64_t time) {
    return time < frame_end && atari::write_motion(vcs.tia, write.address, write.value);
  }
  HD NOINLINE void write_register() {
    const int cycle = static_cast<int>(saved.time >> kCycleBits);
    saved.time += (atari::write_tia(vcs.tia, settings, canvas, write.address, write.value, cycle) - cycle) * kCycle;
    if (vcs.tia.frame_over) {
      flags.stopped = 1;
      code.end = nullptr;
    }
  }
  // Up to which clock ALE has drawn: it does so whenever the TIA is written to or read, also where nothing changes.
  HD int last_access() const {
    const int cycle = static_cast<int>(last_write >> kCycleBits);
    const int written = cycle ? 3 * cycle + write_delay(write.address, cycle) : 0;
    return written > 3 * last_read ? written : 3 * last_read;
  }
};

constexpr int kFarDown = 4096;  // lines

template <Wiring kWiring>
HD NOINLINE void run_instructions(const Rom& rom, Vcs& vcs, const Canvas& canvas, int16_t most_lines) {
  const Game& game = rom.game;
  Bus<kWiring> bus(rom, vcs, canvas, {game.first_line, game.height, most_lines, !game.has(kNoHmoveBlank)});
  vcs.tia.news = kNewMasks;  // the canvas is another
  if (!run_cpu(vcs.cpu, bus, kMaxInstructions)) vcs.error = kJam;
  memcpy(vcs.ram, bus.zero_page + 0x80, sizeof(vcs.ram));
  // Where the frame goes on, what follows the last access is not seen yet.
  draw_to(vcs.tia, bus.settings, canvas, vcs.tia.frame_over ? 3 * vcs.cpu.cycle : bus.last_access());
  draw_ahead(vcs.tia, bus.settings, canvas);
  forget_line(vcs.tia);
}

// Whether the next call begins a frame, rather than going on in one.
HD inline bool begins_frame(const Vcs& vcs) { return vcs.cpu.cycle < kLineCycles; }

constexpr int16_t kMostLines = 290, kMostPalLines = 342;  // of a frame: then it ends

// One frame of the machine, with the inputs as they stand.
HD NOINLINE inline void run_frame(const Rom& rom, Vcs& vcs, const Canvas& canvas, int16_t most_lines) {
  if (vcs.error) return;
  switch (wiring_of(rom.cart)) {
    case kFlat: run_instructions<kFlat>(rom, vcs, canvas, most_lines); break;
    case kBanked: run_instructions<kBanked>(rom, vcs, canvas, most_lines); break;
    case kSliced: run_instructions<kSliced>(rom, vcs, canvas, most_lines); break;
  }
  // A program that never writes to the TIA stays in its frame for ever: keep its time small, far below the window.
  const int line = vcs.cpu.cycle / kLineCycles;
  const int lines = vcs.tia.frame_over ? line : line > 2 * kFarDown ? line - kFarDown : 0;
  if (lines) {
    const int16_t undrawn = vcs.tia.line < kMostPalLines ? vcs.tia.line : kMostPalLines;
    const int cycles = rebase(vcs.tia, lines);
    if (!vcs.tia.frame_over && vcs.tia.line < undrawn) vcs.tia.line = undrawn;
    rebase(vcs.riot, cycles);
    vcs.cpu.cycle -= cycles;
  }
  if (vcs.tia.frame_over) vcs.tia.color_loss = rom.game.has(kPal) && (lines & 1);
  vcs.tia.frame_over = 0;
}
HD inline void run_frame(const Rom& rom, Vcs& vcs, const Canvas& canvas) {
  run_frame(rom, vcs, canvas, rom.game.has(kPal) ? kMostPalLines : kMostLines);
}

// Right, left, down, up: the joystick's bits of each action, 1 = pressed.
TABLE uint8_t kDirections[kNumActions] = {0, 0, 1, 8, 4, 2, 9, 5, 10, 6, 1, 8, 4, 2, 9, 5, 10, 6};
HD constexpr bool has_fire(int action) { return action == 1 || action >= 10; }

enum Switches : uint8_t { kNoSwitch = 0, kResetSwitch = 1, kSelectSwitch = 2 };

HD inline void set_inputs(const Rom& rom, Vcs& vcs, int action, Switches pressed) {
  const Game& game = rom.game;
  const int directions = kDirections[action];
  const bool fire = has_fire(action);
  const bool swapped = game.has(kSwappedPorts);
  const bool hard = game.has(kHardUntilFirstAction) && vcs.frame_number == 0;
  vcs.riot.switches = static_cast<uint8_t>((hard ? 0xFF : 0x3F) & ~pressed);
  Tia& tia = vcs.tia;
  tia.fire[0] = tia.fire[1] = 0x80;
  for (int i = 0; i < 4; ++i) tia.paddle_cycles[i] = -1;
  if (game.has(kPaddles)) {
    if (directions & 8) vcs.paddle -= kPaddleStep;
    if (directions & 4) vcs.paddle += kPaddleStep;
    if (vcs.paddle < kPaddleLeast) vcs.paddle = kPaddleLeast;
    if (vcs.paddle > paddle_most(game)) vcs.paddle = paddle_most(game);
    // floor(1.6 * ohms * 1e-8 farads * 1.19e6 cycles a second)
    const int own = swapped ? 1 : 0;
    tia.paddle_cycles[own] = static_cast<int32_t>(static_cast<int64_t>(vcs.paddle) * 119 / 6250);
    tia.paddle_cycles[1 - own] = paddle_middle(game) * 119 / 6250;
    if (game.rules == kPong) tia.paddle_cycles[2] = tia.paddle_cycles[3] = 0;  // has paddles at the other port, too
    vcs.riot.joysticks = fire ? 0xFF & ~(0x80 >> own) : 0xFF;
  } else {
    vcs.riot.joysticks = static_cast<uint8_t>(0xFF & ~(directions << (swapped ? 0 : 4)));
    if (fire) tia.fire[swapped] = 0;
  }
}

// A frame of a reset: no frame number counts it, and the rewards are dropped.
template <class Output>
HD void reset_frame(const Rom& rom, Vcs& vcs, int action, Switches pressed, const Output& output) {
  set_inputs(rom, vcs, action, pressed);
  run_frame(rom, vcs, output.canvas(begins_frame(vcs)));
  apply_rules(rom.game.rules, vcs.ram, vcs.cart.ram, vcs.tally);
}

// A probability as a number of draws of 32 bits, for `act`.
inline uint64_t sticky_draws(double probability) { return static_cast<uint64_t>(probability * 4294967296.0); }

// With probability `sticky` / 2^32 the last action goes on.
template <class Generator>
HD void choose_action(Vcs& vcs, Generator& generator, int action, uint64_t sticky) {
  const uint32_t draw = generator.draw();
  for (int i = 1; i < Generator::kDrawsPerFrame; ++i) generator.draw();
  if (draw >= sticky) vcs.last_action = static_cast<uint8_t>(action);
}

// A frame of `act`, also where a start script acts.
template <class Generator, class Output>
HD void act_frame(const Rom& rom, Vcs& vcs, Generator& generator, int action, uint64_t sticky, const Output& output) {
  choose_action(vcs, generator, action, sticky);
  ++vcs.frame_number;
  ++vcs.episode_frame_number;
  const bool is_void = has_fire(vcs.last_action) && rom.game.has(kNoFire);
  set_inputs(rom, vcs, is_void ? 0 : vcs.last_action, kNoSwitch);
  run_frame(rom, vcs, output.canvas(begins_frame(vcs)));
  apply_rules(rom.game.rules, vcs.ram, vcs.cart.ram, vcs.tally);
}

// Double Dunk's menu has an option on each line but the first: goes down and turns them all off.
template <class Output>
HD void walk_menu(const Rom& rom, Vcs& vcs, Mt19937& generator, uint64_t sticky, const Output& output) {
  constexpr uint8_t kOptions[] = {0, 0x08, 0x10, 0x04, 0x20};  // bits of RAM 80
  constexpr int kLeft = 4, kDown = 5, kUpFire = 10;
  const uint8_t &options = vcs.ram[0x00], &line = vcs.ram[0x30];
  int presses = 0;
  const auto press = [&](int action) {
    act_frame(rom, vcs, generator, action, sticky, output);
    act_frame(rom, vcs, generator, 0, sticky, output);
    if (++presses == 1000) vcs.error = kEndlessReset;
  };
  for (const uint8_t option : kOptions) {
    const uint8_t line_before = line;
    while (line == line_before && !vcs.error) press(kDown);
    while ((options & option) && !vcs.error) press(kLeft);
  }
  for (int i = 0; i < 4; ++i) reset_frame(rom, vcs, 0, kResetSwitch, output);
  press(kUpFire);
}

HD inline void reset_system(const Rom& rom, Vcs& vcs, Generators& generators) {
  vcs.riot = Riot{};
  set_timer(vcs.riot, static_cast<uint8_t>(kLeastTimer + generators.system.draw() % kNumTimers), 6, 0);
  reset_cart(rom, vcs.cart);
  if (has_cart_ram(rom.cart)) {
    for (int i = 0; i < 128; ++i) vcs.cart.ram[i] = static_cast<uint8_t>(generators.system.draw());
  }
  reset_tia(vcs.tia);
  vcs.cpu = Cpu{};
  vcs.cpu.sp = 0xFF;
  vcs.cpu.status = kAlwaysSet;
  vcs.cpu.pc = static_cast<uint16_t>(read_cart(rom, vcs.cart, 0x1FFC) | read_cart(rom, vcs.cart, 0x1FFD) << 8);
  vcs.error = kNoError;
}

// `sticky` as for `act`: the scripts of Berzerk and Double Dunk act.
template <class Output>
HD void reset_game(const Rom& rom, Vcs& vcs, Generators& generators, const Output& output, uint64_t sticky = 0) {
  const Game& game = rom.game;
  const auto frames = [&](int count, Switches pressed) {
    for (int i = 0; i < count; ++i) reset_frame(rom, vcs, 0, pressed, output);
  };
  // ALE counts these frames as it does those of `act`.
  const auto release = [&](int count) {
    vcs.frame_number += static_cast<uint32_t>(count);
    vcs.episode_frame_number += static_cast<uint32_t>(count);
    frames(count, kNoSwitch);
  };
  vcs.last_action = 0;
  vcs.episode_frame_number = 0;
  vcs.paddle = paddle_middle(game);
  reset_system(rom, vcs, generators);
  frames(60, kNoSwitch);
  frames(4, kResetSwitch);
  vcs.tally = start_tally(game);
  int resets = game.reset_frames - 4;  // after the script
  if (game.rules == kGopher) {
    frames(4, kResetSwitch);
    resets -= 4;
  }
  if (game.rules == kBerzerk) {
    for (int i = 0; i < 20; ++i) act_frame(rom, vcs, generators.user, 0, sticky, output);
  }
  const ModeScript& script = game.script;
  if (script.once) {
    frames(script.once, kSelectSwitch);
    release(1);
  }
  int rounds = 0;
  const auto has_mode = [&] {
    const bool has_other = !script.other_address || vcs.ram[script.other_address & 0x7F] == script.other_value;
    return has_other && vcs.ram[script.address & 0x7F] == script.value;
  };
  while (script.frames && !has_mode() && !vcs.error) {
    frames(script.frames, kSelectSwitch);
    release(1);
    if (++rounds == 1000) vcs.error = kEndlessReset;
  }
  if (game.rules == kDoubleDunk) walk_menu(rom, vcs, generators.user, sticky, output);
  frames(resets, kResetSwitch);
  frames(game.start.wait, kNoSwitch);
  for (int i = 0; i < game.start.frames; ++i) reset_frame(rom, vcs, game.start.action, kNoSwitch, output);
  frames(game.start.rest, kNoSwitch);
}

// Loads the ROM and resets the game, as ALE's loadROM does with `random_seed` = seed. The reset's frames are drawn, too,
// those before it are not: ALE clears its screens at a reset.
template <class Output>
HD void load(const Rom& rom, Vcs& vcs, Generators& generators, uint32_t seed, const Output& output,
             uint64_t sticky = 0) {
  memset(static_cast<void*>(&vcs), 0, sizeof vcs);
  generators.system.seed(kSystemSeed);
  generators.user.seed(seed);
  for (uint8_t& byte : vcs.ram) byte = static_cast<uint8_t>(generators.system.draw());
  generators.system.draw();  // the timer of a first reset, which has no cartridge yet
  // ALE finds out here whether the game is PAL. Until then a frame has as many lines as one of NTSC at most.
  reset_system(rom, vcs, generators);
  for (int i = 0; i < 60; ++i) {
    set_inputs(rom, vcs, 0, kNoSwitch);
    run_frame(rom, vcs, NoOutput{}.canvas(begins_frame(vcs)), kMostLines);
  }
  reset_system(rom, vcs, generators);
  reset_game(rom, vcs, generators, output, sticky);
}

// One frame. Returns the reward. After the game is over it only draws the random numbers of one, and returns 0.
template <class Generator, class Output>
HD int act(const Rom& rom, Vcs& vcs, Generator& generator, int action, uint64_t sticky, const Output& output) {
  if (vcs.error) return 0;
  if (vcs.tally.over) {
    choose_action(vcs, generator, action, sticky);
    return 0;
  }
  act_frame(rom, vcs, generator, action, sticky, output);
  return vcs.tally.reward;
}

HD inline int lives(const Vcs& vcs) { return vcs.tally.shown_lives; }
HD inline bool game_over(const Vcs& vcs) { return vcs.tally.over; }
// Whether `act` emulates a frame.
HD inline bool is_running(const Vcs& vcs) { return !vcs.error && !vcs.tally.over; }

// Whether a saved state can be run. Bytes that index nothing and cannot overflow may have any value.
HD inline bool is_valid(const Vcs& vcs) {
  constexpr int kLinesInAll = 16384;  // a frame that never ends is cut before
  constexpr int kMostCycles = kLinesInAll * kLineCycles;
  const auto within = [](int64_t value, int64_t least, int64_t most) { return least <= value && value <= most; };
  const Tia& tia = vcs.tia;
  bool valid = within(vcs.cpu.cycle, 0, kMostCycles) && within(tia.line, 0, kLinesInAll) && tia.pixel <= kWidth &&
               within(tia.hmove_cycle, kLongAgo, kMostCycles) && within(tia.vsync_cycle, kLongAgo, kMostCycles) &&
               within(tia.discharged_cycle, -(1 << 28), kMostCycles) &&
               within(vcs.riot.set_cycle, -(1 << 29), kMostCycles) && within(vcs.riot.late, 0, 1 << 30) &&
               vcs.riot.shift <= 10 && within(vcs.paddle, kPaddleLeast, kPaddleMostOfAll) &&
               within(vcs.tally.score, -(1 << 28), 1 << 28) && within(vcs.tally.reward, -(1 << 30), 1 << 30) &&
               within(vcs.tally.points, -255, kMostPoints) && vcs.tally.rested <= kMostRested &&
               vcs.last_action < kNumActions && vcs.error <= kEndlessReset;
  valid = valid && tia.drawn == tia.pixel && tia.changed == 0 && tia.frame_over == 0;
  for (const uint8_t position : tia.position) valid = valid && position < kWidth;
  for (const Mask& mask : tia.masks) valid = valid && mask.words[2] >> 32 == 0;
  for (const int32_t cycles : tia.paddle_cycles) valid = valid && within(cycles, -1, kMostCycles);
  return valid;
}
HD inline bool is_valid(const Generators& generators) {
  return generators.system.position <= 624 && generators.user.position <= 624;
}

// False if no game has this name, or its cartridge has another size.
inline bool make_rom(Rom& rom, const uint8_t* bytes, int size, const char* game_name) {
  const Game* const game = find_game(game_name);
  if (!game) return false;
  const bool is_8k = game->cart == kCartF8 || game->cart == kCartF8SC || game->cart == kCartE0 || game->cart == kCartFE;
  const int expected = game->cart == kCart2K ? 2048 : game->cart == kCart4K ? 4096 : is_8k ? 8192 : 16384;
  if (size != expected) return false;
  for (int i = 0; i < kRomBytes; ++i) rom.bytes[i] = bytes[i % size];
  rom.cart = game->cart;
  rom.game = *game;
  return true;
}

}  // namespace beast::atari

// An Atari 2600 as ALE (ale-py 0.12.1) emulates it: the state, the frame loop, resets.
//
//   Rom rom;
//   make_rom(rom, bytes, size, "pong");
//   Vcs vcs;
//   Generators generators;
//   load(rom, vcs, generators, seed, PaletteOutput{screen});
//   int reward = act(rom, vcs, generators, action, PaletteOutput{screen});
//
// A Rom is shared by all consoles that run it. A Vcs holds no pointers: memcpy saves it, restores it and clones it.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "games.h"
#include "mt19937.h"

namespace beast::atari {

constexpr int kScreenWidth = 160;  // pixels
constexpr int kMaxScreenHeight = 250;
constexpr int kNumActions = 18;

struct Rom {
  uint8_t bytes[16384];  // 2 KB cartridges stand in it twice
  uint32_t size;         // as given to make_rom
  Cart cart;
  const Game* game;
};

// False if no game has this name, or its cartridge another size.
inline bool make_rom(Rom& rom, const uint8_t* bytes, int size, const char* game_name);

// Why a console has stopped; once set, `act` does nothing until the next reset.
enum Error : uint8_t { kNoError, kJam, kEndlessReset };

struct Vcs {
  uint8_t ram[128];
  Tally tally;
  uint32_t frame_number;          // frames of `act` since the ROM was loaded
  uint32_t episode_frame_number;  // since the last reset
  uint8_t last_action;            // what a sticky action repeats
  Error error;
};
static_assert(std::is_trivially_copyable<Vcs>::value, "states are saved by memcpy");
static_assert(sizeof(Vcs) <= 1536, "states stay small enough for a GPU's shared memory");

struct Generators {
  Mt19937 system;  // RAM and timers at resets; ALE always seeds it with the same number
  Mt19937 user;    // two draws a frame, which decide about sticky actions
};

// What a frame is drawn into: `height` rows of 160 bytes.
struct Screen {
  uint8_t* pixels;
  int height;
};

struct NoOutput {};  // draws nothing; collisions are still right
struct PaletteOutput {
  Screen screen;
};  // palette indices, as ALE's getScreen
struct GrayOutput {
  Screen screen;
};  // luminances, as ALE's getScreenGrayscale

// Loads the ROM and resets the game, as ALE's loadROM does with `random_seed` = seed. The reset's frames are drawn too.
template <class Output>
void load(const Rom& rom, Vcs& vcs, Generators& generators, uint32_t seed, Output output) {}

template <class Output>
void reset_game(const Rom& rom, Vcs& vcs, Generators& generators, Output output) {}
inline void reset_game(const Rom& rom, Vcs& vcs, Generators& generators) {
  reset_game(rom, vcs, generators, NoOutput{});
}

// A probability as the number of 32-bit draws below it, for `act`.
inline uint64_t sticky_draws(double probability) { return static_cast<uint64_t>(probability * 4294967296.0); }

// One frame. Returns the reward. After the game is over it does nothing and returns 0.
template <class Output>
int act(const Rom& rom, Vcs& vcs, Generators& generators, int action, uint64_t sticky, Output output) {
  return 0;
}

HD inline int lives(const Vcs& vcs) { return vcs.tally.lives; }
HD inline bool game_over(const Vcs& vcs) { return vcs.tally.over; }
HD inline uint32_t frame_number(const Vcs& vcs) { return vcs.frame_number; }
HD inline uint32_t episode_frame_number(const Vcs& vcs) { return vcs.episode_frame_number; }

inline bool make_rom(Rom& rom, const uint8_t* bytes, int size, const char* game_name) { return false; }

}  // namespace beast::atari

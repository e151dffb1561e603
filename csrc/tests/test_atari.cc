// Whatever bytes a ROM or a saved state holds, the emulator stays within its memory. Meant for the sanitizers; for a
// longer run: ATARI_FUZZ_SECONDS=300 tests.out --gtest_filter='Atari*'.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "atari/vcs.h"

namespace beast::atari {
namespace {

// Calls `round(random)` until the time is over.
template <class Round>
void fuzz(const Round& round) {
  const char* const wanted = std::getenv("ATARI_FUZZ_SECONDS");
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(wanted ? std::atof(wanted) / 2 : 1.0);
  std::mt19937 random(1);
  do {
    round(random);
  } while (std::chrono::steady_clock::now() < end);
}

// A console with a ROM of random bytes. The screen is an allocation of its own, so that an overrun shows.
struct Fuzzed {
  Rom rom;
  Vcs vcs;
  Generators generators;
  std::vector<uint8_t> pixels;

  explicit Fuzzed(std::mt19937& random) {
    const Game& game = kGames[random() % kNumGames];
    std::vector<uint8_t> bytes(kRomBytes);
    // Bytes that are mostly stores to the TIA run longer than others.
    const bool stores = random() % 2;
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(stores && random() % 2 ? 0x85 : random());
    for (int size : {2048, 4096, 8192, 16384}) {
      if (make_rom(rom, bytes.data(), size, game.name)) break;
    }
    pixels.resize(static_cast<size_t>(game.height) * kScreenWidth);
    load(rom, vcs, generators, random(), NoOutput{});
  }

  void act(std::mt19937& random) {
    const Screen screen{pixels.data(), rom.game->height};
    const int action = static_cast<int>(random() % kNumActions);
    if (random() % 2) {
      atari::act(rom, vcs, generators, action, sticky_draws(0.25), GrayOutput{screen});
    } else {
      atari::act(rom, vcs, generators, action, 0, PaletteOutput{screen});
    }
  }
};

TEST(Atari, RandomRomsStayWithinTheirMemory) {
  fuzz([](std::mt19937& random) {
    const auto console = std::make_unique<Fuzzed>(random);
    for (int i = 0; i < 10; ++i) console->act(random);
    EXPECT_TRUE(is_valid(console->vcs));
    EXPECT_TRUE(is_valid(console->generators));
  });
}

TEST(Atari, StatesThatAreAcceptedStayWithinTheirMemory) {
  int accepted = 0;
  fuzz([&](std::mt19937& random) {
    const auto console = std::make_unique<Fuzzed>(random);
    const Vcs before = console->vcs;
    for (int i = 0; i < 50; ++i) {
      Vcs changed = before;
      unsigned char bytes[sizeof changed];
      memcpy(bytes, &changed, sizeof bytes);
      for (unsigned changes = 1 + random() % 8; changes > 0; --changes) bytes[random() % sizeof bytes] = static_cast<uint8_t>(random());
      memcpy(static_cast<void*>(&changed), bytes, sizeof bytes);
      if (!is_valid(changed)) continue;
      ++accepted;
      console->vcs = changed;
      console->vcs.error = kNoError;
      for (int frame = 0; frame < 3; ++frame) console->act(random);
    }
  });
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace beast::atari

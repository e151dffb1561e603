// Whatever bytes a ROM or a saved state holds, the emulator stays within its memory. Meant for the sanitizers; for a
// longer run: ATARI_FUZZ_SECONDS=300 tests.out --gtest_filter='Atari*'.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "atari/build_check.h"
#include "atari/pool.h"
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
    const bool gray = random() % 2;
    const ScreenOutput output{{pixels.data(), rom.game.height, gray}};
    atari::act(rom, vcs, generators.user, static_cast<int>(random() % kNumActions), gray ? sticky_draws(0.25) : 0, output);
  }
};

TEST(Atari, InstructionsJumpToEachOther) { EXPECT_NO_THROW(check_build()); }

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

// A program of 2 KB that folds its timer and the joysticks into RAM and colors, and never jams.
Rom busy_rom() {
  const uint8_t program[] = {0xA9, 0x00, 0x85, 0x96,  // ends Pong's start script
                             0xAD, 0x84, 0x02, 0x6D, 0x80, 0x02, 0x65, 0x80, 0x85, 0x80, 0x85, 0x09, 0x85, 0x02,
                             0xE6, 0x81, 0xD0, 0xEE, 0xA9, 0x02, 0x85, 0x00, 0x85, 0x02, 0x85, 0x02, 0xA9, 0x00,
                             0x85, 0x00, 0x4C, 0x00, 0xF0};
  std::vector<uint8_t> bytes(2048, 0xEA);
  memcpy(bytes.data(), program, sizeof program);
  for (size_t i = 2042; i < 2048; i += 2) bytes[i] = 0x00, bytes[i + 1] = 0xF0;
  Rom rom;
  EXPECT_TRUE(make_rom(rom, bytes.data(), 2048, "pong"));
  return rom;
}

// A pool of the busy program, and the arrays that its job writes into.
struct BusyPool {
  Pool pool;
  std::vector<uint8_t> observations, final_observations;
  std::vector<int32_t> numbers;
  std::unique_ptr<bool[]> flags;

  BusyPool(const EnvSettings& settings, int num_envs, int num_threads)
      : pool(busy_rom(), settings, Palette(), num_envs, num_threads),
        observations(num_envs * pool.protocol().stack_bytes()),
        final_observations(observations.size()),
        numbers(5 * num_envs),
        flags(new bool[2 * num_envs]) {
    Job& job = pool.job();
    job.kind = Job::Kind::kSeededReset;
    job.observations = observations.data(), job.observation_stride = pool.protocol().stack_bytes();
    if (settings.same_step) job.final_observations = final_observations.data();
    job.rewards = numbers.data(), job.lives = job.rewards + num_envs, job.errors = job.lives + num_envs;
    job.frame_numbers = job.errors + num_envs, job.episode_frame_numbers = job.frame_numbers + num_envs;
    job.terminated = flags.get(), job.truncated = job.terminated + num_envs;
    for (int id = 0; id < num_envs; ++id) {
      job.ids.push_back(id), job.seeds.push_back(id), job.actions.push_back(id % 4);
    }
  }
};

// All observations of a pool's steps, with jobs that are waited for at once and jobs that are not.
std::vector<uint8_t> play(int num_threads) {
  constexpr int kNumEnvs = 7, kSteps = 20;
  EnvSettings settings;
  settings.actions = {0, 1, 2, 3};
  BusyPool busy(settings, kNumEnvs, num_threads);
  Job& job = busy.pool.job();
  std::vector<uint8_t> all;
  for (int step = 0; step < kSteps; ++step) {
    if (step % 2) {
      busy.pool.start();
      busy.pool.wait();
    } else {
      busy.pool.run();
    }
    all.insert(all.end(), busy.observations.begin(), busy.observations.end());
    job.kind = Job::Kind::kStep;
    for (int id = 0; id < kNumEnvs; ++id) job.actions[id] = (step + id) % 4;
  }
  EXPECT_EQ(std::vector<int32_t>(job.errors, job.errors + kNumEnvs), std::vector<int32_t>(kNumEnvs, 0));
  return all;
}

TEST(AtariPool, ThreadsChangeNothing) {
  const std::vector<uint8_t> expected = play(1);
  EXPECT_NE(std::vector<uint8_t>(expected.end() - 84, expected.end()), std::vector<uint8_t>(84, expected.back()));
  for (int num_threads : {2, 3, 8}) EXPECT_TRUE(play(num_threads) == expected) << num_threads << " threads";
}

// States whose checksum is right and whose bytes are not.
TEST(AtariPool, ForgedStatesThatAreAcceptedStayWithinTheirMemory) {
  constexpr size_t kHeader = 3 * sizeof(uint64_t);  // magic, game, checksum
  int accepted = 0, refused = 0;
  fuzz([&](std::mt19937& random) {
    EnvSettings settings;
    settings.actions = {0, 1, 2, 3};
    settings.fire_reset = random() % 2, settings.noop_max = random() % 3, settings.keeps_rgb = random() % 2;
    settings.grayscale = random() % 2, settings.same_step = random() % 2, settings.stack = 1 + random() % 4;
    settings.frame_skip = 1 + random() % 4, settings.max_frames = 6;
    BusyPool busy(settings, 1, 1);
    busy.pool.run();
    busy.pool.job().kind = Job::Kind::kStep;
    std::vector<uint8_t> state(busy.pool.clone_bytes());
    busy.pool.clone(0, state.data());
    for (int i = 0; i < 50; ++i) {
      std::vector<uint8_t> forged = state;
      // Most of an EnvState are its generators, which may have any value: the console is before them, the rest behind.
      for (unsigned changes = 1 + random() % 4; changes > 0; --changes) {
        const size_t place = random() % 2 ? random() % sizeof(Vcs) : sizeof(EnvState) - 1 - random() % 64;
        forged[kHeader + random() % 2 * sizeof(EnvState) + place] = static_cast<uint8_t>(random());
      }
      const uint64_t checksum = hash(forged.data() + kHeader, forged.size() - kHeader);
      memcpy(forged.data() + 2 * sizeof(uint64_t), &checksum, sizeof checksum);
      try {
        busy.pool.restore(0, forged.data(), forged.size());
      } catch (const std::invalid_argument&) {
        ++refused;
        continue;
      }
      ++accepted;
      for (int step = 0; step < 3; ++step) busy.pool.run();
    }
  });
  EXPECT_GT(accepted, 0);
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace beast::atari

// What a GPU would run: a thread for each console, four frames of which the last two are drawn. Each console has a game
// of its own; one that is over begins anew with a copy of a start state.
#include "atari/vcs.h"

using namespace beast::atari;

// 8 bytes, where an MT19937 has 2.5 KB; a start value for each console. Steele, Lea and Flood 2014.
struct SplitMix64 {
  static constexpr int kDrawsPerFrame = 1;

  uint64_t state;

  HD uint32_t draw() {
    uint64_t x = state += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>((x ^ x >> 31) >> 32);
  }
};

struct Job {
  const Rom* rom;
  const Vcs* starts;  // [num_starts]
  uint32_t num_starts;
  Vcs vcs;
  SplitMix64 generator;
  int32_t reward;  // of the newest step
  bool ended;      // in it
  uint8_t screens[2][kMaxScreenHeight * kScreenWidth];  // luminances of its last two frames, [rom->game.height, 160]
};

__global__ void step(Job* jobs, const uint8_t* actions, uint64_t sticky, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  Job& job = jobs[i];
  const Rom& rom = *job.rom;
  job.reward = 0;
  for (int k = 0; k < 2; ++k) job.reward += act(rom, job.vcs, job.generator, actions[i], sticky, NoOutput{});
  for (uint8_t* screen : job.screens) {
    const ScreenOutput output = {{screen, rom.game.height, true}};
    job.reward += act(rom, job.vcs, job.generator, actions[i], sticky, output);
  }
  job.ended = game_over(job.vcs) || job.vcs.error;
  if (job.ended) {
    const uint32_t frame_number = job.vcs.frame_number;
    job.vcs = job.starts[job.generator.draw() % job.num_starts];
    job.vcs.frame_number += frame_number;
  }
}

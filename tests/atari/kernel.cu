// What a GPU would run: a thread for each console, four frames of which the last two are drawn.
#include "atari/vcs.h"

using namespace beast::atari;

__global__ void step(const Rom* rom, Vcs* vcs, Generators* generators, const uint8_t* actions, int32_t* rewards,
                     uint8_t* screens, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int size = rom->game.height * kScreenWidth;
  int reward = 0;
  for (int k = 0; k < 2; ++k) reward += act(*rom, vcs[i], generators[i], actions[i], 0, NoOutput{});
  for (int k = 0; k < 2; ++k) {
    const ScreenOutput output = {{screens + (2 * i + k) * size, rom->game.height, true}};
    reward += act(*rom, vcs[i], generators[i], actions[i], 0, output);
  }
  rewards[i] = reward;
  if (game_over(vcs[i])) reset_game(*rom, vcs[i], generators[i], NoOutput{});
}

// The kernels of batch.h for CUDA: a block of one warp for `lanes` consoles, or for `observe` a block for each console.
// -D has GENERATOR and WIRING (of the only game). Compile with -fmad=false.
#include "batch.h"

#ifndef GENERATOR
#define GENERATOR SplitMix64
#endif

using beast::atari::Batch;
using beast::atari::GENERATOR;
using beast::atari::kWarpSize;

__device__ static int thread_number() { return blockIdx.x * blockDim.x + threadIdx.x; }

// num_warps(batch) blocks.
extern "C" __global__ void begin(const __grid_constant__ Batch batch) {
  beast::atari::begin<GENERATOR>(batch, thread_number());
}

// num_warps(batch) blocks; with `is_again` a block for every 32 consoles. Without the 1, NVRTC would have more blocks fit
// an SM and spill registers for it.
extern "C" __global__ void __launch_bounds__(kWarpSize, 1)
    emulate(const __grid_constant__ Batch batch, bool is_again) {
  beast::atari::emulate<GENERATOR>(batch, thread_number(), is_again);
}

// A block of any size for each console.
extern "C" __global__ void observe(const __grid_constant__ Batch batch) {
  const int plane = batch.settings.height * batch.settings.width;
  for (int pixel = threadIdx.x; pixel < plane; pixel += blockDim.x) beast::atari::observe(batch, blockIdx.x, pixel);
}

// One thread.
extern "C" __global__ void describe(uint32_t* layout) { beast::atari::describe<GENERATOR>(layout); }

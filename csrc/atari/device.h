// Macros for code that is compiled for CPUs and, by CUDA's compilers, for GPUs: vcs.h and what it includes.
#pragma once

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define HD __host__ __device__
#else
#define HD
#endif
// A table that device code reads at run time lies in the device's memory, too.
#ifdef __CUDA_ARCH__
#define TABLE __device__ constexpr
#else
#define TABLE constexpr
#endif
// For what the interpreter calls from a hundred places: compiling copies of it takes minutes and gains nothing.
#ifdef __CUDACC__
#define NOINLINE __noinline__
#define ALWAYS_INLINE __forceinline__
#define INLINE_LAMBDA
#else
#define NOINLINE __attribute__((noinline))
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#endif

namespace beast::atari {

// A bit for each lane of a warp. On a CPU, where consoles wait for nobody, each console is a warp of its own.
using Lanes = uint32_t;
constexpr Lanes kAllLanes = 0xFFFFFFFF;

// The lanes for which the condition holds. All of `among` have to call this together, and nobody else.
HD inline Lanes lanes_where([[maybe_unused]] Lanes among, bool condition) {
#ifdef __CUDA_ARCH__
  return __ballot_sync(among, condition);
#else
  return condition;
#endif
}

// Adds one to a counter that threads share; returns what it was.
HD inline int32_t count_up(int32_t* counter) {
#ifdef __CUDA_ARCH__
  return atomicAdd(counter, 1);
#else
  return (*counter)++;
#endif
}

// Float operations that no compiler fuses. On a CPU that is up to -ffp-contract=off.
HD inline float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
HD inline float plus(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
// Rounds half to even.
HD inline int to_int(float value) {
#ifdef __CUDA_ARCH__
  return __float2int_rn(value);
#else
  return static_cast<int>(lrintf(value));
#endif
}

}  // namespace beast::atari

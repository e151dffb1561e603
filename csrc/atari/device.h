// Macros for code that is compiled for CPUs and, by CUDA's compilers, for GPUs: vcs.h and what it includes.
#pragma once

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

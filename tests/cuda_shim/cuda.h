// CUDA's names for host compilers: what the kernels in cuda/ use, over blocks of lockstep threads. Knows no kernel.
#pragma once

#include "blocks.h"

#include <cmath>
#include <tuple>
#include <utility>

#define CML_SHIM 1
#define __global__
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)

// One object of shared memory per kernel, of its exact size, so that a sanitizer sees what lies outside, and full of garbage.
#define CML_SHARED(type, name) type& name = shim::shared<type>()

namespace shim {

struct Index {
  unsigned x;
};

template <class T>
T& shared() {
  Block& block = *machine.current->block;
  if (!block.shared) {
    block.shared.reset(new char[sizeof(T)]);
    block.shared_nbytes = sizeof(T);
    std::memset(block.shared.get(), 0xA5, sizeof(T));
  }
  if (block.shared_nbytes != sizeof(T)) fault("a kernel has two objects of shared memory", 0);
  return *reinterpret_cast<T*>(block.shared.get());
}

template <class T>
T warp(Op op, unsigned mask, T value, unsigned lane_arg, int line) {
  static_assert(sizeof(T) <= 8, "a warp operation moves at most 8 bytes");
  Thread& t = *machine.current;
  if (!(mask >> t.number % kWarp & 1)) fault("a warp operation whose mask leaves out its caller", line);
  t.op = op;
  t.mask = mask;
  t.lane_arg = lane_arg;
  t.value = 0;
  std::memcpy(&t.value, &value, sizeof(T));
  suspend(At::kWarp, line);
  std::memcpy(&value, &t.result, sizeof(T));
  return value;
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
  kernel(*static_cast<std::remove_cv_t<A>*>(args[I])...);
}

// What ctypes calls: an empty string or what went wrong. Every argument is 8 bytes: a pointer, a long long or a double.
template <class... A>
const char* launch(void (*kernel)(A...), unsigned grid, unsigned threads, unsigned resident, uint64_t seed, unsigned nargs, void** args) {
  static_assert(((sizeof(A) == 8) && ...), "kernel arguments are 8 bytes each");
  static std::string answer;
  answer = nargs == sizeof...(A) ? run(grid, threads, resident, seed, [&] { call(kernel, args, std::index_sequence_for<A...>()); })
                                 : "the kernel takes " + std::to_string(sizeof...(A)) + " arguments, got " + std::to_string(nargs);
  return answer.c_str();
}

}  // namespace shim

#define SHIM_EXPORT(name)                                                                                                  \
  extern "C" const char* shim_##name(unsigned grid, unsigned threads, unsigned resident, uint64_t seed, unsigned nargs,    \
                                     void** args) {                                                                        \
    return shim::launch(name, grid, threads, resident, seed, nargs, args);                                                 \
  }

#define threadIdx (shim::Index{shim::machine.current->number})
#define blockIdx (shim::Index{shim::machine.current->block->number})
#define blockDim (shim::Index{shim::machine.threads})
#define gridDim (shim::Index{shim::machine.grid})

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline void __syncthreads(int line = __builtin_LINE()) { shim::suspend(shim::At::kBarrier, line); }
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) { shim::warp(shim::Op::kSync, mask, 0, 0, line); }
inline unsigned __ballot_sync(unsigned mask, int vote, int line = __builtin_LINE()) {
  return shim::warp<unsigned>(shim::Op::kBallot, mask, vote != 0, 0, line);
}
inline int __any_sync(unsigned mask, int vote, int line = __builtin_LINE()) {
  return shim::warp<int>(shim::Op::kAny, mask, vote != 0, 0, line);
}
inline int __all_sync(unsigned mask, int vote, int line = __builtin_LINE()) {
  return shim::warp<int>(shim::Op::kAll, mask, vote != 0, 0, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int line = __builtin_LINE()) {
  return shim::warp(shim::Op::kShuffle, mask, value, static_cast<unsigned>(lane), line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int line = __builtin_LINE()) {
  return shim::warp(shim::Op::kUp, mask, value, delta, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int line = __builtin_LINE()) {
  return shim::warp(shim::Op::kDown, mask, value, delta, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int line = __builtin_LINE()) {
  return shim::warp(shim::Op::kXor, mask, value, static_cast<unsigned>(bits), line);
}

// One thread runs at a time, and changes place only at waits: plain operations are atomic.
template <class T, class V>
T shim_replace(T* p, V value) {
  const T old = *p;
  *p = static_cast<T>(value);
  return old;
}
template <class T>
T atomicAdd(T* p, T v) { return shim_replace(p, *p + v); }
template <class T>
T atomicOr(T* p, T v) { return shim_replace(p, *p | v); }
template <class T>
T atomicExch(T* p, T v) { return shim_replace(p, v); }
template <class T>
T atomicMin(T* p, T v) { return shim_replace(p, std::min(*p, v)); }
template <class T>
T atomicMax(T* p, T v) { return shim_replace(p, std::max(*p, v)); }
template <class T>
T atomicCAS(T* p, T expected, T v) { return shim_replace(p, *p == expected ? v : *p); }
inline void __threadfence() {}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline int __float2int_rn(float f) { return static_cast<int>(std::lrintf(f)); }
inline float __uint_as_float(unsigned u) {
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned u;
  std::memcpy(&u, &f, sizeof u);
  return u;
}

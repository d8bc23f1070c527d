// What the families share: types, bits of floats, sums over a warp. Knows no formats.
//
// Rules that hold for all kernels: compiled at run time, so no host headers; arguments are pointers, long long and double, 8 bytes
// each; arrays of float lie at multiples of 4 bytes, of 16-bit numbers at multiples of 2, bytes anywhere; nothing is allocated.
// Products are rounded before they are added, so that the results are those of native/include/commlayer.h bit for bit.
#ifndef CML_COMMON
#define CML_COMMON

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef CML_SHIM
#define CML_SHARED(type, name) __shared__ type name
#endif

#define CML_KERNEL extern "C" __global__ void
#define CML_FN static __device__ __forceinline__

#define CML_ALL 0xffffffffu   // every lane
#define CML_ABS 0x7fffffffu
#define CML_INF 0x7f800000u
#define CML_THREADS 256       // of a block, in every kernel whose driver does not say otherwise

CML_FN u32 magnitude(float f) { return __float_as_uint(f) & CML_ABS; }
CML_FN bool is_finite(float f) { return magnitude(f) < CML_INF; }
CML_FN i64 thread_of_grid() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }
CML_FN i64 threads_of_grid() { return static_cast<i64>(gridDim.x) * blockDim.x; }
CML_FN u32 lane_of_warp() { return threadIdx.x & 31; }
CML_FN i64 least(i64 a, i64 b) { return a < b ? a : b; }

// x[i], or x[i] + residual[i].
CML_FN float value_at(const float* x, const float* residual, i64 i) {
  return residual ? __fadd_rn(x[i], residual[i]) : x[i];
}

CML_FN u32 warp_sum(u32 v) {
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(CML_ALL, v, d);
  return v;
}

CML_FN u32 warp_most(u32 v) {
  for (int d = 16; d > 0; d >>= 1) {
    const u32 other = __shfl_xor_sync(CML_ALL, v, d);
    v = other > v ? other : v;
  }
  return v;
}

// The sum over this lane and those before it.
CML_FN u32 warp_scan(u32 v) {
  for (u32 d = 1; d < 32; d <<= 1) {
    const u32 other = __shfl_up_sync(CML_ALL, v, d);
    if (lane_of_warp() >= d) v += other;
  }
  return v;
}

#endif

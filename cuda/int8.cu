// Blockwise int8, as cml_int8_encode and cml_int8_decode. Two kernels encode: nothing may be written back before all of it is
// known to be finite, and a launch is the only barrier of a whole grid.
#include "int8.cuh"

#define SEGMENT 1024  // elements of one block of the format that one warp looks at

// most[b] = the bits of the largest |x + residual| of block b; the caller has set it to 0. *finite becomes 0 if not all are.
CML_KERNEL int8_most(u32* most, const float* x, const float* residual, i64 n, i64 block, i64* finite) {
  const i64 per_block = (block + SEGMENT - 1) / SEGMENT, segments = (n + block - 1) / block * per_block;
  for (i64 s = thread_of_grid() / 32, step = threads_of_grid() / 32; s < segments; s += step) {
    const i64 b = s / per_block, begin = b * block + s % per_block * SEGMENT;
    const i64 end = least(least(begin + SEGMENT, (b + 1) * block), n);
    u32 found = 0;
    for (i64 i = begin + lane_of_warp(); i < end; i += 32) {
      const u32 a = magnitude(value_at(x, residual, i));
      found = a > found ? a : found;
    }
    found = warp_most(found);
    if (lane_of_warp() == 0) {
      if (found >= CML_INF) *finite = 0;
      atomicMax(&most[b], found);
    }
  }
}

// Codes what int8_most has measured, unless it was not finite.
CML_KERNEL int8_code(i8* q, float* scale, const u32* most, const float* x, float* residual, i64 n, i64 block, const i64* finite) {
  if (*finite == 0) return;
  for (i64 i = thread_of_grid(), step = threads_of_grid(); i < n; i += step) {
    const i64 b = i / block;
    const float s = scale_of(__uint_as_float(most[b])), v = value_at(x, residual, i);
    const int whole = quantum_of(v, s);
    q[i] = static_cast<i8>(whole);
    if (residual) residual[i] = __fsub_rn(v, float_of_quantum(whole, s));
    if (i == b * block) scale[b] = s;
  }
}

// acc[i] += scale * q, or = with assign.
CML_KERNEL int8_decode(float* acc, const i8* q, const float* scale, i64 n, i64 block, i64 assign) {
  for (i64 i = thread_of_grid(), step = threads_of_grid(); i < n; i += step) {
    const float v = float_of_quantum(q[i], scale[i / block]);
    acc[i] = assign ? v : __fadd_rn(acc[i], v);
  }
}

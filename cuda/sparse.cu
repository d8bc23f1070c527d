// Adds sparse values to a dense array. Positions increase, so no two threads meet. Knows no packing of positions.
#include "common.cuh"

// acc[idx[j]] += val[j].
CML_KERNEL scatter_add(float* acc, const u32* idx, const float* val, i64 k) {
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j < k; j += step) acc[idx[j]] = __fadd_rn(acc[idx[j]], val[j]);
}

// acc[idx[j]] += scale[j / block] * q[j].
CML_KERNEL scatter_add_int8(float* acc, const u32* idx, const i8* q, const float* scale, i64 k, i64 block) {
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j < k; j += step)
    acc[idx[j]] = __fadd_rn(acc[idx[j]], __fmul_rn(scale[j / block], static_cast<float>(q[j])));
}

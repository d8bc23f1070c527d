// Positions drawn at random, one in each of k strata, and the entries there. Knows no payloads.
#include "philox.cuh"

// idx[j] = begin + (word j of (seed, step 0) * width >> 32), where [begin, begin + width) is [floor(j*n/k), floor((j+1)*n/k)).
CML_KERNEL draw_strata(u32* idx, i64 k, i64 n, u64 seed) {
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j < k; j += step) {
    const u64 count = static_cast<u64>(k), size = static_cast<u64>(n), at = static_cast<u64>(j);
    const u64 begin = at * size / count, width = (at + 1) * size / count - begin;
    idx[j] = static_cast<u32>(begin + (philox(seed, at / 4, 0).at[j % 4] * width >> 32));
  }
}

// val[j] = src[idx[j]].
CML_KERNEL take(const float* src, const u32* idx, float* val, i64 k) {
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j < k; j += step) val[j] = src[idx[j]];
}

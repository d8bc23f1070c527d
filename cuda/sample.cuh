// A sample of magnitudes: fours of neighbours, since a line of memory costs the same for one. Knows nothing of its use.
#ifndef CML_SAMPLE
#define CML_SAMPLE
#include "common.cuh"

// |g + residual| of sample j out of `count`, spread evenly over n > 0 from `offset` on, as cml_sample_abs.
CML_FN float sampled(const float* g, const float* residual, i64 n, i64 offset, i64 count, i64 j) {
  const u64 groups = static_cast<u64>((count + 3) / 4) | 1, size = static_cast<u64>(n), at = static_cast<u64>(j);
  const u64 i = (static_cast<u64>(offset) + at / 4 * size / groups + at % 4) % size;
  return __uint_as_float(magnitude(value_at(g, residual, static_cast<i64>(i))));
}

#endif

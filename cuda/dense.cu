// Sums, casts and tests over all elements. A flag that a kernel finds broken becomes 0; the caller has set it to 1.
#include "half.cuh"

#define CML_EACH(i, n) for (i64 i = thread_of_grid(), step = threads_of_grid(); i < (n); i += step)

// acc[i] += w * x[i]; w is a float.
CML_KERNEL add_f32(float* acc, const float* x, i64 n, double w) {
  const float weight = static_cast<float>(w);
  CML_EACH(i, n) acc[i] = __fadd_rn(acc[i], __fmul_rn(weight, x[i]));
}

CML_KERNEL add_f16(float* acc, const u16* x, i64 n, double w) {
  const float weight = static_cast<float>(w);
  CML_EACH(i, n) acc[i] = __fadd_rn(acc[i], __fmul_rn(weight, float_of_half(x[i])));
}

CML_KERNEL add_bf16(float* acc, const u16* x, i64 n, double w) {
  const float weight = static_cast<float>(w);
  CML_EACH(i, n) acc[i] = __fadd_rn(acc[i], __fmul_rn(weight, float_of_bfloat(x[i])));
}

// *finite tells of the results.
CML_KERNEL f32_to_f16(u16* dst, const float* src, i64 n, i64* finite) {
  bool bad = false;
  CML_EACH(i, n) {
    const u16 h = half_of(src[i]);
    dst[i] = h;
    bad |= (h & 0x7fff) >= 0x7c00;
  }
  if (bad) *finite = 0;
}

CML_KERNEL f32_to_bf16(u16* dst, const float* src, i64 n, i64* finite) {
  bool bad = false;
  CML_EACH(i, n) {
    const u16 b = bfloat_of(src[i]);
    dst[i] = b;
    bad |= (b & 0x7fff) >= 0x7f80;
  }
  if (bad) *finite = 0;
}

CML_KERNEL f16_to_f32(float* dst, const u16* src, i64 n) {
  CML_EACH(i, n) dst[i] = float_of_half(src[i]);
}

CML_KERNEL bf16_to_f32(float* dst, const u16* src, i64 n) {
  CML_EACH(i, n) dst[i] = float_of_bfloat(src[i]);
}

// Of x + residual; residual may be null.
CML_KERNEL all_finite(const float* x, const float* residual, i64 n, i64* finite) {
  bool bad = false;
  CML_EACH(i, n) bad |= !is_finite(value_at(x, residual, i));
  if (bad) *finite = 0;
}

// Whether every x[i] is from 0 to `most`; NaN is not.
CML_KERNEL within(const float* x, i64 n, double most, i64* valid) {
  const float limit = static_cast<float>(most);
  bool bad = false;
  CML_EACH(i, n) bad |= !(x[i] >= 0.0f && x[i] <= limit);
  if (bad) *valid = 0;
}

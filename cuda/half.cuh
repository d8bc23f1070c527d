// float16 and bfloat16 as bits, rounded to nearest even; equal to native/src/half.h. Knows single numbers only.
#ifndef CML_HALF
#define CML_HALF
#include "common.cuh"

CML_FN u16 half_of(float f) {
  const u32 u = __float_as_uint(f), sign = u >> 16 & 0x8000u, x = u & CML_ABS;
  if (x > CML_INF) return static_cast<u16>(sign | 0x7e00u | (x >> 13 & 0x3ffu));
  if (x >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (x < 0x38800000u)  // below 2^-14: 0.5 has the spacing of float16's subnormals, so the addition rounds
    return static_cast<u16>(sign | (__float_as_uint(__fadd_rn(__uint_as_float(x), 0.5f)) - 0x3f000000u));
  return static_cast<u16>(sign | ((x - 0x38000000u + 0xfffu + (x >> 13 & 1u)) >> 13));
}

CML_FN float float_of_half(u16 h) {
  const u32 sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return __uint_as_float(sign | CML_INF | mantissa << 13 | (mantissa ? 0x400000u : 0u));
  if (exponent == 0) return __uint_as_float(sign | __float_as_uint(__fmul_rn(static_cast<float>(mantissa), 5.9604644775390625e-8f)));
  return __uint_as_float(sign | (exponent + 112u) << 23 | mantissa << 13);
}

CML_FN u16 bfloat_of(float f) {
  const u32 u = __float_as_uint(f);
  if ((u & CML_ABS) > CML_INF) return static_cast<u16>(u >> 16 | 0x40u);
  return static_cast<u16>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

CML_FN float float_of_bfloat(u16 b) { return __uint_as_float(static_cast<u32>(b) << 16); }

#endif

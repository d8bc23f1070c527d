// float16 and bfloat16 as bits: the portable conversions, equal to the CPU's. Knows single numbers only.
#pragma once

#include "dispatch.h"

namespace cml {

inline uint16_t half_of(float f) {
  const uint32_t u = bits_of(f), sign = u >> 16 & 0x8000u, x = u & kAbs;
  if (x > kInf) return static_cast<uint16_t>(sign | 0x7e00u | (x >> 13 & 0x3ffu));
  if (x >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (x < 0x38800000u)  // below 2^-14: 0.5 has the spacing of float16's subnormals, so the addition rounds
    return static_cast<uint16_t>(sign | (bits_of(float_of(x) + 0.5f) - 0x3f000000u));
  return static_cast<uint16_t>(sign | ((x - 0x38000000u + 0xfffu + (x >> 13 & 1u)) >> 13));
}

inline float float_of_half(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return float_of(sign | kInf | mantissa << 13 | (mantissa ? 0x400000u : 0u));
  if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
  return float_of(sign | (exponent + 112u) << 23 | mantissa << 13);
}

inline uint16_t bfloat_of(float f) {
  const uint32_t u = bits_of(f);
  if ((u & kAbs) > kInf) return static_cast<uint16_t>(u >> 16 | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

inline float float_of_bfloat(uint16_t b) { return float_of(static_cast<uint32_t>(b) << 16); }

#if CML_VECTORS

CML_AVX2 inline __m256 load8_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

CML_AVX2 inline __m256 load8_bfloat(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

#endif

}  // namespace cml

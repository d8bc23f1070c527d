// Philox for sixteen elements at a time; the same words as philox.h, in the same order. Knows no codecs.
#pragma once

#include "dispatch.h"
#include "philox.h"

namespace cml {

#if CML_X86

class Stream16 {
 public:
  Stream16(uint64_t key, uint64_t step) : step_(step) {
    auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int r = 0; r < kPhiloxRounds; ++r, k0 += kPhiloxAdd0, k1 += kPhiloxAdd1)
      for (int j = 0; j < 8; ++j) key0_[r][j] = k0, key1_[r][j] = k1;
  }

  // Words of elements i to i + 15; i is a multiple of 4. Four blocks go side by side, each of their four numbers in the lower
  // half of a 64-bit lane: multiplication reads no more, and what the upper halves gather is never looked at.
  CML_AVX2 inline void words(int64_t i, __m256i out[2]) const {
    const __m256i m0 = _mm256_set1_epi64x(kPhiloxMul0), m1 = _mm256_set1_epi64x(kPhiloxMul1);
    __m256i c0 = _mm256_add_epi64(_mm256_set1_epi64x(i / 4), _mm256_setr_epi64x(0, 2, 1, 3));
    __m256i c1 = _mm256_srli_epi64(c0, 32);
    __m256i c2 = _mm256_set1_epi64x(static_cast<int64_t>(step_)), c3 = _mm256_srli_epi64(c2, 32);
    for (int r = 0; r < kPhiloxRounds; ++r) {
      const __m256i p0 = _mm256_mul_epu32(c0, m0), p1 = _mm256_mul_epu32(c2, m1);
      const __m256i k0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key0_[r]));
      const __m256i k1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key1_[r]));
      c0 = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(c1, k0));
      c2 = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(c3, k1));
      c1 = p1;
      c3 = p0;
    }
    const __m256i lower = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xaa);
    const __m256i upper = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xaa);
    out[0] = _mm256_unpacklo_epi64(lower, upper);
    out[1] = _mm256_unpackhi_epi64(lower, upper);
  }

 private:
  uint64_t step_;
  uint32_t key0_[kPhiloxRounds][8], key1_[kPhiloxRounds][8];
};

CML_AVX2 inline __m256 uniform8(__m256i words) {
  return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(words, 8)), _mm256_set1_ps(0x1p-24f));
}

#endif

// The words of a bucket in one step, for both bodies.
struct Random {
  Random(uint64_t key, uint64_t step)
      : one(key, step)
#if CML_X86
        ,
        sixteen(key, step)
#endif
  {
  }
  Stream one;
#if CML_X86
  Stream16 sixteen;
#endif
};

}  // namespace cml

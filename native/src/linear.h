// Steps of one size, not 0: v as a whole number of scales, rounded to the nearest or by a random number. Knows no packing.
#pragma once

#include "blockwise.h"
#include "random.h"

namespace cml {

// Adding 1.5 * 2^23 to |t| <= 127 leaves no bits below one: the addition rounds half to even, as cvtps does.
constexpr float kRound = 12582912.0f;

inline float steps(float v, float scale, float top) {
  const float t = v / scale;
  return t > top ? top : t < -top ? -top : t;
}

inline int nearest(float v, float scale, float top) {
  return static_cast<int>((steps(v, scale, top) + kRound) - kRound);
}

// The mean over all words is v / scale, to 2^-24.
inline int dithered(float v, float scale, float top, uint32_t word) {
  const float t = steps(v, scale, top), whole = std::floor(t);
  return static_cast<int>(whole) + (uniform(word) < t - whole ? 1 : 0);
}

#if CML_VECTORS

struct Steps8 {
  CML_AVX2 Steps8(float scale, float top)
      : scale_(_mm256_set1_ps(scale)), top_(_mm256_set1_ps(top)), bottom_(_mm256_set1_ps(-top)) {}

  CML_AVX2 inline __m256 steps(__m256 v) const {
    return _mm256_max_ps(_mm256_min_ps(_mm256_div_ps(v, scale_), top_), bottom_);
  }
  CML_AVX2 inline __m256i nearest(__m256 v) const { return _mm256_cvtps_epi32(steps(v)); }
  CML_AVX2 inline __m256i dithered(__m256 v, __m256i words) const {
    const __m256 t = steps(v), whole = _mm256_floor_ps(t);
    const __m256 up = _mm256_cmp_ps(uniform8(words), _mm256_sub_ps(t, whole), _CMP_LT_OQ);
    return _mm256_sub_epi32(_mm256_cvtps_epi32(whole), _mm256_castps_si256(up));
  }
  // What `whole` steps leave of v.
  CML_AVX2 inline __m256 rest(__m256 v, __m256i whole) const {
    return _mm256_sub_ps(v, _mm256_mul_ps(scale_, _mm256_cvtepi32_ps(whole)));
  }

  // 32 elements from i of a block, by 32 words. The residual takes the rest.
  template <bool kDither>
  CML_AVX2 inline void code32(__m256i whole[4], const float* x, float* residual, int64_t i, const uint32_t* words) const {
    for (int j = 0; j < 4; ++j) {
      const int64_t at = i + 8 * j;
      const __m256 v = value8(x, residual, at);
      const __m256i w = kDither ? dithered(v, words8(words + 8 * j)) : nearest(v);
      whole[j] = w;
      if (residual) _mm256_storeu_ps(residual + at, rest(v, w));
    }
  }

 private:
  __m256 scale_, top_, bottom_;
};

#endif

}  // namespace cml

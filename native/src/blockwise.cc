// The measures of a block: its largest magnitude and its sums. Knows no codes.
#include "blockwise.h"

namespace cml {
namespace {

constexpr int kLanes = 16;

float fold(const float* lanes) {
  float l[kLanes];
  std::memcpy(l, lanes, sizeof l);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) l[j] += l[j + width];
  return l[0];
}

void sum_portable(float* lanes, const float* x, const float* residual, int64_t from, int64_t n, float factor, bool squares) {
  for (int64_t i = from; i < n; ++i) {
    const float v = value(x, residual, i) * factor;
    const float term = squares ? v * v : float_of(bits_of(v) & kAbs);
    lanes[i % kLanes] += term;
  }
}

uint32_t most_portable(const float* x, const float* residual, int64_t from, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = from; i < n; ++i) {
    const uint32_t a = bits_of(value(x, residual, i)) & kAbs;
    most = a > most ? a : most;
  }
  return most;
}

#if CML_VECTORS

CML_AVX2 uint32_t most_avx2(const float* x, const float* residual, int64_t n) {
  const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(kAbs));
  __m256i m0 = _mm256_setzero_si256(), m1 = m0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    m0 = _mm256_max_epi32(m0, _mm256_and_si256(magnitude, _mm256_castps_si256(value8(x, residual, i))));
    m1 = _mm256_max_epi32(m1, _mm256_and_si256(magnitude, _mm256_castps_si256(value8(x, residual, i + 8))));
  }
  m0 = _mm256_max_epi32(m0, m1);
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(m0), _mm256_extracti128_si256(m0, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  const uint32_t head = static_cast<uint32_t>(_mm_cvtsi128_si32(m)), tail = most_portable(x, residual, i, n);
  return head > tail ? head : tail;
}

template <bool kSquares>
CML_AVX2 int64_t sum_avx2(float* lanes, const float* x, const float* residual, int64_t n, float factor) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kAbs))), f = _mm256_set1_ps(factor);
  __m256 s[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < 2; ++j) {
      const __m256 v = _mm256_mul_ps(value8(x, residual, i + 8 * j), f);
      s[j] = _mm256_add_ps(s[j], kSquares ? _mm256_mul_ps(v, v) : _mm256_and_ps(v, magnitude));
    }
  }
  _mm256_storeu_ps(lanes, s[0]);
  _mm256_storeu_ps(lanes + 8, s[1]);
  return i;
}

#endif

}  // namespace

uint32_t most_of(const float* x, const float* residual, int64_t n) {
#if CML_VECTORS
  if (wide()) return most_avx2(x, residual, n);
#endif
  return most_portable(x, residual, 0, n);
}

float sum_of(const float* x, const float* residual, int64_t n, float factor, bool squares) {
  float lanes[kLanes] = {};
  int64_t i = 0;
#if CML_VECTORS
  if (wide()) i = squares ? sum_avx2<true>(lanes, x, residual, n, factor) : sum_avx2<false>(lanes, x, residual, n, factor);
#endif
  sum_portable(lanes, x, residual, i, n, factor, squares);
  return fold(lanes);
}

}  // namespace cml

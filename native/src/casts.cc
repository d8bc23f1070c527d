// Casts between float32 and the 16-bit formats, the test for finite numbers, and sums of squares.
#include "half.h"

namespace cml {
namespace {

constexpr uint16_t kHalfInf = 0x7c00, kBfloatInf = 0x7f80;

template <uint16_t (*kNarrow)(float), uint16_t kLimit>
bool narrow_portable(uint16_t* dst, const float* src, int64_t from, int64_t n) {
  uint16_t most = 0;
  for (int64_t i = from; i < n; ++i) {
    const uint16_t h = kNarrow(load(src, i)), a = h & 0x7fff;
    store(dst, i, h);
    most = a > most ? a : most;
  }
  return most < kLimit;
}

template <float (*kWiden)(uint16_t)>
void widen_portable(float* dst, const uint16_t* src, int64_t from, int64_t n) {
  for (int64_t i = from; i < n; ++i) store(dst, i, kWiden(load(src, i)));
}

bool finite_portable(const float* x, const float* residual, int64_t from, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = from; i < n; ++i) {
    const float v = residual ? load(x, i) + load(residual, i) : load(x, i);
    const uint32_t a = bits_of(v) & kAbs;
    most = a > most ? a : most;
  }
  return most < kInf;
}

#if CML_VECTORS

CML_AVX2 inline __m128i narrow8_half(__m256 f) { return _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT); }

CML_AVX2 inline __m128i narrow8_bfloat(__m256 f) {
  const __m256i u = _mm256_castps_si256(f), upper = _mm256_srli_epi32(u, 16);
  const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
  const __m256i b = _mm256_blendv_epi8(rounded, quiet, nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
}

template <__m128i (*kNarrow)(__m256), uint16_t kLimit>
CML_AVX2 int64_t narrow_avx2(uint16_t* dst, const float* src, int64_t n, bool* finite) {
  const __m128i magnitude = _mm_set1_epi16(0x7fff);
  __m128i most = _mm_setzero_si128();
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m128i a = kNarrow(_mm256_loadu_ps(src + i)), b = kNarrow(_mm256_loadu_ps(src + i + 8));
    most = _mm_max_epi16(most, _mm_max_epi16(_mm_and_si128(a, magnitude), _mm_and_si128(b, magnitude)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), a);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i + 8), b);
  }
  *finite = _mm_movemask_epi8(_mm_cmpgt_epi16(most, _mm_set1_epi16(kLimit - 1))) == 0;
  return i;
}

template <__m256 (*kLoad)(const uint16_t*)>
CML_AVX2 int64_t widen_avx2(float* dst, const uint16_t* src, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    _mm256_storeu_ps(dst + i, kLoad(src + i));
    _mm256_storeu_ps(dst + i + 8, kLoad(src + i + 8));
  }
  return i;
}

CML_AVX2 inline __m256i magnitude8(const float* x, const float* residual, int64_t i) {
  const __m256 v = _mm256_loadu_ps(x + i);
  const __m256 sum = residual ? _mm256_add_ps(v, _mm256_loadu_ps(residual + i)) : v;
  return _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(kAbs)), _mm256_castps_si256(sum));
}

CML_AVX2 int64_t finite_avx2(const float* x, const float* residual, int64_t n, bool* finite) {
  __m256i a = _mm256_setzero_si256(), b = a;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    a = _mm256_max_epi32(a, magnitude8(x, residual, i));
    b = _mm256_max_epi32(b, magnitude8(x, residual, i + 8));
  }
  const __m256i bad = _mm256_cmpgt_epi32(_mm256_max_epi32(a, b), _mm256_set1_epi32(static_cast<int>(kInf - 1)));
  *finite = _mm256_testz_si256(bad, bad) != 0;
  return i;
}

#endif

inline int64_t squares(const float* x, float factor, int64_t n) {
  constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  int64_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto q = static_cast<int32_t>((load(x, i) * factor + kRounds) - kRounds);
    sum += static_cast<int64_t>(q) * q;
  }
  return sum;
}

#if CML_VECTORS
CML_AVX2 int64_t squares_avx2(const float* x, float factor, int64_t n) { return squares(x, factor, n); }
#endif

}  // namespace
}  // namespace cml

extern "C" int64_t cml_f32_to_f16(uint16_t* dst, const float* src, int64_t n) {
  int64_t i = 0;
  bool finite = true;
#if CML_VECTORS
  if (cml::wide()) i = cml::narrow_avx2<cml::narrow8_half, cml::kHalfInf>(dst, src, n, &finite);
#endif
  return (cml::narrow_portable<cml::half_of, cml::kHalfInf>(dst, src, i, n) && finite) ? 1 : 0;
}

extern "C" int64_t cml_f32_to_bf16(uint16_t* dst, const float* src, int64_t n) {
  int64_t i = 0;
  bool finite = true;
#if CML_VECTORS
  if (cml::wide()) i = cml::narrow_avx2<cml::narrow8_bfloat, cml::kBfloatInf>(dst, src, n, &finite);
#endif
  return (cml::narrow_portable<cml::bfloat_of, cml::kBfloatInf>(dst, src, i, n) && finite) ? 1 : 0;
}

extern "C" void cml_f16_to_f32(float* dst, const uint16_t* src, int64_t n) {
  int64_t i = 0;
#if CML_VECTORS
  if (cml::wide()) i = cml::widen_avx2<cml::load8_half>(dst, src, n);
#endif
  cml::widen_portable<cml::float_of_half>(dst, src, i, n);
}

extern "C" void cml_bf16_to_f32(float* dst, const uint16_t* src, int64_t n) {
  int64_t i = 0;
#if CML_VECTORS
  if (cml::wide()) i = cml::widen_avx2<cml::load8_bfloat>(dst, src, n);
#endif
  cml::widen_portable<cml::float_of_bfloat>(dst, src, i, n);
}

extern "C" int64_t cml_all_finite(const float* x, const float* residual, int64_t n) {
  int64_t i = 0;
  bool finite = true;
#if CML_VECTORS
  if (cml::wide()) i = cml::finite_avx2(x, residual, n, &finite);
#endif
  return (finite && cml::finite_portable(x, residual, i, n)) ? 1 : 0;
}

extern "C" int64_t cml_scale_f32(float* dst, const float* src, float factor, int64_t n) {
  constexpr int64_t kChunk = 4096;  // in the first level of the cache between the test and the product
  for (int64_t from = 0; from < n; from += kChunk) {
    const int64_t stop = n - from < kChunk ? n : from + kChunk;
    if (!cml_all_finite(src + from, nullptr, stop - from)) return 0;
    for (int64_t i = from; i < stop; ++i) cml::store(dst, i, cml::load(src, i) * factor);
  }
  return 1;
}

extern "C" int64_t cml_sum_squares(const float* x, float factor, int64_t n) {
#if CML_VECTORS
  if (cml::wide()) return cml::squares_avx2(x, factor, n);
#endif
  return cml::squares(x, factor, n);
}

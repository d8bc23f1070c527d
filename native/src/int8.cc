// Blockwise int8 with the residual written in the same pass over a block. Knows neither headers nor positions.
#include "dispatch.h"

namespace cml {
namespace {

// |t| <= 127 here, and adding 1.5 * 2^23 leaves no bits below one: the addition rounds half to even, as cvtps does.
constexpr float kRound = 12582912.0f;

constexpr float kSmallest = 127.0f * 0x1p-126f;  // below it a scale would not be a normal number
constexpr float kMost = 0x1.fffffep+120f;        // FLT_MAX / 128: any int8 times it is finite

inline float scale_of(float m) {
  const float s = m / 127.0f;
  return m < kSmallest ? 0.0f : s > kMost ? kMost : s;
}

inline float value(const float* x, const float* residual, int64_t i) {
  const float v = load(x, i);
  return residual ? v + load(residual, i) : v;
}

inline uint32_t most_portable(const float* x, const float* residual, int64_t from, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = from; i < n; ++i) {
    const uint32_t a = bits_of(value(x, residual, i)) & kAbs;
    most = a > most ? a : most;
  }
  return most;
}

void code_portable(int8_t* q, float scale, const float* x, float* residual, int64_t from, int64_t n) {
  for (int64_t i = from; i < n; ++i) {
    const float v = value(x, residual, i);
    float t = scale == 0.0f ? 0.0f : v / scale;
    t = t > 127.0f ? 127.0f : t;
    t = t < -127.0f ? -127.0f : t;
    const int whole = static_cast<int>((t + kRound) - kRound);
    store(q, i, static_cast<int8_t>(whole));
    if (residual) store(residual, i, v - scale * static_cast<float>(whole));
  }
}

void decode_portable(float* acc, const int8_t* q, float scale, int64_t from, int64_t n, bool assign) {
  for (int64_t i = from; i < n; ++i) {
    const float v = scale * static_cast<float>(load(q, i));
    store(acc, i, assign ? v : load(acc, i) + v);
  }
}

#if CML_X86

CML_AVX2 inline __m256 value8(const float* x, const float* residual, int64_t i) {
  const __m256 v = _mm256_loadu_ps(x + i);
  return residual ? _mm256_add_ps(v, _mm256_loadu_ps(residual + i)) : v;
}

// The largest |v| as bits: magnitudes of floats are ordered like integers, and NaN is above infinity.
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

CML_AVX2 int64_t code_avx2(int8_t* q, float scale, const float* x, float* residual, int64_t n) {
  if (scale == 0.0f) return 0;
  const __m256 s = _mm256_set1_ps(scale), top = _mm256_set1_ps(127.0f), bottom = _mm256_set1_ps(-127.0f);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // undoes the packs' interleaving of halves
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i whole[4];
    for (int j = 0; j < 4; ++j) {
      const __m256 v = value8(x, residual, i + 8 * j);
      const __m256 t = _mm256_max_ps(_mm256_min_ps(_mm256_div_ps(v, s), top), bottom);
      whole[j] = _mm256_cvtps_epi32(t);
      if (residual)
        _mm256_storeu_ps(residual + i + 8 * j, _mm256_sub_ps(v, _mm256_mul_ps(s, _mm256_cvtepi32_ps(whole[j]))));
    }
    const __m256i packed =
        _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i), _mm256_permutevar8x32_epi32(packed, order));
  }
  return i;
}

CML_AVX2 int64_t decode_avx2(float* acc, const int8_t* q, float scale, int64_t n, bool assign) {
  const __m256 s = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i whole = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q + i)));
    const __m256 v = _mm256_mul_ps(s, _mm256_cvtepi32_ps(whole));
    _mm256_storeu_ps(acc + i, assign ? v : _mm256_add_ps(_mm256_loadu_ps(acc + i), v));
  }
  return i;
}

#endif

uint32_t most(const float* x, const float* residual, int64_t n, [[maybe_unused]] bool avx2) {
#if CML_X86
  if (avx2) return most_avx2(x, residual, n);
#endif
  return most_portable(x, residual, 0, n);
}

}  // namespace
}  // namespace cml

extern "C" int64_t cml_int8_encode(int8_t* q, float* scale, const float* x, float* residual, int64_t n, int64_t block) {
  if (n < 0 || block < 1) return CML_ERR_ARGUMENT;
  const bool avx2 = cml::wide();
  // The largest magnitudes wait in the scales' places until all are known to be finite.
  uint32_t most = 0;
  for (int64_t b = 0, at = 0; at < n; ++b, at += block) {
    const uint32_t m = cml::most(x + at, residual ? residual + at : nullptr, n - at < block ? n - at : block, avx2);
    cml::store(scale, b, cml::float_of(m));
    most = m > most ? m : most;
  }
  if (most >= cml::kInf) return 0;
  for (int64_t b = 0, at = 0; at < n; ++b, at += block) {
    const int64_t count = n - at < block ? n - at : block;
    float* kept = residual ? residual + at : nullptr;
    const float s = cml::scale_of(cml::load(scale, b));
    cml::store(scale, b, s);
    int64_t i = 0;
#if CML_X86
    if (avx2) i = cml::code_avx2(q + at, s, x + at, kept, count);
#endif
    cml::code_portable(q + at, s, x + at, kept, i, count);
  }
  return 1;
}

extern "C" void cml_int8_decode(float* acc, const int8_t* q, const float* scale, int64_t n, int64_t block, int assign) {
  const bool avx2 = cml::wide();
  for (int64_t b = 0, at = 0; at < n; ++b, at += block) {
    const int64_t count = n - at < block ? n - at : block;
    const float s = cml::load(scale, b);
    int64_t i = 0;
#if CML_X86
    if (avx2) i = cml::decode_avx2(acc + at, q + at, s, count, assign != 0);
#endif
    cml::decode_portable(acc + at, q + at, s, i, count, assign != 0);
  }
  (void)avx2;
}

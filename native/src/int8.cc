// Blockwise int8 with the residual written in the same pass over a block. Knows neither headers nor positions.
#include "bits.h"
#include "linear.h"

namespace cml {
namespace {

constexpr float kSmallest = 127.0f * 0x1p-126f;  // below it a scale would not be a normal number
constexpr float kMost = 0x1.fffffep+120f;        // FLT_MAX / 128: any int8 times it is finite

inline float scale_of(float m) {
  const float s = m / 127.0f;
  return m < kSmallest ? 0.0f : s > kMost ? kMost : s;
}

void code_portable(int8_t* q, float scale, const float* x, float* residual, int64_t from, int64_t n) {
  for (int64_t i = from; i < n; ++i) {
    const float v = value(x, residual, i);
    const int whole = nearest(v, scale, 127.0f);
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

#if CML_VECTORS

CML_AVX2 int64_t code_avx2(int8_t* q, float scale, const float* x, float* residual, int64_t n) {
  const Steps8 steps(scale, 127.0f);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i whole[4];
    for (int j = 0; j < 4; ++j) {
      const __m256 v = value8(x, residual, i + 8 * j);
      whole[j] = steps.nearest(v);
      if (residual) _mm256_storeu_ps(residual + i + 8 * j, steps.rest(v, whole[j]));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(q + i), narrow32(whole));
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

struct Int8 {
  int8_t* q;
  float* scale;
  int64_t block;

  bool measure(int64_t b, const float* x, const float* residual, int64_t count) {
    const uint32_t most = most_of(x, residual, count);
    if (most >= kInf) return false;
    store(scale, b, scale_of(float_of(most)));
    return true;
  }

  void code(int64_t b, int64_t at, const float* x, float* residual, int64_t count) {
    const float s = load(scale, b);
    if (s == 0.0f) return code_nothing(reinterpret_cast<uint8_t*>(q + at), count, x, residual, count);
    int64_t i = 0;
#if CML_VECTORS
    if (wide()) i = code_avx2(q + at, s, x, residual, count);
#endif
    code_portable(q + at, s, x, residual, i, count);
  }

  void give_back(float* residual, int64_t count) { cml_int8_decode(residual, q, scale, count, block, 0); }
};

}  // namespace
}  // namespace cml

extern "C" int64_t cml_int8_encode(int8_t* q, float* scale, const float* x, float* residual, int64_t n, int64_t block) {
  if (n < 0 || block < 1) return CML_ERR_ARGUMENT;
  cml::Int8 codec{q, scale, block};
  return cml::encode_blocks(codec, x, residual, n, block);
}

extern "C" void cml_int8_decode(float* acc, const int8_t* q, const float* scale, int64_t n, int64_t block, int assign) {
  const bool avx2 = cml::wide();
  for (int64_t b = 0, at = 0; at < n; ++b, at += block) {
    const int64_t count = n - at < block ? n - at : block;
    const float s = cml::load(scale, b);
    int64_t i = 0;
#if CML_VECTORS
    if (avx2) i = cml::decode_avx2(acc + at, q + at, s, count, assign != 0);
#endif
    cml::decode_portable(acc + at, q + at, s, i, count, assign != 0);
  }
  (void)avx2;
}

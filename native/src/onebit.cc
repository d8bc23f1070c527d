// The sign of each element and the mean magnitude of each block, with the residual written in the same pass. Knows no headers.
#include "blockwise.h"

namespace cml {
namespace {

constexpr float kShrink = 0x1p-24f;  // a block of up to 2^20 of the largest floats does not overflow in steps this small

inline float signed_scale(uint32_t scale, bool negative) { return float_of(negative ? scale | ~kAbs : scale); }

struct OneBit {
  uint8_t* q;
  uint16_t* scale;
  int64_t block;

  bool measure(int64_t b, const float* x, const float* residual, int64_t count) {
    const auto size = static_cast<float>(count);
    float mean = sum_of(x, residual, count, 1.0f, false) / size;
    if (!is_finite(mean)) {
      if (most_of(x, residual, count) >= kInf) return false;
      mean = sum_of(x, residual, count, kShrink, false) / size / kShrink;
    }
    store(scale, b, scale16(mean, kMost16));
    return true;
  }

  void code(int64_t b, int64_t at, const float* x, float* residual, int64_t count) {
    const uint32_t s = static_cast<uint32_t>(load(scale, b)) << 16;
    uint8_t* out = q + at / 8;
    int64_t i = 0;
#if CML_VECTORS
    if (wide()) i = code_avx2(out, s, x, residual, count);
#endif
    for (; i < count; i += 8) {
      uint8_t byte = 0;
      for (int64_t j = i; j < i + 8 && j < count; ++j) {
        const float v = value(x, residual, j);
        const bool negative = bits_of(v) >> 31;
        byte = static_cast<uint8_t>(byte | (negative ? 1 << (j - i) : 0));
        if (residual) store(residual, j, v - signed_scale(s, negative));
      }
      out[i / 8] = byte;
    }
  }

#if CML_VECTORS
  CML_AVX2 static int64_t code_avx2(uint8_t* out, uint32_t scale, const float* x, float* residual, int64_t count) {
    const __m256 s = _mm256_set1_ps(float_of(scale)), sign = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(~kAbs)));
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
      uint32_t word = 0;
      for (int j = 0; j < 4; ++j) {
        const __m256 v = value8(x, residual, i + 8 * j);
        word |= static_cast<uint32_t>(_mm256_movemask_ps(v)) << (8 * j);
        if (residual) _mm256_storeu_ps(residual + i + 8 * j, _mm256_sub_ps(v, _mm256_or_ps(s, _mm256_and_ps(v, sign))));
      }
      std::memcpy(out + i / 8, &word, sizeof word);
    }
    return i;
  }
#endif

  void give_back(float* residual, int64_t count) { cml_onebit_decode(residual, q, scale, count, block, 0); }
};

#if CML_VECTORS
CML_AVX2 int64_t decode_avx2(float* acc, const uint8_t* in, uint32_t scale, int64_t count, bool assign) {
  const __m256i s = _mm256_set1_epi32(static_cast<int>(scale)), sign = _mm256_set1_epi32(static_cast<int>(~kAbs));
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m256i word = _mm256_set1_epi32(load(reinterpret_cast<const int32_t*>(in + i / 8)));
    for (int j = 0; j < 4; ++j) {
      const int first = 31 - 8 * j;  // lane k shifts its bit up to the sign
      const __m256i left = _mm256_sub_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
      const __m256 v = _mm256_castsi256_ps(_mm256_or_si256(s, _mm256_and_si256(_mm256_sllv_epi32(word, left), sign)));
      float* to = acc + i + 8 * j;
      _mm256_storeu_ps(to, assign ? v : _mm256_add_ps(_mm256_loadu_ps(to), v));
    }
  }
  return i;
}
#endif

}  // namespace
}  // namespace cml

extern "C" int64_t cml_onebit_encode(uint8_t* q, uint16_t* scale, const float* x, float* residual, int64_t n, int64_t block) {
  if (n < 0 || block < 8 || block % 8 || block > 1 << 20) return CML_ERR_ARGUMENT;
  cml::OneBit codec{q, scale, block};
  return cml::encode_blocks(codec, x, residual, n, block);
}

extern "C" int64_t cml_onebit_decode(float* acc, const uint8_t* q, const uint16_t* scale, int64_t n, int64_t block, int assign) {
  if (n < 0 || block < 8 || block % 8) return CML_ERR_ARGUMENT;
  for (int64_t b = 0, at = 0; at < n; ++b, at += block) {
    const int64_t count = n - at < block ? n - at : block;
    const uint32_t s = static_cast<uint32_t>(cml::load(scale, b)) << 16;
    int64_t i = 0;
#if CML_VECTORS
    if (cml::wide()) i = cml::decode_avx2(acc + at, q + at / 8, s, count, assign != 0);
#endif
    for (; i < count; ++i) {
      const float v = cml::signed_scale(s, q[(at + i) / 8] >> (i % 8) & 1);
      cml::store(acc, at + i, assign ? v : cml::load(acc, at + i) + v);
    }
  }
  return CML_OK;
}

// -1, 0, 1 by random numbers, five to a byte, with a scale per block. Knows no headers.
#include "bits.h"
#include "linear.h"

namespace cml {
namespace {

constexpr int kDigits = 5;      // 3^5 = 243 numbers in a byte
constexpr int64_t kGroup = 160;  // elements that share 32 bytes; a block is some groups, so a byte has one scale

// Bytes of a group of `count` elements: byte j holds elements j, j + m, j + 2m, ... of it as digits 1, 3, 9, ...
inline int64_t group_nbytes(int64_t count) { return (count + kDigits - 1) / kDigits; }

inline int64_t nbytes_before(int64_t at) { return at / kGroup * (kGroup / kDigits); }

struct Ternary {
  uint8_t* q;
  uint16_t* scale;
  int64_t block;
  float clip;
  Random random;

  bool measure(int64_t b, const float* x, const float* residual, int64_t count) {
    const uint32_t most = most_of(x, residual, count);
    if (most >= kInf) return false;
    float size = float_of(most);
    if (clip > 0.0f) {
      const float limit = clip * (norm_of(x, residual, count, most) / std::sqrt(static_cast<float>(count)));
      size = limit < size ? limit : size;
    }
    store(scale, b, scale16(size, kMost16));
    return true;
  }

  void code(int64_t b, int64_t at, const float* x, float* residual, int64_t count) {
    const float s = float_of_bfloat(load(scale, b));
    uint8_t* out = q + nbytes_before(at);
    if (s == 0.0f) return code_nothing(out, nbytes_before(count) + group_nbytes(count % kGroup), x, residual, count);
    int64_t i = 0;
#if CML_VECTORS
    if (wide()) i = code_avx2(out, s, at, x, residual, count);
#endif
    for (; i < count; i += kGroup) {
      const int64_t some = count - i < kGroup ? count - i : kGroup, m = group_nbytes(some);
      const uint32_t* words = random.words(at + i, kGroup);
      uint8_t bytes[kGroup / kDigits] = {};
      for (int64_t j = some - 1; j >= 0; --j) {
        const float v = value(x, residual, i + j);
        const int whole = dithered(v, s, 1.0f, words[j]);
        if (residual) store(residual, i + j, v - s * static_cast<float>(whole));
        bytes[j % m] = static_cast<uint8_t>(bytes[j % m] * 3 + (whole < 0 ? 2 : whole));
      }
      std::memcpy(out + nbytes_before(i), bytes, static_cast<size_t>(m));
    }
  }

#if CML_VECTORS
  CML_AVX2 int64_t code_avx2(uint8_t* out, float s, int64_t at, const float* x, float* residual, int64_t count) {
    const Steps8 steps(s, 1.0f);
    const __m256i two = _mm256_set1_epi8(2);
    int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup) {
      const uint32_t* words = random.words(at + i, kGroup);
      __m256i bytes = _mm256_setzero_si256();
      for (int digit = kDigits - 1; digit >= 0; --digit) {
        __m256i whole[4];
        steps.code32<true>(whole, x, residual, i + 32 * digit, words + 32 * digit);
        const __m256i codes = narrow32(whole);
        const __m256i trits = _mm256_max_epi8(codes, _mm256_and_si256(codes, two));
        bytes = _mm256_add_epi8(_mm256_add_epi8(bytes, _mm256_add_epi8(bytes, bytes)), trits);
      }
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + nbytes_before(i)), bytes);
    }
    return i;
  }
#endif

  void give_back(float* residual, int64_t count) { cml_ternary_decode(residual, q, scale, count, block, 0); }
};

#if CML_VECTORS
CML_AVX2 int64_t decode_avx2(float* acc, const uint8_t* in, float scale, int64_t count, bool assign) {
  const __m256i third = _mm256_set1_epi16(21846);  // 2^16 / 3, rounded up: right for bytes
  const __m256 values = _mm256_setr_ps(0.0f, scale, -scale, 0.0f, 0.0f, scale, -scale, 0.0f);
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    for (int half = 0; half < 2; ++half) {
      const auto* from = reinterpret_cast<const __m128i*>(in + nbytes_before(i) + 16 * half);
      __m256i rest = _mm256_cvtepu8_epi16(_mm_loadu_si128(from));
      for (int digit = 0; digit < kDigits; ++digit) {
        const __m256i up = _mm256_mulhi_epu16(rest, third);
        const __m256i trits = _mm256_sub_epi16(rest, _mm256_add_epi16(up, _mm256_add_epi16(up, up)));
        rest = up;
        float* to = acc + i + 32 * digit + 16 * half;
        const __m256i low = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(trits));
        const __m256i high = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(trits, 1));
        const __m256 a = _mm256_permutevar_ps(values, low), b = _mm256_permutevar_ps(values, high);
        _mm256_storeu_ps(to, assign ? a : _mm256_add_ps(_mm256_loadu_ps(to), a));
        _mm256_storeu_ps(to + 8, assign ? b : _mm256_add_ps(_mm256_loadu_ps(to + 8), b));
      }
    }
  }
  return i;
}
#endif

void decode_portable(float* acc, const uint8_t* in, float scale, int64_t from, int64_t count, bool assign) {
  const float values[3] = {0.0f, scale, -scale};
  for (int64_t i = from; i < count; i += kGroup) {
    const int64_t some = count - i < kGroup ? count - i : kGroup, m = group_nbytes(some);
    uint8_t bytes[kGroup / kDigits];
    std::memcpy(bytes, in + nbytes_before(i), static_cast<size_t>(m));
    for (int64_t j = 0; j < some; ++j) {
      const float v = values[bytes[j % m] % 3];
      bytes[j % m] /= 3;
      store(acc, i + j, assign ? v : load(acc, i + j) + v);
    }
  }
}

}  // namespace
}  // namespace cml

extern "C" int64_t cml_ternary_encode(uint8_t* q, uint16_t* scale, const float* x, float* residual, int64_t n, int64_t block,
                                      float clip, uint64_t key, uint64_t step, int64_t first) {
  if (n < 0 || first < 0 || first % 8 || block < cml::kGroup || block % cml::kGroup || !(clip >= 0.0f)) return CML_ERR_ARGUMENT;
  cml::Ternary codec{q, scale, block, clip, {key, step, first}};
  return cml::encode_blocks(codec, x, residual, n, block);
}

extern "C" int64_t cml_ternary_decode(float* acc, const uint8_t* q, const uint16_t* scale, int64_t n, int64_t block, int assign) {
  if (n < 0 || block < cml::kGroup || block % cml::kGroup) return CML_ERR_ARGUMENT;
  for (int64_t b = 0, at = 0; at < n; ++b, at += block) {
    const int64_t count = n - at < block ? n - at : block;
    const uint8_t* in = q + cml::nbytes_before(at);
    const float s = cml::float_of_bfloat(cml::load(scale, b));
    int64_t i = 0;
#if CML_VECTORS
    if (cml::wide()) i = cml::decode_avx2(acc + at, in, s, count, assign != 0);
#endif
    cml::decode_portable(acc + at, in, s, i, count, assign != 0);
  }
  return CML_OK;
}

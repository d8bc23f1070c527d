// Sign and power of two, by random numbers, with an exponent per block below which nothing but zero is told. Knows no headers.
#include "bits.h"
#include "blockwise.h"
#include "random.h"

namespace cml {
namespace {

bool is_width(int bits) { return bits == 3 || bits == 4 || bits == 5 || bits == 8; }

inline int levels_of(int bits) { return (1 << (bits - 1)) - 1; }

constexpr uint32_t kMantissa = (1u << 23) - 1, kTopExponent = 254;

// Level k > 0 stands for 2^(base + k - 127). Both neighbours of v are as likely as makes the mean v: adding 23 random bits to
// the mantissa carries into the exponent just so often; below level 1 the share of level 1 is compared with a uniform number.
inline int level(float v, uint32_t base, int levels, uint32_t word) {
  const uint32_t a = bits_of(v) & kAbs;
  if (a < (base + 1) << 23) return uniform(word) < float_of(a) * float_of((253 - base) << 23) ? 1 : 0;
  const int k = static_cast<int>(((a + (word >> 9)) >> 23) - base);
  return k > levels ? levels : k;
}

inline float meaning(int k, bool negative, uint32_t base) {
  const uint32_t sign = negative ? 0x80000000u : 0u;
  return float_of(k ? sign | (base + static_cast<uint32_t>(k)) << 23 : 0u);
}

#if CML_VECTORS
struct Levels8 {
  CML_AVX2 Levels8(uint32_t base, int bits)
      : base_(_mm256_set1_epi32(static_cast<int>(base))),
        levels_(_mm256_set1_epi32(levels_of(bits))),
        first_(_mm256_set1_epi32(static_cast<int>((base + 1) << 23))),
        share_(_mm256_set1_ps(float_of((253 - base) << 23))),
        high_(_mm256_set1_epi32(1 << (bits - 1))) {}

  CML_AVX2 static inline __m256i magnitude(__m256 v) {
    return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(static_cast<int>(kAbs)));
  }
  CML_AVX2 inline __m256i level(__m256 v, __m256i words) const {
    const __m256i a = magnitude(v), carried = _mm256_srli_epi32(_mm256_add_epi32(a, _mm256_srli_epi32(words, 9)), 23);
    const __m256i k = _mm256_min_epi32(_mm256_sub_epi32(carried, base_), levels_);
    const __m256 one = _mm256_cmp_ps(uniform8(words), _mm256_mul_ps(_mm256_castsi256_ps(a), share_), _CMP_LT_OQ);
    const __m256i small = _mm256_srli_epi32(_mm256_castps_si256(one), 31);
    return _mm256_blendv_epi8(k, small, _mm256_cmpgt_epi32(first_, a));
  }
  // The level, and the sign of v unless the level is zero, as a code.
  CML_AVX2 inline __m256i code(__m256 v, __m256i k) const {
    const __m256i negative = _mm256_srai_epi32(_mm256_castps_si256(v), 31);
    const __m256i some = _mm256_cmpgt_epi32(k, _mm256_setzero_si256());
    return _mm256_or_si256(k, _mm256_and_si256(_mm256_and_si256(negative, some), high_));
  }
  // `signs` counts by its uppermost bits alone.
  CML_AVX2 inline __m256 meaning(__m256i k, __m256i signs) const {
    const __m256i sign = _mm256_and_si256(signs, _mm256_set1_epi32(static_cast<int>(~kAbs)));
    const __m256i bits = _mm256_or_si256(sign, _mm256_slli_epi32(_mm256_add_epi32(k, base_), 23));
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_cmpgt_epi32(k, _mm256_setzero_si256())));
  }
  CML_AVX2 inline __m256 decode(__m256i code) const { return meaning(_mm256_and_si256(code, levels_), code); }

 private:
  __m256i base_, levels_, first_;
  __m256 share_;
  __m256i high_;
};
#endif

struct Natural {
  uint8_t* q;
  uint8_t* base;
  int64_t n, block;
  int bits;
  Random random;
#if CML_VECTORS
  Packer packer;
#endif

  bool measure(int64_t b, const float* x, const float* residual, int64_t count) {
    const uint32_t most = most_of(x, residual, count);
    if (most >= kInf) return false;
    const uint32_t up = (most + kMantissa) >> 23, top = up > kTopExponent ? kTopExponent : up;
    const auto levels = static_cast<uint32_t>(levels_of(bits));
    base[b] = static_cast<uint8_t>(top > levels ? top - levels : 0);
    return true;
  }

  void code(int64_t b, int64_t at, const float* x, float* residual, int64_t count) {
    uint8_t* out = q + at / 8 * bits;
    int64_t i = 0;
#if CML_VECTORS
    if (wide()) i = code_avx2(out, stream_nbytes(n, bits) - at / 8 * bits, base[b], at, x, residual, count);
#endif
    for (; i < count; i += 8) {
      const int some = count - i < 8 ? static_cast<int>(count - i) : 8;
      const uint32_t* words = random.words(at + i, 8);
      int codes[8];
      for (int j = 0; j < some; ++j) {
        const float v = value(x, residual, i + j);
        const bool negative = bits_of(v) >> 31;
        const int k = level(v, base[b], levels_of(bits), words[j]);
        codes[j] = k && negative ? k | 1 << (bits - 1) : k;
        if (residual) store(residual, i + j, v - meaning(k, negative, base[b]));
      }
      put8(out + i / 8 * bits, codes, some, bits);
    }
  }

#if CML_VECTORS
  CML_AVX2 int64_t code_avx2(uint8_t* out, int64_t left, uint32_t first, int64_t at, const float* x, float* residual, int64_t count) {
    const Levels8 levels(first, bits);
    const __m256i low = _mm256_set1_epi32((1 << bits) - 1);
    int64_t i = 0;
    for (; i + 32 <= count && i / 8 * bits + packer.room() <= left; i += 32) {
      const uint32_t* words = random.words(at + i, 32);
      __m256i codes[4];
      for (int j = 0; j < 4; ++j) {
        const int64_t here = i + 8 * j;
        const __m256 v = value8(x, residual, here);
        const __m256i k = levels.level(v, words8(words + 8 * j));
        // Sign-extended, so that narrowing does not saturate codes of eight bits.
        const __m256i code = _mm256_and_si256(levels.code(v, k), low);
        codes[j] = bits == 8 ? _mm256_srai_epi32(_mm256_slli_epi32(code, 24), 24) : code;
        if (residual) _mm256_storeu_ps(residual + here, _mm256_sub_ps(v, levels.meaning(k, _mm256_castps_si256(v))));
      }
      packer.put(out + i / 8 * bits, narrow32(codes));
    }
    return i;
  }
#endif

  void give_back(float* residual, int64_t count) { cml_natural_decode(residual, q, base, count, block, bits, 0); }
};

#if CML_VECTORS
CML_AVX2 int64_t decode_avx2(float* acc, const uint8_t* in, int64_t left, const Unpacker& unpacker, int bits, uint32_t base,
                             int64_t count, bool assign) {
  const Levels8 levels(base, bits);
  int64_t i = 0;
  for (; i + 8 <= count && i / 8 * bits + unpacker.room() <= left; i += 8) {
    const __m256 v = levels.decode(unpacker.get(in + i / 8 * bits));
    _mm256_storeu_ps(acc + i, assign ? v : _mm256_add_ps(_mm256_loadu_ps(acc + i), v));
  }
  return i;
}
#endif

void decode_portable(float* acc, const uint8_t* in, int bits, uint32_t base, int64_t from, int64_t count, bool assign) {
  for (int64_t i = from; i < count; i += 8) {
    const int some = count - i < 8 ? static_cast<int>(count - i) : 8;
    int codes[8];
    get8(codes, in + i / 8 * bits, some, bits);
    for (int j = 0; j < some; ++j) {
      const float v = meaning(codes[j] & levels_of(bits), codes[j] < 0, base);
      store(acc, i + j, assign ? v : load(acc, i + j) + v);
    }
  }
}

}  // namespace
}  // namespace cml

extern "C" int64_t cml_natural_encode(uint8_t* q, uint8_t* base, const float* x, float* residual, int64_t n, int64_t block,
                                      int bits, uint64_t key, uint64_t step, int64_t first) {
  if (n < 0 || first < 0 || first % 8 || block < 8 || block % 8 || !cml::is_width(bits)) return CML_ERR_ARGUMENT;
  cml::Natural codec{q, base, n, block, bits, {key, step, first}
#if CML_VECTORS
                     , cml::Packer(bits)
#endif
  };
  return cml::encode_blocks(codec, x, residual, n, block);
}

extern "C" int64_t cml_natural_decode(float* acc, const uint8_t* q, const uint8_t* base, int64_t n, int64_t block, int bits,
                                      int assign) {
  if (n < 0 || block < 8 || block % 8 || !cml::is_width(bits)) return CML_ERR_ARGUMENT;
#if CML_VECTORS
  const bool avx2 = cml::wide();
  const cml::Unpacker unpacker(bits);
#endif
  for (int64_t b = 0, at = 0; at < n; ++b, at += block) {
    const int64_t count = n - at < block ? n - at : block, from = at / 8 * bits;
    int64_t i = 0;
#if CML_VECTORS
    const int64_t left = cml::stream_nbytes(n, bits) - from;
    if (avx2) i = cml::decode_avx2(acc + at, q + from, left, unpacker, bits, base[b], count, assign != 0);
#endif
    cml::decode_portable(acc + at, q + from, bits, base[b], i, count, assign != 0);
  }
  return CML_OK;
}

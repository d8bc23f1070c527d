// Whole numbers of 2 to 8 bits with a scale per block: int4 rounds to the nearest, qsgd by random numbers. Knows no headers.
#include "bits.h"
#include "linear.h"

namespace cml {
namespace {

bool is_width(int bits) { return bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 8; }

struct Linear {
  uint8_t* q;
  uint16_t* scale;
  int64_t n, block;
  int bits;
  bool euclidean, dither;
  Random random;
#if CML_VECTORS
  Packer packer;
#endif

  float top() const { return static_cast<float>((1 << (bits - 1)) - 1); }

  bool measure(int64_t b, const float* x, const float* residual, int64_t count) {
    const uint32_t most = most_of(x, residual, count);
    if (most >= kInf) return false;
    const float size = euclidean ? norm_of(x, residual, count, most) : float_of(most);
    store(scale, b, scale16(size / top(), most16(bits)));
    return true;
  }

  void code(int64_t b, int64_t at, const float* x, float* residual, int64_t count) {
    const float s = float_of_bfloat(load(scale, b));
    uint8_t* out = q + at / 8 * bits;
    if (s == 0.0f) return code_nothing(out, stream_nbytes(count, bits), x, residual, count);
    int64_t i = 0;
#if CML_VECTORS
    if (wide()) {
      const int64_t left = stream_nbytes(n, bits) - at / 8 * bits;
      i = dither ? code_avx2<true>(out, left, s, at, x, residual, count) : code_avx2<false>(out, left, s, at, x, residual, count);
    }
#endif
    for (; i < count; i += 8) {
      const int some = count - i < 8 ? static_cast<int>(count - i) : 8;
      const uint32_t* words = dither ? random.words(at + i, 8) : nullptr;
      int codes[8];
      for (int j = 0; j < some; ++j) {
        const float v = value(x, residual, i + j);
        codes[j] = dither ? dithered(v, s, top(), words[j]) : nearest(v, s, top());
        if (residual) store(residual, i + j, v - s * static_cast<float>(codes[j]));
      }
      put8(out + i / 8 * bits, codes, some, bits);
    }
  }

#if CML_VECTORS
  template <bool kDither>
  CML_AVX2 int64_t code_avx2(uint8_t* out, int64_t left, float s, int64_t at, const float* x, float* residual, int64_t count) {
    const Steps8 steps(s, top());
    int64_t i = 0;
    for (; i + 32 <= count && i / 8 * bits + packer.room() <= left; i += 32) {
      __m256i whole[4];
      steps.code32<kDither>(whole, x, residual, i, kDither ? random.words(at + i, 32) : nullptr);
      packer.put(out + i / 8 * bits, narrow32(whole));
    }
    return i;
  }
#endif

  void give_back(float* residual, int64_t count) { cml_linear_decode(residual, q, scale, count, block, bits, 0); }
};

#if CML_VECTORS
CML_AVX2 int64_t decode_avx2(float* acc, const uint8_t* in, int64_t left, const Unpacker& unpacker, int bits, float scale,
                             int64_t count, bool assign) {
  const __m256 s = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 8 <= count && i / 8 * bits + unpacker.room() <= left; i += 8) {
    const __m256 v = _mm256_mul_ps(s, _mm256_cvtepi32_ps(unpacker.get(in + i / 8 * bits)));
    _mm256_storeu_ps(acc + i, assign ? v : _mm256_add_ps(_mm256_loadu_ps(acc + i), v));
  }
  return i;
}
#endif

void decode_portable(float* acc, const uint8_t* in, int bits, float scale, int64_t from, int64_t count, bool assign) {
  for (int64_t i = from; i < count; i += 8) {
    const int some = count - i < 8 ? static_cast<int>(count - i) : 8;
    int codes[8];
    get8(codes, in + i / 8 * bits, some, bits);
    for (int j = 0; j < some; ++j) {
      const float v = scale * static_cast<float>(codes[j]);
      store(acc, i + j, assign ? v : load(acc, i + j) + v);
    }
  }
}

}  // namespace
}  // namespace cml

extern "C" int64_t cml_linear_encode(uint8_t* q, uint16_t* scale, const float* x, float* residual, int64_t n, int64_t block,
                                     int bits, int euclidean, int dither, uint64_t key, uint64_t step, int64_t first) {
  if (n < 0 || first < 0 || first % 8 || block < 8 || block % 8 || !cml::is_width(bits)) return CML_ERR_ARGUMENT;
  cml::Linear codec{q, scale, n, block, bits, euclidean != 0, dither != 0, {key, step, first}
#if CML_VECTORS
                    , cml::Packer(bits)
#endif
  };
  return cml::encode_blocks(codec, x, residual, n, block);
}

extern "C" int64_t cml_linear_decode(float* acc, const uint8_t* q, const uint16_t* scale, int64_t n, int64_t block, int bits,
                                     int assign) {
  if (n < 0 || block < 8 || block % 8 || !cml::is_width(bits)) return CML_ERR_ARGUMENT;
#if CML_VECTORS
  const bool avx2 = cml::wide();
  const cml::Unpacker unpacker(bits);
#endif
  for (int64_t b = 0, at = 0; at < n; ++b, at += block) {
    const int64_t count = n - at < block ? n - at : block, from = at / 8 * bits;
    const float s = cml::float_of_bfloat(cml::load(scale, b));
    int64_t i = 0;
#if CML_VECTORS
    const int64_t left = cml::stream_nbytes(n, bits) - from;
    if (avx2) i = cml::decode_avx2(acc + at, q + from, left, unpacker, bits, s, count, assign != 0);
#endif
    cml::decode_portable(acc + at, q + from, bits, s, i, count, assign != 0);
  }
  return CML_OK;
}

// Philox for many elements at a time; the same words as philox.h, in the same order. Knows no codecs.
#include "random.h"

namespace cml {
namespace {

#if CML_VECTORS

// Of a block's four numbers each has a 64-bit lane, of which the lower half counts: multiplication reads no more, and what the
// upper halves gather is never looked at.
struct Four {
  __m256i c0, c1, c2, c3;

  CML_AVX2 inline void turn(__m256i m0, __m256i m1, __m256i k0, __m256i k1) {
    const __m256i p0 = _mm256_mul_epu32(c0, m0), p1 = _mm256_mul_epu32(c2, m1);
    c0 = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(c1, k0));
    c2 = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(c3, k1));
    c1 = p1;
    c3 = p0;
  }
  // For blocks 0, 2, 1, 3 in the lanes.
  CML_AVX2 inline void put(uint32_t* words) const {
    const __m256i lower = _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xaa);
    const __m256i upper = _mm256_blend_epi32(c2, _mm256_slli_epi64(c3, 32), 0xaa);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), _mm256_unpacklo_epi64(lower, upper));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + 8), _mm256_unpackhi_epi64(lower, upper));
  }
};

CML_AVX2 int64_t fill_avx2(uint32_t* words, int64_t n, int64_t first, uint64_t key, uint64_t step) {
  const __m256i m0 = _mm256_set1_epi64x(kPhiloxMul0), m1 = _mm256_set1_epi64x(kPhiloxMul1);
  const __m256i a0 = _mm256_set1_epi32(static_cast<int>(kPhiloxAdd0)), a1 = _mm256_set1_epi32(static_cast<int>(kPhiloxAdd1));
  const __m256i low = _mm256_set1_epi64x(static_cast<int64_t>(step)), high = _mm256_set1_epi64x(static_cast<int64_t>(step >> 32));
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const int64_t block = (first + i) / 4;
    Four a{_mm256_setr_epi64x(block, block + 2, block + 1, block + 3), _mm256_setzero_si256(), low, high};
    Four b{_mm256_setr_epi64x(block + 4, block + 6, block + 5, block + 7), _mm256_setzero_si256(), low, high};
    a.c1 = _mm256_srli_epi64(a.c0, 32);
    b.c1 = _mm256_srli_epi64(b.c0, 32);
    __m256i k0 = _mm256_set1_epi32(static_cast<int>(key)), k1 = _mm256_set1_epi32(static_cast<int>(key >> 32));
    for (int r = 0; r < kPhiloxRounds; ++r) {
      a.turn(m0, m1, k0, k1);
      b.turn(m0, m1, k0, k1);
      k0 = _mm256_add_epi32(k0, a0);
      k1 = _mm256_add_epi32(k1, a1);
    }
    a.put(words + i);
    b.put(words + i + 16);
  }
  return i;
}

#endif

#if CML_X86

struct Eight {
  __m512i c0, c1, c2, c3;

  CML_AVX512 inline void turn(__m512i m0, __m512i m1, __m512i k0, __m512i k1) {
    constexpr int kXor = 0x96;  // of all three
    const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
    c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1, k0, kXor);
    c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3, k1, kXor);
    c1 = p1;
    c3 = p0;
  }
  // For blocks 0, 4, 1, 5, 2, 6, 3, 7 in the lanes.
  CML_AVX512 inline void put(uint32_t* words) const {
    const __m512i lower = _mm512_mask_blend_epi32(0xaaaa, c0, _mm512_slli_epi64(c1, 32));
    const __m512i upper = _mm512_mask_blend_epi32(0xaaaa, c2, _mm512_slli_epi64(c3, 32));
    _mm512_storeu_si512(words, _mm512_unpacklo_epi64(lower, upper));
    _mm512_storeu_si512(words + 16, _mm512_unpackhi_epi64(lower, upper));
  }
};

CML_AVX512 int64_t fill_avx512(uint32_t* words, int64_t n, int64_t first, uint64_t key, uint64_t step) {
  const __m512i m0 = _mm512_set1_epi64(kPhiloxMul0), m1 = _mm512_set1_epi64(kPhiloxMul1);
  const __m512i a0 = _mm512_set1_epi32(static_cast<int>(kPhiloxAdd0)), a1 = _mm512_set1_epi32(static_cast<int>(kPhiloxAdd1));
  const __m512i low = _mm512_set1_epi64(static_cast<int64_t>(step)), high = _mm512_set1_epi64(static_cast<int64_t>(step >> 32));
  const __m512i places = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512i block = _mm512_add_epi64(_mm512_set1_epi64((first + i) / 4), places);
    Eight c{block, _mm512_srli_epi64(block, 32), low, high};
    __m512i k0 = _mm512_set1_epi32(static_cast<int>(key)), k1 = _mm512_set1_epi32(static_cast<int>(key >> 32));
    for (int r = 0; r < kPhiloxRounds; ++r) {
      c.turn(m0, m1, k0, k1);
      k0 = _mm512_add_epi32(k0, a0);
      k1 = _mm512_add_epi32(k1, a1);
    }
    c.put(words + i);
  }
  return i;
}

#endif

}  // namespace

void fill_words(uint32_t* words, int64_t n, int64_t first, uint64_t key, uint64_t step) {
  int64_t i = 0;
#if CML_X86
  if (wider())
    i = fill_avx512(words, n, first, key, step);
  else if (wide())
    i = fill_avx2(words, n, first, key, step);
#elif CML_VECTORS
  if (wide()) i = fill_avx2(words, n, first, key, step);
#endif
  Stream stream(key, step);
  for (; i < n; ++i) store(words, i, stream.word(static_cast<uint64_t>(first + i)));
}

}  // namespace cml

extern "C" void cml_philox(uint32_t* words, int64_t n, int64_t first, uint64_t key, uint64_t step) {
  cml::Stream stream(key, step);
  int64_t i = 0;
  for (; i < n && (first + i) % 4 != 0; ++i) cml::store(words, i, stream.word(static_cast<uint64_t>(first + i)));
  if (i < n) cml::fill_words(words + i, n - i, first + i, key, step);
}

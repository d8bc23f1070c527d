// Numbers of a few bits as a stream of bytes, the first number in the lowest bits. Knows what a number of bits is, not what it means.
#pragma once

#include "dispatch.h"

namespace cml {

inline int64_t stream_nbytes(int64_t n, int bits) { return (n * bits + 7) / 8; }

// The lower `bits` bits of count <= 8 codes; they begin at a whole byte.
inline void put8(uint8_t* out, const int* codes, int count, int bits) {
  uint64_t word = 0;
  for (int j = 0; j < count; ++j) word |= (static_cast<uint64_t>(codes[j]) & ((1u << bits) - 1)) << (j * bits);
  std::memcpy(out, &word, static_cast<size_t>(stream_nbytes(count, bits)));
}

// count <= 8 codes, their uppermost bit taken for the sign.
inline void get8(int* codes, const uint8_t* in, int count, int bits) {
  uint64_t word = 0;
  std::memcpy(&word, in, static_cast<size_t>(stream_nbytes(count, bits)));
  for (int j = 0; j < count; ++j) codes[j] = static_cast<int>(static_cast<int64_t>(word << (64 - bits * (j + 1))) >> (64 - bits));
}

#if CML_VECTORS

// 32 codes of 2, 3, 4, 5 or 8 bits at a time.
class Packer {
 public:
  explicit Packer(int bits) : bits_(bits) {
    for (int j = 0; j < 16; ++j) {
      const int from = j < bits ? j : j < 2 * bits ? j - bits + 8 : 0x80;
      order_[j] = order_[j + 16] = static_cast<uint8_t>(from);
    }
  }

  // Bytes that `put` may write: the 4 * bits that it means and some after them, which a later call overwrites.
  int64_t room() const { return bits_ == 8 ? 32 : 2 * bits_ + 16; }

  CML_AVX2 inline void put(uint8_t* out, __m256i codes) const {
    if (bits_ == 8) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), codes);
      return;
    }
    const __m256i low = _mm256_set1_epi8(static_cast<char>((1 << bits_) - 1)), zero = _mm256_setzero_si256();
    const __m256i pairs = _mm256_set1_epi16(static_cast<int16_t>(1 | 1 << (bits_ + 8)));
    const __m256i fours = _mm256_set1_epi32(1 | 1 << (2 * bits_ + 16));
    const __m256i four = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_and_si256(codes, low), pairs), fours);
    const __m256i above = _mm256_srl_epi64(_mm256_blend_epi32(zero, four, 0xaa), _mm_cvtsi32_si128(32 - 4 * bits_));
    const __m256i eight = _mm256_or_si256(_mm256_blend_epi32(four, zero, 0xaa), above);
    const __m256i order = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(order_));
    const __m256i close = _mm256_shuffle_epi8(eight, order);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(close));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * bits_), _mm256_extracti128_si256(close, 1));
  }

 private:
  int bits_;
  uint8_t order_[32];
};

// Eight codes at a time, their uppermost bit taken for the sign.
class Unpacker {
 public:
  explicit Unpacker(int bits) : bits_(bits) {
    const int lanes = bits <= 4 ? 8 : 4;
    for (int k = 0; k < 8; ++k) left_[k] = 32 - bits * (k % lanes + 1);
  }

  // Bytes that `get` may read.
  int64_t room() const { return bits_ <= 4 ? 4 : 8; }

  CML_AVX2 inline __m256i get(const uint8_t* in) const {
    __m256i word;
    if (bits_ <= 4) {
      word = _mm256_set1_epi32(load(reinterpret_cast<const int32_t*>(in)));
    } else {
      const uint64_t all = load(reinterpret_cast<const uint64_t*>(in));
      word = _mm256_set_m128i(_mm_set1_epi32(static_cast<int>(all >> (4 * bits_))), _mm_set1_epi32(static_cast<int>(all)));
    }
    const __m256i left = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(left_));
    return _mm256_sra_epi32(_mm256_sllv_epi32(word, left), _mm_cvtsi32_si128(32 - bits_));
  }

 private:
  int bits_;
  int32_t left_[8];
};

// Four times eight int32, in order, as 32 int8.
CML_AVX2 inline __m256i narrow32(const __m256i whole[4]) {
#if CML_X86
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
  return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#else
  const auto half = [](__m256i a, __m256i b) { return _mm_packs_epi16(_mm_packs_epi32(a.lo, a.hi), _mm_packs_epi32(b.lo, b.hi)); };
  return {half(whole[0], whole[1]), half(whole[2], whole[3])};
#endif
}

#endif

}  // namespace cml

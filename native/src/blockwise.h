// What the blockwise quantisers share: v = x + residual, its measure over a block, scales of 16 bits, and what becomes of a
// residual when v is not finite. Knows no codes.
#pragma once

#include "half.h"

#include <cmath>

namespace cml {

constexpr uint16_t kMost16 = 0x7f7f;   // the largest bfloat16 that is finite
constexpr float kLeast = 0x1p-126f;    // below it a scale is no normal number: the block counts as zeros

inline float value(const float* x, const float* residual, int64_t i) {
  const float v = load(x, i);
  return residual ? v + load(residual, i) : v;
}

// The least bfloat16 that is not below s >= 0, and not above `most`; 0 where that would be no normal number.
inline uint16_t scale16(float s, uint16_t most) {
  if (!(s >= kLeast)) return 0;
  const uint32_t up = (bits_of(s) + 0xffffu) >> 16;
  return up > most ? most : static_cast<uint16_t>(up);
}

// The largest scale of `bits`-bit codes: whatever the code, its product is finite.
inline uint16_t most16(int bits) { return static_cast<uint16_t>(kMost16 - ((bits - 1) << 7)); }

// residual[i] = v wherever that is finite.
inline void absorb(float* residual, const float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = value(x, residual, i);
    if (is_finite(v)) store(residual, i, v);
  }
}

// A block of nothing: its codes are 0 and the residual takes all of v.
inline void code_nothing(uint8_t* q, int64_t nbytes, const float* x, float* residual, int64_t n) {
  std::memset(q, 0, static_cast<size_t>(nbytes));
  for (int64_t i = 0; residual && i < n; ++i) store(residual, i, value(x, residual, i));
}

// The largest |v| as bits: magnitudes of floats are ordered like integers, and NaN is above infinity.
uint32_t most_of(const float* x, const float* residual, int64_t n);

// Sums of |v * factor|, or of its square. Element i goes to lane i % 16, each lane adds in order, and the lanes are added as
// (j, j + 8), then (j, j + 4), (j, j + 2), (0, 1): every body and backend does it so, and gets the same bits.
float sum_of(const float* x, const float* residual, int64_t n, float factor, bool squares);

// The Euclidean norm of a block whose largest magnitude is `most` (as bits): without overflow on the way.
inline float norm_of(const float* x, const float* residual, int64_t n, uint32_t most) {
  const uint32_t exponent = most >> 23;
  const uint32_t e = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
  return std::sqrt(sum_of(x, residual, n, float_of((254 - e) << 23), true)) * float_of(e << 23);
}

#if CML_VECTORS

CML_AVX2 inline __m256 value8(const float* x, const float* residual, int64_t i) {
  const __m256 v = _mm256_loadu_ps(x + i);
  return residual ? _mm256_add_ps(v, _mm256_loadu_ps(residual + i)) : v;
}

#endif

// Codes block by block: `codec` measures a block, which gives what it scales by, and codes it while it is in the cache. At the
// first block that is not finite, what the blocks before it sent returns to the residual, which takes the finite part of the rest.
template <class Codec>
int64_t encode_blocks(Codec& codec, const float* x, float* residual, int64_t n, int64_t block) {
  for (int64_t b = 0, at = 0; at < n; ++b, at += block) {
    const int64_t count = n - at < block ? n - at : block;
    float* kept = residual ? residual + at : nullptr;
    if (!codec.measure(b, x + at, kept, count)) {
      if (residual) {
        codec.give_back(residual, at);
        absorb(kept, x + at, n - at);
      }
      return 0;
    }
    codec.code(b, at, x + at, kept, count);
  }
  return 1;
}

}  // namespace cml

// The 4-bit value of one number and the scale of its block; equal to native/src/nibbles.cc. Knows no arrays.
#ifndef CML_NIBBLES
#define CML_NIBBLES
#include "common.cuh"

#define SMALLEST4 0x1.cp-124f         // 7 * 2^-126: below it a scale would not be a normal number
#define MOST_SCALE4 0x1.fffffep+124f  // FLT_MAX / 8: any nibble times it is finite

CML_FN float scale4_of(float most) {
  const float s = __fdiv_rn(most, 7.0f);
  return most < SMALLEST4 ? 0.0f : s > MOST_SCALE4 ? MOST_SCALE4 : s;
}

CML_FN int nibble_of(float v, float scale) {
  const float t = scale == 0.0f ? 0.0f : __fdiv_rn(v, scale);
  return __float2int_rn(t > 7.0f ? 7.0f : t < -7.0f ? -7.0f : t);
}

CML_FN float float_of_nibble(int whole, float scale) { return __fmul_rn(scale, static_cast<float>(whole)); }
CML_FN u8 byte_of_nibbles(int low, int high) { return static_cast<u8>((low & 15) | (high & 15) << 4); }

#endif

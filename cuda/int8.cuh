// The int8 of one number and the scale of its block; equal to native/src/int8.cc. Knows no arrays.
#ifndef CML_INT8
#define CML_INT8
#include "common.cuh"

#define SMALLEST 0x1.fcp-120f        // 127 * 2^-126: below it a scale would not be a normal number
#define MOST_SCALE 0x1.fffffep+120f  // FLT_MAX / 128: any int8 times it is finite

CML_FN float scale_of(float most) {
  const float s = __fdiv_rn(most, 127.0f);
  return most < SMALLEST ? 0.0f : s > MOST_SCALE ? MOST_SCALE : s;
}

CML_FN int quantum_of(float v, float scale) {
  const float t = scale == 0.0f ? 0.0f : __fdiv_rn(v, scale);
  return __float2int_rn(t > 127.0f ? 127.0f : t < -127.0f ? -127.0f : t);
}

CML_FN float float_of_quantum(int q, float scale) { return __fmul_rn(scale, static_cast<float>(q)); }

#endif

// What the blockwise quantisers share: measures of a block, bfloat16 scales, rounding, streams of codes. Knows no codes.
//
// A scale is rounded up, and cut so that any code times it is finite; below 2^-126 the block counts as zeros. Codes are a stream of
// bits, the lowest of a byte first. block is a multiple of 8, so that eight elements share a scale and begin at a byte.
#ifndef CML_QUANTISE
#define CML_QUANTISE
#include "half.cuh"

#define MOST16 0x7f7f        // the largest bfloat16 that is finite
#define LEAST 0x1p-126f

CML_FN u16 scale16(float s, u32 most) {
  if (!(s >= LEAST)) return 0;
  const u32 up = (__float_as_uint(s) + 0xffffu) >> 16;
  return static_cast<u16>(up > most ? most : up);
}

CML_FN u32 most_of(const float* x, const float* residual, i64 begin, i64 count) {
  u32 most = 0;
  for (i64 i = lane_of_warp(); i < count; i += 32) {
    const u32 a = magnitude(value_at(x, residual, begin + i));
    most = a > most ? a : most;
  }
  return warp_most(most);
}

#define CML_EACH_BLOCK(b) for (i64 b = thread_of_grid() / 32, step = threads_of_grid() / 32; b * block < n; b += step)

CML_FN int rounded_level(float v, float scale, float top) {
  if (scale == 0.0f) return 0;
  const float t = __fdiv_rn(v, scale);
  return __float2int_rn(t > top ? top : t < -top ? -top : t);
}

CML_FN void put_bits(u8* q, i64 i, int some, i64 bits, u64 stream) {
  q += i / 8 * bits;
  for (i64 byte = 0; 8 * byte < some * bits; ++byte) q[byte] = static_cast<u8>(stream >> (8 * byte));
}

CML_FN u64 get_bits(const u8* q, i64 i, int some, i64 bits) {
  u64 stream = 0;
  q += i / 8 * bits;
  for (i64 byte = 0; 8 * byte < some * bits; ++byte) stream |= static_cast<u64>(q[byte]) << (8 * byte);
  return stream;
}

// A thread takes eight elements. Nothing is done if *finite is 0.
#define CML_EACH_EIGHT(i, n) for (i64 i = 8 * thread_of_grid(), step = 8 * threads_of_grid(); i < (n); i += step)

#endif

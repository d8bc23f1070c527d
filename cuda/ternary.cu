// Three values, five elements a byte: -1, 0 and 1 times the scale of a block, by random numbers.
//
// Elements go in groups of 160, the last may have fewer; block is a multiple of 160. A group of c elements takes m = ceil(c / 5)
// bytes: byte j holds its elements j, j + m, ... as digits of weight 1, 3, 9, 27, 81; digit 2 means -1.
#include "quantise.cuh"

#define GROUP 160
#define DIGITS 5

// The scale is the largest |v|, or where clip > 0 at most clip times the block's root mean square.
CML_KERNEL ternary_measure(u16* scale, const float* x, const float* residual, i64 n, i64 block, double clip, i64* finite) {
  CML_EACH_BLOCK(b) {
    const i64 begin = b * block, count = least(block, n - begin);
    const u32 most = most_of(x, residual, begin, count);
    float size = __uint_as_float(most);
    if (clip > 0.0) {
      const float rms = __fdiv_rn(norm_of(x, residual, begin, count, most), __fsqrt_rn(static_cast<float>(count)));
      const float limit = __fmul_rn(static_cast<float>(clip), rms);
      size = limit < size ? limit : size;
    }
    if (lane_of_warp() != 0) continue;
    if (most >= CML_INF) *finite = 0;
    scale[b] = scale16(size, MOST16);
  }
}

struct Fives {
  i64 first, stride;  // elements first, first + stride, ...
  int some;
};

// The elements of one byte.
CML_FN Fives elements_of(i64 byte, i64 n) {
  const i64 group = byte / (GROUP / DIGITS), begin = group * GROUP, count = least(GROUP, n - begin);
  const i64 stride = (count + DIGITS - 1) / DIGITS, j = byte - group * (GROUP / DIGITS);
  return {begin + j, stride, static_cast<int>(least(DIGITS, (count - j + stride - 1) / stride))};
}

CML_KERNEL ternary_code(u8* q, const u16* scale, const float* x, float* residual, i64 n, i64 block, u64 key, u64 time,
                        const i64* finite) {
  if (*finite == 0) return;
  for (i64 byte = thread_of_grid(), step = threads_of_grid(); byte < (n + DIGITS - 1) / DIGITS; byte += step) {
    const Fives five = elements_of(byte, n);
    u32 digits = 0, weight = 1;
    for (int d = 0; d < five.some; ++d, weight *= 3) {
      const i64 i = five.first + d * five.stride;
      const float s = float_of_bfloat(scale[i / block]), v = value_at(x, residual, i);
      const int whole = whole_of(v, s, 1.0f, 1, philox(key, static_cast<u64>(i) / 4, time).at[i % 4]);
      digits += weight * static_cast<u32>(whole < 0 ? 2 : whole);
      if (residual) residual[i] = __fsub_rn(v, __fmul_rn(s, static_cast<float>(whole)));
    }
    q[byte] = static_cast<u8>(digits);
  }
}

CML_KERNEL ternary_decode(float* acc, const u8* q, const u16* scale, i64 n, i64 block, i64 assign) {
  for (i64 byte = thread_of_grid(), step = threads_of_grid(); byte < (n + DIGITS - 1) / DIGITS; byte += step) {
    const Fives five = elements_of(byte, n);
    u32 digits = q[byte];
    for (int d = 0; d < five.some; ++d, digits /= 3) {
      const i64 i = five.first + d * five.stride;
      const int whole = digits % 3 == 2 ? -1 : static_cast<int>(digits % 3);
      const float v = __fmul_rn(float_of_bfloat(scale[i / block]), static_cast<float>(whole));
      acc[i] = assign ? v : __fadd_rn(acc[i], v);
    }
  }
}

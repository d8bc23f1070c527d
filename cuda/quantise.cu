// Blockwise quantisers with bfloat16 scales: whole numbers of 2 to 8 bits, to the nearest or by random numbers, and signs.
//
// A scale is rounded up, and cut so that any code times it is finite; below 2^-126 the block counts as zeros. Codes are a stream of
// bits, the lowest of a byte first. block is a multiple of 8, so that eight elements share a scale and begin at a byte.
#include "half.cuh"
#include "philox.cuh"

#define MOST16 0x7f7f        // the largest bfloat16 that is finite
#define LEAST 0x1p-126f
#define SHRINK 0x1p-24f      // a block of up to 2^20 of the largest floats does not overflow in steps this small

CML_FN u16 scale16(float s, u32 most) {
  if (!(s >= LEAST)) return 0;
  const u32 up = (__float_as_uint(s) + 0xffffu) >> 16;
  return static_cast<u16>(up > most ? most : up);
}

// The sum of |v * factor| over a block, or of its square. Element i goes to lane i % 16, each lane adds in order, and the lanes
// are added as (j, j + 8), (j, j + 4), (j, j + 2), (0, 1): every backend does it so, and gets the same bits. In lane 0.
CML_FN float sum_of(const float* x, const float* residual, i64 begin, i64 count, float factor, bool squares) {
  float sum = 0.0f;
  if (lane_of_warp() < 16) {
    for (i64 i = lane_of_warp(); i < count; i += 16) {
      const float v = __fmul_rn(value_at(x, residual, begin + i), factor);
      sum = __fadd_rn(sum, squares ? __fmul_rn(v, v) : __uint_as_float(magnitude(v)));
    }
  }
  for (u32 d = 8; d > 0; d >>= 1) sum = __fadd_rn(sum, __shfl_down_sync(CML_ALL, sum, d));
  return sum;
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

// Scales of `linear_code`, a warp for each block. *finite becomes 0 if not all v are.
CML_KERNEL linear_measure(u16* scale, const float* x, const float* residual, i64 n, i64 block, i64 bits, i64 euclidean, i64* finite) {
  CML_EACH_BLOCK(b) {
    const i64 begin = b * block, count = least(block, n - begin);
    const u32 most = most_of(x, residual, begin, count);
    float size = __uint_as_float(most);
    if (euclidean && most < CML_INF) {  // by a power of two next to the largest, so that no square overflows
      const u32 exponent = most >> 23, e = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
      const float sum = sum_of(x, residual, begin, count, __uint_as_float((254 - e) << 23), true);
      size = __fmul_rn(__fsqrt_rn(sum), __uint_as_float(e << 23));
    }
    if (lane_of_warp() != 0) continue;
    if (most >= CML_INF) *finite = 0;
    scale[b] = scale16(__fdiv_rn(size, static_cast<float>((1 << (bits - 1)) - 1)), static_cast<u32>(MOST16 - ((bits - 1) << 7)));
  }
}

// Scales of `onebit_code`: means of |v|.
CML_KERNEL onebit_measure(u16* scale, const float* x, const float* residual, i64 n, i64 block, i64* finite) {
  CML_EACH_BLOCK(b) {
    const i64 begin = b * block, count = least(block, n - begin);
    const float size = static_cast<float>(count);
    float mean = __fdiv_rn(__shfl_sync(CML_ALL, sum_of(x, residual, begin, count, 1.0f, false), 0), size);
    if (!is_finite(mean)) {
      if (most_of(x, residual, begin, count) >= CML_INF) *finite = 0;
      mean = __fdiv_rn(__fdiv_rn(sum_of(x, residual, begin, count, SHRINK, false), size), SHRINK);
    }
    if (lane_of_warp() == 0) scale[b] = scale16(mean, MOST16);
  }
}

CML_FN int whole_of(float v, float scale, float top, i64 dither, u32 word) {
  if (scale == 0.0f) return 0;
  const float t = __fdiv_rn(v, scale), held = t > top ? top : t < -top ? -top : t;
  if (!dither) return __float2int_rn(held);
  const float down = floorf(held);
  return static_cast<int>(down) + (uniform(word) < __fsub_rn(held, down) ? 1 : 0);
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

CML_KERNEL linear_code(u8* q, const u16* scale, const float* x, float* residual, i64 n, i64 block, i64 bits, i64 dither, u64 key,
                       u64 time, const i64* finite) {
  if (*finite == 0) return;
  const float top = static_cast<float>((1 << (bits - 1)) - 1);
  CML_EACH_EIGHT(i, n) {
    const float s = float_of_bfloat(scale[i / block]);
    const int some = static_cast<int>(least(8, n - i));
    Words words = {{0, 0, 0, 0}};
    u64 stream = 0;
    for (int j = 0; j < some; ++j) {
      if (dither && j % 4 == 0) words = philox(key, static_cast<u64>(i + j) / 4, time);
      const float v = value_at(x, residual, i + j);
      const int whole = whole_of(v, s, top, dither, words.at[j % 4]);
      stream |= (static_cast<u64>(whole) & ((1ull << bits) - 1)) << (j * bits);
      if (residual) residual[i + j] = __fsub_rn(v, __fmul_rn(s, static_cast<float>(whole)));
    }
    put_bits(q, i, some, bits, stream);
  }
}

CML_KERNEL linear_decode(float* acc, const u8* q, const u16* scale, i64 n, i64 block, i64 bits, i64 assign) {
  CML_EACH_EIGHT(i, n) {
    const float s = float_of_bfloat(scale[i / block]);
    const int some = static_cast<int>(least(8, n - i));
    const u64 stream = get_bits(q, i, some, bits);
    for (int j = 0; j < some; ++j) {
      const int code = static_cast<int>(stream >> (j * bits) & ((1ull << bits) - 1));
      const float v = __fmul_rn(s, static_cast<float>(code >> (bits - 1) ? code - (1 << bits) : code));
      acc[i + j] = assign ? v : __fadd_rn(acc[i + j], v);
    }
  }
}

CML_FN float signed_scale(float scale, bool negative) { return negative ? -scale : scale; }

CML_KERNEL onebit_code(u8* q, const u16* scale, const float* x, float* residual, i64 n, i64 block, const i64* finite) {
  if (*finite == 0) return;
  CML_EACH_EIGHT(i, n) {
    const float s = float_of_bfloat(scale[i / block]);
    const int some = static_cast<int>(least(8, n - i));
    u64 stream = 0;
    for (int j = 0; j < some; ++j) {
      const float v = value_at(x, residual, i + j);
      const bool negative = __float_as_uint(v) >> 31;
      stream |= static_cast<u64>(negative) << j;
      if (residual) residual[i + j] = __fsub_rn(v, signed_scale(s, negative));
    }
    put_bits(q, i, some, 1, stream);
  }
}

CML_KERNEL onebit_decode(float* acc, const u8* q, const u16* scale, i64 n, i64 block, i64 assign) {
  CML_EACH_EIGHT(i, n) {
    const float s = float_of_bfloat(scale[i / block]);
    const int some = static_cast<int>(least(8, n - i));
    const u64 stream = get_bits(q, i, some, 1);
    for (int j = 0; j < some; ++j) {
      const float v = signed_scale(s, stream >> j & 1);
      acc[i + j] = assign ? v : __fadd_rn(acc[i + j], v);
    }
  }
}

// Whole numbers of 2 to 8 bits, to the nearest or by random numbers, and signs, in blocks with a bfloat16 scale each.
#include "quantise.cuh"

// Scales of `linear_code`, a warp for each block. *finite becomes 0 if not all v are.
CML_KERNEL linear_measure(u16* scale, const float* x, const float* residual, i64 n, i64 block, i64 bits, i64 euclidean, i64* finite) {
  CML_EACH_BLOCK(b) {
    const i64 begin = b * block, count = least(block, n - begin);
    const u32 most = most_of(x, residual, begin, count);
    const float size = euclidean ? norm_of(x, residual, begin, count, most) : __uint_as_float(most);
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

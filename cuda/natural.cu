// Powers of two with a sign, in blocks that share a base; v goes to one of its two neighbours so that the mean is v.
#include "quantise.cuh"

// Level k of `bits` stands for 2^(base + k - 127), level 0 for 0. The uppermost is the least that reaches the largest |v|.
CML_KERNEL natural_measure(u8* base, const float* x, const float* residual, i64 n, i64 block, i64 bits, i64* finite) {
  CML_EACH_BLOCK(b) {
    const i64 begin = b * block;
    const u32 most = most_of(x, residual, begin, least(block, n - begin));
    if (lane_of_warp() != 0) continue;
    if (most >= CML_INF) *finite = 0;
    const i64 reach = least(254, (most + (1u << 23) - 1) >> 23), levels = (1 << (bits - 1)) - 1;
    base[b] = static_cast<u8>(reach > levels ? reach - levels : 0);
  }
}

CML_FN float power_of(u32 level, bool negative, u32 first) {
  return __uint_as_float(level == 0 ? 0 : (negative ? ~CML_ABS : 0) | (first + level) << 23);
}

CML_FN u32 level_of(float v, u32 first, u32 levels, u32 word) {
  const u32 a = magnitude(v);
  if (a < (first + 1) << 23) return uniform(word) < __fmul_rn(__uint_as_float(a), __uint_as_float((253 - first) << 23)) ? 1 : 0;
  const u32 carried = ((a + (word >> 9)) >> 23) - first;
  return carried < levels ? carried : levels;
}

CML_KERNEL natural_code(u8* q, const u8* base, const float* x, float* residual, i64 n, i64 block, i64 bits, u64 key, u64 time,
                        const i64* finite) {
  if (*finite == 0) return;
  const u32 levels = (1u << (bits - 1)) - 1;
  CML_EACH_EIGHT(i, n) {
    const u32 first = base[i / block];
    const int some = static_cast<int>(least(8, n - i));
    Words words = {{0, 0, 0, 0}};
    u64 stream = 0;
    for (int j = 0; j < some; ++j) {
      if (j % 4 == 0) words = philox(key, static_cast<u64>(i + j) / 4, time);
      const float v = value_at(x, residual, i + j);
      const u32 level = level_of(v, first, levels, words.at[j % 4]);
      const bool negative = level > 0 && __float_as_uint(v) >> 31;
      stream |= static_cast<u64>(level | (negative ? levels + 1 : 0)) << (j * bits);
      if (residual) residual[i + j] = __fsub_rn(v, power_of(level, negative, first));
    }
    put_bits(q, i, some, bits, stream);
  }
}

CML_KERNEL natural_decode(float* acc, const u8* q, const u8* base, i64 n, i64 block, i64 bits, i64 assign) {
  const u32 levels = (1u << (bits - 1)) - 1;
  CML_EACH_EIGHT(i, n) {
    const int some = static_cast<int>(least(8, n - i));
    const u64 stream = get_bits(q, i, some, bits);
    for (int j = 0; j < some; ++j) {
      const u32 code = static_cast<u32>(stream >> (j * bits)) & (2 * levels + 1);
      const float v = power_of(code & levels, code > levels, base[i / block]);
      acc[i + j] = assign ? v : __fadd_rn(acc[i + j], v);
    }
  }
}

// Whole numbers of 2 to 8 bits in blocks with a bfloat16 scale each.
#include "quantise.cuh"

// Scales of `linear_code`, a warp for each block. *finite becomes 0 if not all v are.
CML_KERNEL linear_measure(u16* scale, const float* x, const float* residual, i64 n, i64 block, i64 bits, i64* finite) {
  CML_EACH_BLOCK(b) {
    const i64 begin = b * block, count = least(block, n - begin);
    const u32 most = most_of(x, residual, begin, count);
    if (lane_of_warp() != 0) continue;
    if (most >= CML_INF) *finite = 0;
    scale[b] = scale16(__fdiv_rn(__uint_as_float(most), static_cast<float>((1 << (bits - 1)) - 1)), static_cast<u32>(MOST16 - ((bits - 1) << 7)));
  }
}

CML_KERNEL linear_code(u8* q, const u16* scale, const float* x, float* residual, i64 n, i64 block, i64 bits,
                       const i64* finite) {
  if (*finite == 0) return;
  const float top = static_cast<float>((1 << (bits - 1)) - 1);
  CML_EACH_EIGHT(i, n) {
    const float s = float_of_bfloat(scale[i / block]);
    const int some = static_cast<int>(least(8, n - i));
    u64 stream = 0;
    for (int j = 0; j < some; ++j) {
      const float v = value_at(x, residual, i + j);
      const int whole = rounded_level(v, s, top);
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

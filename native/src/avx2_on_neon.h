// The words of AVX2 that the vector bodies are written in, over pairs of NEON registers, so that one text serves both CPUs and
// their bits agree. Only what the bodies use, and only for the operands they have; where that is less than the instruction, it
// says so. Knows no kernels.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace cml {

using __m128 = float32x4_t;
using __m128i = int32x4_t;
struct __m256 {
  float32x4_t lo, hi;
};
struct __m256i {
  int32x4_t lo, hi;
};

enum { _CMP_LT_OQ, _CMP_GE_OQ, _CMP_UNORD_Q, _MM_FROUND_TO_NEAREST_INT };

namespace neon {

inline int32x4_t i32(int32x4_t v) { return v; }
inline int32x4_t i32(float32x4_t v) { return vreinterpretq_s32_f32(v); }
inline int32x4_t i32(uint32x4_t v) { return vreinterpretq_s32_u32(v); }
inline int32x4_t i32(int64x2_t v) { return vreinterpretq_s32_s64(v); }
inline int32x4_t i32(uint64x2_t v) { return vreinterpretq_s32_u64(v); }
inline int32x4_t i32(int16x8_t v) { return vreinterpretq_s32_s16(v); }
inline int32x4_t i32(uint16x8_t v) { return vreinterpretq_s32_u16(v); }
inline int32x4_t i32(int8x16_t v) { return vreinterpretq_s32_s8(v); }
inline int32x4_t i32(uint8x16_t v) { return vreinterpretq_s32_u8(v); }
inline float32x4_t f32(int32x4_t v) { return vreinterpretq_f32_s32(v); }
inline uint32x4_t u32(int32x4_t v) { return vreinterpretq_u32_s32(v); }
inline int64x2_t i64(int32x4_t v) { return vreinterpretq_s64_s32(v); }
inline uint64x2_t u64(int32x4_t v) { return vreinterpretq_u64_s32(v); }
inline int16x8_t i16(int32x4_t v) { return vreinterpretq_s16_s32(v); }
inline uint16x8_t u16(int32x4_t v) { return vreinterpretq_u16_s32(v); }
inline int8x16_t i8(int32x4_t v) { return vreinterpretq_s8_s32(v); }
inline uint8x16_t u8(int32x4_t v) { return vreinterpretq_u8_s32(v); }

// By bytes: no pointer needs any alignment.
inline int32x4_t get(const void* p) { return i32(vld1q_u8(static_cast<const uint8_t*>(p))); }
inline void put(void* p, int32x4_t v) { vst1q_u8(static_cast<uint8_t*>(p), u8(v)); }

inline uint32x4_t compare(float32x4_t a, float32x4_t b, int how) {
  if (how == _CMP_LT_OQ) return vcltq_f32(a, b);
  if (how == _CMP_GE_OQ) return vcgeq_f32(a, b);
  return vmvnq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b)));
}

// The second operand where neither is smaller, as on x86.
inline float32x4_t least(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline float32x4_t most(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }

inline int32x4_t products(int32x4_t a, int32x4_t b) { return i32(vmull_u32(vmovn_u64(u64(a)), vmovn_u64(u64(b)))); }

// Sums of pairs of products, of unsigned with signed bytes, without saturation: for sums below 2^15.
inline int32x4_t pairs8(int32x4_t a, int32x4_t b) {
  const int16x8_t low = i16(i32(vandq_u16(u16(a), vdupq_n_u16(255)))), high = i16(i32(u16(a) >> 8));
  return i32(vmlaq_s16(vmulq_s16(low, (i16(b) << 8) >> 8), high, i16(b) >> 8));
}
inline int32x4_t pairs16(int32x4_t a, int32x4_t b) { return vmlaq_s32(vmulq_s32((a << 16) >> 16, (b << 16) >> 16), a >> 16, b >> 16); }

inline int32x4_t upper16(int32x4_t a, int32x4_t b) {
  const uint32x4_t low = vmull_u16(vget_low_u16(u16(a)), vget_low_u16(u16(b))), high = vmull_high_u16(u16(a), u16(b));
  return i32(vuzp2q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high)));
}

// Indices are below 16, or have their uppermost bit set and give 0.
inline int32x4_t pick8(int32x4_t v, int32x4_t order) { return i32(vqtbl1q_u8(u8(v), u8(order))); }
inline float32x4_t pick32(float32x4_t v, int32x4_t order) {
  const int32x4_t bytes = vandq_s32(order, vdupq_n_s32(3)) * 0x04040404 + 0x03020100;
  return f32(pick8(i32(v), bytes));
}

inline int32x4_t lanes(int mask) {
  return int32x4_t{mask & 1 ? -1 : 0, mask & 2 ? -1 : 0, mask & 4 ? -1 : 0, mask & 8 ? -1 : 0};
}
inline int32x4_t blend(int32x4_t a, int32x4_t b, int mask) { return vbslq_s32(u32(lanes(mask)), b, a); }

inline int bytes_set(int32x4_t v) {
  const uint8x16_t bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const uint8x16_t set = vandq_u8(vreinterpretq_u8_s8(i8(v) >> 7), bit);
  return vaddv_u8(vget_low_u8(set)) | vaddv_u8(vget_high_u8(set)) << 8;
}

}  // namespace neon

// ---- memory and constants

inline __m256 _mm256_loadu_ps(const float* p) { return {neon::f32(neon::get(p)), neon::f32(neon::get(p + 4))}; }
inline __m256i _mm256_loadu_si256(const __m256i* p) {
  return {neon::get(p), neon::get(reinterpret_cast<const char*>(p) + 16)};
}
inline __m128i _mm_loadu_si128(const __m128i* p) { return neon::get(p); }
inline __m128i _mm_loadl_epi64(const __m128i* p) {
  return neon::i32(vcombine_u8(vld1_u8(reinterpret_cast<const uint8_t*>(p)), vdup_n_u8(0)));
}
inline void _mm256_storeu_ps(float* p, __m256 v) {
  neon::put(p, neon::i32(v.lo));
  neon::put(p + 4, neon::i32(v.hi));
}
inline void _mm256_storeu_si256(__m256i* p, __m256i v) {
  neon::put(p, v.lo);
  neon::put(reinterpret_cast<char*>(p) + 16, v.hi);
}
inline void _mm_storeu_si128(__m128i* p, __m128i v) { neon::put(p, v); }
inline void _mm_storel_epi64(__m128i* p, __m128i v) { vst1_u8(reinterpret_cast<uint8_t*>(p), vget_low_u8(neon::u8(v))); }

inline __m256 _mm256_set1_ps(float f) { return {vdupq_n_f32(f), vdupq_n_f32(f)}; }
inline __m256i _mm256_set1_epi8(char b) { return {neon::i32(vdupq_n_s8(b)), neon::i32(vdupq_n_s8(b))}; }
inline __m256i _mm256_set1_epi16(int16_t h) { return {neon::i32(vdupq_n_s16(h)), neon::i32(vdupq_n_s16(h))}; }
inline __m256i _mm256_set1_epi32(int i) { return {vdupq_n_s32(i), vdupq_n_s32(i)}; }
inline __m256i _mm256_set1_epi64x(int64_t i) { return {neon::i32(vdupq_n_s64(i)), neon::i32(vdupq_n_s64(i))}; }
inline __m128i _mm_set1_epi16(int16_t h) { return neon::i32(vdupq_n_s16(h)); }
inline __m128i _mm_set1_epi32(int i) { return vdupq_n_s32(i); }
inline __m256 _mm256_setzero_ps() { return _mm256_set1_ps(0.0f); }
inline __m256i _mm256_setzero_si256() { return _mm256_set1_epi32(0); }
inline __m128i _mm_setzero_si128() { return vdupq_n_s32(0); }
inline __m256 _mm256_setr_ps(float a, float b, float c, float d, float e, float f, float g, float h) {
  return {float32x4_t{a, b, c, d}, float32x4_t{e, f, g, h}};
}
inline __m256i _mm256_setr_epi32(int a, int b, int c, int d, int e, int f, int g, int h) {
  return {int32x4_t{a, b, c, d}, int32x4_t{e, f, g, h}};
}
inline __m256i _mm256_setr_epi64x(int64_t a, int64_t b, int64_t c, int64_t d) {
  return {neon::i32(int64x2_t{a, b}), neon::i32(int64x2_t{c, d})};
}
template <class... Bytes>
inline __m128i _mm_setr_epi8(Bytes... bytes) {
  return neon::i32(int8x16_t{static_cast<int8_t>(bytes)...});
}
inline __m256i _mm256_set_m128i(__m128i hi, __m128i lo) { return {lo, hi}; }
inline __m128i _mm_cvtsi32_si128(int i) { return int32x4_t{i, 0, 0, 0}; }
inline int _mm_cvtsi128_si32(__m128i v) { return v[0]; }
inline float _mm_cvtss_f32(__m128 v) { return v[0]; }
inline int _mm_extract_epi32(__m128i v, int lane) { return v[lane]; }
inline __m128i _mm_insert_epi32(__m128i v, int i, int lane) {
  v[lane] = i;
  return v;
}

// ---- the same bits under another name, and halves

inline __m256i _mm256_castps_si256(__m256 v) { return {neon::i32(v.lo), neon::i32(v.hi)}; }
inline __m256 _mm256_castsi256_ps(__m256i v) { return {neon::f32(v.lo), neon::f32(v.hi)}; }
inline __m128 _mm256_castps256_ps128(__m256 v) { return v.lo; }
inline __m128i _mm256_castsi256_si128(__m256i v) { return v.lo; }
inline __m128 _mm256_extractf128_ps(__m256 v, int half) { return half ? v.hi : v.lo; }
inline __m128i _mm256_extracti128_si256(__m256i v, int half) { return half ? v.hi : v.lo; }

// ---- operations on both halves alike

#define CML_FLOATS(name, half) \
  inline __m256 name(__m256 a, __m256 b) { return {half(a.lo, b.lo), half(a.hi, b.hi)}; }
CML_FLOATS(_mm256_add_ps, vaddq_f32)
CML_FLOATS(_mm256_sub_ps, vsubq_f32)
CML_FLOATS(_mm256_mul_ps, vmulq_f32)
CML_FLOATS(_mm256_div_ps, vdivq_f32)
CML_FLOATS(_mm256_min_ps, neon::least)
CML_FLOATS(_mm256_max_ps, neon::most)
#undef CML_FLOATS
inline __m256 _mm256_sqrt_ps(__m256 v) { return {vsqrtq_f32(v.lo), vsqrtq_f32(v.hi)}; }

#define CML_INTEGERS(name, type, expression)                       \
  inline __m256i name(__m256i x, __m256i y) {                      \
    const auto half = [](int32x4_t v, int32x4_t w) {               \
      const auto a = neon::type(v), b = neon::type(w);             \
      return neon::i32(expression);                                \
    };                                                             \
    return {half(x.lo, y.lo), half(x.hi, y.hi)};                   \
  }
CML_INTEGERS(_mm256_and_si256, u32, a & b)
CML_INTEGERS(_mm256_andnot_si256, u32, ~a & b)
CML_INTEGERS(_mm256_or_si256, u32, a | b)
CML_INTEGERS(_mm256_xor_si256, u32, a ^ b)
CML_INTEGERS(_mm256_add_epi8, i8, vaddq_s8(a, b))
CML_INTEGERS(_mm256_add_epi16, i16, vaddq_s16(a, b))
CML_INTEGERS(_mm256_add_epi32, u32, vaddq_u32(a, b))
CML_INTEGERS(_mm256_add_epi64, u64, vaddq_u64(a, b))
CML_INTEGERS(_mm256_sub_epi16, i16, vsubq_s16(a, b))
CML_INTEGERS(_mm256_sub_epi32, u32, vsubq_u32(a, b))
CML_INTEGERS(_mm256_max_epi8, i8, vmaxq_s8(a, b))
CML_INTEGERS(_mm256_unpacklo_epi64, i64, vzip1q_s64(a, b))
CML_INTEGERS(_mm256_unpackhi_epi64, i64, vzip2q_s64(a, b))
#undef CML_INTEGERS

#define CML_WORDS(name, half) \
  inline __m256i name(__m256i a, __m256i b) { return {half(a.lo, b.lo), half(a.hi, b.hi)}; }
CML_WORDS(_mm256_max_epi32, vmaxq_s32)
CML_WORDS(_mm256_min_epi32, vminq_s32)
CML_WORDS(_mm256_sllv_epi32, vshlq_s32)  // shifts below 32
CML_WORDS(_mm256_mul_epu32, neon::products)
CML_WORDS(_mm256_maddubs_epi16, neon::pairs8)
CML_WORDS(_mm256_madd_epi16, neon::pairs16)
CML_WORDS(_mm256_mulhi_epu16, neon::upper16)
CML_WORDS(_mm256_shuffle_epi8, neon::pick8)
#undef CML_WORDS

inline __m256 _mm256_and_ps(__m256 a, __m256 b) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
inline __m256 _mm256_andnot_ps(__m256 a, __m256 b) {
  return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}
inline __m256 _mm256_or_ps(__m256 a, __m256 b) {
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_castps_si256(a), _mm256_castps_si256(b)));
}

// Shifts by a count below the width of a lane.
inline __m256i _mm256_slli_epi32(__m256i v, int n) { return {v.lo << n, v.hi << n}; }
inline __m256i _mm256_srai_epi32(__m256i v, int n) { return {v.lo >> n, v.hi >> n}; }
inline __m256i _mm256_srli_epi32(__m256i v, int n) { return {neon::i32(neon::u32(v.lo) >> n), neon::i32(neon::u32(v.hi) >> n)}; }
inline __m256i _mm256_slli_epi64(__m256i v, int n) {
  const auto by = static_cast<uint64_t>(n);
  return {neon::i32(neon::u64(v.lo) << by), neon::i32(neon::u64(v.hi) << by)};
}
inline __m256i _mm256_srli_epi64(__m256i v, int n) {
  const auto by = static_cast<uint64_t>(n);
  return {neon::i32(neon::u64(v.lo) >> by), neon::i32(neon::u64(v.hi) >> by)};
}
inline __m256i _mm256_sra_epi32(__m256i v, __m128i n) { return _mm256_srai_epi32(v, n[0]); }
inline __m256i _mm256_srl_epi64(__m256i v, __m128i n) { return _mm256_srli_epi64(v, n[0]); }

inline __m256 _mm256_cmp_ps(__m256 a, __m256 b, int how) {
  return {neon::f32(neon::i32(neon::compare(a.lo, b.lo, how))), neon::f32(neon::i32(neon::compare(a.hi, b.hi, how)))};
}
inline __m256i _mm256_cmpgt_epi32(__m256i a, __m256i b) {
  return {neon::i32(vcgtq_s32(a.lo, b.lo)), neon::i32(vcgtq_s32(a.hi, b.hi))};
}
inline __m256i _mm256_blend_epi32(__m256i a, __m256i b, int mask) {
  return {neon::blend(a.lo, b.lo, mask), neon::blend(a.hi, b.hi, mask >> 4)};
}
// For masks of whole bytes, as comparisons give.
inline __m256i _mm256_blendv_epi8(__m256i a, __m256i b, __m256i mask) {
  return {vbslq_s32(neon::u32(mask.lo), b.lo, a.lo), vbslq_s32(neon::u32(mask.hi), b.hi, a.hi)};
}

// ---- conversions; float to integer within the range of int32

inline __m256 _mm256_floor_ps(__m256 v) { return {vrndmq_f32(v.lo), vrndmq_f32(v.hi)}; }
inline __m256 _mm256_cvtepi32_ps(__m256i v) { return {vcvtq_f32_s32(v.lo), vcvtq_f32_s32(v.hi)}; }
inline __m256i _mm256_cvtps_epi32(__m256 v) { return {vcvtnq_s32_f32(v.lo), vcvtnq_s32_f32(v.hi)}; }
inline __m256i _mm256_cvtepu8_epi16(__m128i v) {
  return {neon::i32(vmovl_u8(vget_low_u8(neon::u8(v)))), neon::i32(vmovl_high_u8(neon::u8(v)))};
}
inline __m256i _mm256_cvtepi16_epi32(__m128i v) { return {vmovl_s16(vget_low_s16(neon::i16(v))), vmovl_high_s16(neon::i16(v))}; }
inline __m256i _mm256_cvtepu16_epi32(__m128i v) {
  return {neon::i32(vmovl_u16(vget_low_u16(neon::u16(v)))), neon::i32(vmovl_high_u16(neon::u16(v)))};
}
inline __m256i _mm256_cvtepi8_epi32(__m128i v) { return _mm256_cvtepi16_epi32(neon::i32(vmovl_s8(vget_low_s8(neon::i8(v))))); }
inline __m256 _mm256_cvtph_ps(__m128i v) {
  const float16x8_t h = vreinterpretq_f16_s32(v);
  return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
inline __m128i _mm256_cvtps_ph(__m256 v, int) { return vreinterpretq_s32_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.lo), v.hi)); }

// ---- across lanes

inline __m256i _mm256_permute2x128_si256(__m256i a, __m256i b, int how) {
  return how == 0x20 ? __m256i{a.lo, b.lo} : __m256i{a.hi, b.hi};  // or 0x31
}
inline __m256 _mm256_permutevar_ps(__m256 v, __m256i order) {
  return {neon::pick32(v.lo, order.lo), neon::pick32(v.hi, order.hi)};
}
inline int _mm_movemask_epi8(__m128i v) { return neon::bytes_set(v); }
inline int _mm256_movemask_epi8(__m256i v) { return neon::bytes_set(v.lo) | neon::bytes_set(v.hi) << 16; }
inline int _mm256_movemask_ps(__m256 v) {
  const int32x4_t first = {0, 1, 2, 3}, second = {4, 5, 6, 7};
  const uint32x4_t low = neon::u32(neon::i32(v.lo)) >> 31, high = neon::u32(neon::i32(v.hi)) >> 31;
  return static_cast<int>(vaddvq_u32(vorrq_u32(vshlq_u32(low, first), vshlq_u32(high, second))));
}
inline int _mm256_testz_si256(__m256i a, __m256i b) {
  return vmaxvq_u32(neon::u32(vorrq_s32(vandq_s32(a.lo, b.lo), vandq_s32(a.hi, b.hi)))) == 0;
}

// ---- halves

inline __m128 _mm_add_ps(__m128 a, __m128 b) { return vaddq_f32(a, b); }
inline __m128 _mm_add_ss(__m128 a, __m128 b) {
  a[0] += b[0];
  return a;
}
inline __m128 _mm_movehl_ps(__m128 a, __m128 b) { return float32x4_t{b[2], b[3], a[2], a[3]}; }
inline __m128 _mm_shuffle_ps(__m128 a, __m128 b, int how) {
  return float32x4_t{a[how & 3], a[how >> 2 & 3], b[how >> 4 & 3], b[how >> 6 & 3]};
}
inline __m128i _mm_shuffle_epi32(__m128i v, int how) {
  return int32x4_t{v[how & 3], v[how >> 2 & 3], v[how >> 4 & 3], v[how >> 6 & 3]};
}
inline __m128i _mm_shuffle_epi8(__m128i v, __m128i order) { return neon::pick8(v, order); }
inline __m128i _mm_slli_si128(__m128i v, int n) {
  const uint8x16_t place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return neon::i32(vqtbl1q_u8(neon::u8(v), vsubq_u8(place, vdupq_n_u8(static_cast<uint8_t>(n)))));
}
inline __m128i _mm_and_si128(__m128i a, __m128i b) { return vandq_s32(a, b); }
inline __m128i _mm_or_si128(__m128i a, __m128i b) { return vorrq_s32(a, b); }
inline __m128i _mm_max_epi16(__m128i a, __m128i b) { return neon::i32(vmaxq_s16(neon::i16(a), neon::i16(b))); }
inline __m128i _mm_max_epi32(__m128i a, __m128i b) { return vmaxq_s32(a, b); }
inline __m128i _mm_cmpgt_epi16(__m128i a, __m128i b) { return neon::i32(vcgtq_s16(neon::i16(a), neon::i16(b))); }
inline __m128i _mm_packs_epi32(__m128i a, __m128i b) { return neon::i32(vcombine_s16(vqmovn_s32(a), vqmovn_s32(b))); }
inline __m128i _mm_packus_epi32(__m128i a, __m128i b) { return neon::i32(vcombine_u16(vqmovun_s32(a), vqmovun_s32(b))); }
inline __m128i _mm_packs_epi16(__m128i a, __m128i b) {
  return neon::i32(vcombine_s8(vqmovn_s16(neon::i16(a)), vqmovn_s16(neon::i16(b))));
}

inline uint32_t _tzcnt_u32(uint32_t x) { return x ? static_cast<uint32_t>(__builtin_ctz(x)) : 32; }
inline uint64_t _tzcnt_u64(uint64_t x) { return x ? static_cast<uint64_t>(__builtin_ctzll(x)) : 64; }

}  // namespace cml

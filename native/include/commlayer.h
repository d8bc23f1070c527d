/* commlayer native core: the contract of every kernel.
 *
 * Rules that hold for all of them:
 *   - plain C ABI; nothing allocates, throws, locks, logs or keeps globals (but the CPU dispatch, set once);
 *   - memory is the caller's; sizes are counts of elements unless the name says nbytes;
 *   - no pointer needs any alignment, so that every array may lie inside a payload; the machine is little endian;
 *   - arrays of one call do not overlap unless a contract says so;
 *   - a count or size is returned >= 0, an error as a negative cml_error; after an error no output was written
 *     unless a contract says so;
 *   - where vectors pay there is an AVX2 body, chosen at run time, and a portable twin with the same results bit for bit
 *     (cml_force_portable selects it, for tests); each has a torch twin in commlayer/compressors/reference.py;
 *   - a product is rounded before it is added to anything (no fused multiply-add); which NaN a NaN becomes is open.
 */
#ifndef COMMLAYER_H
#define COMMLAYER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum cml_error {
  CML_OK = 0,
  CML_ERR_CAPACITY = -1,  /* destination too small */
  CML_ERR_CORRUPT = -2,   /* source bytes break the format */
  CML_ERR_ARGUMENT = -3,  /* an argument outside its contract */
} cml_error;

const char* cml_error_name(int64_t code);

/* 1 forces the portable bodies, 0 restores the choice by CPU. Returns the former setting. */
int cml_force_portable(int on);
/* "avx2" or "portable". */
const char* cml_isa(void);

/* ---- checksums ---- */

/* CRC-32C (Castagnoli) of nbytes bytes, continuing from crc (0 to begin). crc32c("123456789") = 0xE3069283. */
uint32_t cml_crc32c(uint32_t crc, const void* data, size_t nbytes);

/* ---- sums: acc[i] += w * x[i] for i < n; w == 1 adds exactly x ---- */

void cml_add_f32(float* acc, const float* x, int64_t n, float w);
void cml_add_f16(float* acc, const uint16_t* x, int64_t n, float w);
void cml_add_bf16(float* acc, const uint16_t* x, int64_t n, float w);

/* ---- casts; round to nearest even; NaN stays NaN, float16 overflow becomes infinity ----
 * Those to 16 bits return 1 if all results are finite, else 0 (they still write all).
 * A NaN keeps its sign and the upper bits of its payload and becomes quiet. */

int64_t cml_f32_to_f16(uint16_t* dst, const float* src, int64_t n);
int64_t cml_f32_to_bf16(uint16_t* dst, const float* src, int64_t n);
void cml_f16_to_f32(float* dst, const uint16_t* src, int64_t n);
void cml_bf16_to_f32(float* dst, const uint16_t* src, int64_t n);
/* 1 if every x[i] (+ residual[i], if residual != NULL) is finite, else 0. */
int64_t cml_all_finite(const float* x, const float* residual, int64_t n);

/* ---- int8, blockwise: block b covers x[b*block .. min(n, (b+1)*block)) ----
 * scale[b] = min(max|x| / 127, FLT_MAX / 128), so that no q, not even -128, decodes to infinity;
 * q[i] = round-half-even(x[i] / scale[b]), cut to [-127, 127].
 * Where max|x| < 127 * 2^-126 the scale would not be a normal number: the block counts as zeros, scale[b] = 0, q = 0.
 * If residual != NULL: v = x[i] + residual[i] is coded and residual[i] = v - scale * q is written back (one pass per block).
 * Returns 1 if all v are finite; 0 if not: then q and residual are as they were, scale holds anything. */
int64_t cml_int8_encode(int8_t* q, float* scale, const float* x, float* residual, int64_t n, int64_t block);
/* acc[i] += scale[b] * q[i]; with assign != 0: acc[i] = scale[b] * q[i]. */
void cml_int8_decode(float* acc, const int8_t* q, const float* scale, int64_t n, int64_t block, int assign);

/* ---- threshold selection: one pass over gradient and residual ----
 * For every i < n: v = g[i] + residual[i] (residual may be NULL: v = g[i], nothing is written back).
 * |v| >= threshold is selected: idx gets i, val gets v, residual[i] = 0. Else residual[i] = v.
 * The scan begins at `from` and wraps, so that what does not fit into cap is not always the tail; when cap entries are
 * selected the rest only updates the residual. idx comes out strictly increasing (the two runs are rotated in place).
 * A non-finite v is never selected: it leaves residual[i] as it was and clears *finite (1 otherwise).
 * Entries of idx and val past the number returned may be overwritten.
 * *overflow counts entries that passed the threshold but did not fit. Returns the number selected.
 * threshold >= 2^-126 (not NaN), judged by its bits: below it zeros would pass where denormals are flushed.
 * 0 <= from < n, or from == n == 0; n < 2^32; cap >= 0. */
int64_t cml_select(const float* g, float* residual, int64_t n, float threshold, int64_t from,
                   uint32_t* idx, float* val, int64_t cap, int64_t* overflow, int32_t* finite);
/* |g + residual| of `count` elements spread evenly over n (element (offset + floor(j*n/count)) mod n for sample j) to out,
 * finite or not. n, count < 2^32, offset >= 0; n == 0 gives zeros. */
void cml_sample_abs(const float* g, const float* residual, int64_t n, int64_t offset, int64_t count, float* out);

/* ---- sparse: idx strictly increasing, every idx < n ---- */

/* acc[idx[j]] += val[j], in the order of j. Checks all of idx first: CML_ERR_CORRUPT leaves acc as it was. Returns k. */
int64_t cml_scatter_add(float* acc, int64_t n, const uint32_t* idx, const float* val, int64_t k);
/* The same with values scale[j / block] * q[j]. */
int64_t cml_scatter_add_int8(float* acc, int64_t n, const uint32_t* idx, const int8_t* q, const float* scale,
                             int64_t k, int64_t block);

/* ---- positions: k strictly increasing integers < n as bytes ----
 * Elias-Fano: low = max(0, floor(log2(n / k))) bits of each, packed LSB first into ceil(k*low/8) bytes; then the unary
 * upper parts as a bit vector of k + (n >> low) + 1 bits: for entry j, bit (idx[j] >> low) + j is set; LSB first.
 * Bitmap: ceil(n/8) bytes, bit i set when i is among them.
 * k == 0 takes no bytes as Elias-Fano. n < 2^32. cml_ef_bound is the exact size.
 * *_encode return the bytes written: CML_ERR_ARGUMENT for positions that break the rule, CML_ERR_CAPACITY if more than cap.
 * *_decode return k and check everything before writing: exactly nbytes, k bits set, positions increasing and < n, padding
 * bits zero; else CML_ERR_CORRUPT. */
int64_t cml_ef_bound(int64_t n, int64_t k);
int64_t cml_ef_encode(uint8_t* out, int64_t cap, const uint32_t* idx, int64_t k, int64_t n);
int64_t cml_ef_decode(uint32_t* idx, int64_t k, int64_t n, const uint8_t* in, int64_t nbytes);
int64_t cml_bitmap_encode(uint8_t* out, int64_t cap, const uint32_t* idx, int64_t k, int64_t n);
int64_t cml_bitmap_decode(uint32_t* idx, int64_t k, int64_t n, const uint8_t* in, int64_t nbytes);

/* ---- integers in a scale that all members share: sums need no decoding ----
 * Block b covers x[b*block .. min(n, (b+1)*block)). max[b] is the upper half of a float32 (bfloat16), the largest magnitude of
 * the block rounded up, at most the largest finite one; whole numbers compare as the magnitudes do.
 * L = 2^(bits-1) - 1 for bits 4 or 8; scale = max / L, or 0 where max < L * 2^-126.
 * t = x * (1 / scale) cut to [-L, L]; dithered q = floor(t) + (u < t - floor(t)), else t rounded half to even; 0 where scale is 0.
 * u = (word >> 8) * 2^-24, with word i % 4 of Philox4x32-10 of counter (i / 4, 0, step low, step high) and key (low, high).
 * n integers of `width` bits (4, 8, 12, 16 or 32; two's complement) are packed from the lowest bit of the first byte on, into
 * ceil(n * width / 8) bytes; what is over in the last byte is 0. */

/* Returns 1 if all of x is finite, 0 if not; then max holds anything. */
int64_t cml_int_maxima(uint16_t* max, const float* x, int64_t n, int64_t block);
/* x finite; q of width `bits`. */
int64_t cml_int_encode(uint8_t* q, const float* x, const uint16_t* max, int64_t n, int64_t block, int bits, int dither,
                       uint64_t key, uint64_t step);
/* 1 if every q is within [-L, L] and padding is 0, else 0. */
int64_t cml_int_legal(const uint8_t* q, int64_t n, int bits);
/* acc[i] += q[i]; with assign != 0: acc[i] = q[i]. */
int64_t cml_int_add(int32_t* acc, const uint8_t* q, int64_t n, int bits, int assign);
/* Every acc[i] must fit `width` bits. */
int64_t cml_int_pack(uint8_t* out, const int32_t* acc, int64_t n, int width);
/* out[i] = scale[i / block] * q[i], q of any width. */
int64_t cml_int_decode(float* out, const uint8_t* q, const uint16_t* max, int64_t n, int64_t block, int bits, int width);

/* ---- low rank: out[i * n + j] = sum over k of p[k * m + i] * q[k * n + j], added in the order of k; rank >= 1 ---- */
void cml_outer(float* out, const float* p, const float* q, int64_t m, int64_t n, int64_t rank);

#ifdef __cplusplus
}
#endif
#endif

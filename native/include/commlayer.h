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

/* ---- schedule: when the tasks of one choice of options end ----
 * A bucket's options stand together: those of bucket b are bucket_options[b] .. bucket_options[b+1], and choice[b] counts
 * from the first of them. A list of lists is a flat array and its edges: item i owns [edges[i], edges[i+1]).
 * Arrays are the caller's; indices are not checked here (the glue does). */
typedef struct cml_schedule {
  int32_t buckets, nodes, lanes, steps;
  int32_t priority;               /* 1: waiting tasks go by the order of buckets in `order`; 0: by readiness */
  const double* ready;            /* nodes x (buckets + 1): when each gradient is final, last when computing ends; from 0 */
  const int32_t* ready_order;     /* nodes x buckets: buckets by readiness */
  const int32_t* order;           /* buckets, the most urgent first */
  const uint8_t* stale;           /* buckets: due by the end of the next step */
  const int32_t* lane_node;       /* lanes: the node whose computing a task on this lane delays, or -1 */
  double tail;                    /* seconds behind the last bucket: the optimizer's step */
  const int32_t* bucket_options;  /* buckets + 1 */
  const int32_t* option_tasks;    /* options + 1 */
  const int32_t* task_lanes;      /* tasks + 1, edges of lane and seconds */
  const int32_t* lane;
  const double* seconds;
  const double* latency;          /* tasks */
  const int32_t* need;            /* tasks: how many ends and gradients it waits for */
  const int32_t* task_next;       /* tasks + 1, edges of next */
  const int32_t* next;            /* tasks, counted from the option's first, that wait for its end */
  const int32_t* task_gates;      /* tasks + 1, edges of gate */
  const int32_t* gate;            /* nodes on which the gradient must be final before it starts */
  int32_t most_tasks;             /* of any choice: the sum over buckets of their longest option */
} cml_schedule;

int64_t cml_schedule_scratch(const cml_schedule* in); /* bytes, to be aligned to 8 */
/* Seconds of the last step. start and end, both or neither (NULL), get steps x most_tasks times from the first step's start,
 * NaN where a task did not begin; the tasks of a choice stand in the order of buckets in `order`. Equal to the Python twin
 * bit for bit. CML_ERR_ARGUMENT as a double when the tasks of an option wait for one another in a circle. */
double cml_schedule_run(const cml_schedule* in, const int32_t* choice, void* scratch, double* start, double* end);
/* out[j]: what cml_schedule_run gives if each of n >= 1 distinct `buckets`, which have equally many options, takes its option
 * j; infinity where that is sure to be above `limit`. choice is left as it was. */
void cml_schedule_sweep(const cml_schedule* in, int32_t* choice, const int32_t* buckets, int32_t n, double limit,
                        void* scratch, double* out);

#ifdef __cplusplus
}
#endif
#endif

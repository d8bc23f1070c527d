/* commlayer native core: the contract of every kernel.
 *
 * Rules that hold for all of them:
 *   - plain C ABI; nothing allocates, throws, locks, logs or keeps globals (but the CPU dispatch, set once);
 *   - memory is the caller's; sizes are counts of elements unless the name says nbytes;
 *   - no pointer needs any alignment, so that every array may lie inside a payload; the machine is little endian;
 *   - arrays of one call do not overlap unless a contract says so;
 *   - a count or size is returned >= 0, an error as a negative cml_error; after an error no output was written
 *     unless a contract says so;
 *   - where vectors pay there is a body for AVX2, chosen at run time, or NEON, and a portable twin with the same results bit for
 *     bit (cml_force_portable selects it, for tests); each has a twin in tests/oracle/codec_kernels/;
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

/* 1 forces the portable bodies, 2 does without AVX-512, 0 restores the choice by CPU. Returns the former setting. */
int cml_force_portable(int on);
/* "avx512" (AVX2, and AVX-512 where it pays), "avx2", "neon" or "portable". */
const char* cml_isa(void);

/* ---- checksums ---- */

/* CRC-32C (Castagnoli) of nbytes bytes, continuing from crc (0 to begin). crc32c("123456789") = 0xE3069283. */
uint32_t cml_crc32c(uint32_t crc, const void* data, size_t nbytes);

/* ---- sums: acc[i] += x[i] for i < n ---- */

void cml_add_f32(float* acc, const float* x, int64_t n);
void cml_add_f16(float* acc, const uint16_t* x, int64_t n);
void cml_add_bf16(float* acc, const uint16_t* x, int64_t n);

/* ---- casts; round to nearest even; NaN stays NaN, float16 overflow becomes infinity ----
 * Those to 16 bits return 1 if all results are finite, else 0 (they still write all).
 * A NaN keeps its sign and the upper bits of its payload and becomes quiet. */

int64_t cml_f32_to_f16(uint16_t* dst, const float* src, int64_t n);
int64_t cml_f32_to_bf16(uint16_t* dst, const float* src, int64_t n);
void cml_f16_to_f32(float* dst, const uint16_t* src, int64_t n);
void cml_bf16_to_f32(float* dst, const uint16_t* src, int64_t n);
/* dst[i] = factor * src[i], and 1. Ends at the first element of src that is not finite, or up to 4095 before it, with 0. */
int64_t cml_scale_f32(float* dst, const float* src, float factor, int64_t n);
/* 1 if every x[i] (+ residual[i], if residual != NULL) is finite, else 0. */
int64_t cml_all_finite(const float* x, const float* residual, int64_t n);
/* The sum of q[i]^2 for q[i] = round-half-even(factor * x[i]). Exact if every |q[i]| <= 2^16 and n <= 2^30. */
int64_t cml_sum_squares(const float* x, float factor, int64_t n);

/* ---- int8, blockwise: block b covers x[b*block .. min(n, (b+1)*block)) ----
 * scale[b] = min(max|x| / 127, FLT_MAX / 128), so that no q, not even -128, decodes to infinity;
 * q[i] = round-half-even(x[i] / scale[b]), cut to [-127, 127].
 * Where max|x| < 127 * 2^-126 the scale would not be a normal number: the block counts as zeros, scale[b] = 0, q = 0.
 * If residual != NULL: v = x[i] + residual[i] is coded and residual[i] = v - scale * q is written back.
 * One pass over memory: a block is measured and coded while it is in the cache. Returns 1 if all v are finite; 0 if not: then
 * q and scale hold anything, and residual[i] = v where v is finite, else what it was. (What blocks before the first bad one
 * had sent is added back, which is exact for rounding to the nearest.) */
int64_t cml_int8_encode(int8_t* q, float* scale, const float* x, float* residual, int64_t n, int64_t block);
/* acc[i] += scale[b] * q[i]; with assign != 0: acc[i] = scale[b] * q[i]. */
void cml_int8_decode(float* acc, const int8_t* q, const float* scale, int64_t n, int64_t block, int assign);

/* ---- random numbers: Philox4x32-10, see src/philox.h for which element takes which word ----
 * Who codes a part of a bucket says at which element it begins (first, a multiple of 8 and of block), so that parts coded apart
 * take the words that they would have in the whole. */

/* The words of elements first .. first + n - 1 under this key in this step. */
void cml_philox(uint32_t* words, int64_t n, int64_t first, uint64_t key, uint64_t step);

/* ---- blockwise quantisers: as int8 above in blocks, residual, passes and what they return, but for these ----
 * Scales are bfloat16, rounded up, cut so that any code times its scale is finite; a block whose scale would be below 2^-126
 * counts as zeros. Codes are a stream of bytes: code i takes bits [i * bits, (i + 1) * bits), the lowest bit of a byte first;
 * ceil(n * bits / 8) bytes, the bits past the end are 0. block is a multiple of 8, else CML_ERR_ARGUMENT.
 * Where rounding is by random numbers, adding back what was sent (0 returned) is exact only up to rounding.
 *
 * linear: code q of bits = 2, 3, 4, 5 or 8 as two's complement; top = 2^(bits-1) - 1; scale = size / top, where size is the
 * largest |v|, or with euclidean != 0 the Euclidean norm of the block. t = v / scale cut to [-top, top].
 * dither == 0: q = round-half-even(t). Else q = floor(t) + 1 if uniform(word) < t - floor(t), else floor(t). */
int64_t cml_linear_encode(uint8_t* q, uint16_t* scale, const float* x, float* residual, int64_t n, int64_t block, int bits,
                          int euclidean, int dither, uint64_t key, uint64_t step, int64_t first);
int64_t cml_linear_decode(float* acc, const uint8_t* q, const uint16_t* scale, int64_t n, int64_t block, int bits, int assign);

/* onebit: the sign bit of v; scale = the mean of |v| over the block, added up in the order of src/blockwise.h. block <= 2^20. */
int64_t cml_onebit_encode(uint8_t* q, uint16_t* scale, const float* x, float* residual, int64_t n, int64_t block);
int64_t cml_onebit_decode(float* acc, const uint8_t* q, const uint16_t* scale, int64_t n, int64_t block, int assign);

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
/* |g + residual| of `count` elements to out, finite or not: fours of neighbours spread evenly over n. Sample j is element
 * (offset + floor(q*n/groups) + j % 4) mod n with q = j / 4 and groups = ceil(count / 4) made odd. n, count < 2^32,
 * offset >= 0; n == 0 gives zeros. */
void cml_sample_abs(const float* g, const float* residual, int64_t n, int64_t offset, int64_t count, float* out);

/* ---- order among magnitudes; scratch is overwritten ---- */

/* *out = the rank-th largest |g + residual| (rank 1: the largest; NaN is above infinity). scratch: n words.
 * 1 <= rank <= n < 2^32. */
int64_t cml_kth_abs(const float* g, const float* residual, int64_t n, int64_t rank, uint32_t* scratch, float* out);
/* How many x[i] >= cut. */
int64_t cml_count_above(const float* x, int64_t n, float cut);
/* Keeps the `keep` entries of largest |val| out of `count`, in order; of equals, those from position `from` on, going round.
 * The others: residual[idx] += val, if residual != NULL. idx increases and is below n: the caller's promise.
 * scratch: count words. 1 <= keep <= count <= n. Returns keep. */
int64_t cml_trim(float* residual, int64_t n, uint32_t* idx, float* val, int64_t count, int64_t keep, int64_t from,
                 uint32_t* scratch);

/* ---- runs: run r covers elements r*run .. min(n, (r+1)*run); run is 8, 16, 32 or 64 ----
 * The score of a run is the sum of its |v|, added as: lane[l] = v[l] + v[l+8] + ... for l < 8, then the upper half of the
 * lanes onto the lower, three times. What a short run lacks counts as 0. It may be infinite where all v are finite.
 *
 * cml_select_runs: as cml_select, but whole runs are selected, by score >= threshold; `from` is a run. What is selected stays in
 * the residual as well: cml_scatter_runs puts there what is kept of it. A run with a v that is not finite is not selected.
 * cml_score_runs: scores of `count` runs spread evenly (run (offset + floor(j*runs/count)) mod runs); n == 0 gives zeros.
 * cml_gather_runs: val = the elements of the runs, one run after the other. Returns how many; CML_ERR_CAPACITY if > cap.
 * cml_scatter_runs: acc += val (or acc = val) there. CML_ERR_CORRUPT, acc unchanged, unless ids increase strictly below the
 * number of runs and cover k elements. */
int64_t cml_select_runs(const float* g, float* residual, int64_t n, int64_t run, float threshold, int64_t from,
                        uint32_t* ids, float* scores, int64_t cap, int64_t* overflow, int32_t* finite);
int64_t cml_score_runs(const float* g, const float* residual, int64_t n, int64_t run, int64_t offset, int64_t count,
                       float* out);
int64_t cml_gather_runs(const float* src, int64_t n, int64_t run, const uint32_t* ids, int64_t count, float* val, int64_t cap);
int64_t cml_scatter_runs(float* acc, int64_t n, int64_t run, const uint32_t* ids, int64_t count, const float* val, int64_t k,
                         int assign);

/* ---- draws: Philox4x32-10; word i of the stream (key, step) is word i % 4 of block i / 4, the counter being
 * (block low, block high, step low, step high) ---- */

/* Word 0 of the stream (key, step). */
uint32_t cml_draw_word(uint64_t key, uint64_t step);
/* idx[j] = one position of stratum [floor(j*n/k), floor((j+1)*n/k)): its begin + (word j of (seed, 0) * its width >> 32). */
int64_t cml_draw_strata(uint32_t* idx, int64_t k, int64_t n, uint32_t seed);
/* val[j] = src[idx[j]]. CML_ERR_CORRUPT, nothing written, unless idx increases below n. */
int64_t cml_take(const float* src, int64_t n, const uint32_t* idx, float* val, int64_t k);

/* ---- 4-bit values, for gathered entries: as int8, but scale[b] = min(max|x| / 7, FLT_MAX / 8), q cut to [-7, 7] ----
 * Two's complement; entry i is the low half of byte i / 2 if i is even, else the high half; a half without entry is 0.
 * block is even. rest[i] = x[i] - scale * q, if rest != NULL. Returns 1, or 0 if an x is not finite: then q, scale and rest
 * hold anything. */
int64_t cml_nibbles_encode(uint8_t* q, float* scale, const float* x, float* rest, int64_t n, int64_t block);
int64_t cml_nibbles_decode(float* out, const uint8_t* q, const float* scale, int64_t n, int64_t block);

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
 * Blocks: u32 count of the blocks of 16 positions that hold any; their numbers below ceil(n/16), as a bitmap if that is not
 * larger than Elias-Fano, else so; then for each block, in order, u16 with bit (position % 16) set for its positions.
 * k == 0 takes no bytes as Elias-Fano or blocks. n < 2^32. cml_ef_bound and cml_blocks_nbytes are exact sizes; the latter takes
 * idx on trust.
 * *_encode return the bytes written: CML_ERR_ARGUMENT for positions that break the rule, CML_ERR_CAPACITY if more than cap.
 * *_decode return k and check everything before writing: exactly nbytes, k bits set, positions increasing and < n, padding
 * bits zero; else CML_ERR_CORRUPT. */
int64_t cml_ef_bound(int64_t n, int64_t k);
int64_t cml_ef_encode(uint8_t* out, int64_t cap, const uint32_t* idx, int64_t k, int64_t n);
int64_t cml_ef_decode(uint32_t* idx, int64_t k, int64_t n, const uint8_t* in, int64_t nbytes);
int64_t cml_bitmap_encode(uint8_t* out, int64_t cap, const uint32_t* idx, int64_t k, int64_t n);
int64_t cml_bitmap_decode(uint32_t* idx, int64_t k, int64_t n, const uint8_t* in, int64_t nbytes);
int64_t cml_blocks_nbytes(const uint32_t* idx, int64_t k, int64_t n);
int64_t cml_blocks_encode(uint8_t* out, int64_t cap, const uint32_t* idx, int64_t k, int64_t n);
int64_t cml_blocks_decode(uint32_t* idx, int64_t k, int64_t n, const uint8_t* in, int64_t nbytes);

/* ---- low rank: out[i * n + j] = sum over k of p[k * m + i] * q[k * n + j], added in the order of k; rank >= 1 ---- */
void cml_outer(float* out, const float* p, const float* q, int64_t m, int64_t n, int64_t rank);

/* ---- lazy optimizers: a step touches only groups with entries of its gradient; the others owe what a gradient of zero would do ----
 * Group j is elements 16 j .. 16 j + 15, as far as there are any. stamp[j]: the step with which they are up to date, modulo 256.
 * They are (now - stamp[j]) mod 256 steps behind step `now`, and that row of `rows`, of which there are 256, makes up for all of
 * these at once.
 * Rows of SGD, 4 floats p: (w, v) becomes (w + (p0 * w + p1 * v), p2 * w + p3 * v); without momentum w + p0 * w.
 * Rows of Adam, 8 floats p, q = sqrt(v): (w, m, v) becomes (w + (p0 * w - m * (p3 / (q + p4) + p5 / (q + p6))), p1 * m, p2 * v).
 *
 * *_sparse: brings the groups of the elements idx up to date with step `now`, makes their next step, with gradient g of the
 * elements idx and 0 of the others, and stamps them now + 1. stamp == NULL: all are up to date, and only the elements idx make a
 * step. CML_ERR_CORRUPT, nothing written, unless idx increases below n. Returns k.
 * *_catch_up: brings n elements up to date with step `now`, the first of which begins a group.
 *
 * A step of SGD: d = g + decay * w (g where decay is 0); without momentum (v == NULL) u = d, else v = momentum * v + gain * d and
 * u = nesterov ? d + momentum * v : v; then w = w - rate * u.
 * A step of Adam, s = {keep, lerp, beta2, gain, root, eps, rate}: w = keep * w; m = m + lerp * (g - m);
 * v = beta2 * v + (gain * g) * g; w = w - rate * (m / (sqrt(v) / root + eps)). */
enum { CML_LAZY_ROWS = 256, CML_LAZY_GROUP = 16 };
int64_t cml_sgd_sparse(float* w, float* v, uint8_t* stamp, int64_t n, uint8_t now, const float* rows, const uint32_t* idx,
                       const float* g, int64_t k, float rate, float momentum, float gain, float decay, int nesterov);
void cml_sgd_catch_up(float* w, float* v, uint8_t* stamp, int64_t n, uint8_t now, const float* rows);
int64_t cml_adam_sparse(float* w, float* m, float* v, uint8_t* stamp, int64_t n, uint8_t now, const float* rows,
                        const uint32_t* idx, const float* g, int64_t k, const float* s);
void cml_adam_catch_up(float* w, float* m, float* v, uint8_t* stamp, int64_t n, uint8_t now, const float* rows);
/* Positions in a tensor of shape[0..dims), row by row, to coordinates and back: coordinate d of entry j is at[d * k + j].
 * The product of shape is below 2^32. cml_flat_positions: CML_ERR_CORRUPT unless all coordinates are within the shape and
 * positions increase; idx may be overwritten then. */
int64_t cml_flat_positions(uint32_t* idx, const int64_t* at, int64_t k, const int64_t* shape, int64_t dims);
int64_t cml_coordinates(int64_t* at, const uint32_t* idx, int64_t k, const int64_t* shape, int64_t dims);

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
  const uint8_t* lane_shared;     /* lanes: 1 if several tasks may be on it, each as fast as an equal part of it allows */
  double tail;                    /* seconds behind the last bucket: the optimizer's step */
  const int32_t* bucket_options;  /* buckets + 1 */
  const int32_t* option_tasks;    /* options + 1 */
  int32_t lines;                  /* queues: an exclusive lane, or shared lanes that one connection goes over */
  const int32_t* line_lanes;      /* lines + 1, edges of line_lane */
  const int32_t* line_lane;
  const int32_t* task_line;       /* tasks: one at a time on a line; -1 if it needs none */
  const int32_t* task_seconds;    /* tasks + 1, edges of seconds: one for each lane of its line */
  const double* seconds;
  const double* latency;          /* tasks */
  const int32_t* need;            /* tasks: how many ends and gradients it waits for */
  const int32_t* task_next;       /* tasks + 1, edges of next */
  const int32_t* next;            /* tasks, counted from the option's first, that wait for its end */
  const int32_t* task_gates;      /* tasks + 1, edges of gate */
  const int32_t* gate;            /* nodes on which the gradient must be final before it starts */
  int32_t most_tasks;             /* of any choice: the sum over buckets of their longest option */
  const double* head;             /* tasks: seconds from its bucket's gradient to its begin, at least; NULL: not known */
  const double* rest;             /* tasks: seconds from when its lanes have served it to its bucket's end, at least */
} cml_schedule;

int64_t cml_schedule_scratch(const cml_schedule* in); /* bytes, to be aligned to 8 */
/* head and rest of every task, where the caller has room for them: with them a sweep that has a limit ends much sooner. */
void cml_schedule_chains(const cml_schedule* in, double* head, double* rest);
/* Seconds of the last step, or infinity where that is sure to be above `limit`. start and end, both or neither (NULL), get
 * steps x most_tasks times from the first step's start, NaN where a task did not begin; the tasks of a choice stand in the
 * order of buckets in `order`. Equal to the Python twin bit for bit. CML_ERR_ARGUMENT as a double when the tasks of an option
 * wait for one another in a circle. */
double cml_schedule_run(const cml_schedule* in, const int32_t* choice, double limit, void* scratch, double* start, double* end);
enum { CML_SCHEDULE_MOST = 8 };
#define CML_SCHEDULE_EQUAL 4e-9
/* out[j]: what cml_schedule_run gives if each of n >= 1 distinct `buckets`, which have equally many options, takes its option
 * j; infinity where open[j] is 0. An option's price is its step times factor[j], which is above 0 (NULL: all are 1), and what
 * `limit` is compared with. If `most` is not 0, but CML_SCHEDULE_MOST or less, out[j] is also infinity where the
 * prices of so many others are lower by more than the fraction CML_SCHEDULE_EQUAL. choice is left as it was; `now` is the step that it takes, NaN if not known. Gives how many tasks began in all of
 * these runs. */
int64_t cml_schedule_sweep(const cml_schedule* in, int32_t* choice, const int32_t* buckets, int32_t n, const uint8_t* open,
                           const double* factor, double limit, double now, int32_t most, void* scratch, double* out);

#ifdef __cplusplus
}
#endif
#endif

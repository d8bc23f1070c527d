// Where the parts of a sparse payload lie when its count is known on the device only; see docs/reference/wire.md.
#ifndef CML_LAYOUT
#define CML_LAYOUT
#include "common.cuh"

#define HEADER_NBYTES 16
#define VALUES_BLOCK 256
#define ELIAS_FANO 0
#define BITMAP 1
#define SMALLER -1  // of the two
#define NO_VALUES -1
#define INT8 0
#define FP16 1
#define BF16 3
#define INT4 4
#define BLOCK_SHIFT 4     // of the third kind of positions
#define WORTH_A_LOOK 16  // fewer positions are not tried as blocks

struct Packing {
  i64 kind;
  int low;          // bits of each position that are stored as they are
  i64 low_nbytes;
  i64 high_nbits;
  i64 nbytes;
};

// Of k positions below n.
CML_FN Packing packing(i64 n, i64 k, i64 kind) {
  if (k == 0) return {ELIAS_FANO, 0, 0, 0, 0};
  const int low = 63 - __clzll(n / k);
  const i64 low_nbytes = (k * low + 7) / 8, high_nbits = k + (n >> low) + 1;
  const i64 sparse = low_nbytes + (high_nbits + 7) / 8, dense = (n + 7) / 8;
  if (kind == BITMAP || (kind == SMALLER && sparse >= dense)) return {BITMAP, 0, 0, n, dense};
  return {ELIAS_FANO, low, low_nbytes, high_nbits, sparse};
}

CML_FN i64 scales_nbytes(i64 k) { return 4 * ((k + VALUES_BLOCK - 1) / VALUES_BLOCK); }

// Where k positions begin in memory whose values are of that kind: behind header and values, or at once.
CML_FN i64 positions_at(i64 k, i64 values) {
  if (values == NO_VALUES) return 0;
  if (values == INT8) return HEADER_NBYTES + scales_nbytes(k) + k;
  if (values == INT4) return HEADER_NBYTES + scales_nbytes(k) + (k + 1) / 2;
  return HEADER_NBYTES + (values == FP16 || values == BF16 ? 2 : 4) * k;
}

// Of positions below n that lie in `blocks` blocks of 16.
CML_FN i64 blocks_nbytes(i64 n, i64 blocks) {
  return 4 + packing((n + (1 << BLOCK_SHIFT) - 1) >> BLOCK_SHIFT, blocks, SMALLER).nbytes + 2 * blocks;
}

#endif

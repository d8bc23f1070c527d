// The k largest of the candidates that a scan found, in their order; the others go back to the residual. As cml_trim.
//
// Three passes count the magnitudes by their upper 11, middle 10 and lower 10 bits, each among those that share the bits before.
// Then each candidate knows whether it stays: those above the k-th, and of its equals the first, in the order of the scan.
#include "control.cuh"
#include "scan.cuh"

#define DIGITS 3
#define BINS 2048                  // of each pass; the later ones use half of them
#define EACH 4                     // candidates of a thread
#define TRIM_TILE (CML_THREADS * EACH)

CML_FN int shift_of(int digit) { return digit == 0 ? 20 : digit == 1 ? 10 : 0; }
CML_FN u32 mask_of(int digit) { return digit == 0 ? 2047u : 1023u; }

struct TrimShared {
  u32 histogram[BINS];
  u32 sums[CML_THREADS / 32];
  u32 bin, left;
  i64 tile;
  u32 above, equal;  // before this tile
};

// In `bin` the bin, counted from the uppermost, in which the rank-th lies, and in `left` its rank there. All threads.
CML_FN void find_bin(TrimShared& shared, const u32* histogram, u32 rank) {
  const u32 t = threadIdx.x, lane = lane_of_warp(), top = BINS - 1 - t * (BINS / CML_THREADS);
  u32 own = 0;
  for (u32 b = 0; b < BINS / CML_THREADS; ++b) own += histogram[top - b];
  const u32 until = warp_scan(own);
  if (lane == 31) shared.sums[t / 32] = until;
  __syncthreads();
  u32 before = until - own;
  for (u32 w = 0; w < t / 32; ++w) before += shared.sums[w];
  if (before < rank && rank <= before + own) {
    u32 bin = top, left = rank - before;
    for (; left > histogram[bin]; --bin) left -= histogram[bin];
    shared.bin = bin;
    shared.left = left;
  }
  __syncthreads();
}

struct Cut {
  u32 prefix;  // the bits known so far
  u32 wanted;  // the rank among those that share them
};

// What the first `digits` passes say of the k-th magnitude.
CML_FN Cut cut_after(TrimShared& shared, const u32* histograms, int digits, i64 k) {
  Cut cut = {0, static_cast<u32>(k)};
  for (int d = 0; d < digits; ++d) {
    find_bin(shared, histograms + d * BINS, cut.wanted);
    cut = {cut.prefix | shared.bin << shift_of(d), shared.left};
    __syncthreads();
  }
  return cut;
}

// Pass `digit` over the candidates. The caller has set the histograms, DIGITS times BINS, to 0.
CML_KERNEL trim_count(const float* val, i64 k, i64 cap, i64 room, i64 digit, u32* histograms, const Control* control) {
  CML_SHARED(TrimShared, shared);
  const i64 count = least(control->total, cap);
  if (staying(control, k, cap, room) == count) return;
  const int d = static_cast<int>(digit);
  const u32 prefix = cut_after(shared, histograms, d, k).prefix;
  for (u32 b = threadIdx.x; b < BINS; b += CML_THREADS) shared.histogram[b] = 0;
  __syncthreads();
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j < count; j += step) {
    const u32 m = magnitude(val[j]);
    if (d == 0 || m >> shift_of(d - 1) == prefix >> shift_of(d - 1)) atomicAdd(&shared.histogram[m >> shift_of(d) & mask_of(d)], 1u);
  }
  __syncthreads();
  for (u32 b = threadIdx.x; b < BINS; b += CML_THREADS)
    if (shared.histogram[b] != 0) atomicAdd(&histograms[d * BINS + b], shared.histogram[b]);
}

// What stays, at the front of to_idx and to_val in the order of the scan. above, equal: see scan.cuh. A block for every tile.
CML_KERNEL trim(u32* to_idx, float* to_val, const u32* idx, const float* val, float* residual, i64 k, i64 cap, i64 room,
                const u32* histograms, u64* above, u64* equal, Control* control) {
  CML_SHARED(TrimShared, shared);
  const u32 t = threadIdx.x, warp = t / 32, lane = lane_of_warp();
  const i64 count = least(control->total, cap), stay = staying(control, k, cap, room), first = least(control->first, count);
  Cut cut = {0, 0};  // all are above it
  if (stay < count) cut = cut_after(shared, histograms, DIGITS, k);
  if (t == 0) shared.tile = take_tile(above);
  __syncthreads();
  const i64 tile = shared.tile, begin = tile * TRIM_TILE + static_cast<i64>(t) * EACH;
  u32 m[EACH], own = 0;  // above in the lower half, equals in the upper
  for (int c = 0; c < EACH; ++c) {
    m[c] = begin + c < count ? magnitude(val[begin + c]) : 0;
    own += begin + c >= count ? 0 : m[c] > cut.prefix ? 1u : m[c] == cut.prefix ? 1u << 16 : 0u;
  }
  const u32 until = warp_scan(own);
  if (lane == 31) shared.sums[warp] = until;
  __syncthreads();
  if (warp == 0) {
    const u32 sums = lane < CML_THREADS / 32 ? shared.sums[lane] : 0, all = __shfl_sync(CML_ALL, warp_scan(sums), 31);
    const u32 before_above = sum_before(above, tile, all & 0xffff), before_equal = sum_before(equal, tile, all >> 16);
    if (lane == 0) shared.above = before_above, shared.equal = before_equal;
  }
  __syncthreads();
  u32 before = until - own;
  for (u32 w = 0; w < warp; ++w) before += shared.sums[w];
  i64 more = static_cast<i64>(shared.above) + (before & 0xffff), equals = static_cast<i64>(shared.equal) + (before >> 16);
  for (int c = 0; c < EACH && begin + c < count; ++c) {
    const i64 j = begin + c, rank = more + least(equals, cut.wanted);
    if (j == first) control->kept_first = rank;
    const u32 i = idx[j];
    if (m[c] > cut.prefix || (m[c] == cut.prefix && equals < cut.wanted)) {
      to_idx[rank] = i;
      to_val[rank] = val[j];
    } else if (residual) {
      residual[i] = __fadd_rn(residual[i], val[j]);
    }
    more += m[c] > cut.prefix;
    equals += m[c] == cut.prefix;
  }
  if (tile == 0 && t == 0) {
    control->kept = stay;
    if (first == count) control->kept_first = stay;
  }
}

// A sparse payload without a word from the host between gradient and bytes: where to cut, whether what was found will do,
// and the values. The decisions are those of commlayer/compressors/selection.py and selection.py, in the same double precision.
#include "control.cuh"
#include "half.cuh"
#include "int8.cuh"
#include "layout.cuh"
#include "nibbles.cuh"
#include "sample.cuh"

#define SIGMAS 4.0
#define PROBE 1.2
#define MEMORY 0.3
#define SLOPE_LEAST 0.5
#define SLOPE_MOST 40.0
#define TINY 1.1754943508222875e-38   // 2^-126
#define HUGE 3.4028234663852886e38
#define ENOUGH 0.9

// The state of selection.py before this step.
struct Tracked {
  double cut, slope, doubt;
};

struct CutShared {
  u32 histogram[256];
  u32 digit, wanted, sum;
};

CML_FN double held(double v, double lo, double hi) { return v < lo ? lo : v > hi ? hi : v; }
CML_FN double usable(double v) { return held(v, TINY, HUGE); }

CML_FN u32 passing(CutShared& shared, const float* seen, i64 size, double cut) {
  const float limit = static_cast<float>(usable(cut));
  u32 own = 0;
  for (i64 j = threadIdx.x; j < size; j += blockDim.x) own += seen[j] >= limit;
  __syncthreads();
  if (threadIdx.x == 0) shared.sum = 0;
  __syncthreads();
  own = warp_sum(own);
  if (lane_of_warp() == 0) atomicAdd(&shared.sum, own);
  __syncthreads();
  return shared.sum;
}

// The rank-th largest (from 1) of the magnitudes, NaN above infinity, digit by digit of its bits.
CML_FN double largest(CutShared& shared, const float* seen, i64 size, u32 rank) {
  u32 prefix = 0, known = 0;
  if (threadIdx.x == 0) shared.wanted = rank;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (u32 d = threadIdx.x; d < 256; d += blockDim.x) shared.histogram[d] = 0;
    __syncthreads();
    for (i64 j = threadIdx.x; j < size; j += blockDim.x) {
      const u32 b = magnitude(seen[j]);
      if ((b & known) == prefix) atomicAdd(&shared.histogram[b >> shift & 255], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      u32 d = 255;
      for (; d > 0 && shared.wanted > shared.histogram[d]; --d) shared.wanted -= shared.histogram[d];
      shared.digit = d;
    }
    __syncthreads();
    prefix |= shared.digit << shift;
    known |= 255u << shift;
    __syncthreads();
  }
  return prefix < CML_INF ? usable(static_cast<double>(__uint_as_float(prefix))) : HUGE;
}

// threshold.begin. `seen` holds the usual sample and has room for the larger one, which replaces it at a jump. One block.
CML_KERNEL cut_begin(const float* g, const float* residual, i64 n, i64 offset, float* seen, i64 usual, i64 larger, i64 rank,
                     i64 calm, double expected, const Tracked* tracked, Control* control, float* threshold) {
  CML_SHARED(CutShared, shared);
  const double slope = tracked->slope;
  double cut = tracked->cut, shift = 0.0;
  i64 size = usual;
  const double passed = passing(shared, seen, usual, cut);
  const bool jump = cut <= TINY || fabs(passed - expected) > SIGMAS * sqrt(expected) + 2.0;
  const double some = passed > 0.5 ? passed : 0.5;
  if (jump) {
    size = larger;
    __syncthreads();
    for (i64 j = threadIdx.x; j < larger; j += blockDim.x) seen[j] = sampled(g, residual, n, offset, larger, j);
    __syncthreads();
    cut = largest(shared, seen, size, static_cast<u32>(rank));
  } else {
    const double trust = tracked->doubt / (tracked->doubt + 1.0 / expected);
    shift = trust * log(some / expected);
    const double near_cut = usable(cut / PROBE);
    if (calm) {
      cut = usable(cut * exp(shift / slope));
    } else {
      const u32 near = passing(shared, seen, size, near_cut);
      const double place = rint(some * exp(-shift));
      const u32 wanted = static_cast<u32>(held(place, 1.0, near > 0 ? static_cast<double>(near) : 1.0));
      cut = near > 0 ? largest(shared, seen, size, wanted) : near_cut;
    }
  }
  const double above = passing(shared, seen, size, cut * PROBE), below = passing(shared, seen, size, cut / PROBE);
  if (threadIdx.x != 0) return;
  double measured = slope;
  if (above > 0 && above < below) {
    measured = held(log(below / above) / (2.0 * log(PROBE)), SLOPE_LEAST, SLOPE_MOST);
    measured = slope + MEMORY * (measured - slope);
  }
  control->cut = cut;
  control->slope = measured;
  control->shift = shift;
  control->shifted = !jump;
  *threshold = static_cast<float>(cut);
}

// control->blocks: of the entries that stay, whose positions increase. The caller has set it to 0.
CML_KERNEL count_blocks(const u32* idx, Control* control) {
  for (i64 j = thread_of_grid() & ~31ll, step = threads_of_grid(), k = control->kept; j < k; j += step) {
    const i64 mine = j + lane_of_warp();
    const u32 found = warp_sum(mine < k && (mine == 0 || idx[mine] >> BLOCK_SHIFT != idx[mine - 1] >> BLOCK_SHIFT));
    if (lane_of_warp() == 0) atomicAdd(reinterpret_cast<u64*>(&control->blocks), static_cast<u64>(found));
  }
}

// Whether the entries that stay are the payload, and then its header and size. One thread.
CML_KERNEL settle(u8* out, i64 n, i64 k, i64 codec, i64 values, Control* control) {
  const i64 count = control->kept;
  const bool enough = static_cast<double>(count) >= ENOUGH * static_cast<double>(k) || control->cut <= TINY;
  control->count = MEND;
  if (control->bad || !enough) return;
  const Packing size = packing(n, count, SMALLER);
  control->count = CLUSTERED;
  if (count >= WORTH_A_LOOK && blocks_nbytes(n, control->blocks) < size.nbytes) return;
  control->count = count;
  control->nbytes = positions_at(count, values) + size.nbytes;
  u32* header = reinterpret_cast<u32*>(out);
  header[0] = static_cast<u32>(codec | 1 << 8 | (values << 4 | size.kind) << 24);
  header[1] = static_cast<u32>(n);
  header[2] = static_cast<u32>(count);
  header[3] = 0;
}

CML_FN float within(float v, float limit) { return v > limit ? limit : v < -limit ? -limit : v; }

struct BlockShared {
  u32 most[VALUES_BLOCK / 32];
};

// The values in their place in the payload; what rounding keeps of them goes to the residual. VALUES_BLOCK threads a block.
CML_KERNEL pack_values(u8* out, const u32* idx, const float* val, float* residual, i64 values, Control* control) {
  CML_SHARED(BlockShared, shared);
  const i64 k = control->count, j = thread_of_grid();
  const bool mine = j < k;
  const float v = mine ? val[j] : 0.0f;
  float sent = v;
  out += HEADER_NBYTES;
  if (values == INT8 || values == INT4) {
    const u32 m = warp_most(magnitude(v));
    if (lane_of_warp() == 0) shared.most[threadIdx.x / 32] = m;
    __syncthreads();
    u32 most = 0;
    for (int w = 0; w < VALUES_BLOCK / 32; ++w) most = shared.most[w] > most ? shared.most[w] : most;
    const float size = __uint_as_float(most), s = values == INT8 ? scale_of(size) : scale4_of(size);
    const int whole = values == INT8 ? quantum_of(v, s) : nibble_of(v, s);
    sent = float_of_quantum(whole, s);
    u8* codes = out + scales_nbytes(k);
    const int next = __shfl_down_sync(CML_ALL, whole, 1);
    if (mine && values == INT8) codes[j] = static_cast<u8>(whole);
    if (mine && values == INT4 && j % 2 == 0) codes[j / 2] = byte_of_nibbles(whole, next);
    if (mine && threadIdx.x == 0) reinterpret_cast<float*>(out)[j / VALUES_BLOCK] = s;
  } else if (values == FP16 || values == BF16) {
    const float limit = values == FP16 ? 65504.0f : __uint_as_float(0x7f7f0000u), kept = residual ? within(v, limit) : v;
    const u16 narrow = values == FP16 ? half_of(kept) : bfloat_of(kept);
    if (mine) reinterpret_cast<u16*>(out)[j] = narrow;
    if (mine && (narrow & 0x7fff) >= (values == FP16 ? 0x7c00 : 0x7f80)) control->infinite = 1;
    sent = values == FP16 ? float_of_half(narrow) : float_of_bfloat(narrow);
  } else if (mine) {
    reinterpret_cast<float*>(out)[j] = v;
  }
  if (mine && residual) residual[idx[j]] = __fadd_rn(residual[idx[j]], __fsub_rn(v, sent));
}

// A sparse payload without a word from the host between gradient and bytes: where to cut, whether what was found will do,
// and the values. The decisions are those of commlayer/compressors/threshold.py and selection.py, in the same double precision.
#include "half.cuh"
#include "int8.cuh"
#include "layout.cuh"

#define SIGMAS 4.0
#define PROBE 1.2
#define MEMORY 0.3
#define SLOPE_LEAST 0.5
#define SLOPE_MOST 40.0
#define TINY 1.1754943508222875e-38   // 2^-126
#define HUGE 3.4028234663852886e38
#define ENOUGH 0.9

// What the kernels of one payload tell each other, and the host in the end.
struct Control {
  i64 total, bad, first;  // as `select_over` leaves them
  i64 count;              // entries of the payload; -1 if the host must decide
  i64 nbytes;
  i64 shifted;            // whether `shift` holds
  i64 infinite;           // a value became infinite by its cast
  double cut, slope, shift;
};

// The state of threshold.py before this step.
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

// The rank-th largest (from 1) of the magnitudes whose bits are at most `most`, digit by digit of its bits.
CML_FN double largest(CutShared& shared, const float* seen, i64 size, u32 rank, u32 most) {
  u32 prefix = 0, known = 0;
  if (threadIdx.x == 0) shared.wanted = rank;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (u32 d = threadIdx.x; d < 256; d += blockDim.x) shared.histogram[d] = 0;
    __syncthreads();
    for (i64 j = threadIdx.x; j < size; j += blockDim.x) {
      const u32 b = magnitude(seen[j]);
      if (b <= most && (b & known) == prefix) atomicAdd(&shared.histogram[b >> shift & 255], 1u);
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
    for (i64 j = threadIdx.x; j < larger; j += blockDim.x) {
      const u64 i = static_cast<u64>(offset) + static_cast<u64>(j) * static_cast<u64>(n) / static_cast<u64>(larger);
      seen[j] = __uint_as_float(magnitude(value_at(g, residual, static_cast<i64>(i % static_cast<u64>(n)))));
    }
    __syncthreads();
    cut = largest(shared, seen, size, static_cast<u32>(rank), CML_ABS);
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
      cut = near > 0 ? largest(shared, seen, size, wanted, CML_INF) : near_cut;
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

// Whether the entries found are the payload, and then its header and size. `room` is the most that a payload holds. One thread.
CML_KERNEL settle(u8* out, i64 n, i64 k, i64 cap, i64 room, i64 codec, i64 values, Control* control) {
  const i64 count = least(control->total, cap);
  const bool enough = static_cast<double>(count) >= ENOUGH * static_cast<double>(k) || control->cut <= TINY;
  control->count = -1;
  if (control->bad || !enough || count > room) return;
  const Packing size = packing(n, count, SMALLER);
  control->count = count;
  control->nbytes = positions_at(count, values) + size.nbytes;
  u32* header = reinterpret_cast<u32*>(out);
  header[0] = static_cast<u32>(codec | 1 << 8 | (values << 4 | size.kind) << 24);
  header[1] = static_cast<u32>(n);
  header[2] = static_cast<u32>(count);
  header[3] = 0;
}

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
  if (values == INT8) {
    const u32 m = warp_most(magnitude(v));
    if (lane_of_warp() == 0) shared.most[threadIdx.x / 32] = m;
    __syncthreads();
    u32 most = 0;
    for (int w = 0; w < VALUES_BLOCK / 32; ++w) most = shared.most[w] > most ? shared.most[w] : most;
    const float s = scale_of(__uint_as_float(most));
    const int whole = quantum_of(v, s);
    sent = float_of_quantum(whole, s);
    if (mine) out[4 * ((k + VALUES_BLOCK - 1) / VALUES_BLOCK) + j] = static_cast<u8>(whole);
    if (mine && threadIdx.x == 0) reinterpret_cast<float*>(out)[j / VALUES_BLOCK] = s;
  } else if (values == FP16) {
    const float within = residual ? v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v : v;
    const u16 h = half_of(within);
    if (mine) reinterpret_cast<u16*>(out)[j] = h;
    if (mine && (h & 0x7fff) >= 0x7c00) control->infinite = 1;
    sent = float_of_half(h);
  } else if (mine) {
    reinterpret_cast<float*>(out)[j] = v;
  }
  if (mine && residual) residual[idx[j]] = __fadd_rn(residual[idx[j]], __fsub_rn(v, sent));
}

// Selection by threshold in one pass over gradient and residual, order kept, as cml_select. Knows no payloads.
#include "sample.cuh"
#include "scan.cuh"

#define ROUNDS 4
#define TILE (CML_THREADS * 4 * ROUNDS)

struct SelectShared {
  i64 tile;
  u32 base;
  u32 before[32];  // selected before round r of warp w, at r * 8 + w
};

// The tiles follow the scan, which begins at `start` and wraps: first those of [start, n), counted from the group of four that
// holds `start`, then those of [0, start). An entry's rank in that order is its place in idx and val; `rotate` sorts them.
struct Part {
  i64 lo, hi, base;
};

CML_FN Part part_of(i64 tile, i64 n, i64 start) {
  const i64 aligned = start & ~3ll, first = (n - aligned + TILE - 1) / TILE;
  if (tile < first) return {start, n, aligned + tile * TILE};
  return {0, start, (tile - first) * TILE};
}

// One group of four in [lo, hi): v to where it passed, residual written back as if all that passed were taken.
template <bool kWide>
CML_FN u32 group_of_four(const float* g, float* residual, i64 i, Part part, float threshold, float* v, bool* bad) {
  float old[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (kWide) {
    const float4 a = *reinterpret_cast<const float4*>(g + i);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    if (residual) {
      const float4 r = *reinterpret_cast<const float4*>(residual + i);
      old[0] = r.x, old[1] = r.y, old[2] = r.z, old[3] = r.w;
    }
  }
  u32 passed = 0;
  for (int c = 0; c < 4; ++c) {
    if (!kWide) {
      if (i + c < part.lo || i + c >= part.hi) continue;
      v[c] = g[i + c];
      if (residual) old[c] = residual[i + c];
    }
    if (residual) v[c] = __fadd_rn(v[c], old[c]);
    if (!is_finite(v[c])) {
      *bad = true;
    } else {
      const bool over = __uint_as_float(magnitude(v[c])) >= threshold;
      passed |= over ? 1u << c : 0u;
      old[c] = over ? 0.0f : v[c];
    }
    if (!kWide && residual) residual[i + c] = old[c];
  }
  if (kWide && residual) *reinterpret_cast<float4*>(residual + i) = float4{old[0], old[1], old[2], old[3]};
  return passed;
}

// found: [0] entries that passed, [1] not 0 if something was not finite, [2] those of [start, n) that passed; the caller has set
// it to 0. state: see scan.cuh. The grid has a block of CML_THREADS for every tile. n > 0, 0 <= start < n.
CML_KERNEL select_over(const float* g, float* residual, i64 n, const float* threshold, i64 start, u32* idx, float* val, i64 cap,
                       u64* state, i64* found) {
  CML_SHARED(SelectShared, shared);
  const u32 t = threadIdx.x, warp = t / 32, lane = lane_of_warp();
  if (t == 0) shared.tile = take_tile(state);
  __syncthreads();
  const i64 tile = shared.tile;
  const Part part = part_of(tile, n, start);
  const bool aligned = (reinterpret_cast<u64>(g) % 16 == 0) && (reinterpret_cast<u64>(residual) % 16 == 0);
  const float cut = *threshold;
  float v[ROUNDS * 4];
  u32 passed = 0, counts = 0;  // one bit per element; one byte per round
  bool bad = false;
  for (int r = 0; r < ROUNDS; ++r) {
    const i64 i = part.base + (r * CML_THREADS + static_cast<i64>(t)) * 4;
    const bool wide = aligned && i >= part.lo && i + 4 <= part.hi;
    const u32 four = wide ? group_of_four<true>(g, residual, i, part, cut, v + 4 * r, &bad)
                          : group_of_four<false>(g, residual, i, part, cut, v + 4 * r, &bad);
    passed |= four << (4 * r);
    counts |= static_cast<u32>(__popc(four)) << (8 * r);
  }
  if (bad) found[1] = 1;
  const u32 upto = warp_scan(counts);  // at most 128 in each byte
  if (lane == 31)
    for (int r = 0; r < ROUNDS; ++r) shared.before[r * 8 + warp] = upto >> (8 * r) & 255;
  __syncthreads();
  if (warp == 0) {
    const u32 own = shared.before[lane], until = warp_scan(own), total = __shfl_sync(CML_ALL, until, 31);
    const u32 base = sum_before(state, tile, total);
    shared.before[lane] = base + until - own;
    if (lane == 0) {
      if (tile + 1 == (n - (start & ~3ll) + TILE - 1) / TILE) found[2] = base + total;
      if (tile + 1 == gridDim.x) found[0] = base + total;
    }
  }
  __syncthreads();
  for (int r = 0; r < ROUNDS; ++r) {
    i64 rank = shared.before[r * 8 + warp] + ((upto - counts) >> (8 * r) & 255);
    for (int c = 0; c < 4; ++c) {
      if (!(passed >> (4 * r + c) & 1)) continue;
      const i64 i = part.base + (r * CML_THREADS + static_cast<i64>(t)) * 4 + c;
      if (rank < cap) {
        idx[rank] = static_cast<u32>(i);
        val[rank] = v[4 * r + c];
      } else if (residual) {
        residual[i] = v[4 * r + c];
      }
      ++rank;
    }
  }
}

// Entries in the order of their positions: those of [0, start), which the scan found last, come first. `first` counts the others.
CML_KERNEL rotate(u32* idx, float* val, const u32* from_idx, const float* from_val, const i64* entries, const i64* found_first, i64 cap) {
  const i64 count = least(*entries, cap), first = least(*found_first, cap);
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j < count; j += step) {
    const i64 at = j + first < count ? j + first : j + first - count;
    idx[j] = from_idx[at];
    val[j] = from_val[at];
  }
}

// n > 0.
CML_KERNEL sample_abs(const float* g, const float* residual, i64 n, i64 offset, i64 count, float* out) {
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j < count; j += step)
    out[j] = sampled(g, residual, n, offset, count, j);
}

// Sums over all tiles before one's own while the grid runs, in one pass over memory (decoupled look-back). Knows no data.
//
// state[0] counts the tiles given out: a tile belongs to whoever asks first, so all tiles before it have been started and no
// block waits for one that cannot run. state[1 + t] is tile t: its own sum or, later, the sum up to its end. Sum and kind share
// one word, so they are seen together and no fence is needed. The caller has set all of it to 0.
#ifndef CML_SCAN
#define CML_SCAN
#include "common.cuh"

#define TILE_SUM 1ull
#define TILE_PREFIX 2ull

// The next tile. For one thread.
CML_FN i64 take_tile(u64* state) { return static_cast<i64>(atomicAdd(&state[0], 1ull)); }

CML_FN u64 tile_word(u64* state, i64 tile) { return tile < 0 ? TILE_PREFIX : *static_cast<volatile u64*>(&state[1 + tile]); }

// The sum of all tiles before `tile`, whose own sum is `own`. For all lanes of one warp.
CML_FN u32 sum_before(u64* state, i64 tile, u32 own) {
  const u32 lane = lane_of_warp();
  if (lane == 0 && tile > 0) atomicExch(&state[1 + tile], static_cast<u64>(own) << 2 | TILE_SUM);
  u32 before = 0;
  for (i64 at = tile - 1 - lane;; at -= 32) {
    u64 word = tile_word(state, at);
    while (__any_sync(CML_ALL, (word & 3) == 0)) word = tile_word(state, at);
    const u32 prefixes = __ballot_sync(CML_ALL, (word & 3) == TILE_PREFIX);
    const u32 nearest = prefixes ? static_cast<u32>(__ffs(static_cast<int>(prefixes)) - 1) : 31;
    before += warp_sum(lane <= nearest ? static_cast<u32>(word >> 2) : 0);
    if (prefixes) break;
  }
  if (lane == 0) atomicExch(&state[1 + tile], static_cast<u64>(before + own) << 2 | TILE_PREFIX);
  return before;
}

#endif

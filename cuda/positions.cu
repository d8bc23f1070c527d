// Positions as bytes: Elias-Fano and bitmap, packed and unpacked. Knows no values.
#include "layout.cuh"
#include "scan.cuh"

#define WORDS 4                            // of 32 bits, for each thread
#define UNPACK_TILE (CML_THREADS * WORDS)  // words

// Packing sets bits in zeros. A count below 0 means that nothing is to be packed.
CML_KERNEL clear_positions(u8* out, i64 n, const i64* count, i64 values, i64 kind) {
  const i64 k = *count;
  if (k <= 0) return;
  const Packing size = packing(n, k, kind);
  out += positions_at(k, values);
  for (i64 b = size.low_nbytes + thread_of_grid(), step = threads_of_grid(); b < size.nbytes; b += step) out[b] = 0;
}

// The word of 4 bytes may reach over the ends of the bits, into bytes that no one else writes meanwhile.
CML_FN void set_bit(u8* bytes, u64 bit) {
  const u64 address = reinterpret_cast<u64>(bytes) + bit / 8, word = address & ~3ull;
  atomicOr(reinterpret_cast<u32*>(word), 1u << ((address - word) * 8 + bit % 8));
}

// Bits [8b, 8b + 8) of the low parts.
CML_FN u8 low_byte(const u32* idx, i64 k, int low, i64 b) {
  const u32 mask = (1u << low) - 1;
  i64 j = 8 * b / low;
  int at = -static_cast<int>(8 * b % low);  // where the part of entry j begins, seen from the byte
  u32 bits = 0;
  for (; at < 8 && j < k; at += low, ++j) {
    const u32 part = idx[j] & mask;
    bits |= at < 0 ? part >> -at : part << at;
  }
  return static_cast<u8>(bits);
}

CML_KERNEL pack_positions(u8* out, const u32* idx, i64 n, const i64* count, i64 values, i64 kind) {
  const i64 k = *count;
  if (k <= 0) return;
  const Packing size = packing(n, k, kind);
  out += positions_at(k, values);
  const i64 first = thread_of_grid(), step = threads_of_grid();
  for (i64 b = first; b < size.low_nbytes; b += step) out[b] = low_byte(idx, k, size.low, b);
  for (i64 j = first; j < k; j += step)
    set_bit(out + size.low_nbytes, size.kind == BITMAP ? idx[j] : (idx[j] >> size.low) + static_cast<u64>(j));
}

CML_FN u32 word_at(const u8* bytes, i64 nbytes, i64 at) {
  u32 word = 0;
  for (int b = 0; b < 4; ++b)
    if (at + b < nbytes) word |= static_cast<u32>(bytes[at + b]) << (8 * b);
  return word;
}

CML_FN u64 low_bits(const u8* in, int low, i64 j) {
  const i64 bit = j * low;
  u64 bits = 0;
  for (i64 b = bit / 8; 8 * b < bit + low; ++b) bits |= static_cast<u64>(in[b]) << (8 * (b - bit / 8));
  return bits >> (bit % 8) & ((1ull << low) - 1);
}

CML_FN bool padding_zero(const u8* bytes, i64 nbits) { return nbits % 8 == 0 || bytes[nbits / 8] >> (nbits % 8) == 0; }

struct UnpackShared {
  i64 tile;
  u32 before[CML_THREADS / 32];
};

// Exactly k positions out of the bytes, whose number the caller has checked; k > 0. *valid becomes 0 if the bytes break the
// format, but for the order of the positions, which `check_increasing` sees. idx holds anything then. A block for every tile.
CML_KERNEL unpack_positions(u32* idx, i64 k, i64 n, const u8* in, i64 kind, u64* state, i64* valid) {
  CML_SHARED(UnpackShared, shared);
  const Packing size = packing(n, k, kind);
  const u8* high = in + size.low_nbytes;
  const i64 nbytes = size.nbytes - size.low_nbytes;
  const u32 t = threadIdx.x, warp = t / 32, lane = lane_of_warp();
  if (t == 0) shared.tile = take_tile(state);
  __syncthreads();
  const i64 tile = shared.tile, begin = tile * UNPACK_TILE + static_cast<i64>(t) * WORDS;
  u32 words[WORDS], own = 0;
  for (int w = 0; w < WORDS; ++w) {
    words[w] = word_at(high, nbytes, 4 * (begin + w));
    own += static_cast<u32>(__popc(words[w]));
  }
  const u32 until = warp_scan(own);
  if (lane == 31) shared.before[warp] = until;
  __syncthreads();
  if (warp == 0) {
    const u32 mine = lane < CML_THREADS / 32 ? shared.before[lane] : 0, upto = warp_scan(mine);
    const u32 total = __shfl_sync(CML_ALL, upto, 31), base = sum_before(state, tile, total);
    if (lane < CML_THREADS / 32) shared.before[lane] = base + upto - mine;
    if (lane == 0 && tile + 1 == gridDim.x && base + total != k) *valid = 0;
    if (lane == 0 && tile == 0 && (!padding_zero(in, k * size.low) || !padding_zero(high, size.high_nbits))) *valid = 0;
  }
  __syncthreads();
  i64 j = static_cast<i64>(shared.before[warp]) + until - own;
  for (int w = 0; w < WORDS; ++w) {
    for (u32 word = words[w]; word != 0 && j < k; word &= word - 1, ++j) {
      u64 i = static_cast<u64>(32 * (begin + w) + __ffs(static_cast<int>(word)) - 1);
      if (size.kind == ELIAS_FANO) i = (i - static_cast<u64>(j)) << size.low | low_bits(in, size.low, j);
      if (i >= static_cast<u64>(n)) *valid = 0;
      idx[j] = static_cast<u32>(i);
    }
  }
}

// *valid becomes 0 unless idx increases strictly.
CML_KERNEL check_increasing(const u32* idx, i64 k, i64* valid) {
  for (i64 j = thread_of_grid(), step = threads_of_grid(); j + 1 < k; j += step)
    if (idx[j] >= idx[j + 1]) *valid = 0;
}

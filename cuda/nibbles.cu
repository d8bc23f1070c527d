// 4-bit values with a float32 scale for each block, two in a byte, as cml_nibbles_encode and cml_nibbles_decode.
#include "nibbles.cuh"
#include "quantise.cuh"

// A warp for each block. *finite becomes 0 if not all x are.
CML_KERNEL nibbles_measure(float* scale, const float* x, i64 n, i64 block, i64* finite) {
  CML_EACH_BLOCK(b) {
    const u32 most = most_of(x, nullptr, b * block, least(block, n - b * block));
    if (lane_of_warp() != 0) continue;
    if (most >= CML_INF) *finite = 0;
    scale[b] = scale4_of(__uint_as_float(most));
  }
}

// rest = x - what the codes say, if it is not null. A thread takes a byte; block is even.
CML_KERNEL nibbles_code(u8* q, const float* scale, const float* x, float* rest, i64 n, i64 block, const i64* finite) {
  if (*finite == 0) return;
  for (i64 i = 2 * thread_of_grid(), step = 2 * threads_of_grid(); i < n; i += step) {
    const float s = scale[i / block];
    int pair[2] = {0, 0};
    for (i64 j = 0; j < 2 && i + j < n; ++j) {
      pair[j] = nibble_of(x[i + j], s);
      if (rest) rest[i + j] = __fsub_rn(x[i + j], float_of_nibble(pair[j], s));
    }
    q[i / 2] = byte_of_nibbles(pair[0], pair[1]);
  }
}

CML_KERNEL nibbles_decode(float* out, const u8* q, const float* scale, i64 n, i64 block) {
  for (i64 i = thread_of_grid(), step = threads_of_grid(); i < n; i += step) {
    const int raw = q[i / 2] >> (4 * (i % 2)) & 15;
    out[i] = float_of_nibble(raw - ((raw & 8) << 1), scale[i / block]);
  }
}

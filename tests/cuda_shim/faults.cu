// Kernels that do what hardware leaves undefined, for the test that the shim says so.
#include "common.cuh"

struct Eight {
  u32 words[8];
};

CML_KERNEL diverging_barrier(u32* out) {
  if (threadIdx.x < 40) {
    __syncthreads();
    out[threadIdx.x] = 1;
  } else {
    __syncthreads();
  }
}

CML_KERNEL barrier_after_exit(u32* out) {
  if (threadIdx.x == 7) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

CML_KERNEL shuffle_from_exited(u32* out) {
  if (lane_of_warp() == 5) return;
  out[threadIdx.x] = __shfl_sync(CML_ALL, threadIdx.x, 5);
}

CML_KERNEL shuffle_outside_mask(u32* out) {
  if (lane_of_warp() < 16) out[threadIdx.x] = __shfl_sync(0xffffu, threadIdx.x, 20);
}

CML_KERNEL waits_for_later_block(u32* flags) {
  if (threadIdx.x == 0) {
    if (blockIdx.x + 1 == gridDim.x) atomicExch(&flags[0], 1u);
  }
  while (__any_sync(CML_ALL, *static_cast<volatile u32*>(&flags[0]) == 0)) {
  }
}

CML_KERNEL outside_of_shared(u32* out) {
  CML_SHARED(Eight, shared);
  shared.words[threadIdx.x & 15] = 1;
  out[0] = shared.words[0];
}

// Not a fault: a sum over a block that needs its barriers.
CML_KERNEL sum_of_block(u32* out) {
  CML_SHARED(Eight, shared);
  const u32 total = warp_sum(threadIdx.x);
  if (lane_of_warp() == 0) shared.words[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x == 0)
    for (u32 w = 0; w < blockDim.x / 32; ++w) out[blockIdx.x] += shared.words[w];
}

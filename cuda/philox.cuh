// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011): random words as a function of key, element and step. Knows no codecs.
//
// Element i takes word i % 4 of block i / 4. The counter of a block is (block low, block high, step low, step high).
#ifndef CML_PHILOX
#define CML_PHILOX
#include "common.cuh"

struct Words {
  u32 at[4];
};

CML_FN Words philox(u64 key, u64 block, u64 step) {
  u32 c0 = static_cast<u32>(block), c1 = static_cast<u32>(block >> 32);
  u32 c2 = static_cast<u32>(step), c3 = static_cast<u32>(step >> 32);
  u32 k0 = static_cast<u32>(key), k1 = static_cast<u32>(key >> 32);
  for (int r = 0; r < 10; ++r) {
    const u64 p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
    c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(p1);
    c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

CML_FN float uniform(u32 word) { return __fmul_rn(static_cast<float>(word >> 8), 5.9604644775390625e-8f); }

#endif

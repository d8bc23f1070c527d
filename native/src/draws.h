// Philox4x32-10 (Salmon et al. 2011): random words as a function of key and counter. Knows no codecs.
#pragma once

#include <cstdint>

namespace cml {

struct Words {
  uint32_t w[4];
};

// Block `block` of step `step` under `key`. Word i of a stream is w[i % 4] of block i / 4.
inline Words philox(uint64_t key, uint64_t block, uint64_t step) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  Words c{{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), static_cast<uint32_t>(step),
           static_cast<uint32_t>(step >> 32)}};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c.w[0], b = uint64_t{0xCD9E8D57u} * c.w[2];
    c = {{static_cast<uint32_t>(b >> 32) ^ c.w[1] ^ k0, static_cast<uint32_t>(b),
          static_cast<uint32_t>(a >> 32) ^ c.w[3] ^ k1, static_cast<uint32_t>(a)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

}  // namespace cml

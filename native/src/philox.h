// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, 2011): random numbers as a pure
// function of key, element and step. Plain C++ that nvcc compiles too; knows no vectors, no codecs.
//
// Element i of a bucket takes word i % 4 of block i / 4. The counter of a block is (block lo, block hi, step lo, step hi),
// the key (key lo, key hi). A word as a uniform number in [0, 1) is (word >> 8) * 2^-24.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CML_ANYWHERE __host__ __device__
#else
#define CML_ANYWHERE
#endif

namespace cml {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxMul0 = 0xD2511F53u, kPhiloxMul1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxAdd0 = 0x9E3779B9u, kPhiloxAdd1 = 0xBB67AE85u;  // to the key, after each round

struct Words {
  uint32_t at[4];
};

CML_ANYWHERE inline Words philox(uint64_t key, uint64_t block, uint64_t step) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32);
  uint32_t c2 = static_cast<uint32_t>(step), c3 = static_cast<uint32_t>(step >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int r = 0; r < kPhiloxRounds; ++r) {
    const uint64_t p0 = uint64_t{kPhiloxMul0} * c0, p1 = uint64_t{kPhiloxMul1} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxAdd0;
    k1 += kPhiloxAdd1;
  }
  return {{c0, c1, c2, c3}};
}

CML_ANYWHERE inline float uniform(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

// The words of elements in any order, quick for neighbours.
class Stream {
 public:
  CML_ANYWHERE Stream(uint64_t key, uint64_t step) : key_(key), step_(step), words_(philox(key, 0, step)) {}

  CML_ANYWHERE uint32_t word(uint64_t i) {
    if (i / 4 != block_) words_ = philox(key_, block_ = i / 4, step_);
    return words_.at[i % 4];
  }

 private:
  uint64_t key_, step_, block_ = 0;
  Words words_;
};

}  // namespace cml

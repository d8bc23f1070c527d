// What positions are packed with: sizes, bits out of bytes, and the writer and the walk of Elias-Fano. Knows no values.
#pragma once

#include "sparse.h"

namespace cml {

struct EliasFano {
  int low;           // bits of each position that are stored as they are
  int64_t low_nbytes;
  int64_t high_nbits;
  int64_t nbytes;
};

inline EliasFano elias_fano(int64_t n, int64_t k) {
  if (k == 0) return {0, 0, 0, 0};
  int low = 0;
  for (int64_t ratio = n / k; ratio > 1; ratio >>= 1) ++low;
  const int64_t low_nbytes = (k * low + 7) / 8, high_nbits = k + (n >> low) + 1;
  return {low, low_nbytes, high_nbits, low_nbytes + (high_nbits + 7) / 8};
}

inline int64_t bitmap_nbytes(int64_t n) { return (n + 7) / 8; }

inline void set_bit(uint8_t* out, int64_t bit) { out[bit / 8] = static_cast<uint8_t>(out[bit / 8] | 1u << (bit % 8)); }

// Eight bytes from `at`, zeros past the end.
inline uint64_t word(const uint8_t* in, int64_t nbytes, int64_t at) {
  if (at + 8 <= nbytes) return load(reinterpret_cast<const uint64_t*>(in + at));
  uint64_t w = 0;
  if (at < nbytes) std::memcpy(&w, in + at, static_cast<size_t>(nbytes - at));
  return w;
}

inline int64_t ones(const uint8_t* in, int64_t nbytes) {
  int64_t sum = 0;
  for (int64_t at = 0; at < nbytes; at += 8) sum += __builtin_popcountll(word(in, nbytes, at));
  return sum;
}

// Whether the bits of the last byte past nbits are zero.
inline bool padding_zero(const uint8_t* in, int64_t nbits) { return nbits % 8 == 0 || in[nbits / 8] >> (nbits % 8) == 0; }

// Writes positions one by one, in increasing order.
class EliasFanoWriter {
 public:
  EliasFanoWriter(uint8_t* out, const EliasFano& size)
      : low_(size.low), mask_((uint64_t{1} << size.low) - 1), out_(out), high_(out + size.low_nbytes) {
    std::memset(high_, 0, static_cast<size_t>(size.nbytes - size.low_nbytes));
  }
  void put(int64_t i) {
    set_bit(high_, (i >> low_) + j_++);
    pending_ |= (static_cast<uint64_t>(i) & mask_) << held_;
    for (held_ += low_; held_ >= 32; held_ -= 32, pending_ >>= 32, out_ += 4)
      store(reinterpret_cast<uint32_t*>(out_), 0, static_cast<uint32_t>(pending_));
  }
  void finish() {
    for (; held_ > 0; held_ -= 8, pending_ >>= 8) *out_++ = static_cast<uint8_t>(pending_);
  }

 private:
  int low_;
  uint64_t mask_;
  uint8_t* out_;
  uint8_t* high_;
  int64_t j_ = 0;
  uint64_t pending_ = 0;
  int held_ = 0;
};

// Runs through all positions; kStore writes them, otherwise checks that they increase and stay below n.
template <bool kStore>
bool walk(uint32_t* idx, int64_t n, const uint8_t* in, const EliasFano& size) {
  const uint8_t* high = in + size.low_nbytes;
  const int64_t high_nbytes = size.nbytes - size.low_nbytes;
  const uint64_t mask = (uint64_t{1} << size.low) - 1;
  int64_t j = 0, last = -1;
  for (int64_t at = 0; at < high_nbytes; at += 8) {
    for (uint64_t w = word(high, high_nbytes, at); w != 0; w &= w - 1, ++j) {
      const int64_t upper = 8 * at + __builtin_ctzll(w) - j, bit = j * size.low;
      const uint64_t lower = word(in, size.nbytes, bit / 8) >> (bit % 8) & mask;
      const int64_t i = upper << size.low | static_cast<int64_t>(lower);
      if (kStore)
        store(idx, j, static_cast<uint32_t>(i));
      else if (i <= last || i >= n)
        return false;
      last = i;
    }
  }
  return true;
}

// Whether `in` is k >= 1 positions below `limit`, laid out as `size`.
inline bool elias_fano_ok(const uint8_t* in, int64_t k, int64_t limit, const EliasFano& size) {
  const uint8_t* high = in + size.low_nbytes;
  return padding_zero(in, k * size.low) && padding_zero(high, size.high_nbits) &&
         ones(high, size.nbytes - size.low_nbytes) == k && walk<false>(nullptr, limit, in, size);
}

inline void bitmap_walk(uint32_t* idx, const uint8_t* in, int64_t nbytes) {
  int64_t j = 0;
  for (int64_t at = 0; at < nbytes; at += 8)
    for (uint64_t w = word(in, nbytes, at); w != 0; w &= w - 1)
      store(idx, j++, static_cast<uint32_t>(8 * at + __builtin_ctzll(w)));
}

}  // namespace cml

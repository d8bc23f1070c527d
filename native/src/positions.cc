// Positions as bytes: Elias-Fano and bitmap. Knows no values. Bit tricks do all the work, so one body serves every CPU.
#include "sparse.h"

namespace cml {
namespace {

struct Layout {
  int low;           // bits of each position that are stored as they are
  int64_t low_nbytes;
  int64_t high_nbits;
  int64_t nbytes;
};

bool valid(int64_t n, int64_t k) { return n >= 0 && n <= kMaxN && k >= 0 && k <= n; }

Layout layout(int64_t n, int64_t k) {
  if (k == 0) return {0, 0, 0, 0};
  int low = 0;
  for (int64_t ratio = n / k; ratio > 1; ratio >>= 1) ++low;
  const int64_t low_nbytes = (k * low + 7) / 8, high_nbits = k + (n >> low) + 1;
  return {low, low_nbytes, high_nbits, low_nbytes + (high_nbits + 7) / 8};
}

// Eight bytes from `at`, zeros past the end.
inline uint64_t word(const uint8_t* in, int64_t nbytes, int64_t at) {
  if (at + 8 <= nbytes) return load(reinterpret_cast<const uint64_t*>(in + at));
  uint64_t w = 0;
  if (at < nbytes) std::memcpy(&w, in + at, static_cast<size_t>(nbytes - at));
  return w;
}

int64_t ones(const uint8_t* in, int64_t nbytes) {
  int64_t sum = 0;
  for (int64_t at = 0; at < nbytes; at += 8) sum += __builtin_popcountll(word(in, nbytes, at));
  return sum;
}

// Whether the bits of the last byte past nbits are zero.
bool padding_zero(const uint8_t* in, int64_t nbits) { return nbits % 8 == 0 || in[nbits / 8] >> (nbits % 8) == 0; }

// Runs through all positions; kStore writes them, otherwise checks that they increase and stay below n.
template <bool kStore>
bool walk(uint32_t* idx, int64_t n, const uint8_t* in, const Layout& size) {
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

}  // namespace
}  // namespace cml

extern "C" int64_t cml_ef_bound(int64_t n, int64_t k) {
  return cml::valid(n, k) ? cml::layout(n, k).nbytes : static_cast<int64_t>(CML_ERR_ARGUMENT);
}

extern "C" int64_t cml_ef_encode(uint8_t* out, int64_t cap, const uint32_t* idx, int64_t k, int64_t n) {
  if (!cml::valid(n, k) || !cml::positions_ok(idx, k, n)) return CML_ERR_ARGUMENT;
  const cml::Layout size = cml::layout(n, k);
  if (size.nbytes > cap) return CML_ERR_CAPACITY;
  if (k == 0) return 0;
  uint8_t* high = out + size.low_nbytes;
  std::memset(high, 0, static_cast<size_t>(size.nbytes - size.low_nbytes));
  const uint64_t mask = (uint64_t{1} << size.low) - 1;
  uint64_t pending = 0;
  int held = 0;
  for (int64_t j = 0; j < k; ++j) {
    const int64_t i = cml::load(idx, j), bit = (i >> size.low) + j;
    high[bit / 8] = static_cast<uint8_t>(high[bit / 8] | 1u << (bit % 8));
    pending |= (static_cast<uint64_t>(i) & mask) << held;
    for (held += size.low; held >= 32; held -= 32, pending >>= 32, out += 4)
      cml::store(reinterpret_cast<uint32_t*>(out), 0, static_cast<uint32_t>(pending));
  }
  for (; held > 0; held -= 8, pending >>= 8) *out++ = static_cast<uint8_t>(pending);
  return size.nbytes;
}

extern "C" int64_t cml_ef_decode(uint32_t* idx, int64_t k, int64_t n, const uint8_t* in, int64_t nbytes) {
  if (n < 0 || n > cml::kMaxN || k < 0) return CML_ERR_ARGUMENT;
  if (k > n) return CML_ERR_CORRUPT;
  const cml::Layout size = cml::layout(n, k);
  if (nbytes != size.nbytes) return CML_ERR_CORRUPT;
  if (k == 0) return 0;
  const uint8_t* high = in + size.low_nbytes;
  if (!cml::padding_zero(in, k * size.low) || !cml::padding_zero(high, size.high_nbits) ||
      cml::ones(high, nbytes - size.low_nbytes) != k || !cml::walk<false>(idx, n, in, size))
    return CML_ERR_CORRUPT;
  cml::walk<true>(idx, n, in, size);
  return k;
}

extern "C" int64_t cml_bitmap_encode(uint8_t* out, int64_t cap, const uint32_t* idx, int64_t k, int64_t n) {
  if (!cml::valid(n, k) || !cml::positions_ok(idx, k, n)) return CML_ERR_ARGUMENT;
  const int64_t nbytes = (n + 7) / 8;
  if (nbytes > cap) return CML_ERR_CAPACITY;
  if (n == 0) return 0;
  std::memset(out, 0, static_cast<size_t>(nbytes));
  for (int64_t j = 0; j < k; ++j) {
    const uint32_t i = cml::load(idx, j);
    out[i / 8] = static_cast<uint8_t>(out[i / 8] | 1u << (i % 8));
  }
  return nbytes;
}

extern "C" int64_t cml_bitmap_decode(uint32_t* idx, int64_t k, int64_t n, const uint8_t* in, int64_t nbytes) {
  if (n < 0 || n > cml::kMaxN || k < 0) return CML_ERR_ARGUMENT;
  if (nbytes != (n + 7) / 8 || !cml::padding_zero(in, n) || cml::ones(in, nbytes) != k) return CML_ERR_CORRUPT;
  int64_t j = 0;
  for (int64_t at = 0; at < nbytes; at += 8)
    for (uint64_t w = cml::word(in, nbytes, at); w != 0; w &= w - 1)
      cml::store(idx, j++, static_cast<uint32_t>(8 * at + __builtin_ctzll(w)));
  return k;
}

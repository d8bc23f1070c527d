// Order among magnitudes: the k-th largest, how many reach a cut, and trimming candidates to the k largest.
#include "dispatch.h"

namespace cml {
namespace {

// Magnitudes are compared as bits: they are ordered like integers, and NaN is above infinity.
inline uint32_t magnitude(const float* g, const float* residual, int64_t i) {
  return bits_of(residual ? load(g, i) + load(residual, i) : load(g, i)) & kAbs;
}

struct Between {
  int64_t above = 0;   // larger than high
  int64_t inside = 0;  // in [low, high], at the front of the scratch
};

void split_portable(const float* g, const float* residual, int64_t from, int64_t n, uint32_t low, uint32_t high, uint32_t* x,
                    Between& out) {
  for (int64_t i = from; i < n; ++i) {
    const uint32_t v = magnitude(g, residual, i);
    out.above += v > high;
    if (v >= low && v <= high) store(x, out.inside++, v);
  }
}

#if CML_VECTORS

template <bool kResidual>
CML_AVX2 int64_t split_avx2(const float* g, const float* residual, int64_t n, uint32_t low, uint32_t high, uint32_t* x,
                            Between& out) {
  const __m256i l = _mm256_set1_epi32(static_cast<int>(low) - 1), h = _mm256_set1_epi32(static_cast<int>(high));
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(kAbs));
  __m256i above = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    uint32_t inside = 0;
    for (int j = 0; j < 4; ++j) {
      __m256 f = _mm256_loadu_ps(g + i + 8 * j);
      if (kResidual) f = _mm256_add_ps(f, _mm256_loadu_ps(residual + i + 8 * j));
      const __m256i v = _mm256_and_si256(mask, _mm256_castps_si256(f)), larger = _mm256_cmpgt_epi32(v, h);
      above = _mm256_sub_epi32(above, larger);
      const __m256i in = _mm256_andnot_si256(larger, _mm256_cmpgt_epi32(v, l));
      inside |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(in))) << (8 * j);
    }
    for (; inside != 0; inside &= inside - 1)
      store(x, out.inside++, magnitude(g, kResidual ? residual : nullptr, i + static_cast<int64_t>(_tzcnt_u32(inside))));
  }
  uint32_t lanes[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), above);
  for (const uint32_t lane : lanes) out.above += lane;
  return i;
}

#endif

// What of the magnitudes lies in [low, high] goes to x.
Between split(const float* g, const float* residual, int64_t n, uint32_t low, uint32_t high, uint32_t* x) {
  Between out;
  int64_t i = 0;
#if CML_VECTORS
  if (wide())
    i = residual ? split_avx2<true>(g, residual, n, low, high, x, out) : split_avx2<false>(g, nullptr, n, low, high, x, out);
#endif
  split_portable(g, residual, i, n, low, high, x, out);
  return out;
}

constexpr int kBinBits = 10;

// The rank-th largest of x, whose order is lost. By counts of the leading bits: its branches do not depend on the data, where
// a partition would guess wrong at every other element.
uint32_t nth(uint32_t* x, int64_t n, int64_t rank) {
  for (;;) {
    uint32_t least = 0xffffffffu, most = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t v = load(x, i);
      least = v < least ? v : least;
      most = v > most ? v : most;
    }
    int shift = 0;
    while ((most - least) >> shift >> kBinBits != 0) ++shift;
    uint32_t counts[1 << kBinBits] = {};
    for (int64_t i = 0; i < n; ++i) ++counts[(load(x, i) - least) >> shift];
    uint32_t bin = (most - least) >> shift;
    for (; rank > counts[bin]; --bin) rank -= counts[bin];
    if (shift == 0) return least + bin;
    int64_t inside = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t v = load(x, i);
      store(x, inside, v);
      inside += (v - least) >> shift == bin;
    }
    n = inside;
  }
}

constexpr int64_t kSmall = 1024, kFew = 512, kMany = 2048, kLarge = 100000;
constexpr int64_t kSlack = 4;  // times the deviation of the rank that a sample estimates

// The rank-th largest of |g + residual|. A sample brackets it, one pass keeps what lies inside the bracket, and only that is
// put in order. Where the bracket misses, all is.
uint32_t kth(const float* g, const float* residual, int64_t n, int64_t rank, uint32_t* x) {
  if (n > kSmall) {
    uint32_t sample[kMany];
    const int64_t size = n > kLarge ? kMany : kFew;
    for (int64_t j = 0; j < size; ++j) sample[j] = magnitude(g, residual, j * n / size);
    const int64_t place = rank * size / n;
    int64_t spread = 1;
    while (spread * spread < place * (size - place) / size + 1) ++spread;
    const int64_t upper = place - kSlack * spread, lower = place + kSlack * spread;
    const uint32_t low = lower < size ? nth(sample, size, lower + 1) : 0;
    const uint32_t high = upper > 0 ? nth(sample, size, upper) : kAbs;
    const Between found = split(g, residual, n, low, high, x);
    const int64_t inside = rank - found.above;
    if (inside >= 1 && inside <= found.inside) return nth(x, found.inside, inside);
  }
  split(g, residual, n, 0, kAbs, x);
  return nth(x, n, rank);
}

}  // namespace
}  // namespace cml

extern "C" int64_t cml_kth_abs(const float* g, const float* residual, int64_t n, int64_t rank, uint32_t* scratch, float* out) {
  if (n < 1 || n > cml::kMaxN || rank < 1 || rank > n) return CML_ERR_ARGUMENT;
  *out = cml::float_of(cml::kth(g, residual, n, rank, scratch));
  return CML_OK;
}

extern "C" int64_t cml_count_above(const float* x, int64_t n, float cut) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += cml::load(x, i) >= cut;
  return count;
}

extern "C" int64_t cml_trim(float* residual, int64_t n, uint32_t* idx, float* val, int64_t count, int64_t keep, int64_t from,
                            uint32_t* scratch) {
  if (n < 0 || n > cml::kMaxN || keep < 1 || keep > count || count > n) return CML_ERR_ARGUMENT;
  const uint32_t cut = cml::kth(val, nullptr, count, keep, scratch);
  int64_t above = 0, equal = 0, before = 0;
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t m = cml::magnitude(val, nullptr, j);
    above += m > cut;
    equal += m == cut;
    before += m == cut && cml::load(idx, j) < from;
  }
  // Of equals, the first `wanted` from position `from` on, going round.
  const int64_t wanted = keep - above;
  int64_t left = 0, seen = equal - before;
  bool wrapped = true;
  for (int64_t j = 0; j < count; ++j) {
    const uint32_t m = cml::magnitude(val, nullptr, j), i = cml::load(idx, j);
    if (wrapped && i >= from) {
      wrapped = false;
      seen = 0;
    }
    const float v = cml::load(val, j);
    if (m > cut || (m == cut && seen++ < wanted)) {
      cml::store(idx, left, i);
      cml::store(val, left++, v);
    } else if (residual) {
      cml::store(residual, static_cast<int64_t>(i), cml::load(residual, static_cast<int64_t>(i)) + v);
    }
  }
  return left;
}

// Selection by threshold in one pass over gradient and residual. Knows no payloads.
#include "sparse.h"

namespace cml {
namespace {

struct Picked {
  uint32_t* idx;
  float* val;
  int64_t cap;
  int64_t count = 0;
  int64_t overflow = 0;
  bool finite = true;
};

template <bool kResidual>
void scan_portable(const float* g, float* residual, int64_t lo, int64_t hi, float threshold, Picked& out) {
  for (int64_t i = lo; i < hi; ++i) {
    const float v = kResidual ? load(g, i) + load(residual, i) : load(g, i);
    const float a = float_of(bits_of(v) & kAbs);
    float kept = v;
    if (!(a < threshold)) {
      if (!is_finite(v)) {
        out.finite = false;
        continue;
      }
      if (out.count < out.cap) {
        store(out.idx, out.count, static_cast<uint32_t>(i));
        store(out.val, out.count, v);
        ++out.count;
        kept = 0.0f;
      } else {
        ++out.overflow;
      }
    }
    if (kResidual) store(residual, i, kept);
  }
}

#if CML_VECTORS

// The scan works chunk by chunk, so that what the first pass touched is still in the nearest cache for the other two:
//   1. residual = v everywhere, one bit per element that passed: no branch depends on the data;
//   2. the bits become positions: four are written whether set or not, then the count moves on by the number of set bits;
//   3. the values are fetched from the residual, which becomes zero there.
// At 1 % density a branch per hit would cost more than all the arithmetic.
constexpr int64_t kChunk = 2048;
constexpr int kGroup = 64;
constexpr int kBlind = 4;

// The group as mask, when an element may not be finite: such a one leaves its residual alone and never passes.
template <bool kResidual>
uint64_t mask_with_bad(const float* g, float* residual, int64_t i, float threshold, bool* finite) {
  uint64_t mask = 0;
  for (int j = 0; j < kGroup; ++j) {
    const float v = kResidual ? load(g, i + j) + load(residual, i + j) : load(g, i + j);
    if (!is_finite(v)) {
      *finite = false;
      continue;
    }
    if (!(float_of(bits_of(v) & kAbs) < threshold)) mask |= uint64_t{1} << j;
    if (kResidual) store(residual, i + j, v);
  }
  return mask;
}

template <bool kResidual>
CML_AVX2 inline uint64_t mask_group(const float* g, float* residual, int64_t i, float threshold, bool* finite) {
  const __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(~kAbs)));
  const __m256 limit = _mm256_set1_ps(threshold);
  __m256 v[8];
  __m256i most = _mm256_setzero_si256();
  uint64_t mask = 0;
  for (int j = 0; j < 8; ++j) {
    v[j] = _mm256_loadu_ps(g + i + 8 * j);
    if (kResidual) v[j] = _mm256_add_ps(v[j], _mm256_loadu_ps(residual + i + 8 * j));
    const __m256 magnitude = _mm256_andnot_ps(sign, v[j]);
    most = _mm256_max_epi32(most, _mm256_castps_si256(magnitude));
    const auto passed = static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(magnitude, limit, _CMP_GE_OQ)));
    mask |= static_cast<uint64_t>(passed) << (8 * j);
  }
  const __m256i bad = _mm256_cmpgt_epi32(most, _mm256_set1_epi32(static_cast<int>(kInf - 1)));
  if (__builtin_expect(!_mm256_testz_si256(bad, bad), 0))
    return mask_with_bad<kResidual>(g, residual, i, threshold, finite);
  if (kResidual)
    for (int j = 0; j < 8; ++j) _mm256_storeu_ps(residual + i + 8 * j, v[j]);
  return mask;
}

// The positions of the set bits, from base on; up to kBlind entries past them are overwritten.
CML_AVX2 inline int64_t flatten(uint64_t mask, int64_t base, uint32_t* idx) {
  const int64_t count = __builtin_popcountll(mask);
  int64_t j = 0;
  do {
    for (int blind = 0; blind < kBlind; ++blind, mask &= mask - 1)
      store(idx, j + blind, static_cast<uint32_t>(base) + static_cast<uint32_t>(_tzcnt_u64(mask)));
    j += kBlind;
  } while (__builtin_expect(j < count, 0));
  return count;
}

template <bool kResidual>
inline void take(const float* g, float* residual, int64_t i, int64_t at, Picked& out) {
  store(out.val, at, load(kResidual ? residual : g, i));
  if (kResidual) store(residual, i, 0.0f);
}

// Entry by entry, for the chunk in which the room ends.
template <bool kResidual>
void take_carefully(const float* g, float* residual, uint64_t mask, int64_t base, Picked& out) {
  for (; mask != 0; mask &= mask - 1) {
    if (out.count == out.cap) {
      out.overflow += __builtin_popcountll(mask);
      return;
    }
    const int64_t i = base + __builtin_ctzll(mask);
    store(out.idx, out.count, static_cast<uint32_t>(i));
    take<kResidual>(g, residual, i, out.count++, out);
  }
}

template <bool kResidual>
CML_AVX2 void scan_avx2(const float* g, float* residual, int64_t lo, int64_t hi, float threshold, Picked& out) {
  uint64_t masks[kChunk / kGroup];
  while (hi - lo >= kGroup) {
    const int64_t groups = (hi - lo < kChunk ? hi - lo : kChunk) / kGroup;
    int64_t passed = 0;
    for (int64_t m = 0; m < groups; ++m) {
      masks[m] = mask_group<kResidual>(g, residual, lo + m * kGroup, threshold, &out.finite);
      passed += __builtin_popcountll(masks[m]);
    }
    if (passed != 0 && passed + kBlind <= out.cap - out.count) {
      const int64_t begin = out.count;
      for (int64_t m = 0; m < groups; ++m) out.count += flatten(masks[m], lo + m * kGroup, out.idx + out.count);
      for (int64_t j = begin; j < out.count; ++j) take<kResidual>(g, residual, load(out.idx, j), j, out);
    } else if (passed != 0) {
      for (int64_t m = 0; m < groups; ++m) take_carefully<kResidual>(g, residual, masks[m], lo + m * kGroup, out);
    }
    lo += groups * kGroup;
  }
  scan_portable<kResidual>(g, residual, lo, hi, threshold, out);
}

#endif

void scan(const float* g, float* residual, int64_t lo, int64_t hi, float threshold, Picked& out) {
#if CML_VECTORS
  if (wide()) {
    if (residual)
      scan_avx2<true>(g, residual, lo, hi, threshold, out);
    else
      scan_avx2<false>(g, residual, lo, hi, threshold, out);
    return;
  }
#endif
  if (residual)
    scan_portable<true>(g, residual, lo, hi, threshold, out);
  else
    scan_portable<false>(g, residual, lo, hi, threshold, out);
}

}  // namespace
}  // namespace cml

extern "C" int64_t cml_select(const float* g, float* residual, int64_t n, float threshold, int64_t from,
                              uint32_t* idx, float* val, int64_t cap, int64_t* overflow, int32_t* finite) {
  // By its bits: where denormals count as zeros, a comparison would call a small threshold zero, and zeros would pass it.
  const uint32_t limit = cml::bits_of(threshold);
  if (n < 0 || n > cml::kMaxN || cap < 0 || limit < cml::kNormal || limit > cml::kInf || from < 0 ||
      (n > 0 ? from >= n : from != 0))
    return CML_ERR_ARGUMENT;
  cml::Picked out{idx, val, cap};
  cml::scan(g, residual, from, n, threshold, out);
  const int64_t first = out.count;
  cml::scan(g, residual, 0, from, threshold, out);
  if (first > 0 && first < out.count) {
    cml::rotate(idx, first, out.count);
    cml::rotate(val, first, out.count);
  }
  *overflow = out.overflow;
  *finite = out.finite ? 1 : 0;
  return out.count;
}

extern "C" void cml_sample_abs(const float* g, const float* residual, int64_t n, int64_t offset, int64_t count, float* out) {
  if (n <= 0) {
    for (int64_t j = 0; j < count; ++j) cml::store(out, j, 0.0f);
    return;
  }
  // Samples come in fours of neighbours: a line of memory costs the same for one as for all of them.
  // q * n / groups in steps: quotient and remainder are carried along, since two divisions cost more than the loads, and
  // what comes kAhead groups later is asked for now: most are cache misses.
  const int64_t groups = ((count + 3) / 4) | 1;
  const int64_t whole = n / groups, part = n % groups;
  int64_t i = offset % n, rest = 0;
  constexpr int64_t kAhead = 12;
  const int64_t ahead = kAhead * n / groups;
  for (int64_t j = 0; j < count; j += 4) {
    const int64_t later = i + ahead < n ? i + ahead : i;
    __builtin_prefetch(g + later);
    if (residual) __builtin_prefetch(residual + later);
    for (int64_t lane = 0; lane < 4 && j + lane < count; ++lane) {
      const int64_t at = i + lane < n ? i + lane : (i + lane) % n;
      const float v = residual ? cml::load(g, at) + cml::load(residual, at) : cml::load(g, at);
      cml::store(out, j + lane, cml::float_of(cml::bits_of(v) & cml::kAbs));
    }
    rest += part;
    const int64_t carry = rest >= groups ? 1 : 0;
    rest -= carry * groups;
    i += whole + carry;
    i -= i >= n ? n : 0;
  }
}

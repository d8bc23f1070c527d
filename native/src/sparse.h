// What selections share: the one check of a list of positions, and turning a scan that wrapped into increasing order.
#pragma once

#include "dispatch.h"

namespace cml {

// Whether idx[0..k) is strictly increasing and below n.
bool positions_ok(const uint32_t* idx, int64_t k, int64_t n);

// How many elements `count` runs cover, whose numbers increase: the last run below n may be short.
inline int64_t run_values(const uint32_t* ids, int64_t count, int64_t n, int64_t run) {
  if (count == 0) return 0;
  const int64_t lo = load(ids, count - 1) * run;
  return (count - 1) * run + (n - lo < run ? n - lo : run);
}

template <class T>
inline void reverse(T* p, int64_t lo, int64_t hi) {
  for (--hi; lo < hi; ++lo, --hi) {
    const T a = load(p, lo), b = load(p, hi);
    store(p, lo, b);
    store(p, hi, a);
  }
}

template <class T>
inline void rotate(T* p, int64_t first, int64_t n) {
  reverse(p, 0, first);
  reverse(p, first, n);
  reverse(p, 0, n);
}

}  // namespace cml

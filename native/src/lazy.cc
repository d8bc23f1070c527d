// Steps of SGD and Adam that touch only where a sparse gradient has entries, and what brings the rest up to date. Knows no rates
// but those it is given: how far behind an element may be, and what a row of the table holds, is the caller's.
#include "sparse.h"

#include <cmath>

namespace cml {
namespace {

// A group is a cache line of each array. What a step costs is the lines that it touches, so it brings all elements of a line up to
// date when it has to load it, and one stamp stands for them: stamps take no line of their own for each entry.
constexpr int kGroup = CML_LAZY_GROUP;
constexpr int64_t kAhead = 64;  // entries; each group is a cache miss in every array

#if defined(__GNUC__) || defined(__clang__)
#define CML_INLINE inline __attribute__((always_inline))
#else
#define CML_INLINE inline
#endif

// The arrays of one call; v or m may be NULL, and stamp.
struct State {
  float *w, *m, *v;
  uint8_t* stamp;
  uint8_t now;
  const float* table;
};

struct SgdStep {
  static constexpr int kWidth = 4;  // floats of a row
  float rate, momentum, gain, decay;
  bool nesterov;
};

struct AdamStep {
  static constexpr int kWidth = 8;
  float keep, lerp, beta2, gain, root, eps, rate;
};

// Elements at .. at + n, by any CPU: made up for by a row, unless that is NULL, and one step further with gradients g, unless that is.
CML_INLINE void elements(const State& s, const SgdStep* step, int64_t at, int64_t n, const float* row, const float* g) {
  for (int64_t i = at; i < at + n; ++i) {
    float w = load(s.w, i), v = s.v ? load(s.v, i) : 0.0f;
    if (row) {
      const float before = w;
      w = s.v ? w + (load(row, 0) * w + load(row, 1) * v) : w + load(row, 0) * w;
      v = load(row, 2) * before + load(row, 3) * v;
    }
    if (g) {
      float u = step->decay != 0.0f ? load(g, i - at) + step->decay * w : load(g, i - at);
      if (s.v) {
        v = step->momentum * v + step->gain * u;
        u = step->nesterov ? u + step->momentum * v : v;
      }
      w = w - step->rate * u;
    }
    store(s.w, i, w);
    if (s.v) store(s.v, i, v);
  }
}

CML_INLINE void elements(const State& s, const AdamStep* step, int64_t at, int64_t n, const float* row, const float* g) {
  for (int64_t i = at; i < at + n; ++i) {
    float w = load(s.w, i), m = load(s.m, i), v = load(s.v, i);
    if (row) {
      const float q = std::sqrt(v);
      w = w + (load(row, 0) * w - m * (load(row, 3) / (q + load(row, 4)) + load(row, 5) / (q + load(row, 6))));
      m = load(row, 1) * m;
      v = load(row, 2) * v;
    }
    if (g) {
      const float d = load(g, i - at);
      m = m + step->lerp * (d - m);
      v = step->beta2 * v + (step->gain * d) * d;
      w = step->keep * w - step->rate * (m / (std::sqrt(v) / step->root + step->eps));
    }
    store(s.w, i, w);
    store(s.m, i, m);
    store(s.v, i, v);
  }
}

struct Plain {
  static void set(float* g, int64_t lane, float value) { g[lane] = value; }
  static void clear(float* g) {
    for (int c = 0; c < kGroup; ++c) g[c] = 0.0f;
  }

  template <class Step>
  static void group(const State& s, const Step* step, int64_t at, const float* row, const float* g) {
    elements(s, step, at, kGroup, row, g);
  }
};

#if CML_VECTORS
CML_AVX2 inline __m256 all(const float* p, int i) { return _mm256_set1_ps(load(p, i)); }
CML_AVX2 inline __m256 times(float a, __m256 b) { return _mm256_mul_ps(_mm256_set1_ps(a), b); }

constexpr int kLanes = 8;
constexpr uint32_t kOne[2 * kGroup - 1] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, ~0u};

// The same of whole groups. Gradients are put in place as they are read, in whole vectors: a vector that is read behind a store of
// one of its floats waits for that to reach the cache.
struct Wide {
  CML_AVX2 static void set(float* g, int64_t lane, float value) {
    const __m256 all_lanes = _mm256_set1_ps(value);
    for (int c = 0; c < kGroup; c += kLanes) {
      const auto* one = reinterpret_cast<const float*>(kOne + (kGroup - 1 - lane + c));
      _mm256_storeu_ps(g + c, _mm256_or_ps(_mm256_loadu_ps(g + c), _mm256_and_ps(_mm256_loadu_ps(one), all_lanes)));
    }
  }
  CML_AVX2 static void clear(float* g) {
    for (int c = 0; c < kGroup; c += kLanes) _mm256_storeu_ps(g + c, _mm256_setzero_ps());
  }

  CML_AVX2 static void group(const State& s, const SgdStep* step, int64_t at, const float* row, const float* g) {
    for (int64_t i = at; i < at + kGroup; i += kLanes) {
      __m256 w = _mm256_loadu_ps(s.w + i), v = s.v ? _mm256_loadu_ps(s.v + i) : _mm256_setzero_ps();
      if (row) {
        const __m256 before = w;
        const __m256 owed = _mm256_mul_ps(all(row, 0), w);
        w = _mm256_add_ps(w, s.v ? _mm256_add_ps(owed, _mm256_mul_ps(all(row, 1), v)) : owed);
        v = _mm256_add_ps(_mm256_mul_ps(all(row, 2), before), _mm256_mul_ps(all(row, 3), v));
      }
      if (g) {
        __m256 u = _mm256_loadu_ps(g + (i - at));
        if (step->decay != 0.0f) u = _mm256_add_ps(u, times(step->decay, w));
        if (s.v) {
          v = _mm256_add_ps(times(step->momentum, v), times(step->gain, u));
          u = step->nesterov ? _mm256_add_ps(u, times(step->momentum, v)) : v;
        }
        w = _mm256_sub_ps(w, times(step->rate, u));
      }
      _mm256_storeu_ps(s.w + i, w);
      if (s.v) _mm256_storeu_ps(s.v + i, v);
    }
  }

  CML_AVX2 static void group(const State& s, const AdamStep* step, int64_t at, const float* row, const float* g) {
    for (int64_t i = at; i < at + kGroup; i += kLanes) {
      __m256 w = _mm256_loadu_ps(s.w + i), m = _mm256_loadu_ps(s.m + i), v = _mm256_loadu_ps(s.v + i);
      if (row) {
        const __m256 q = _mm256_sqrt_ps(v);
        const __m256 low = _mm256_div_ps(all(row, 3), _mm256_add_ps(q, all(row, 4)));
        const __m256 high = _mm256_div_ps(all(row, 5), _mm256_add_ps(q, all(row, 6)));
        const __m256 owed = _mm256_sub_ps(_mm256_mul_ps(all(row, 0), w), _mm256_mul_ps(m, _mm256_add_ps(low, high)));
        w = _mm256_add_ps(w, owed);
        m = _mm256_mul_ps(all(row, 1), m);
        v = _mm256_mul_ps(all(row, 2), v);
      }
      if (g) {
        const __m256 d = _mm256_loadu_ps(g + (i - at));
        m = _mm256_add_ps(m, times(step->lerp, _mm256_sub_ps(d, m)));
        v = _mm256_add_ps(times(step->beta2, v), _mm256_mul_ps(times(step->gain, d), d));
        const __m256 root = _mm256_div_ps(_mm256_sqrt_ps(v), _mm256_set1_ps(step->root));
        const __m256 u = _mm256_div_ps(m, _mm256_add_ps(root, _mm256_set1_ps(step->eps)));
        w = _mm256_sub_ps(times(step->keep, w), times(step->rate, u));
      }
      _mm256_storeu_ps(s.w + i, w);
      _mm256_storeu_ps(s.m + i, m);
      _mm256_storeu_ps(s.v + i, v);
    }
  }
};
#endif

// The row that makes up for what a group owes.
CML_INLINE const float* row_of(const State& s, int64_t group, int width) {
  return s.table + width * int64_t{static_cast<uint8_t>(s.now - s.stamp[group])};
}

CML_INLINE void fetch(const State& s, int64_t i) {
  __builtin_prefetch(s.w + i, 1);
  if (s.m) __builtin_prefetch(s.m + i, 1);
  if (s.v) __builtin_prefetch(s.v + i, 1);
}

// The groups with entries make a step, all of their elements; those without an entry have a gradient of zero.
template <class Body, class Step>
CML_INLINE void groups(const State& s, int64_t n, const uint32_t* idx, const float* g, int64_t k, const Step* step) {
  int64_t ahead = 0;
  float gradient[kGroup];
  for (int64_t j = 0; j < k;) {
    for (const int64_t to = j + kAhead < k ? j + kAhead : k; ahead < to; ++ahead) fetch(s, load(idx, ahead));
    const int64_t group = load(idx, j) / kGroup, at = group * kGroup;
    Body::clear(gradient);
    do Body::set(gradient, load(idx, j) - at, load(g, j));
    while (++j < k && load(idx, j) / kGroup == group);
    const float* row = row_of(s, group, Step::kWidth);
    if (at + kGroup <= n)
      Body::group(s, step, at, row, gradient);
    else
      elements(s, step, at, n - at, row, gradient);
    s.stamp[group] = static_cast<uint8_t>(s.now + 1);
  }
}

// Where nothing is ever owed, the entries alone make a step.
template <class Step>
void entries(const State& s, const uint32_t* idx, const float* g, int64_t k, const Step* step) {
  for (int64_t j = 0; j < k; ++j) {
    if (j + kAhead < k) fetch(s, load(idx, j + kAhead));
    elements(s, step, load(idx, j), 1, nullptr, g + j);
  }
}

template <class Body, class Step>
CML_INLINE void catch_up(const State& s, int64_t n) {
  const Step* none = nullptr;
  for (int64_t at = 0; at < n; at += kGroup) {
    const float* row = row_of(s, at / kGroup, Step::kWidth);
    if (at + kGroup <= n)
      Body::group(s, none, at, row, nullptr);
    else
      elements(s, none, at, n - at, row, nullptr);
    s.stamp[at / kGroup] = s.now;
  }
}

#if CML_VECTORS
template <class Step>
CML_AVX2 void groups_wide(const State& s, int64_t n, const uint32_t* idx, const float* g, int64_t k, const Step* step) {
  groups<Wide>(s, n, idx, g, k, step);
}
template <class Step>
CML_AVX2 void catch_up_wide(const State& s, int64_t n) { catch_up<Wide, Step>(s, n); }
#endif

template <class Step>
int64_t run_sparse(const State& s, int64_t n, const uint32_t* idx, const float* g, int64_t k, const Step& step) {
  if (n < 0 || n > kMaxN || k < 0) return CML_ERR_ARGUMENT;
  if (!positions_ok(idx, k, n)) return CML_ERR_CORRUPT;
  if (!s.stamp) return entries(s, idx, g, k, &step), k;
#if CML_VECTORS
  if (wide()) return groups_wide(s, n, idx, g, k, &step), k;
#endif
  groups<Plain>(s, n, idx, g, k, &step);
  return k;
}

template <class Step>
void run_catch_up(const State& s, int64_t n) {
#if CML_VECTORS
  if (wide()) return catch_up_wide<Step>(s, n);
#endif
  catch_up<Plain, Step>(s, n);
}

}  // namespace
}  // namespace cml

using cml::load;
using cml::store;

extern "C" int64_t cml_sgd_sparse(float* w, float* v, uint8_t* stamp, int64_t n, uint8_t now, const float* rows,
                                  const uint32_t* idx, const float* g, int64_t k, float rate, float momentum, float gain,
                                  float decay, int nesterov) {
  const cml::SgdStep step{rate, momentum, gain, decay, nesterov != 0};
  return cml::run_sparse({w, nullptr, v, stamp, now, rows}, n, idx, g, k, step);
}

extern "C" void cml_sgd_catch_up(float* w, float* v, uint8_t* stamp, int64_t n, uint8_t now, const float* rows) {
  cml::run_catch_up<cml::SgdStep>({w, nullptr, v, stamp, now, rows}, n);
}

extern "C" int64_t cml_adam_sparse(float* w, float* m, float* v, uint8_t* stamp, int64_t n, uint8_t now, const float* rows,
                                   const uint32_t* idx, const float* g, int64_t k, const float* s) {
  const cml::AdamStep step{load(s, 0), load(s, 1), load(s, 2), load(s, 3), load(s, 4), load(s, 5), load(s, 6)};
  return cml::run_sparse({w, m, v, stamp, now, rows}, n, idx, g, k, step);
}

extern "C" void cml_adam_catch_up(float* w, float* m, float* v, uint8_t* stamp, int64_t n, uint8_t now, const float* rows) {
  cml::run_catch_up<cml::AdamStep>({w, m, v, stamp, now, rows}, n);
}

namespace cml {
namespace {

// kDims is dims, or 0 where only that knows.
template <int kDims>
CML_INLINE bool flatten(uint32_t* idx, const int64_t* at, int64_t k, const int64_t* shape, int64_t dims) {
  bool ok = true;
  int64_t before = -1;
  for (int64_t j = 0; j < k; ++j) {
    uint64_t i = 0;
    for (int64_t d = 0; d < (kDims ? kDims : dims); ++d) {
      const auto c = static_cast<uint64_t>(load(at, d * k + j)), most = static_cast<uint64_t>(load(shape, d));
      ok &= c < most;
      i = i * most + c;  // wraps where it is not ok
    }
    ok &= static_cast<int64_t>(i) > before;
    before = static_cast<int64_t>(i);
    store(idx, j, static_cast<uint32_t>(i));
  }
  return ok;
}

}  // namespace
}  // namespace cml

extern "C" int64_t cml_flat_positions(uint32_t* idx, const int64_t* at, int64_t k, const int64_t* shape, int64_t dims) {
  if (k < 0 || dims < 1) return CML_ERR_ARGUMENT;
  const bool ok = dims == 1   ? cml::flatten<1>(idx, at, k, shape, dims)
                  : dims == 2 ? cml::flatten<2>(idx, at, k, shape, dims)
                              : cml::flatten<0>(idx, at, k, shape, dims);
  return ok ? k : int64_t{CML_ERR_CORRUPT};
}

extern "C" int64_t cml_coordinates(int64_t* at, const uint32_t* idx, int64_t k, const int64_t* shape, int64_t dims) {
  if (k < 0 || dims < 1) return CML_ERR_ARGUMENT;
  for (int64_t j = 0; j < k; ++j) {
    uint32_t left = load(idx, j);
    for (int64_t d = dims - 1; d >= 0; --d) {
      const auto most = static_cast<uint32_t>(load(shape, d));
      const uint32_t above = d == 0 ? 0 : left / most;
      store(at, d * k + j, int64_t{left - above * most});
      left = above;
    }
  }
  return k;
}

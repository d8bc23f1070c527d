// Steps of SGD and Adam that touch only the entries of a sparse gradient, and what brings the others up to date. Knows no rates
// but those it is given: how far behind an element may be, and what a row of the table holds, is the caller's.
#include "sparse.h"

#include <cmath>

namespace cml {
namespace {

// Elements are computed by blocks, in arrays of fixed size, so that compilers make vectors of it; the same source is compiled
// for AVX2 and for any CPU. What is past the end of a block computes with zeros, and is not stored.
constexpr int kBlock = 32;
constexpr int64_t kAhead = 2 * kBlock;  // entries; each cell is a cache miss in every array

#if defined(__GNUC__) || defined(__clang__)
#define CML_INLINE inline __attribute__((always_inline))
#else
#define CML_INLINE inline
#endif

struct Block {
  int count;
  float w[kBlock], m[kBlock], v[kBlock], g[kBlock], row[8][kBlock];

  // Which rows make up for what the elements owe; at(c) is where element c lies. Row 0 owes nothing.
  template <int kWidth, class At>
  CML_INLINE void rows(const float* table, const uint8_t* stamp, uint8_t now, At at) {
    const float* from[kBlock];
    for (int c = 0; c < count; ++c) from[c] = table + kWidth * int64_t{static_cast<uint8_t>(now - stamp[at(c)])};
    for (int c = count; c < kBlock; ++c) from[c] = table;
#if CML_X86
    for (int c = 0; c < kBlock; c += 4)
      for (int f = 0; f < kWidth; f += 4) {
        __m128 r0 = _mm_loadu_ps(from[c] + f), r1 = _mm_loadu_ps(from[c + 1] + f), r2 = _mm_loadu_ps(from[c + 2] + f),
               r3 = _mm_loadu_ps(from[c + 3] + f);
        _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
        _mm_storeu_ps(row[f] + c, r0);
        _mm_storeu_ps(row[f + 1] + c, r1);
        _mm_storeu_ps(row[f + 2] + c, r2);
        _mm_storeu_ps(row[f + 3] + c, r3);
      }
#else
    for (int c = 0; c < kBlock; ++c)
      for (int f = 0; f < kWidth; ++f) row[f][c] = load(from[c], f);
#endif
  }
};

template <class At>
CML_INLINE void take(float* to, const float* from, int count, At at) {
  for (int c = 0; c < count; ++c) to[c] = load(from, at(c));
  for (int c = count; c < kBlock; ++c) to[c] = 0.0f;
}

template <class At>
CML_INLINE void put(float* to, const float* from, int count, At at) {
  for (int c = 0; c < count; ++c) store(to, at(c), from[c]);
}

CML_INLINE void sgd_make_up(Block& x, bool momentum) {
  for (int c = 0; c < kBlock; ++c) {
    const float w = x.w[c];
    if (momentum) {
      x.w[c] = w + (x.row[0][c] * w + x.row[1][c] * x.v[c]);
      x.v[c] = x.row[2][c] * w + x.row[3][c] * x.v[c];
    } else {
      x.w[c] = w + x.row[0][c] * w;
    }
  }
}

CML_INLINE void adam_make_up(Block& x) {
  for (int c = 0; c < kBlock; ++c) {
    const float q = std::sqrt(x.v[c]);
    x.w[c] = x.w[c] + (x.row[0][c] * x.w[c] - x.m[c] * (x.row[3][c] / (q + x.row[4][c]) + x.row[5][c] / (q + x.row[6][c])));
    x.m[c] = x.row[1][c] * x.m[c];
    x.v[c] = x.row[2][c] * x.v[c];
  }
}

// The arrays of one call; v or m may be NULL, and stamp.
struct State {
  float *w, *m, *v;
  uint8_t* stamp;
  uint8_t now;
  const float* table;
};

struct SgdStep {
  float rate, momentum, gain, decay;
  bool nesterov;
};

struct AdamStep {
  float keep, lerp, beta2, gain, root, eps, rate;
};

CML_INLINE void make_up(Block& x, const State& s, const SgdStep*) { sgd_make_up(x, s.v != nullptr); }
CML_INLINE void make_up(Block& x, const State&, const AdamStep*) { adam_make_up(x); }
constexpr int width(const SgdStep*) { return 4; }
constexpr int width(const AdamStep*) { return 8; }

CML_INLINE void advance(Block& x, const State& s, const SgdStep* step) {
  for (int c = 0; c < kBlock; ++c) {
    float u = step->decay != 0.0f ? x.g[c] + step->decay * x.w[c] : x.g[c];
    if (s.v != nullptr) {
      x.v[c] = step->momentum * x.v[c] + step->gain * u;
      u = step->nesterov ? u + step->momentum * x.v[c] : x.v[c];
    }
    x.w[c] = x.w[c] - step->rate * u;
  }
}

CML_INLINE void advance(Block& x, const State&, const AdamStep* step) {
  for (int c = 0; c < kBlock; ++c) {
    const float g = x.g[c];
    x.m[c] = x.m[c] + step->lerp * (g - x.m[c]);
    x.v[c] = step->beta2 * x.v[c] + (step->gain * g) * g;
    x.w[c] = step->keep * x.w[c] - step->rate * (x.m[c] / (std::sqrt(x.v[c]) / step->root + step->eps));
  }
}

// One block: brought up to date, and one step further where there are gradients.
template <class Step, class At>
CML_INLINE void block(Block& x, const State& s, const Step* step, const float* g, uint8_t stamped, At at) {
  take(x.w, s.w, x.count, at);
  if (s.m) take(x.m, s.m, x.count, at);
  if (s.v) take(x.v, s.v, x.count, at);
  if (s.stamp) {
    x.template rows<width(static_cast<const Step*>(nullptr))>(s.table, s.stamp, s.now, at);
    make_up(x, s, step);
    for (int c = 0; c < x.count; ++c) s.stamp[at(c)] = stamped;
  }
  if (g) {
    take(x.g, g, x.count, [](int c) { return int64_t{c}; });
    advance(x, s, step);
  }
  put(s.w, x.w, x.count, at);
  if (s.m) put(s.m, x.m, x.count, at);
  if (s.v) put(s.v, x.v, x.count, at);
}

template <class Step>
CML_INLINE void sparse(const State& s, const uint32_t* idx, const float* g, int64_t k, const Step* step) {
  Block x{};
  for (int64_t j = 0; j < k; j += kBlock) {
    x.count = k - j < kBlock ? static_cast<int>(k - j) : kBlock;
    for (int64_t a = j + kAhead, end = a + kBlock < k ? a + kBlock : k; a < end; ++a) {
      const int64_t i = load(idx, a);
      __builtin_prefetch(s.w + i, 1);
      if (s.m) __builtin_prefetch(s.m + i, 1);
      if (s.v) __builtin_prefetch(s.v + i, 1);
      if (s.stamp) __builtin_prefetch(s.stamp + i, 1);
    }
    block(x, s, step, g + j, static_cast<uint8_t>(s.now + 1), [=](int c) { return int64_t{load(idx, j + c)}; });
  }
}

template <class Step>
CML_INLINE void catch_up(const State& s, int64_t n) {
  Block x{};
  for (int64_t i = 0; i < n; i += kBlock) {
    x.count = n - i < kBlock ? static_cast<int>(n - i) : kBlock;
    block(x, s, static_cast<const Step*>(nullptr), nullptr, s.now, [=](int c) { return i + c; });
  }
}

template <class Step>
void sparse_portable(const State& s, const uint32_t* idx, const float* g, int64_t k, const Step* step) { sparse(s, idx, g, k, step); }
template <class Step>
void catch_up_portable(const State& s, int64_t n) { catch_up<Step>(s, n); }
#if CML_VECTORS
template <class Step>
CML_AVX2 void sparse_wide(const State& s, const uint32_t* idx, const float* g, int64_t k, const Step* step) { sparse(s, idx, g, k, step); }
template <class Step>
CML_AVX2 void catch_up_wide(const State& s, int64_t n) { catch_up<Step>(s, n); }
#endif

template <class Step>
int64_t run_sparse(const State& s, int64_t n, const uint32_t* idx, const float* g, int64_t k, const Step& step) {
  if (n < 0 || n > kMaxN || k < 0) return CML_ERR_ARGUMENT;
  if (!positions_ok(idx, k, n)) return CML_ERR_CORRUPT;
#if CML_VECTORS
  if (wide()) return sparse_wide(s, idx, g, k, &step), k;
#endif
  sparse_portable(s, idx, g, k, &step);
  return k;
}

template <class Step>
void run_catch_up(const State& s, int64_t n) {
#if CML_VECTORS
  if (wide()) return catch_up_wide<Step>(s, n);
#endif
  catch_up_portable<Step>(s, n);
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

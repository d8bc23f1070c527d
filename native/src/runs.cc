// Selection of whole runs of neighbours by the sum of their magnitudes, in one pass with the residual. Knows no payloads.
#include "sparse.h"

namespace cml {
namespace {

constexpr int64_t kMostRun = 64;

inline bool valid_run(int64_t run) { return run == 8 || run == 16 || run == 32 || run == kMostRun; }

inline int64_t runs_of(int64_t n, int64_t run) { return (n + run - 1) / run; }

// Eight lane sums, then halves onto halves: the order in which the vector body adds. What a short run lacks counts as zeros.
float score_portable(const float* g, const float* residual, int64_t lo, int64_t hi) {
  float lane[8] = {};
  for (int64_t i = lo; i < hi; ++i) {
    const float v = residual ? load(g, i) + load(residual, i) : load(g, i);
    lane[(i - lo) % 8] += float_of(bits_of(v) & kAbs);
  }
  for (int half = 4; half >= 1; half /= 2)
    for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
  return lane[0];
}

// residual = v where v is finite. Whether all were.
bool absorb(const float* g, float* residual, int64_t lo, int64_t hi) {
  bool finite = true;
  for (int64_t i = lo; i < hi; ++i) {
    const float v = residual ? load(g, i) + load(residual, i) : load(g, i);
    if (!is_finite(v))
      finite = false;
    else if (residual)
      store(residual, i, v);
  }
  return finite;
}

struct Runs {
  uint32_t* ids;
  float* scores;
  int64_t cap;
  float threshold;
  int64_t count = 0;
  int64_t overflow = 0;
  bool finite = true;

  void offer(int64_t id, float score) {
    if (!(score >= threshold)) return;
    if (count == cap) {
      ++overflow;
      return;
    }
    store(ids, count, static_cast<uint32_t>(id));
    store(scores, count++, score);
  }
};

void scan_portable(const float* g, float* residual, int64_t n, int64_t run, int64_t first, int64_t last, Runs& out) {
  for (int64_t id = first; id < last; ++id) {
    const int64_t lo = id * run, hi = n - lo < run ? n : lo + run;
    const float score = score_portable(g, residual, lo, hi);
    if (absorb(g, residual, lo, hi))
      out.offer(id, score);
    else
      out.finite = false;
  }
}

#if CML_VECTORS

// v of a whole run, eight at a time, and its score.
template <int kVectors, bool kResidual>
CML_AVX2 inline float score_avx2(const float* g, const float* residual, int64_t lo, __m256* v) {
  const __m256 sign = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(~kAbs)));
  __m256 sum = _mm256_setzero_ps();
  for (int j = 0; j < kVectors; ++j) {
    v[j] = _mm256_loadu_ps(g + lo + 8 * j);
    if (kResidual) v[j] = _mm256_add_ps(v[j], _mm256_loadu_ps(residual + lo + 8 * j));
    sum = _mm256_add_ps(sum, _mm256_andnot_ps(sign, v[j]));
  }
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

// Whole runs only. A score that is not finite may come from finite elements: the portable body sees to that run.
template <int kVectors, bool kResidual>
CML_AVX2 void scan_avx2(const float* g, float* residual, int64_t n, int64_t first, int64_t last, Runs& out) {
  constexpr int64_t kRun = 8 * kVectors;
  for (int64_t id = first; id < last; ++id) {
    const int64_t lo = id * kRun;
    __m256 v[kVectors];
    const float score = score_avx2<kVectors, kResidual>(g, residual, lo, v);
    if (__builtin_expect(!is_finite(score), 0)) {
      scan_portable(g, residual, n, kRun, id, id + 1, out);
      continue;
    }
    if (kResidual)
      for (int j = 0; j < kVectors; ++j) _mm256_storeu_ps(residual + lo + 8 * j, v[j]);
    out.offer(id, score);
  }
}

template <int kVectors>
void scan_whole(const float* g, float* residual, int64_t n, int64_t first, int64_t last, Runs& out) {
  if (residual)
    scan_avx2<kVectors, true>(g, residual, n, first, last, out);
  else
    scan_avx2<kVectors, false>(g, nullptr, n, first, last, out);
}

template <int kVectors>
CML_AVX2 float score_whole(const float* g, const float* residual, int64_t lo) {
  __m256 v[kVectors];
  return residual ? score_avx2<kVectors, true>(g, residual, lo, v) : score_avx2<kVectors, false>(g, nullptr, lo, v);
}

#endif

void scan(const float* g, float* residual, int64_t n, int64_t run, int64_t first, int64_t last, Runs& out) {
#if CML_VECTORS
  if (wide()) {
    const int64_t whole = last < n / run ? last : n / run;
    if (first < whole) {
      switch (run) {
        case 8: scan_whole<1>(g, residual, n, first, whole, out); break;
        case 16: scan_whole<2>(g, residual, n, first, whole, out); break;
        case 32: scan_whole<4>(g, residual, n, first, whole, out); break;
        default: scan_whole<8>(g, residual, n, first, whole, out); break;
      }
      first = whole;
    }
  }
#endif
  scan_portable(g, residual, n, run, first, last, out);
}

float score(const float* g, const float* residual, int64_t lo, int64_t n, int64_t run) {
#if CML_VECTORS
  if (wide() && n - lo >= run) {
    switch (run) {
      case 8: return score_whole<1>(g, residual, lo);
      case 16: return score_whole<2>(g, residual, lo);
      case 32: return score_whole<4>(g, residual, lo);
      default: return score_whole<8>(g, residual, lo);
    }
  }
#endif
  return score_portable(g, residual, lo, n - lo < run ? n : lo + run);
}

}  // namespace
}  // namespace cml

extern "C" int64_t cml_select_runs(const float* g, float* residual, int64_t n, int64_t run, float threshold, int64_t from,
                                   uint32_t* ids, float* scores, int64_t cap, int64_t* overflow, int32_t* finite) {
  const uint32_t limit = cml::bits_of(threshold);
  if (n < 0 || n > cml::kMaxN || !cml::valid_run(run) || cap < 0 || limit < cml::kNormal || limit > cml::kInf)
    return CML_ERR_ARGUMENT;
  const int64_t all = cml::runs_of(n, run);
  if (from < 0 || (all > 0 ? from >= all : from != 0)) return CML_ERR_ARGUMENT;
  cml::Runs out{ids, scores, cap, threshold};
  cml::scan(g, residual, n, run, from, all, out);
  const int64_t first = out.count;
  cml::scan(g, residual, n, run, 0, from, out);
  if (first > 0 && first < out.count) {
    cml::rotate(ids, first, out.count);
    cml::rotate(scores, first, out.count);
  }
  *overflow = out.overflow;
  *finite = out.finite ? 1 : 0;
  return out.count;
}

extern "C" int64_t cml_score_runs(const float* g, const float* residual, int64_t n, int64_t run, int64_t offset,
                                  int64_t count, float* out) {
  if (n < 0 || n > cml::kMaxN || !cml::valid_run(run) || offset < 0 || count < 0 || count > cml::kMaxN)
    return CML_ERR_ARGUMENT;
  const int64_t all = cml::runs_of(n, run);
  // offset + floor(j*all/count) in steps: quotient and remainder are carried along.
  const int64_t whole = count > 0 ? all / count : 0, part = count > 0 ? all % count : 0;
  int64_t id = all > 0 ? offset % all : 0, rest = 0;
  for (int64_t j = 0; j < count; ++j) {
    cml::store(out, j, all > 0 ? cml::score(g, residual, id * run, n, run) : 0.0f);
    rest += part;
    const int64_t carry = rest >= count ? 1 : 0;
    rest -= carry * count;
    id += whole + carry;
    id -= id >= all ? all : 0;
  }
  return count;
}

extern "C" int64_t cml_gather_runs(const float* src, int64_t n, int64_t run, const uint32_t* ids, int64_t count, float* val,
                                   int64_t cap) {
  if (n < 0 || n > cml::kMaxN || !cml::valid_run(run) || count < 0) return CML_ERR_ARGUMENT;
  if (!cml::positions_ok(ids, count, cml::runs_of(n, run))) return CML_ERR_CORRUPT;
  if (cml::run_values(ids, count, n, run) > cap) return CML_ERR_CAPACITY;
  int64_t at = 0;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t lo = cml::load(ids, b) * run, length = n - lo < run ? n - lo : run;
    std::memcpy(reinterpret_cast<char*>(val) + 4 * at, reinterpret_cast<const char*>(src) + 4 * lo, static_cast<size_t>(4 * length));
    at += length;
  }
  return at;
}

extern "C" int64_t cml_scatter_runs(float* acc, int64_t n, int64_t run, const uint32_t* ids, int64_t count, const float* val,
                                    int64_t k, int assign) {
  if (n < 0 || n > cml::kMaxN || !cml::valid_run(run) || count < 0) return CML_ERR_ARGUMENT;
  if (!cml::positions_ok(ids, count, cml::runs_of(n, run)) || cml::run_values(ids, count, n, run) != k) return CML_ERR_CORRUPT;
  int64_t at = 0;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t lo = cml::load(ids, b) * run, length = n - lo < run ? n - lo : run;
    for (int64_t i = 0; i < length; ++i) {
      const float v = cml::load(val, at + i);
      cml::store(acc, lo + i, assign ? v : cml::load(acc, lo + i) + v);
    }
    at += length;
  }
  return k;
}

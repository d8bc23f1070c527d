// Adds sparse values to a dense array, after all positions were checked. Knows no packing of positions.
#include "sparse.h"

namespace cml {
namespace {

bool increasing_portable(const uint32_t* idx, int64_t from, int64_t k) {
  bool ok = true;
  for (int64_t j = from; j + 1 < k; ++j) ok &= load(idx, j) < load(idx, j + 1);
  return ok;
}

#if CML_VECTORS

CML_AVX2 int64_t increasing_avx2(const uint32_t* idx, int64_t k, bool* ok) {
  const __m256i flip = _mm256_set1_epi32(INT32_MIN);  // compares are signed
  __m256i all = _mm256_set1_epi32(-1);
  int64_t j = 0;
  for (; j + 9 <= k; j += 8) {
    const __m256i a = _mm256_xor_si256(flip, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(idx + j)));
    const __m256i b = _mm256_xor_si256(flip, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(idx + j + 1)));
    all = _mm256_and_si256(all, _mm256_cmpgt_epi32(b, a));
  }
  *ok = _mm256_movemask_epi8(all) == -1;
  return j;
}

#endif

constexpr int64_t kAhead = 48;  // entries; a random cell of a large tensor is a cache miss

inline void prefetch(const float* acc, const uint32_t* idx, int64_t j, int64_t k) {
  if (j + kAhead < k) __builtin_prefetch(acc + load(idx, j + kAhead), 1);
}

}  // namespace

bool positions_ok(const uint32_t* idx, int64_t k, int64_t n) {
  if (k == 0) return true;
  if (k > n || load(idx, k - 1) >= n) return false;
  int64_t j = 0;
  bool ok = true;
#if CML_VECTORS
  if (wide()) j = increasing_avx2(idx, k, &ok);
#endif
  return ok && increasing_portable(idx, j, k);
}

}  // namespace cml

extern "C" int64_t cml_scatter_add(float* acc, int64_t n, const uint32_t* idx, const float* val, int64_t k) {
  if (n < 0 || n > cml::kMaxN || k < 0) return CML_ERR_ARGUMENT;
  if (!cml::positions_ok(idx, k, n)) return CML_ERR_CORRUPT;
  for (int64_t j = 0; j < k; ++j) {
    cml::prefetch(acc, idx, j, k);
    const int64_t i = cml::load(idx, j);
    cml::store(acc, i, cml::load(acc, i) + cml::load(val, j));
  }
  return k;
}

extern "C" int64_t cml_scatter_add_int8(float* acc, int64_t n, const uint32_t* idx, const int8_t* q, const float* scale,
                                        int64_t k, int64_t block) {
  if (n < 0 || n > cml::kMaxN || k < 0 || block < 1) return CML_ERR_ARGUMENT;
  if (!cml::positions_ok(idx, k, n)) return CML_ERR_CORRUPT;
  for (int64_t b = 0, j = 0; j < k; ++b) {
    const float s = cml::load(scale, b);
    const int64_t end = k - j < block ? k : j + block;
    for (; j < end; ++j) {
      cml::prefetch(acc, idx, j, k);
      const int64_t i = cml::load(idx, j);
      cml::store(acc, i, cml::load(acc, i) + s * static_cast<float>(cml::load(q, j)));
    }
  }
  return k;
}

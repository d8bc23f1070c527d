// The product of two thin factors, added in one order on every machine: members must decode the same bits. Knows no headers.
#include "dispatch.h"

namespace cml {
namespace {

void row_portable(float* out, const float* p, const float* q, int64_t m, int64_t n, int64_t rank, int64_t i, int64_t from) {
  for (int64_t j = from; j < n; ++j) {
    float sum = load(p, i) * load(q, j);
    for (int64_t k = 1; k < rank; ++k) sum += load(p, k * m + i) * load(q, k * n + j);
    store(out, i * n + j, sum);
  }
}

#if CML_VECTORS

CML_AVX2 int64_t row_avx2(float* out, const float* p, const float* q, int64_t m, int64_t n, int64_t rank, int64_t i) {
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    const __m256 first = _mm256_set1_ps(load(p, i));
    __m256 a = _mm256_mul_ps(first, _mm256_loadu_ps(q + j)), b = _mm256_mul_ps(first, _mm256_loadu_ps(q + j + 8));
    for (int64_t k = 1; k < rank; ++k) {
      const __m256 factor = _mm256_set1_ps(load(p, k * m + i));
      a = _mm256_add_ps(a, _mm256_mul_ps(factor, _mm256_loadu_ps(q + k * n + j)));
      b = _mm256_add_ps(b, _mm256_mul_ps(factor, _mm256_loadu_ps(q + k * n + j + 8)));
    }
    _mm256_storeu_ps(out + i * n + j, a);
    _mm256_storeu_ps(out + i * n + j + 8, b);
  }
  return j;
}

#endif

}  // namespace
}  // namespace cml

extern "C" void cml_outer(float* out, const float* p, const float* q, int64_t m, int64_t n, int64_t rank) {
  const bool avx2 = cml::wide();
  for (int64_t i = 0; i < m; ++i) {
    int64_t from = 0;
#if CML_VECTORS
    if (avx2) from = cml::row_avx2(out, p, q, m, n, rank, i);
#endif
    cml::row_portable(out, p, q, m, n, rank, i, from);
  }
  (void)avx2;
}

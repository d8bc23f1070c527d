// acc += x, for x in float32, float16 and bfloat16.
#include "half.h"

namespace cml {
namespace {

template <class T, float (*kFloat)(T)>
void add_portable(float* acc, const T* x, int64_t from, int64_t n) {
  for (int64_t i = from; i < n; ++i) store(acc, i, load(acc, i) + kFloat(load(x, i)));
}

inline float same(float f) { return f; }

#if CML_VECTORS

CML_AVX2 inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }

template <class T, __m256 (*kLoad)(const T*)>
CML_AVX2 int64_t add_avx2(float* acc, const T* x, int64_t n) {
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    for (int64_t j = i; j < i + 32; j += 8)
      _mm256_storeu_ps(acc + j, _mm256_add_ps(_mm256_loadu_ps(acc + j), kLoad(x + j)));
  }
  return i;
}

#endif

}  // namespace
}  // namespace cml

extern "C" void cml_add_f32(float* acc, const float* x, int64_t n) {
  int64_t i = 0;
#if CML_VECTORS
  if (cml::wide()) i = cml::add_avx2<float, cml::load8>(acc, x, n);
#endif
  cml::add_portable<float, cml::same>(acc, x, i, n);
}

extern "C" void cml_add_f16(float* acc, const uint16_t* x, int64_t n) {
  int64_t i = 0;
#if CML_VECTORS
  if (cml::wide()) i = cml::add_avx2<uint16_t, cml::load8_half>(acc, x, n);
#endif
  cml::add_portable<uint16_t, cml::float_of_half>(acc, x, i, n);
}

extern "C" void cml_add_bf16(float* acc, const uint16_t* x, int64_t n) {
  int64_t i = 0;
#if CML_VECTORS
  if (cml::wide()) i = cml::add_avx2<uint16_t, cml::load8_bfloat>(acc, x, n);
#endif
  cml::add_portable<uint16_t, cml::float_of_bfloat>(acc, x, i, n);
}

// Random words of a range of elements, for whoever wants them as such. Knows no codecs.
#include "philox_avx2.h"

namespace cml {
namespace {

#if CML_X86
CML_AVX2 int64_t words_avx2(uint32_t* words, int64_t n, int64_t first, const Stream16& stream) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i out[2];
    stream.words(first + i, out);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + i), out[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(words + i + 8), out[1]);
  }
  return i;
}
#endif

}  // namespace
}  // namespace cml

extern "C" void cml_philox(uint32_t* words, int64_t n, int64_t first, uint64_t key, uint64_t step) {
  cml::Random random(key, step);
  int64_t i = 0;
#if CML_X86
  if (cml::wide() && first % 4 == 0) i = cml::words_avx2(words, n, first, random.sixteen);
#endif
  for (; i < n; ++i) cml::store(words, i, random.one.word(static_cast<uint64_t>(first + i)));
}

// The random words of a bucket in one step, for whoever codes it from front to back. Knows no codecs.
#pragma once

#include "dispatch.h"
#include "philox.h"

namespace cml {

// The words of elements first .. first + n - 1, the same from every body; first is a multiple of 4.
void fill_words(uint32_t* words, int64_t n, int64_t first, uint64_t key, uint64_t step);

// Words are drawn ahead: many counters in flight hide what one of ten dependent multiplications takes, and a body that is wider
// than the coder's can draw them.
class Random {
 public:
  static constexpr int64_t kAhead = 480;  // whole groups of ternaries, whole vectors

  // `first` is the number in its bucket of the element that is 0 here; a multiple of 8.
  Random(uint64_t key, uint64_t step, int64_t first = 0) : key_(key), step_(step), offset_(first) {}

  // The words of `count` <= kAhead elements from i on, a multiple of 8.
  inline const uint32_t* words(int64_t i, int64_t count) {
    if (i < begin_ || i + count > end_) {
      begin_ = i;
      end_ = i + kAhead;
      fill_words(words_, kAhead, offset_ + i, key_, step_);
    }
    return words_ + (i - begin_);
  }

 private:
  uint64_t key_, step_;
  int64_t offset_, begin_ = 0, end_ = 0;
  uint32_t words_[kAhead];
};

#if CML_VECTORS

CML_AVX2 inline __m256i words8(const uint32_t* words) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)); }

CML_AVX2 inline __m256 uniform8(__m256i words) {
  return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(words, 8)), _mm256_set1_ps(0x1p-24f));
}

#endif

}  // namespace cml

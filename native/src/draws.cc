// Positions drawn at random, one in each of k strata, and the entries there. Knows no payloads.
#include "philox.h"
#include "sparse.h"

extern "C" uint32_t cml_draw_word(uint64_t key, uint64_t step) { return cml::philox(key, 0, step).at[0]; }

extern "C" int64_t cml_draw_strata(uint32_t* idx, int64_t k, int64_t n, uint32_t seed) {
  if (n < 0 || n > cml::kMaxN || k < 0 || k > n) return CML_ERR_ARGUMENT;
  if (k == 0) return 0;
  const int64_t whole = n / k, part = n % k;
  int64_t begin = 0, rest = 0;
  cml::Words words{};
  for (int64_t j = 0; j < k; ++j) {
    if (j % 4 == 0) words = cml::philox(seed, static_cast<uint64_t>(j / 4), 0);
    rest += part;
    const int64_t carry = rest >= k ? 1 : 0;
    rest -= carry * k;
    const auto width = static_cast<uint64_t>(whole + carry);
    cml::store(idx, j, static_cast<uint32_t>(begin + static_cast<int64_t>(words.at[j % 4] * width >> 32)));
    begin += static_cast<int64_t>(width);
  }
  return k;
}

extern "C" int64_t cml_take(const float* src, int64_t n, const uint32_t* idx, float* val, int64_t k) {
  if (n < 0 || n > cml::kMaxN || k < 0) return CML_ERR_ARGUMENT;
  if (!cml::positions_ok(idx, k, n)) return CML_ERR_CORRUPT;
  constexpr int64_t kAhead = 48;  // entries; most are cache misses
  for (int64_t j = 0; j < k; ++j) {
    if (j + kAhead < k) __builtin_prefetch(src + cml::load(idx, j + kAhead));
    cml::store(val, j, cml::load(src, static_cast<int64_t>(cml::load(idx, j))));
  }
  return k;
}

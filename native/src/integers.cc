// Integers in a scale that all members share: maxima, dithered quanta, sums, and their packing in 4 to 32 bits.
// Works in chunks of eight elements, which fill whole bytes at every width. Knows neither headers nor members.
#include "random.h"

#include <cmath>

namespace cml {
namespace {

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even, for |t| < 2^22
constexpr uint32_t kMostBf16 = 0x7f7fu;
constexpr int64_t kChunk = 8;

inline float levels(int bits) { return static_cast<float>((1 << (bits - 1)) - 1); }

inline float scale_of(uint16_t max, float most) {
  const float m = float_of(static_cast<uint32_t>(max) << 16);
  return m < most * 0x1p-126f ? 0.0f : m / most;
}

inline uint16_t rounded_up(uint32_t magnitude) {
  const uint32_t up = (magnitude + 0xffffu) >> 16;
  return static_cast<uint16_t>(up > kMostBf16 ? kMostBf16 : up);
}

// ---- chunks of eight (the last may be shorter), portable

inline int32_t quantum(float v, float scale, float inverse, float most, const uint32_t* word) {
  if (scale == 0.0f) return 0;
  float t = v * inverse;
  t = t > most ? most : t;
  t = t < -most ? -most : t;
  if (!word) return static_cast<int32_t>((t + kRound) - kRound);
  const float low = std::floor(t);
  return static_cast<int32_t>(low) + (uniform(*word) < t - low ? 1 : 0);
}

inline int64_t packed_nbytes(int64_t count, int width) { return (count * width + 7) / 8; }

void put_portable(uint8_t* out, int64_t i, const int32_t* q, int64_t count, int width) {
  uint8_t bytes[32] = {};
  for (int64_t j = 0; j < count; ++j) {
    const uint64_t bits = (static_cast<uint64_t>(q[j]) & ((uint64_t{1} << width) - 1)) << (j * width % 8);
    for (int64_t byte = j * width / 8, shift = 0; shift < 40 && byte < 32; ++byte, shift += 8)
      bytes[byte] = static_cast<uint8_t>(bytes[byte] | (bits >> shift));
  }
  std::memcpy(out + i * width / 8, bytes, static_cast<size_t>(packed_nbytes(count, width)));
}

void get_portable(int32_t* q, const uint8_t* in, int64_t i, int64_t count, int width) {
  uint8_t bytes[40] = {};
  std::memcpy(bytes, in + i * width / 8, static_cast<size_t>(packed_nbytes(count, width)));
  for (int64_t j = 0; j < count; ++j) {
    uint64_t word;
    std::memcpy(&word, bytes + j * width / 8, sizeof word);
    const int64_t moved = static_cast<int64_t>(word << (64 - width - j * width % 8));
    q[j] = static_cast<int32_t>(moved >> (64 - width));
  }
}

#if CML_VECTORS

CML_AVX2 inline __m256i quantum8(const float* x, float scale, float inverse, float most, const uint32_t* words) {
  if (scale == 0.0f) return _mm256_setzero_si256();
  const __m256 top = _mm256_set1_ps(most), bottom = _mm256_set1_ps(-most);
  const __m256 t = _mm256_max_ps(_mm256_min_ps(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(inverse)), top), bottom);
  if (!words) return _mm256_cvtps_epi32(t);
  const __m256 low = _mm256_floor_ps(t), up = _mm256_cmp_ps(uniform8(words8(words)), _mm256_sub_ps(t, low), _CMP_LT_OQ);
  return _mm256_sub_epi32(_mm256_cvtps_epi32(low), _mm256_castps_si256(up));
}

template <int kWidth>
CML_AVX2 inline void put8(uint8_t* out, int64_t i, __m256i q) {
  uint8_t* to = out + i * kWidth / 8;
  const __m128i low = _mm256_castsi256_si128(q), high = _mm256_extracti128_si256(q, 1);
  if constexpr (kWidth == 32) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), q);
  } else if constexpr (kWidth == 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(low, high));
  } else if constexpr (kWidth == 8) {
    const __m128i half = _mm_packs_epi32(low, high);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(half, half));
  } else if constexpr (kWidth == 12) {
    const __m256i v = _mm256_and_si256(q, _mm256_set1_epi32(0xfff));
    const __m256i pairs = _mm256_or_si256(v, _mm256_srli_epi64(v, 20));  // 24 bits at the bottom of each 64
    const __m128i order = _mm_setr_epi8(0, 1, 2, 8, 9, 10, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m128i first = _mm_shuffle_epi8(_mm256_castsi256_si128(pairs), order);
    const __m128i second = _mm_shuffle_epi8(_mm256_extracti128_si256(pairs, 1), order);
    const __m128i whole = _mm_or_si128(first, _mm_slli_si128(second, 6));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), whole);
    store(reinterpret_cast<int32_t*>(to + 8), 0, _mm_extract_epi32(whole, 2));
  } else {
    const __m256i v = _mm256_sllv_epi32(_mm256_and_si256(q, _mm256_set1_epi32(15)), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    __m128i m = _mm_or_si128(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_or_si128(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_or_si128(m, _mm_shuffle_epi32(m, 0xb1));
    store(reinterpret_cast<int32_t*>(to), 0, _mm_cvtsi128_si32(m));
  }
}

template <int kWidth>
CML_AVX2 inline __m256i get8(const uint8_t* in, int64_t i) {
  const uint8_t* from = in + i * kWidth / 8;
  const auto* wide = reinterpret_cast<const __m128i*>(from);
  if constexpr (kWidth == 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  if constexpr (kWidth == 16) return _mm256_cvtepi16_epi32(_mm_loadu_si128(wide));
  if constexpr (kWidth == 8) return _mm256_cvtepi8_epi32(_mm_loadl_epi64(wide));
  if constexpr (kWidth == 12) {
    const __m128i bytes = _mm_insert_epi32(_mm_loadl_epi64(wide), load(reinterpret_cast<const int32_t*>(from + 8)), 2);
    const __m128i order = _mm_setr_epi8(0, 1, -1, -1, 1, 2, -1, -1, 3, 4, -1, -1, 4, 5, -1, -1);
    const __m128i later = _mm_setr_epi8(6, 7, -1, -1, 7, 8, -1, -1, 9, 10, -1, -1, 10, 11, -1, -1);
    const __m256i words = _mm256_set_m128i(_mm_shuffle_epi8(bytes, later), _mm_shuffle_epi8(bytes, order));
    const __m256i shifts = _mm256_setr_epi32(20, 16, 20, 16, 20, 16, 20, 16);
    return _mm256_srai_epi32(_mm256_sllv_epi32(words, shifts), 20);
  }
  const __m256i word = _mm256_set1_epi32(load(reinterpret_cast<const int32_t*>(from)));
  return _mm256_srai_epi32(_mm256_sllv_epi32(word, _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0)), 28);
}

CML_AVX2 uint32_t most_avx2(const float* x, int64_t n, int64_t* done) {
  const __m256i magnitude = _mm256_set1_epi32(static_cast<int>(kAbs));
  __m256i m0 = _mm256_setzero_si256(), m1 = m0;
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    m0 = _mm256_max_epi32(m0, _mm256_and_si256(magnitude, _mm256_castps_si256(_mm256_loadu_ps(x + i))));
    m1 = _mm256_max_epi32(m1, _mm256_and_si256(magnitude, _mm256_castps_si256(_mm256_loadu_ps(x + i + 8))));
  }
  m0 = _mm256_max_epi32(m0, m1);
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(m0), _mm256_extracti128_si256(m0, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  *done = i;
  return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
}

template <int kWidth>
CML_AVX2 int64_t add_avx2(int32_t* acc, const uint8_t* q, int64_t n, bool assign) {
  int64_t i = 0;
  for (; i + kChunk <= n; i += kChunk) {
    auto* to = reinterpret_cast<__m256i*>(acc + i);
    const __m256i v = get8<kWidth>(q, i);
    _mm256_storeu_si256(to, assign ? v : _mm256_add_epi32(_mm256_loadu_si256(to), v));
  }
  return i;
}

template <int kWidth>
CML_AVX2 int64_t pack_avx2(uint8_t* out, const int32_t* acc, int64_t n) {
  int64_t i = 0;
  for (; i + kChunk <= n; i += kChunk)
    put8<kWidth>(out, i, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(acc + i)));
  return i;
}

template <int kWidth>
CML_AVX2 int64_t decode_avx2(float* out, const uint8_t* q, const uint16_t* max, int64_t n, int64_t block, float most) {
  int64_t i = 0;
  for (int64_t b = 0; b * block < n; ++b) {
    const int64_t end = n - b * block < block ? n : (b + 1) * block;
    const __m256 s = _mm256_set1_ps(scale_of(load(max, b), most));
    for (; i + kChunk <= end; i += kChunk)
      _mm256_storeu_ps(out + i, _mm256_mul_ps(s, _mm256_cvtepi32_ps(get8<kWidth>(q, i))));
    if (i < end) return i;  // a block that is no multiple of eight
  }
  return i;
}

// Codes as far as whole chunks lie in one block; `at` and what follows is the caller's.
template <int kWidth>
CML_AVX2 int64_t encode_avx2(uint8_t* out, const float* x, const uint16_t* max, int64_t n, int64_t block, float most,
                             bool dither, Random& random) {
  int64_t i = 0;
  for (int64_t b = 0; b * block < n; ++b) {
    const int64_t end = n - b * block < block ? n : (b + 1) * block;
    const float s = scale_of(load(max, b), most), inverse = s == 0.0f ? 0.0f : 1.0f / s;
    for (; i + kChunk <= end; i += kChunk) {
      put8<kWidth>(out, i, quantum8(x + i, s, inverse, most, dither ? random.words(i, kChunk) : nullptr));
    }
    if (i < end) return i;
  }
  return i;
}

#endif

uint32_t most_of(const float* x, int64_t n, [[maybe_unused]] bool avx2) {
  uint32_t most = 0;
  int64_t i = 0;
#if CML_VECTORS
  if (avx2) most = most_avx2(x, n, &i);
#endif
  for (; i < n; ++i) {
    const uint32_t a = bits_of(load(x, i)) & kAbs;
    most = a > most ? a : most;
  }
  return most;
}

inline int64_t chunk_at(int64_t i, int64_t n) { return n - i < kChunk ? n - i : kChunk; }

bool known_width(int width) { return width == 4 || width == 8 || width == 12 || width == 16 || width == 32; }

}  // namespace
}  // namespace cml

// Calls one instance of a template by width; `x` is the call's arguments.
#define CML_BY_WIDTH(function, width, x)    \
  ((width) == 4    ? cml::function<4> x     \
   : (width) == 8  ? cml::function<8> x     \
   : (width) == 12 ? cml::function<12> x    \
   : (width) == 16 ? cml::function<16> x    \
                   : cml::function<32> x)

extern "C" int64_t cml_int_maxima(uint16_t* max, const float* x, int64_t n, int64_t block) {
  if (n < 0 || block < 1) return CML_ERR_ARGUMENT;
  const bool avx2 = cml::wide();
  uint32_t most = 0;
  for (int64_t b = 0, at = 0; at < n; ++b, at += block) {
    const uint32_t m = cml::most_of(x + at, n - at < block ? n - at : block, avx2);
    cml::store(max, b, cml::rounded_up(m));
    most = m > most ? m : most;
  }
  return most < cml::kInf ? 1 : 0;
}

extern "C" int64_t cml_int_encode(uint8_t* q, const float* x, const uint16_t* max, int64_t n, int64_t block, int bits,
                                  int dither, uint64_t key, uint64_t step, int64_t first) {
  if (n < 0 || n > cml::kMaxN || first < 0 || first % 8 || block < 1 || (bits != 4 && bits != 8)) return CML_ERR_ARGUMENT;
  const float most = cml::levels(bits);
  cml::Random random(key, step, first);
  int64_t i = 0;
#if CML_VECTORS
  if (cml::wide())
    i = bits == 4 ? cml::encode_avx2<4>(q, x, max, n, block, most, dither != 0, random)
                  : cml::encode_avx2<8>(q, x, max, n, block, most, dither != 0, random);
#endif
  for (; i < n; i += cml::kChunk) {
    const int64_t count = cml::chunk_at(i, n);
    const uint32_t* words = dither ? random.words(i, cml::kChunk) : nullptr;
    int32_t whole[cml::kChunk];
    for (int64_t j = 0; j < count; ++j) {
      const float s = cml::scale_of(cml::load(max, (i + j) / block), most), inverse = s == 0.0f ? 0.0f : 1.0f / s;
      whole[j] = cml::quantum(cml::load(x, i + j), s, inverse, most, dither ? words + j : nullptr);
    }
    cml::put_portable(q, i, whole, count, bits);
  }
  return CML_OK;
}

extern "C" int64_t cml_int_legal(const uint8_t* q, int64_t n, int bits) {
  if (n < 0 || (bits != 4 && bits != 8)) return CML_ERR_ARGUMENT;
  unsigned bad = 0;
  const int64_t nbytes = cml::packed_nbytes(n, bits);
  if (bits == 8)
    for (int64_t i = 0; i < nbytes; ++i) bad |= q[i] == 0x80;
  else
    for (int64_t i = 0; i < nbytes; ++i) bad |= ((q[i] & 0x0f) == 0x08) | ((q[i] & 0xf0) == 0x80);
  return bad || (bits == 4 && n % 2 && q[nbytes - 1] >> 4) ? 0 : 1;
}

extern "C" int64_t cml_int_add(int32_t* acc, const uint8_t* q, int64_t n, int bits, int assign) {
  if (n < 0 || (bits != 4 && bits != 8)) return CML_ERR_ARGUMENT;
  int64_t i = 0;
#if CML_VECTORS
  if (cml::wide()) i = bits == 4 ? cml::add_avx2<4>(acc, q, n, assign != 0) : cml::add_avx2<8>(acc, q, n, assign != 0);
#endif
  for (; i < n; i += cml::kChunk) {
    int32_t whole[cml::kChunk];
    const int64_t count = cml::chunk_at(i, n);
    cml::get_portable(whole, q, i, count, bits);
    for (int64_t j = 0; j < count; ++j) cml::store(acc, i + j, assign ? whole[j] : cml::load(acc, i + j) + whole[j]);
  }
  return CML_OK;
}

extern "C" int64_t cml_int_pack(uint8_t* out, const int32_t* acc, int64_t n, int width) {
  if (n < 0 || !cml::known_width(width)) return CML_ERR_ARGUMENT;
  int64_t i = 0;
#if CML_VECTORS
  if (cml::wide()) i = CML_BY_WIDTH(pack_avx2, width, (out, acc, n));
#endif
  for (; i < n; i += cml::kChunk) {
    int32_t whole[cml::kChunk];
    const int64_t count = cml::chunk_at(i, n);
    for (int64_t j = 0; j < count; ++j) whole[j] = cml::load(acc, i + j);
    cml::put_portable(out, i, whole, count, width);
  }
  return CML_OK;
}

extern "C" int64_t cml_int_decode(float* out, const uint8_t* q, const uint16_t* max, int64_t n, int64_t block, int bits,
                                  int width) {
  if (n < 0 || block < 1 || (bits != 4 && bits != 8) || !cml::known_width(width)) return CML_ERR_ARGUMENT;
  const float most = cml::levels(bits);
  int64_t i = 0;
#if CML_VECTORS
  if (cml::wide()) i = CML_BY_WIDTH(decode_avx2, width, (out, q, max, n, block, most));
#endif
  for (; i < n; i += cml::kChunk) {
    int32_t whole[cml::kChunk];
    const int64_t count = cml::chunk_at(i, n);
    cml::get_portable(whole, q, i, count, width);
    for (int64_t j = 0; j < count; ++j)
      cml::store(out, i + j, cml::scale_of(cml::load(max, (i + j) / block), most) * static_cast<float>(whole[j]));
  }
  return CML_OK;
}

// Blockwise 4-bit values, two in a byte. Knows neither headers nor positions. Meant for gathered values: no vector body.
#include "dispatch.h"

namespace cml {
namespace {

constexpr float kTop = 7.0f;
constexpr float kRound = 12582912.0f;          // 1.5 * 2^23: adding it leaves no bits below one, rounded half to even
constexpr float kSmallest = kTop * 0x1p-126f;  // below it a scale would not be a normal number
constexpr float kMost = 0x1.fffffep+124f;      // FLT_MAX / 8: any nibble times it is finite

inline float scale_of(float most) {
  const float s = most / kTop;
  return most < kSmallest ? 0.0f : s > kMost ? kMost : s;
}

inline int code(float v, float scale) {
  float t = scale == 0.0f ? 0.0f : v / scale;
  t = t > kTop ? kTop : t;
  t = t < -kTop ? -kTop : t;
  return static_cast<int>((t + kRound) - kRound);
}

inline int nibble(const uint8_t* q, int64_t i) {
  const int raw = load(q, i / 2) >> (4 * (i % 2)) & 15;
  return raw - ((raw & 8) << 1);
}

}  // namespace
}  // namespace cml

extern "C" int64_t cml_nibbles_encode(uint8_t* q, float* scale, const float* x, float* rest, int64_t n, int64_t block) {
  if (n < 0 || block < 2 || block % 2 != 0) return CML_ERR_ARGUMENT;
  for (int64_t b = 0, at = 0; at < n; ++b, at += block) {
    const int64_t end = n - at < block ? n : at + block;
    uint32_t most = 0;
    for (int64_t i = at; i < end; ++i) {
      const uint32_t a = cml::bits_of(cml::load(x, i)) & cml::kAbs;
      most = a > most ? a : most;
    }
    if (most >= cml::kInf) return 0;
    const float s = cml::scale_of(cml::float_of(most));
    cml::store(scale, b, s);
    for (int64_t i = at; i < end; i += 2) {
      int pair[2] = {0, 0};
      for (int64_t j = 0; j < 2 && i + j < end; ++j) {
        const float v = cml::load(x, i + j);
        pair[j] = cml::code(v, s);
        if (rest) cml::store(rest, i + j, v - s * static_cast<float>(pair[j]));
      }
      cml::store(q, i / 2, static_cast<uint8_t>((pair[0] & 15) | (pair[1] & 15) << 4));
    }
  }
  return 1;
}

extern "C" int64_t cml_nibbles_decode(float* out, const uint8_t* q, const float* scale, int64_t n, int64_t block) {
  if (n < 0 || block < 2 || block % 2 != 0) return CML_ERR_ARGUMENT;
  for (int64_t i = 0; i < n; ++i) cml::store(out, i, cml::load(scale, i / block) * static_cast<float>(cml::nibble(q, i)));
  return n;
}

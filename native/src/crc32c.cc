// CRC-32C: the crc32 instruction over three interleaved lanes, or eight tables. Knows bytes only.
#include "dispatch.h"

#if CML_VECTORS && !CML_X86
#include <arm_acle.h>
#endif

namespace cml {
namespace {

constexpr uint32_t kPoly = 0x82f63b78u;  // Castagnoli, bit-reflected

struct Tables {
  uint32_t t[8][256];
};

constexpr Tables make_tables() {
  Tables out{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (c & 1 ? kPoly : 0);
    out.t[0][i] = c;
  }
  for (uint32_t i = 0; i < 256; ++i)
    for (int k = 1; k < 8; ++k) out.t[k][i] = (out.t[k - 1][i] >> 8) ^ out.t[0][out.t[k - 1][i] & 255];
  return out;
}

constexpr Tables kTables = make_tables();

uint32_t crc_portable(uint32_t c, const uint8_t* p, size_t n) {
  const auto& t = kTables.t;
  for (; n >= 8; n -= 8, p += 8) {
    const uint64_t w = load(reinterpret_cast<const uint64_t*>(p)) ^ c;
    c = t[7][w & 255] ^ t[6][w >> 8 & 255] ^ t[5][w >> 16 & 255] ^ t[4][w >> 24 & 255] ^ t[3][w >> 32 & 255] ^
        t[2][w >> 40 & 255] ^ t[1][w >> 48 & 255] ^ t[0][w >> 56];
  }
  for (; n; --n) c = (c >> 8) ^ t[0][(c ^ *p++) & 255];
  return c;
}

#if CML_VECTORS

#if CML_X86
CML_CRC inline uint64_t crc8(uint64_t crc, uint64_t bytes) { return _mm_crc32_u64(crc, bytes); }
CML_CRC inline uint32_t crc1(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
CML_CRC inline uint64_t multiply(uint32_t a, uint32_t b) {  // carry-less
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(a), _mm_cvtsi64_si128(b), 0);
  return static_cast<uint64_t>(_mm_cvtsi128_si64(product));
}
#else
CML_CRC inline uint64_t crc8(uint64_t crc, uint64_t bytes) { return __crc32cd(static_cast<uint32_t>(crc), bytes); }
CML_CRC inline uint32_t crc1(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }
CML_CRC inline uint64_t multiply(uint32_t a, uint32_t b) { return static_cast<uint64_t>(vmull_p64(a, b)); }
#endif

// x^(8 * nbytes - 33) mod P: multiplied carry-less with a crc and reduced by one crc32 step, it moves the crc nbytes on.
constexpr uint32_t shift_constant(size_t nbytes) {
  uint32_t c = 0x80000000u;  // x^0
  for (size_t i = 0; i < 8 * nbytes - 33; ++i) c = (c >> 1) ^ (c & 1 ? kPoly : 0);
  return c;
}

CML_CRC inline uint32_t shift(uint64_t crc, uint32_t constant) {
  return static_cast<uint32_t>(crc8(0, multiply(static_cast<uint32_t>(crc), constant)));
}

// The instruction has a latency of three cycles and starts one per cycle: three independent lanes keep it busy.
template <size_t kLane>
CML_CRC inline uint64_t crc_lanes(uint64_t c, const uint8_t*& p, size_t& n) {
  constexpr uint32_t one = shift_constant(kLane), two = shift_constant(2 * kLane);
  while (n >= 3 * kLane) {
    uint64_t a = c, b = 0, d = 0;
    const auto* w = reinterpret_cast<const uint64_t*>(p);
    for (size_t i = 0; i < kLane / 8; ++i) {
      const auto at = static_cast<int64_t>(i);
      a = crc8(a, load(w, at));
      b = crc8(b, load(w, at + int64_t{kLane / 8}));
      d = crc8(d, load(w, at + int64_t{2 * kLane / 8}));
    }
    c = shift(a, two) ^ shift(b, one) ^ d;
    p += 3 * kLane;
    n -= 3 * kLane;
  }
  return c;
}

CML_CRC uint32_t crc_hardware(uint32_t crc, const uint8_t* p, size_t n) {
  uint64_t c = crc;
  c = crc_lanes<4096>(c, p, n);
  c = crc_lanes<256>(c, p, n);
  for (; n >= 8; n -= 8, p += 8) c = crc8(c, load(reinterpret_cast<const uint64_t*>(p)));
  for (; n; --n) c = crc1(static_cast<uint32_t>(c), *p++);
  return static_cast<uint32_t>(c);
}

#endif

}  // namespace
}  // namespace cml

extern "C" uint32_t cml_crc32c(uint32_t crc, const void* data, size_t nbytes) {
  const auto* p = static_cast<const uint8_t*>(data);
#if CML_VECTORS
  if (cml::wide_crc()) return ~cml::crc_hardware(~crc, p, nbytes);
#endif
  return ~cml::crc_portable(~crc, p, nbytes);
}

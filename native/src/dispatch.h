// What the kernels share: the choice of body by CPU, and loads and stores that need no alignment. Knows no formats.
#pragma once

#include "commlayer.h"

#include <cstring>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are little endian, and so must the machine be"
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define CML_X86 1
#define CML_VECTORS 1
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // said of GCC 12's own AVX-512 header
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#define CML_AVX2 __attribute__((target("avx2,f16c,bmi,lzcnt,popcnt")))
#define CML_AVX512 __attribute__((target("avx512f")))
#define CML_CRC __attribute__((target("sse4.2,pclmul")))
#elif defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
#define CML_X86 0
#define CML_VECTORS 1  // NEON is part of the architecture; its bodies are those of AVX2, in other words
#include "avx2_on_neon.h"
#define CML_AVX2
#define CML_CRC __attribute__((target("+crc+crypto")))
#else
#define CML_X86 0
#define CML_VECTORS 0
#endif

namespace cml {

// Whether the vector bodies run, those of AVX-512 where there are any, and the CPU's instructions for checksums.
bool wide();
bool wider();
bool wide_crc();

template <class T>
inline T load(const T* p, int64_t i = 0) {
  T value;
  std::memcpy(&value, reinterpret_cast<const char*>(p) + i * int64_t{sizeof(T)}, sizeof(T));
  return value;
}

template <class T>
inline void store(T* p, int64_t i, T value) {
  std::memcpy(reinterpret_cast<char*>(p) + i * int64_t{sizeof(T)}, &value, sizeof(T));
}

inline uint32_t bits_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, sizeof u);
  return u;
}

inline float float_of(uint32_t u) {
  float f;
  std::memcpy(&f, &u, sizeof f);
  return f;
}

constexpr uint32_t kAbs = 0x7fffffffu;
constexpr uint32_t kInf = 0x7f800000u;
constexpr uint32_t kNormal = 0x00800000u;  // 2^-126, the smallest normal number
constexpr int64_t kMaxN = (int64_t{1} << 32) - 1;  // positions are 32-bit

inline bool is_finite(float f) { return (bits_of(f) & kAbs) < kInf; }

}  // namespace cml

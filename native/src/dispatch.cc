// Which body runs, and the names of errors. The only mutable global of the core lives here.
#include "dispatch.h"

#include <atomic>

#if CML_X86
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace cml {
namespace {

bool cpu_has_vectors() {
#if CML_X86
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;  // not every compiler has a name for these two
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
  const bool lzcnt = __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & 1u << 5);
  return __builtin_cpu_supports("avx2") && f16c && lzcnt && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt") &&
         __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
#else
  return CML_VECTORS != 0;
#endif
}

// All but the oldest of 64-bit ARM have both instructions; on x86 they came before AVX2.
bool cpu_has_crc() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kPmull = 1ul << 4, kCrc32 = 1ul << 7;  // bits of the kernel's AT_HWCAP
  return (getauxval(AT_HWCAP) & (kPmull | kCrc32)) == (kPmull | kCrc32);
#elif defined(__aarch64__) && defined(__APPLE__)
  return true;
#else
  return cpu_has_vectors();
#endif
}

bool cpu_has_avx512() {
#if CML_X86
  __builtin_cpu_init();
  return cpu_has_vectors() && __builtin_cpu_supports("avx512f");
#else
  return false;
#endif
}

const bool kCapable = cpu_has_vectors(), kWider = cpu_has_avx512(), kChecksums = cpu_has_crc();
std::atomic<int> forced{0};

}  // namespace

bool wide_crc() { return kChecksums && wide(); }

bool wide() { return kCapable && forced.load(std::memory_order_relaxed) != 1; }

bool wider() { return kWider && forced.load(std::memory_order_relaxed) == 0; }

}  // namespace cml

extern "C" int cml_force_portable(int on) { return cml::forced.exchange(on); }

extern "C" const char* cml_isa(void) { return !cml::wide() ? "portable" : !CML_X86 ? "neon" : cml::wider() ? "avx512" : "avx2"; }

extern "C" const char* cml_error_name(int64_t code) {
  switch (code) {
    case CML_OK: return "ok";
    case CML_ERR_CAPACITY: return "destination too small";
    case CML_ERR_CORRUPT: return "bytes break the format";
    case CML_ERR_ARGUMENT: return "argument outside its contract";
    default: return code > 0 ? "ok" : "unknown error";
  }
}

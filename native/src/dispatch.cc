// Which body runs, and the names of errors. The only mutable global of the core lives here.
#include "dispatch.h"

#include <atomic>

#if CML_X86
#include <cpuid.h>
#endif

namespace cml {
namespace {

bool cpu_has_avx2() {
#if CML_X86
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;  // not every compiler has a name for these two
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
  const bool lzcnt = __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & 1u << 5);
  return __builtin_cpu_supports("avx2") && f16c && lzcnt && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt") &&
         __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
#else
  return false;
#endif
}

const bool kCapable = cpu_has_avx2();
std::atomic<bool> forced{false};

}  // namespace

bool wide() { return kCapable && !forced.load(std::memory_order_relaxed); }

}  // namespace cml

extern "C" int cml_force_portable(int on) { return cml::forced.exchange(on != 0) ? 1 : 0; }

extern "C" const char* cml_isa(void) { return cml::wide() ? "avx2" : "portable"; }

extern "C" const char* cml_error_name(int64_t code) {
  switch (code) {
    case CML_OK: return "ok";
    case CML_ERR_CAPACITY: return "destination too small";
    case CML_ERR_CORRUPT: return "bytes break the format";
    case CML_ERR_ARGUMENT: return "argument outside its contract";
    default: return code > 0 ? "ok" : "unknown error";
  }
}

// Which body runs, and the names of errors. The only mutable global of the core lives here.
#include "dispatch.h"

#include <atomic>

namespace cml {
namespace {

bool cpu_has_avx2() {
#if CML_X86
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("lzcnt") && __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("sse4.2") &&
         __builtin_cpu_supports("pclmul");
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

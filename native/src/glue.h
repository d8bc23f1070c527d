// What the modules of the Python glue share: calling a kernel without the GIL, its errors as exceptions. Computes nothing.
#pragma once

#include "arguments.h"
#include "commlayer.h"
#include "parts.h"

#include <nanobind/nanobind.h>

#include <optional>

namespace glue {

namespace nb = nanobind;

constexpr int64_t kInline = 4096;  // bytes; below, giving the GIL away costs more than the kernel

template <class F>
auto run(int64_t nbytes, F kernel) {
  if (nbytes <= kInline) return kernel();
  nb::gil_scoped_release released;
  return kernel();
}

inline int64_t checked(const char* function, int64_t result) {
  if (result >= 0) return result;
  if (result != CML_ERR_CORRUPT) fail(PyExc_ValueError, "%s: %s", function, cml_error_name(result));
  nb::object type = nb::module_::import_("commlayer.errors").attr("CorruptPayload");
  nb::object error = type(nb::str("%s: %s").attr("__mod__")(nb::make_tuple(function, cml_error_name(result))));
  PyErr_SetObject(type.ptr(), error.ptr());
  throw nb::python_error();
}

// An argument that may be None: the residual, always of the gradient's length.
class Optional {
 public:
  Optional(const char* name, nb::handle object, int64_t n) {
    if (object.is_none()) return;
    memory_.emplace(name, object.ptr(), true);
    int64_t have = 0;
    data_ = memory_->array<float>(Kind::f32, &have);
    if (have != n)
      fail(PyExc_ValueError, "%s: holds %lld elements, need %lld", name, static_cast<long long>(have),
                 static_cast<long long>(n));
  }
  float* data() const { return data_; }
  float* at(int64_t i) const { return data_ ? data_ + i : nullptr; }

 private:
  std::optional<Memory> memory_;
  float* data_ = nullptr;
};

inline void require_block(int64_t block) {
  if (block < 1) fail(PyExc_ValueError, "block: got %lld, need at least 1", static_cast<long long>(block));
}

inline int64_t blocks(int64_t n, int64_t block) { return n / block + (n % block != 0); }

template <int64_t (*kKernel)(uint8_t*, int64_t, const uint32_t*, int64_t, int64_t)>
int64_t encode_positions(nb::handle out, nb::handle idx, int64_t n) {
  const Memory out_memory("out", out.ptr(), true), idx_memory("idx", idx.ptr(), false);
  int64_t k = 0;
  const auto* positions = idx_memory.array<uint32_t>(Kind::u32, &k);
  auto* to = out_memory.bytes<uint8_t>();
  const int64_t cap = out_memory.nbytes();
  return checked("positions", run(4 * k + n / 8, [&] { return kKernel(to, cap, positions, k, n); }));
}

template <int64_t (*kKernel)(uint32_t*, int64_t, int64_t, const uint8_t*, int64_t)>
int64_t decode_positions(nb::handle idx, int64_t n, nb::handle src) {
  const Memory idx_memory("idx", idx.ptr(), true), src_memory("src", src.ptr(), false);
  int64_t k = 0;
  auto* positions = idx_memory.array<uint32_t>(Kind::u32, &k);
  const auto* from = src_memory.bytes<uint8_t>();
  const int64_t have = src_memory.nbytes();
  return checked("positions", run(4 * k + have, [&] { return kKernel(positions, k, n, from, have); }));
}

// Each adds the functions of one family to the module.
void bind_quantisers(nb::module_& m);
void bind_sparse(nb::module_& m);
void bind_lowrank(nb::module_& m);
void bind_lazy(nb::module_& m);
void bind_schedule(nb::module_& m);

}  // namespace glue

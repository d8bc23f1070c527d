// The glue of lazy optimizers. Computes nothing.
#include "glue.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace glue {
namespace {

using namespace nb::literals;

constexpr int64_t kSgd = 4 * CML_LAZY_ROWS, kAdam = 8 * CML_LAZY_ROWS, kStep = 7;

// An array of exactly n elements, or nothing where None is allowed.
template <class T>
T* of_length(const Memory& memory, const char* name, Kind kind, int64_t n) {
  int64_t have = 0;
  T* data = memory.array<T>(kind, &have);
  if (have != n)
    fail(PyExc_ValueError, "%s: holds %lld elements, need %lld", name, static_cast<long long>(have), static_cast<long long>(n));
  return data;
}

int64_t groups_of(int64_t n) { return (n + CML_LAZY_GROUP - 1) / CML_LAZY_GROUP; }

class Stamps {
 public:
  Stamps(nb::handle object, int64_t n) {
    if (object.is_none()) return;
    memory_.emplace("stamp", object.ptr(), true);
    data_ = of_length<uint8_t>(*memory_, "stamp", Kind::u8, groups_of(n));
  }
  uint8_t* data() const { return data_; }

 private:
  std::optional<Memory> memory_;
  uint8_t* data_ = nullptr;
};

int64_t sgd_sparse(nb::handle w, nb::handle v, nb::handle stamp, int64_t now, nb::handle rows, nb::handle idx, nb::handle g,
                   float rate, float momentum, float gain, float decay, bool nesterov) {
  const Memory w_memory("w", w.ptr(), true), rows_memory("rows", rows.ptr(), false), idx_memory("idx", idx.ptr(), false),
      g_memory("g", g.ptr(), false);
  int64_t n = 0, k = 0;
  float* weights = w_memory.array<float>(Kind::f32, &n);
  const auto* positions = idx_memory.array<uint32_t>(Kind::u32, &k);
  const auto* values = of_length<const float>(g_memory, "g", Kind::f32, k);
  const auto* table = of_length<const float>(rows_memory, "rows", Kind::f32, kSgd);
  const Optional velocity("v", v, n);
  const Stamps stamps(stamp, n);
  return checked("sgd_sparse", run(64 * k, [&] {
    return cml_sgd_sparse(weights, velocity.data(), stamps.data(), n, static_cast<uint8_t>(now), table, positions, values, k, rate,
                          momentum, gain, decay, nesterov ? 1 : 0);
  }));
}

void sgd_catch_up(nb::handle w, nb::handle v, nb::handle stamp, int64_t now, nb::handle rows) {
  const Memory w_memory("w", w.ptr(), true), rows_memory("rows", rows.ptr(), false), stamp_memory("stamp", stamp.ptr(), true);
  int64_t n = 0;
  float* weights = w_memory.array<float>(Kind::f32, &n);
  const auto* table = of_length<const float>(rows_memory, "rows", Kind::f32, kSgd);
  auto* stamps = of_length<uint8_t>(stamp_memory, "stamp", Kind::u8, groups_of(n));
  const Optional velocity("v", v, n);
  run(16 * n, [&] {
    Parts(n, CML_LAZY_GROUP).each([&](Part p) {
      cml_sgd_catch_up(weights + p.lo, velocity.at(p.lo), stamps + p.lo / CML_LAZY_GROUP, p.n, static_cast<uint8_t>(now), table);
    });
  });
}

int64_t adam_sparse(nb::handle w, nb::handle m, nb::handle v, nb::handle stamp, int64_t now, nb::handle rows, nb::handle idx,
                    nb::handle g, nb::handle step) {
  const Memory w_memory("w", w.ptr(), true), m_memory("m", m.ptr(), true), v_memory("v", v.ptr(), true),
      rows_memory("rows", rows.ptr(), false), idx_memory("idx", idx.ptr(), false), g_memory("g", g.ptr(), false),
      step_memory("step", step.ptr(), false);
  int64_t n = 0, k = 0;
  float* weights = w_memory.array<float>(Kind::f32, &n);
  const auto* positions = idx_memory.array<uint32_t>(Kind::u32, &k);
  const auto* values = of_length<const float>(g_memory, "g", Kind::f32, k);
  auto* first = of_length<float>(m_memory, "m", Kind::f32, n);
  auto* second = of_length<float>(v_memory, "v", Kind::f32, n);
  const auto* table = of_length<const float>(rows_memory, "rows", Kind::f32, kAdam);
  const auto* numbers = of_length<const float>(step_memory, "step", Kind::f32, kStep);
  const Stamps stamps(stamp, n);
  return checked("adam_sparse", run(64 * k, [&] {
    return cml_adam_sparse(weights, first, second, stamps.data(), n, static_cast<uint8_t>(now), table, positions, values, k,
                           numbers);
  }));
}

void adam_catch_up(nb::handle w, nb::handle m, nb::handle v, nb::handle stamp, int64_t now, nb::handle rows) {
  const Memory w_memory("w", w.ptr(), true), m_memory("m", m.ptr(), true), v_memory("v", v.ptr(), true),
      rows_memory("rows", rows.ptr(), false), stamp_memory("stamp", stamp.ptr(), true);
  int64_t n = 0;
  float* weights = w_memory.array<float>(Kind::f32, &n);
  auto* first = of_length<float>(m_memory, "m", Kind::f32, n);
  auto* second = of_length<float>(v_memory, "v", Kind::f32, n);
  const auto* table = of_length<const float>(rows_memory, "rows", Kind::f32, kAdam);
  auto* stamps = of_length<uint8_t>(stamp_memory, "stamp", Kind::u8, groups_of(n));
  run(16 * n, [&] {
    Parts(n, CML_LAZY_GROUP).each([&](Part p) {
      cml_adam_catch_up(weights + p.lo, first + p.lo, second + p.lo, stamps + p.lo / CML_LAZY_GROUP, p.n, static_cast<uint8_t>(now), table);
    });
  });
}

#if defined(__linux__) && !defined(MADV_COLLAPSE)
#define MADV_COLLAPSE 25  // since Linux 6.1; older ones refuse it
#endif

// Asks for large pages where x lies, and to move there what is written already: entries far apart then cost a cache miss, and not
// a walk through page tables besides. Whoever has none to give goes on with small ones.
void huge_pages(nb::handle x) {
  const Memory memory("x", x.ptr(), true);
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const auto first = reinterpret_cast<uintptr_t>(memory.bytes<char>()), last = first + static_cast<uintptr_t>(memory.nbytes());
  const uintptr_t low = (first + kPage - 1) / kPage * kPage, high = last / kPage * kPage;
  if (low < high && madvise(reinterpret_cast<void*>(low), high - low, MADV_HUGEPAGE) == 0)
    madvise(reinterpret_cast<void*>(low), high - low, MADV_COLLAPSE);
#endif
}

// shape as numbers, whose product is below 2^32.
int64_t read_shape(const nb::tuple& shape, int64_t* to, int64_t most) {
  const auto dims = static_cast<int64_t>(nb::len(shape));
  if (dims < 1 || dims > most) fail(PyExc_ValueError, "shape: got %lld dimensions, need 1 to 16", static_cast<long long>(dims));
  int64_t n = 1;
  for (int64_t d = 0; d < dims; ++d) {
    to[d] = nb::cast<int64_t>(shape[static_cast<size_t>(d)]);
    if (to[d] < 0 || (to[d] > 0 && n > UINT32_MAX / to[d])) fail(PyExc_ValueError, "shape: more than 2^32 - 1 elements");
    n *= to[d];
  }
  return dims;
}

constexpr int64_t kDims = 16;

void flat_positions(nb::handle idx, nb::handle at, const nb::tuple& shape) {
  const Memory idx_memory("idx", idx.ptr(), true), at_memory("at", at.ptr(), false);
  int64_t k = 0, sizes[kDims];
  const int64_t dims = read_shape(shape, sizes, kDims);
  auto* positions = idx_memory.array<uint32_t>(Kind::u32, &k);
  const auto* coordinates = of_length<const int64_t>(at_memory, "at", Kind::i64, k * dims);
  checked("flat_positions", run(8 * k, [&] { return cml_flat_positions(positions, coordinates, k, sizes, dims); }));
}

void coordinates(nb::handle at, nb::handle idx, const nb::tuple& shape) {
  const Memory idx_memory("idx", idx.ptr(), false), at_memory("at", at.ptr(), true);
  int64_t k = 0, sizes[kDims];
  const int64_t dims = read_shape(shape, sizes, kDims);
  const auto* positions = idx_memory.array<uint32_t>(Kind::u32, &k);
  auto* to = of_length<int64_t>(at_memory, "at", Kind::i64, k * dims);
  for (int64_t d = 0; d < dims; ++d)
    if (sizes[d] == 0 && k > 0) fail(PyExc_ValueError, "idx: got %lld positions, the shape has none", static_cast<long long>(k));
  checked("coordinates", run(8 * k, [&] { return cml_coordinates(to, positions, k, sizes, dims); }));
}

}  // namespace

void bind_lazy(nb::module_& m) {
  m.def("sgd_sparse", &sgd_sparse, "w"_a, "v"_a.none(), "stamp"_a.none(), "now"_a, "rows"_a, "idx"_a, "g"_a, "rate"_a,
        "momentum"_a, "gain"_a, "decay"_a, "nesterov"_a);
  m.def("sgd_catch_up", &sgd_catch_up, "w"_a, "v"_a.none(), "stamp"_a, "now"_a, "rows"_a);
  m.def("adam_sparse", &adam_sparse, "w"_a, "m"_a, "v"_a, "stamp"_a.none(), "now"_a, "rows"_a, "idx"_a, "g"_a, "step"_a);
  m.def("adam_catch_up", &adam_catch_up, "w"_a, "m"_a, "v"_a, "stamp"_a, "now"_a, "rows"_a);
  m.def("huge_pages", &huge_pages, "x"_a);
  m.def("flat_positions", &flat_positions, "idx"_a, "at"_a, "shape"_a);
  m.def("coordinates", &coordinates, "at"_a, "idx"_a, "shape"_a);
}

}  // namespace glue

// The glue of low-rank products. Computes nothing.
#include "glue.h"

namespace glue {
namespace {

void outer(nb::handle out, nb::handle p, nb::handle q, int64_t rank) {
  const Memory out_memory("out", out.ptr(), true), p_memory("p", p.ptr(), false), q_memory("q", q.ptr(), false);
  int64_t numel = 0, rows = 0, columns = 0;
  auto* to = out_memory.array<float>(Kind::f32, &numel);
  const auto* left = p_memory.array<float>(Kind::f32, &rows);
  const auto* right = q_memory.array<float>(Kind::f32, &columns);
  if (rank < 1 || rows % rank || columns % rank || numel != rows / rank * (columns / rank))
    fail(PyExc_ValueError, "outer: factors of %lld and %lld elements of rank %lld make no %lld elements",
         static_cast<long long>(rows), static_cast<long long>(columns), static_cast<long long>(rank),
         static_cast<long long>(numel));
  run(4 * numel, [&] { cml_outer(to, left, right, rows / rank, columns / rank, rank); });
}

}  // namespace

void bind_lowrank(nb::module_& m) {
  using namespace nb::literals;
  m.def("outer", &outer, "out"_a, "p"_a, "q"_a, "rank"_a);
}

}  // namespace glue

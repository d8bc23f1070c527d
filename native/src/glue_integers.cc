// The glue of shared-scale integers and of low-rank products. Computes nothing.
#include "glue.h"

namespace glue {
namespace {

constexpr int64_t kByte = 8;  // elements that fill whole bytes at every width

int64_t packed(int64_t n, int width) { return (n * width + 7) / 8; }

void require_width(int width) {
  if (width != 4 && width != 8 && width != 12 && width != 16 && width != 32)
    fail(PyExc_ValueError, "width: got %d, allowed are 4, 8, 12, 16 and 32", width);
}

void require_bits(int bits) {
  if (bits != 4 && bits != 8) fail(PyExc_ValueError, "bits: got %d, allowed are 4 and 8", bits);
}

bool int_maxima(nb::handle max, nb::handle x, int64_t block) {
  require_block(block);
  const Memory max_memory("max", max.ptr(), true), x_memory("x", x.ptr(), false);
  int64_t n = 0;
  const float* from = x_memory.array<float>(Kind::f32, &n);
  auto* to = max_memory.payload<uint16_t>(Kind::bf16, blocks(n, block), 0);
  return checked("int_maxima", run(4 * n, [&] {
    return Parts(n, block).least([&](Part p) { return cml_int_maxima(to + p.lo / block, from + p.lo, p.n, block); });
  })) != 0;
}

void int_encode(nb::handle q, nb::handle x, nb::handle max, int64_t block, int bits, bool dither, uint64_t key, uint64_t step) {
  require_block(block);
  require_bits(bits);
  const Memory q_memory("q", q.ptr(), true), x_memory("x", x.ptr(), false), max_memory("max", max.ptr(), false);
  int64_t n = 0;
  const float* from = x_memory.array<float>(Kind::f32, &n);
  auto* to = q_memory.bytes<uint8_t>(packed(n, bits));
  const auto* tops = max_memory.payload<uint16_t>(Kind::bf16, blocks(n, block), 0);
  checked("int_encode", run(4 * n, [&] {
    return Parts(n, kByte * (block < n ? block : n)).least([&](Part p) {
      return cml_int_encode(to + packed(p.lo, bits), from + p.lo, tops + p.lo / block, p.n, block, bits, dither ? 1 : 0, key, step, p.lo);
    });
  }));
}

bool int_legal(nb::handle q, int64_t n, int bits) {
  require_bits(bits);
  if (n < 0) fail(PyExc_ValueError, "n: got %lld, need at least 0", static_cast<long long>(n));
  const Memory memory("q", q.ptr(), false);
  const auto* from = memory.bytes<uint8_t>(packed(n, bits));
  return checked("int_legal", run(n, [&] { return cml_int_legal(from, n, bits); })) != 0;
}

void int_add(nb::handle acc, nb::handle q, int bits, bool assign) {
  require_bits(bits);
  const Memory acc_memory("acc", acc.ptr(), true), q_memory("q", q.ptr(), false);
  int64_t n = 0;
  auto* to = reinterpret_cast<int32_t*>(acc_memory.array<uint32_t>(Kind::u32, &n));
  const auto* from = q_memory.bytes<uint8_t>(packed(n, bits));
  checked("int_add", run(4 * n, [&] {
    return Parts(n, kByte).least([&](Part p) { return cml_int_add(to + p.lo, from + packed(p.lo, bits), p.n, bits, assign ? 1 : 0); });
  }));
}

void int_pack(nb::handle out, nb::handle acc, int width) {
  require_width(width);
  const Memory out_memory("out", out.ptr(), true), acc_memory("acc", acc.ptr(), false);
  int64_t n = 0;
  const auto* from = reinterpret_cast<const int32_t*>(acc_memory.array<uint32_t>(Kind::u32, &n));
  auto* to = out_memory.bytes<uint8_t>(packed(n, width));
  checked("int_pack", run(4 * n, [&] {
    return Parts(n, kByte).least([&](Part p) { return cml_int_pack(to + packed(p.lo, width), from + p.lo, p.n, width); });
  }));
}

void int_decode(nb::handle out, nb::handle q, nb::handle max, int64_t block, int bits, int width) {
  require_block(block);
  require_bits(bits);
  require_width(width);
  const Memory out_memory("out", out.ptr(), true), q_memory("q", q.ptr(), false), max_memory("max", max.ptr(), false);
  int64_t n = 0;
  auto* to = out_memory.array<float>(Kind::f32, &n);
  const auto* from = q_memory.bytes<uint8_t>(packed(n, width));
  const auto* tops = max_memory.payload<uint16_t>(Kind::bf16, blocks(n, block), 0);
  checked("int_decode", run(4 * n, [&] {
    return Parts(n, kByte * (block < n ? block : n)).least([&](Part p) {
      return cml_int_decode(to + p.lo, from + packed(p.lo, width), tops + p.lo / block, p.n, block, bits, width);
    });
  }));
}

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

void bind_integers(nb::module_& m) {
  using namespace nb::literals;
  m.def("int_maxima", &int_maxima, "max"_a, "x"_a, "block"_a);
  m.def("int_encode", &int_encode, "q"_a, "x"_a, "max"_a, "block"_a, "bits"_a, "dither"_a, "key"_a, "step"_a);
  m.def("int_legal", &int_legal, "q"_a, "n"_a, "bits"_a);
  m.def("int_add", &int_add, "acc"_a, "q"_a, "bits"_a, "assign"_a);
  m.def("int_pack", &int_pack, "out"_a, "acc"_a, "width"_a);
  m.def("int_decode", &int_decode, "out"_a, "q"_a, "max"_a, "block"_a, "bits"_a, "width"_a);
  m.def("outer", &outer, "out"_a, "p"_a, "q"_a, "rank"_a);
}

}  // namespace glue

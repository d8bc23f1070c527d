// commlayer._core: checks arguments, releases the GIL, calls the kernel, turns errors into exceptions. Computes nothing.
#include "glue.h"

namespace nb = nanobind;
using namespace glue;

namespace {

uint32_t crc32c(nb::handle data, uint32_t crc) {
  const Memory memory("data", data.ptr(), false);
  const int64_t nbytes = memory.nbytes();
  const auto* bytes = memory.bytes<uint8_t>();
  return run(nbytes, [&] { return cml_crc32c(crc, bytes, static_cast<size_t>(nbytes)); });
}

template <class T, Kind kKind, void (*kKernel)(float*, const T*, int64_t)>
void add(nb::handle acc, nb::handle x) {
  const Memory acc_memory("acc", acc.ptr(), true), x_memory("x", x.ptr(), false);
  int64_t n = 0;
  float* a = acc_memory.array<float>(Kind::f32, &n);
  const T* b = x_memory.payload<T>(kKind, n);
  run(4 * n, [&] { Parts(n, 1).each([&](Part p) { kKernel(a + p.lo, b + p.lo, p.n); }); });
}

template <Kind kKind, int64_t (*kKernel)(uint16_t*, const float*, int64_t)>
bool narrow(nb::handle dst, nb::handle src) {
  const Memory dst_memory("dst", dst.ptr(), true), src_memory("src", src.ptr(), false);
  int64_t n = 0;
  const float* from = src_memory.array<float>(Kind::f32, &n);
  uint16_t* to = dst_memory.payload<uint16_t>(kKind, n);
  return run(4 * n, [&] {
    return Parts(n, 1).least([&](Part p) { return kKernel(to + p.lo, from + p.lo, p.n); });
  }) != 0;
}

template <Kind kKind, void (*kKernel)(float*, const uint16_t*, int64_t)>
void widen(nb::handle dst, nb::handle src) {
  const Memory dst_memory("dst", dst.ptr(), true), src_memory("src", src.ptr(), false);
  int64_t n = 0;
  float* to = dst_memory.array<float>(Kind::f32, &n);
  const uint16_t* from = src_memory.payload<uint16_t>(kKind, n);
  run(4 * n, [&] { Parts(n, 1).each([&](Part p) { kKernel(to + p.lo, from + p.lo, p.n); }); });
}

bool scale(nb::handle dst, nb::handle src, float factor) {
  const Memory dst_memory("dst", dst.ptr(), true), src_memory("src", src.ptr(), false);
  int64_t n = 0;
  float* to = dst_memory.array<float>(Kind::f32, &n);
  const float* from = src_memory.payload<float>(Kind::f32, n);
  return run(4 * n, [&] {
    return Parts(n, 1).least([&](Part p) { return cml_scale_f32(to + p.lo, from + p.lo, factor, p.n); });
  }) != 0;
}

bool all_finite(nb::handle x, nb::handle residual) {
  const Memory memory("x", x.ptr(), false);
  int64_t n = 0;
  const float* a = memory.array<float>(Kind::f32, &n);
  const Optional kept("residual", residual, n);
  return run(4 * n, [&] { return cml_all_finite(a, kept.data(), n); }) != 0;
}

int64_t sum_squares(nb::handle x, float factor) {
  const Memory memory("x", x.ptr(), false);
  int64_t n = 0;
  const float* a = memory.array<float>(Kind::f32, &n);
  return run(4 * n, [&] { return cml_sum_squares(a, factor, n); });
}

bool int8_encode(nb::handle q, nb::handle scale, nb::handle x, nb::handle residual, int64_t block) {
  require_block(block);
  const Memory q_memory("q", q.ptr(), true), scale_memory("scale", scale.ptr(), true), x_memory("x", x.ptr(), false);
  int64_t n = 0;
  const float* from = x_memory.array<float>(Kind::f32, &n);
  const Optional kept("residual", residual, n);
  auto* quanta = q_memory.payload<int8_t>(Kind::i8, n);
  auto* scales = scale_memory.payload<float>(Kind::f32, blocks(n, block));
  return checked("int8_encode", run(4 * n, [&] {
    return Parts(n, block).encode(
        [&](Part p) { return cml_int8_encode(quanta + p.lo, scales + p.lo / block, from + p.lo, kept.at(p.lo), p.n, block); },
        [&](Part p) {
          if (kept.data()) cml_int8_decode(kept.at(p.lo), quanta + p.lo, scales + p.lo / block, p.n, block, 0);
        });
  })) != 0;
}

void int8_decode(nb::handle acc, nb::handle q, nb::handle scale, int64_t block, bool assign) {
  require_block(block);
  const Memory acc_memory("acc", acc.ptr(), true), q_memory("q", q.ptr(), false), scale_memory("scale", scale.ptr(), false);
  int64_t n = 0;
  float* to = acc_memory.array<float>(Kind::f32, &n);
  const auto* quanta = q_memory.payload<int8_t>(Kind::i8, n);
  const auto* scales = scale_memory.payload<float>(Kind::f32, blocks(n, block));
  run(4 * n, [&] {
    Parts(n, block).each([&](Part p) {
      cml_int8_decode(to + p.lo, quanta + p.lo, scales + p.lo / block, p.n, block, assign ? 1 : 0);
    });
  });
}

nb::tuple select_above(nb::handle g, nb::handle residual, float threshold, int64_t start, nb::handle idx, nb::handle val) {
  const Memory g_memory("g", g.ptr(), false), idx_memory("idx", idx.ptr(), true), val_memory("val", val.ptr(), true);
  int64_t n = 0, cap = 0, room = 0, overflow = 0;
  int32_t finite = 1;
  const float* from = g_memory.array<float>(Kind::f32, &n);
  const Optional kept("residual", residual, n);
  auto* positions = idx_memory.array<uint32_t>(Kind::u32, &cap);
  auto* values = val_memory.array<float>(Kind::f32, &room);
  if (room < cap) cap = room;
  const int64_t count = checked("select: threshold >= 2^-126 and 0 <= start < n", run(4 * n, [&] {
    return glue::select(from, kept.data(), n, threshold, start, positions, values, cap, &overflow, &finite);
  }));
  return nb::make_tuple(count, overflow, finite != 0);
}

void sample_abs(nb::handle g, nb::handle residual, int64_t offset, nb::handle out) {
  const Memory g_memory("g", g.ptr(), false), out_memory("out", out.ptr(), true);
  int64_t n = 0, count = 0;
  const float* from = g_memory.array<float>(Kind::f32, &n);
  float* to = out_memory.array<float>(Kind::f32, &count);
  const Optional kept("residual", residual, n);
  if (offset < 0 || count > UINT32_MAX || n > UINT32_MAX)
    fail(PyExc_ValueError, "sample_abs: offset must not be negative, sizes must be below 2^32");
  run(64 * count, [&] { cml_sample_abs(from, kept.data(), n, offset, count, to); });
}

int64_t scatter_add(nb::handle acc, nb::handle idx, nb::handle val) {
  const Memory acc_memory("acc", acc.ptr(), true), idx_memory("idx", idx.ptr(), false), val_memory("val", val.ptr(), false);
  int64_t n = 0, k = 0;
  float* to = acc_memory.array<float>(Kind::f32, &n);
  const auto* positions = idx_memory.array<uint32_t>(Kind::u32, &k);
  const auto* values = val_memory.payload<float>(Kind::f32, k);
  return checked("scatter_add", run(4 * k, [&] { return cml_scatter_add(to, n, positions, values, k); }));
}

int64_t scatter_add_int8(nb::handle acc, nb::handle idx, nb::handle q, nb::handle scale, int64_t block) {
  require_block(block);
  const Memory acc_memory("acc", acc.ptr(), true), idx_memory("idx", idx.ptr(), false), q_memory("q", q.ptr(), false),
      scale_memory("scale", scale.ptr(), false);
  int64_t n = 0, k = 0;
  float* to = acc_memory.array<float>(Kind::f32, &n);
  const auto* positions = idx_memory.array<uint32_t>(Kind::u32, &k);
  const auto* quanta = q_memory.payload<int8_t>(Kind::i8, k);
  const auto* scales = scale_memory.payload<float>(Kind::f32, blocks(k, block));
  return checked("scatter_add_int8", run(4 * k, [&] {
    return cml_scatter_add_int8(to, n, positions, quanta, scales, k, block);
  }));
}

int64_t ef_bound(int64_t n, int64_t k) { return checked("ef_bound: 0 <= k <= n < 2^32", cml_ef_bound(n, k)); }

}  // namespace

NB_MODULE(_core, m) {
  using namespace nb::literals;
  m.doc() = "The native kernels. native/include/commlayer.h states what each does; _core.pyi how Python calls it.";
  m.def("isa", [] { return cml_isa(); });
  m.def("threads", &set_threads, "count"_a, "grain"_a);
  m.def("force_portable", [](bool on) { return cml_force_portable(on ? 1 : 0) != 0; }, "on"_a);
  m.def("crc32c", &crc32c, "data"_a, "crc"_a = 0);

  m.def("add_f32", &add<float, Kind::f32, cml_add_f32>, "acc"_a, "x"_a);
  m.def("add_f16", &add<uint16_t, Kind::f16, cml_add_f16>, "acc"_a, "x"_a);
  m.def("add_bf16", &add<uint16_t, Kind::bf16, cml_add_bf16>, "acc"_a, "x"_a);
  m.def("f32_to_f16", &narrow<Kind::f16, cml_f32_to_f16>, "dst"_a, "src"_a);
  m.def("f32_to_bf16", &narrow<Kind::bf16, cml_f32_to_bf16>, "dst"_a, "src"_a);
  m.def("f16_to_f32", &widen<Kind::f16, cml_f16_to_f32>, "dst"_a, "src"_a);
  m.def("bf16_to_f32", &widen<Kind::bf16, cml_bf16_to_f32>, "dst"_a, "src"_a);
  m.def("scale_f32", &scale, "dst"_a, "src"_a, "factor"_a);
  m.def("sum_squares", &sum_squares, "x"_a, "factor"_a);
  m.def("all_finite", &all_finite, "x"_a, "residual"_a.none() = nb::none());

  m.def("int8_encode", &int8_encode, "q"_a, "scale"_a, "x"_a, "residual"_a.none(), "block"_a);
  m.def("int8_decode", &int8_decode, "acc"_a, "q"_a, "scale"_a, "block"_a, "assign"_a = false);

  m.def("select", &select_above, "g"_a, "residual"_a.none(), "threshold"_a, "start"_a, "idx"_a, "val"_a);
  m.def("sample_abs", &sample_abs, "g"_a, "residual"_a.none(), "offset"_a, "out"_a);

  m.def("scatter_add", &scatter_add, "acc"_a, "idx"_a, "val"_a);
  m.def("scatter_add_int8", &scatter_add_int8, "acc"_a, "idx"_a, "q"_a, "scale"_a, "block"_a);
  m.def("ef_bound", &ef_bound, "n"_a, "k"_a);
  m.def("ef_encode", &encode_positions<cml_ef_encode>, "out"_a, "idx"_a, "n"_a);
  m.def("ef_decode", &decode_positions<cml_ef_decode>, "idx"_a, "n"_a, "src"_a);
  m.def("bitmap_encode", &encode_positions<cml_bitmap_encode>, "out"_a, "idx"_a, "n"_a);
  m.def("bitmap_decode", &decode_positions<cml_bitmap_decode>, "idx"_a, "n"_a, "src"_a);

  bind_quantisers(m);
  bind_sparse(m);
  bind_lowrank(m);
  bind_lazy(m);
  bind_schedule(m);
}

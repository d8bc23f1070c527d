// The glue of order, runs, draws, 4-bit values and block positions. Computes nothing.
#include "glue.h"

namespace glue {
namespace {

using namespace nb::literals;

float kth_abs(nb::handle g, nb::handle residual, int64_t rank, nb::handle scratch) {
  const Memory g_memory("g", g.ptr(), false), scratch_memory("scratch", scratch.ptr(), true);
  int64_t n = 0;
  float found = 0.0f;
  const float* from = g_memory.array<float>(Kind::f32, &n);
  const Optional kept("residual", residual, n);
  auto* words = scratch_memory.payload<uint32_t>(Kind::u32, n);
  checked("kth_abs: 1 <= rank <= n", run(4 * n, [&] { return cml_kth_abs(from, kept.data(), n, rank, words, &found); }));
  return found;
}

int64_t count_above(nb::handle x, float cut) {
  const Memory memory("x", x.ptr(), false);
  int64_t n = 0;
  const float* from = memory.array<float>(Kind::f32, &n);
  return run(n, [&] { return cml_count_above(from, n, cut); });
}

int64_t trim(nb::handle residual, int64_t n, nb::handle idx, nb::handle val, int64_t count, int64_t keep, int64_t from,
             nb::handle scratch) {
  const Memory idx_memory("idx", idx.ptr(), true), val_memory("val", val.ptr(), true), scratch_memory("scratch", scratch.ptr(), true);
  const Optional kept("residual", residual, n);
  auto* positions = idx_memory.payload<uint32_t>(Kind::u32, count);
  auto* values = val_memory.payload<float>(Kind::f32, count);
  auto* words = scratch_memory.payload<uint32_t>(Kind::u32, count);
  return checked("trim: 1 <= keep <= count <= n", run(4 * count, [&] {
    return cml_trim(kept.data(), n, positions, values, count, keep, from, words);
  }));
}

nb::tuple select_runs(nb::handle g, nb::handle residual, int64_t size, float threshold, int64_t start, nb::handle ids,
                      nb::handle scores) {
  const Memory g_memory("g", g.ptr(), false), ids_memory("ids", ids.ptr(), true), score_memory("scores", scores.ptr(), true);
  int64_t n = 0, cap = 0, room = 0, overflow = 0;
  int32_t finite = 1;
  const float* from = g_memory.array<float>(Kind::f32, &n);
  const Optional kept("residual", residual, n);
  auto* numbers = ids_memory.array<uint32_t>(Kind::u32, &cap);
  auto* sums = score_memory.array<float>(Kind::f32, &room);
  if (room < cap) cap = room;
  const int64_t count = checked("select_runs: run, threshold >= 2^-126 and 0 <= start < runs", run(4 * n, [&] {
    return cml_select_runs(from, kept.data(), n, size, threshold, start, numbers, sums, cap, &overflow, &finite);
  }));
  return nb::make_tuple(count, overflow, finite != 0);
}

void score_runs(nb::handle g, nb::handle residual, int64_t size, int64_t offset, nb::handle out) {
  const Memory g_memory("g", g.ptr(), false), out_memory("out", out.ptr(), true);
  int64_t n = 0, count = 0;
  const float* from = g_memory.array<float>(Kind::f32, &n);
  float* to = out_memory.array<float>(Kind::f32, &count);
  const Optional kept("residual", residual, n);
  checked("score_runs: run, offset >= 0", run(64 * count, [&] {
    return cml_score_runs(from, kept.data(), n, size, offset, count, to);
  }));
}

int64_t gather_runs(nb::handle src, int64_t size, nb::handle ids, nb::handle val) {
  const Memory src_memory("src", src.ptr(), false), ids_memory("ids", ids.ptr(), false), val_memory("val", val.ptr(), true);
  int64_t n = 0, count = 0, cap = 0;
  const float* from = src_memory.array<float>(Kind::f32, &n);
  const auto* numbers = ids_memory.array<uint32_t>(Kind::u32, &count);
  float* to = val_memory.array<float>(Kind::f32, &cap);
  return checked("gather_runs", run(4 * cap, [&] { return cml_gather_runs(from, n, size, numbers, count, to, cap); }));
}

int64_t scatter_runs(nb::handle acc, int64_t size, nb::handle ids, nb::handle val, bool assign) {
  const Memory acc_memory("acc", acc.ptr(), true), ids_memory("ids", ids.ptr(), false), val_memory("val", val.ptr(), false);
  int64_t n = 0, count = 0, k = 0;
  float* to = acc_memory.array<float>(Kind::f32, &n);
  const auto* numbers = ids_memory.array<uint32_t>(Kind::u32, &count);
  const float* values = val_memory.array<float>(Kind::f32, &k);
  return checked("scatter_runs", run(4 * k, [&] {
    return cml_scatter_runs(to, n, size, numbers, count, values, k, assign ? 1 : 0);
  }));
}

int64_t draw_strata(nb::handle idx, int64_t n, uint32_t seed) {
  const Memory memory("idx", idx.ptr(), true);
  int64_t k = 0;
  auto* positions = memory.array<uint32_t>(Kind::u32, &k);
  return checked("draw_strata: k <= n < 2^32", run(16 * k, [&] { return cml_draw_strata(positions, k, n, seed); }));
}

int64_t take(nb::handle src, nb::handle idx, nb::handle val) {
  const Memory src_memory("src", src.ptr(), false), idx_memory("idx", idx.ptr(), false), val_memory("val", val.ptr(), true);
  int64_t n = 0, k = 0;
  const float* from = src_memory.array<float>(Kind::f32, &n);
  const auto* positions = idx_memory.array<uint32_t>(Kind::u32, &k);
  float* to = val_memory.payload<float>(Kind::f32, k);
  return checked("take", run(4 * k, [&] { return cml_take(from, n, positions, to, k); }));
}

bool nibbles_encode(nb::handle q, nb::handle scale, nb::handle x, nb::handle rest, int64_t block) {
  require_block(block);
  const Memory q_memory("q", q.ptr(), true), scale_memory("scale", scale.ptr(), true), x_memory("x", x.ptr(), false);
  int64_t n = 0;
  const float* from = x_memory.array<float>(Kind::f32, &n);
  const Optional left("rest", rest, n);
  auto* nibbles = q_memory.bytes<uint8_t>((n + 1) / 2);
  auto* scales = scale_memory.payload<float>(Kind::f32, blocks(n, block));
  return checked("nibbles_encode: block is even", run(4 * n, [&] {
    return cml_nibbles_encode(nibbles, scales, from, left.data(), n, block);
  })) != 0;
}

void nibbles_decode(nb::handle out, nb::handle q, nb::handle scale, int64_t block) {
  require_block(block);
  const Memory out_memory("out", out.ptr(), true), q_memory("q", q.ptr(), false), scale_memory("scale", scale.ptr(), false);
  int64_t n = 0;
  float* to = out_memory.array<float>(Kind::f32, &n);
  const auto* nibbles = q_memory.bytes<uint8_t>((n + 1) / 2);
  const auto* scales = scale_memory.payload<float>(Kind::f32, blocks(n, block));
  checked("nibbles_decode: block is even", run(4 * n, [&] { return cml_nibbles_decode(to, nibbles, scales, n, block); }));
}

int64_t blocks_nbytes(nb::handle idx, int64_t n) {
  const Memory memory("idx", idx.ptr(), false);
  int64_t k = 0;
  const auto* positions = memory.array<uint32_t>(Kind::u32, &k);
  return checked("blocks_nbytes: k <= n < 2^32", run(k, [&] { return cml_blocks_nbytes(positions, k, n); }));
}

}  // namespace

void bind_sparse(nb::module_& m) {
  m.def("kth_abs", &kth_abs, "g"_a, "residual"_a.none(), "rank"_a, "scratch"_a);
  m.def("count_above", &count_above, "x"_a, "cut"_a);
  m.def("trim", &trim, "residual"_a.none(), "n"_a, "idx"_a, "val"_a, "count"_a, "keep"_a, "start"_a, "scratch"_a);
  m.def("select_runs", &select_runs, "g"_a, "residual"_a.none(), "run"_a, "threshold"_a, "start"_a, "ids"_a, "scores"_a);
  m.def("score_runs", &score_runs, "g"_a, "residual"_a.none(), "run"_a, "offset"_a, "out"_a);
  m.def("gather_runs", &gather_runs, "src"_a, "run"_a, "ids"_a, "val"_a);
  m.def("scatter_runs", &scatter_runs, "acc"_a, "run"_a, "ids"_a, "val"_a, "assign"_a = false);
  m.def("draw_word", [](uint64_t key, uint64_t step) { return cml_draw_word(key, step); }, "key"_a, "step"_a);
  m.def("draw_strata", &draw_strata, "idx"_a, "n"_a, "seed"_a);
  m.def("take", &take, "src"_a, "idx"_a, "val"_a);
  m.def("nibbles_encode", &nibbles_encode, "q"_a, "scale"_a, "x"_a, "rest"_a.none(), "block"_a);
  m.def("nibbles_decode", &nibbles_decode, "out"_a, "q"_a, "scale"_a, "block"_a);
  m.def("blocks_nbytes", &blocks_nbytes, "idx"_a, "n"_a);
  m.def("blocks_encode", &encode_positions<cml_blocks_encode>, "out"_a, "idx"_a, "n"_a);
  m.def("blocks_decode", &decode_positions<cml_blocks_decode>, "idx"_a, "n"_a, "src"_a);
}

}  // namespace glue

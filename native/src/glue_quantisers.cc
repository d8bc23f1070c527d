// The glue of random words, int4 and dithering, one bit. Computes nothing.
#include "glue.h"

namespace glue {
namespace {

// The arguments that all encoders share, borrowed and measured.
struct Encode {
  Encode(nb::handle q, nb::handle scale, nb::handle x, nb::handle residual)
      : q_memory("q", q.ptr(), true), scale_memory("scale", scale.ptr(), true), x_memory("x", x.ptr(), false),
        from(x_memory.array<float>(Kind::f32, &n)), kept("residual", residual, n) {}

  // code(part, its residual or NULL) and give_back(part, its residual) over parts of whole blocks.
  template <class F, class G>
  int64_t parts(int64_t block, F code, G give_back) const {
    return Parts(n, block).encode([&](Part p) { return code(p, kept.at(p.lo)); },
                                  [&](Part p) {
                                    if (kept.data()) give_back(p, kept.at(p.lo));
                                  });
  }

  Memory q_memory, scale_memory, x_memory;
  int64_t n = 0;
  const float* from;
  Optional kept;
};

struct Decode {
  Decode(nb::handle acc, nb::handle q, nb::handle scale)
      : acc_memory("acc", acc.ptr(), true), q_memory("q", q.ptr(), false), scale_memory("scale", scale.ptr(), false),
        to(acc_memory.array<float>(Kind::f32, &n)) {}

  Memory acc_memory, q_memory, scale_memory;
  int64_t n = 0;
  float* to;
};

int64_t stream_nbytes(int64_t n, int bits) {
  if (bits < 1 || bits > 8) fail(PyExc_ValueError, "bits: got %d, need 1 to 8", bits);
  return n / 8 * bits + (n % 8 * bits + 7) / 8;
}

void philox(nb::handle words, int64_t first, uint64_t key, uint64_t step) {
  const Memory memory("words", words.ptr(), true);
  int64_t n = 0;
  auto* to = memory.array<uint32_t>(Kind::u32, &n);
  if (first < 0) fail(PyExc_ValueError, "first: got %lld, must not be negative", static_cast<long long>(first));
  run(4 * n, [&] { cml_philox(to, n, first, key, step); });
}

bool linear_encode(nb::handle q, nb::handle scale, nb::handle x, nb::handle residual, int64_t block, int bits, bool euclidean,
                   bool dither, uint64_t key, uint64_t step) {
  require_block(block);
  const Encode e(q, scale, x, residual);
  auto* codes = e.q_memory.bytes<uint8_t>(stream_nbytes(e.n, bits));
  auto* scales = e.scale_memory.payload<uint16_t>(Kind::bf16, blocks(e.n, block));
  return checked("linear_encode", run(4 * e.n, [&] {
    return e.parts(block, [&](Part p, float* kept) {
      return cml_linear_encode(codes + stream_nbytes(p.lo, bits), scales + p.lo / block, e.from + p.lo, kept, p.n, block, bits, euclidean,
                               dither, key, step, p.lo);
    }, [&](Part p, float* kept) {
      cml_linear_decode(kept, codes + stream_nbytes(p.lo, bits), scales + p.lo / block, p.n, block, bits, 0);
    });
  })) != 0;
}

void linear_decode(nb::handle acc, nb::handle q, nb::handle scale, int64_t block, int bits, bool assign) {
  require_block(block);
  const Decode d(acc, q, scale);
  const auto* codes = d.q_memory.bytes<uint8_t>(stream_nbytes(d.n, bits));
  const auto* scales = d.scale_memory.payload<uint16_t>(Kind::bf16, blocks(d.n, block));
  checked("linear_decode", run(4 * d.n, [&] {
    return Parts(d.n, block).least([&](Part p) {
      return cml_linear_decode(d.to + p.lo, codes + stream_nbytes(p.lo, bits), scales + p.lo / block, p.n, block, bits, assign);
    });
  }));
}

bool onebit_encode(nb::handle q, nb::handle scale, nb::handle x, nb::handle residual, int64_t block) {
  require_block(block);
  const Encode e(q, scale, x, residual);
  auto* codes = e.q_memory.bytes<uint8_t>(stream_nbytes(e.n, 1));
  auto* scales = e.scale_memory.payload<uint16_t>(Kind::bf16, blocks(e.n, block));
  return checked("onebit_encode", run(4 * e.n, [&] {
    return e.parts(block, [&](Part p, float* kept) {
      return cml_onebit_encode(codes + p.lo / 8, scales + p.lo / block, e.from + p.lo, kept, p.n, block);
    }, [&](Part p, float* kept) { cml_onebit_decode(kept, codes + p.lo / 8, scales + p.lo / block, p.n, block, 0); });
  })) != 0;
}

void onebit_decode(nb::handle acc, nb::handle q, nb::handle scale, int64_t block, bool assign) {
  require_block(block);
  const Decode d(acc, q, scale);
  const auto* codes = d.q_memory.bytes<uint8_t>(stream_nbytes(d.n, 1));
  const auto* scales = d.scale_memory.payload<uint16_t>(Kind::bf16, blocks(d.n, block));
  checked("onebit_decode", run(4 * d.n, [&] {
    return Parts(d.n, block).least([&](Part p) {
      return cml_onebit_decode(d.to + p.lo, codes + p.lo / 8, scales + p.lo / block, p.n, block, assign);
    });
  }));
}

}  // namespace

void bind_quantisers(nb::module_& m) {
  using namespace nb::literals;
  m.def("philox", &philox, "words"_a, "first"_a, "key"_a, "step"_a);
  m.def("linear_encode", &linear_encode, "q"_a, "scale"_a, "x"_a, "residual"_a.none(), "block"_a, "bits"_a, "euclidean"_a,
        "dither"_a, "key"_a = 0, "step"_a = 0);
  m.def("linear_decode", &linear_decode, "acc"_a, "q"_a, "scale"_a, "block"_a, "bits"_a, "assign"_a = false);
  m.def("onebit_encode", &onebit_encode, "q"_a, "scale"_a, "x"_a, "residual"_a.none(), "block"_a);
  m.def("onebit_decode", &onebit_decode, "acc"_a, "q"_a, "scale"_a, "block"_a, "assign"_a = false);
}

}  // namespace glue

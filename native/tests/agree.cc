// Prints a digest of all that each kernel gives, once for each of the bodies that this CPU can run, over sizes, kinds of
// numbers and alignments. Equal lines mean equal bytes, between bodies and between CPUs. Judges nothing itself.
#include "commlayer.h"
#include "kit.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <string>

namespace {

using namespace kit;

std::map<std::string, uint64_t> digests;

void mix(const char* kernel, uint64_t word) {
  uint64_t& h = digests.emplace(kernel, 0xcbf29ce484222325u).first->second;
  h = (h ^ word) * 0x100000001b3u;
  h ^= h >> 29;
}

template <class T>
void mix(const char* kernel, const Array<T>& array, int64_t n) {
  for (int64_t i = 0; i < n; ++i) mix(kernel, static_cast<uint64_t>(array.get(i)));
}

// By bits; which NaN a NaN becomes is open.
void mix(const char* kernel, const Array<float>& array, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float f = array.get(i);
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof bits);
    mix(kernel, std::isnan(f) ? 0x7fc00000u : bits);
  }
}

void mix_half(const char* kernel, const Array<uint16_t>& array, int64_t n, uint16_t infinity) {
  for (int64_t i = 0; i < n; ++i) mix(kernel, (array.get(i) & 0x7fff) > infinity ? 0x7fffu : array.get(i));
}

enum Kind { kPlain, kSpecial, kWild, kTiny, kKinds };

Array<float> numbers(int64_t n, int shift, Kind kind) {
  constexpr float big = std::numeric_limits<float>::max(), infinity = std::numeric_limits<float>::infinity();
  const float pool[] = {0.0f, -0.0f, 1.0f, -1.0f, 1e-45f, -1e-38f, 1.2e-38f, 6e-8f, 2.98e-8f, 6.1e-5f, 65504.0f, 65519.9f, 65520.0f,
                        big, -big, 3.3895314e38f, 0.5f, 1.5f, -2.5f, 127.5f, infinity, -infinity, std::nanf("")};
  constexpr uint32_t all = sizeof pool / sizeof pool[0], finite = all - 3;
  auto x = floats(n, shift);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t roll = draw() % 64;
    if (kind == kTiny) x.set(i, x.get(i) * 1e-36f);
    if ((kind == kSpecial && roll < 20) || (kind == kWild && roll < 2)) x.set(i, pool[draw() % (kind == kWild ? all : finite)]);
  }
  return x;
}

void dense(int64_t n, int shift, Kind kind) {
  auto from = numbers(n, shift, kind), acc = numbers(n, shift, kind), back = floats(n, shift);
  Array<uint16_t> half(n, shift), bfloat(n, shift);
  mix("f32_to_f16", static_cast<uint64_t>(cml_f32_to_f16(half.data(), from.data(), n)));
  mix_half("f32_to_f16", half, n, 0x7c00);
  mix("f32_to_bf16", static_cast<uint64_t>(cml_f32_to_bf16(bfloat.data(), from.data(), n)));
  mix_half("f32_to_bf16", bfloat, n, 0x7f80);
  cml_add_f32(acc.data(), from.data(), n);
  mix("add_f32", acc, n);
  cml_add_f16(acc.data(), half.data(), n);
  mix("add_f16", acc, n);
  cml_add_bf16(acc.data(), bfloat.data(), n);
  mix("add_bf16", acc, n);
  cml_f16_to_f32(back.data(), half.data(), n);
  mix("f16_to_f32", back, n);
  cml_bf16_to_f32(back.data(), bfloat.data(), n);
  mix("bf16_to_f32", back, n);
  mix("scale_f32", static_cast<uint64_t>(cml_scale_f32(back.data(), from.data(), 0.3f, n)));
  mix("scale_f32", back, n);
  mix("all_finite", static_cast<uint64_t>(cml_all_finite(from.data(), nullptr, n) + 2 * cml_all_finite(from.data(), acc.data(), n)));
  mix("sum_squares", static_cast<uint64_t>(cml_sum_squares(from.data(), 8.0f, n)));
  mix("crc32c", cml_crc32c(7, from.data(), from.bytes()));
}

template <class Code, class Scale, class Encode, class Decode>
void blockwise(const char* kernel, int64_t n, int shift, Kind kind, int64_t block, int64_t nbytes, Encode encode, Decode decode) {
  auto x = numbers(n, shift, kind), residual = floats(n, shift), acc = floats(n, shift);
  const int64_t blocks = (n + block - 1) / block;
  for (float* kept : {residual.data(), static_cast<float*>(nullptr)}) {
    Array<Code> q(nbytes, shift);
    Array<Scale> scale(blocks, shift);
    const int64_t finite = encode(q.data(), scale.data(), x.data(), kept);
    mix(kernel, static_cast<uint64_t>(finite));
    mix(kernel, residual, n);
    if (finite != 1) continue;
    mix(kernel, q, nbytes);
    if constexpr (sizeof(Scale) == 4)
      mix(kernel, scale, blocks);
    else
      mix<Scale>(kernel, scale, blocks);
    for (int assign : {0, 1}) {
      decode(acc.data(), q.data(), scale.data(), assign);
      mix((std::string(kernel) + " decode").c_str(), acc, n);
    }
  }
}

void quantisers(int64_t n, int shift, Kind kind) {
  for (int64_t block : {int64_t{33}, int64_t{256}})
    blockwise<int8_t, float>(
        "int8", n, shift, kind, block, n,
        [&](int8_t* q, float* s, const float* x, float* r) { return cml_int8_encode(q, s, x, r, n, block); },
        [&](float* a, const int8_t* q, const float* s, int assign) { cml_int8_decode(a, q, s, n, block, assign); });
  for (int64_t block : {int64_t{32}, int64_t{264}}) {
    for (int bits : {2, 3, 4, 5, 8}) {
      for (int way : {0, 1, 2})  // to the nearest, dithered, dithered by norms
        blockwise<uint8_t, uint16_t>(
            way ? "qsgd" : "linear", n, shift, kind, block, (n * bits + 7) / 8,
            [&](uint8_t* q, uint16_t* s, const float* x, float* r) {
              return cml_linear_encode(q, s, x, r, n, block, bits, way == 2, way > 0, 1ull << 40 | 7, 1ull << 35 | 9, 0);
            },
            [&](float* a, const uint8_t* q, const uint16_t* s, int assign) { cml_linear_decode(a, q, s, n, block, bits, assign); });
    }
    blockwise<uint8_t, uint16_t>(
        "onebit", n, shift, kind, block, (n + 7) / 8,
        [&](uint8_t* q, uint16_t* s, const float* x, float* r) { return cml_onebit_encode(q, s, x, r, n, block); },
        [&](float* a, const uint8_t* q, const uint16_t* s, int assign) { cml_onebit_decode(a, q, s, n, block, assign); });
  }
  blockwise<uint8_t, float>(
      "nibbles", n, shift, kind, 256, (n + 1) / 2,
      [&](uint8_t* q, float* s, const float* x, float*) { return cml_nibbles_encode(q, s, x, nullptr, n, 256); },
      [&](float* a, const uint8_t* q, const float* s, int) { cml_nibbles_decode(a, q, s, n, 256); });
  Array<uint32_t> words(n, shift);
  for (int64_t first : {0, 1, 4}) {
    cml_philox(words.data(), n, (int64_t{1} << 34) - 32 + first, 1ull << 40 | 7, 1ull << 35 | 9);
    mix("philox", words, n);
  }
}

void low_rank(int64_t n, int shift) {
  if (n == 0) return;
  auto p = floats(7 * 3, shift), q = floats(n * 3, shift), out = floats(7 * n, shift);
  cml_outer(out.data(), p.data(), q.data(), 7, n, 3);
  mix("outer", out, 7 * n);
}

void selections(int64_t n, int shift, Kind kind) {
  if (n == 0) return;
  int64_t overflow = 0;
  int32_t finite = 0;
  for (int64_t cap : {n / 7, n}) {
    for (int64_t from : {int64_t{0}, n / 3}) {
      auto g = numbers(n, shift, kind), residual = floats(n, shift), val = floats(cap, shift);
      Array<uint32_t> idx(cap, shift);
      for (float* kept : {residual.data(), static_cast<float*>(nullptr)}) {
        const int64_t count = cml_select(g.data(), kept, n, 0.6f, from, idx.data(), val.data(), cap, &overflow, &finite);
        mix("select", static_cast<uint64_t>(count << 32 | overflow << 1 | finite));
        mix("select", idx, count);
        mix("select", val, count);
        mix("select", residual, n);
        mix("scatter_add", static_cast<uint64_t>(cml_scatter_add(residual.data(), n, idx.data(), val.data(), count)));
        mix("scatter_add", residual, n);
      }
      for (int64_t run : {8, 16, 32, 64}) {
        const int64_t all = (n + run - 1) / run;
        const int64_t count = cml_select_runs(g.data(), residual.data(), n, run, 0.3f * static_cast<float>(run), all / 3, idx.data(),
                                              val.data(), all < cap ? all : cap, &overflow, &finite);
        mix("select_runs", static_cast<uint64_t>(count << 32 | overflow << 1 | finite));
        mix("select_runs", idx, count);
        mix("select_runs", val, count);
        mix("select_runs", residual, n);
        auto runs = floats(n, shift);
        const int64_t k = cml_gather_runs(g.data(), n, run, idx.data(), count, runs.data(), n);
        mix("gather_runs", runs, k);
        for (int assign : {0, 1}) cml_scatter_runs(residual.data(), n, run, idx.data(), count, runs.data(), k, assign);
        mix("scatter_runs", residual, n);
        auto scores = floats(all, shift);
        cml_score_runs(g.data(), residual.data(), n, run, 3, all, scores.data());
        mix("score_runs", scores, all);
      }
      Array<uint32_t> scratch(n, shift);
      auto found = floats(1, shift), sample = floats(40, shift);
      for (int64_t rank : {int64_t{1}, (n + 49) / 50, n}) {
        cml_kth_abs(g.data(), residual.data(), n, rank, scratch.data(), found.data());
        mix("kth_abs", found, 1);
        mix("count_above", static_cast<uint64_t>(cml_count_above(g.data(), n, found.get(0))));
      }
      cml_sample_abs(g.data(), residual.data(), n, 5, 40, sample.data());
      mix("sample_abs", sample, 40);
    }
  }
}

template <class Encode, class Decode>
void coded(const char* kernel, int64_t n, Array<uint32_t>& idx, int64_t k, int shift, int64_t nbytes, Encode encode, Decode decode) {
  Array<uint8_t> bytes(nbytes, shift);
  Array<uint32_t> back(k, shift);
  encode(bytes.data(), nbytes, idx.data(), k, n);
  mix(kernel, bytes, nbytes);
  mix(kernel, static_cast<uint64_t>(decode(back.data(), k, n, bytes.data(), nbytes)));
  mix(kernel, back, k);
}

void sparse(int64_t n, int shift) {
  for (int64_t k : {int64_t{1}, n / 10, n}) {
    if (k < 1 || k > n) continue;
    const auto list = positions(n, k);
    Array<uint32_t> idx(k, shift);
    for (int64_t j = 0; j < k; ++j) idx.set(j, list[static_cast<size_t>(j)]);
    coded("ef", n, idx, k, shift, cml_ef_bound(n, k), cml_ef_encode, cml_ef_decode);
    coded("bitmap", n, idx, k, shift, (n + 7) / 8, cml_bitmap_encode, cml_bitmap_decode);
    coded("blocks", n, idx, k, shift, cml_blocks_nbytes(idx.data(), k, n), cml_blocks_encode, cml_blocks_decode);
    auto acc = floats(n, shift), val = floats(k, shift), scale = floats((k + 6) / 7, shift);
    Array<int8_t> q(k, shift);
    for (int64_t j = 0; j < k; ++j) q.set(j, static_cast<int8_t>(draw()));
    cml_scatter_add_int8(acc.data(), n, idx.data(), q.data(), scale.data(), k, 7);
    mix("scatter_add_int8", acc, n);
    cml_take(acc.data(), n, idx.data(), val.data(), k);
    mix("take", val, k);
    Array<uint32_t> scratch(k, shift);
    const int64_t kept = cml_trim(acc.data(), n, idx.data(), val.data(), k, (k + 1) / 2, n / 3, scratch.data());
    mix("trim", idx, kept);
    mix("trim", acc, n);
    if (k > 1) {
      idx.set(0, idx.get(k - 1));
      mix("scatter_add", static_cast<uint64_t>(cml_scatter_add(acc.data(), n, idx.data(), val.data(), k)));
    }
    cml_draw_strata(idx.data(), k, n, cml_draw_word(5, static_cast<uint64_t>(k)));
    mix("draw_strata", idx, k);
  }
}

void lazy(int64_t n, int shift, Kind kind) {
  const int64_t k = n / 2;
  const auto list = positions(n, k);
  Array<uint32_t> idx(k, shift);
  for (int64_t j = 0; j < k; ++j) idx.set(j, list[static_cast<size_t>(j)]);
  const int64_t groups = (n + CML_LAZY_GROUP - 1) / CML_LAZY_GROUP;
  Array<uint8_t> stamp(groups, shift);
  for (int64_t i = 0; i < groups; ++i) stamp.set(i, static_cast<uint8_t>(draw()));
  auto w = floats(n, shift), m = floats(n, shift), v = floats(n, shift), g = numbers(k, shift, kind);
  for (int64_t i = 0; i < n; ++i) v.set(i, v.get(i) * v.get(i));
  auto four = floats(4 * CML_LAZY_ROWS, shift), eight = floats(8 * CML_LAZY_ROWS, shift), step = floats(7, shift);
  for (int64_t i = 0; i < 8 * CML_LAZY_ROWS; ++i) eight.set(i, std::fabs(eight.get(i)));
  cml_sgd_sparse(w.data(), v.data(), stamp.data(), n, 9, four.data(), idx.data(), g.data(), k, 0.1f, 0.9f, 1.0f, 0.01f, 1);
  mix("sgd_sparse", w, n);
  cml_sgd_catch_up(w.data(), v.data(), stamp.data(), n, 90, four.data());
  mix("sgd_catch_up", w, n);
  for (int64_t i = 0; i < n; ++i) v.set(i, std::fabs(v.get(i)));
  cml_adam_sparse(w.data(), m.data(), v.data(), stamp.data(), n, 95, eight.data(), idx.data(), g.data(), k, step.data());
  mix("adam_sparse", w, n);
  cml_adam_catch_up(w.data(), m.data(), v.data(), stamp.data(), n, 99, eight.data());
  mix("adam_catch_up", w, n);
  mix("adam_catch_up", v, n);
}

}  // namespace

int main() {
  std::string before;
  for (int forced : {0, 2, 1}) {
    cml_force_portable(forced);
    if (cml_isa() == before) continue;  // there is no AVX-512 to do without
    before = cml_isa();
    digests.clear();
    seed = 88172645463325252ull;
    for (int64_t n : {0, 1, 8, 31, 33, 64, 65, 161, 257, 2119}) {
      for (int kind = 0; kind < kKinds; ++kind) {
        const int shift = kind;  // bytes off every alignment
        dense(n, shift, static_cast<Kind>(kind));
        quantisers(n, shift, static_cast<Kind>(kind));
        selections(n, shift, static_cast<Kind>(kind));
        low_rank(n, shift);
        sparse(n, shift);
        lazy(n, shift, static_cast<Kind>(kind));
      }
    }
    auto large = floats(10007, 1);  // for the widest lanes of checksums
    mix("crc32c", cml_crc32c(7, large.data(), large.bytes()));
    for (const auto& [kernel, digest] : digests)
      std::printf("%s: %s %016llx\n", cml_isa(), kernel.c_str(), static_cast<unsigned long long>(digest));
  }
  return 0;
}

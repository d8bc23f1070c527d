// Drives every function of commlayer.h under sanitizers: memory of exactly the stated size, any alignment, damaged bytes.
// Values are the property tests' affair (tests/unit/test_native.py); here a wrong access must show.
#include "commlayer.h"
#include "kit.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

namespace {

using namespace kit;

int failures = 0;

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::printf("%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);     \
      ++failures;                                                                   \
    }                                                                               \
  } while (0)

void checksums(int64_t n, int shift) {
  Array<uint8_t> data(n, shift);
  const uint32_t whole = cml_crc32c(0, data.data(), data.bytes());
  const size_t half = data.bytes() / 2;
  CHECK(cml_crc32c(cml_crc32c(0, data.data(), half), data.data() + half, data.bytes() - half) == whole);
  CHECK(cml_crc32c(0, "123456789", 9) == 0xe3069283u);
}

void sums_and_casts(int64_t n, int shift) {
  auto x = floats(n, shift), acc = floats(n, 0), back = floats(n, shift);
  Array<uint16_t> half(n, shift), bfloat(n, shift);
  CHECK(cml_f32_to_f16(half.data(), x.data(), n) == 1);
  CHECK(cml_f32_to_bf16(bfloat.data(), x.data(), n) == 1);
  cml_add_f32(acc.data(), x.data(), n);
  cml_add_f16(acc.data(), half.data(), n);
  cml_add_bf16(acc.data(), bfloat.data(), n);
  cml_f16_to_f32(back.data(), half.data(), n);
  cml_bf16_to_f32(back.data(), bfloat.data(), n);
  for (int64_t i = 0; i < n; ++i) CHECK(std::fabs(back.get(i) - x.get(i)) <= std::fabs(x.get(i)) / 128);
  CHECK(cml_all_finite(x.data(), nullptr, n) == 1 && cml_all_finite(back.data(), x.data(), n) == 1);
  int64_t squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += std::llrint(8.0 * x.get(i)) * std::llrint(8.0 * x.get(i));
  CHECK(cml_sum_squares(x.data(), 8.0f, n) == squares);
  if (n == 0) return;
  x.set(n - 1, std::numeric_limits<float>::quiet_NaN());
  CHECK(cml_all_finite(x.data(), nullptr, n) == 0 && cml_all_finite(back.data(), x.data(), n) == 0);
  CHECK(cml_f32_to_f16(half.data(), x.data(), n) == 0);
  CHECK(cml_f32_to_bf16(bfloat.data(), x.data(), n) == 0);
}

void int8(int64_t n, int shift) {
  for (int64_t block : {int64_t{1}, int64_t{33}, int64_t{256}}) {
    const int64_t blocks = (n + block - 1) / block;
    auto x = floats(n, shift), residual = floats(n, shift), acc = floats(n, shift);
    Array<int8_t> q(n, shift);
    Array<float> scale(blocks, shift);
    CHECK(cml_int8_encode(q.data(), scale.data(), x.data(), residual.data(), n, block) == 1);
    CHECK(cml_int8_encode(q.data(), scale.data(), x.data(), nullptr, n, block) == 1);
    cml_int8_decode(acc.data(), q.data(), scale.data(), n, block, 0);
    cml_int8_decode(acc.data(), q.data(), scale.data(), n, block, 1);
    for (int64_t i = 0; i < n; ++i) CHECK(std::fabs(acc.get(i) - x.get(i)) <= scale.get(i / block) * 0.5001f);
    if (n == 0) continue;
    x.set(n / 2, std::numeric_limits<float>::infinity());
    CHECK(cml_int8_encode(q.data(), scale.data(), x.data(), residual.data(), n, block) == 0);
  }
  CHECK(cml_int8_encode(nullptr, nullptr, nullptr, nullptr, 0, 0) == CML_ERR_ARGUMENT);
}

// Encodes with and without residual, decodes, and checks that nothing is further off than `most(block maximum)` allows.
template <class Scale, class Encode, class Decode>
void quantiser(int64_t n, int shift, int64_t block, int64_t nbytes, float most, Encode encode, Decode decode) {
  const int64_t blocks = (n + block - 1) / block;
  auto x = floats(n, shift), residual = floats(n, shift), acc = floats(n, shift), kept = floats(n, 0);
  for (int64_t i = 0; i < n; ++i) kept.set(i, residual.get(i));
  Array<uint8_t> q(nbytes, shift);
  Array<Scale> scale(blocks, shift);
  CHECK(encode(q.data(), scale.data(), x.data(), residual.data()) == 1);
  CHECK(encode(q.data(), scale.data(), x.data(), nullptr) == 1);
  CHECK(decode(acc.data(), q.data(), scale.data(), 0) == CML_OK);
  CHECK(decode(acc.data(), q.data(), scale.data(), 1) == CML_OK);
  for (int64_t i = 0; i < n; ++i) CHECK(std::fabs(acc.get(i) - x.get(i)) <= most);
  if (n == 0) return;
  x.set(n - 1, std::numeric_limits<float>::quiet_NaN());
  for (int64_t i = 0; i < n; ++i) residual.set(i, kept.get(i));
  CHECK(encode(q.data(), scale.data(), x.data(), residual.data()) == 0);
  for (int64_t i = 0; i + 1 < n; ++i) CHECK(std::fabs(residual.get(i) - (x.get(i) + kept.get(i))) < 1e-5f);
  CHECK(residual.get(n - 1) == kept.get(n - 1));
}

void quantisers(int64_t n, int shift) {
  for (int64_t block : {int64_t{8}, int64_t{32}, int64_t{264}}) {
    for (int bits : {2, 3, 4, 5, 8}) {
      const int64_t nbytes = (n * bits + 7) / 8;
      for (int dither : {0, 1}) {
        const float most = 1.02f / static_cast<float>((1 << (bits - 1)) - 1) / (dither ? 1.0f : 2.0f);
        quantiser<uint16_t>(
            n, shift, block, nbytes, most,
            [&](uint8_t* q, uint16_t* s, const float* x, float* r) { return cml_linear_encode(q, s, x, r, n, block, bits, 0, dither, 7, 9, 0); },
            [&](float* a, const uint8_t* q, const uint16_t* s, int assign) { return cml_linear_decode(a, q, s, n, block, bits, assign); });
      }
    }
    quantiser<uint16_t>(
        n, shift, block, (n + 7) / 8, 1.02f,
        [&](uint8_t* q, uint16_t* s, const float* x, float* r) { return cml_onebit_encode(q, s, x, r, n, block); },
        [&](float* a, const uint8_t* q, const uint16_t* s, int assign) { return cml_onebit_decode(a, q, s, n, block, assign); });
  }
  Array<uint32_t> words(n, shift);
  for (int64_t first : {0, 1, 4}) cml_philox(words.data(), n, first, 7, 9);
  CHECK(cml_linear_encode(nullptr, nullptr, nullptr, nullptr, 0, 12, 4, 0, 0, 0, 0, 0) == CML_ERR_ARGUMENT);
  CHECK(cml_linear_decode(nullptr, nullptr, nullptr, 0, 8, 6, 0) == CML_ERR_ARGUMENT);
  CHECK(cml_onebit_encode(nullptr, nullptr, nullptr, nullptr, 0, 1 << 21) == CML_ERR_ARGUMENT);
  CHECK(cml_onebit_decode(nullptr, nullptr, nullptr, 0, 4, 0) == CML_ERR_ARGUMENT);
}

void select(int64_t n, int shift) {
  const auto g = floats(n, shift);
  for (int64_t cap : {int64_t{0}, int64_t{1}, n / 7, n}) {
    for (int64_t from : {int64_t{0}, n / 3, n - 1}) {
      if (from < 0 || (n > 0 && from >= n) || (n == 0 && from != 0)) continue;
      auto input = floats(n, shift), residual = floats(n, shift);
      if (n > 40) input.set(40, std::numeric_limits<float>::quiet_NaN());
      Array<uint32_t> idx(cap, shift);
      Array<float> val(cap, shift);
      int64_t overflow = -1;
      int32_t finite = -1;
      int64_t count = cml_select(input.data(), residual.data(), n, 0.4f, from, idx.data(), val.data(), cap, &overflow, &finite);
      CHECK(count >= 0 && count <= cap && overflow >= 0 && (overflow == 0 || count == cap));
      CHECK(finite == (n > 40 ? 0 : 1));
      for (int64_t j = 0; j + 1 < count; ++j) CHECK(idx.get(j) < idx.get(j + 1));
      count = cml_select(input.data(), nullptr, n, 0.4f, from, idx.data(), val.data(), cap, &overflow, &finite);
      for (int64_t j = 0; j < count; ++j) CHECK(val.get(j) == input.get(idx.get(j)));
    }
  }
  Array<float> samples(100, shift);
  auto input = floats(n, shift);
  cml_sample_abs(input.data(), nullptr, n, 12345, 100, samples.data());
  for (int64_t j = 0; j < 100; ++j) CHECK(samples.get(j) >= 0.0f);
  int64_t overflow;
  int32_t finite;
  for (float bad : {0.0f, -1.0f, 0x1p-127f, std::numeric_limits<float>::quiet_NaN()})
    CHECK(cml_select(nullptr, nullptr, 0, bad, 0, nullptr, nullptr, 0, &overflow, &finite) == CML_ERR_ARGUMENT);
  CHECK(cml_select(nullptr, nullptr, 0, 1.0f, 1, nullptr, nullptr, 0, &overflow, &finite) == CML_ERR_ARGUMENT);
  CHECK(cml_select(nullptr, nullptr, 1, 1.0f, 0, nullptr, nullptr, -1, &overflow, &finite) == CML_ERR_ARGUMENT);
}

void sparse(int64_t n, int shift) {
  for (int64_t k : {int64_t{0}, int64_t{1}, n / 10, n}) {
    if (k > n) continue;
    const auto list = positions(n, k);
    Array<uint32_t> idx(k, shift);
    Array<int8_t> q(k, shift);
    for (int64_t j = 0; j < k; ++j) idx.set(j, list[static_cast<size_t>(j)]);
    auto acc = floats(n, shift), val = floats(k, shift), scale = floats((k + 6) / 7, shift);
    CHECK(cml_scatter_add(acc.data(), n, idx.data(), val.data(), k) == k);
    CHECK(cml_scatter_add_int8(acc.data(), n, idx.data(), q.data(), scale.data(), k, 7) == k);
    if (k == 0) continue;
    idx.set(k - 1, static_cast<uint32_t>(n));
    CHECK(cml_scatter_add(acc.data(), n, idx.data(), val.data(), k) == CML_ERR_CORRUPT);
    idx.set(k - 1, 0xffffffffu);
    CHECK(cml_scatter_add_int8(acc.data(), n, idx.data(), q.data(), scale.data(), k, 7) == CML_ERR_CORRUPT);
    CHECK(cml_scatter_add_int8(acc.data(), n, idx.data(), q.data(), scale.data(), k, 0) == CML_ERR_ARGUMENT);
  }
}

template <class Encode, class Decode>
void packed(int64_t n, int64_t k, int64_t nbytes, int shift, Encode encode, Decode decode) {
  const auto list = positions(n, k);
  Array<uint32_t> idx(k, shift), back(k, shift), untouched(k, shift);
  for (int64_t j = 0; j < k; ++j) idx.set(j, list[static_cast<size_t>(j)]);
  if (nbytes < 0) nbytes = cml_blocks_nbytes(idx.data(), k, n);
  Array<uint8_t> bytes(nbytes, shift);
  if (nbytes > 0) CHECK(encode(bytes.data(), nbytes - 1, idx.data(), k, n) == CML_ERR_CAPACITY);
  CHECK(encode(bytes.data(), nbytes, idx.data(), k, n) == nbytes);
  CHECK(decode(back.data(), k, n, bytes.data(), nbytes) == k);
  CHECK(back.equals(idx));
  for (int shot = 0; shot < 200 && nbytes > 0; ++shot) {
    Array<uint8_t> bad(nbytes, shift);
    for (int64_t i = 0; i < nbytes; ++i) bad.set(i, bytes.get(i));
    for (uint32_t flips = 1 + draw() % 3; flips > 0; --flips) {
      const int64_t at = draw() % nbytes;
      bad.set(at, static_cast<uint8_t>(bad.get(at) ^ (1u << draw() % 8)));
    }
    Array<uint32_t> out(k, shift);
    const int64_t got = decode(out.data(), k, n, bad.data(), nbytes);
    CHECK(got == k || got == CML_ERR_CORRUPT);
    if (got < 0) CHECK(out.equals(untouched));
  }
  for (int64_t cut : {nbytes - 1, nbytes / 2, int64_t{0}}) {
    if (cut < 0 || cut == nbytes) continue;
    Array<uint8_t> shorter(cut, shift);
    CHECK(decode(untouched.data(), k, n, shorter.data(), cut) == CML_ERR_CORRUPT);
  }
  for (int shot = 0; shot < 20; ++shot) {
    Array<uint8_t> noise(nbytes, shift);
    for (int64_t i = 0; i < nbytes; ++i) noise.set(i, static_cast<uint8_t>(draw()));
    Array<uint32_t> out(k, shift);
    const int64_t got = decode(out.data(), k, n, noise.data(), nbytes);
    CHECK(got == k || got == CML_ERR_CORRUPT);
  }
}

void low_rank(int64_t n, int shift) {
  for (int64_t rank : {int64_t{1}, int64_t{3}}) {
    const int64_t m = 5;
    auto p = floats(m * rank, shift), q = floats(n * rank, shift), out = floats(m * n, shift);
    cml_outer(out.data(), p.data(), q.data(), m, n, rank);
    for (int64_t i = 0; i < m * n; ++i) CHECK(std::fabs(out.get(i)) <= static_cast<float>(rank));
  }
}

void all_positions(int64_t n, int shift) {
  for (int64_t k : {int64_t{0}, int64_t{1}, n / 100, n / 10, n / 2, n}) {
    if (k > n) continue;
    packed(n, k, cml_ef_bound(n, k), shift, cml_ef_encode, cml_ef_decode);
    packed(n, k, (n + 7) / 8, shift, cml_bitmap_encode, cml_bitmap_decode);
    packed(n, k, -1, shift, cml_blocks_encode, cml_blocks_decode);
  }
  CHECK(cml_ef_bound(n, n + 1) == CML_ERR_ARGUMENT && cml_ef_bound(-1, 0) == CML_ERR_ARGUMENT);
  CHECK(cml_ef_bound(int64_t{1} << 32, 1) == CML_ERR_ARGUMENT && cml_ef_bound(n, -1) == CML_ERR_ARGUMENT);
}

void order(int64_t n, int shift) {
  auto g = floats(n, shift), residual = floats(n, shift);
  Array<uint32_t> scratch(n, shift);
  float found = 0.0f;
  for (int64_t rank : {int64_t{1}, n / 50, n / 2, n}) {
    if (rank < 1 || rank > n) continue;
    CHECK(cml_kth_abs(g.data(), residual.data(), n, rank, scratch.data(), &found) == CML_OK);
    CHECK(cml_kth_abs(g.data(), nullptr, n, rank, scratch.data(), &found) == CML_OK);
    CHECK(cml_count_above(g.data(), n, found) <= rank);
    const auto list = positions(2 * n, n);
    Array<uint32_t> idx(n, shift);
    for (int64_t j = 0; j < n; ++j) idx.set(j, list[static_cast<size_t>(j)]);
    auto val = floats(n, shift), kept = floats(2 * n, shift);
    CHECK(cml_trim(kept.data(), 2 * n, idx.data(), val.data(), n, rank, n, scratch.data()) == rank);
  }
  CHECK(cml_kth_abs(g.data(), nullptr, n, n + 1, scratch.data(), &found) == CML_ERR_ARGUMENT);
  CHECK(cml_trim(nullptr, n, nullptr, nullptr, n, n + 1, 0, nullptr) == CML_ERR_ARGUMENT);
}

void runs(int64_t n, int shift) {
  for (int64_t run : {int64_t{8}, int64_t{16}, int64_t{64}}) {
    const int64_t all = (n + run - 1) / run;
    for (int64_t cap : {int64_t{0}, all / 3, all}) {
      auto g = floats(n, shift), residual = floats(n, shift), scores = floats(cap, shift), sample = floats(all + 3, shift);
      if (n > 40) g.set(40, std::numeric_limits<float>::quiet_NaN());
      Array<uint32_t> ids(cap, shift);
      int64_t overflow = -1;
      int32_t finite = -1;
      const int64_t count = cml_select_runs(g.data(), residual.data(), n, run, 1.0f, all / 2, ids.data(), scores.data(), cap,
                                            &overflow, &finite);
      CHECK(count >= 0 && count <= cap && finite == (n > 40 ? 0 : 1));
      CHECK(cml_score_runs(g.data(), nullptr, n, run, 5, all + 3, sample.data()) == all + 3);
      auto val = floats(n, shift);
      const int64_t k = cml_gather_runs(g.data(), n, run, ids.data(), count, val.data(), n);
      CHECK(k >= 0 && k <= n);
      CHECK(cml_scatter_runs(residual.data(), n, run, ids.data(), count, val.data(), k, 0) == k);
      CHECK(cml_scatter_runs(residual.data(), n, run, ids.data(), count, val.data(), k, 1) == k);
      CHECK(cml_scatter_runs(residual.data(), n, run, ids.data(), count, val.data(), k + 1, 1) == CML_ERR_CORRUPT);
      if (k > 0) CHECK(cml_gather_runs(g.data(), n, run, ids.data(), count, val.data(), k - 1) == CML_ERR_CAPACITY);
    }
  }
  CHECK(cml_gather_runs(nullptr, 0, 12, nullptr, 0, nullptr, 0) == CML_ERR_ARGUMENT);
}

void draws_and_nibbles(int64_t n, int shift) {
  for (int64_t k : {int64_t{0}, int64_t{1}, n / 3, n}) {
    if (k > n) continue;
    Array<uint32_t> idx(k, shift);
    auto from = floats(n, shift), to = floats(k, shift), rest = floats(k, shift), scale = floats((k + 255) / 256, shift);
    Array<uint8_t> q((k + 1) / 2, shift);
    CHECK(cml_draw_strata(idx.data(), k, n, draw()) == k);
    CHECK(cml_take(from.data(), n, idx.data(), to.data(), k) == k);
    CHECK(cml_nibbles_encode(q.data(), scale.data(), to.data(), rest.data(), k, 256) == 1);
    CHECK(cml_nibbles_decode(rest.data(), q.data(), scale.data(), k, 256) == k);
    for (int64_t j = 0; j < k; ++j) CHECK(std::fabs(rest.get(j) - to.get(j)) <= scale.get(j / 256) * 0.5001f);
    if (k > 0) CHECK(cml_take(from.data(), k - 1, idx.data(), to.data(), k) == CML_ERR_CORRUPT);
  }
  CHECK(cml_draw_strata(nullptr, n + 1, n, 0) == CML_ERR_ARGUMENT);
  CHECK(cml_nibbles_encode(nullptr, nullptr, nullptr, nullptr, 0, 3) == CML_ERR_ARGUMENT);
}

void lazy(int64_t n, int shift) {
  const int64_t k = (n + 2) / 3, at_shape[] = {n / 3 + 1, 3};
  const auto list = positions(n, k);
  Array<uint32_t> idx(k, shift), back(k, shift);
  for (int64_t j = 0; j < k; ++j) idx.set(j, list[static_cast<size_t>(j)]);
  auto w = floats(n, shift), m = floats(n, shift), v = floats(n, shift), g = floats(k, shift);
  auto four = floats(4 * CML_LAZY_ROWS, shift), eight = floats(8 * CML_LAZY_ROWS, shift), step = floats(7, shift);
  const int64_t groups = (n + CML_LAZY_GROUP - 1) / CML_LAZY_GROUP;
  Array<uint8_t> stamp(groups, shift);
  for (int64_t i = 0; i < groups; ++i) stamp.set(i, static_cast<uint8_t>(draw()));
  CHECK(cml_sgd_sparse(w.data(), v.data(), stamp.data(), n, 255, four.data(), idx.data(), g.data(), k, 0.1f, 0.9f, 1, 0.1f, 1) == k);
  CHECK(cml_sgd_sparse(w.data(), nullptr, nullptr, n, 0, four.data(), idx.data(), g.data(), k, 0.1f, 0, 1, 0, 0) == k);
  for (int64_t j = 0; j < k; ++j) CHECK(stamp.get(idx.get(j) / CML_LAZY_GROUP) == 0);
  cml_sgd_catch_up(w.data(), v.data(), stamp.data(), n, 7, four.data());
  cml_sgd_catch_up(w.data(), nullptr, stamp.data(), n, 7, four.data());
  CHECK(cml_adam_sparse(w.data(), m.data(), v.data(), stamp.data(), n, 7, eight.data(), idx.data(), g.data(), k, step.data()) == k);
  cml_adam_catch_up(w.data(), m.data(), v.data(), stamp.data(), n, 200, eight.data());
  for (int64_t i = 0; i < groups; ++i) CHECK(stamp.get(i) == 200);
  Array<int64_t> at(2 * k, shift), shape(2, shift);
  for (int d : {0, 1}) shape.set(d, at_shape[d]);
  CHECK(cml_coordinates(at.data(), idx.data(), k, shape.data(), 2) == k);
  CHECK(cml_flat_positions(back.data(), at.data(), k, shape.data(), 2) == k && back.equals(idx));
  if (k == 0) return;
  at.set(0, at_shape[0]);
  CHECK(cml_flat_positions(back.data(), at.data(), k, shape.data(), 2) == CML_ERR_CORRUPT);
  idx.set(k - 1, static_cast<uint32_t>(n));
  const auto before = w.get(0);
  CHECK(cml_sgd_sparse(w.data(), v.data(), stamp.data(), n, 0, four.data(), idx.data(), g.data(), k, 1, 1, 1, 0, 0) == CML_ERR_CORRUPT);
  CHECK(std::memcmp(&before, w.data(), sizeof before) == 0);
}

}  // namespace

int main() {
  const char* errors[] = {cml_error_name(CML_ERR_CAPACITY), cml_error_name(CML_ERR_CORRUPT), cml_error_name(CML_ERR_ARGUMENT)};
  for (const char* name : errors) CHECK(std::strcmp(name, cml_error_name(0)) != 0);
  for (int forced : {0, 1}) {
    cml_force_portable(forced);
    for (int64_t n : {0, 1, 7, 8, 9, 31, 33, 63, 64, 65, 257, 2047, 2112, 4097, 12289}) {
      for (int shift : {0, 1, 3}) {
        checksums(n, shift);
        sums_and_casts(n, shift);
        int8(n, shift);
        quantisers(n, shift);
        select(n, shift);
        sparse(n, shift);
        low_rank(n, shift);
        all_positions(n, shift);
        order(n, shift);
        runs(n, shift);
        draws_and_nibbles(n, shift);
        lazy(n, shift);
      }
    }
    std::printf("%s ran\n", cml_isa());
  }
  return failures == 0 ? 0 : 1;
}

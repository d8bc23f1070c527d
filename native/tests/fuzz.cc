// libFuzzer target: every decoder of commlayer.h on bytes from anywhere, in memory of exactly the stated size.
// Must hold: no access outside it; the vector body and its portable twin agree; positions that are taken increase below n and
// are encoded to the very bytes they came from, so that there is one way to write them.
#include "commlayer.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define REQUIRE(condition)                                                        \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);        \
      std::abort();                                                               \
    }                                                                             \
  } while (0)

namespace {

constexpr int64_t kMost = 700;  // elements: some vectors, some blocks, a tail

// `nbytes` bytes in a block of their own, at an odd address.
class Exact {
 public:
  explicit Exact(int64_t nbytes) : bytes_(new uint8_t[static_cast<size_t>(nbytes) + 1]()), nbytes_(nbytes) {}
  uint8_t* data() { return bytes_.get() + 1; }
  template <class T>
  T* as() { return reinterpret_cast<T*>(data()); }
  bool operator==(const Exact& other) const {
    return nbytes_ == other.nbytes_ && std::memcmp(bytes_.get(), other.bytes_.get(), static_cast<size_t>(nbytes_) + 1) == 0;
  }

 private:
  std::unique_ptr<uint8_t[]> bytes_;
  int64_t nbytes_;
};

// What is left of the input.
struct Input {
  const uint8_t* at;
  size_t left;

  uint32_t number(int bytes) {
    uint32_t value = 0;
    for (int i = 0; i < bytes && left > 0; ++i, ++at, --left) value |= static_cast<uint32_t>(*at) << (8 * i);
    return value;
  }
  Exact take(int64_t nbytes) {
    Exact out(nbytes);
    const size_t n = std::min(left, static_cast<size_t>(nbytes));
    if (n > 0) std::memcpy(out.data(), at, n);
    at += n;
    left -= n;
    return out;
  }
};

// Runs decode(out) twice, vector body and portable twin, into `nbytes` of output that begin alike. Returns what both returned.
template <class F>
int64_t both(int64_t nbytes, F decode) {
  int64_t result[2];
  std::vector<Exact> outs;
  for (int portable = 0; portable < 2; ++portable) {
    outs.emplace_back(nbytes);
    std::memset(outs.back().data(), 0x3f, static_cast<size_t>(nbytes));
    cml_force_portable(portable);
    result[portable] = decode(outs.back());
  }
  cml_force_portable(0);
  REQUIRE(result[0] == result[1]);
  REQUIRE(outs[0] == outs[1]);
  if (result[0] < 0) {
    for (int64_t i = 0; i < nbytes; ++i) REQUIRE(outs[0].data()[i] == 0x3f);
  }
  return result[0];
}

using Decoder = int64_t (*)(uint32_t*, int64_t, int64_t, const uint8_t*, int64_t);
using Encoder = int64_t (*)(uint8_t*, int64_t, const uint32_t*, int64_t, int64_t);

void positions(Input in, Decoder decode, Encoder encode) {
  const int64_t n = in.number(2) % 5000, k = n == 0 ? 0 : in.number(1) % (std::min<int64_t>(n, 255) + 1);
  const auto nbytes = static_cast<int64_t>(in.left);
  Exact body = in.take(nbytes);
  if (both(4 * k, [&](Exact& out) { return decode(out.as<uint32_t>(), k, n, body.data(), nbytes); }) < 0) return;
  Exact idx(4 * k), again(nbytes);
  REQUIRE(decode(idx.as<uint32_t>(), k, n, body.data(), nbytes) == k);
  int64_t last = -1;
  for (int64_t j = 0; j < k; ++j) {
    uint32_t value;
    std::memcpy(&value, idx.data() + 4 * j, 4);
    REQUIRE(value > last && value < n);
    last = value;
  }
  REQUIRE(encode(again.data(), nbytes, idx.as<uint32_t>(), k, n) == nbytes);
  REQUIRE(again == body);
}

int64_t blocks(int64_t n, int64_t block) { return (n + block - 1) / block; }

void quantised(Input in, uint32_t which) {
  const int64_t n = in.number(2) % kMost, block = 8 * (1 + in.number(1) % 40);
  const int widths[] = {2, 3, 4, 5, 8};
  const int bits = widths[in.number(1) % 5];
  const int assign = static_cast<int>(in.number(1) % 2);
  Exact scale = in.take(4 * blocks(n, block)), q = in.take(n + 8);
  both(4 * n, [&](Exact& out) -> int64_t {
    float* acc = out.as<float>();
    switch (which) {
      case 0: cml_int8_decode(acc, q.as<int8_t>(), scale.as<float>(), n, block, assign); return 0;
      case 1: cml_nibbles_decode(acc, q.data(), scale.as<float>(), n, block); return 0;
      case 2: return cml_linear_decode(acc, q.data(), scale.as<uint16_t>(), n, block, bits, assign);
      default: return cml_onebit_decode(acc, q.data(), scale.as<uint16_t>(), n, block, assign);
    }
  });
}

void sparse(Input in, uint32_t which) {
  const int64_t n = in.number(2) % kMost, k = in.number(1);
  Exact idx = in.take(4 * k), val = in.take(4 * k), q = in.take(k), scale = in.take(4 * blocks(k, 256));
  both(4 * n, [&](Exact& out) -> int64_t {
    float* acc = out.as<float>();
    const auto* at = idx.as<uint32_t>();
    switch (which) {
      case 0: return cml_scatter_add(acc, n, at, val.as<float>(), k);
      case 1: return cml_scatter_add_int8(acc, n, at, q.as<int8_t>(), scale.as<float>(), k, 256);
      default: return cml_scatter_runs(acc, n, 8, at, k / 8, val.as<float>(), k, 1);
    }
  });
  Exact from(4 * n);
  both(4 * k, [&](Exact& out) { return cml_take(from.as<float>(), n, idx.as<uint32_t>(), out.as<float>(), k); });
}

void casts(Input in) {
  const auto n = static_cast<int64_t>(in.left / 2);
  Exact half = in.take(2 * n);
  const auto* from = half.as<uint16_t>();
  both(4 * n, [&](Exact& out) { return cml_f16_to_f32(out.as<float>(), from, n), 0; });
  both(4 * n, [&](Exact& out) { return cml_bf16_to_f32(out.as<float>(), from, n), 0; });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in{data, size};
  const uint32_t which = in.number(1) % 11;
  switch (which) {
    case 0: positions(in, cml_ef_decode, cml_ef_encode); break;
    case 1: positions(in, cml_bitmap_decode, cml_bitmap_encode); break;
    case 2: positions(in, cml_blocks_decode, cml_blocks_encode); break;
    case 3: casts(in); break;
    case 4: case 5: case 6: sparse(in, which - 4); break;
    default: quantised(in, which - 7);
  }
  return 0;
}

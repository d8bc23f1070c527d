// Positions as blocks of 16: the numbers of the blocks that hold any, and 16 bits for each. Pays where positions cluster.
#include "positions.h"

namespace cml {
namespace {

constexpr int kShift = 4;
constexpr int64_t kHead = 4, kMask = 2;  // bytes: the number of blocks in front, the bits of a block

int64_t distinct(const uint32_t* idx, int64_t k) {
  int64_t others = 0;
  for (int64_t j = 0; j + 1 < k; ++j) others += load(idx, j) >> kShift != load(idx, j + 1) >> kShift;
  return k > 0 ? others + 1 : 0;
}

struct Blocks {
  int64_t all;  // blocks below n
  EliasFano size;
  bool bitmap;  // how the numbers are coded: the smaller way, the bitmap if both are equal
  int64_t numbers_nbytes;
  int64_t nbytes;

  Blocks(int64_t n, int64_t count)
      : all((n + 15) >> kShift),
        size(elias_fano(all, count)),
        bitmap(bitmap_nbytes(all) <= size.nbytes),
        numbers_nbytes(bitmap ? bitmap_nbytes(all) : size.nbytes),
        nbytes(kHead + numbers_nbytes + kMask * count) {}
};

// The bits of each block as it is completed.
template <class F>
void each_block(const uint32_t* idx, int64_t k, F use) {
  for (int64_t j = 0; j < k;) {
    const uint32_t block = load(idx, j) >> kShift;
    uint32_t mask = 0;
    for (; j < k && load(idx, j) >> kShift == block; ++j) mask |= 1u << (load(idx, j) & 15u);
    use(block, static_cast<uint16_t>(mask));
  }
}

// Whether count masks hold k bits, none is empty, and the last one fits if its block is the last below n.
bool masks_ok(const uint8_t* masks, int64_t count, int64_t k, int64_t n, const Blocks& blocks, const uint8_t* numbers) {
  int64_t sum = 0;
  bool empty = false;
  for (int64_t b = 0; b < count; ++b) {
    const unsigned mask = load(reinterpret_cast<const uint16_t*>(masks), b);
    sum += __builtin_popcount(mask);
    empty |= mask == 0;
  }
  if (empty || sum != k) return false;
  const unsigned last = load(reinterpret_cast<const uint16_t*>(masks), count - 1);
  const bool beyond = n % 16 != 0 && last >> (n % 16) != 0;
  if (blocks.bitmap)
    return padding_zero(numbers, blocks.all) && ones(numbers, blocks.numbers_nbytes) == count &&
           !(beyond && numbers[(blocks.all - 1) / 8] >> ((blocks.all - 1) % 8) != 0);
  return elias_fano_ok(numbers, count, blocks.all - (beyond ? 1 : 0), blocks.size);
}

}  // namespace
}  // namespace cml

extern "C" int64_t cml_blocks_nbytes(const uint32_t* idx, int64_t k, int64_t n) {
  if (n < 0 || n > cml::kMaxN || k < 0 || k > n) return CML_ERR_ARGUMENT;
  return k == 0 ? 0 : cml::Blocks(n, cml::distinct(idx, k)).nbytes;
}

extern "C" int64_t cml_blocks_encode(uint8_t* out, int64_t cap, const uint32_t* idx, int64_t k, int64_t n) {
  if (n < 0 || n > cml::kMaxN || k < 0 || !cml::positions_ok(idx, k, n)) return CML_ERR_ARGUMENT;
  if (k == 0) return 0;
  const int64_t count = cml::distinct(idx, k);
  const cml::Blocks blocks(n, count);
  if (blocks.nbytes > cap) return CML_ERR_CAPACITY;
  cml::store(reinterpret_cast<uint32_t*>(out), 0, static_cast<uint32_t>(count));
  uint8_t* numbers = out + cml::kHead;
  auto* masks = reinterpret_cast<uint16_t*>(numbers + blocks.numbers_nbytes);
  int64_t b = 0;
  if (blocks.bitmap) {
    std::memset(numbers, 0, static_cast<size_t>(blocks.numbers_nbytes));
    cml::each_block(idx, k, [&](uint32_t block, uint16_t mask) {
      cml::set_bit(numbers, block);
      cml::store(masks, b++, mask);
    });
  } else {
    cml::EliasFanoWriter writer(numbers, blocks.size);
    cml::each_block(idx, k, [&](uint32_t block, uint16_t mask) {
      writer.put(block);
      cml::store(masks, b++, mask);
    });
    writer.finish();
  }
  return blocks.nbytes;
}

extern "C" int64_t cml_blocks_decode(uint32_t* idx, int64_t k, int64_t n, const uint8_t* in, int64_t nbytes) {
  if (n < 0 || n > cml::kMaxN || k < 0) return CML_ERR_ARGUMENT;
  if (k == 0) return nbytes == 0 ? 0 : static_cast<int64_t>(CML_ERR_CORRUPT);
  if (nbytes < cml::kHead) return CML_ERR_CORRUPT;
  const int64_t count = cml::load(reinterpret_cast<const uint32_t*>(in));
  if (count < 1 || count > k || count > (n + 15) / 16) return CML_ERR_CORRUPT;
  const cml::Blocks blocks(n, count);
  if (nbytes != blocks.nbytes) return CML_ERR_CORRUPT;
  const uint8_t* numbers = in + cml::kHead;
  const uint8_t* masks = numbers + blocks.numbers_nbytes;
  if (!cml::masks_ok(masks, count, k, n, blocks, numbers)) return CML_ERR_CORRUPT;
  // The numbers take the front of idx. Expanded from the back, no position comes to lie on a number that is still needed.
  if (blocks.bitmap)
    cml::bitmap_walk(idx, numbers, blocks.numbers_nbytes);
  else
    cml::walk<true>(idx, blocks.all, numbers, blocks.size);
  int64_t j = k;
  for (int64_t b = count - 1; b >= 0; --b) {
    const uint32_t base = cml::load(idx, b) << cml::kShift;
    for (unsigned mask = cml::load(reinterpret_cast<const uint16_t*>(masks), b); mask != 0;) {
      const unsigned bit = 31u - static_cast<unsigned>(__builtin_clz(mask));
      cml::store(idx, --j, base + bit);
      mask ^= 1u << bit;
    }
  }
  return k;
}

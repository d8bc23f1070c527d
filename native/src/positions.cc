// Positions as bytes: Elias-Fano and bitmap. Knows no values. Bit tricks do all the work, so one body serves every CPU.
#include "positions.h"

namespace cml {
namespace {

bool valid(int64_t n, int64_t k) { return n >= 0 && n <= kMaxN && k >= 0 && k <= n; }

}  // namespace
}  // namespace cml

extern "C" int64_t cml_ef_bound(int64_t n, int64_t k) {
  return cml::valid(n, k) ? cml::elias_fano(n, k).nbytes : static_cast<int64_t>(CML_ERR_ARGUMENT);
}

extern "C" int64_t cml_ef_encode(uint8_t* out, int64_t cap, const uint32_t* idx, int64_t k, int64_t n) {
  if (!cml::valid(n, k) || !cml::positions_ok(idx, k, n)) return CML_ERR_ARGUMENT;
  const cml::EliasFano size = cml::elias_fano(n, k);
  if (size.nbytes > cap) return CML_ERR_CAPACITY;
  if (k == 0) return 0;
  cml::EliasFanoWriter writer(out, size);
  for (int64_t j = 0; j < k; ++j) writer.put(cml::load(idx, j));
  writer.finish();
  return size.nbytes;
}

extern "C" int64_t cml_ef_decode(uint32_t* idx, int64_t k, int64_t n, const uint8_t* in, int64_t nbytes) {
  if (n < 0 || n > cml::kMaxN || k < 0) return CML_ERR_ARGUMENT;
  if (k > n) return CML_ERR_CORRUPT;
  const cml::EliasFano size = cml::elias_fano(n, k);
  if (nbytes != size.nbytes) return CML_ERR_CORRUPT;
  if (k == 0) return 0;
  if (!cml::elias_fano_ok(in, k, n, size)) return CML_ERR_CORRUPT;
  cml::walk<true>(idx, n, in, size);
  return k;
}

extern "C" int64_t cml_bitmap_encode(uint8_t* out, int64_t cap, const uint32_t* idx, int64_t k, int64_t n) {
  if (!cml::valid(n, k) || !cml::positions_ok(idx, k, n)) return CML_ERR_ARGUMENT;
  const int64_t nbytes = cml::bitmap_nbytes(n);
  if (nbytes > cap) return CML_ERR_CAPACITY;
  if (n == 0) return 0;
  std::memset(out, 0, static_cast<size_t>(nbytes));
  for (int64_t j = 0; j < k; ++j) cml::set_bit(out, cml::load(idx, j));
  return nbytes;
}

extern "C" int64_t cml_bitmap_decode(uint32_t* idx, int64_t k, int64_t n, const uint8_t* in, int64_t nbytes) {
  if (n < 0 || n > cml::kMaxN || k < 0) return CML_ERR_ARGUMENT;
  if (nbytes != cml::bitmap_nbytes(n) || !cml::padding_zero(in, n) || cml::ones(in, nbytes) != k) return CML_ERR_CORRUPT;
  cml::bitmap_walk(idx, in, nbytes);
  return k;
}

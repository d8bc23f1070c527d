// How an array is divided among threads, and a selection that is put together from selections of parts.
#include "parts.h"

#include "commlayer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

namespace glue {
namespace {

std::atomic<int> threads{1};
std::atomic<int64_t> least_elements{1};

// What was selected of a run of neighbours, at positions from `base` on.
struct Piece {
  int64_t base, n;
  uint32_t* idx;
  float* val;
  int64_t count = 0, overflow = 0;
  int32_t finite = 1;
};

// A part in the order of the scan: at most two pieces, before and after the wrap, in memory of its own.
struct Share {
  Share(Part part, int64_t n, int64_t from, int64_t cap)
      : room(std::min(cap, part.n)), idx(new uint32_t[static_cast<size_t>(room)]), val(new float[static_cast<size_t>(room)]) {
    const int64_t begin = from + part.lo, end = begin + part.n;
    if (begin < n) pieces.push_back({begin, std::min(n, end) - begin, nullptr, nullptr});
    if (end > n) pieces.push_back({std::max(begin - n, int64_t{0}), end - std::max(begin, n), nullptr, nullptr});
  }

  int64_t room;
  std::unique_ptr<uint32_t[]> idx;
  std::unique_ptr<float[]> val;
  std::vector<Piece> pieces;
};

int64_t scan(Share& share, const float* g, float* residual, float threshold) {
  int64_t filled = 0;
  for (Piece& p : share.pieces) {
    p.idx = share.idx.get() + filled;
    p.val = share.val.get() + filled;
    p.count = cml_select(g + p.base, residual ? residual + p.base : nullptr, p.n, threshold, 0, p.idx, p.val, share.room - filled,
                         &p.overflow, &p.finite);
    if (p.count < 0) return p.count;
    filled += p.count;
  }
  return filled;
}

}  // namespace

void set_threads(int count, int64_t grain) {
  threads = std::clamp(count, 1, kMostThreads);
  least_elements = std::max(grain, int64_t{1});
}

Parts::Parts(int64_t n, int64_t unit) : n_(n), size_(n), count_(1) {
  if (unit >= n) return;
  const int64_t units = (n + unit - 1) / unit, wanted = std::clamp<int64_t>(n / least_elements, 1, threads);
  size_ = (units + wanted - 1) / wanted * unit;
  count_ = static_cast<int>((n + size_ - 1) / size_);
}

int64_t select(const float* g, float* residual, int64_t n, float threshold, int64_t from, uint32_t* idx, float* val, int64_t cap,
               int64_t* overflow, int32_t* finite) {
  const Parts parts(n, 1);
  if (parts.count() == 1 || from < 0 || from >= n)
    return cml_select(g, residual, n, threshold, from, idx, val, cap, overflow, finite);
  std::vector<Share> shares;
  for (int i = 0; i < parts.count(); ++i) shares.emplace_back(parts[i], n, from, cap);
  const int64_t found = parts.least([&](Part part) { return scan(shares[static_cast<size_t>(part.index)], g, residual, threshold); });
  if (found < 0) return found;
  // In the order of the scan what came first stays; the rest goes back to the residual, which one scan would have left there.
  std::vector<Piece> pieces;
  int64_t kept = 0, below = 0;
  *overflow = 0;
  *finite = 1;
  for (const Share& share : shares) {
    for (Piece p : share.pieces) {
      const int64_t stay = std::min(p.count, cap - kept);
      for (int64_t j = stay; residual && j < p.count; ++j) std::memcpy(residual + p.base + p.idx[j], p.val + j, sizeof(float));
      *overflow += p.overflow + p.count - stay;
      *finite &= p.finite;
      p.count = stay;
      kept += stay;
      below += p.base < from ? stay : 0;
      pieces.push_back(p);
    }
  }
  int64_t low = 0, high = below;
  for (const Piece& p : pieces) {
    int64_t& at = p.base < from ? low : high;
    for (int64_t j = 0; j < p.count; ++j) {
      const auto position = static_cast<uint32_t>(p.base) + p.idx[j];
      std::memcpy(idx + at + j, &position, sizeof position);
    }
    if (p.count > 0) std::memcpy(val + at, p.val, static_cast<size_t>(p.count) * sizeof(float));
    at += p.count;
  }
  return kept;
}

}  // namespace glue

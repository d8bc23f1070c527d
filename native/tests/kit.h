// Memory and numbers for the C++ drivers: arrays of exactly the stated size at any alignment, and draws that repeat. Knows no kernels.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace kit {

inline uint64_t seed = 88172645463325252ull;

inline uint32_t draw() {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return static_cast<uint32_t>(seed >> 32);
}

inline float draw_float() { return static_cast<float>(static_cast<int32_t>(draw())) * 0x1p-31f; }

// n elements `shift` bytes into a block of their own, so that one byte beyond them is not ours.
template <class T>
class Array {
 public:
  Array(int64_t n, int shift) : n_(n), shift_(shift), bytes_(new char[bytes() + static_cast<size_t>(shift)]()) {}
  T* data() { return reinterpret_cast<T*>(bytes_.get() + shift_); }
  size_t bytes() const { return static_cast<size_t>(n_) * sizeof(T); }
  void set(int64_t i, T value) { std::memcpy(bytes_.get() + shift_ + i * int64_t{sizeof(T)}, &value, sizeof(T)); }
  T get(int64_t i) const {
    T value;
    std::memcpy(&value, bytes_.get() + shift_ + i * int64_t{sizeof(T)}, sizeof(T));
    return value;
  }
  bool equals(const Array& other) const {
    return std::memcmp(bytes_.get() + shift_, other.bytes_.get() + other.shift_, bytes()) == 0;
  }

 private:
  int64_t n_;
  int shift_;
  std::unique_ptr<char[]> bytes_;
};

inline Array<float> floats(int64_t n, int shift) {
  Array<float> x(n, shift);
  for (int64_t i = 0; i < n; ++i) x.set(i, draw_float());
  return x;
}

inline std::vector<uint32_t> positions(int64_t n, int64_t k) {
  std::vector<uint32_t> idx;
  for (int64_t i = 0; i < n && static_cast<int64_t>(idx.size()) < k; ++i)
    if (static_cast<int64_t>(draw() % static_cast<uint32_t>(n - i)) < k - static_cast<int64_t>(idx.size()))
      idx.push_back(static_cast<uint32_t>(i));
  return idx;
}

}  // namespace kit

// One call of a kernel as several at once, over parts of its arrays. Knows how many threads may run; no kernels.
#pragma once

#include <cstdint>
#include <system_error>
#include <thread>

namespace glue {

constexpr int kMostThreads = 16;

// From now on at most `count` threads share a call, each with at least `grain` elements.
void set_threads(int count, int64_t grain);

struct Part {
  int index;
  int64_t lo, n;
};

// 0 .. n - 1 as parts that begin at multiples of `unit`; one part at least, be it empty.
class Parts {
 public:
  Parts(int64_t n, int64_t unit);

  int count() const { return count_; }
  Part operator[](int i) const {
    const int64_t lo = i * size_, left = n_ - lo;
    return {i, lo, i + 1 < count_ && size_ < left ? size_ : left};
  }

  // kernel(part) for each, all at once: this thread takes the first. Threads live as long as the call: starting one takes some
  // 20 us, which a part's size makes up for, and there is nothing to keep alive, to fork or to end. What cannot be started runs here.
  template <class F>
  void each(F kernel) const {
    std::thread others[kMostThreads];
    int started = 1;
    try {
      for (; started < count_; ++started) others[started] = std::thread([this, &kernel, started] { kernel((*this)[started]); });
    } catch (const std::system_error&) {
    }
    kernel((*this)[0]);
    for (int i = started; i < count_; ++i) kernel((*this)[i]);
    for (int i = 1; i < started; ++i) others[i].join();
  }

  // The least of what kernel(part) returns: 0 where one found numbers that are not finite, an error where one is at fault.
  template <class F>
  int64_t least(F kernel) const {
    int64_t results[kMostThreads];
    each([&](Part part) { results[part.index] = kernel(part); });
    int64_t least = results[0];
    for (int i = 1; i < count_; ++i) least = results[i] < least ? results[i] : least;
    return least;
  }

  // The same for encoders with a residual: where one part is not finite, the others' residuals take back what they sent.
  template <class F, class G>
  int64_t encode(F kernel, G give_back) const {
    int64_t results[kMostThreads];
    const int64_t found = least([&](Part part) { return results[part.index] = kernel(part); });
    if (found == 0)
      for (int i = 0; i < count_; ++i)
        if (results[i] == 1) give_back((*this)[i]);
    return found;
  }

 private:
  int64_t n_, size_;
  int count_;
};

// cml_select, in parts; the same result.
int64_t select(const float* g, float* residual, int64_t n, float threshold, int64_t from, uint32_t* idx, float* val, int64_t cap,
               int64_t* overflow, int32_t* finite);

}  // namespace glue

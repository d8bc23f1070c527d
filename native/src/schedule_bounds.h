// What no choice's step can end before, so that a simulation whose answer is of no use ends early. Knows no events.
//
// A lane works off what is put on it one second a second, so of any set of tasks on it the last one is over no sooner than
// the first of them can begin and the sum of their seconds; what follows it in its bucket comes on top. So at the start, for
// the sets of what is ready last, and whenever an idle lane takes up work: then for all that has not yet begun there.
#pragma once

#include "commlayer.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace cml {

constexpr double kNever = std::numeric_limits<double>::infinity();

// Cuts the caller's scratch into arrays; with no scratch it only adds up their size.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t n) {
    T* made = reinterpret_cast<T*>(base_ + used_);
    used_ += (n * int64_t{sizeof(T)} + 7) / 8 * 8;
    return made;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

inline double longest(const cml_schedule& in, int32_t task) {
  double most = 0;
  for (int32_t s = in.task_seconds[task]; s < in.task_seconds[task + 1]; ++s) most = std::max(most, in.seconds[s]);
  return most;
}

class Bounds {
 public:
  Bounds(const cml_schedule& in, Arena& arena) : in_(in) {
    left_ = arena.take<double>(in.lanes);
    begin_ = arena.take<double>(in.lanes);
    rest_ = arena.take<double>(in.lanes);
  }

  // What the choice's tasks end no sooner than, or kNever where that is behind `last`. If not, the others tell as time goes on.
  double least(const int32_t* choice, double last) {
    const bool alone = in_.steps == 1 && std::count(in_.stale, in_.stale + in_.buckets, 0) == in_.buckets;
    last_ = kNever;
    if (!alone || in_.head == nullptr) return 0;
    last_ = last;
    std::fill(left_, left_ + in_.lanes, 0.0);
    std::fill(begin_, begin_ + in_.lanes, kNever);
    std::fill(rest_, rest_ + in_.lanes, kNever);
    double most = 0;
    for (int32_t place = in_.buckets - 1; place >= 0; --place) {
      const int32_t b = in_.ready_order[place], option = in_.bucket_options[b] + choice[b];
      const double ready = ready_on_one(b);
      for (int32_t task = in_.option_tasks[option]; task < in_.option_tasks[option + 1]; ++task)
        most = std::max(most, with(task, ready));
      if (most > last_) return kNever;
    }
    return most;
  }

  void unlimited() { last_ = kNever; }
  bool limited() const { return last_ < kNever; }

  // A lane takes up so many seconds of work; it may have been idle.
  bool lane_late(int32_t lane, double seconds, bool idle, double now) {
    const bool is = idle && now + left_[lane] + rest_[lane] > last_;
    left_[lane] -= seconds;
    return is;
  }

  // A task waits from now on.
  bool task_late(int32_t task, double now) const { return now + longest(in_, task) + in_.rest[task] > last_; }

 private:
  double ready_on_one(int32_t b) const {
    double ready = kNever;
    for (int64_t node = 0; node < in_.nodes; ++node) ready = std::min(ready, in_.ready[node * (in_.buckets + 1) + b]);
    return ready;
  }

  // When a task is over that joins those before it, and whatever follows it or one of them.
  double with(int32_t task, double ready) {
    const double begin = ready + in_.head[task], rest = in_.rest[task];
    double most = begin + longest(in_, task) + rest;
    if (in_.task_line[task] < 0) return most;
    const int32_t* lane = in_.line_lane + in_.line_lanes[in_.task_line[task]];
    for (int32_t s = in_.task_seconds[task]; s < in_.task_seconds[task + 1]; ++s, ++lane) {
      left_[*lane] += in_.seconds[s];
      begin_[*lane] = std::min(begin_[*lane], begin);
      rest_[*lane] = std::min(rest_[*lane], rest);
      most = std::max(most, begin_[*lane] + left_[*lane] + rest_[*lane]);
    }
    return most;
  }

  const cml_schedule& in_;
  double last_ = kNever;
  double *left_, *begin_, *rest_;
};

}  // namespace cml

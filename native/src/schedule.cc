// The event loop of the planner's simulation: lines of tasks over lanes. Knows no paths and no prices.
// tests/oracle/schedule.py is the same in Python and says more of why.
#include "schedule_bounds.h"

#include <cstring>

namespace cml {
namespace {

// Four at a time: one after the other, each would wait for the one before.
inline double least_of(const double* values, int32_t n) {
  double a = kNever, b = kNever, c = kNever, d = kNever;
  int32_t i = 0;
  for (; i + 4 <= n; i += 4) {
    a = std::min(a, values[i]), b = std::min(b, values[i + 1]);
    c = std::min(c, values[i + 2]), d = std::min(d, values[i + 3]);
  }
  for (; i < n; ++i) a = std::min(a, values[i]);
  return std::min(std::min(a, b), std::min(c, d));
}

// A task that ends after its lanes are free again.
struct Event {
  double at;
  int32_t task;
};

inline bool later(const Event& a, const Event& b) { return a.at > b.at; }

class Run {
 public:
  Run(const cml_schedule& in, void* scratch) : in_(in), arena_(scratch), bounds_(in, arena_) {
    const int64_t most = int64_t{in.most_tasks} * in.steps;
    words_ = (most + 63) / 64;
    line_words_ = (in.lines + 63) / 64;
    first_ = arena_.take<int32_t>(in.buckets);
    gated_ = arena_.take<int32_t>(in.buckets);
    kind_ = arena_.take<int32_t>(most);
    bucket_ = arena_.take<int32_t>(most);
    left_ = arena_.take<int32_t>(most);
    by_arrival_ = arena_.take<int32_t>(most);
    heap_ = arena_.take<Event>(most);
    over_ = arena_.take<int32_t>(most);
    due_at_ = arena_.take<double>(in.lanes);
    served_ = arena_.take<double>(in.lanes);
    served_at_ = arena_.take<double>(in.lanes);
    head_ = arena_.take<int32_t>(in.lanes);
    on_ = arena_.take<int32_t>(in.lanes);
    const int32_t entries = in.line_lanes[in.lines];
    behind_ = arena_.take<int32_t>(entries);
    line_of_ = arena_.take<int32_t>(entries);
    leaves_ = arena_.take<double>(entries);
    current_ = arena_.take<int32_t>(in.lines);
    unserved_ = arena_.take<int32_t>(in.lines);
    waiting_ = arena_.take<uint64_t>(words_ * in.lines);
    low_ = arena_.take<int64_t>(in.lines);
    check_ = arena_.take<uint64_t>(line_words_);
    at_ = arena_.take<int32_t>(in.nodes);
    offset_ = arena_.take<double>(in.nodes);
    due_ = arena_.take<double>(in.nodes);
    open_ = arena_.take<int32_t>(in.steps);
    open_stale_ = arena_.take<int32_t>(in.steps);
    kept_ = arena_.take<int32_t>(in.buckets);
    int32_t most_options = 0;
    for (int32_t b = 0; b < in.buckets; ++b) most_options = std::max(most_options, in.bucket_options[b + 1] - in.bucket_options[b]);
    by_least_ = arena_.take<Event>(most_options);
  }

  int64_t scratch() const { return arena_.used(); }
  int32_t* kept() { return kept_; }
  Event* by_least() { return by_least_; }
  int64_t begun() const { return begun_; }

  // Where the tasks of a choice are over no sooner; kNever where its step is sure to be above `limit`. Sums round.
  double least(const int32_t* choice, double limit) { return bounds_.least(choice, limit - in_.tail + 1e-9 * limit); }

  // kNever as soon as a step that stands alone is above `limit`.
  double run(const int32_t* choice, double limit, double* start, double* end) {
    start_ = start;
    end_ = end;
    limit_ = in_.steps == 1 ? limit : kNever;
    late_ = false;
    if (limit == kNever) bounds_.unlimited();
    else if (least(choice, limit) == kNever) return kNever;
    lay_out(choice);
    double begun = 0, last = 0, before = 0;
    for (int32_t step = 0; step < in_.steps; ++step) {
      const double over = one_step(step, begun);
      if (over < 0 || over == kNever) return over;
      before = last;
      last = over + in_.tail - begun;
      begun = over + in_.tail;
    }
    // Steps with late transfers may be long and short in turns.
    return in_.steps > 2 ? (before + last) / 2 : last;
  }

 private:
  void lay_out(const int32_t* choice) {
    total_ = 0;
    for (int32_t place = 0; place < in_.buckets; ++place) {
      const int32_t b = in_.order[place];
      const int32_t option = in_.bucket_options[b] + choice[b];
      first_[b] = gated_[b] = total_;
      for (int32_t task = in_.option_tasks[option]; task < in_.option_tasks[option + 1]; ++task) {
        if (in_.task_gates[task] < in_.task_gates[task + 1]) gated_[b] = total_ + 1;
        kind_[total_] = task;
        bucket_[total_++] = b;
      }
    }
    const int64_t all = int64_t{total_} * in_.steps;
    for (int32_t step = 0; step < in_.steps; ++step) {
      int32_t* left = left_ + int64_t{step} * total_;
      for (int32_t i = 0; i < total_; ++i) left[i] = in_.need[kind_[i]];
      if (step > 0) {
        std::copy(kind_, kind_ + total_, kind_ + int64_t{step} * total_);
        std::copy(bucket_, bucket_ + total_, bucket_ + int64_t{step} * total_);
      }
      open_[step] = open_stale_[step] = 0;
      for (int32_t i = 0; i < total_; ++i) ++(in_.stale[bucket_[i]] ? open_stale_ : open_)[step];
    }
    if (start_ != nullptr) {
      std::fill(start_, start_ + all, std::numeric_limits<double>::quiet_NaN());
      std::fill(end_, end_ + all, std::numeric_limits<double>::quiet_NaN());
    }
    std::memset(waiting_, 0, static_cast<size_t>(words_ * in_.lines) * 8);
    std::memset(check_, 0, static_cast<size_t>(line_words_) * 8);
    std::fill(low_, low_ + in_.lines, words_);
    std::fill(current_, current_ + in_.lines, -1);
    std::fill(due_at_, due_at_ + in_.lanes, kNever);
    std::fill(head_, head_ + in_.lanes, -1);
    std::fill(on_, on_ + in_.lanes, 0);
    for (int32_t line = 0; line < in_.lines; ++line)
      for (int32_t e = in_.line_lanes[line]; e < in_.line_lanes[line + 1]; ++e) line_of_[e] = line;
    heap_size_ = 0;
    arrivals_ = 0;
  }

  double one_step(int32_t step, double begun) {
    for (int32_t n = 0; n < in_.nodes; ++n) {
      at_[n] = 0;
      offset_[n] = begun;
      due_[n] = next_due(n);
    }
    int32_t computing = in_.nodes;
    now_ = begun;
    while (computing > 0 || open_[step] > 0 || (step > 0 && open_stale_[step - 1] > 0)) {
      double soonest = heap_size_ > 0 ? heap_[0].at : kNever;
      for (int32_t n = 0; n < in_.nodes; ++n) soonest = std::min(soonest, due_[n]);
      soonest = std::min(soonest, least_of(due_at_, in_.lanes));
      if (soonest == kNever) return CML_ERR_ARGUMENT;
      now_ = soonest;
      if (now_ + in_.tail > limit_ || late_) return kNever;  // the sum that is returned, so that a step of `limit` is
      for (int32_t n = 0; n < in_.nodes; ++n) {
        while (due_[n] <= now_) {
          if (at_[n] < in_.buckets)
            gradient(step, in_.ready_order[int64_t{n} * in_.buckets + at_[n]], n);
          else
            --computing;
          ++at_[n];
          due_[n] = next_due(n);
        }
      }
      ended_now_ = 0;
      for (int32_t lane = 0; lane < in_.lanes; ++lane)
        if (due_at_[lane] <= now_) leave(lane);
      while (heap_size_ > 0 && heap_[0].at <= now_) {
        over_[ended_now_++] = heap_[0].task;
        std::pop_heap(heap_, heap_ + heap_size_--, later);
      }
      if (ended_now_ > 1) std::sort(over_, over_ + ended_now_);
      for (int32_t i = 0; i < ended_now_; ++i) ended(over_[i]);
      serve();
    }
    return now_;
  }

  double next_due(int32_t n) const {
    if (at_[n] > in_.buckets) return kNever;
    const int64_t which = at_[n] < in_.buckets ? in_.ready_order[int64_t{n} * in_.buckets + at_[n]] : in_.buckets;
    return offset_[n] + in_.ready[int64_t{n} * (in_.buckets + 1) + which];
  }

  void gradient(int32_t step, int32_t b, int32_t node) {
    for (int32_t i = first_[b]; i < gated_[b]; ++i) {
      const int32_t task = kind_[i];
      for (int32_t g = in_.task_gates[task]; g < in_.task_gates[task + 1]; ++g)
        if (in_.gate[g] == node) met(step * total_ + i);
    }
  }

  void met(int32_t instance) {
    if (--left_[instance] > 0) return;
    const int32_t task = kind_[instance], line = in_.task_line[task];
    if (bounds_.limited() && bounds_.task_late(task, now_)) late_ = true;
    if (line < 0) {
      if (start_ != nullptr) start_[instance] = now_;
      later_on(now_ + in_.latency[task], instance);
      return;
    }
    const int32_t key = in_.priority != 0 ? instance : arrived(instance);
    waiting_[line * words_ + key / 64] |= uint64_t{1} << (key % 64);
    low_[line] = std::min<int64_t>(low_[line], key / 64);
    if (current_[line] < 0) look_at(line);
  }

  int32_t arrived(int32_t instance) {
    by_arrival_[arrivals_] = instance;
    return arrivals_++;
  }

  void look_at(int32_t line) { check_[line / 64] |= uint64_t{1} << (line % 64); }

  void later_on(double at, int32_t instance) {
    heap_[heap_size_++] = {at, instance};
    std::push_heap(heap_, heap_ + heap_size_, later);
  }

  // Each free line takes the first in order of those that wait at it.
  void serve() {
    for (int64_t w = 0; w < line_words_; ++w) {
      for (uint64_t left = check_[w]; left != 0; left &= left - 1) {
        const auto line = static_cast<int32_t>(64 * w + __builtin_ctzll(left));
        const int32_t key = first_waiting(line);
        if (key == INT32_MAX) continue;
        waiting_[line * words_ + key / 64] &= ~(uint64_t{1} << (key % 64));
        begin(in_.priority != 0 ? key : by_arrival_[key], line);
      }
      check_[w] = 0;
    }
  }

  int32_t first_waiting(int32_t line) {
    const uint64_t* waiting = waiting_ + line * words_;
    int64_t& w = low_[line];
    while (w < words_ && waiting[w] == 0) ++w;
    return w == words_ ? INT32_MAX : static_cast<int32_t>(64 * w + __builtin_ctzll(waiting[w]));
  }

  void begin(int32_t instance, int32_t line) {
    const int32_t first = in_.line_lanes[line];
    const double* seconds = in_.seconds + in_.task_seconds[kind_[instance]];
    current_[line] = instance;
    unserved_[line] = in_.line_lanes[line + 1] - first;
    ++begun_;
    for (int32_t e = first; e < in_.line_lanes[line + 1]; ++e) {
      const int32_t lane = in_.line_lane[e], node = in_.lane_node[lane];
      if (bounds_.limited() && bounds_.lane_late(lane, seconds[e - first], on_[lane] == 0, now_)) late_ = true;
      if (in_.lane_shared[lane] != 0) {
        serve_until_now(lane);
        leaves_[e] = served_[lane] + seconds[e - first];
        ++on_[lane];
      } else {
        due_at_[lane] = now_ + seconds[e - first];
        if (node >= 0 && at_[node] <= in_.buckets) {
          offset_[node] += seconds[e - first];
          due_[node] = next_due(node);
        }
      }
      behind_[e] = head_[lane];
      head_[lane] = e;
      if (in_.lane_shared[lane] != 0) foresee(lane);
    }
    if (start_ != nullptr) start_[instance] = now_;
  }

  // What each task on a shared lane has had of it: all have equal parts.
  void serve_until_now(int32_t lane) {
    if (on_[lane] == 0)
      served_[lane] = 0;
    else
      served_[lane] += (now_ - served_at_[lane]) / on_[lane];
    served_at_[lane] = now_;
  }

  double next_to_leave(int32_t lane) const {
    double least = kNever;
    for (int32_t e = head_[lane]; e >= 0; e = behind_[e]) least = std::min(least, leaves_[e]);
    return least;
  }

  void foresee(int32_t lane) {
    due_at_[lane] = on_[lane] == 0 ? kNever : std::max(now_, now_ + (next_to_leave(lane) - served_[lane]) * on_[lane]);
  }

  // A lane has done with a task, or with all that leave at the same moment.
  void leave(int32_t lane) {
    const bool shared = in_.lane_shared[lane] != 0;
    due_at_[lane] = kNever;
    if (shared) served_[lane] = next_to_leave(lane), served_at_[lane] = now_;
    for (int32_t* link = &head_[lane]; *link >= 0;) {
      const int32_t e = *link;
      if (shared && leaves_[e] > served_[lane]) {
        link = &behind_[e];
        continue;
      }
      *link = behind_[e];
      if (shared) --on_[lane];
      const int32_t line = line_of_[e];
      if (--unserved_[line] == 0) release(line);
    }
    if (shared) foresee(lane);
  }

  void release(int32_t line) {
    const int32_t instance = current_[line];
    const double latency = in_.latency[kind_[instance]];
    current_[line] = -1;
    look_at(line);
    if (latency == 0)
      over_[ended_now_++] = instance;
    else
      later_on(now_ + latency, instance);
  }

  void ended(int32_t instance) {
    const int32_t step = in_.steps == 1 ? 0 : instance / total_, b = bucket_[instance], task = kind_[instance];
    if (end_ != nullptr) end_[instance] = now_;
    --(in_.stale[b] != 0 ? open_stale_ : open_)[step];
    // `next` counts from the option's first task, which is the bucket's first instance.
    const int32_t base = step * total_ + first_[b];
    for (int32_t s = in_.task_next[task]; s < in_.task_next[task + 1]; ++s) met(base + in_.next[s]);
  }

  const cml_schedule& in_;
  Arena arena_;
  Bounds bounds_;
  bool late_ = false;
  int64_t begun_ = 0;
  int64_t words_, line_words_, heap_size_ = 0;
  int32_t total_ = 0, arrivals_ = 0, ended_now_ = 0;
  double now_ = 0, limit_ = 0;
  double *start_ = nullptr, *end_ = nullptr;
  int32_t *first_, *gated_, *kind_, *bucket_, *left_, *by_arrival_, *at_, *open_, *open_stale_, *kept_, *over_;
  int32_t *head_, *behind_, *line_of_, *on_, *current_, *unserved_;
  Event *heap_, *by_least_;
  uint64_t *waiting_, *check_;
  int64_t* low_;
  double *offset_, *due_, *due_at_, *served_, *served_at_, *leaves_;
};

}  // namespace
}  // namespace cml

extern "C" int64_t cml_schedule_scratch(const cml_schedule* in) { return cml::Run(*in, nullptr).scratch(); }

extern "C" double cml_schedule_run(const cml_schedule* in, const int32_t* choice, double limit, void* scratch, double* start,
                                   double* end) {
  return cml::Run(*in, scratch).run(choice, limit, start, end);
}

extern "C" int64_t cml_schedule_sweep(const cml_schedule* in, int32_t* choice, const int32_t* buckets, int32_t n,
                                      const uint8_t* open, const double* factor, double limit, double now, int32_t most,
                                      void* scratch, double* out) {
  cml::Run run(*in, scratch);
  int32_t* kept = run.kept();
  for (int32_t i = 0; i < n; ++i) kept[i] = choice[buckets[i]];
  const int32_t options = in->bucket_options[buckets[0] + 1] - in->bucket_options[buckets[0]];
  // Those that may be short come first: what they take is the limit of those behind them.
  cml::Event* waiting = run.by_least();
  int32_t tried = 0;
  double best[CML_SCHEDULE_MOST];
  std::fill(best, best + CML_SCHEDULE_MOST, cml::kNever);
  const auto times = [factor](int32_t option) { return factor == nullptr ? 1.0 : factor[option]; };
  const auto found = [&](int32_t option, double step_s) {
    out[option] = step_s;
    double price = step_s * times(option);
    for (double& each : best)
      if (price < each) std::swap(each, price);
    if (most > 0) limit = std::min(limit, best[most - 1] * (1 + CML_SCHEDULE_EQUAL));
  };
  for (int32_t j = 0; j < options; ++j) {
    out[j] = cml::kNever;
    if (open[j] == 0) continue;
    if (!std::isnan(now) && std::count(kept, kept + n, j) == n) {
      found(j, now);
      continue;
    }
    for (int32_t i = 0; i < n; ++i) choice[buckets[i]] = j;
    waiting[tried++] = {run.least(choice, limit / times(j)) * times(j), j};
  }
  std::sort(waiting, waiting + tried, [](const cml::Event& a, const cml::Event& b) {
    return a.at < b.at || (a.at == b.at && a.task < b.task);
  });
  for (int32_t k = 0; k < tried && waiting[k].at < cml::kNever; ++k) {
    for (int32_t i = 0; i < n; ++i) choice[buckets[i]] = waiting[k].task;
    found(waiting[k].task, run.run(choice, limit / times(waiting[k].task), nullptr, nullptr));
  }
  for (int32_t i = 0; i < n; ++i) choice[buckets[i]] = kept[i];
  return run.begun();
}

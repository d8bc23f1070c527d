// The glue of the planner's simulation: arrays are copied and their indices checked once, when a problem is made.
#include "glue.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

namespace glue {
namespace {

using Ints = std::vector<int32_t>;
using Reals = std::vector<double>;

class Schedule {
 public:
  explicit Schedule(nb::object p)
      : ready_(list<Reals>(p, "ready")), seconds_(list<Reals>(p, "seconds")), latency_(list<Reals>(p, "latency")),
        ready_order_(list<Ints>(p, "ready_order")), order_(list<Ints>(p, "order")), lane_node_(list<Ints>(p, "lane_node")),
        bucket_options_(list<Ints>(p, "bucket_options")), option_tasks_(list<Ints>(p, "option_tasks")),
        line_lanes_(list<Ints>(p, "line_lanes")), line_lane_(list<Ints>(p, "line_lane")), task_line_(list<Ints>(p, "task_line")),
        task_seconds_(list<Ints>(p, "task_seconds")), need_(list<Ints>(p, "need")),
        task_next_(list<Ints>(p, "task_next")), next_(list<Ints>(p, "next")), task_gates_(list<Ints>(p, "task_gates")),
        gate_(list<Ints>(p, "gate")) {
    for (const int32_t stale : list<Ints>(p, "stale")) stale_.push_back(stale != 0);
    for (const int32_t shared : list<Ints>(p, "lane_shared")) shared_.push_back(shared != 0);
    in_.buckets = size(order_);
    in_.nodes = nb::cast<int32_t>(p.attr("nodes"));
    in_.lanes = size(lane_node_);
    in_.lines = size(line_lanes_) - 1;
    in_.steps = nb::cast<int32_t>(p.attr("steps"));
    in_.priority = nb::cast<bool>(p.attr("priority")) ? 1 : 0;
    in_.tail = nb::cast<double>(p.attr("tail"));
    in_.most_tasks = nb::cast<int32_t>(p.attr("most_tasks"));
    check();
    in_.ready = ready_.data(), in_.ready_order = ready_order_.data(), in_.order = order_.data(), in_.stale = stale_.data();
    in_.lane_node = lane_node_.data(), in_.bucket_options = bucket_options_.data(), in_.option_tasks = option_tasks_.data();
    in_.lane_shared = shared_.data(), in_.line_lanes = line_lanes_.data(), in_.line_lane = line_lane_.data();
    in_.task_line = task_line_.data(), in_.task_seconds = task_seconds_.data(), in_.seconds = seconds_.data();
    in_.latency = latency_.data(), in_.need = need_.data(), in_.task_next = task_next_.data(), in_.next = next_.data();
    in_.task_gates = task_gates_.data(), in_.gate = gate_.data();
    scratch_.resize(static_cast<size_t>(cml_schedule_scratch(&in_) / 8 + 1));
  }

  double run(const Ints& choice, double limit) {
    check(choice);
    if (limit < HUGE_VAL) foresee();
    return told(cml_schedule_run(&in_, choice.data(), limit, scratch_.data(), nullptr, nullptr));
  }

  nb::tuple trace(const Ints& choice) {
    check(choice);
    size_t tasks = 0;
    for (int32_t b = 0; b < in_.buckets; ++b) {
      const auto option = static_cast<size_t>(bucket_options_[b] + choice[b]);
      tasks += static_cast<size_t>(option_tasks_[option + 1] - option_tasks_[option]);
    }
    Reals start(tasks * static_cast<size_t>(in_.steps)), end(start.size());
    const double step_s = told(cml_schedule_run(&in_, choice.data(), HUGE_VAL, scratch_.data(), start.data(), end.data()));
    return nb::make_tuple(step_s, start, end);
  }

  int64_t begun() const { return begun_; }

  Reals sweep(Ints choice, const Ints& buckets, double limit, double now, int32_t most, const std::optional<Ints>& only,
              const std::optional<Reals>& factors) {
    check(choice);
    if (buckets.empty()) wrong("buckets");
    below("buckets", buckets, 0, in_.buckets);
    Ints seen = buckets;
    std::sort(seen.begin(), seen.end());
    if (std::adjacent_find(seen.begin(), seen.end()) != seen.end()) wrong("buckets");
    for (const int32_t b : buckets)
      if (options(b) != options(buckets[0])) wrong("buckets");
    if (most < 0 || most > CML_SCHEDULE_MOST) wrong("most");
    std::vector<uint8_t> open(static_cast<size_t>(options(buckets[0])), only ? 0 : 1);
    if (only) {
      below("only", *only, 0, options(buckets[0]));
      for (const int32_t j : *only) open[static_cast<size_t>(j)] = 1;
    }
    if (factors && (factors->size() != open.size() ||
                    std::any_of(factors->begin(), factors->end(), [](double each) { return !(each > 0); })))
      wrong("factors");
    Reals out(open.size());
    foresee();
    begun_ += cml_schedule_sweep(&in_, choice.data(), buckets.data(), size(buckets), open.data(),
                                 factors ? factors->data() : nullptr, limit, now, most, scratch_.data(), out.data());
    for (const double step_s : out) told(step_s);
    return out;
  }

 private:
  template <class T>
  static T list(nb::object p, const char* name) {
    using Array = nb::ndarray<const typename T::value_type, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    Array array;
    if (!nb::try_cast<Array>(p.attr(name), array, false)) wrong(name);
    return T(array.data(), array.data() + array.size());
  }

  int32_t options(int32_t b) const { return bucket_options_[b + 1] - bucket_options_[b]; }

  template <class T>
  static int32_t size(const std::vector<T>& values) {
    return static_cast<int32_t>(values.size());
  }

  [[noreturn]] static void wrong(const char* name) { fail(PyExc_ValueError, "schedule: %s does not fit the rest", name); }

  static double told(double step_s) {
    if (step_s < 0) fail(PyExc_ValueError, "the tasks of an option wait for one another in a circle");
    return step_s;
  }

  // n lists whose edges rise from 0 to the length of what they cut.
  static void edges(const char* name, const Ints& values, size_t n, size_t cut) {
    if (values.size() != n + 1 || values.front() != 0 || static_cast<size_t>(values.back()) != cut) wrong(name);
    for (size_t i = 0; i < n; ++i)
      if (values[i] > values[i + 1]) wrong(name);
  }

  static void below(const char* name, const Ints& values, int32_t least, int32_t limit) {
    for (const int32_t value : values)
      if (value < least || value >= limit) wrong(name);
  }

  static void times(const char* name, const Reals& values) {
    for (const double value : values)
      if (!(value >= 0 && std::isfinite(value))) fail(PyExc_ValueError, "schedule: %s holds a time that is negative or not finite", name);
  }

  void check() const {
    const size_t options = option_tasks_.empty() ? 0 : option_tasks_.size() - 1, tasks = need_.size();
    const auto buckets = static_cast<size_t>(in_.buckets), nodes = static_cast<size_t>(in_.nodes);
    if (in_.nodes < 1 || in_.steps < 1 || stale_.size() != buckets) wrong("stale");
    if (ready_.size() != nodes * (buckets + 1)) wrong("ready");
    if (ready_order_.size() != nodes * buckets) wrong("ready_order");
    if (latency_.size() != tasks) wrong("latency");
    if (shared_.size() != lane_node_.size()) wrong("lane_shared");
    if (in_.lines < 0) wrong("line_lanes");
    edges("bucket_options", bucket_options_, buckets, options);
    edges("option_tasks", option_tasks_, options, tasks);
    edges("line_lanes", line_lanes_, static_cast<size_t>(in_.lines), line_lane_.size());
    edges("task_seconds", task_seconds_, tasks, seconds_.size());
    edges("task_next", task_next_, tasks, next_.size());
    edges("task_gates", task_gates_, tasks, gate_.size());
    below("ready_order", ready_order_, 0, in_.buckets);
    below("order", order_, 0, in_.buckets);
    below("line_lane", line_lane_, 0, in_.lanes);
    lines();
    below("lane_node", lane_node_, -1, in_.nodes);
    below("gate", gate_, 0, in_.nodes);
    for (size_t o = 0; o < options; ++o)
      for (int32_t i = task_next_[option_tasks_[o]]; i < task_next_[option_tasks_[o + 1]]; ++i)
        if (next_[i] < 0 || next_[i] >= option_tasks_[o + 1] - option_tasks_[o]) wrong("next");
    int64_t most = 0;
    for (size_t b = 0; b < buckets; ++b) {
      int32_t longest = 0;
      for (int32_t o = bucket_options_[b]; o < bucket_options_[b + 1]; ++o)
        longest = std::max(longest, option_tasks_[o + 1] - option_tasks_[o]);
      most += longest;
    }
    if (in_.most_tasks < most || most * in_.steps > INT32_MAX / 2) wrong("most_tasks");
    Ints seen = order_;
    std::sort(seen.begin(), seen.end());
    for (int32_t b = 0; b < in_.buckets; ++b)
      if (seen[static_cast<size_t>(b)] != b) wrong("order");
    times("ready", ready_), times("seconds", seconds_), times("latency", latency_);
  }

  // A lane that is not shared is a line of its own; a task has one time for each lane of its line.
  void lines() const {
    std::vector<uint8_t> used(shared_.size());
    for (int32_t line = 0; line < in_.lines; ++line) {
      const int32_t first = line_lanes_[line], last = line_lanes_[line + 1];
      if (first == last) wrong("line_lanes");
      for (int32_t i = first; i < last; ++i) {
        const auto lane = static_cast<size_t>(line_lane_[i]);
        if (shared_[lane] == 0 && (last - first > 1 || used[lane]++ != 0)) wrong("line_lane");
      }
    }
    if (task_line_.size() != need_.size()) wrong("task_line");
    below("task_line", task_line_, -1, in_.lines);
    for (size_t task = 0; task < task_line_.size(); ++task) {
      const int32_t line = task_line_[task], lanes = line < 0 ? 0 : line_lanes_[line + 1] - line_lanes_[line];
      if (task_seconds_[task + 1] - task_seconds_[task] != lanes) wrong("task_seconds");
    }
  }

  void check(const Ints& choice) const {
    if (size(choice) != in_.buckets) wrong("choice");
    for (int32_t b = 0; b < in_.buckets; ++b)
      if (choice[b] < 0 || choice[b] >= options(b)) wrong("choice");
  }

  // Only for what is searched: what is simulated once needs no bounds.
  void foresee() {
    if (in_.head != nullptr) return;
    head_.resize(need_.size()), rest_.resize(need_.size());
    cml_schedule_chains(&in_, head_.data(), rest_.data());
    in_.head = head_.data(), in_.rest = rest_.data();
  }

  cml_schedule in_{};
  int64_t begun_ = 0;
  Reals ready_, seconds_, latency_, head_, rest_;
  Ints ready_order_, order_, lane_node_, bucket_options_, option_tasks_, line_lanes_, line_lane_, task_line_, task_seconds_,
      need_, task_next_, next_, task_gates_, gate_;
  std::vector<uint8_t> stale_, shared_;
  Reals scratch_;
};

}  // namespace

void bind_schedule(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Schedule>(m, "Schedule")
      .def(nb::init<nb::object>(), "problem"_a)
      .def("run", &Schedule::run, "choice"_a, "limit"_a = HUGE_VAL)
      .def("trace", &Schedule::trace, "choice"_a)
      .def("sweep", &Schedule::sweep, "choice"_a, "buckets"_a, "limit"_a, "now_s"_a = std::nan(""), "most"_a = 0,
           "only"_a = nb::none(), "factors"_a = nb::none())
      .def_prop_ro("begun", &Schedule::begun);
}

}  // namespace glue

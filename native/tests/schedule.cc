// Runs the planner's simulation on problems read from stdin, each array in a block of exactly its size, and prints the seconds.
// A problem is lines of "NAME N VALUE...", under the names of cml_schedule, then "run N CHOICE..." and any number of
// "sweep N BUCKET... LIMIT MOST", which follow the run's choice. tests/sim/test_native_schedule.py writes them and compares with the twin.
#include "commlayer.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using Words = std::vector<std::string>;

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(2);
}

template <class T>
T number(const std::string& word) {
  if constexpr (std::is_floating_point_v<T>)
    return std::strtod(word.c_str(), nullptr);
  else
    return static_cast<T>(std::stol(word));
}

// Exactly these values on the heap, where one byte beyond them is seen.
template <class T>
std::shared_ptr<T[]> block(const Words& words) {
  std::shared_ptr<T[]> made(new T[words.size()]);
  for (size_t i = 0; i < words.size(); ++i) made[i] = number<T>(words[i]);
  return made;
}

struct Problem {
  cml_schedule in{};
  std::vector<std::shared_ptr<void>> blocks;
};

template <auto kMember>
void set(Problem& p, const Words& words) {
  auto& field = p.in.*kMember;
  using Field = std::remove_reference_t<decltype(field)>;
  if constexpr (std::is_pointer_v<Field>) {
    auto made = block<std::remove_const_t<std::remove_pointer_t<Field>>>(words);
    field = made.get();
    p.blocks.push_back(std::move(made));
  } else {
    field = number<Field>(words.at(0));
  }
}

#define FIELD(name) {#name, set<&cml_schedule::name>}
const std::map<std::string, void (*)(Problem&, const Words&)> kFields = {
    FIELD(buckets),    FIELD(nodes),      FIELD(lanes),     FIELD(steps),     FIELD(priority),   FIELD(ready),
    FIELD(ready_order), FIELD(order),     FIELD(stale),     FIELD(lane_node), FIELD(tail),       FIELD(bucket_options),
    FIELD(lane_shared), FIELD(lines),     FIELD(line_lanes), FIELD(line_lane), FIELD(task_line), FIELD(task_seconds),
    FIELD(option_tasks), FIELD(seconds),  FIELD(latency),   FIELD(need),
    FIELD(task_next),  FIELD(next),       FIELD(task_gates), FIELD(gate),     FIELD(most_tasks),
};

int32_t tasks(const cml_schedule& in, const int32_t* choice) {
  int32_t total = 0;
  for (int32_t b = 0; b < in.buckets; ++b) {
    const int32_t option = in.bucket_options[b] + choice[b];
    total += in.option_tasks[option + 1] - in.option_tasks[option];
  }
  return total;
}

void print(const double* values, size_t n) {
  for (size_t i = 0; i < n; ++i) std::printf(" %a", values[i]);
}

void run(const Problem& p, const int32_t* choice) {
  std::unique_ptr<char[]> scratch(new char[static_cast<size_t>(cml_schedule_scratch(&p.in))]);
  const auto n = static_cast<size_t>(tasks(p.in, choice)) * static_cast<size_t>(p.in.steps);
  std::unique_ptr<double[]> start(new double[n]), end(new double[n]);
  const double step_s = cml_schedule_run(&p.in, choice, INFINITY, scratch.get(), start.get(), end.get());
  std::printf("run %a", step_s);
  print(start.get(), n);
  print(end.get(), n);
  std::printf("\n");
  const double again_s = cml_schedule_run(&p.in, choice, INFINITY, scratch.get(), nullptr, nullptr);
  if (!(again_s == step_s)) fail("without times the step is another");
  const double limited_s = cml_schedule_run(&p.in, choice, step_s, scratch.get(), nullptr, nullptr);
  if (step_s >= 0 && !(limited_s == step_s)) fail("a step that takes as long as its limit is not reported");
}

void sweep(const Problem& problem, int32_t* choice, Words words) {
  Problem p = problem;
  const auto options = p.in.bucket_options[p.in.buckets];
  const auto n_tasks = static_cast<size_t>(p.in.option_tasks[options]);
  std::unique_ptr<double[]> head(new double[n_tasks]), rest(new double[n_tasks]);
  cml_schedule_chains(&p.in, head.get(), rest.get());
  p.in.head = head.get(), p.in.rest = rest.get();
  const auto most = number<int32_t>(words.back());
  words.pop_back();
  const double limit = number<double>(words.back());
  words.pop_back();
  const auto buckets = block<int32_t>(words);
  std::unique_ptr<char[]> scratch(new char[static_cast<size_t>(cml_schedule_scratch(&p.in))]);
  const auto n = static_cast<size_t>(p.in.bucket_options[buckets[0] + 1] - p.in.bucket_options[buckets[0]]);
  std::unique_ptr<double[]> out(new double[n]);
  const std::vector<int32_t> before(choice, choice + p.in.buckets);
  const std::vector<uint8_t> open(n, 1);
  cml_schedule_sweep(&p.in, choice, buckets.get(), static_cast<int32_t>(words.size()), open.data(), nullptr, limit, NAN,
                     most, scratch.get(), out.get());
  if (!std::equal(before.begin(), before.end(), choice)) fail("a sweep left another choice behind");
  std::printf("sweep");
  print(out.get(), n);
  std::printf("\n");
}

}  // namespace

int main() {
  Problem problem;
  std::shared_ptr<int32_t[]> choice;
  std::string name;
  for (size_t n = 0; std::cin >> name >> n;) {
    Words words(n);
    for (std::string& word : words) std::cin >> word;
    if (name == "run") {
      choice = block<int32_t>(words);
      run(problem, choice.get());
    } else if (name == "sweep") {
      sweep(problem, choice.get(), std::move(words));
    } else if (const auto found = kFields.find(name); found != kFields.end()) {
      found->second(problem, words);
    } else {
      fail("cml_schedule has no " + name + " that this driver knows");
    }
  }
}

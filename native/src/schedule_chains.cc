// What lies before and behind each task in its own option: the longest chains, which bounds are made of. Knows no choice.
#include "schedule_bounds.h"

extern "C" void cml_schedule_chains(const cml_schedule* in, double* head, double* rest) {
  const int32_t options = in->bucket_options[in->buckets];
  for (int32_t option = 0; option < options; ++option) {
    const int32_t first = in->option_tasks[option], last = in->option_tasks[option + 1];
    std::fill(head + first, head + last, 0.0);
    // Edges to tasks before it, which only a circle has, are left out: less is known then, and nothing wrong.
    for (int32_t task = first; task < last; ++task)
      for (int32_t s = in->task_next[task]; s < in->task_next[task + 1]; ++s)
        if (const int32_t next = first + in->next[s]; next > task)
          head[next] = std::max(head[next], head[task] + cml::longest(*in, task) + in->latency[task]);
    for (int32_t task = last - 1; task >= first; --task) {
      double after = 0;
      for (int32_t s = in->task_next[task]; s < in->task_next[task + 1]; ++s)
        if (const int32_t next = first + in->next[s]; next > task) after = std::max(after, cml::longest(*in, next) + rest[next]);
      rest[task] = in->latency[task] + after;
    }
  }
}

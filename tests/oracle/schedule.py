"""The planner's simulation again, in plain Python: independent of the native loop, and equal to it bit for bit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from commlayer.errors import InvalidInput
from commlayer.planner.problem import Problem


class PortableSchedule:
    """The same simulation without a compiler, about 100 times slower."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem._replace(**{name: value.tolist() for name, value in problem._asdict().items()
                                           if isinstance(value, np.ndarray)})

    def run(self, choice: Sequence[int], limit: float = math.inf) -> float:
        del limit
        return Twin(self.problem, choice).run()

    def trace(self, choice: Sequence[int]) -> tuple[float, list[float], list[float]]:
        twin = Twin(self.problem, choice)
        step_s = twin.run()
        return step_s, twin.start, twin.end

    def sweep(
        self, choice: Sequence[int], buckets: Sequence[int], limit: float, now_s: float = math.nan, most: int = 0,
        only: Sequence[int] | None = None, factors: Sequence[float] | None = None,
    ) -> list[float]:
        del limit, now_s, most, factors
        edges = self.problem.bucket_options
        changed = list(choice)
        seconds = []
        for option in range(edges[buckets[0] + 1] - edges[buckets[0]]):
            for b in buckets:
                changed[b] = option
            seconds.append(self.run(changed) if only is None or option in only else math.inf)
        return seconds


CIRCLE = "the tasks of an option wait for one another in a circle"


class Twin:
    """One simulation. `start` and `end`: seconds by instance, that is by step, then by task in the order of buckets."""

    def __init__(self, problem: Problem, choice: Sequence[int]) -> None:
        self.p = problem
        self.first = [0] * problem.buckets
        self.kind: list[int] = []
        self.bucket: list[int] = []
        for b in problem.order:
            option = problem.bucket_options[b] + choice[b]
            self.first[b] = len(self.kind)
            tasks = range(problem.option_tasks[option], problem.option_tasks[option + 1])
            self.kind += tasks
            self.bucket += [b] * len(tasks)
        self.total = len(self.kind)
        everything = self.total * problem.steps
        self.left = [problem.need[kind] for kind in self.kind] * problem.steps
        late = sum(problem.stale[b] for b in self.bucket)
        self.open = [[self.total - late, late] for _ in range(problem.steps)]
        self.start, self.end = [math.nan] * everything, [math.nan] * everything
        lines = len(problem.line_lanes) - 1
        self.current = [-1] * lines
        self.unserved = [0] * lines
        self.waiting: list[list[tuple[int, int]]] = [[] for _ in range(lines)]
        self.check: set[int] = set()
        self.on: list[list[tuple[float, int]]] = [[] for _ in problem.lanes]
        """By lane: when each task on it leaves (in `shared_s` if the lane is shared), and the task's line."""
        self.shared_s = [0.0] * len(problem.lanes)
        self.shared_until = [0.0] * len(problem.lanes)
        self.due_at = [math.inf] * len(problem.lanes)
        self.later: list[tuple[float, int]] = []
        """Instances that end this long after their line is free again."""
        self.over: list[int] = []
        self.at = [0] * problem.nodes
        self.offset = [0.0] * problem.nodes
        self.now = 0.0
        self.arrivals = 0

    def run(self) -> float:
        """Seconds of the last step. With stale transfers, the mean of the last two, which may alternate."""
        begun = last = before = 0.0
        for step in range(self.p.steps):
            over = self._step(step, begun)
            before, last = last, over + self.p.tail - begun
            begun = over + self.p.tail
        return (before + last) / 2 if self.p.steps > 2 else last

    def _step(self, step: int, begun: float) -> float:
        p = self.p
        self.at = [0] * p.nodes
        self.offset = [begun] * p.nodes
        computing = p.nodes
        self.now = begun
        while computing or self.open[step][0] or (step and self.open[step - 1][1]):
            self.now = min([*map(self._due, range(p.nodes)), *self.due_at, *(at for at, _ in self.later[:1])])
            if self.now == math.inf:
                raise InvalidInput("E-PLAN-INPUT", CIRCLE)
            for n in range(p.nodes):
                while self._due(n) <= self.now:
                    if self.at[n] < p.buckets:
                        self._gradient(step, p.ready_order[n * p.buckets + self.at[n]], n)
                    else:
                        computing -= 1
                    self.at[n] += 1
            self.over = []
            for lane, at in enumerate(self.due_at):
                if at <= self.now:
                    self._leave(lane)
            while self.later and self.later[0][0] <= self.now:
                self.over.append(heapq.heappop(self.later)[1])
            for instance in sorted(self.over):
                self._ended(instance)
            self._serve()
        return self.now

    def _due(self, n: int) -> float:
        p, at = self.p, self.at[n]
        if at > p.buckets:
            return math.inf
        which = p.ready_order[n * p.buckets + at] if at < p.buckets else p.buckets
        return self.offset[n] + p.ready[n * (p.buckets + 1) + which]

    def _gradient(self, step: int, b: int, node: int) -> None:
        i = self.first[b]
        while i < self.total and self.bucket[i] == b:
            kind = self.kind[i]
            if node in self.p.gate[self.p.task_gates[kind] : self.p.task_gates[kind + 1]]:
                self._arrived(step * self.total + i)
            i += 1

    def _arrived(self, instance: int) -> None:
        self.left[instance] -= 1
        if self.left[instance] > 0:
            return
        kind = self.kind[instance % self.total]
        line = self.p.task_line[kind]
        if line < 0:
            self.start[instance] = self.now
            heapq.heappush(self.later, (self.now + self.p.latency[kind], instance))
            return
        key = instance
        if not self.p.priority:
            key, self.arrivals = self.arrivals, self.arrivals + 1
        heapq.heappush(self.waiting[line], (key, instance))
        self.check.add(line)

    def _serve(self) -> None:
        """Each free link takes the first of its waiting tasks."""
        for line in sorted(self.check):
            if self.current[line] < 0 and self.waiting[line]:
                self._begin(heapq.heappop(self.waiting[line])[1], line)
        self.check.clear()

    def _begin(self, instance: int, line: int) -> None:
        p, kind = self.p, self.kind[instance % self.total]
        lanes = p.line_lane[p.line_lanes[line] : p.line_lanes[line + 1]]
        self.current[line], self.unserved[line] = instance, len(lanes)
        for lane, seconds in zip(lanes, p.seconds[p.task_seconds[kind] : p.task_seconds[kind + 1]], strict=True):
            if p.lane_shared[lane]:
                self._serve_until_now(lane)
                self.on[lane].append((self.shared_s[lane] + seconds, line))
                self._next_departure(lane)
                continue
            self.on[lane].append((0.0, line))
            self.due_at[lane] = self.now + seconds
            node = p.lane_node[lane]
            if node >= 0 and self.at[node] <= p.buckets:
                self.offset[node] += seconds
        self.start[instance] = self.now

    def _serve_until_now(self, lane: int) -> None:
        on = len(self.on[lane])
        self.shared_s[lane] = self.shared_s[lane] + (self.now - self.shared_until[lane]) / on if on else 0.0
        self.shared_until[lane] = self.now

    def _next_departure(self, lane: int) -> None:
        """Computes when the next task leaves a shared lane."""
        on = self.on[lane]
        left_s = (min(on)[0] - self.shared_s[lane]) * len(on) if on else math.inf
        self.due_at[lane] = max(self.now, self.now + left_s)

    def _leave(self, lane: int) -> None:
        """Ends a lane's part of a task, or of all tasks that leave at the same moment."""
        shared, first = self.p.lane_shared[lane], min(self.on[lane])[0]
        gone = [line for at, line in self.on[lane] if at <= first]
        self.on[lane] = [(at, line) for at, line in self.on[lane] if at > first]
        if shared:
            self.shared_s[lane], self.shared_until[lane] = first, self.now
            self._next_departure(lane)
        else:
            self.due_at[lane] = math.inf
        for line in gone:
            self.unserved[line] -= 1
            if self.unserved[line] == 0:
                self._release(line)

    def _release(self, line: int) -> None:
        instance, self.current[line] = self.current[line], -1
        latency = self.p.latency[self.kind[instance % self.total]]
        self.check.add(line)
        if latency:
            heapq.heappush(self.later, (self.now + latency, instance))
        else:
            self.over.append(instance)

    def _ended(self, instance: int) -> None:
        step, i = divmod(instance, self.total)
        kind, b = self.kind[i], self.bucket[i]
        self.end[instance] = self.now
        self.open[step][self.p.stale[b]] -= 1
        base = step * self.total + self.first[b]
        for place in self.p.next[self.p.task_next[kind] : self.p.task_next[kind + 1]]:
            self._arrived(base + place)

"""The event loop of the simulation in Python: what native/src/schedule.cc does, bit for bit. Knows no paths and no prices.

A lane is held by one task at a time; a task begins when all its lanes are free. Of the tasks that wait at a lane the first in
order begins: by the urgency of buckets, or by readiness. A task that finds one of its lanes held waits there, and meanwhile
leaves its other lanes to others. Work on a compute lane stops its node's backward pass, so all later gradients of it shift.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from commlayer.planner.problem import Problem

CIRCLE = "the tasks of an option wait for one another in a circle"


class Twin:
    """One simulation. `start` and `end`: seconds by instance, that is by step and then by task in the order of buckets."""

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
        self.busy = [False] * len(problem.lanes)
        self.waiting: list[list[tuple[int, int]]] = [[] for _ in problem.lanes]
        self.check: set[int] = set()
        self.events: list[tuple[float, int, int]] = []
        """(when, the instance that ends or -1, the lane that is free again or -1)"""
        self.at = [0] * problem.nodes
        self.offset = [0.0] * problem.nodes
        self.now = 0.0
        self.arrivals = 0

    def run(self) -> float:
        """Seconds of the last step."""
        begun = last = 0.0
        for step in range(self.p.steps):
            over = self._step(step, begun)
            last = over + self.p.tail - begun
            begun = over + self.p.tail
        return last

    def _step(self, step: int, begun: float) -> float:
        p, events = self.p, self.events
        self.at = [0] * p.nodes
        self.offset = [begun] * p.nodes
        computing = p.nodes
        self.now = begun
        while computing or self.open[step][0] or (step and self.open[step - 1][1]):
            self.now = min([self._due(n) for n in range(p.nodes)] + [e[0] for e in events[:1]])
            if self.now == math.inf:
                raise ValueError(CIRCLE)
            for n in range(p.nodes):
                while self._due(n) <= self.now:
                    if self.at[n] < p.buckets:
                        self._gradient(step, p.ready_order[n * p.buckets + self.at[n]], n)
                    else:
                        computing -= 1
                    self.at[n] += 1
            over = []
            while events and events[0][0] <= self.now:
                _, instance, lane = heapq.heappop(events)
                if lane >= 0:
                    self.busy[lane] = False
                    self.check.add(lane)
                else:
                    over.append(instance)
            for instance in sorted(over):
                self._ended(instance)
            while self._serve():
                pass
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
                self._met(step * self.total + i)
            i += 1

    def _met(self, instance: int) -> None:
        self.left[instance] -= 1
        if self.left[instance] > 0:
            return
        kind = self.kind[instance % self.total]
        if self.p.task_lanes[kind] == self.p.task_lanes[kind + 1]:
            self._begin(instance, kind)
            return
        key = instance
        if not self.p.priority:
            key, self.arrivals = self.arrivals, self.arrivals + 1
        lane = self.p.lane[self.p.task_lanes[kind]]
        heapq.heappush(self.waiting[lane], (key, instance))
        if not self.busy[lane]:
            self.check.add(lane)

    def _serve(self) -> bool:
        """Of all tasks that wait at a free lane the first in order: it begins, or goes to wait at another lane that is held."""
        self.check = {lane for lane in self.check if self.waiting[lane] and not self.busy[lane]}
        if not self.check:
            return False
        key, instance = heapq.heappop(self.waiting[min(self.check, key=lambda lane: self.waiting[lane][0])])
        kind = self.kind[instance % self.total]
        lanes = self.p.lane[self.p.task_lanes[kind] : self.p.task_lanes[kind + 1]]
        held = next((other for other in lanes if self.busy[other]), -1)
        if held < 0:
            self._begin(instance, kind)
        else:
            heapq.heappush(self.waiting[held], (key, instance))
        return True

    def _begin(self, instance: int, kind: int) -> None:
        p = self.p
        span = slice(p.task_lanes[kind], p.task_lanes[kind + 1])
        held = list(zip(p.lane[span], p.seconds[span], strict=True))
        for lane, seconds in held:
            self.busy[lane] = True
            heapq.heappush(self.events, (self.now + seconds, -1, lane))
            node = p.lane_node[lane]
            if node >= 0 and self.at[node] <= p.buckets:
                self.offset[node] += seconds
        longest = max((seconds for _, seconds in held), default=0.0)
        heapq.heappush(self.events, (self.now + longest + p.latency[kind], instance, -1))
        self.start[instance] = self.now

    def _ended(self, instance: int) -> None:
        step, i = divmod(instance, self.total)
        kind, b = self.kind[i], self.bucket[i]
        self.end[instance] = self.now
        self.open[step][self.p.stale[b]] -= 1
        base = step * self.total + self.first[b]
        for place in self.p.next[self.p.task_next[kind] : self.p.task_next[kind + 1]]:
            self._met(base + place)

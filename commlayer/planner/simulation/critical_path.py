"""Finds the buckets that delay a step, by walking back from its end along what waited for what.

A bucket before a gap on the lanes is not among them: if it were faster, the gap would only be wider (Espresso's bubbles).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from commlayer.planner.pricing.problem import Problem

CLOSE = 1e-9
"""Ends closer than this fraction of the step count as simultaneous."""


def critical(problem: Problem, choice: Sequence[int], starts: Sequence[float], ends: Sequence[float]) -> set[int]:
    """The critical buckets; all buckets if steps overlap."""
    everything = set(range(problem.buckets))
    if problem.steps > 1:
        return everything
    kinds, buckets = laid_out(problem, choice)
    lines = [problem.task_line[k] for k in kinds]
    over = ((i, problem.lane_node[lane]) for i, line in enumerate(lines) for lane in _lanes(problem, line))
    stopping = [(i, node) for i, node in over if node >= 0]
    slack = CLOSE * max(ends, default=0.0)
    free = [end - problem.latency[kind] for end, kind in zip(ends, kinds, strict=True)]
    traffic = _Traffic(problem, lines, starts, free)
    before = _predecessors(problem, kinds, buckets)
    last = max(ends, default=0.0)
    waiting = [i for i, end in enumerate(ends) if end >= last - slack]
    seen = set(waiting)
    while waiting:
        i = waiting.pop()
        causes = [j for j in before[i] if ends[j] >= starts[i] - slack] + traffic.beside(i, slack)
        gates = problem.gate[problem.task_gates[kinds[i]] : problem.task_gates[kinds[i] + 1]]
        # Earlier coding on the node's GPU has delayed this gradient.
        causes += [j for j, node in stopping if node in gates and starts[j] < starts[i]] if gates else []
        for j in causes:
            if j not in seen:
                seen.add(j)
                waiting.append(j)
    return {buckets[i] for i in seen}


class _Traffic:
    """Tasks that occupied or shared the lanes of a task. A line takes one task at a time, so its ends are in the order of
    its starts."""

    def __init__(self, problem: Problem, lines: Sequence[int], starts: Sequence[float], free: Sequence[float]) -> None:
        self._lines, self._starts, self._free = lines, starts, free
        self._on: dict[int, list[int]] = {}
        for i in sorted(range(len(lines)), key=starts.__getitem__):
            self._on.setdefault(lines[i], []).append(i)
        self._on.pop(-1, None)
        self._place = {i: place for on in self._on.values() for place, i in enumerate(on)}
        self._ends = {line: [free[i] for i in on] for line, on in self._on.items()}
        over: dict[int, list[int]] = {}
        for line in self._on:
            for lane in _lanes(problem, line):
                over.setdefault(lane, []).append(line)
        self._beside = {line: sorted({o for lane in _lanes(problem, line) for o in over[lane]} - {line}) for line in self._on}

    def beside(self, i: int, slack: float) -> list[int]:
        """The task that left this line when task i began, and all tasks that shared a lane with it."""
        line, start, end = self._lines[i], self._starts[i], self._free[i]
        if line < 0:
            return []
        place = self._place[i]
        tasks = self._on[line][place - 1 : place] if place and self._ends[line][place - 1] >= start - slack else []
        for other in self._beside[line]:
            on = self._on[other]
            at = bisect.bisect_right(self._ends[other], start + slack)
            while at < len(on) and self._starts[on[at]] < end - slack:
                tasks.append(on[at])
                at += 1
        return tasks


def _lanes(problem: Problem, line: int) -> list[int]:
    return problem.line_lane[problem.line_lanes[line] : problem.line_lanes[line + 1]] if line >= 0 else []


def laid_out(problem: Problem, choice: Sequence[int]) -> tuple[list[int], list[int]]:
    """Task and bucket of each instance of a step, in the simulation's numbering."""
    kinds: list[int] = []
    buckets: list[int] = []
    for b in problem.order:
        option = problem.bucket_options[b] + choice[b]
        kinds += range(problem.option_tasks[option], problem.option_tasks[option + 1])
        buckets += [b] * (len(kinds) - len(buckets))
    return kinds, buckets


def _predecessors(problem: Problem, kinds: list[int], buckets: list[int]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in kinds]
    first = 0
    for i, kind in enumerate(kinds):
        if i and buckets[i] != buckets[i - 1]:
            first = i
        for place in problem.next[problem.task_next[kind] : problem.task_next[kind + 1]]:
            before[first + place].append(i)
    return before

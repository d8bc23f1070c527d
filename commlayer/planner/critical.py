"""Which buckets hold a step up: those on the way back from its end through what waited for what. Knows no paths, no choices.

A bucket before a gap on the lanes is not among them: were it faster, the gap would only be wider (Espresso's bubbles).
"""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.planner.problem import Problem

CLOSE = 1e-9
"""Ends this near (as a fraction of the step) count as one moment."""


def critical(problem: Problem, choice: Sequence[int], starts: Sequence[float], ends: Sequence[float]) -> set[int]:
    """The buckets; all of them where steps overlap."""
    everything = set(range(problem.buckets))
    if problem.steps > 1:
        return everything
    kinds, buckets = laid_out(problem, choice)
    lanes = [problem.lane[problem.task_lanes[k] : problem.task_lanes[k + 1]] for k in kinds]
    stopping = [(i, problem.lane_node[lane]) for i, each in enumerate(lanes) for lane in each if problem.lane_node[lane] >= 0]
    slack = CLOSE * max(ends, default=0.0)
    freed: dict[tuple[int, int], list[int]] = {}
    """Tasks by lane and the moment, in units of slack, at which they leave it."""
    for i, kind in enumerate(kinds):
        for edge in range(problem.task_lanes[kind], problem.task_lanes[kind + 1]):
            moment = starts[i] + problem.seconds[edge]
            freed.setdefault((problem.lane[edge], _tick(moment, slack)), []).append(i)
    before = _predecessors(problem, kinds, buckets)
    last = max(ends, default=0.0)
    waiting = [i for i, end in enumerate(ends) if end >= last - slack]
    seen = set(waiting)
    while waiting:
        i = waiting.pop()
        tick = _tick(starts[i], slack)
        held = [j for lane in lanes[i] for near in (-1, 0, 1) for j in freed.get((lane, tick + near), ())]
        causes = [j for j in before[i] if ends[j] >= starts[i] - slack] + held
        gates = problem.gate[problem.task_gates[kinds[i]] : problem.task_gates[kinds[i] + 1]]
        # What was coded on the node's GPU before has made this gradient late.
        causes += [j for j, node in stopping if node in gates and starts[j] < starts[i]] if gates else []
        for j in causes:
            if j not in seen:
                seen.add(j)
                waiting.append(j)
    return {buckets[i] for i in seen}


def laid_out(problem: Problem, choice: Sequence[int]) -> tuple[list[int], list[int]]:
    """Task and bucket of each instance of a step, in the order in which the simulation numbers them."""
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


def _tick(moment: float, slack: float) -> int:
    return round(moment / slack) if slack else 0

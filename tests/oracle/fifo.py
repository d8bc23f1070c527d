"""Espresso's timeline model: every lane is a FIFO queue, and GPU codecs delay the backward pass.

A reference for its two passes, simple enough to check by hand. commlayer's plans are priced by the full simulator.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from commlayer.planner.costs import Prices
from commlayer.planner.tree import Path

COMPUTE = "compute:"
BACKWARD = -1


class TimedTask(NamedTuple):
    """A task of a bucket of some size: its lanes with seconds, and the tasks that it waits for."""

    lanes: tuple[tuple[str, float], ...]
    after: tuple[int, ...] = ()
    latency_s: float = 0.0
    op: str = ""
    nbytes: int = 0


def timed(prices: Prices, path: Path | str, numel: int, codec: str, **how: Any) -> tuple[TimedTask, ...]:
    """The tasks of a path at a bucket's size. `how`: server, owner, down, by_node."""
    return tuple([
        TimedTask(tuple([(lane, line(numel)) for lane, line in task.lanes]), task.after, task.latency(numel), task.op,
                  int(task.nbytes(numel) + 0.5)) for task in prices.template(path, codec, **how).tasks])


class Played(NamedTuple):
    """Timeline of a strategy; times count from the start of the backward pass."""

    done_s: float
    """End of the backward pass and of all exchanges."""
    before_bubbles: frozenset[int]
    """Tensors that ended before a bubble, a gap in which no task ran. Ending earlier would not help."""


def play(work_s: Sequence[float], tensors: Sequence[Sequence[TimedTask]]) -> Played:
    """`work_s[i]` is the compute time of the backward pass between tensor i-1 and tensor i, in backward order.

    Of tasks that become ready together, codec work runs before the backward pass, and earlier tensors before later ones.
    """
    free: dict[str, float] = {}
    ends: list[dict[int, float]] = [{} for _ in tensors]
    left = [[len(task.after) for task in tasks] for tasks in tensors]
    followers = [_followers(tasks) for tasks in tensors]
    spans: list[tuple[float, float, int]] = []
    backward_s = done_s = 0.0
    # (ready, 1 if backward, tensor, task)
    queue: list[tuple[float, int, int, int]] = [(0.0, 1, 0, BACKWARD)] if tensors else []
    lanes = {lane for tasks in tensors for task in tasks for lane, _ in task.lanes if lane.startswith(COMPUTE)}
    while queue:
        ready_s, _, tensor, index = heapq.heappop(queue)
        if index == BACKWARD:
            # All nodes run at one pace: the collectives wait for the slowest anyway.
            backward_s = max([ready_s, *(free.get(lane, 0.0) for lane in lanes)]) + work_s[tensor]
            for lane in lanes:
                free[lane] = backward_s
            for i, task in enumerate(tensors[tensor]):
                if not task.after:
                    heapq.heappush(queue, (backward_s, 0, tensor, i))
            if tensor + 1 < len(tensors):
                heapq.heappush(queue, (backward_s, 1, tensor + 1, BACKWARD))
            continue
        task = tensors[tensor][index]
        start_s = max([ready_s, *(free.get(lane, 0.0) for lane, _ in task.lanes)])
        longest_s = 0.0
        for lane, seconds in task.lanes:
            free[lane] = start_s + seconds
            longest_s = max(longest_s, seconds)
        ends[tensor][index] = end_s = start_s + longest_s + task.latency_s
        spans.append((ready_s, end_s, tensor))
        done_s = max(done_s, end_s)
        for i in followers[tensor].get(index, ()):
            left[tensor][i] -= 1
            if not left[tensor][i]:
                heapq.heappush(queue, (max(ends[tensor][j] for j in tensors[tensor][i].after), 0, tensor, i))
    return Played(max(done_s, backward_s), _before_bubbles(spans))


def _followers(tasks: Sequence[TimedTask]) -> Mapping[int, list[int]]:
    result: dict[int, list[int]] = {}
    for i, task in enumerate(tasks):
        for before in task.after:
            result.setdefault(before, []).append(i)
    return result


def _before_bubbles(spans: list[tuple[float, float, int]]) -> frozenset[int]:
    """`spans` has (ready, end, tensor) for each task."""
    last: dict[int, float] = {}
    bubble_s = under_way_s = 0.0
    for ready_s, end_s, tensor in sorted(spans):
        if ready_s > under_way_s:
            bubble_s = ready_s
        under_way_s = max(under_way_s, end_s)
        last[tensor] = max(end_s, last.get(tensor, 0.0))
    return frozenset(tensor for tensor, end_s in last.items() if end_s < bubble_s)

"""Options of buckets as flat arrays, which is what the simulator's loops read. Knows no paths, no prices and no plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from commlayer.planner.model import Task

COMPUTE = "compute"
"""The lane of a node's gradients: "compute:NODE". What else runs there delays them."""


class Pace(NamedTuple):
    """When one node computes what, from the start of its step, without communication."""

    node: str
    ready_s: tuple[float, ...]
    """Per bucket: when its gradient is final."""
    work_s: float
    """When forward and backward are over."""


class Load(NamedTuple):
    """One bucket and the ways in which it could be sent."""

    options: tuple[tuple[Task, ...], ...]
    urgency: float = 0.0
    """The smaller, the sooner it goes where several wait: when the next forward pass needs it."""
    stale: bool = False


class Problem(NamedTuple):
    """The arrays of cml_schedule in native/include/commlayer.h, under its names."""

    nodes: int
    lanes: tuple[str, ...]
    steps: int
    priority: bool
    ready: list[float]
    ready_order: list[int]
    order: list[int]
    stale: list[int]
    lane_node: list[int]
    tail: float
    bucket_options: list[int]
    option_tasks: list[int]
    task_lanes: list[int]
    lane: list[int]
    seconds: list[float]
    latency: list[float]
    need: list[int]
    task_next: list[int]
    next: list[int]
    task_gates: list[int]
    gate: list[int]
    most_tasks: int

    @property
    def buckets(self) -> int:
        return len(self.order)


STEPS_IF_STALE = 3
"""A stale bucket's transfer reaches into the next step: after this many the pattern repeats."""


def flatten(loads: Sequence[Load], paces: Sequence[Pace], *, tail_s: float = 0.0, priority: bool = True) -> Problem:
    """Everything that a simulation needs, for any choice among the options."""
    lanes = sorted({lane for load in loads for tasks in load.options for task in tasks for lane, _ in task.lanes})
    number = {lane: i for i, lane in enumerate(lanes)}
    node_of = {pace.node: i for i, pace in enumerate(paces)}
    owner = [node_of.get(lane.partition(":")[2], -1) for lane in lanes]
    everyone = list(range(len(paces)))
    flat = _Flat([], [], [], [], [], [], [])
    for load in loads:
        for tasks in load.options:
            _add(flat, tasks, number, owner, everyone)
    buckets = range(len(loads))
    order = sorted(buckets, key=lambda b: (loads[b].urgency, b))
    stale = any(load.stale for load in loads)
    options = [tasks for load in loads for tasks in load.options]
    return Problem(
        nodes=len(paces), lanes=tuple(lanes), steps=STEPS_IF_STALE if stale else 1, priority=priority,
        ready=[t for pace in paces for t in (*pace.ready_s, pace.work_s)],
        ready_order=[b for pace in paces for b in sorted(buckets, key=lambda b: (pace.ready_s[b], b))],  # noqa: B023
        order=order, stale=[int(load.stale) for load in loads],
        lane_node=[owner[i] if lane.startswith(COMPUTE) else -1 for i, lane in enumerate(lanes)], tail=tail_s,
        bucket_options=_edges(len(load.options) for load in loads), option_tasks=_edges(map(len, options)),
        task_lanes=_edges(flat.lane_count), lane=flat.lane, seconds=flat.seconds, latency=flat.latency, need=flat.need,
        task_next=_edges(map(len, flat.successors)), next=[s for each in flat.successors for s in each],
        task_gates=_edges(map(len, flat.gates)), gate=[g for each in flat.gates for g in each],
        most_tasks=sum(max(map(len, load.options)) for load in loads),
    )


class _Flat(NamedTuple):
    lane: list[int]
    seconds: list[float]
    lane_count: list[int]
    latency: list[float]
    need: list[int]
    successors: list[list[int]]
    gates: list[list[int]]


def _add(flat: _Flat, tasks: tuple[Task, ...], number: dict[str, int], owner: list[int], everyone: list[int]) -> None:
    successors: list[list[int]] = [[] for _ in tasks]
    for place, task in enumerate(tasks):
        held = [number[lane] for lane, _ in task.lanes]
        flat.lane.extend(held)
        flat.seconds.extend(seconds for _, seconds in task.lanes)
        flat.lane_count.append(len(held))
        flat.latency.append(task.latency_s)
        for before in task.after:
            successors[before].append(place)
        # A first task waits for the gradients of the nodes whose lanes it holds; a task on no node's lane for all of them.
        gates = [] if task.after else sorted({owner[lane] for lane in held} - {-1}) or everyone
        flat.gates.append(gates)
        flat.need.append(len(task.after) + len(gates))
    flat.successors.extend(successors)


def _edges(counts: Iterable[int]) -> list[int]:
    return list(accumulate(counts, initial=0))

"""Options of buckets as flat arrays, which is what the simulator's loops read. Knows no paths, no prices and no plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple, Protocol, TypeVar

from commlayer.planner.model.cluster import Task

T = TypeVar("T")

COMPUTE = "compute"
"""The lane of a node's gradients: "compute:NODE". What else runs there delays them."""
SHARED = ("up", "down", "intra")
"""Kinds of lanes that carry several transfers at once."""
STEPS_IF_STALE = 3
"""A stale bucket's transfer reaches into the next step: after this many the pattern repeats."""


class Pace(NamedTuple):
    """When one node computes what, from the start of its step, without communication."""

    node: str
    ready_s: tuple[float, ...]
    """Per bucket: when its gradient is final."""
    work_s: float
    """When forward and backward are over."""


class Shape(NamedTuple):
    """Tasks without their numbers: the same for all sizes of bucket."""

    lanes: tuple[tuple[str, ...], ...]
    after: tuple[tuple[int, ...], ...]
    ops: tuple[str, ...]
    """Of transfers: each op has connections of its own."""


class PricedWay(NamedTuple):
    """One way to send a bucket: a shape, seconds for each of its lanes in a row, latencies of its tasks."""

    shape: Shape
    seconds: Sequence[float]
    latency: Sequence[float]


class Load(NamedTuple):
    """One bucket and the ways in which it could be sent: their shapes, and their numbers one way after the other."""

    shapes: Sequence[Shape]
    seconds: Sequence[float]
    latency: Sequence[float]
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
    lane_shared: list[int]
    tail: float
    bucket_options: list[int]
    option_tasks: list[int]
    line_lanes: list[int]
    line_lane: list[int]
    task_line: list[int]
    task_seconds: list[int]
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


def load_of(ways: Sequence[PricedWay], urgency: float = 0.0, stale: bool = False) -> Load:
    return Load(tuple([way.shape for way in ways]), _chained([way.seconds for way in ways]),
                _chained([way.latency for way in ways]), urgency, stale)


def way(tasks: Sequence[Task]) -> PricedWay:
    """
    >>> way((Task((("up:a", 2.0), ("down:b", 1.0)), latency_s=0.5, op="net.push"),))
    Way(shape=Shape(lanes=(('up:a', 'down:b'),), after=((),), ops=('net.push',)), seconds=[2.0, 1.0], latency=[0.5])
    """
    shape = shape_of(tasks)
    return PricedWay(shape, [seconds for task in tasks for _, seconds in task.lanes], [task.latency_s for task in tasks])


class _Placed(Protocol):
    """A task, or a step whose seconds are lines."""

    @property
    def lanes(self) -> Sequence[tuple[str, object]]: ...
    @property
    def after(self) -> tuple[int, ...]: ...
    @property
    def op(self) -> str: ...


def shape_of(tasks: Sequence[_Placed]) -> Shape:
    lanes = tuple([tuple([lane for lane, _ in task.lanes]) for task in tasks])
    ops = tuple([task.op if on and _shared(on[0]) else "" for task, on in zip(tasks, lanes, strict=True)])
    return Shape(lanes, tuple([task.after for task in tasks]), ops)


def flatten(loads: Sequence[Load], paces: Sequence[Pace], *, tail_s: float = 0.0, priority: bool = True) -> Problem:
    """Everything that a simulation needs, for any choice among the ways."""
    # Buckets that are cut from one model share the shapes of few options.
    shapes = {id(shape): shape for load in loads for shape in load.shapes}
    distinct = list(dict.fromkeys(shapes.values()))
    lanes = sorted({lane for shape in distinct for lane in chain.from_iterable(shape.lanes)})
    number = {lane: i for i, lane in enumerate(lanes)}
    node_of = {pace.node: i for i, pace in enumerate(paces)}
    owner = [_owner(lane, node_of) for lane in lanes]
    lines: dict[Line, int] = {}
    flat = {shape: _flat(shape, number, lines, owner, len(paces)) for shape in distinct}
    of_shape = {key: flat[shape] for key, shape in shapes.items()}
    alike = [tuple(map(id, load.shapes)) for load in loads]
    of_load = {keys: _joined([of_shape[key] for key in keys]) for keys in set(alike)}
    all_of = _joined([of_load[keys] for keys in alike])
    buckets = range(len(loads))
    stale = [int(load.stale) for load in loads]
    return Problem(
        nodes=len(paces), lanes=tuple(lanes), steps=STEPS_IF_STALE if any(stale) else 1, priority=priority,
        ready=[t for pace in paces for t in (*pace.ready_s, pace.work_s)],
        ready_order=[b for pace in paces for b in sorted(buckets, key=pace.ready_s.__getitem__)],
        order=sorted(buckets, key=lambda b: loads[b].urgency), stale=stale,
        lane_node=[owner[i] if lane.startswith(COMPUTE) else -1 for i, lane in enumerate(lanes)],
        lane_shared=[int(_shared(lane)) for lane in lanes], tail=tail_s,
        bucket_options=_edges(map(len, alike)), option_tasks=_edges(all_of.tasks),
        line_lanes=_edges(len(on) for _, on in lines), line_lane=[number[lane] for _, on in lines for lane in on],
        task_line=all_of.line, task_seconds=_edges(all_of.held),
        seconds=_chained([load.seconds for load in loads]), latency=_chained([load.latency for load in loads]),
        need=all_of.need, task_next=_edges(all_of.followed), next=all_of.next,
        task_gates=_edges(all_of.gated), gate=all_of.gate,
        most_tasks=sum(max(of_load[keys].tasks) for keys in alike),
    )

Line = tuple[str, tuple[str, ...]]
"""What goes over it and its lanes."""


class _Flat(NamedTuple):
    """Shapes in a row, with lines and nodes by number.

    `tasks` counts those of each shape; held, followed and gated count what each task has in seconds, next and gate.
    """

    tasks: list[int]
    held: list[int]
    line: list[int]
    need: list[int]
    followed: list[int]
    next: list[int]
    gated: list[int]
    gate: list[int]


def _flat(shape: Shape, number: dict[str, int], lines: dict[Line, int], owner: list[int], nodes: int) -> _Flat:
    next_of: list[list[int]] = [[] for _ in shape.after]
    gates: list[list[int]] = []
    for place, (lanes, after) in enumerate(zip(shape.lanes, shape.after, strict=True)):
        for before in after:
            next_of[before].append(place)
        # A first task waits for the gradients of the nodes whose lanes it holds; a task on no node's lane for all of them.
        gates.append([] if after else sorted({owner[number[lane]] for lane in lanes} - {-1}) or list(range(nodes)))
    return _Flat(
        tasks=[len(shape.after)], held=[len(lanes) for lanes in shape.lanes],
        line=[_line(op, lanes, lines) for op, lanes in zip(shape.ops, shape.lanes, strict=True)],
        need=[len(after) + len(gate) for after, gate in zip(shape.after, gates, strict=True)],
        followed=[len(each) for each in next_of], next=[place for each in next_of for place in each],
        gated=[len(each) for each in gates], gate=[node for each in gates for node in each],
    )


def _joined(flats: Sequence[_Flat]) -> _Flat:
    return _Flat(*[_chained([flat[field] for flat in flats]) for field in range(len(_Flat._fields))])


def _line(op: str, lanes: tuple[str, ...], lines: dict[Line, int]) -> int:
    """By number; what goes one after the other. A connection is an op between the same ends."""
    if not lanes or (op, lanes) in lines:
        return lines.get((op, lanes), -1)
    shared = [_shared(lane) for lane in lanes]
    if not all(shared) and len(lanes) > 1:
        raise ValueError(f"task {op or lanes}: lanes {', '.join(lanes)} together, allowed: one, or any of {', '.join(SHARED)}")
    lines[op, lanes] = len(lines)
    return lines[op, lanes]


_SHARED = tuple(f"{kind}:" for kind in SHARED)


def _shared(lane: str) -> bool:
    return lane.startswith(_SHARED)


def _owner(lane: str, node_of: dict[str, int]) -> int:
    """The node of "KIND:NODE" or "KIND:NODE.OWNER"; -1 where it computes nothing."""
    name = lane.partition(":")[2]
    return node_of.get(name, node_of.get(name.rpartition(".")[0], -1))


def _chained(lists: Iterable[Sequence[T]]) -> list[T]:
    return list(chain.from_iterable(lists))


def _edges(counts: Iterable[int]) -> list[int]:
    return list(accumulate(counts, initial=0))

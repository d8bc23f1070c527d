"""Shapes: what tasks occupy and wait for, without their durations, also as flat lists for the simulation.

A search uses a few dozen shapes in hundreds of problems. So equal shapes are one object, and each is flattened once, as long
as it is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate, chain
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from commlayer.errors import InvalidInput
from commlayer.planner.model import Task

SHARED = ("up", "down", "intra")
"""Kinds of lanes that carry several transfers at once."""
_SHARED = tuple(f"{kind}:" for kind in SHARED)

T = TypeVar("T")


class Line:
    """A queue that serves one task at a time: a lane, or a connection (an op between the same ends)."""

    def __init__(self, op: str, lanes: tuple[str, ...]) -> None:
        if not all(map(shared, lanes)) and len(lanes) > 1:
            together = f"lanes {', '.join(lanes)} together"
            raise InvalidInput("E-PLAN-INPUT", f"task {op or lanes}: {together}, allowed: one, or any of {', '.join(SHARED)}")
        self.lanes = lanes


class FlatShape(NamedTuple):
    """Lists by task. Fields with several entries per task are concatenated, with a count for each task."""

    held: list[int]
    """Number of durations of each task."""
    lines: list[Line]
    """All lines of the tasks, in order of first use."""
    line: list[int]
    """Index into `lines`; -1 for a task on no lane."""
    need: list[int]
    followed: list[int]
    next: list[int]
    gated: list[int]
    gate: list[int]


class Shape:
    """Tasks without durations: the same for all bucket sizes. Made by `shape`, so that equal shapes are one object."""

    def __init__(self, lanes: tuple[tuple[str, ...], ...], after: tuple[tuple[int, ...], ...], ops: tuple[str, ...]) -> None:
        self.lanes, self.after = lanes, after
        self.ops = ops
        """Ops of transfers; each op has its own connections."""
        self.names = frozenset(chain.from_iterable(lanes))
        """Names of all lanes."""
        self._awaited: Shape | None = None
        self._flat: dict[tuple[str, ...], FlatShape] = {}

    @property
    def awaited(self) -> Shape:
        """The shape with one more task, on no lane, after the last ones."""
        if self._awaited is None:
            last = {*range(len(self.after))} - {before for after in self.after for before in after}
            self._awaited = shape((*self.lanes, ()), (*self.after, tuple(sorted(last))), (*self.ops, ""))
        return self._awaited

    def flat(self, nodes: tuple[str, ...]) -> FlatShape:
        """The flat lists, where `nodes` (by number) produce the gradients."""
        if nodes not in self._flat:
            self._flat[nodes] = self._flattened({name: i for i, name in enumerate(nodes)})
        return self._flat[nodes]

    def _flattened(self, node_of: dict[str, int]) -> FlatShape:
        next_of: list[list[int]] = [[] for _ in self.after]
        gates: list[list[int]] = []
        lines: dict[Line, int] = {}
        line: list[int] = []
        for place, (op, lanes, after) in enumerate(zip(self.ops, self.lanes, self.after, strict=True)):
            for before in after:
                next_of[before].append(place)
            # A first task waits for the gradients of the nodes whose lanes it uses; a task on no node's lane waits for all
            # nodes.
            gates.append([] if after else sorted({owner(lane, node_of) for lane in lanes} - {-1}) or list(range(len(node_of))))
            line.append(lines.setdefault(_one_of(_LINES, Line, op, lanes), len(lines)) if lanes else -1)
        return FlatShape(
            held=[len(lanes) for lanes in self.lanes], lines=list(lines), line=line,
            need=[len(after) + len(gate) for after, gate in zip(self.after, gates, strict=True)],
            followed=[len(each) for each in next_of], next=[place for each in next_of for place in each],
            gated=[len(each) for each in gates], gate=[node for each in gates for node in each],
        )


_LINES: WeakValueDictionary[Hashable, Line] = WeakValueDictionary()
_SHAPES: WeakValueDictionary[Hashable, Shape] = WeakValueDictionary()


def _one_of(known: WeakValueDictionary[Hashable, T], make: Callable[..., T], *parts: Hashable) -> T:
    value = known.get(parts)
    if value is None:
        value = known[parts] = make(*parts)
    return value


def shape(lanes: tuple[tuple[str, ...], ...], after: tuple[tuple[int, ...], ...], ops: tuple[str, ...]) -> Shape:
    """By task: its lanes, the tasks it waits for, and the op of transfers."""
    return _one_of(_SHAPES, Shape, lanes, after, ops)


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
    ops = tuple([task.op if on and shared(on[0]) else "" for task, on in zip(tasks, lanes, strict=True)])
    return shape(lanes, tuple([task.after for task in tasks]), ops)


def shared(lane: str) -> bool:
    return lane.startswith(_SHARED)


def owner(lane: str, node_of: dict[str, int]) -> int:
    """The node of "KIND:NODE" or "KIND:NODE.OWNER"; -1 if it computes nothing."""
    name = lane.partition(":")[2]
    return node_of.get(name, node_of.get(name.rpartition(".")[0], -1))


COMPUTE = "compute"
"""The lane on which a node computes gradients: "compute:NODE". Other work on it delays them."""
STEPS_IF_STALE = 4
"""With stale buckets, transfers overlap the next step; a step's price is the mean of the last two of these steps."""


class Pace(NamedTuple):
    """When one node computes what, from the start of its step, without communication."""

    node: str
    ready_s: tuple[float, ...]
    """Per bucket: when its gradient is final."""
    work_s: float
    """When forward and backward are over."""


class PricedWay(NamedTuple):
    """One way to send a bucket: its shape, seconds for each lane in a row, latencies of its tasks."""

    shape: Shape
    seconds: Sequence[float]
    latency: Sequence[float]


class Load(NamedTuple):
    """One bucket and its options: their shapes, and their numbers, one option after the other."""

    shapes: Sequence[Shape]
    seconds: Sequence[float]
    latency: Sequence[float]
    urgency: float = 0.0
    """Among waiting buckets the smallest goes first: when the next forward pass needs the bucket."""
    stale: bool = False


class Problem(NamedTuple):
    """The arrays of cml_schedule in native/include/commlayer.h, under the same names."""

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
    >>> priced_way = way((Task((("up:a", 2.0), ("down:b", 1.0)), latency_s=0.5, op="net.push"),))
    >>> priced_way.shape.lanes, priced_way.seconds, priced_way.latency
    ((('up:a', 'down:b'),), [2.0, 1.0], [0.5])
    """
    shape = shape_of(tasks)
    return PricedWay(shape, [seconds for task in tasks for _, seconds in task.lanes], [task.latency_s for task in tasks])


def flatten(loads: Sequence[Load], paces: Sequence[Pace], *, tail_s: float = 0.0, priority: bool = True) -> Problem:
    """The arrays for a simulation of any choice among the options."""
    # A model's buckets share the shapes of few options.
    alike = [tuple(load.shapes) for load in loads]
    distinct = dict.fromkeys(chain.from_iterable(alike))
    lanes = sorted(set().union(*[shape.names for shape in distinct]))
    number = {lane: i for i, lane in enumerate(lanes)}
    nodes = tuple([pace.node for pace in paces])
    node_of = {name: i for i, name in enumerate(nodes)}
    lines: dict[Line, int] = {}
    flat = {shape: _numbered(shape.flat(nodes), lines) for shape in distinct}
    of_load = {shapes: _joined([flat[shape] for shape in shapes]) for shapes in dict.fromkeys(alike)}
    all_of = _joined([of_load[shapes] for shapes in alike])
    buckets = range(len(loads))
    stale = [int(load.stale) for load in loads]
    return Problem(
        nodes=len(paces), lanes=tuple(lanes), steps=STEPS_IF_STALE if any(stale) else 1, priority=priority,
        ready=[t for pace in paces for t in (*pace.ready_s, pace.work_s)],
        ready_order=[b for pace in paces for b in sorted(buckets, key=pace.ready_s.__getitem__)],
        order=sorted(buckets, key=lambda b: loads[b].urgency), stale=stale,
        lane_node=[owner(lane, node_of) if lane.startswith(COMPUTE) else -1 for lane in lanes],
        lane_shared=[int(shared(lane)) for lane in lanes], tail=tail_s,
        bucket_options=_edges(map(len, alike)), option_tasks=_edges(all_of.tasks),
        line_lanes=_edges([len(line.lanes) for line in lines]),
        line_lane=[number[lane] for line in lines for lane in line.lanes],
        task_line=all_of.line, task_seconds=_edges(all_of.held),
        seconds=_chained([load.seconds for load in loads]), latency=_chained([load.latency for load in loads]),
        need=all_of.need, task_next=_edges(all_of.followed), next=all_of.next,
        task_gates=_edges(all_of.gated), gate=all_of.gate,
        most_tasks=sum([max(of_load[shapes].tasks) for shapes in alike]),
    )


class _Rows(NamedTuple):
    """Several shapes concatenated, with lines as numbers. `tasks` counts the tasks of each shape; the rest is as in
    FlatShape."""

    tasks: list[int]
    held: list[int]
    line: list[int]
    need: list[int]
    followed: list[int]
    next: list[int]
    gated: list[int]
    gate: list[int]


def _numbered(flat: FlatShape, lines: dict[Line, int]) -> _Rows:
    """Replaces lines by their numbers in `lines`, to which new ones are added."""
    number = [lines.setdefault(line, len(lines)) for line in flat.lines]
    line = [number[place] if place >= 0 else -1 for place in flat.line]
    return _Rows([len(line)], flat.held, line, flat.need, flat.followed, flat.next, flat.gated, flat.gate)


def _joined(rows: Sequence[_Rows]) -> _Rows:
    return _Rows(*[_chained(lists) for lists in zip(*rows, strict=True)]) if rows else _Rows([], [], [], [], [], [], [], [])


def _chained(lists: Iterable[Sequence[T]]) -> list[T]:
    return list(chain.from_iterable(lists))


def _edges(counts: Iterable[int]) -> list[int]:
    return list(accumulate(counts, initial=0))

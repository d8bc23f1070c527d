"""Shapes: what tasks occupy and wait for, without their durations, also as flat lists for the simulation.

A search uses a few dozen shapes in hundreds of problems. So equal shapes are one object, and each is flattened once, as long
as it is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

from commlayer.errors import InvalidInput

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

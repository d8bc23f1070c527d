"""Compiles a path for one rank: which elements the rank holds at every op, and with which ranks it exchanges them.

The bucket is cut into atoms, one per part that the path's splits (reduce_scatter, alltoall) make. A rank always holds a run of
atoms. Payloads are made per unit: a run of atoms that no split cuts before the unit is decoded. All ranks compile the same
walk, differing only in their own index. So they agree on sizes without communication.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from commlayer.planner.model.paths import CODING, Op, Path

Range = tuple[int, int]
SPLITS = ("reduce_scatter", "alltoall")
ROOTED = ("reduce", "gather")


class Place(NamedTuple):
    """A rank among nodes of equal size."""

    nodes: int
    per_node: int
    node: int
    local: int

    def group(self, scope: str) -> Range:
        """(size, own index) of the group that runs an op of this scope."""
        if scope == "node":
            return self.per_node, self.local
        if scope == "net":
            return self.nodes, self.node
        return self.nodes * self.per_node, self.node * self.per_node + self.local


class Encode(NamedTuple):
    """Codes elements `units` of x. `first`: they are gradients or dense sums of gradients; otherwise sums of decoded payloads.

    Ranks with the same `sender` code the same numbers, and must produce the same bits. One of them `pays`: it keeps the
    residual."""

    number: int
    """Index among the encodes of the path."""
    units: tuple[Range, ...]
    widest: int
    """Elements of the largest unit of any rank: all payloads are sent in slots of one size."""
    first: bool
    device: str
    sender: int
    pays: bool


class Decode(NamedTuple):
    """Sums `pieces` payloads of each unit into x."""

    units: tuple[Range, ...]
    pieces: int
    device: str


class Exchange(NamedTuple):
    """One collective. `parts`: element ranges of the members' shares, in their order (dense splits and their gathers)."""

    name: str
    scope: str
    coded: bool
    size: int
    place: int
    """This rank's index among the members."""
    root: int
    span: Range
    """The elements it covers, before a split or after a gather."""
    parts: tuple[Range, ...]
    units: int
    """Payloads per piece that this rank contributes."""
    pieces: int
    """Payloads per unit that this rank contributes."""
    widest: int
    merges: bool
    """Whether an allgather puts shares side by side; otherwise it collects payloads of the same elements."""


class Segment(NamedTuple):
    """Local ops, then one exchange. None at the end of the path, and where this rank takes no part."""

    local: tuple[Encode | Decode, ...]
    exchange: Exchange | None


def compile_path(
    path: Path, numel: int, place: Place, *, owner: int = 0, rounds: int = 1, bucket: int = 0
) -> tuple[Segment, ...]:
    """The segments of this rank. `owner`: the local rank that is root inside a node. Between nodes, the root rotates by bucket
    number.

    A coded allreduce, which only SUM and MAX codecs have, takes one exchange per round of the codec."""
    walk = _Walk(path, numel, place, owner, bucket)
    segments: list[Segment] = []
    local: list[Encode | Decode] = []
    step: Encode | Decode | None
    for at, op in enumerate(path):
        if op.name == "encode":
            step = walk.encode(at, op)
        elif op.name == "decode":
            step = walk.decode(op)
        else:
            again = rounds if walk.coded and op.name == "allreduce" else 1
            exchange = walk.exchange(op)
            segments += [Segment(tuple(local), exchange), *(Segment((), exchange) for _ in range(again - 1))]
            local, step = [], None
        if step is not None:
            local.append(step)
    return (*segments, Segment(tuple(local), None))


class _Walk:
    """The state of one rank along the path. It advances as its group's root does; `active` is whether this rank is one."""

    def __init__(self, path: Path, numel: int, place: Place, owner: int, bucket: int) -> None:
        self.path, self.place, self.owner, self.bucket = path, place, owner, bucket
        sizes = {op.where: place.group(op.where)[0] for op in path if op.name in SPLITS}
        self.atoms = math.prod(sizes.values())
        self.edges = [numel * i // self.atoms for i in range(self.atoms + 1)]
        self.low, self.high = 0, self.atoms
        self.units: list[Range] = []
        self.pieces, self.coded, self.encodes, self.decoded, self.widest = 1, False, 0, False, 0
        self.active = True
        self.summed: set[str] = set()
        """Scopes whose members' gradients are in this rank's values, or will be once these are decoded."""
        self.copied: set[str] = set()
        """Scopes whose members all hold the same values."""
        self.parents: dict[str, Range] = {}
        self.waiting: dict[str, bool] = {}

    def encode(self, at: int, op: Op) -> Encode | None:
        cuts = 1
        for later in self.path[at + 1 :]:
            if later.name == "decode":
                break
            cuts *= self.place.group(later.where)[0] if later.name in SPLITS else 1
        self.units = _cut(self.low, self.high, cuts)
        self.pieces, self.coded = 1, True
        run = (self.high - self.low) // cuts
        self.widest = max(self.edges[i + run] - self.edges[i] for i in range(0, self.atoms, run))
        pays = all(self.place.group(scope)[1] == 0 for scope in self.copied)
        step = Encode(
            self.encodes, self._ranges(self.units), self.widest, not self.decoded, op.where, self._sender(), pays
        )
        self.encodes += 1
        return step if self.active else None

    def _sender(self) -> int:
        """One number for all ranks that hold the sum of the same ranks' gradients."""
        nodes, per_node, node, local = self.place
        one_node = not self.summed & {"net", "all"}
        one_local = not self.summed & {"node", "all"}
        return (node if one_node else nodes) * (per_node + 1) + (local if one_local else per_node)

    def decode(self, op: Op) -> Decode | None:
        step = Decode(self._ranges(self.units), self.pieces, op.where)
        self.low, self.high = self.units[0][0], self.units[-1][1]
        self.coded, self.decoded = False, True
        return step if self.active else None

    def exchange(self, op: Op) -> Exchange | None:
        size, place = self.place.group(op.where)
        root = self.owner if op.where == "node" else self.bucket % size
        if op.where == "all":
            root = self.bucket % self.place.nodes * self.place.per_node + self.owner
        takes_part = self.active
        units, pieces, span = len(self.units), self.pieces, (self.low, self.high)
        merges = False
        parts: list[Range] = []
        if op.name in SPLITS:
            parts = _cut(self.low, self.high, size)
            self.parents[op.where] = (self.low, self.high)
            self.low, self.high = parts[place]
            if self.coded:
                share = units // size
                self.units = self.units[place * share : (place + 1) * share]
                self.pieces *= size
        elif op.name == "allgather" and op.where in self.parents:
            merges = True
            span = self.low, self.high = self.parents.pop(op.where)
            parts = _cut(self.low, self.high, size)
            if self.coded:
                self.units = _cut(self.low, self.high, units * size)
        elif op.name in ROOTED:
            self.waiting[op.where] = self.active
            self.active = self.active and place == root
            self.pieces *= size if self.coded else 1
        elif op.name == "allgather":
            self.pieces *= size
        elif op.name == "broadcast":
            takes_part = self.active = self.waiting.pop(op.where)
        if not (merges or op.name == "broadcast"):
            self.summed.add(op.where)
        if op.name in ("allreduce", "allgather", "broadcast"):
            self.copied.add(op.where)
        if not takes_part:
            return None
        return Exchange(
            op.name, op.where, self.coded, size, place, root, self._range(span), self._ranges(parts), units, pieces,
            self.widest, merges,
        )

    def _range(self, run: Range) -> Range:
        return self.edges[run[0]], self.edges[run[1]]

    def _ranges(self, runs: list[Range]) -> tuple[Range, ...]:
        return tuple(self._range(run) for run in runs)


def _cut(low: int, high: int, parts: int) -> list[Range]:
    each = (high - low) // parts
    return [(low + i * each, low + (i + 1) * each) for i in range(parts)]


def stages_of(path: Path, rounds: int = 1) -> list[str]:
    """The scope of every exchange, in order, including those without this rank."""
    scopes: list[str] = []
    coded = False
    for op in path:
        if op.name in CODING:
            coded = op.name == "encode"
        else:
            scopes += [op.where] * (rounds if coded and op.name == "allreduce" else 1)
    return scopes

"""Compiles a path for one rank: which elements the rank holds at every op, and with which ranks it exchanges them."""

from __future__ import annotations

import math
from typing import NamedTuple

from commlayer.planner import tree
from commlayer.planner.tree import Op

Range = tuple[int, int]
SPLITS = ("reduce_scatter", "alltoall")
ROOTED = ("reduce", "gather")


class ProgramPlace(NamedTuple):
    """Position of a rank among nodes of equal size: number of nodes, ranks per node, index of its node, index inside the node.
    """

    nodes: int
    per_node: int
    node: int
    local: int

    def group(self, scope: str) -> Range:
        """Returns (size, this rank's index) of the process group that runs operations of `scope`: "node", "net" or "all"."""
        if scope == "node":
            return self.per_node, self.local
        if scope == "net":
            return self.nodes, self.node
        return self.nodes * self.per_node, self.node * self.per_node + self.local


class EncodeStage(NamedTuple):
    """Operation that encodes the ranges `units` of the send buffer. `first`: True if these are gradients or uncompressed sums
    of gradients, False if they are sums of decoded payloads.

    Ranks with the same `sender` encode the same values, and must produce the same bytes. Exactly one of them, the rank with
    `pays` set, keeps the residual.
    """

    number: int
    """Index of this encode among the encodes of the path."""
    units: tuple[Range, ...]
    widest: int
    """Number of elements of the largest unit (range that is encoded together) on any rank. This number determines the size of
    all payload slots."""
    first: bool
    device: str
    sender: int
    pays: bool


class DecodeStage(NamedTuple):
    """Operation that decodes `pieces` payloads of each unit (range that is encoded together), and writes their sum into the
    send buffer."""

    units: tuple[Range, ...]
    pieces: int
    device: str


class ExchangeStage(NamedTuple):
    """A collective of a path. `parts`: element range of each member's part, in member order (only for uncompressed splits and
    the gathers that undo them)."""

    name: str
    scope: str
    coded: bool
    size: int
    place: int
    """Index of this rank among the members of the collective."""
    root: int
    span: Range
    """The range of elements that the collective covers, before a split or after a gather."""
    parts: tuple[Range, ...]
    units: int
    """Number of units (element ranges that are encoded together) whose payloads this rank contributes."""
    pieces: int
    """Number of payloads per unit (range that is encoded together) that this rank contributes."""
    widest: int
    merges: bool
    """True: an allgather joins parts with different elements. False: it collects payloads of the same elements."""


class ProgramSegment(NamedTuple):
    """Local operations, and the exchange after them. `exchange` is None at the end of the path, and where this rank takes no
    part. `scope`: that of the exchange ("node", "net" or "all"), also without this rank; "" at the end of the path."""

    local: tuple[EncodeStage | DecodeStage, ...]
    exchange: ExchangeStage | None
    scope: str


def compile_path(
    path: tree.Path, numel: int, place: ProgramPlace, *, owner: int = 0, rounds: int = 1, bucket: int = 0
) -> tuple[ProgramSegment, ...]:
    """Compiles a path into the segments that this rank executes. `owner`: the local rank that is root inside a node. Between
    nodes, the root depends on the bucket's id.

    An allreduce of payloads, which only SUM and MAX codecs support, takes one exchange per round of the codec.
    """
    walk = _Walk(path, numel, place, owner, bucket)
    segments: list[ProgramSegment] = []
    local: list[EncodeStage | DecodeStage] = []
    step: EncodeStage | DecodeStage | None
    for at, op in enumerate(path):
        if op.name == "encode":
            step = walk.encode(at, op)
        elif op.name == "decode":
            step = walk.decode(op)
        else:
            again = rounds if walk.coded and op.name == "allreduce" else 1
            exchange = walk.exchange(op)
            segments.append(ProgramSegment(tuple(local), exchange, op.where))
            segments += [ProgramSegment((), exchange, op.where)] * (again - 1)
            local, step = [], None
        if step is not None:
            local.append(step)
    return (*segments, ProgramSegment(tuple(local), None, ""))


class _Walk:
    """State of one rank at the current position of the path, while the path is compiled. Ranks that are not root of a group
    follow the root's state; `active` is True if this rank takes part itself."""

    def __init__(self, path: tree.Path, numel: int, place: ProgramPlace, owner: int, bucket: int) -> None:
        self.path, self.place, self.owner, self.bucket = path, place, owner, bucket
        sizes = {op.where: place.group(op.where)[0] for op in path if op.name in SPLITS}
        self.atoms = math.prod(sizes.values())
        self.edges = [numel * i // self.atoms for i in range(self.atoms + 1)]
        self.low, self.high = 0, self.atoms
        self.units: list[Range] = []
        self.pieces, self.coded, self.encodes, self.decoded, self.widest = 1, False, 0, False, 0
        self.active = True
        self.summed: set[str] = set()
        """Scopes ("node", "net" or "all") over whose ranks this rank's values are summed, or will be when its payloads are
        decoded."""
        self.copied: set[str] = set()
        """Scopes ("node", "net" or "all") whose ranks all have the same values as this rank."""
        self.parents: dict[str, Range] = {}
        self.waiting: dict[str, bool] = {}

    def encode(self, at: int, op: Op) -> EncodeStage | None:
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
        step = EncodeStage(
            self.encodes, self._ranges(self.units), self.widest, not self.decoded, op.where, self._sender(), pays
        )
        self.encodes += 1
        return step if self.active else None

    def _sender(self) -> int:
        """Returns a number that identifies this rank's value. It is equal on two ranks if their values are the same sum, and
        otherwise different."""
        nodes, per_node, node, local = self.place
        one_node = not self.summed & {"net", "all"}
        one_local = not self.summed & {"node", "all"}
        return (node if one_node else nodes) * (per_node + 1) + (local if one_local else per_node)

    def decode(self, op: Op) -> DecodeStage | None:
        step = DecodeStage(self._ranges(self.units), self.pieces, op.where)
        self.low, self.high = self.units[0][0], self.units[-1][1]
        self.coded, self.decoded = False, True
        return step if self.active else None

    def exchange(self, op: Op) -> ExchangeStage | None:
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
        return ExchangeStage(
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

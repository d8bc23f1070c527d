"""Walks a path and records the work of each op on each lane, as lines over the bucket's elements.

For each group of equal nodes it tracks what is held: the part of the bucket, as floats or as a number of payloads of one
size. A decode costs as much as the payloads it must add, which makes indivisible schemes expensive with many ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from commlayer.errors import InvalidInput
from commlayer.planner.model.cluster import CodecCost, Line, Profile
from commlayer.planner.model.equal_nodes import Group
from commlayer.planner.model.paths import Op, Path, spell
from commlayer.planner.pricing.collectives import crossing, moves
from commlayer.planner.pricing.lines import ZERO, of, over, plus, times

FLOAT_NBYTES = 4
FLOATS = Line(0.0, FLOAT_NBYTES)
FIRST_HALVES = ("reduce_scatter", "alltoall", "reduce", "gather")


class WalkedOp(NamedTuple):
    """A Task whose numbers are lines over the bucket's elements."""

    lanes: tuple[tuple[str, Line], ...]
    after: tuple[int, ...]
    latency: Line
    op: str
    nbytes: Line


class Coded(NamedTuple):
    """A group's codec costs, upload and download, on each device that the path uses."""

    up: dict[str, CodecCost]
    down: dict[str, CodecCost]


@dataclass
class Held:
    """State of each of `flows` ranks of a group's node."""

    last: tuple[int, ...] = ()
    """Steps that the next one waits for."""
    part: float = 1.0
    """Part of the bucket that is held."""
    pieces: float = 0.0
    """Number of payloads; 0: floats."""
    each: float = 1.0
    """Part of the bucket in one payload."""
    size: Line = ZERO
    """Bytes of one payload."""
    flows: int = 1
    coder: str = "gpu"
    """Device on which the payloads were encoded."""
    split: dict[str, int] = field(default_factory=dict)
    """Scopes in which the first half of a pair of collectives is done, with their number of members."""

    @property
    def nbytes(self) -> Line:
        return times(self.size, self.pieces) if self.pieces else over(FLOATS, self.part)

    @property
    def elements(self) -> float:
        """Elements to decode, as a multiple of the bucket."""
        return self.pieces * self.each


class Walk:
    """One path with one codec, over the groups of a cluster."""

    def __init__(
        self, path: Path, groups: Sequence[Group], coded: Sequence[Coded], emit: CodecCost | None, profile: Profile,
        hosts: Mapping[int, float], owner: int,
    ) -> None:
        """`hosts`: groups whose nodes share the sum, with the part that each node has. `emit`: the servers' codec.
        `owner`: the local rank that codes if one rank holds the bucket."""
        self.path, self.profile, self.owner = path, profile, owner
        self.groups, self.coded, self.emit = groups, coded, emit
        self.hosts = hosts
        self.arrivals = 0
        """Payloads that arrive at the servers, for each part of the bucket."""
        self.summed: tuple[int, ...] = ()
        """The servers' last steps of adding."""
        self.returned = False
        self.workers = [g for g, group in enumerate(groups) if group.workers]
        self.nodes = sum(groups[g].workers for g in self.workers)
        self.ranks = sum(groups[g].workers * groups[g].node.ranks for g in self.workers)
        self.held = {g: Held(flows=groups[g].node.ranks) for g in self.workers}
        self.steps: list[WalkedOp] = []
        for place, op in enumerate(path):
            self._op(op, path[place + 1 :])
        self._charge_bucket()

    def _op(self, op: Op, rest: Path) -> None:
        match op.name, op.where:
            case ("encode" | "decode"), _:
                for g in self.workers:
                    (self._encode if op.name == "encode" else self._decode)(op, g)
            case "push", _:
                self._push(op)
            case ("pull" | "forward"), _:
                self._results(op, rest)
            case _, "node":
                for g in self.workers:
                    self._inside(op, g)
            case _:
                self._across(op)

    def _add(self, g: int, op: Op, lanes: Sequence[tuple[str, Line]], latency: Line = ZERO, nbytes: Line = ZERO) -> None:
        """A step of one group, after its previous one."""
        held = self.held[g]
        held.last = (self._step(op, lanes, held.last, latency, nbytes),)

    def _step(
        self, op: Op, lanes: Sequence[tuple[str, Line]], after: tuple[int, ...], latency: Line = ZERO, nbytes: Line = ZERO,
    ) -> int:
        self.steps.append(WalkedOp(tuple(lanes), after, latency, str(op), nbytes))
        return len(self.steps) - 1

    def _charge_bucket(self) -> None:
        """Charges a bucket's fixed cost to the first step of each group."""
        for i, step in enumerate(self.steps):
            if not step.after and step.lanes:
                lane, seconds = step.lanes[0]
                self.steps[i] = step._replace(
                    lanes=((lane, plus(seconds, Line(self.profile.bucket_s))), *step.lanes[1:])
                )

    # ---- coding

    def _coder(self, op: Op, g: int) -> str:
        group, held = self.groups[g], self.held[g]
        if op.where == "gpu":
            if group.node.device == "cpu":
                raise InvalidInput("E-PLAN-PATH",
                                   f"path {spell(self.path)!r}: {op}, but node {group.name} has no GPU; code on cpu")
            return f"compute:{group.name}"
        alone = held.flows == 1 and group.node.ranks > 1
        return f"cpu:{group.name}.{self.owner}" if alone and self.owner else f"cpu:{group.name}"

    def _on_device(self, seconds: Line, cost: CodecCost, op: Op, g: int) -> Line:
        """Adds copies to and from the host to the lane that codes there, as in the runtime."""
        node, held = self.groups[g].node, self.held[g]
        if cost.device == "gpu":
            return times(seconds, 1 / node.speed)
        if op.where == "cpu" and node.device != "cpu":
            return plus(seconds, of(self.profile.copy, over(FLOATS, held.part)))
        return seconds

    def _encode(self, op: Op, g: int) -> None:
        held, cost = self.held[g], self.coded[g].up[op.where]
        self._add(g, op, [(self._coder(op, g), self._on_device(over(cost.encode, held.part), cost, op, g))])
        held.pieces, held.each, held.size, held.coder = 1, held.part, over(cost.nbytes, held.part), op.where

    def _decode(self, op: Op, g: int) -> None:
        held = self.held[g]
        cost = (self.coded[g].down if self.returned else self.coded[g].up)[op.where]
        seconds = Line(cost.decode.floor_s * held.pieces, cost.decode.slope_s * held.elements)
        self._add(g, op, [(self._coder(op, g), self._on_device(seconds, cost, op, g))])
        held.pieces = 0

    # ---- collectives

    def _inside(self, op: Op, g: int) -> None:
        """A collective among the ranks of a node; no work on a node of one rank."""
        group, held = self.groups[g], self.held[g]
        n = group.node.ranks
        if n > 1:
            move = moves(op.name, n)
            seconds = plus(
                Line(move.messages * group.node.intra_alpha_s * self._rounds(g)),
                times(held.nbytes, move.passes * 8 / group.node.intra_bps),
            )
            self._add(g, op, [(f"intra:{group.name}", seconds)])
        self._share(op, g, n)
        if op.name in ("reduce", "gather"):
            held.flows = 1
        elif op.name in ("reduce_scatter", "alltoall"):
            held.flows = n

    def _across(self, op: Op) -> None:
        """A collective over all ranks, or over those of one local number: one step that occupies every link as long as the
        slowest."""
        everyone = op.where == "all"
        n = self.ranks if everyone else self.nodes
        lanes: list[str] = []
        seconds = nbytes = ZERO
        nodes = [self.groups[g].node for g in self.workers]
        if n > 1:
            widest = max(node.ranks for node in nodes)
            move = moves(op.name, n)
            held = max((self._put_in(op, g) for g in self.workers), key=lambda line: (line.slope_s, line.floor_s))
            if everyone:
                passes = crossing(op.name, n, widest)
            else:
                passes = move.passes * max(self.held[g].flows for g in self.workers)
            nbytes = times(held, passes)
            link_bps = min(min(node.link.up_bps, node.link.down_bps) for node in nodes)
            wires = [times(nbytes, max(8 / link_bps, self.profile.across.slope_s))] if passes else []
            alpha_s = self._alpha_s()
            if everyone and widest > 1:
                slowest_bps = min(node.intra_bps for node in nodes if node.ranks > 1)
                wires.append(times(held, move.passes * 8 / slowest_bps))
                lanes += [f"intra:{self.groups[g].name}" for g in self.workers if self.groups[g].node.ranks > 1]
            rounds = max(self._rounds(g) for g in self.workers)
            slowest = max(wires, key=lambda line: (line.slope_s, line.floor_s))
            seconds = plus(Line(move.messages * alpha_s * rounds), slowest)
            if self.nodes > 1:
                lanes = [f"{way}:{self.groups[g].name}" for g in self.workers for way in ("up", "down")] + lanes
            after = tuple(sorted({i for g in self.workers for i in self.held[g].last}))
            step = self._step(op, [(lane, seconds) for lane in lanes], after, nbytes=nbytes)
            for g in self.workers:
                self.held[g].last = (step,)
        for g in self.workers:
            self._share(op, g, n)

    def _put_in(self, op: Op, g: int) -> Line:
        """Bytes that a rank puts into a collective. An all-reduce of payloads may need more bytes than the payloads have."""
        held = self.held[g]
        reduced = self.coded[g].up[held.coder].reduced if op.name == "allreduce" and held.pieces else ZERO
        return over(reduced, held.part) if reduced.slope_s else held.nbytes

    def _alpha_s(self) -> float:
        """Worst latency of one hop between nodes; between ranks if there is only one node."""
        if self.nodes == 1:
            return self.groups[self.workers[0]].node.intra_alpha_s
        apart = sorted(self.groups[g].node.link.alpha_s for g in self.workers for _ in range(min(2, self.groups[g].workers)))
        return max(sum(apart[-2:]), self.profile.across.floor_s)

    def _rounds(self, g: int) -> int:
        return max((c.rounds for c in self.coded[g].up.values()), default=1) if self.held[g].pieces else 1

    def _share(self, op: Op, g: int, n: int) -> None:
        """Updates what a rank holds after a collective among n."""
        held = self.held[g]
        second = op.where in held.split
        if op.name in FIRST_HALVES:
            held.split[op.where] = n
        if op.name in ("reduce_scatter", "alltoall"):
            held.part /= n
        if op.name == "alltoall":
            held.pieces, held.each, held.size = held.pieces * n, held.each / n, times(held.size, 1 / n)
        elif op.name == "gather":
            held.pieces *= n
        elif op.name == "allgather":
            held.pieces *= n
            if second:
                held.part *= n
        if second:
            del held.split[op.where]

    # ---- a summation server

    def _push(self, op: Op) -> None:
        """Every node sends to the hosts, which add in the members' order. The part of a host's own node stays on the node."""
        self.arrivals = sum(self.groups[g].workers * self.held[g].flows for g in self.workers)
        added: dict[int, tuple[int, ...]] = dict.fromkeys(self.hosts, ())
        for g in self.workers:
            held, group = self.held[g], self.groups[g]
            sent = times(held.nbytes, held.flows)
            away = 1 - self.hosts.get(g, 0.0)
            if away > 0:
                downs = []
                for h, share in self.hosts.items():
                    senders = group.workers - (g == h)
                    if senders:
                        down = times(sent, senders * share * 8 / self.groups[h].node.link.down_bps)
                        downs.append((f"down:{self.groups[h].name}", down))
                up = (f"up:{group.name}", times(sent, away * 8 / group.node.link.up_bps))
                self._add(g, op, [up, *downs], self._way(g, held.nbytes if held.coder == "gpu" else ZERO), times(sent, away))
            payloads = group.workers * held.flows * held.pieces
            cost = self.coded[g].up["server"]
            for h, share in self.hosts.items():
                seconds = plus(
                    Line(cost.decode.floor_s * payloads, cost.decode.slope_s * payloads * held.each * share),
                    Line(self.profile.server.floor_s * payloads, 0.0),
                    times(sent, group.workers * share * self.profile.server.slope_s),
                )
                added[h] = (self._step(Op("add", "server"), [(f"server:{self.groups[h].name}", seconds)],
                                       tuple(sorted({*held.last, *added[h]}))),)
        self.summed = tuple(sorted({i for last in added.values() for i in last}))

    def _results(self, op: Op, rest: Path) -> None:
        """The hosts encode their sums once, or leave them merged, and send them to every node."""
        assert self.emit is not None
        self.returned = True
        pieces = max(self.held[g].flows for g in self.workers)
        whole = self.emit.nbytes
        done = self.summed
        merged = 1.0
        if op.name == "pull":
            floor_s, slope_s = self.emit.encode.floor_s * pieces, self.emit.encode.slope_s
            done = tuple(
                self._step(Op("emit", "server"), [(f"server:{self.groups[h].name}", Line(floor_s, slope_s * share))],
                           self.summed)
                for h, share in self.hosts.items()
            )
        elif not self.emit.sums:
            # All payloads concatenated, unless the sum as floats is smaller.
            merged = min(self.arrivals / pieces, max(1.0, FLOAT_NBYTES / whole.slope_s) if whole.slope_s else 1.0)
        to_gpu = next((o.where == "gpu" for o in rest if o.name == "decode"), False)
        for g in self.workers:
            held, group = self.held[g], self.groups[g]
            held.pieces, held.each, held.last = merged, held.part, done
            held.size = over(whole, held.part)
            sent = times(held.nbytes, held.flows)
            away = 1 - self.hosts.get(g, 0.0)
            if away > 0:
                ups = []
                for h, share in self.hosts.items():
                    receivers = group.workers - (g == h)
                    if receivers:
                        up = times(sent, receivers * share * 8 / self.groups[h].node.link.up_bps)
                        ups.append((f"up:{self.groups[h].name}", up))
                down = (f"down:{group.name}", times(sent, away * 8 / group.node.link.down_bps))
                self._add(g, op, [*ups, down], self._way(g, held.nbytes if to_gpu else ZERO), times(sent, away))

    def _way(self, g: int, copied: Line) -> Line:
        """Latency between a node and the farthest host, and the copy of a payload between GPU and socket."""
        far_s = max([self.groups[h].node.link.alpha_s for h in self.hosts if h != g or self.groups[h].nodes > 1])
        rounds = max([c.rounds for c in self.coded[g].up.values()], default=1)
        return plus(Line((self.groups[g].node.link.alpha_s + far_s) * rounds), of(self.profile.copy, copied))

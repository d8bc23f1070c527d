"""Prices a path: the tasks that a bucket puts on the lanes of the cluster.

    compute:NODE   backward, and GPU codecs     cpu:NODE[.OWNER]   the codec lane of a rank
    intra:NODE     between the node's ranks     up:NODE down:NODE  its link     server:NODE   the summation server it hosts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from msgspec import structs

from commlayer.codec_spec import CodecSpec, parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner.convergence import NONE, Excess, Recipe, excess
from commlayer.planner.model import Cluster, CodecCost, Group, Line, Node, Policy, Profile, Task, fold
from commlayer.planner.problem import COMPUTE, PricedWay, Shape, shape_of
from commlayer.planner.tree import CODING, Op, Path, parse, spell
from commlayer.records import Job, Plan, Slice

ZERO = Line(0.0)


def plus(*lines: Line) -> Line:
    floor_s = slope_s = 0.0
    for line in lines:
        floor_s += line.floor_s
        slope_s += line.slope_s
    return Line(floor_s, slope_s)


def times(line: Line, factor: float) -> Line:
    return Line(line.floor_s * factor, line.slope_s * factor)


def over(line: Line, fraction: float) -> Line:
    """The line for a size that is this fraction of the variable."""
    return Line(line.floor_s, line.slope_s * fraction)


def of(line: Line, size: Line) -> Line:
    """`line` over a size that is itself a line."""
    return Line(line.floor_s + line.slope_s * size.floor_s, line.slope_s * size.slope_s)


class Moves(NamedTuple):
    """One collective among n members: messages in sequence, and how often a member's bytes pass its link."""

    messages: float
    passes: float


def _rounds(n: int) -> int:
    """lg n, rounded up."""
    return (n - 1).bit_length()


MOVES: Mapping[str, Callable[[int], Moves]] = {
    "allreduce": lambda n: Moves(2 * (n - 1), 2 * (n - 1) / n),
    "reduce_scatter": lambda n: Moves(n - 1, (n - 1) / n),
    "allgather": lambda n: Moves(n - 1, n - 1),
    "alltoall": lambda n: Moves(n - 1, (n - 1) / n),
    "reduce": lambda n: Moves(_rounds(n), min(n - 1, 1)),
    "broadcast": lambda n: Moves(_rounds(n), min(n - 1, 1)),
    "gather": lambda n: Moves(_rounds(n), n - 1),
}


def moves(name: str, n: int) -> Moves:
    return MOVES[name](n)


def crossing(name: str, n: int, per_node: int) -> float:
    """How often the bytes of one rank pass the link of the busiest node, in a collective over all n ranks.

    A ring visits node after node, so it crosses each link once per pass, for any number of ranks per node. A pairwise
    exchange sends from every rank of the node to every rank outside. In a gather, ranks on the root's own node do not cross
    its link.
    """
    outside = n - per_node
    if outside <= 0:
        return 0.0
    if name == "alltoall":
        return per_node * outside / n
    if name == "gather":
        return float(outside)
    return moves(name, n).passes


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
        sum_nbytes = self.emit.nbytes
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
            merged = min(self.arrivals / pieces, max(1.0, FLOAT_NBYTES / sum_nbytes.slope_s) if sum_nbytes.slope_s else 1.0)
        to_gpu = next((o.where == "gpu" for o in rest if o.name == "decode"), False)
        for g in self.workers:
            held, group = self.held[g], self.groups[g]
            held.pieces, held.each, held.last = merged, held.part, done
            held.size = over(sum_nbytes, held.part)
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


Lines = tuple[tuple[float, float], ...]
"""Floors and slopes."""
CODERS = (f"{COMPUTE}:", "cpu:")


class Template(NamedTuple):
    """The tasks of a walked path."""

    steps: tuple[WalkedOp, ...]
    shape: Shape
    seconds: Lines
    """By task, then by lane."""
    latency: Lines
    nbytes: float
    """Bytes per element, over all of the bucket's transfers on one node's links."""

    def way(self, numel: int) -> PricedWay:
        return PricedWay(self.shape, [a + b * numel for a, b in self.seconds], [a + b * numel for a, b in self.latency])

    @property
    def coding(self) -> list[tuple[str, tuple[float, float]]]:
        """Lines on lanes that encode or decode at workers."""
        lanes = chain.from_iterable(self.shape.lanes)
        return [(lane, line) for lane, line in zip(lanes, self.seconds, strict=True) if lane.startswith(CODERS)]

    def sent(self, numel: int) -> list[int]:
        """Bytes sent, by task."""
        return [int(step.nbytes(numel) + 0.5) for step in self.steps]


def template(steps: Sequence[WalkedOp]) -> Template:
    return Template(
        tuple(steps), shape_of(steps), tuple([(line.floor_s, line.slope_s) for step in steps for _, line in step.lanes]),
        tuple([(step.latency.floor_s, step.latency.slope_s) for step in steps]), sum(step.nbytes.slope_s for step in steps),
    )


def bare(codec: str) -> CodecSpec:
    """The codec that profiles price: without error feedback, whose cost is included in the figures, and independent of
    spelling.

    >>> bare("error_feedback(topk(0.01))") == bare("topk(ratio=0.01, values='int8')")
    True
    """
    return parse_spec(codec).bare


class Prices:
    """Prices of all paths in one cluster. `hosts[s]` is the place in the cluster of server s's node.

    Each path and codec is walked once; a bucket's price is then its lines at the bucket's size. With `spread`, each bucket is
    cut over all servers in these parts, and equal nodes stay one group although they host servers.
    """

    def __init__(
        self, cluster: Cluster, profile: Profile, hosts: Sequence[int] | None = None, *, spread: Sequence[float] = (),
    ) -> None:
        if hosts is None:
            hosts = [i for i, node in enumerate(cluster.nodes) if node.server][:1]
        cluster = _measured_inside(cluster, profile.inside)
        self.cluster, self.profile, self.hosts, self.spread = cluster, profile, tuple(hosts), tuple(spread)
        self.groups = fold(cluster, self.hosts, spread=bool(spread))
        _check(self.groups)
        self._costs = {(bare(c.codec), c.device): c for c in profile.codecs}
        self._node_of = [i for i, node in enumerate(cluster.nodes) if node.ranks]
        self._templates: dict[object, Template] = {}
        self._steps: dict[object, tuple[WalkedOp, ...]] = {}
        self._widest = max(group.node.ranks for group in self.groups)

    def tasks(
        self, path: Path | str, numel: int, codec: str, *, server: int = 0, owner: int = 0, down: str = "",
        by_node: tuple[str, ...] = (),
    ) -> tuple[Task, ...]:
        """A bucket's tasks. `down` and `by_node` as in a Bucket; `server` is an index into the hosts."""
        priced = self.template(path, codec, server, owner, down, by_node)
        way = priced.way(numel)
        seconds = iter(way.seconds)
        return tuple([
            Task(tuple([(lane, next(seconds)) for lane in lanes]), step.after, latency_s, step.op, nbytes)
            for step, lanes, latency_s, nbytes
            in zip(priced.steps, way.shape.lanes, way.latency, priced.sent(numel), strict=True)
        ])

    def template(
        self, path: Path | str, codec: str, server: int = 0, owner: int = 0, down: str = "", by_node: tuple[str, ...] = (),
    ) -> Template:
        """The tasks for every size."""
        key = (path, codec, server, owner, down, by_node)
        priced = self._templates.get(key)
        if priced is None:
            priced = self._templates[key] = template(self.steps(*key))
        return priced

    def steps(
        self, path: Path | str, codec: str, server: int = 0, owner: int = 0, down: str = "", by_node: tuple[str, ...] = (),
    ) -> tuple[WalkedOp, ...]:
        """The tasks as lines over elements."""
        ops = parse(path, self._widest) if isinstance(path, str) else path
        key = (ops, codec, server, owner, down, by_node)
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = tuple(self.walk(ops, codec, server, owner, down, by_node).steps)
        return steps

    def walk(
        self, path: Path | str, codec: str, server: int = 0, owner: int = 0, down: str = "", by_node: tuple[str, ...] = (),
    ) -> Walk:
        """The walk that produces the steps."""
        ops = parse(path, self._widest) if isinstance(path, str) else path
        served = any(op.name == "push" for op in ops)
        devices = sorted({op.where for op in ops if op.name in CODING})
        codecs = self._codecs(codec, by_node)
        kinds = [(name, group.node.device, group.workers > 0) for group, name in zip(self.groups, codecs, strict=True)]
        nodes = dict(zip(kinds, [group.node for group in self.groups], strict=True))
        by_kind: dict[tuple[str, str, bool], Coded] = {}
        for (name, device, works), node in nodes.items():
            up = {d: self.cost(name, d, node) for d in devices} if works else {}
            back = {d: self.cost(down, d, node) for d in devices} if down and works else up
            if served:
                up = {**up, "server": self.cost(name, "cpu", node)}
            by_kind[name, device, works] = Coded(up, back)
        coded = [by_kind[kind] for kind in kinds]
        emit, hosts = None, {}
        if served:
            hosts = self._served_by(server)
            emit = self.cost(down or codec, "cpu", self.groups[next(iter(hosts))].node)
        return Walk(ops, self.groups, coded, emit, self.profile, hosts, owner)

    def cost(self, codec: str, device: str, node: Node) -> CodecCost:
        """Cost of a codec on this node's GPU or CPU."""
        match = None
        for name in (bare(codec), bare(codec).without_shapes()):
            match = match or (self._costs.get((name, node.device)) if device == "gpu" else None)
            match = match or self._costs.get((name, device))
        if match is None:
            known = ", ".join(sorted({c.codec for c in self.profile.codecs if c.device == device})) or "none"
            raise InvalidInput("E-PLAN-CODEC-COST",
                               f"profile {self.profile.source!r} has no cost of {codec} on {device}, it has: {known}")
        return match

    def _served_by(self, server: int) -> dict[int, float]:
        if self.spread:
            part = dict(zip(self.hosts, self.spread, strict=True))
            return {g: part[group.members[0]] for g, group in enumerate(self.groups) if group.hosts}
        if not 0 <= server < len(self.hosts):
            raise InvalidInput("E-PLAN-INPUT", f"server {server}: the cluster's plan has servers 0 to {len(self.hosts) - 1}")
        return {next(g for g, group in enumerate(self.groups) if self.hosts[server] in group.members): 1.0}

    def _codecs(self, codec: str, by_node: tuple[str, ...]) -> list[str]:
        if not by_node:
            return [codec] * len(self.groups)
        if len(by_node) != len(self._node_of):
            raise InvalidInput("E-PLAN-INPUT", f"by_node: got {len(by_node)} codecs for {len(self._node_of)} nodes with ranks")
        codecs = dict(zip(self._node_of, by_node, strict=True))
        result = []
        for group in self.groups:
            mine = {codecs.get(place, codec) for place in group.members}
            if len(mine) > 1:
                raise InvalidInput("E-PLAN-INPUT",
                                   f"by_node: {', '.join(sorted(mine))} on equal nodes ({group.name} and others); "
                                   "equal nodes are planned as one: give them one codec")
            result.append(mine.pop())
        return result


def _measured_inside(cluster: Cluster, inside: Line) -> Cluster:
    """The cluster with measured links inside nodes, if they were measured."""
    if not inside.slope_s:
        return cluster
    nodes = (structs.replace(n, intra_bps=8 / inside.slope_s, intra_alpha_s=inside.floor_s) for n in cluster.nodes)
    return structs.replace(cluster, nodes=tuple(nodes))


_LIMITS: tuple[tuple[str, Callable[[Node], float], bool], ...] = (
    ("link.up_bps", lambda n: n.link.up_bps, True),
    ("link.down_bps", lambda n: n.link.down_bps, True),
    ("link.alpha_s", lambda n: n.link.alpha_s, False),
    ("intra_alpha_s", lambda n: n.intra_alpha_s, False),
    ("speed", lambda n: n.speed, True),
)


def _check(groups: Sequence[Group]) -> None:
    """Rejects values for which no price can be computed."""
    for group in groups:
        for name, read, positive in _LIMITS:
            value = read(group.node)
            if not (value > 0 if positive else value >= 0):
                raise InvalidInput("E-PLAN-INPUT",
                                   f"node {group.name}: {name} is {value}, allowed: {'above 0' if positive else '0 or more'}")
        if group.node.ranks > 1 and not group.node.intra_bps > 0:
            raise InvalidInput("E-PLAN-INPUT",
                               f"node {group.name}: intra_bps is {group.node.intra_bps} with {group.node.ranks} ranks, "
                               "allowed: above 0; say how fast its ranks reach each other")
    if not any(group.workers for group in groups):
        raise InvalidInput("E-PLAN-INPUT", "the cluster has no node with ranks: nobody trains")


FULL = 0.75
"""Usable part of a link. Four hosts at 10 Mb/s and 80 ms hid exchanges that filled two thirds of their links. They waited
for nearly every exchange planned to fill 90 % or more: flows that share a long link leave part of it idle, at times for
seconds. Exchanges that are waited for are not affected."""


def hidden(cluster: Cluster) -> Cluster:
    """The cluster with links at that part of their rate."""
    return structs.replace(cluster, nodes=tuple(
        structs.replace(node, link=structs.replace(node.link, up_bps=FULL * node.link.up_bps,
                                                   down_bps=FULL * node.link.down_bps)) for node in cluster.nodes))


class Excesses:
    """Excess of codecs by a profile's rows. A loss measured on the user's own task replaces the rows' loss for gradients
    exchanged in each step; the extra loss of other sync modes is added to it."""

    def __init__(self, profile: Profile) -> None:
        self._rows = profile.learning
        self._losses = {bare(cost.codec): cost.task_loss for cost in profile.codecs if cost.task_loss is not None}

    def of(self, codecs: Sequence[str], down: str, recipe: Recipe) -> Excess:
        """`codecs`: the nodes' upload codecs, of which the mean counts. `down`: the download codec, if it differs."""
        ups = [self._of(codec, recipe) for codec in dict.fromkeys(codecs)]
        parts = [codecs.count(codec) / len(codecs) for codec in dict.fromkeys(codecs)]
        up = summed(parts, ups) if len(ups) > 1 else ups[0]
        return summed((0.5, 0.5), (up, self._of(down, recipe))) if down else up

    def _of(self, codec: str, recipe: Recipe) -> Excess:
        measured = excess(self._rows, codec, recipe)
        loss = self._losses.get(bare(codec)) if self._losses else None
        if loss is None:
            return measured
        plain = excess(self._rows, codec, recipe._replace(codes="gradients", every=1, overlap="", late=False))
        return measured._replace(loss=loss + max(0.0, measured.loss - plain.loss),
                              loss_high=loss + max(0.0, measured.loss_high - plain.loss_high))


def recipe_of(plan: Plan, cluster: Cluster, policy: Policy) -> Recipe:
    """A plan's recipe, with no stale results."""
    return Recipe(policy.optimizer, plan.codes, plan.local_steps, plan.overlap, False, cluster.ranks, plan.fragments)


def plan_excess(plan: Plan, job: Job, cluster: Cluster, profile: Profile, policy: Policy) -> Excess:
    known, recipe = Excesses(profile), recipe_of(plan, cluster, policy)
    each = [known.of(b.by_node or (b.codec,), b.down, recipe._replace(late=b.stale)) for b in plan.buckets]
    return summed(weights(job, [b.slices for b in plan.buckets], profile.energy), each)


def weights(job: Job, groups: Sequence[tuple[Slice, ...]], energy: Sequence[float] = ()) -> list[float]:
    """Weight of each group of slices; together 1 for the whole model.

    Energy alone would describe the present cost of coding a part. Energy moves while a model learns, mostly to parts that had
    little of it at first.
    """
    total = max(1, job.numel)
    total_energy, numels = sum(energy), [max(1, info.numel) for info in job.tensors]
    of = [1 / total + (energy[i] / total_energy / numels[i] if energy else 1 / total) for i in range(len(job.tensors))]
    return [sum([of[s.tensor] * s.numel for s in slices]) / 2 for slices in groups]


def summed(parts: Sequence[float], each: Sequence[Excess]) -> Excess:
    """
    >>> summed((0.5, 0.5), (Excess(0.1, 0.2), Excess(0.3, 0.4))).steps
    0.2
    """
    if not each:
        return NONE
    return Excess(*(sum([part * value for part, value in zip(parts, field, strict=True)]) for field in zip(*each, strict=True)))

"""Computes the tasks of a bucket on a path, with the seconds that each occupies a lane (a resource that runs one task at a
time).

    compute:NODE   backward, and GPU codecs     cpu:NODE[.OWNER]   the codec lane of a rank
    intra:NODE     between the node's ranks     up:NODE down:NODE  its link     server:NODE   the summation server it hosts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.planner.convergence import NONE, Excess, Recipe, excess
from commlayer.planner.data.noise import find_noise
from commlayer.planner.model import (
    ZERO,
    Cluster,
    CodecCost,
    Group,
    LinearCost,
    Node,
    Profile,
    Question,
    bare,
    equal_node_groups,
)
from commlayer.planner.problem import Network, Task, Template
from commlayer.planner.tree import CODING, Op, Path, format_path, parse, uses_server
from commlayer.records import Job, Plan, Slice


class CollectiveTraffic(NamedTuple):
    """One collective among n members: number of messages in sequence, and how often a member's bytes cross its link."""

    messages: float
    passes: float


def _rounds(n: int) -> int:
    """log2(n), rounded up."""
    return (n - 1).bit_length()


def collective_traffic(name: str, n: int) -> CollectiveTraffic:
    match name:
        case "allreduce":
            return CollectiveTraffic(2 * (n - 1), 2 * (n - 1) / n)
        case "reduce_scatter" | "alltoall":
            return CollectiveTraffic(n - 1, (n - 1) / n)
        case "allgather":
            return CollectiveTraffic(n - 1, n - 1)
        case "gather":
            return CollectiveTraffic(_rounds(n), n - 1)
        case _:  # reduce, broadcast
            return CollectiveTraffic(_rounds(n), min(n - 1, 1))


def uplink_passes(name: str, n: int, per_node: int) -> float:
    """How often one rank's bytes cross the busiest node's link in a collective over all n ranks.

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
    return collective_traffic(name, n).passes


FLOAT_NBYTES = 4
FLOATS = LinearCost(0.0, FLOAT_NBYTES)
FIRST_HALVES = ("reduce_scatter", "alltoall", "reduce", "gather")


class GroupCosts(NamedTuple):
    """A node group's codec costs for upload and download, by device."""

    up: dict[str, CodecCost]
    down: dict[str, CodecCost]


@dataclass
class RankData:
    """What each of `flows` ranks of a node holds of a bucket, while the path's operations are applied in order."""

    last: tuple[int, ...] = ()
    """Indices of the tasks that the next task waits for."""
    part: float = 1.0
    """Fraction of the bucket that the rank holds."""
    pieces: float = 0.0
    """Number of payloads; 0: uncompressed floats."""
    each: float = 1.0
    """Fraction of the bucket in one payload."""
    size: LinearCost = ZERO
    """Bytes of one payload."""
    flows: int = 1
    coder: str = "gpu"
    """Device that encoded the payloads."""
    split: dict[str, int] = field(default_factory=dict)
    """Maps the scope of a scatter-type collective whose gather is still to come to its number of members."""

    @property
    def nbytes(self) -> LinearCost:
        return self.size * self.pieces if self.pieces else FLOATS.part(self.part)


class PathTasks:
    """Applies one path with one codec to all node groups of a cluster: `tasks` are the resulting tasks, `held` is each group's
    final state."""

    def __init__(
        self, path: Path, groups: Sequence[Group], costs: Sequence[GroupCosts], emit: CodecCost | None, profile: Profile,
        hosts: Mapping[int, float], owner: int,
    ) -> None:
        """`hosts`: maps the groups of the nodes that sum to each node's fraction of the sum. `emit`: cost of the servers'
        download codec. `owner`: the local rank that encodes if only one rank holds the bucket."""
        self.path, self.groups, self.profile, self.owner = path, groups, profile, owner
        self.costs, self.hosts = costs, hosts
        self.arrivals = 0
        """Number of payloads that servers receive for each part of the bucket."""
        self.summed: tuple[int, ...] = ()
        """Indices of the servers' last summation tasks."""
        self.returned = False
        self.workers = [g for g, group in enumerate(groups) if group.workers]
        self.nodes = sum(groups[g].workers for g in self.workers)
        self.ranks = sum(groups[g].workers * groups[g].node.ranks for g in self.workers)
        self.held = {g: RankData(flows=groups[g].node.ranks) for g in self.workers}
        self.tasks: list[Task] = []
        for place, op in enumerate(path):
            self._op = str(op)
            match op.name, op.where:
                case ("encode" | "decode"), _:
                    for g in self.workers:
                        (self._encode if op.name == "encode" else self._decode)(op, g)
                case "push", _:
                    self._push()
                case ("pull" | "forward"), _ if emit is not None:
                    self._results(op, path[place + 1 :], emit)
                case _, "node":
                    for g in self.workers:
                        self._add_node_collective(op, g)
                case _:
                    self._add_global_collective(op)
        # A bucket's fixed cost is charged to the first tasks, those that wait for none.
        for i, task in enumerate(self.tasks):
            if not task.after and task.lanes:
                lane, seconds = task.lanes[0]
                self.tasks[i] = task._replace(lanes=((lane, seconds + LinearCost(profile.bucket_s)), *task.lanes[1:]))

    def _add(
        self, lanes: Sequence[tuple[str, LinearCost]], after: tuple[int, ...], latency: LinearCost = ZERO,
        nbytes: LinearCost = ZERO, *, op: str = "",
    ) -> tuple[int]:
        """Adds a task. `op`: if it is not the path's present operation."""
        self.tasks.append(Task(tuple(lanes), after, latency, op or self._op, nbytes))
        return (len(self.tasks) - 1,)

    def _code(self, op: Op, g: int, seconds: LinearCost, cost: CodecCost) -> None:
        """Adds an encode or decode task. Copies to and from the host count for the lane that encodes, as in the runtime."""
        group, held = self.groups[g], self.held[g]
        lane = f"{'compute' if op.where == 'gpu' else 'cpu'}:{group.name}"
        if op.where == "gpu" and group.node.device == "cpu":
            raise InvalidInput("E-PLAN-PATH",
                               f"path {format_path(self.path)!r}: {op}, but node {group.name} has no GPU; code on cpu")
        if op.where == "cpu" and held.flows == 1 and group.node.ranks > 1 and self.owner:
            lane += f".{self.owner}"
        if cost.device == "gpu":
            seconds *= 1 / group.node.speed
        elif op.where == "cpu" and group.node.device != "cpu":
            seconds += self.profile.copy.of(FLOATS.part(held.part))
        held.last = self._add([(lane, seconds)], held.last)

    def _encode(self, op: Op, g: int) -> None:
        held, cost = self.held[g], self.costs[g].up[op.where]
        self._code(op, g, cost.encode.part(held.part), cost)
        held.pieces, held.each, held.size, held.coder = 1, held.part, cost.nbytes.part(held.part), op.where

    def _decode(self, op: Op, g: int) -> None:
        held = self.held[g]
        cost = (self.costs[g].down if self.returned else self.costs[g].up)[op.where]
        self._code(op, g, LinearCost(cost.decode.floor_s * held.pieces, cost.decode.slope_s * held.pieces * held.each), cost)
        held.pieces = 0

    def _add_node_collective(self, op: Op, g: int) -> None:
        """Adds a collective among the ranks of a node; nothing is added for a node of one rank."""
        group, held = self.groups[g], self.held[g]
        n = group.node.ranks
        if n > 1:
            traffic = collective_traffic(op.name, n)
            seconds = LinearCost(traffic.messages * group.node.intra_alpha_s * self._rounds(g))
            seconds += held.nbytes * (traffic.passes * 8 / group.node.intra_bps)
            held.last = self._add([(f"intra:{group.name}", seconds)], held.last)
        self._share(op, g, n)
        if op.name in ("reduce", "gather"):
            held.flows = 1
        elif op.name in ("reduce_scatter", "alltoall"):
            held.flows = n

    def _add_global_collective(self, op: Op) -> None:
        """Adds a collective over all ranks, or over the ranks with one local number: one task that occupies every link as long
        as the slowest."""
        everyone = op.where == "all"
        n = self.ranks if everyone else self.nodes
        if n > 1:
            nodes = [self.groups[g].node for g in self.workers]
            widest, traffic = max(node.ranks for node in nodes), collective_traffic(op.name, n)
            held = max((self._contribution(op, g) for g in self.workers), key=_slope)
            flows = max(self.held[g].flows for g in self.workers)
            passes = uplink_passes(op.name, n, widest) if everyone else traffic.passes * flows
            nbytes = held * passes
            link_bps = min(min(node.link.up_bps, node.link.down_bps) for node in nodes)
            wires = [nbytes * max(8 / link_bps, self.profile.across.slope_s)] if passes else []
            lanes = [f"{end}:{self.groups[g].name}" for g in self.workers for end in ("up", "down")] if self.nodes > 1 else []
            if everyone and widest > 1:
                wires.append(held * (traffic.passes * 8 / min(node.intra_bps for node in nodes if node.ranks > 1)))
                lanes += [f"intra:{self.groups[g].name}" for g in self.workers if self.groups[g].node.ranks > 1]
            rounds = max(self._rounds(g) for g in self.workers)
            seconds = LinearCost(traffic.messages * self._alpha_s() * rounds) + max(wires, key=_slope)
            after = tuple(sorted({i for g in self.workers for i in self.held[g].last}))
            last = self._add([(lane, seconds) for lane in lanes], after, nbytes=nbytes)
            for g in self.workers:
                self.held[g].last = last
        for g in self.workers:
            self._share(op, g, n)

    def _contribution(self, op: Op, g: int) -> LinearCost:
        """Bytes that a rank contributes to a collective. An all-reduce of compressed payloads may need more bytes than the
        payloads have."""
        held = self.held[g]
        reduced = self.costs[g].up[held.coder].reduced if op.name == "allreduce" and held.pieces else ZERO
        return reduced.part(held.part) if reduced.slope_s else held.nbytes

    def _alpha_s(self) -> float:
        """Worst latency of one hop between nodes, in seconds; between ranks if there is only one node."""
        if self.nodes == 1:
            return self.groups[self.workers[0]].node.intra_alpha_s
        apart = sorted(self.groups[g].node.link.alpha_s for g in self.workers for _ in range(min(2, self.groups[g].workers)))
        return max(sum(apart[-2:]), self.profile.across.floor_s)

    def _rounds(self, g: int) -> int:
        return max((c.rounds for c in self.costs[g].up.values()), default=1) if self.held[g].pieces else 1

    def _share(self, op: Op, g: int, n: int) -> None:
        """Updates what a rank holds after a collective among n members."""
        held = self.held[g]
        second = op.where in held.split
        if op.name in FIRST_HALVES:
            held.split[op.where] = n
        if op.name in ("reduce_scatter", "alltoall"):
            held.part /= n
        if op.name == "alltoall":
            held.each, held.size = held.each / n, held.size * (1 / n)
        if op.name in ("alltoall", "gather", "allgather"):
            held.pieces *= n
        if op.name == "allgather" and second:
            held.part *= n
        if second:
            del held.split[op.where]

    def _push(self) -> None:
        """Adds uploads from every node to the hosts, which sum in the members' order. A host's own payloads do not cross a
        link."""
        self.arrivals = sum(self.groups[g].workers * self.held[g].flows for g in self.workers)
        added: dict[int, tuple[int, ...]] = dict.fromkeys(self.hosts, ())
        for g in self.workers:
            held, group, cost = self.held[g], self.groups[g], self.costs[g].up["server"]
            sent = held.nbytes * held.flows
            self._transfer(g, "up", sent, held.nbytes if held.coder == "gpu" else ZERO)
            payloads = group.workers * held.flows * held.pieces
            for h, share in self.hosts.items():
                seconds = LinearCost((cost.decode.floor_s + self.profile.server.floor_s) * payloads,
                                     cost.decode.slope_s * payloads * held.each * share)
                seconds += sent * (group.workers * share * self.profile.server.slope_s)
                added[h] = self._add([(f"server:{self.groups[h].name}", seconds)],
                                     tuple(sorted({*held.last, *added[h]})), op="server.add")
        self.summed = tuple(sorted({i for last in added.values() for i in last}))

    def _results(self, op: Op, rest: Path, emit: CodecCost) -> None:
        """Adds downloads: the hosts encode their sums once, or forward merged payloads, and send them to every node."""
        self.returned = True
        pieces = max(self.held[g].flows for g in self.workers)
        done, merged = self.summed, 1.0
        if op.name == "pull":
            done = tuple(
                self._add([(f"server:{self.groups[h].name}",
                            LinearCost(emit.encode.floor_s * pieces, emit.encode.slope_s * share))],
                          self.summed, op="server.emit")[0]
                for h, share in self.hosts.items())
        elif not emit.sums:
            # All payloads concatenated, unless the uncompressed sum is smaller.
            slope = emit.nbytes.slope_s
            merged = min(self.arrivals / pieces, max(1.0, FLOAT_NBYTES / slope) if slope else 1.0)
        to_gpu = next((o.where == "gpu" for o in rest if o.name == "decode"), False)
        for g in self.workers:
            held = self.held[g]
            held.pieces, held.each, held.last, held.size = merged, held.part, done, emit.nbytes.part(held.part)
            self._transfer(g, "down", held.nbytes * held.flows, held.nbytes if to_gpu else ZERO)

    def _transfer(self, g: int, end: str, sent: LinearCost, copied: LinearCost) -> None:
        """Adds a transfer between a group's nodes and the hosts. `end` is "up" or "down" as the group sees it. `copied`: bytes
        copied between GPU and host memory."""
        group, held, up = self.groups[g], self.held[g], end == "up"
        away = 1 - self.hosts.get(g, 0.0)
        if away <= 0:
            return
        lanes = [(f"{end}:{group.name}", sent * (away * 8 / (group.node.link.up_bps if up else group.node.link.down_bps)))]
        ends = []
        for h, share in self.hosts.items():
            if others := group.workers - (g == h):
                host = self.groups[h]
                ends.append((f"{'down' if up else 'up'}:{host.name}",
                             sent * (others * share * 8 / (host.node.link.down_bps if up else host.node.link.up_bps))))
        far_s = max([self.groups[h].node.link.alpha_s for h in self.hosts if h != g or len(self.groups[h].members) > 1])
        latency = LinearCost((group.node.link.alpha_s + far_s) * self._rounds(g)) + self.profile.copy.of(copied)
        held.last = self._add([*lanes, *ends] if up else [*ends, *lanes], held.last, latency, sent * away)


def _slope(line: LinearCost) -> tuple[float, float]:
    return line.slope_s, line.floor_s


class Prices:
    """Costs of all paths in one cluster. `hosts[s]` is the index in `cluster.nodes` of server s's node.

    Each path and codec is evaluated once, as linear functions of the bucket's size. With `spread`, each bucket is cut over all
    servers in these fractions, and equal nodes stay one group even if they host servers.
    """

    def __init__(
        self, cluster: Cluster, profile: Profile, hosts: Sequence[int] | None = None, *, spread: Sequence[float] = (),
    ) -> None:
        if hosts is None:
            hosts = [i for i, node in enumerate(cluster.nodes) if node.server][:1]
        if profile.inside.slope_s:  # measured
            cluster = structs.replace(cluster, nodes=tuple(
                structs.replace(node, intra_bps=8 / profile.inside.slope_s, intra_alpha_s=profile.inside.floor_s)
                for node in cluster.nodes))
        self.cluster, self.profile, self.hosts, self.spread = cluster, profile, tuple(hosts), tuple(spread)
        self.groups = equal_node_groups(cluster, self.hosts, spread=bool(spread))
        self.network = Network([group.name for group in self.groups if group.workers])
        self._costs = {(bare(c.codec), c.device): c for c in profile.codecs}
        self._node_of = [i for i, node in enumerate(cluster.nodes) if node.ranks]
        self._templates: dict[object, Template] = {}
        self._widest = max(group.node.ranks for group in self.groups)

    def template(
        self, path: Path | str, codec: str, server: int = 0, owner: int = 0, down: str = "", by_node: tuple[str, ...] = (),
    ) -> Template:
        """A bucket's tasks as functions of its size. `down` and `by_node` as in `Bucket`; `server` is an index into `hosts`."""
        key = path, codec, server, owner, down, by_node
        if key not in self._templates:
            self._templates[key] = self.network.template(self.walk(*key).tasks)
        return self._templates[key]

    def walk(
        self, path: Path | str, codec: str, server: int = 0, owner: int = 0, down: str = "", by_node: tuple[str, ...] = (),
    ) -> PathTasks:
        ops = parse(path, self._widest) if isinstance(path, str) else path
        over_server = uses_server(ops)
        devices = sorted({op.where for op in ops if op.name in CODING})
        known: dict[tuple[str, str, bool], GroupCosts] = {}
        costs = []
        for group, name in zip(self.groups, self._codecs(codec, by_node), strict=True):
            key = name, group.node.device, group.workers > 0
            if key not in known:
                up = {d: self.cost(name, d, group.node) for d in devices} if group.workers else {}
                back = {d: self.cost(down, d, group.node) for d in devices} if down and group.workers else up
                known[key] = GroupCosts(up | {"server": self.cost(name, "cpu", group.node)} if over_server else up, back)
            costs.append(known[key])
        hosts = self._hosts(server) if over_server else {}
        emit = self.cost(down or codec, "cpu", self.groups[next(iter(hosts))].node) if over_server else None
        return PathTasks(ops, self.groups, costs, emit, self.profile, hosts, owner)

    def cost(self, codec: str, device: str, node: Node) -> CodecCost:
        """Cost of a codec on this node's GPU or CPU, from the profile."""
        spec = bare(codec)
        for name in (spec, spec.without_shapes()) if spec.core.get("shapes") else (spec,):
            for where in (node.device, device) if device == "gpu" else (device,):
                if (name, where) in self._costs:
                    return self._costs[name, where]
        known = ", ".join(sorted({c.codec for c in self.profile.codecs if c.device == device})) or "none"
        raise InvalidInput("E-PLAN-CODEC-COST",
                           f"profile {self.profile.source!r} has no cost of {codec} on {device}, it has: {known}")

    def _hosts(self, server: int) -> dict[int, float]:
        """The groups whose nodes sum the server's buckets, with each node's fraction."""
        if self.spread:
            part = dict(zip(self.hosts, self.spread, strict=True))
            return {g: part[group.members[0]] for g, group in enumerate(self.groups) if group.hosts}
        if not 0 <= server < len(self.hosts):
            raise InvalidInput("E-PLAN-INPUT", f"server {server}: the plan's servers are 0 to {len(self.hosts) - 1}")
        return {next(g for g, group in enumerate(self.groups) if self.hosts[server] in group.members): 1.0}

    def _codecs(self, codec: str, by_node: tuple[str, ...]) -> list[str]:
        """The upload codec of each node group."""
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
                                   "equal nodes are planned as one group: give them one codec")
            result.append(mine.pop())
        return result


FULL = 2 / 3
"""Usable fraction of a link's rate for hidden exchanges. Four hosts at 10 Mb/s and 80 ms hid exchanges that filled 60 % of
their links. Plans that filled three quarters made steps 10 to 25 % longer, and those that filled 90 % or more were rarely
hidden: flows that share a long link leave part of it idle, at times for seconds. Blocking exchanges are not affected."""


def overlapped_cluster(cluster: Cluster, fraction: float = FULL) -> Cluster:
    """A copy of the cluster with link rates reduced to the usable fraction, for exchanges hidden behind computing."""
    nodes = tuple(structs.replace(node, link=node.link.scaled(fraction)) for node in cluster.nodes)
    return structs.replace(cluster, nodes=nodes)


class Excesses:
    """Looks up the convergence cost of codecs in a profile's rows. A loss measured on the user's own task replaces the rows'
    loss for gradients exchanged in each step; the additional loss of other sync modes is added."""

    def __init__(self, profile: Profile) -> None:
        self._rows = profile.learning
        self._losses = {bare(cost.codec): cost.task_loss for cost in profile.codecs if cost.task_loss is not None}

    def of(self, codecs: Sequence[str], down: str, recipe: Recipe) -> Excess:
        """The mean convergence cost of `codecs`, the nodes' upload codecs. `down`: the download codec, if it differs."""
        ups = [self._compute_excess(codec, recipe) for codec in dict.fromkeys(codecs)]
        parts = [codecs.count(codec) / len(codecs) for codec in dict.fromkeys(codecs)]
        up = weighted_sum(parts, ups) if len(ups) > 1 else ups[0]
        return weighted_sum((0.5, 0.5), (up, self._compute_excess(down, recipe))) if down else up

    def _compute_excess(self, codec: str, recipe: Recipe) -> Excess:
        measured = excess(self._rows, codec, recipe)
        loss = self._losses.get(bare(codec)) if self._losses else None
        if loss is None:
            return measured
        plain = excess(self._rows, codec, recipe._replace(codes="gradients", every=1, overlap="", late=False))
        return measured._replace(loss=loss + max(0.0, measured.loss - plain.loss),
                                 loss_high=loss + max(0.0, measured.loss_high - plain.loss_high))


def recipe_from_plan(plan: Plan, question: Question) -> Recipe:
    """The settings of a plan that affect convergence, with `late` False."""
    job = question.job
    return Recipe(question.policy.optimizer, plan.codes, plan.local_steps, plan.overlap, False, question.cluster.ranks,
                  plan.fragments, job.numel, find_noise(job))


def plan_excess(plan: Plan, question: Question) -> Excess:
    """The convergence cost of a plan, whatever the plan itself predicts."""
    known, recipe = Excesses(question.profile), recipe_from_plan(plan, question)
    each = [known.of(b.by_node or (b.codec,), b.down, recipe._replace(late=b.stale)) for b in plan.buckets]
    return weighted_sum(bucket_weights(question.job, [b.slices for b in plan.buckets], question.profile.energy), each)


def bucket_weights(job: Job, groups: Sequence[tuple[Slice, ...]], energy: Sequence[float] = ()) -> list[float]:
    """Weight of each group of slices in the whole model's convergence cost; all weights sum to 1. A weight is the mean of the
    group's fraction of elements and its fraction of gradient energy.

    Energy alone would describe only the present: while a model learns, energy moves, mostly to parts that had little at
    first.
    """
    total, total_energy = max(1, job.numel), sum(energy)
    of = [1 / total + own / total_energy / max(1, info.numel) for own, info in zip(energy, job.tensors, strict=True)] \
        if energy else [2 / total] * len(job.tensors)
    return [sum([of[s.tensor] * s.numel for s in slices]) / 2 for slices in groups]


def weighted_sum(parts: Sequence[float], each: Sequence[Excess]) -> Excess:
    """
    >>> weighted_sum((0.5, 0.5), (Excess(0.1, 0.2), Excess(0.3, 0.4))).steps
    0.2
    """
    if not each:
        return NONE
    return Excess(*(sum([part * value for part, value in zip(parts, field, strict=True)]) for field in zip(*each, strict=True)))

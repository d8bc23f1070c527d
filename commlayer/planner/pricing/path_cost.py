"""Prices a path: the tasks that a bucket puts on the lanes of the cluster.

    compute:NODE   backward, and GPU codecs     cpu:NODE[.OWNER]   the codec lane of a rank
    intra:NODE     between the node's ranks     up:NODE down:NODE  its link     server:NODE   the summation server it hosts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from commlayer.codec_spec import CodecSpec, parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner.model.cluster import Cluster, CodecCost, Line, Node, Profile, Task
from commlayer.planner.model.equal_nodes import Group, fold
from commlayer.planner.model.paths import CODING, Path, parse
from commlayer.planner.pricing.path_work import Coded, Walk, WalkedOp
from commlayer.planner.pricing.template import Template, template


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

"""Inputs of the planner (machines, measured costs, policy) and the options and node groups that the search works with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec import structs

from commlayer.codec_spec import CodecSpec, parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner.convergence import LearningRow
from commlayer.records import Job, Plan, Record, Timing, over_server

NO_LIMIT = 1e9
"""A limit on loss that excludes no plan."""


class LinearCost(Record, frozen=True):
    """A linear function of a size in elements or bytes, usually in seconds: floor_s + size * slope_s."""

    floor_s: float
    slope_s: float = 0.0
    error: float = 0.0
    """Largest relative deviation of the measured points from the line."""

    def __call__(self, size: float) -> float:
        return self.floor_s + size * self.slope_s

    def __add__(self, other: LinearCost) -> LinearCost:
        return LinearCost(self.floor_s + other.floor_s, self.slope_s + other.slope_s)

    def __mul__(self, factor: float) -> LinearCost:
        return LinearCost(self.floor_s * factor, self.slope_s * factor)

    def part(self, fraction: float) -> LinearCost:
        """The line as a function of x whose argument is fraction * x."""
        return LinearCost(self.floor_s, self.slope_s * fraction)

    def of(self, size: LinearCost) -> LinearCost:
        """The composition of two lines: this line evaluated at `size`, which is itself a line."""
        return LinearCost(self.floor_s + self.slope_s * size.floor_s, self.slope_s * size.slope_s)


ZERO = LinearCost(0.0)


class Link(Record, frozen=True):
    """One machine's network connection, with separate rates for each direction. alpha_s: one-way latency to the network's
    core."""

    up_bps: float
    down_bps: float
    alpha_s: float = 0.0

    def scaled(self, factor: float) -> Link:
        """A link whose rates are this many times as high."""
        return Link(factor * self.up_bps, factor * self.down_bps, self.alpha_s)


class Node(Record, frozen=True):
    """One machine: its ranks, their device, its network link and the connection between its ranks."""

    name: str
    ranks: int
    device: str
    """A known GPU ("rtx3060"), or "cpu"."""
    link: Link
    intra_bps: float = 0.0
    """Bandwidth in bit/s between two ranks of the node, in each direction. 0: the node has one rank."""
    intra_alpha_s: float = 0.0
    speed: float = 1.0
    """Compute speed relative to the profile's device."""
    server: bool = True


class Cluster(Record, frozen=True):
    """The machines of a job. Nodes without ranks (ranks = 0) can only host servers."""

    nodes: tuple[Node, ...]
    reachable: bool = True
    """True: collectives can cross nodes. False over the internet, where nodes communicate only through servers."""

    @property
    def ranks(self) -> int:
        return sum(n.ranks for n in self.nodes)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks on each training node; 1 if the numbers differ."""
        counts = {n.ranks for n in self.nodes if n.ranks}
        return counts.pop() if len(counts) == 1 else 1


def bare(codec: str) -> CodecSpec:
    """The codec as profiles list it: without error feedback, whose cost is included in the profile's figures, and
    independent of spelling.

    >>> bare("error_feedback(topk(0.01))") == bare("topk(ratio=0.01, values='int8')")
    True
    """
    return parse_spec(codec).bare


class CodecCost(Record, frozen=True):
    """Time and payload size of one codec on one device, by number of elements."""

    codec: str
    """The codec as in plans, without error feedback."""
    device: str
    """"gpu", "cpu", or a GPU's name as in `Node.device`, which takes precedence over "gpu"."""
    encode: LinearCost
    decode: LinearCost
    """Seconds to decode one payload and add it to a sum."""
    nbytes: LinearCost
    """Bytes of a payload by number of elements: the only Line that is not a time."""
    task_loss: float | None = None
    """Relative increase of the loss after the same number of steps (0.01: 1 %), measured on the user's own task with an
    exchange in every step. None: the profile's learning rows determine the loss."""
    rounds: int = 1
    """Number of exchanges per bucket; each pays the latency again. `nbytes` is the total of all."""
    sums: bool = False
    """True: an all-reduce can add the codec's payloads without decoding."""
    alone: bool = True
    """True: one payload can be decoded without the others and added to a dense sum."""
    answers: bool = True
    """True: a server may encode its sums with this codec when workers use another codec."""
    reduced: LinearCost = LinearCost(0.0)
    """Bytes that an all-reduce adds instead of payloads, by number of elements; 0: the payloads themselves."""


class Profile(Record, frozen=True):
    """Costs of codecs, servers and collectives, measured or from tables."""

    codecs: tuple[CodecCost, ...]
    server: LinearCost
    """A server's seconds per payload byte, in addition to its codec's time."""
    bucket_s: float = 0.0
    """Additional seconds per bucket at a worker, for hooks, frames and threads."""
    copy: LinearCost = LinearCost(0.0)
    """Seconds to copy a number of bytes between a GPU and its host."""
    inside: LinearCost = LinearCost(0.0)
    """Collectives among a node's ranks: seconds per message, and per byte on each link. A measured value takes precedence
    over the nodes' links; 0: not measured."""
    across: LinearCost = LinearCost(0.0)
    """Collectives between nodes: seconds per message, and per byte on each link. No collective is faster than the links that it
    crosses."""
    learning: tuple[LearningRow, ...] = ()
    """Measured convergence factors and losses; empty: convergence is ignored."""
    energy: tuple[float, ...] = ()
    """Each tensor's fraction of the gradients' energy (sum of squares). A bucket's codec loss is weighted half by energy, half
    by elements. Empty: by elements only."""
    source: str = "tables"
    """Origin of the costs: "tables", "measured" or a name that the user gave."""


class Policy(Record, frozen=True):
    """The choices that the planner is allowed to make, and its objective."""

    codecs: tuple[str, ...] = ()
    """Allowed codecs; empty: all codecs of the profile."""
    max_loss: float = NO_LIMIT
    """Highest allowed relative increase of the loss after the same number of steps: 0.01 is 1 %."""
    objective: Literal["loss", "step"] = "loss"
    """What the planner minimizes. "loss": seconds to reach a loss, which is step time times convergence factor. "step": step
    time."""
    optimizer: str = ""
    """Optimizer family: "sgd" (with momentum), "adam" (AdamW, LANS and similar), "muon" or "lion". Any other: the highest cost.
    """
    exact: bool = True
    """True: only synchronous SGD, exact up to compression. False: also local steps, compressed updates and one-step-late
    averages."""
    forward: bool = False
    """True: averaged gradients may arrive during the next forward pass (overlap="forward"), which needs a plain module."""
    devices: tuple[str, ...] = ("gpu", "cpu")
    max_encodes: int = 4
    """Largest number of compressions of one gradient along its path."""
    max_local_steps: int = 0
    """Largest number of local steps per exchange. 0: one if `exact`, else as many as reduce the time to a loss. The search
    tries powers of two."""
    staleness: bool | None = None
    """True: averaged gradients may be applied one step late. None: allowed if `exact` is False and learning rows cover
    staleness. Never with a codec that is too sparse for it; see `convergence.late_allowed`."""
    fragments: bool = True
    """True: an outer step's exchange may be split into fragments that are merged one by one. Not possible if workers may
    leave."""
    priority: bool = True
    """True: buckets are sent in the order in which the next forward pass needs them. False: in the order of readiness."""
    whole_tree: bool = False
    """True: the search includes paths that workers cannot run yet (an all-reduce of payloads from GPUs), for comparison
    only."""


class Question(NamedTuple):
    """The planner's complete inputs: a job with its timing, the machines, the costs and what a plan may choose."""

    job: Job
    cluster: Cluster
    profile: Profile
    policy: Policy

    @property
    def timing(self) -> Timing:
        return self.job.timed

    @property
    def steps_count(self) -> bool:
        """True: the objective counts convergence factors, which are known."""
        return self.policy.objective == "loss" and bool(self.profile.learning)


class Basis(NamedTuple):
    """A plan before lowering to the runtime's paths, and the plan's inputs."""

    plan: Plan
    inputs: Question


DENSE = "identity()"


class Option(NamedTuple):
    """The choices of a plan for a bucket, except its server and owner."""

    path: str
    codec: str = DENSE
    down: str = ""
    by_node: tuple[str, ...] = ()

    @property
    def served(self) -> bool:
        """True: a summation server takes part in the path."""
        return over_server(self.path)

    def __str__(self) -> str:
        extra = [f"down {self.down}"] if self.down else []
        extra += [f"by node {', '.join(self.by_node)}"] if self.by_node else []
        return " ".join([self.codec, "over", self.path, *(f"({e})" for e in extra)])


class Group(NamedTuple):
    """Nodes that do the same work at the same time. The first node's lanes (link, CPU, GPU) represent all nodes' lanes in the
    simulation."""

    name: str
    """The first node's name, used in the names of lanes."""
    node: Node
    members: tuple[int, ...]
    """Indices of the group's nodes in the cluster."""
    hosts: bool
    """True: each node of the group runs a summation server."""
    workers: int
    """Number of the group's nodes that train."""


def equal_node_groups(cluster: Cluster, hosts: Sequence[int], *, spread: bool = False) -> tuple[Group, ...]:
    """Groups equal nodes, in the order of their first nodes. `hosts`: indices of the nodes with servers.

    A node with a server is its own group, unless every bucket is `spread` over all servers. Nodes that neither train nor host
    a server are left out.
    """
    for host in hosts:
        if not 0 <= host < len(cluster.nodes):
            raise InvalidInput("E-PLAN-INPUT", f"host {host}: the cluster has nodes 0 to {len(cluster.nodes) - 1}")
    places_of: dict[object, list[int]] = {}
    for place, node in enumerate(cluster.nodes):
        if not node.ranks and place not in hosts:
            continue
        alone = place if place in hosts and not spread else -1
        same = (node.ranks, node.device, node.link, node.intra_bps, node.intra_alpha_s, node.speed)
        places_of.setdefault((same, place in hosts, alone), []).append(place)
    firsts = [(cluster.nodes[places[0]], places) for places in places_of.values()]
    return tuple([Group(first.name, first, tuple(places), places[0] in hosts, len(places) if first.ranks else 0)
                  for first, places in firsts])


KINDS = 6
"""Limit of distinct kinds of nodes in the search; `merge_nodes` merges more kinds."""
ERROR = 0.05
"""Initial tolerance: relative difference between two measurements of one link. `merge_nodes` doubles it until at most KINDS
kinds remain."""


def merge_nodes(cluster: Cluster) -> Cluster:
    """The cluster with similar nodes made equal: each takes the slowest rates of its kind, until at most KINDS kinds remain.

    >>> links = [Link(1e8 * (1 + i / 100), 1e9, 0.01) for i in range(20)]
    >>> few_kinds = merge_nodes(Cluster(tuple(Node(f"n{i}", 1, "cpu", link) for i, link in enumerate(links))))
    >>> [round(bps / 1e6) for bps in sorted({node.link.up_bps for node in few_kinds.nodes})]
    [100, 106, 112, 118]
    """
    error, groups = ERROR, _groups(cluster.nodes, 0.0)
    least = len({_fixed_properties(node) for node in cluster.nodes})
    while len(groups) > max(least, KINDS):
        groups, error = _groups(cluster.nodes, error), 2 * error
    nodes = list(cluster.nodes)
    for places in groups:
        slowest = _slowest([cluster.nodes[place] for place in places])
        for place in places:
            nodes[place] = structs.replace(slowest, name=cluster.nodes[place].name)
    return structs.replace(cluster, nodes=tuple(nodes))


def _groups(nodes: Sequence[Node], error: float) -> list[list[int]]:
    """Groups of node indices whose rates differ by at most the fraction `error`. Each group starts with the slowest remaining
    node."""
    left = sorted(range(len(nodes)), key=lambda place: (_fixed_properties(nodes[place]), _rates(nodes[place]), place))
    groups = []
    while left:
        first = nodes[left[0]]
        group = [left[0]]
        low = high = _rates(first)
        for place in left[1:]:
            each = _rates(nodes[place])
            lower, higher = tuple(map(min, low, each)), tuple(map(max, high, each))
            alike = _fixed_properties(nodes[place]) == _fixed_properties(first)
            if alike and all(b <= a * (1 + error) for a, b in zip(lower, higher, strict=True)):
                low, high = lower, higher
                group.append(place)
        groups.append(group)
        taken = set(group)
        left = [place for place in left if place not in taken]
    return groups


def _fixed_properties(node: Node) -> tuple[object, ...]:
    """Properties that all nodes of a kind have in common."""
    return node.device, node.ranks, node.server


def _rates(node: Node) -> tuple[float, ...]:
    """The node's rates and inverse latencies, so larger is faster. Rates between ranks only if the node has several ranks."""
    inside = (node.intra_bps, 1 / max(node.intra_alpha_s, 1e-9)) if node.ranks > 1 else ()
    # Latencies below 0.02 ms do not distinguish links.
    return (node.link.up_bps, node.link.down_bps, node.speed, 1 / max(node.link.alpha_s, 2e-5), *inside)


def _slowest(nodes: Sequence[Node]) -> Node:
    link = Link(min(n.link.up_bps for n in nodes), min(n.link.down_bps for n in nodes), max(n.link.alpha_s for n in nodes))
    return structs.replace(nodes[0], link=link, speed=min(n.speed for n in nodes), intra_bps=min(n.intra_bps for n in nodes),
                           intra_alpha_s=max(n.intra_alpha_s for n in nodes))


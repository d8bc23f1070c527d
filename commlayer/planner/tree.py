"""Defines paths: the operations of one bucket, and their spelling in a plan. The grammar below defines which paths are legal.

    encode@cpu net.push net.pull decode@cpu                                    summed by a server, compressed both ways
    node.reduce_scatter encode@gpu net.allgather decode@cpu node.allgather     two-level, compressed between nodes

A collective carries payloads between an encode and the next decode, and floats elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Literal, NamedTuple, get_args

from commlayer.errors import InvalidInput
from commlayer.planner.model import Cluster, CodecCost

Scope = Literal["all", "node", "net"]
"""The ranks that take part: "all"; "node": the ranks of one node; "net": the ranks with one local number on all nodes (or one
rank of each node)."""

Device = Literal["gpu", "cpu"]

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "alltoall", "reduce", "gather", "broadcast")
SERVICE = ("push", "pull", "forward")
"""Operations of a summation server (scope net). `pull`: the server encodes the sum again. `forward`: the server sends the
merged payloads unchanged."""

CODING = ("encode", "decode")

ALIASES = {
    "allreduce": "all.allreduce",
    "service": "encode@cpu net.push net.pull decode@cpu",
}
"""Short names. On nodes of several ranks, "service" adds node.reduce before and node.broadcast after."""


class Op(NamedTuple):
    """One operation: a collective in a scope, or an encode or decode on a device."""

    name: str
    where: str
    """Scope of a collective, device of an encode or decode."""

    def __str__(self) -> str:
        return f"{self.name}@{self.where}" if self.name in CODING else f"{self.where}.{self.name}"


Path = tuple[Op, ...]


def format_path(path: Path) -> str:
    return " ".join(map(str, path))


@lru_cache(maxsize=1024)
def parse(text: str, ranks_per_node: int = 1) -> Path:
    """Parses a path, short names included."""
    if text == "service" and ranks_per_node > 1:
        text = f"node.reduce {ALIASES[text]} node.broadcast"
    return tuple(_parsed_op(word, text) for word in ALIASES.get(text, text).split())


def _parsed_op(word: str, text: str) -> Op:
    coding, _, device = word.partition("@")
    if coding in CODING:
        if device not in get_args(Device):
            raise InvalidInput("E-PLAN-PATH", f"path {text!r}: {word!r} names no device, allowed: {coding}@gpu, {coding}@cpu")
        return Op(coding, device)
    scope, _, name = word.partition(".")
    if scope not in get_args(Scope) or name not in COLLECTIVES + SERVICE or (name in SERVICE and scope != "net"):
        raise InvalidInput("E-PLAN-PATH",
                           f"path {text!r}: {word!r} is not an operation, allowed: encode@DEVICE, decode@DEVICE, "
                           f"(all|node|net).({'|'.join(COLLECTIVES)}), "
                           f"net.({'|'.join(SERVICE)}); or the whole path as {' or '.join(ALIASES)}"
        )
    return Op(name, scope)


Kind = Literal["flat", "two-level", "service", "sum"]
KINDS: tuple[Kind, ...] = ("flat", "two-level", "service", "sum")
GPU_AND_CPU: tuple[Device, ...] = ("gpu", "cpu")

Paths = tuple[Path, ...]


def encodes(path: Path) -> int:
    return sum(op.name == "encode" for op in path)


def uses_server(path: Path) -> bool:
    return any(op.name == "push" for op in path)


def sums_payloads(path: Path) -> bool:
    """True: an all-reduce adds payloads, which needs a codec whose payloads can be added."""
    return encodes(path) > 0 and any(op.name == "allreduce" for op in path)


GRAMMAR = {
    "flat": "all.allreduce | all.reduce_scatter floats(all.allgather) | all.reduce floats(all.broadcast)"
            "| encode all.allgather decode"
            "| encode all.alltoall payloads(all.allgather) | encode all.gather payloads(all.broadcast)",
    "two-level": "node.reduce_scatter net_floats(node.allgather) | node.reduce_scatter encode net_payloads(node.allgather)"
                 "| node.reduce net_floats(node.broadcast) | node.reduce encode net_payloads(node.broadcast)"
                 "| inner_payloads(node.alltoall,node.allgather) | inner_payloads(node.gather,node.broadcast)",
    "service": "encode net.push net.pull decode | encode net.push net.forward decode"
               "| node.reduce_scatter encode net.push net.pull decode node.allgather"
               "| node.reduce encode net.push net.pull decode node.broadcast"
               "| node.reduce_scatter encode net.push net.forward decode node.allgather"
               "| node.reduce encode net.push net.forward decode node.broadcast",
    "sum": "encode all.allreduce decode"
           "| node.reduce_scatter encode net.allreduce decode node.allgather"
           "| node.reduce encode net.allreduce decode node.broadcast",
    "floats": "{0} | encode {0} decode",
    "payloads": "{0} decode | decode floats({0})",
    "inner_payloads": "encode {0} net_payloads({1}) | encode {0} decode net_floats({1})"
                      "| encode {0} decode encode net_payloads({1})",
    "net_floats": "net.allreduce floats({0}) | net.reduce_scatter net_second(net.allgather,{0})"
                  "| net.reduce net_second(net.broadcast,{0})",
    "net_payloads": "net.allgather payloads({0})"
                    "| net.alltoall net.allgather payloads({0}) | net.alltoall decode net_second(net.allgather,{0})"
                    "| net.gather net.broadcast payloads({0}) | net.gather decode net_second(net.broadcast,{0})",
    "net_second": "{0} floats({1}) | encode {0} payloads({1})",
}
"""Rules: sequences of operations and other rules, with "|" between alternatives. An encode or decode is on any device. Of two
collectives that sum together, the first divides or gathers floats or payloads, and the second, a rule's argument, returns the
sum. A server adds one payload per rank and bucket, so sums inside a node are encoded before the push."""


@cache
def paths_of_kind(name: Kind, devices: tuple[Device, ...] = GPU_AND_CPU) -> Paths:
    """All paths of one kind, in a fixed order. `devices`: those that encode and decode."""
    return tuple(_alternatives(GRAMMAR[name], devices))


def _alternatives(rule: str, devices: Sequence[Device]) -> Iterator[Path]:
    for alternative in rule.split("|"):
        rows: list[Path] = [()]
        for word in alternative.split():
            tails = _tails(word, devices)
            rows = [row + tail for row in rows for tail in tails]
        yield from rows


def _tails(word: str, devices: Sequence[Device]) -> list[Path]:
    """Returns the paths that a word of the grammar can expand to."""
    name, _, arguments = word.rstrip(")").partition("(")
    if name in CODING:
        return [(Op(name, device),) for device in devices]
    if name in GRAMMAR:
        return list(_alternatives(GRAMMAR[name].format(*arguments.split(",")), devices))
    return [(_parsed_op(word, word),)]


def usable_paths(
    cluster: Cluster, *, devices: Sequence[str] = GPU_AND_CPU, max_encodes: int = 4, sums: bool = False, mixed: bool = False,
    kinds: Sequence[Kind] = KINDS, dense: bool = True, servers: bool = True,
) -> Paths:
    """The paths that this cluster can run.

    `sums`: True for a codec whose payloads can be added. `mixed`: each encode and decode may use its own device, which makes
    4341 instead of 339 paths. `dense`: True includes paths without encoding.
    """
    usable: tuple[Device, ...] = tuple(
        d for d in GPU_AND_CPU if d in devices and (d == "cpu" or any(n.device != "cpu" for n in cluster.nodes if n.ranks))
    )

    def coders(path: Path) -> int:
        return len({op.where for op in path if op.name in CODING})

    return tuple(
        path for name in KINDS if name in kinds and (sums or name != "sum") and (servers or name != "service")
        for path in paths_of_kind(name, usable)
        if encodes(path) <= max_encodes and (mixed or coders(path) <= 1) and (dense or encodes(path))
        and not any(_cluster_breaks(path, cluster))
    )


def path_problems(path: Path, cluster: Cluster | None = None) -> list[str]:
    """Returns a line about the first violation of the grammar. If there is none, returns a line for each rule of the cluster
    that the path violates."""
    if path not in _every():
        return [_first_wrong(path)]
    return [] if cluster is None else list(_cluster_breaks(path, cluster))


def _cluster_breaks(path: Path, cluster: Cluster) -> Iterator[str]:
    workers = [node for node in cluster.nodes if node.ranks]
    ranks = {node.ranks for node in workers}
    scopes = {op.where for op in path if op.name not in CODING}
    inside = "node" in scopes
    if len(workers) > 1 and not cluster.reachable and any(op.name in COLLECTIVES and op.where != "node" for op in path):
        yield ("a collective crosses nodes, but this cluster's nodes cannot reach each other: only net.push with net.pull or "
               "net.forward is possible")
    if len(workers) == 1 and "net" in scopes and not uses_server(path):
        yield "an exchange between nodes (net.*), but the cluster has one node"
    if inside and max(ranks, default=1) == 1:
        yield "an exchange inside nodes (node.*), but every node has one rank"
    if uses_server(path) and not inside and max(ranks, default=1) > 1:
        yield ("every rank would push separately: nodes of several ranks must sum inside first (node.reduce, "
               "node.reduce_scatter)")
    shards = any(op.where == "node" and op.name in ("reduce_scatter", "alltoall") for op in path)
    if shards and len(ranks) > 1 and not uses_server(path):
        yield (f"shards need the same number of ranks on every node, but nodes have {', '.join(map(str, sorted(ranks)))} "
               "ranks: sum onto one rank of each node, with node.reduce or node.gather")
    bare = next((node.name for node in workers if node.device == "cpu"), None)
    if bare is not None and any(op.name in CODING and op.where == "gpu" for op in path):
        yield f"encoding or decoding on a GPU, but node {bare} has none"
    if uses_server(path) and not any(node.server for node in cluster.nodes):
        yield "a server is needed, but no node can host one"


@cache
def _every() -> frozenset[Path]:
    return frozenset(path for name in KINDS for path in paths_of_kind(name))


def _first_wrong(path: Path) -> str:
    """Describes where a path violates the grammar, and what is allowed at that position."""
    known = _every()
    for place in range(len(path) + 1):
        follow = {p[place] if place < len(p) else None for p in known}
        op = path[place] if place < len(path) else None
        if op not in follow:
            break
        known = frozenset(p for p in known if len(p) > place and p[place] == op)
    allowed = ", ".join(sorted("the end" if o is None else str(o) for o in follow))
    where = f"after {format_path(path[:place])!r}" if place else "at the beginning"
    return f"{where}: got {'the end' if op is None else op}, allowed: {allowed}"


class Promise(NamedTuple):
    """Operations that a codec's payloads allow."""

    sums: bool
    """True: an all-reduce can add the payloads without decoding."""
    alone: bool
    """True: one payload can be decoded without the others and added to a dense sum."""
    answers: bool
    """True: a server may encode its sums with this codec, whatever the workers' codec is."""


def promise_from_cost(cost: CodecCost) -> Promise:
    return Promise(cost.sums, cost.alone, cost.answers)


def find_misfits(
    path: Path, up: Iterable[Promise], *, down: Promise | None = None, by_node: bool = False, gpus: bool = False,
) -> Iterator[str]:
    """Yields the reasons why these codecs cannot be used on this path, one line each. `gpus`: True if a worker's gradients are
    on a GPU."""
    if not encodes(path):
        return
    ups = list(up)
    if uses_server(path):
        forwards = any(op.name == "forward" for op in path)
        if (forwards or down is not None) and not all(codec.alone for codec in ups):
            yield "a server changes the encoding of the sum: codecs must need one exchange and sum in dense float32"
        if down is not None and not down.answers:
            yield "`down` is encoded from a dense sum: the codec must need one exchange and sum in dense float32"
        return
    if down is not None or by_node:
        yield "`down` and `by_node` are for path 'service'; on other paths all payloads of a bucket have one codec"
    elif sums_payloads(path) and not all(codec.sums for codec in ups):
        yield "an all-reduce adds payloads: the codec's payloads must be addable, such as those of identity()"
    elif not sums_payloads(path) and not all(codec.alone for codec in ups):
        yield ("every rank adds payloads to a dense sum: codecs must need one exchange and no server; "
               "use path 'service', or, if payloads can be added, 'encode@cpu all.allreduce decode@cpu'")
    if gpus and sums_payloads(path):
        yield "payloads can be added only in host memory: for a model on GPUs choose a path without an all-reduce of payloads"


def on_gpus(cluster: Cluster) -> bool:
    """True: some worker's gradients are on a GPU."""
    return any(node.device != "cpu" for node in cluster.nodes if node.ranks)

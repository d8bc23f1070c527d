"""Clusters and profiles of round numbers for the planner's tests."""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.planner.model.cluster import Cluster, CodecCost, Line, Link, Node, Profile, Task

DENSE, SPARSE, SHARED = "identity()", "topk(ratio=0.01)", "randomk(ratio=0.01)"


def codec(
    name: str, device: str, encode: float, decode: float, nbytes: float, *, sums: bool = False, rounds: int = 1,
) -> CodecCost:
    """Nanoseconds an element; bytes an element; floors of 1 and 2 us, and 16 bytes."""
    return CodecCost(name, device, Line(1e-6, encode * 1e-9), Line(2e-6, decode * 1e-9), Line(16, nbytes), sums=sums,
                     rounds=rounds)


PROFILE = Profile(
    codecs=(
        codec(DENSE, "cpu", 0.5, 0.75, 4, sums=True),
        codec(SPARSE, "cpu", 2, 1, 0.02),
        codec(SPARSE, "gpu", 0.25, 0.125, 0.02),
        codec(SHARED, "cpu", 1, 0.5, 0.04, sums=True),
        codec(SHARED, "gpu", 0.125, 0.0625, 0.04, sums=True),
    ),
    server=Line(0, 0.1e-9),
)


def home(up_bps: float = 20e6, down_bps: float = 100e6, alpha_s: float = 0.01) -> Link:
    return Link(up_bps, down_bps, alpha_s)


def flat(nodes: int, link: Link | None = None, device: str = "v100") -> Cluster:
    """Nodes of one rank."""
    return Cluster(tuple(Node(f"n{i}", 1, device, link or Link(1e9, 1e9, 1e-4)) for i in range(nodes)))


def tall(nodes: int, ranks: int, *, net_bps: float = 1e9, intra_bps: float = 100e9) -> Cluster:
    """Nodes of several ranks."""
    return Cluster(tuple(Node(f"n{i}", ranks, "v100", Link(net_bps, net_bps, 1e-4), intra_bps, 1e-5) for i in range(nodes)))


def fifo_s(buckets: Sequence[Sequence[Task]]) -> float:
    """When all buckets are done, if all are ready at once and each lane takes steps in the order in which they could begin."""
    ends: dict[tuple[int, int], float] = {}
    free: dict[str, float] = {}
    waiting = [(b, t) for b, tasks in enumerate(buckets) for t in range(len(tasks))]
    while waiting:
        able = [(max([0.0, *(ends[b, i] for i in buckets[b][t].after)]), b, t) for b, t in waiting
                if all((b, i) in ends for i in buckets[b][t].after)]
        ready, b, t = min(able)
        task = buckets[b][t]
        start = max([ready, *(free.get(lane, 0.0) for lane, _ in task.lanes)])
        for lane, seconds in task.lanes:
            free[lane] = start + seconds
        ends[b, t] = start + max(seconds for _, seconds in task.lanes) + task.latency_s
        waiting.remove((b, t))
    return max(ends.values())

"""Clusters and profiles of round numbers for the planner's tests."""

from __future__ import annotations

from commlayer.planner.model.cluster import Cluster, CodecCost, Line, Link, Node, Profile

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

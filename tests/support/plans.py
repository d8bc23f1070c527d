"""Small jobs and clusters of the tables for tests of whole plans."""

from __future__ import annotations

from commlayer.planner.data import tables
from commlayer.planner.model import Cluster
from commlayer.records import Job, TensorInfo, Timing


def toy_job(tensors: int = 12, numel: int = 500_000, step_s: float = 0.09) -> Job:
    """Equal tensors, made evenly in two thirds of the step and used evenly in the other."""
    infos = tuple(TensorInfo(f"layer{i}.weight", (numel,)) for i in range(tensors))
    ready = tuple(step_s * 2 / 3 * (tensors - i) / tensors for i in range(tensors))
    needed = tuple(step_s / 3 * i / tensors for i in range(tensors))
    return Job(infos, 32, Timing(ready, needed, step_s * 2 / 3, step_s / 3, 0.001), "toy")


def cluster(
    nodes: int, link: str, *, device: str = "rtx3060", ranks: int = 1, reachable: bool = True, servers: int | None = None,
) -> Cluster:
    result = (tables.node(f"n{i}", device, link, ranks=ranks, server=servers is None or i < servers) for i in range(nodes))
    return Cluster(tuple(result), reachable)


def closed_form(n: int, k: int) -> tuple[float, float, float]:
    """BytePS's split of a model among servers with equal links: the share of each of k other nodes, that of each of n training
    nodes, and seconds per M/B."""
    if not 0 <= k <= n or n < 2:
        raise ValueError(f"closed form: got n={n}, k={k}, allowed: n of 2 or more, k from 0 to n")
    d = n * n + k * n - 2 * k
    return 2 * (n - 1) / d, (n - k) / d, 2 * n * (n - 1) / d

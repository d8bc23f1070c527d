"""Published methods that relax the barrier instead of balancing load, as event simulations in virtual time.

They trade staleness for throughput, so a result has both, and the factor by which a staleness-aware method scales its
learning rate. All workers have equal shares of the total batch.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from bench.reference.balance_cluster import PlayedCluster
from commlayer.records import Record


class Relaxed(Record, frozen=True):
    """Result of a run. Runs have the same mean number of gradients per worker."""

    samples_per_s: float
    updates: int
    """Updates of the shared parameters (for local steps, averagings)."""
    staleness_mean: float
    """Updates between the read of a gradient's parameters and its use."""
    staleness_max: int

    @property
    def rate_scale(self) -> float:
        """Staleness-aware methods divide the learning rate by the mean staleness if that exceeds 1."""
        return 1 / max(1.0, self.staleness_mean)


def local_steps(cluster: PlayedCluster, steps: int, every: int, sync_s: float = 0.0) -> Relaxed:
    """Local SGD: parameters are averaged every `every` steps; every = steps is one-shot averaging."""
    if every < 1:
        raise ValueError(f"every: got {every}, allowed is 1 step or more")
    batch, workers = _equal(cluster)
    now_s, rounds = 0.0, 0
    for first in range(0, steps, every):
        of_round = range(first, min(first + every, steps))
        now_s += max(sum(cluster.compute_s(w, batch, step) for step in of_round) for w in workers) + sync_s
        rounds += 1
    return Relaxed(steps * batch * len(workers) / now_s, rounds, 0.0, 0)


def n_soft(cluster: PlayedCluster, steps: int, n: int, sync_s: float = 0.0) -> Relaxed:
    """N-soft synchronization: the server applies floor(workers / n) gradients at a time, from any workers.

    n = 1 applies as many gradients at a time as there are workers; n = workers is asynchronous.
    """
    if n < 1:
        raise ValueError(f"n: got {n}, allowed is 1 or more")
    batch, workers = _equal(cluster)
    group = max(1, len(workers) // n)
    version, collected, staleness = 0, 0, list[int]()
    clock = dict.fromkeys(workers, 0)
    arrivals = [(cluster.compute_s(w, batch, 0) + sync_s, w, 0) for w in workers]
    heapq.heapify(arrivals)
    now_s = 0.0
    for _ in range(steps * len(workers)):
        now_s, worker, pulled = heapq.heappop(arrivals)
        staleness.append(version - pulled)
        collected += 1
        if collected == group:
            version, collected = version + 1, 0
        clock[worker] += 1
        heapq.heappush(arrivals, (now_s + cluster.compute_s(worker, batch, clock[worker]) + sync_s, worker, version))
    return _told(steps * len(workers) * batch, now_s, version, staleness)


def stale_synchronous(cluster: PlayedCluster, steps: int, slack: int, sync_s: float = 0.0) -> Relaxed:
    """SSP (stale synchronous parallel): a worker may lead the slowest one by at most `slack` clocks; otherwise it waits."""
    batch, workers = _equal(cluster)
    ends = {w: [0.0] for w in workers}
    for step in range(steps):
        for w in workers:
            # Clock `step` of a worker starts after all workers have ended clock `step - slack`.
            gate_s = max(ends[v][step - slack] for v in workers) if step - slack >= 0 else 0.0
            ends[w].append(max(ends[w][step], gate_s) + cluster.compute_s(w, batch, step) + sync_s)
    starts = {w: [end - cluster.compute_s(w, batch, step) - sync_s for step, end in enumerate(ends[w][1:])] for w in workers}
    # Staleness of a gradient: clocks of the slowest worker that it should have seen and did not.
    staleness = [
        max(0, step - min(_finished(ends[v], starts[w][step]) for v in workers)) for w in workers for step in range(steps)
    ]
    return _told(steps * len(workers) * batch, max(ends[w][-1] for w in workers), steps * len(workers), staleness)


def majority(cluster: PlayedCluster, steps: int, quorum: Callable[[int], int] = lambda n: -(-n // 2)) -> Relaxed:
    """EagerSGD-like: a round ends once a majority has arrived; a late gradient counts in the round in which it arrives."""
    batch, workers = _equal(cluster)
    need = quorum(len(workers))
    now_s, counted, staleness, rounds = 0.0, 0, list[int](), 0
    clock = dict.fromkeys(workers, 0)
    done_at = {w: (cluster.compute_s(w, batch, 0), 0) for w in workers}
    while counted < steps * len(workers):
        now_s = max(now_s, sorted(end for end, _ in done_at.values())[need - 1])
        for w in workers:
            end, began = done_at[w]
            if end <= now_s:
                staleness.append(rounds - began)
                counted, clock[w] = counted + 1, clock[w] + 1
                done_at[w] = (now_s + cluster.compute_s(w, batch, clock[w]), rounds + 1)
        rounds += 1
    return _told(counted * batch, now_s, rounds, staleness)


def _equal(cluster: PlayedCluster) -> tuple[int, range]:
    if cluster.total < len(cluster.lines):
        raise ValueError(f"equal shares: total {cluster.total} is less than {len(cluster.lines)} workers; raise it")
    return cluster.total // len(cluster.lines), range(len(cluster.lines))


def _finished(ends: list[float], at_s: float) -> int:
    """Number of clocks that ended by `at_s`."""
    return sum(end <= at_s + 1e-12 for end in ends) - 1


def _told(samples: int, seconds: float, updates: int, staleness: list[int]) -> Relaxed:
    mean = sum(staleness) / len(staleness) if staleness else 0.0
    return Relaxed(samples / seconds if seconds else math.inf, updates, mean, max(staleness, default=0))

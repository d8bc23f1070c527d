"""commlayer's balancer as a mode of the simulated cluster; lifetimes become joins and departures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.reference.balance_cluster import PlayedCluster
from commlayer.balance.balancer import Balancer, Decision, Input, Joined, Measurement, Policy, Vanished
from commlayer.balance.share_solver import FREE, Communication
from commlayer.balance.time_models import Line


class Ours:
    """The balancer; its decisions apply from their announced step. With `profiled` it starts from the undisturbed lines."""

    def __init__(
        self, cluster: PlayedCluster, policy: Policy | None = None, communication: Communication = FREE, profiled: bool = True
    ) -> None:
        self.workers = len(cluster.lines)
        self.caps = cluster.caps or (None,) * self.workers
        self.lines: list[Line | None] = list(cluster.lines) if profiled else [None] * self.workers
        self.there = {worker for worker in range(self.workers) if cluster.there(worker, 0)}
        joined = [Joined(worker, self.caps[worker], self.lines[worker]) for worker in sorted(self.there)]
        self.balancer = Balancer(joined, cluster.total, policy, communication)
        self.announced: list[Decision] = [self.balancer.latest]
        self.cluster = cluster

    def shares(self, step: int) -> Sequence[int]:
        while len(self.announced) > 1 and self.announced[1].from_step <= step:
            del self.announced[0]
        shares = self.announced[0].by_worker
        return [shares.get(worker, 0) for worker in range(self.workers)]

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        shares, inputs = self.shares(step), list[Input]()
        for worker, (share, time_s) in enumerate(zip(shares, times_s, strict=True)):
            if worker in self.there and time_s == math.inf:
                self.there.remove(worker)
                inputs.append(Vanished(worker))
            elif share:
                inputs.append(Measurement(worker, share, time_s))
            elif worker not in self.there and self.cluster.there(worker, step):
                self.there.add(worker)
                inputs.append(Joined(worker, self.caps[worker], self.lines[worker]))
        decision = self.balancer.decide(step, inputs)
        if decision is not None:
            self.announced.append(decision)

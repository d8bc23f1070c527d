"""The modes of the simulated cluster besides LBB: equal shares, and commlayer's balancer."""

from __future__ import annotations

from collections.abc import Sequence

from bench.reference.balance_cluster import PlayedCluster
from commlayer.balance.balancer import Balancer, Decision, Joined, Measurement, SharePolicy
from commlayer.balance.schedule import even_shares
from commlayer.balance.share_solver import FREE, Communication


class Equal:
    """Synchronous SGD: equal shares for all workers."""

    def __init__(self, cluster: PlayedCluster) -> None:
        self._shares = even_shares(cluster.total, len(cluster.lines))

    def shares(self, step: int) -> Sequence[int]:
        return self._shares

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        pass


class Ours:
    """The balancer; its decisions apply from their announced step. With `profiled` it starts from the undisturbed lines."""

    def __init__(
        self, cluster: PlayedCluster, policy: SharePolicy | None = None, communication: Communication = FREE,
        profiled: bool = True,
    ) -> None:
        caps = cluster.caps or (None,) * len(cluster.lines)
        joined = [Joined(worker, cap, line if profiled else None)
                  for worker, (cap, line) in enumerate(zip(caps, cluster.lines, strict=True))]
        self.balancer = Balancer(joined, cluster.total, policy, communication)
        self._announced: list[Decision] = [self.balancer.latest]

    def shares(self, step: int) -> Sequence[int]:
        while len(self._announced) > 1 and self._announced[1].from_step <= step:
            del self._announced[0]
        return self._announced[0].shares

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        measured = zip(self.shares(step), times_s, strict=True)
        decision = self.balancer.decide(step, [Measurement(worker, *one) for worker, one in enumerate(measured)])
        if decision is not None:
            self._announced.append(decision)

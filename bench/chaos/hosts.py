"""The same runs on hosts of the lab: packets are lost there, nobody is told, and only silence says so. Needs root.

Servers are on host 0, each worker on a host of its own, with its launcher where it is a home. A way from a worker that is held
loses all packets that it sends; what is held the other way is a link that is cut. Nobody reads frames on the way: contributions
and payloads are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bench.chaos.campaign import Campaign
from bench.chaos.cluster import Cluster
from bench.chaos.proxy import DOWN, UP, Link
from bench.chaos.trials import SETTINGS, Trial
from bench.lab import Lab

FAULTS = ("kill-worker", "stop-worker", "freeze-worker", "kill-server", "restart-storm", "lose-server", "kill-coordinator",
          "lose-coordinator", "partition", "isolate-worker", "slow-link", "kill-home", "kill-homes", "rejoin-home", "stop-home",
          "freeze-home", "partition-home", "isolate-home", "kill-home-server", "storm-home-server", "kill-home-coordinator")
"""Those that need no proxy."""
LOST = 0.999
DELAY_S = 0.002
PORTS, APART = 7000, 10
"""Of the first run, and how far those of the next are from there: the kernel keeps some for a while."""


class _Way:
    """As proxy.Way. `shots`: each hold and each delay."""

    def __init__(self, lab: Lab, host: int, way: int) -> None:
        self._lab, self._host, self._way, self.shots, self.flips = lab, host, way, 0, 0
        self._delay_s = 0.0

    def hold(self) -> None:
        self.shots += 1
        self._set(held=True)

    def release(self) -> None:
        self._set(held=False)

    def _set(self, *, held: bool) -> None:
        if self._way == UP:
            self._lab.set(self._host, loss=LOST if held else 0.0)
        else:
            self._lab.set(self._host, cut=held)

    @property
    def delay_s(self) -> float:
        return self._delay_s

    @delay_s.setter
    def delay_s(self, seconds: float) -> None:
        self._delay_s = seconds
        self.shots += bool(seconds)
        self._lab.set(self._host, delay_s=DELAY_S + seconds)


class _HostLink(Link):
    """A host's link of the lab: connections end when their ends find out."""

    def __init__(self, lab: Lab, host: int) -> None:
        self.ways = _Way(lab, host, UP), _Way(lab, host, DOWN)  # type: ignore[assignment]

    def cut(self, *, reset: bool, halves: bool = False) -> int:
        return 0  # a lab has no hands on connections, so a fault that needs them has not fired

    def close(self) -> None:
        for way in self.ways:
            way.delay_s = 0.0
            way.release()


class HostCluster(Cluster):
    """`number`: which run of its lab it is."""

    insecure = True

    def __init__(self, trial: Trial, store: tuple[str, int], lab: Lab, number: int) -> None:
        super().__init__(trial, store)
        self.here = self.there = lab.addresses[0]
        self.interface = lab.interface
        self._lab, self._number = lab, number

    def _free_ports(self) -> list[int]:
        first = PORTS + APART * (self._number % 1000)
        return list(range(first, first + 2 + self.setting.servers))

    def _make_links(self, stack: ExitStack) -> None:
        self.links = self.controls = [_HostLink(self._lab, 1 + rank) for rank in range(self.setting.workers)]
        for link in self.links:
            stack.callback(link.close)

    def _join(self, rank: int) -> str:
        return self.here

    @property
    def watched(self) -> bool:
        return False

    def _inside(self, host: int) -> str:
        return namespace(self._lab, host)


def namespace(lab: Lab, host: int) -> str:
    return f"/run/netns/{lab.names[host]}"


@contextmanager
def campaign() -> Iterator[Campaign]:
    """LabUnavailable where there is no lab."""
    numbers = iter(range(1 << 30))
    hosts = 1 + max(setting.workers for setting in SETTINGS)
    with Lab(hosts, up_bps=1e9, down_bps=1e9, delay_s=DELAY_S) as lab:
        def cluster(trial: Trial, store: tuple[str, int]) -> Cluster:
            return HostCluster(trial, store, lab, next(numbers))

        with Campaign(cluster, lab.addresses[0], namespace(lab, 0)) as made:
            yield made

"""Chaos runs on hosts of the lab, where packets are lost without notice and only timeouts show it. Needs root.

Servers are on host 0; each worker is on a host of its own, together with its launcher if it is a home. Holding a worker's
uplink loses all packets that it sends; holding its downlink cuts the link. No proxy reads the frames, so contributions and
payloads are not checked.
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
"""Faults that need no proxy."""
LOST = 0.999
DELAY_S = 0.002
PORTS, APART = 7000, 10
"""First port of the first run, and the distance to the ports of the next run: the kernel keeps ports in use for a while."""


class _Way:
    """Like proxy.Way. `shots` counts holds and delays."""

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
    """A host's link of the lab. Cutting does not end connections; their ends have to notice."""

    def __init__(self, lab: Lab, host: int) -> None:
        self.ways = _Way(lab, host, UP), _Way(lab, host, DOWN)  # type: ignore[assignment]

    def cut(self, *, reset: bool, halves: bool = False) -> int:
        return 0  # the lab cannot end connections, so a fault that needs it has not fired

    def close(self) -> None:
        for way in self.ways:
            way.delay_s = 0.0
            way.release()


class HostCluster(Cluster):
    """`number`: index of the run in its lab."""

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
    """Raises LabUnavailable if there is no lab."""
    numbers = iter(range(1 << 30))
    hosts = 1 + max(setting.workers for setting in SETTINGS)
    with Lab(hosts, up_bps=1e9, down_bps=1e9, delay_s=DELAY_S) as lab:
        def cluster(trial: Trial, store: tuple[str, int]) -> Cluster:
            return HostCluster(trial, store, lab, next(numbers))

        with Campaign(cluster, lab.addresses[0], namespace(lab, 0)) as result:
            yield result

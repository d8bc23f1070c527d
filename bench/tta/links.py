"""The networks of `bench tta` by name: link rates of the hosts, four unless chosen, and their changes during training."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from bench import Unmeasurable
from bench.lab import Lab

RANKS = 4
QUEUE_S = 0.1
ONE_PEER = RANKS - 1
"""The host that is slow or disconnects for a while. Not rank 0, which hosts the rendezvous."""


class Event(NamedTuple):
    """A change of link rates `at_s` seconds into the training; for all hosts if `hosts` is empty."""

    at_s: float
    mbps: float
    hosts: tuple[int, ...] = ()
    cut: bool = False


class Network(NamedTuple):
    """Rates in Mb/s, one for all hosts or one per host; `round_ms` is the round-trip time."""

    up: float | Sequence[float]
    down: float | Sequence[float]
    round_ms: float
    events: tuple[Event, ...] = ()
    slow: tuple[float, ...] = (1.0,) * RANKS
    """Factor of each host's compute time."""
    stretch: float = 1.0

    @property
    def hosts(self) -> int:
        return len(self.slow)

    def lab(self) -> Lab:
        return Lab(hosts=self.hosts, up_bps=_bps(self.up), down_bps=_bps(self.down), delay_s=self.round_ms / 2e3,
                   queue_s=QUEUE_S * self.stretch)

    def stretched(self, times: float) -> Network:
        """The same network in slow motion: every time is `times` as long, every rate that many times lower."""
        return self._replace(
            up=_scaled(self.up, 1 / times), down=_scaled(self.down, 1 / times), round_ms=self.round_ms * times,
            events=tuple(event._replace(at_s=event.at_s * times, mbps=event.mbps / times) for event in self.events),
            slow=tuple(factor * times for factor in self.slow), stretch=self.stretch * times)

    def play(self, lab: Lab, over: threading.Event) -> None:
        """Applies the events at their times; restores the links once `over` is set."""
        before, begun_s = list(lab.links), 0.0
        for event in self.events:
            if over.wait(event.at_s - begun_s):
                break
            begun_s = event.at_s
            for host in event.hosts or range(self.hosts):
                lab.set(host, up_bps=event.mbps * 1e6, down_bps=event.mbps * 1e6, cut=event.cut)
        over.wait()
        for host, link in enumerate(before):
            lab.set(host, **link._asdict())


def named(link: str, hosts: int = RANKS) -> Network:
    """The network of that name with that many hosts, if its hosts are all alike."""
    network = Network(0, 0, 0) if link == NO_LINK else NETWORKS[link]
    if hosts == network.hosts:
        return network
    alike = len({*network.slow}) == 1 and not network.events and not isinstance(network.up, Sequence)
    if hosts < 1 or not alike:
        unlike = "" if alike else " that are not alike"
        raise Unmeasurable(f"--hosts {hosts}: link {link!r} has {network.hosts} hosts{unlike}")
    return network._replace(slow=(1.0,) * hosts)


def _bps(mbps: float | Sequence[float]) -> float | Sequence[float]:
    return _scaled(mbps, 1e6)


def _scaled(rate: float | Sequence[float], factor: float) -> float | Sequence[float]:
    return rate * factor if isinstance(rate, int | float) else [each * factor for each in rate]


TRACE = (
    Event(10, 30), Event(18, 100),                                               # a step down and up
    *(Event(25 + i, 100 - 9 * i) for i in range(10)),                            # a ramp to 19
    Event(42, 60), Event(50, 60, (ONE_PEER,), cut=True), Event(53, 60, (ONE_PEER,)),   # one host is disconnected for 3 s
)
NETWORKS = {
    "1g-2ms": Network(1000, 1000, 2),
    "100m-30ms": Network(100, 100, 30),
    "50m-80ms": Network(50, 50, 80),
    "10m-80ms": Network(10, 10, 80),
    "40/200m": Network(40, 200, 30),
    "trace": Network(100, 100, 30, TRACE),
    "one slow peer": Network([100, 100, 100, 10], [100, 100, 100, 10], 30),
    "uneven compute": Network(100, 100, 30, slow=(1.0, 1.0, 1.0, 2.0)),
}
HEADLINE = ("100m-30ms", "10m-80ms")
"""Links of the summary."""
QUICK = ("10m-80ms",)
NO_LINK = "none"
"""Link name of systems that need no network."""

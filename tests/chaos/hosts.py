"""Chaos runs on hosts of the lab, over links of one of the LINES, where only timeouts show that packets are lost. Needs root.

Servers are on host 0; each worker is on a host of its own, together with its launcher if it is a home. Holding a worker's
uplink loses all packets that it sends; holding its downlink cuts the link. No proxy reads the frames, so contributions and
payloads are not checked.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from bench.lab import Lab
from tests.chaos.campaign import Campaign
from tests.chaos.cluster import BRIEF, MEET_S, PATIENT, SLOW_MEET_S, UNTOLD, Cluster, Waits
from tests.chaos.proxy import DOWN, UP, Link
from tests.chaos.trials import SETTINGS, STEPS, Trial

FAULTS = ("kill-worker", "stop-worker", "freeze-worker", "kill-server", "restart-storm", "lose-server", "kill-coordinator",
          "lose-coordinator", "partition", "isolate-worker", "slow-link", "kill-home", "kill-homes", "rejoin-home", "stop-home",
          "freeze-home", "partition-home", "isolate-home", "kill-home-server", "storm-home-server", "kill-home-coordinator")
"""Faults that need no proxy."""
LOST = 0.999


class Line(NamedTuple):
    """The access link of every host, and the timeouts of jobs over it: see cluster.PATIENT, BRIEF and UNTOLD."""

    round_trip_s: float
    up_bps: float
    down_bps: float
    loss: float
    patient: Waits
    brief: Waits
    untold: Waits
    pauses: bool
    """Whether what heals stays away for longer than every timeout but reconnect_s and deadline_s."""

    def lab(self, hosts: int) -> Lab:
        return Lab(hosts, up_bps=self.up_bps, down_bps=self.down_bps, delay_s=self.round_trip_s / 2, loss=self.loss)


SLOW_PATIENT: Waits = {"heartbeat_s": 0.5, "dead_after_s": 4.0, "reconnect_s": 40.0, "deadline_s": 60.0}
SLOW_BRIEF: Waits = {"heartbeat_s": 0.5, "dead_after_s": 4.0, "reconnect_s": 4.0, "deadline_s": 8.0}
SLOW_UNTOLD = SLOW_PATIENT | {"reconnect_s": 20.0}
PACE_S = 0.5
AWAY = 1.5, 2.5
"""Shortest and longest pause over a slow line, in dead_after_s."""


def _homes(round_trip_s: float) -> Line:
    return Line(round_trip_s, 20e6, 100e6, 0.005, SLOW_PATIENT, SLOW_BRIEF, SLOW_UNTOLD, pauses=True)


LINES = {"lan": Line(0.004, 1e9, 1e9, 0.0, PATIENT, BRIEF, UNTOLD, pauses=False),
         "10ms": _homes(0.010), "40ms": _homes(0.040), "150ms": _homes(0.150)}
"""By the names that `python -m bench chaos --hosts` accepts."""
PORTS, APART = 7000, 10
"""First port of the first run, and the distance to the ports of the next run: the kernel keeps ports in use for a while."""


class _Way:
    """Like proxy.Way. `shots` counts holds and delays."""

    def __init__(self, lab: Lab, host: int, way: int) -> None:
        self._lab, self._host, self._way, self.shots, self.flips = lab, host, way, 0, 0
        self._delay_s, self._usual = 0.0, lab.links[host]

    def hold(self) -> None:
        self.shots += 1
        self._set(held=True)

    def release(self) -> None:
        self._set(held=False)

    def _set(self, *, held: bool) -> None:
        if self._way == UP:
            self._lab.set(self._host, loss=LOST if held else self._usual.loss)
        else:
            self._lab.set(self._host, cut=held)

    @property
    def delay_s(self) -> float:
        return self._delay_s

    @delay_s.setter
    def delay_s(self, seconds: float) -> None:
        self._delay_s = seconds
        self.shots += bool(seconds)
        self._lab.set(self._host, delay_s=self._usual.delay_s + seconds)


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
    """`number`: index of the run in its lab. `first`: the host of its servers."""

    insecure = True

    def __init__(self, trial: Trial, store: tuple[str, int], lab: Lab, number: int, first: int = 0, *,
                 steps: int = STEPS) -> None:
        self._line = LINES[trial.line]
        self.patient, self.brief, self.untold = self._line.patient, self._line.brief, self._line.untold
        self.meet_s = SLOW_MEET_S if self._line.pauses else MEET_S
        if self._line.pauses and trial.strikes == "coordinator":  # training does not wait for it
            self.pace_s = PACE_S
        super().__init__(trial, store, steps)
        self.here = self.there = lab.addresses[first]
        self.interface = lab.interface
        self._lab, self._number, self._first = lab, number, first

    def pause(self, chance: random.Random, least_s: float, most_s: float) -> None:
        if not self._line.pauses:
            super().pause(chance, least_s, most_s)
        else:
            time.sleep(chance.uniform(*AWAY) * self.waits["dead_after_s"])

    def _free_ports(self) -> list[int]:
        first = PORTS + APART * (self._number % 1000)
        return list(range(first, first + 2 + self.setting.servers))

    def _make_links(self, stack: ExitStack) -> None:
        self.links = self.controls = [_HostLink(self._lab, self._first + 1 + rank) for rank in range(self.setting.workers)]
        for link in self.links:
            stack.callback(link.close)

    def _join(self, rank: int) -> str:
        return self.here

    @property
    def watched(self) -> bool:
        return False

    def _inside(self, host: int) -> str:
        return namespace(self._lab, self._first + host)


def namespace(lab: Lab, host: int) -> str:
    return f"/run/netns/{lab.names[host]}"


@contextmanager
def campaign(line: str) -> Iterator[Campaign]:
    """Raises LabUnavailable if there is no lab."""
    numbers = iter(range(1 << 30))
    with LINES[line].lab(1 + max(setting.workers for setting in SETTINGS)) as lab:
        def cluster(trial: Trial, store: tuple[str, int]) -> Cluster:
            return HostCluster(trial, store, lab, next(numbers))

        with Campaign(cluster, lab.addresses[0], namespace(lab, 0), line) as result:
            yield result

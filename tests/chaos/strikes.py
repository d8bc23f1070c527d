"""Implements the faults: what each does to the processes and links of a run.

A strike returns how often it has struck. Disturbed bytes on a link are counted by proxy.Way, and log lines of the victim
(Fault.says) by the run.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence

from tests.chaos.cluster import POLL_S, Cluster
from tests.chaos.processes import Started
from tests.chaos.proxy import Link, Way
from tests.chaos.trials import Trial

Strike = Callable[[Cluster, Trial, random.Random], int]
HOUR_S = 3600.0
TOLD_S = 10.0
"""Maximum time until the coordinator has noticed a strike; otherwise it counts as not struck."""


def kill_worker(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return cluster.workers[trial.number].signal(signal.SIGKILL)


def kill_homes(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    struck = 0
    for number in trial.victims:
        struck += cluster.workers[number].signal(signal.SIGKILL)
        time.sleep(chance.uniform(0.0, 0.2))
    return struck


def rejoin_home(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    struck = cluster.workers[trial.number].signal(signal.SIGKILL)
    time.sleep(chance.uniform(0.0, 0.2))
    cluster.start_home_again(trial.number)
    return struck


def stop_worker(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return _paused(cluster, cluster.workers[trial.number], chance)


def freeze_worker(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return cluster.workers[trial.number].signal(signal.SIGSTOP)


def freeze_home(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    """Freezes the home and wakes it when the others have continued without it, or are about to."""
    frozen = cluster.workers[trial.number]
    frozen.signal(signal.SIGSTOP)
    struck = _told(cluster, f"{trial.victim}: no heartbeat")
    time.sleep(chance.uniform(0.0, 0.5))
    frozen.signal(signal.SIGCONT)
    return struck


def _told(cluster: Cluster, words: str) -> int:
    """Returns 1 once the coordinator has logged these words, 0 if it does not."""
    until = time.monotonic() + TOLD_S
    while words not in cluster.coordinator.lines.read_text(errors="replace"):
        if time.monotonic() > until:
            return 0
        time.sleep(POLL_S)
    return 1


def kill_server(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    struck = cluster.servers[trial.number].signal(signal.SIGKILL)
    cluster.pause(chance, 0.0, 0.2)
    cluster.restart_server(trial.number)
    return struck


def kill_coordinator(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    struck = cluster.coordinator.signal(signal.SIGKILL)
    cluster.pause(chance, 0.0, 0.2)
    cluster.restart_coordinator()
    return struck


def lose_server(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return cluster.servers[trial.number].signal(signal.SIGKILL)


def lose_coordinator(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return cluster.coordinator.signal(signal.SIGKILL)


def stop_server(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return _paused(cluster, cluster.servers[trial.number], chance)


def restart_storm(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    """Some of the processes are killed while they start."""
    struck = 0
    for _ in range(chance.randint(3, 5)):
        struck += cluster.servers[trial.number].signal(signal.SIGKILL)
        cluster.restart_server(trial.number)
        time.sleep(chance.uniform(0.0, 0.15))
    return struck


def fill_disk(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    """The disk has been full from the start."""
    return 0


def fill_disk_later(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    """Restarts a server that finds its journal but has no room for the next one."""
    cluster.restart_server(trial.number, full=True)
    return 0


def jump_clock(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    """Restarts a server, which then joins with another clock. The difference must not stop the job."""
    cluster.restart_server(trial.number, off_s=chance.choice((-1, 1)) * HOUR_S * 10 ** chance.uniform(0, 4))
    return 1


def _paused(cluster: Cluster, struck: Started, chance: random.Random) -> int:
    count = struck.signal(signal.SIGSTOP)
    cluster.pause(chance, 0.2, 0.6)
    struck.signal(signal.SIGCONT)
    return count


def cut(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return _cut(cluster.links[trial.number], chance)


def cut_control(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return _cut(cluster.controls[trial.number], chance)


def _cut(link: Link, chance: random.Random) -> int:
    struck = 0
    for _ in range(chance.randint(1, 4)):
        struck += link.cut(reset=chance.random() < 0.5)
        time.sleep(chance.uniform(0.0, 0.1))
    return struck


def cut_home(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    """Also cuts the connections of the home's launcher."""
    return _cut(cluster.links[trial.number], chance) + _cut(cluster.controls[trial.number], chance)


def leave_half_open(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return cluster.links[trial.number].cut(reset=True, halves=True)


def partition(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return _blocked(cluster, _one_way(cluster, trial, chance), chance)


def partition_home(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return _blocked(cluster, _both_ways(cluster, trial), chance)


def _blocked(cluster: Cluster, ways: Sequence[Way], chance: random.Random) -> int:
    """Blocks the directions for a moment."""
    for way in ways:
        way.hold()
    cluster.pause(chance, 0.3, 0.8)
    for way in ways:
        way.release()
    return 0


def isolate(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    for way in _one_way(cluster, trial, chance):
        way.hold()
    return 0


def isolate_home(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    for way in chance.choice((_both_ways(cluster, trial), _one_way(cluster, trial, chance))):
        way.hold()
    return 0


def _one_way(cluster: Cluster, trial: Trial, chance: random.Random) -> list[Way]:
    """One direction of data and control."""
    which, links = chance.randrange(2), (cluster.links[trial.number], cluster.controls[trial.number])
    return [link.ways[which] for link in dict.fromkeys(links)]


def _both_ways(cluster: Cluster, trial: Trial) -> list[Way]:
    return [way for link in (cluster.links[trial.number], cluster.controls[trial.number]) for way in link.ways]


def slow_down(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    """Delays data for the rest of the run."""
    for way in cluster.links[trial.number].ways:
        way.delay_s = chance.uniform(0.002, 0.008)
    return 0


def flip(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return _flip(cluster.links[trial.number], chance)


def flip_control(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    return _flip(cluster.controls[trial.number], chance)


def _flip(link: Link, chance: random.Random) -> int:
    chance.choice(link.ways).flips = chance.randint(1, 3)
    return 0


def call_as_strangers(cluster: Cluster, trial: Trial, chance: random.Random) -> int:
    """Strangers connect, send nothing or nonsense, and stay connected."""
    return sum(cluster.stranger(chance.randbytes(chance.choice((0, 0, 1, 100, 5000)))) for _ in range(30))


STRIKES: dict[str, Strike] = {
    "none": lambda *_: 1,
    "kill-worker": kill_worker,
    "stop-worker": stop_worker,
    "freeze-worker": freeze_worker,
    "kill-server": kill_server,
    "stop-server": stop_server,
    "restart-storm": restart_storm,
    "lose-server": lose_server,
    "kill-coordinator": kill_coordinator,
    "lose-coordinator": lose_coordinator,
    "cut": cut,
    "cut-control": cut_control,
    "half-open": leave_half_open,
    "partition": partition,
    "isolate-worker": isolate,
    "slow-link": slow_down,
    "flip-bits": flip,
    "flip-control": flip_control,
    "clock-jump": jump_clock,
    "full-disk": fill_disk,
    "full-disk-later": fill_disk_later,
    "strangers": call_as_strangers,
    "kill-home": kill_worker,
    "rejoin-home": rejoin_home,
    "kill-homes": kill_homes,
    "stop-home": stop_worker,
    "freeze-home": freeze_home,
    "cut-home": cut_home,
    "partition-home": partition_home,
    "isolate-home": isolate_home,
    "kill-home-server": kill_server,
    "storm-home-server": restart_storm,
    "kill-home-coordinator": kill_coordinator,
}

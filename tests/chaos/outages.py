"""Outages of jobs of homes: lines that are cut for 5 to 50 s, and servers that are killed and restarted as much later.

Four jobs run side by side on hosts of the lab, at round trips of 40 and 150 ms, with lines that gradients fill and lines that
are nearly idle. All hosts, also the server's, have 20 Mb/s up and 100 Mb/s down, and lose 0.5 % of the segments. Settings have
their defaults, and all nodes have keys. Nobody may be thrown out, and heartbeats must get through.
"""

from __future__ import annotations

import math
import random
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench import Unmeasurable
from bench.lab import Lab, LabUnavailable
from bench.report import Result
from commlayer.errors import CommError
from tests.chaos import hosts, processes
from tests.chaos.campaign import quantile
from tests.chaos.hosts import HostCluster
from tests.chaos.reports import Ended, Stepped
from tests.chaos.trials import Setting, Trial

WAITS = {"heartbeat_s": 1.0, "dead_after_s": 10.0, "reconnect_s": 60.0, "deadline_s": 600.0}
"""The defaults, in words, because a default that changes changes what is measured."""
HOMES = 2
LEAST_S, MOST_S = 5.0, 50.0
QUIET_S = 12.0
"""Seconds between two outages, in which heartbeats are measured."""
RECOVER_S = 60.0
"""Time limit for a job to train again."""
START_S = 120.0
STEPS = 1 << 30
RESTARTS = 3
"""Every third outage restarts the server."""
MOST_DELAY_S = 1.0
POLL_S = 0.05
IDLE, FILLED = Setting("identity()", HOMES, keys=True, least=1), Setting("identity()", HOMES, keys=True, least=1, width=512)


class Job(NamedTuple):
    line: str
    setting: Setting

    @property
    def filled(self) -> bool:
        return self.setting is FILLED


JOBS = tuple(Job(line, setting) for line in ("40ms", "150ms") for setting in (IDLE, FILLED))


class Outage(NamedTuple):
    """An interruption of `seconds`. `home`: the home whose line is cut; -1: the server is killed and restarted."""

    home: int
    seconds: float

    @property
    def kind(self) -> str:
        return "restart" if self.home < 0 else "cut"


class Beat(NamedTuple):
    """A heartbeat of a home: when it began, how long it took, and whether it was answered."""

    begin_s: float
    seconds: float
    answered: bool

    @property
    def end_s(self) -> float:
        return self.begin_s + self.seconds


class Row(NamedTuple):
    """An outage and what followed."""

    job: Job
    outage: Outage
    stays: bool
    """Whether all homes train again, as members of the same job."""
    heartbeat_s: float
    """Seconds from the end of the outage until the coordinator has answered every home."""
    training_s: float
    """The same, until every home has trained two more steps."""
    beats: list[Beat]
    """Heartbeats in the quiet time before the outage."""
    refusals: list[str]
    """The servers' lines about refused connections."""
    lines: list[str]
    """The last log lines of all processes, if a home was thrown out."""

    def told(self) -> dict[str, Any]:
        delays = self.delays_s()
        return {"round_trip": self.job.line, "filled": self.job.filled, "outage": self.outage.kind,
                "seconds": round(self.outage.seconds, 1), "stays": self.stays,
                "heartbeat_again_s": round(self.heartbeat_s, 2), "trains_again_s": round(self.training_s, 2),
                "beat_p50_s": quantile(delays, 0.5), "beat_max_s": quantile(delays, 1.0), "refusals": len(self.refusals),
                **({"refused": self.refusals} if self.refusals else {}), **({"lines": self.lines} if self.lines else {})}

    def delays_s(self) -> list[float]:
        """A heartbeat without an answer counts as slower than any other."""
        return [beat.seconds if beat.answered else math.inf for beat in self.beats]


def run(count: int, seed: int) -> Result:
    try:
        rows = suffered(planned(count, seed))
    except (LabUnavailable, CommError) as reason:
        raise Unmeasurable(str(reason)) from None
    total = summary(rows, count)
    return {"rows": [row.told() for row in rows], "summary": total,
            "code": int(len(rows) < count or total["thrown_out"] > 0 or not total["heartbeat_p99_below_1_s"])}


def suffered(plans: Sequence[Sequence[Outage]], jobs: Sequence[Job] = JOBS) -> list[Row]:
    """Runs the jobs side by side, each with its outages. Raises LabUnavailable if there is no lab."""
    with ExitStack() as stack:
        lab = stack.enter_context(_lab(jobs[:len(plans)]))
        at = stack.enter_context(processes.meeting(lab.addresses[0], hosts.namespace(lab, 0)))
        series = [_Series(lab, at, number, job, plan) for number, (job, plan) in enumerate(zip(jobs, plans, strict=False))]
        with ThreadPoolExecutor(len(series)) as pool:
            return [row for made in pool.map(_Series.run, series) for row in made]


def planned(count: int, seed: int) -> list[list[Outage]]:
    """The outages of each job: two cuts and a restart in turn, of lengths spread evenly over the whole range.

    >>> [[one.kind for one in job] for job in planned(13, 0)]
    [['cut', 'cut', 'restart', 'cut'], ['cut', 'cut', 'restart'], ['cut', 'cut', 'restart'], ['cut', 'cut', 'restart']]
    """
    chance, plans = random.Random(seed), []
    for number in range(min(len(JOBS), count)):
        outages = len(range(number, count, len(JOBS)))
        lengths = [LEAST_S + (MOST_S - LEAST_S) * (place + 0.5) / outages for place in range(outages)]
        chance.shuffle(lengths)
        plans.append([Outage(-1 if place % RESTARTS == RESTARTS - 1 else place % HOMES, length)
                      for place, length in enumerate(lengths)])
    return plans


def _lab(jobs: Sequence[Job]) -> Lab:
    lines = [hosts.LINES[job.line] for job in jobs for _ in range(1 + HOMES)]
    up_bps, down_bps, loss = lines[0].up_bps, lines[0].down_bps, lines[0].loss
    return Lab(len(lines), up_bps=up_bps, down_bps=down_bps, delay_s=[line.round_trip_s / 2 for line in lines], loss=loss)


class _Series:
    """The outages of one job, one after the other."""

    def __init__(self, lab: Lab, store: tuple[str, int], number: int, job: Job, outages: Sequence[Outage]) -> None:
        self._lab, self._store, self._number, self._job, self._outages = lab, store, number, job, list(outages)

    def run(self) -> list[Row]:
        """Returns a row for each outage, as long as the job can be started. A job from which someone was thrown out is started
        again for the next outage."""
        rows: list[Row] = []
        try:
            while left := self._outages[len(rows):]:
                with self._cluster(len(rows)) as cluster:
                    job = _RunningJob(cluster, self._lab, self._job, self._number * (1 + HOMES))
                    if not job.trains(START_S):
                        raise CommError("it has not begun: " + "; ".join(job.lines()), peer="chaos")
                    for outage in left:
                        rows.append(job.suffer(outage))
                        if not rows[-1].stays:
                            break
        except CommError as error:
            print(f"the job at {self._job.line} ends after {len(rows)} outages: {error}", file=sys.stderr)
        return rows

    def _cluster(self, part: int) -> HostCluster:
        trial = Trial(0, "none", self._job.setting, line=self._job.line)
        cluster = HostCluster(trial, self._store, self._lab, 100 * self._number + part, self._number * (1 + HOMES), steps=STEPS)
        cluster.waits = WAITS
        return cluster


class _RunningJob:
    def __init__(self, cluster: HostCluster, lab: Lab, job: Job, first: int) -> None:
        self._cluster, self._lab, self._job, self._first = cluster, lab, job, first
        self._steps, self._ended = [0] * HOMES, list[Ended | None]([None] * HOMES)

    def suffer(self, outage: Outage) -> Row:
        """Waits for a quiet time, makes the outage, and waits until all homes train again."""
        quiet_s, refused = time.monotonic(), len(self._refusals())
        self._follow(QUIET_S)
        begin_s = time.monotonic()
        if outage.home < 0:
            self._cluster.servers[0].signal(signal.SIGKILL)
        else:
            self._lab.set(self._first + 1 + outage.home, cut=True)
        self._follow(outage.seconds)
        if outage.home < 0:
            self._cluster.restart_server(0)
        else:
            self._lab.set(self._first + 1 + outage.home, cut=False)
        over_s = time.monotonic()
        stays, training_s = self.trains(RECOVER_S), time.monotonic() - over_s
        while (answered_s := self._answered_s(over_s)) == math.inf and stays and time.monotonic() < over_s + RECOVER_S:
            self._follow(POLL_S)
        beats = [beat for rank in range(HOMES) for beat in self._beats(rank)
                 if quiet_s < beat.begin_s and beat.end_s < begin_s]
        stays = stays and answered_s < math.inf
        return Row(self._job, outage, stays, answered_s, training_s, beats, self._refusals()[refused:],
                   [] if stays else [*map(str, self._ended), *self.lines()])

    def _answered_s(self, since_s: float) -> float:
        """Seconds until the coordinator has answered all homes."""
        return max(min((beat.end_s - since_s for beat in self._beats(rank) if beat.answered and beat.end_s > since_s),
                       default=math.inf) for rank in range(HOMES))

    def _refusals(self) -> list[str]:
        lines = (self._cluster.folder / "server-0.lines").read_text(errors="replace").splitlines()
        return [line for line in lines if "refused" in line]

    def trains(self, limit_s: float) -> bool:
        """Waits until every home has trained two more steps. Returns False if one has ended, or after the limit."""
        before, until = list(self._steps), time.monotonic() + limit_s
        while time.monotonic() < until:
            self._follow(POLL_S)
            if any(self._ended) or any(worker.silent for worker in self._cluster.workers):
                return False
            if all(now >= then + 2 for now, then in zip(self._steps, before, strict=True)):
                return True
        return False

    def _follow(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for rank, worker in enumerate(self._cluster.workers):
                for report in worker.told():
                    if isinstance(report, Stepped):
                        self._steps[rank] = report.step
                    elif isinstance(report, Ended):
                        self._ended[rank] = report
            time.sleep(POLL_S)

    def _beats(self, rank: int) -> list[Beat]:
        lines = (self._cluster.folder / f"heartbeats-{rank}").read_text().splitlines(keepends=True)
        words = [line.split() for line in lines if line.endswith("\n")]
        return [Beat(float(begin), float(seconds), answered == "1") for begin, seconds, answered in words]

    def lines(self) -> list[str]:
        """The last log lines of all processes."""
        return [f"{path.stem}: {line}" for path in sorted(Path(self._cluster.folder).glob("*.lines"))
                for line in path.read_text(errors="replace").splitlines()[-12:]]


def summary(rows: Sequence[Row], requested: int) -> dict[str, Any]:
    """The figures of all outages."""
    delays = [delay for row in rows for delay in row.delays_s()]
    again, p99_s = [row.heartbeat_s for row in rows if row.stays], quantile(delays, 0.99)
    return {"asked": requested, "outages": len(rows), "cuts": sum(row.outage.kind == "cut" for row in rows),
            "restarts": sum(row.outage.kind == "restart" for row in rows),
            "thrown_out": sum(not row.stays for row in rows), "heartbeats": len(delays), "unanswered": delays.count(math.inf),
            "heartbeat_p50_s": quantile(delays, 0.5), "heartbeat_p99_s": p99_s, "heartbeat_max_s": quantile(delays, 1.0),
            "heartbeat_p99_below_1_s": p99_s is not None and p99_s < MOST_DELAY_S,
            "heartbeat_again_p50_s": quantile(again, 0.5), "heartbeat_again_max_s": quantile(again, 1.0),
            "trains_again_max_s": quantile([row.training_s for row in rows if row.stays], 1.0),
            "refusals": sum(len(row.refusals) for row in rows)}

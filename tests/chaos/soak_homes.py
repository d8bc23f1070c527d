"""A long training of three homes: two stay, and the third is repeatedly killed or leaves and joins again.

The resident memory of the two, of their coordinator and of their server must stay constant (sizes.py). So must the traffic
between a home and the coordinator while membership does not change: neither may grow with the number of past members.
"""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from statistics import median
from typing import Any

from bench.report import Result
from tests.chaos.cluster import Cluster
from tests.chaos.reports import Ended, Stepped
from tests.chaos.sizes import MOST_GROWTH_PCT, UNKNOWN, Sizes, files_flat, growth
from tests.chaos.soak import LIMIT_S, soaked
from tests.chaos.trials import Setting

SETTING = Setting("identity()", workers=3, apart=True, least=2)
STAY, GUEST = (0, 1), 2
TOLD_EVERY = 10
QUIET = 100
"""After this many steps the guest has its part of the samples, and the traffic of its join is over."""
STAYS = 200
"""Number of steps that the guest stays."""
LEAST_LEFT = 500
"""With fewer steps left the guest stays for good, because a new guest must be admitted before the others end."""
LEAST_QUIET_S, LEAST_QUIETS, MOST_TOLD_PCT = 0.5, 6, 20.0
"""The bytes per second between a home and the coordinator are measured over each quiet period of at least LEAST_QUIET_S. The
median of the first third of these periods is compared with that of the last third. A single one may be off by 20 %, so each
third needs at least LEAST_QUIETS periods."""
LEAVE_S = 20.0
"""Maximum time to leave in order."""
AWAY_S = 0.5
"""Maximum time between leaving and joining again."""


def run(steps: int, seed: int, seconds: float = 0.0) -> Result:
    """`seconds`: time limit; 0 for an hour."""
    return soaked(SETTING, TOLD_EVERY, steps,
                  lambda cluster: _Soak(cluster, steps, random.Random(seed), seconds or LIMIT_S).run())


class _Soak:
    def __init__(self, cluster: Cluster, steps: int, chance: random.Random, limit_s: float) -> None:
        self._cluster, self._steps, self._chance, self._limit_s = cluster, steps, chance, limit_s
        self._sizes = Sizes(steps)
        self._digests: dict[int, set[str]] = defaultdict(set)
        self._firsts: dict[int, int] = {}
        self._lasts: dict[int, int] = defaultdict(int)
        """By worker: the first and the last step that it reported."""
        self._trained: set[int] = set()
        """Workers that had samples."""
        self._ended: dict[int, Ended] = {}
        self._guest = GUEST
        """The guest's worker number, a new one each time."""
        self._kills = self._leaves = self._stuck = 0
        self._since: tuple[float, int] | None = None
        """The start of the current quiet period, and the bytes between the first home and the coordinator until then."""
        self._rates: list[float] = []

    def run(self) -> Result:
        begin = time.monotonic()
        while not all(number in self._ended or self._cluster.workers[number].silent for number in (*STAY, self._guest)):
            self._hear()
            stay = self._lasts[self._guest] - self._firsts.get(self._guest, self._steps)
            if stay >= QUIET and self._since is None:
                self._since = time.monotonic(), self._told_nbytes()
            if stay >= STAYS and self._lasts[self._guest] <= self._steps - LEAST_LEFT:
                self._come_and_go()
            if time.monotonic() > begin + self._limit_s:
                break
            time.sleep(0.02)
        self._hear()
        return self._result(time.monotonic() - begin)

    def _hear(self) -> None:
        for number, worker in enumerate(self._cluster.workers):
            for report in worker.told():
                if isinstance(report, Ended):
                    self._ended[number] = report
                    self._cluster.end_home(number, finished=not report.what and not report.bug)
                elif isinstance(report, Stepped):
                    self._firsts.setdefault(number, report.step)
                    self._lasts[number] = report.step
                    self._digests[report.step].add(report.digest)
                    self._trained |= {number} if report.samples else set()
                    if number in STAY:
                        self._sizes.weigh(f"worker {number}", worker, report.step)
                    if number == STAY[0]:
                        self._sizes.weigh("server 0", self._cluster.servers[0], report.step)
                        self._sizes.weigh("coordinator", self._cluster.coordinator, report.step)

    def _told_nbytes(self) -> int:
        return sum(way.nbytes for way in self._cluster.controls[STAY[0]].ways)

    def _come_and_go(self) -> None:
        """Kills the guest or makes it leave as by Ctrl-C, alternately, and starts the next guest."""
        if self._since is not None and (seconds := time.monotonic() - self._since[0]) >= LEAST_QUIET_S:
            self._rates.append((self._told_nbytes() - self._since[1]) / seconds)
        guest, kills = self._cluster.workers[self._guest], self._kills <= self._leaves
        struck = guest.signal(signal.SIGKILL if kills else signal.SIGINT)
        self._kills += struck if kills else 0
        self._leaves += 0 if kills else struck
        guest.process.join(LEAVE_S)
        if guest.process.is_alive():
            self._stuck += 1
            guest.end()
        time.sleep(self._chance.uniform(0.0, AWAY_S))
        self._cluster.start_home_again(GUEST)
        self._guest, self._since = len(self._cluster.workers) - 1, None

    def _result(self, seconds: float) -> Result:
        rows = self._sizes.rows()
        grown_pct, _ = growth(rows)
        third = len(self._rates) // 3
        known = third >= LEAST_QUIETS
        early, late = (median(self._rates[:third]), median(self._rates[-third:])) if known else (UNKNOWN, UNKNOWN)
        told_pct = 100 * (late / early - 1)
        ends = {number: self._ended.get(number) for number in (*STAY, self._guest)}
        complete = all(end is not None and not end.what and not end.bug and end.steps == self._steps for end in ends.values())
        numbers, last = range(len(self._cluster.workers)), max(self._lasts.values(), default=0)
        summary: dict[str, Any] = {
            "steps": last, "finished": complete, "homes_killed": self._kills, "homes_left": self._leaves,
            "homes_joined": len(numbers) - SETTING.workers, "idle_homes": sum(n not in self._trained for n in numbers),
            "stuck_homes": self._stuck, "other_digests": sum(len(digests) > 1 for digests in self._digests.values()),
            "growth_pct": grown_pct, "memory_flat": grown_pct <= MOST_GROWTH_PCT,
            "files_flat": files_flat(rows),
            "control_bytes_s_early": early, "control_bytes_s_late": late, "control_growth_pct": told_pct,
            "steps_per_s": last / seconds, "seconds": seconds}
        if not complete:
            rows += [{"process": f"worker {number}", "ended": str(end)} for number, end in ends.items()]
        # Growth is unknown after a short run.
        grown = grown_pct > MOST_GROWTH_PCT or told_pct > MOST_TOLD_PCT or not summary["files_flat"]
        wrong = not complete or grown or summary["other_digests"] or summary["idle_homes"] or self._stuck
        return {"rows": rows, "summary": summary, "code": int(bool(wrong))}

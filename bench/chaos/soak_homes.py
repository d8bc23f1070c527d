"""A long training of three homes, two of which stay: the third is killed or leaves, comes again, and so on to the end.

The resident memory of the two, their coordinator and their server must stay as it is (sizes.py). So must what a home and the
coordinator tell each other while nobody comes or goes: neither may grow with those who have been there.
"""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from statistics import median
from typing import Any

from bench.chaos.cluster import Cluster
from bench.chaos.reports import Ended, Stepped
from bench.chaos.sizes import MOST_GROWTH_PCT, UNKNOWN, Sizes, growth
from bench.chaos.soak import LIMIT_S, soaked
from bench.chaos.trials import Setting
from bench.report import Result

SETTING = Setting("identity()", workers=3, apart=True, least=2)
STAY, GUEST = (0, 1), 2
TOLD_EVERY = 10
QUIET = 100
"""So many steps behind its first the guest has its part of the samples, and nobody has to do with its coming any more."""
STAYS = 200
"""For so many steps it stays."""
LEAST_LEFT = 500
"""With fewer steps to go it stays for good: it is to be let in before the others end."""
LEAST_QUIET_S, LEAST_QUIETS, MOST_TOLD_PCT = 0.5, 6, 20.0
"""Bytes a second of what a home and the coordinator tell each other are taken over each quiet stretch of so long at least; the
median of the first third of these stretches is held against that of the last. One alone may be a fifth off, so that a third of
fewer says too little."""
LEAVE_S = 20.0
"""How long it may take to leave in order."""
AWAY_S = 0.5
"""At most."""


def run(steps: int, seed: int, seconds: float = 0.0) -> Result:
    """`seconds`: it is broken off then; 0: after an hour."""
    return soaked(SETTING, TOLD_EVERY, steps, lambda made: _Soak(made, steps, random.Random(seed), seconds or LIMIT_S).run())


class _Soak:
    def __init__(self, cluster: Cluster, steps: int, chance: random.Random, limit_s: float) -> None:
        self._cluster, self._steps, self._chance, self._limit_s = cluster, steps, chance, limit_s
        self._sizes = Sizes(steps)
        self._digests: dict[int, set[str]] = defaultdict(set)
        self._firsts: dict[int, int] = {}
        self._lasts: dict[int, int] = defaultdict(int)
        """By worker: the step that it has told first, and last."""
        self._trained: set[int] = set()
        """Who had samples."""
        self._ended: dict[int, Ended] = {}
        self._guest = GUEST
        """Its worker, which is another one each time."""
        self._kills = self._leaves = self._stuck = 0
        self._since: tuple[float, int] | None = None
        """From when on nobody has come or gone, and what the first home and the coordinator had told each other until then."""
        self._rates: list[float] = []

    def run(self) -> Result:
        begin = time.monotonic()
        while not all(number in self._ended or self._cluster.workers[number].silent for number in (*STAY, self._guest)):
            self._hear()
            there = self._lasts[self._guest] - self._firsts.get(self._guest, self._steps)
            if there >= QUIET and self._since is None:
                self._since = time.monotonic(), self._told_nbytes()
            if there >= STAYS and self._lasts[self._guest] <= self._steps - LEAST_LEFT:
                self._come_and_go()
            if time.monotonic() > begin + self._limit_s:
                break
            time.sleep(0.02)
        self._hear()
        return self._result(time.monotonic() - begin)

    def _hear(self) -> None:
        for number, worker in enumerate(self._cluster.workers):
            for said in worker.told():
                if isinstance(said, Ended):
                    self._ended[number] = said
                    self._cluster.end_home(number, finished=not said.what and not said.bug)
                elif isinstance(said, Stepped):
                    self._firsts.setdefault(number, said.step)
                    self._lasts[number] = said.step
                    self._digests[said.step].add(said.digest)
                    self._trained |= {number} if said.samples else set()
                    if number in STAY:
                        self._sizes.weigh(f"worker {number}", worker, said.step)
                    if number == STAY[0]:
                        self._sizes.weigh("server 0", self._cluster.servers[0], said.step)
                        self._sizes.weigh("coordinator", self._cluster.coordinator, said.step)

    def _told_nbytes(self) -> int:
        return sum(way.nbytes for way in self._cluster.controls[STAY[0]].ways)

    def _come_and_go(self) -> None:
        """By turns it is killed and leaves as by Ctrl-C."""
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
        whole = all(end is not None and not end.what and not end.bug and end.steps == self._steps for end in ends.values())
        numbers, last = range(len(self._cluster.workers)), max(self._lasts.values(), default=0)
        summary: dict[str, Any] = {
            "steps": last, "finished": whole, "homes_killed": self._kills, "homes_left": self._leaves,
            "homes_joined": len(numbers) - SETTING.workers, "idle_homes": sum(n not in self._trained for n in numbers),
            "stuck_homes": self._stuck, "other_digests": sum(len(digests) > 1 for digests in self._digests.values()),
            "growth_pct": grown_pct, "memory_flat": grown_pct <= MOST_GROWTH_PCT,
            "control_bytes_s_early": early, "control_bytes_s_late": late, "control_growth_pct": told_pct,
            "steps_per_s": last / seconds, "seconds": seconds}
        if not whole:
            rows += [{"process": f"worker {number}", "ended": str(end)} for number, end in ends.items()]
        grown = grown_pct > MOST_GROWTH_PCT or told_pct > MOST_TOLD_PCT  # of a short run nothing is known of it
        wrong = not whole or grown or summary["other_digests"] or summary["idle_homes"] or self._stuck
        return {"rows": rows, "summary": summary, "code": int(bool(wrong))}

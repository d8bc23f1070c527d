"""Run after run, each against the undisturbed run of its job; rows and a summary. Knows no screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from commlayer.chaos import processes, verdict
from commlayer.chaos.cluster import HERE, Cluster, Evidence
from commlayer.chaos.dealing import dealt, trial, undisturbed
from commlayer.chaos.faults import FAULTS
from commlayer.chaos.processes import Started
from commlayer.chaos.strikes import STRIKES
from commlayer.chaos.trials import Setting, Trial
from commlayer.chaos.verdict import Verdict
from commlayer.errors import CommError

START_S = 60.0
"""Until torch is loaded, once."""
LIMIT_S = 30.0
"""Of a run; beyond it somebody hangs."""


class Row(NamedTuple):
    """A run that was judged."""

    trial: Trial
    verdict: Verdict
    evidence: Evidence

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        found, said = self.evidence, self.verdict
        return {"fault": self.trial.fault, "seed": self.trial.seed, "setting": str(self.trial.setting),
                "struck": self.trial.victim, "at_step": self.trial.at,
                "shots": found.shots, "outcome": said.outcome, "steps": said.steps,
                "recovery_s": None if math.isnan(said.recovery_s) else round(said.recovery_s, 3),
                "wall_s": round(found.wall_s, 3), "contributions": found.contributions, "repeats": found.repeats,
                "lost_samples": said.lost_samples, "wrong": list(said.wrong)}


class Campaign:
    """Use it as a context: processes that all runs share live in it."""

    def __init__(self, cluster: Callable[[Trial, tuple[str, int]], Cluster] = Cluster, address: str = HERE,
                 inside: str = "") -> None:
        """`cluster`: what makes a run of a trial and of where ranks meet, which is at `address`, `inside` a namespace."""
        self._cluster, self._address, self._inside = cluster, address, inside

    def __enter__(self) -> Campaign:
        self._plain: dict[Setting, Evidence] = {}
        self._lines = processes.scratch()
        lines = self._lines / "store.lines"
        self._store = Started(processes.store, self._address, environ={}, lines=lines, inside=self._inside)
        if not self._store.pipe.poll(START_S):
            self._store.end()
            raise CommError(f"no process with torch within {START_S:g} s", peer="chaos")
        self._at = self._address, self._store.pipe.recv()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._store.end()
        processes.remove(self._lines)

    def run(self, seeds: Sequence[int], faults: Sequence[str] = ()) -> Iterator[Row]:
        for seed in seeds:
            yield self.one(trial(seed, faults or dealt()))

    def one(self, wanted: Trial) -> Row:
        plain = self._plain_of(wanted.setting)
        found = self._ran(wanted)
        return Row(wanted, verdict.judge(wanted, found, plain), found)

    def _plain_of(self, setting: Setting) -> Evidence:
        if setting not in self._plain:
            found = self._ran(undisturbed(setting))
            if not verdict.whole(found):
                said = [*found.faults, *found.ended]
                raise CommError(f"the undisturbed run of {setting} is not whole: {said}\n{found.lines}", peer="chaos")
            self._plain[setting] = found
        return self._plain[setting]

    def _ran(self, wanted: Trial) -> Evidence:
        with self._cluster(wanted, self._at) as cluster:
            return cluster.run(LIMIT_S, STRIKES[wanted.fault])


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures that sum a campaign up."""
    heal = [r.verdict.recovery_s for r in rows if not FAULTS[r.trial.fault].ends and not math.isnan(r.verdict.recovery_s)]
    restarted = [r.verdict.recovery_s for r in rows if r.trial.fault in ("kill-server", "kill-coordinator", "restart-storm")
                 and not math.isnan(r.verdict.recovery_s)]
    stopped = [r.verdict.recovery_s for r in rows if FAULTS[r.trial.fault].ends and not math.isnan(r.verdict.recovery_s)]
    wrong = [line for row in rows for line in row.verdict.wrong]
    return {
        "runs": len(rows), "violations": sum(bool(row.verdict.wrong) for row in rows),
        "went_on": sum(row.verdict.outcome == "goes on" for row in rows),
        "stopped_named": sum(row.verdict.outcome.startswith("stops, naming") for row in rows),
        "never_fired": sum("never fired" in line for line in wrong),
        "digest_mismatches": sum("other weights" in line for line in wrong),
        "contributions": sum(row.evidence.contributions for row in rows),
        "lost_or_doubled": sum("contributions" in line for line in wrong),
        "lost_samples": sum(row.verdict.lost_samples for row in rows),
        "recovery_p95_s": p95(heal), "restarted_recovery_p95_s": p95(restarted), "stop_p95_s": p95(stopped),
        "wall_p95_s": p95([row.evidence.wall_s for row in rows]),
        "wall_max_s": round(max((row.evidence.wall_s for row in rows), default=0.0), 3),
    }


def p95(values: Sequence[float]) -> float | None:
    """
    >>> p95([3.0, 1.0, 2.0])
    3.0
    """
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 3) if ordered else None

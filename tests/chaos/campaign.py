"""Runs a campaign of faults, compares each run with the undisturbed run of its job, and returns rows and a summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

from commlayer.errors import CommError
from tests.chaos import processes, verdict
from tests.chaos.cluster import HERE, Cluster, Evidence
from tests.chaos.dealing import dealt, trial, undisturbed
from tests.chaos.faults import FAULTS
from tests.chaos.strikes import STRIKES
from tests.chaos.trials import Setting, Trial
from tests.chaos.verdict import Verdict

LIMIT_S = 30.0
"""Time limit of a run; a run that takes longer hangs."""
LINE_LIMIT_S = 120.0
"""The same over a wide-area line, where pauses and timeouts are longer."""
TAIL_LINES = 12
RESTARTED = ("kill-server", "kill-coordinator", "restart-storm", "kill-home-server", "storm-home-server",
             "kill-home-coordinator")
"""Faults whose victim is restarted; their recovery times have a summary of their own."""


class Row(NamedTuple):
    """A run with its verdict."""

    trial: Trial
    verdict: Verdict
    evidence: Evidence

    @property
    def right(self) -> bool:
        return not self.verdict.findings

    def has(self, *kinds: str) -> bool:
        """Whether there are findings of one of these kinds."""
        return any(finding.kind in kinds for finding in self.verdict.findings)

    @property
    def tail(self) -> list[str]:
        """The last log lines of the run's processes."""
        return self.evidence.lines.splitlines()[-TAIL_LINES:]

    def told(self) -> dict[str, Any]:
        """The row as JSON. For a failed run, also its last log lines and the command that repeats it."""
        evidence, result = self.evidence, self.verdict
        more: dict[str, Any] = {} if self.right else {"again": self.trial.again, "lines": self.tail}
        return {"fault": self.trial.fault, "seed": self.trial.seed, "setting": str(self.trial.setting),
                "struck": self.trial.victim, "at_step": self.trial.at,
                "shots": evidence.shots, "outcome": result.outcome, "steps": result.steps,
                "recovery_s": None if math.isnan(result.recovery_s) else round(result.recovery_s, 3),
                "wall_s": round(evidence.wall_s, 3), "contributions": evidence.contributions, "repeats": evidence.repeats,
                "lost_samples": result.lost_samples, "wrong": list(result.wrong)} | more


class Campaign:
    """Use it as a context: it owns the processes that all runs share."""

    def __init__(self, cluster: Callable[[Trial, tuple[str, int]], Cluster] = Cluster, address: str = HERE,
                 inside: str = "", line: str = "") -> None:
        """`cluster` builds the cluster of a run from a trial and the address of the store where ranks meet. The store is at
        `address`, in the network namespace `inside`. `line`: see Trial.line."""
        self._cluster, self._address, self._inside, self._line = cluster, address, inside, line

    def __enter__(self) -> Campaign:
        self._plain: dict[Setting, Evidence] = {}
        self._open = ExitStack()
        self._at = self._open.enter_context(processes.meeting(self._address, self._inside))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def run(self, seeds: Sequence[int], faults: Sequence[str] = ()) -> Iterator[Row]:
        for seed in seeds:
            yield self.one(trial(seed, faults or dealt(), self._line))

    def one(self, wanted: Trial) -> Row:
        evidence = self._ran(wanted)
        # The expected weights are those of the run without TLS, or of a replay if members may leave.
        plain = evidence if wanted.setting.least else self._plain_of(wanted.setting._replace(keys=False))
        return Row(wanted, verdict.judge(wanted, evidence, plain), evidence)

    def _plain_of(self, setting: Setting) -> Evidence:
        if setting not in self._plain:
            evidence = self._ran(undisturbed(setting, self._line))
            if not verdict.whole(evidence):
                problems = [*(fault.line for fault in evidence.faults), *evidence.ended]
                raise CommError(f"the undisturbed run of {setting} is not whole: {problems}\n{evidence.lines}", peer="chaos")
            self._plain[setting] = evidence
        return self._plain[setting]

    def _ran(self, wanted: Trial) -> Evidence:
        with self._cluster(wanted, self._at) as cluster:
            return cluster.run(LINE_LIMIT_S if self._line else LIMIT_S, STRIKES[wanted.fault])


def summary(rows: Sequence[Row], requested: int) -> dict[str, Any]:
    """The figures of a campaign; `requested` is the number of runs that were requested."""
    known = [row for row in rows if not math.isnan(row.verdict.recovery_s)]
    healed = [r.verdict.recovery_s for r in known if not FAULTS[r.trial.fault].ends and FAULTS[r.trial.fault].heals]
    restarted = [r.verdict.recovery_s for r in known if r.trial.fault in RESTARTED]
    stopped = [r.verdict.recovery_s for r in known if FAULTS[r.trial.fault].ends]
    watched = [row.evidence.contributions for row in rows if row.evidence.contributions is not None]
    right = [row.verdict.outcome for row in rows if row.right]
    return {
        "asked": requested, "runs": len(rows), "violations": len(rows) - len(right),
        "went_on": sum(outcome == "goes on" for outcome in right),
        "went_on_without": sum(outcome.startswith("goes on without") for outcome in right),
        "went_on_with": sum(outcome.startswith("goes on with worker") for outcome in right),
        "stopped_named": sum(outcome.startswith("stops, naming") for outcome in right),
        "never_fired": sum(row.has("never fired") for row in rows),
        "digest_mismatches": sum(row.has("weights") for row in rows),
        "over_tls": sum(row.trial.setting.keys for row in rows),
        "watched_runs": len(watched), "contributions": sum(watched),
        "lost_or_doubled": sum(row.has("contributions") for row in rows),
        "lost_samples": sum(row.verdict.lost_samples for row in rows),
        "recovery_p50_s": quantile(healed, 0.5), "recovery_p95_s": p95(healed),
        "restarted_recovery_p95_s": p95(restarted), "stop_p95_s": p95(stopped),
        "wall_p95_s": p95([row.evidence.wall_s for row in rows]),
        "wall_max_s": round(max((row.evidence.wall_s for row in rows), default=0.0), 3),
    }


def p95(values: Sequence[float]) -> float | None:
    """
    >>> p95([3.0, 1.0, 2.0])
    3.0
    """
    return quantile(values, 0.95)


def quantile(values: Sequence[float], part: float) -> float | None:
    """
    >>> quantile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(part * len(ordered)))], 3) if ordered else None

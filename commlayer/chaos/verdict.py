"""What is wrong with a run: its evidence against that of the undisturbed run, and what its fault allows. Pure."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

from commlayer.chaos import oracle
from commlayer.chaos.cluster import Evidence
from commlayer.chaos.oracle import GOES_ON, Outcome
from commlayer.chaos.reports import STEPS_PER_EPOCH, Ended
from commlayer.chaos.trials import STEPS, Trial
from commlayer.chaos.wire import weights

ROUNDING = 1e-4
"""Of sums of float32, over a run."""


class Verdict(NamedTuple):
    """How a run ended and what is wrong with it. `recovery_s`: from the strike until all were at work again, or had stopped."""

    outcome: str
    wrong: tuple[str, ...]
    recovery_s: float
    steps: int
    lost_samples: int


def judge(trial: Trial, found: Evidence, plain: Evidence) -> Verdict:
    """`plain`: the evidence of the same job without a fault."""
    others = [rank for rank in range(trial.setting.workers) if not _struck(trial, rank)]
    outcome = _outcome(trial, found, others)
    wrong = []
    if not found.shots:
        wrong.append(f"the fault {trial.fault} never fired")
    if outcome.how == "hangs":
        hanging = [f"worker {rank}" for rank in others if found.ended[rank] is None]
        wrong.append(f"{', '.join(hanging)} did not end within {found.wall_s:.1f} s")
    wrong += [f"worker {rank}: {ended.bug}" for rank, ended in enumerate(found.ended) if ended is not None and ended.bug]
    allowed = oracle.allowed(trial)
    if not any(_is(outcome, one) for one in allowed):
        wrong.append(f"the job {outcome}; allowed: {'; or '.join(map(str, allowed))}")
    wrong += _digests(found, plain, others if outcome != GOES_ON else list(range(trial.setting.workers)))
    lost = _samples(trial, found, others if outcome != GOES_ON else list(range(trial.setting.workers)), wrong)
    wrong += found.faults
    if outcome == GOES_ON:
        if not found.off <= ROUNDING:
            wrong.append(f"what was applied is off what was put in by {found.off:.2e}, allowed {ROUNDING:.0e}")
        if found.contributions != plain.contributions:
            wrong.append(f"{found.contributions} contributions were in sums, {plain.contributions} in the undisturbed run")
    return Verdict(str(outcome), tuple(wrong), _recovery_s(found, others), _steps(found, others), lost)


def _struck(trial: Trial, rank: int) -> bool:
    """Whether that worker is the one that is lost: it owes nobody an orderly end."""
    return trial.fault in ("kill-worker", "freeze-worker", "isolate-worker") and rank == trial.number


def _outcome(trial: Trial, found: Evidence, others: list[int]) -> Outcome:
    ends = [found.ended[rank] for rank in others]
    if any(end is None for end in ends):
        return Outcome("hangs")
    known = [end for end in ends if end is not None]
    if all(not end.what and not end.bug for end in known):
        whole = len(known) == trial.setting.workers or all(
            end is not None and not end.what and not end.bug for end in found.ended)
        return GOES_ON if whole else Outcome("goes on without", (trial.victim,))
    return Outcome("stops, naming", tuple(sorted({end.peer for end in known if end.what})))


def _is(outcome: Outcome, allowed: Outcome) -> bool:
    return outcome.how == allowed.how and set(outcome.peers) <= set(allowed.peers)


def _digests(found: Evidence, plain: Evidence, ranks: list[int]) -> list[str]:
    """Each worker's weights after each step that it took, against the undisturbed run's."""
    right = {step.step: step.digest for step in plain.stepped[0]}
    for rank in ranks:
        for step in found.stepped[rank]:
            if step.digest != right.get(step.step):
                return [f"worker {rank} has other weights than in the undisturbed run from step {step.step} on"]
    return []


def _samples(trial: Trial, found: Evidence, ranks: list[int], wrong: list[str]) -> int:
    """Each sample once in an epoch, as far as all came. How many were not."""
    last, lost = min((len(found.stepped[rank]) for rank in ranks), default=0), 0
    epoch = STEPS_PER_EPOCH * sum(weights(trial.setting.workers))
    whole = len(ranks) == trial.setting.workers
    for first in range(0, last, STEPS_PER_EPOCH):
        used: Counter[int] = Counter()
        for rank in ranks:
            for step in found.stepped[rank][first : min(last, first + STEPS_PER_EPOCH)]:
                used.update(step.samples)
        twice = sum(count - 1 for count in used.values())
        missed = epoch - len(used) if whole and first + STEPS_PER_EPOCH <= last else 0
        lost += twice + missed
    if lost:
        wrong.append(f"{lost} samples were lost or used twice")
    return lost


def _recovery_s(found: Evidence, others: list[int]) -> float:
    """nan if it was not struck."""
    if not found.struck_s:
        return math.nan
    times = []
    for rank in others:
        steps = found.stepped[rank]
        before = max((s.step for s in steps if s.at_s <= found.struck_s), default=0)
        first = next((s.at_s for s in steps if s.step > before + 1), None)
        end: Any = found.ended[rank]
        times.append(end.at_s if isinstance(end, Ended) and (first is None or end.what) else first or math.nan)
    return max(times, default=math.nan) - found.struck_s


def _steps(found: Evidence, others: list[int]) -> int:
    return min((found.stepped[rank][-1].step if found.stepped[rank] else 0 for rank in others), default=0)


def whole(found: Evidence) -> bool:
    """Whether an undisturbed run is fit to compare with."""
    return not found.faults and all(len(steps) == STEPS for steps in found.stepped) and found.off <= ROUNDING

"""Judges a run: compares its evidence with the undisturbed run and with the allowed outcomes of its fault."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

from tests.chaos import outcomes
from tests.chaos.cluster import Evidence
from tests.chaos.faults import FAULTS
from tests.chaos.outcomes import GOES_ON, Outcome
from tests.chaos.reports import SETTLING, STEPS_PER_EPOCH, Ended, Finding
from tests.chaos.trials import STEPS, Trial
from tests.chaos.wire import weights

ROUNDING = 1e-4
"""Of sums in float32 over a run."""


class Verdict(NamedTuple):
    """The outcome of a run and its findings. `recovery_s`: time from the strike until all workers have continued or stopped."""

    outcome: str
    findings: tuple[Finding, ...]
    recovery_s: float
    steps: int
    lost_samples: int

    @property
    def wrong(self) -> tuple[str, ...]:
        return tuple(finding.line for finding in self.findings)


def judge(trial: Trial, evidence: Evidence, plain: Evidence) -> Verdict:
    """`plain`: the evidence of the same job without a fault."""
    others = [rank for rank in range(len(evidence.ended)) if not _struck(trial, rank)]
    outcome = _outcome(trial, evidence, others)
    findings = []
    if not evidence.shots:
        findings.append(Finding("never fired", f"the fault {trial.fault} never fired"))
    if outcome.how == "hangs":
        hanging = [f"worker {rank}" for rank in others if evidence.ended[rank] is None]
        findings.append(Finding("hangs", f"{', '.join(hanging)} did not end within {evidence.wall_s:.1f} s"))
    findings += [Finding("bug", f"worker {rank}: {ended.bug}")
                 for rank, ended in enumerate(evidence.ended) if ended is not None and ended.bug]
    allowed = outcomes.allowed(trial)
    if not any(_is(outcome, one) for one in allowed):
        findings.append(Finding("outcome", f"the job {outcome}; allowed: {'; or '.join(map(str, allowed))}"))
    findings += _victim(trial, evidence)
    ranks = others if outcome != GOES_ON else list(range(trial.setting.workers))
    findings += _digests(evidence, plain, ranks) if not trial.setting.least else _as_replayed(evidence, others)
    if lost := _lost_samples(trial, evidence, ranks) if not trial.setting.least else _astray(trial, evidence, others):
        findings.append(Finding("samples", f"{lost} samples were lost or used twice"))
    findings += evidence.faults
    if outcome == GOES_ON:
        findings += _at_the_end(trial, evidence, plain)
    elif outcome.how == "goes on without":
        findings += _left_behind(trial, evidence)
        findings += [Finding("outcome", f"worker {rank} took {len(evidence.stepped[rank])} steps of {STEPS}")
                     for rank in others if len(evidence.stepped[rank]) != STEPS]
    elif outcome.how == "goes on with":
        findings += _left_behind(trial, evidence) + _come_again(trial, evidence, others)
    return Verdict(str(outcome), tuple(findings), _recovery_s(evidence, others), _steps(evidence, others), lost)


def _at_the_end(trial: Trial, evidence: Evidence, plain: Evidence) -> list[Finding]:
    """Checks after a job that finished: no gradient is lost, all contributions were in sums, and nothing is left."""
    findings = []
    if not evidence.off <= ROUNDING:
        line = f"what was applied is off what was put in by {evidence.off:.2e}, allowed {ROUNDING:.0e}"
        findings.append(Finding("accounts", line))
    if evidence.contributions is not None and evidence.contributions != plain.contributions:
        line = f"{evidence.contributions} contributions were in sums, {plain.contributions} in the undisturbed run"
        findings.append(Finding("contributions", line))
    return findings + _left_behind(trial, evidence)


def _left_behind(trial: Trial, evidence: Evidence) -> list[Finding]:
    files = [file for file in evidence.left_files if file.partition(".")[0] not in outcomes.leaves(trial)]
    return [Finding("left", f"{name} did not end behind the job") for name in evidence.servers_left] + \
        [Finding("left", f"{name} was left behind the job") for name in files]


def _come_again(trial: Trial, evidence: Evidence, others: list[int]) -> list[Finding]:
    """All must end after the same step, and the home that joined again must have had samples."""
    last = {rank: evidence.stepped[rank][-1].step for rank in others}
    findings = [Finding("outcome", f"worker {rank} ended after step {last[rank]}, worker {others[0]} after {last[others[0]]}")
                for rank in others if last[rank] != last[others[0]]]
    idle = not any(step.samples for step in evidence.stepped[-1])
    return findings + [Finding("samples", f"worker {trial.setting.workers} came again and was given none")] * idle


def _victim(trial: Trial, evidence: Evidence) -> list[Finding]:
    """A victim that is alive but cut off must end by itself."""
    if not (names := outcomes.alone(trial)):
        return []
    ended = evidence.ended[trial.number]
    if ended is None:
        return [Finding("hangs", f"{trial.victim}, which is cut off, did not end within {evidence.wall_s:.1f} s")]
    if not any(ended.peer == name or ended.peer.startswith(f"{name} ") for name in names):
        how = f"stops, naming {ended.peer}" if ended.what else "ends as if nothing were"
        return [Finding("outcome", f"{trial.victim}, which is cut off, {how}; allowed: stops, naming {' or '.join(names)}")]
    return []


def _struck(trial: Trial, rank: int) -> bool:
    """Whether that worker is the lost victim, of which no orderly end is expected."""
    return FAULTS[trial.fault].loses and rank in trial.victims


def _outcome(trial: Trial, evidence: Evidence, others: list[int]) -> Outcome:
    ends = [evidence.ended[rank] for rank in others]
    if any(end is None for end in ends):
        return Outcome("hangs")
    known = [end for end in ends if end is not None]
    if all(not end.what and not end.bug for end in known):
        if FAULTS[trial.fault].joins:
            came = len(known) == trial.setting.workers and all(evidence.stepped[rank] for rank in others)
            return Outcome("goes on with", (f"worker {trial.setting.workers}",)) if came else \
                Outcome("goes on without", (trial.victim,))
        complete = len(known) == trial.setting.workers or all(
            end is not None and not end.what and not end.bug for end in evidence.ended)
        return GOES_ON if complete else Outcome("goes on without", (trial.victim,))
    return Outcome("stops, naming", tuple(sorted({end.peer for end in known if end.what})))


def _is(outcome: Outcome, allowed: Outcome) -> bool:
    return outcome.how == allowed.how and set(outcome.peers) <= set(allowed.peers)


def _digests(evidence: Evidence, plain: Evidence, ranks: list[int]) -> list[Finding]:
    """Compares each worker's weights after each step with the undisturbed run."""
    right = {step.step: step.digest for step in plain.stepped[0]}
    for rank in ranks:
        for step in evidence.stepped[rank]:
            if step.digest != right.get(step.step):
                line = f"worker {rank} has other weights than in the undisturbed run from step {step.step} on"
                return [Finding("weights", line)]
    return []


def _lost_samples(trial: Trial, evidence: Evidence, ranks: list[int]) -> int:
    """Counts samples that were lost or used twice in an epoch, up to the last step that all workers took."""
    last, lost = min((len(evidence.stepped[rank]) for rank in ranks), default=0), 0
    epoch = STEPS_PER_EPOCH * sum(weights(trial.setting.workers))
    complete = len(ranks) == trial.setting.workers
    for first in range(0, last, STEPS_PER_EPOCH):
        used: Counter[int] = Counter()
        for rank in ranks:
            for step in evidence.stepped[rank][first : min(last, first + STEPS_PER_EPOCH)]:
                used.update(step.samples)
        twice = sum(count - 1 for count in used.values())
        missed = epoch - len(used) if complete and first + STEPS_PER_EPOCH <= last else 0
        lost += twice + missed
    return lost


def _as_replayed(evidence: Evidence, ranks: list[int]) -> list[Finding]:
    """Like _digests for jobs whose members may leave: compares with plain means over the members of each step."""
    for rank in ranks:
        for step in evidence.stepped[rank]:
            if evidence.replayed[step.step - 1 : step.step] != [step.digest]:
                return [Finding("weights", f"worker {rank} has other weights than plain means give, from step {step.step} on")]
    return []


def _astray(trial: Trial, evidence: Evidence, ranks: list[int]) -> int:
    """Like _lost_samples, counting only what members used in completed steps. A former member's samples count until its exit:
    those that it used later are used again."""
    longest = max((evidence.stepped[rank] for rank in ranks), key=len, default=[])
    exits = longest[-1].exits if longest else {}
    complete = [{step.step for step in row} for row in evidence.stepped]
    last_step, epochs = max((step.step for step in longest), default=0), dict[int, Counter[int]]()
    for rank, row in enumerate(evidence.began):
        for start in row:
            if start.step <= last_step and (start.step <= exits[rank] if rank in exits else start.step in complete[rank]):
                epochs.setdefault(start.epoch, Counter()).update(start.samples)
    every = STEPS_PER_EPOCH * sum(weights(trial.setting.workers))
    last = max(epochs, default=0)
    return sum(sum(count - 1 for count in counts.values()) + (every - len(counts) if epoch != last else 0)
               for epoch, counts in epochs.items())


def _recovery_s(evidence: Evidence, others: list[int]) -> float:
    """nan if the fault did not strike."""
    if not evidence.struck_s:
        return math.nan
    times = []
    for rank in others:
        steps = evidence.stepped[rank]
        before = max((s.step for s in steps if s.at_s <= evidence.struck_s), default=0)
        first = next((s.at_s for s in steps if s.step > before + 1), None)
        end: Any = evidence.ended[rank]
        times.append(end.at_s if isinstance(end, Ended) and (first is None or end.what) else first or math.nan)
    return max(times, default=math.nan) - evidence.struck_s


def _steps(evidence: Evidence, others: list[int]) -> int:
    return min((evidence.stepped[rank][-1].step if evidence.stepped[rank] else 0 for rank in others), default=0)


def whole(evidence: Evidence) -> bool:
    """Whether an undisturbed run is fit for comparison: complete, without faults and without missing contributions."""
    workers = len(evidence.stepped)
    seen = evidence.contributions is None or evidence.contributions >= workers * (STEPS + SETTLING)
    return seen and not evidence.faults and all(len(steps) == STEPS for steps in evidence.stepped) and evidence.off <= ROUNDING

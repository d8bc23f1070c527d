"""The default balancer: computes each worker's share of the batch in future steps from measured compute times.

Pure: no clock, no threads, no network. Each worker has a linear time model T(B), which follows the worker's measurements. In
each step the balancer computes the best shares, and announces them if they gain enough. The balancer gives every worker a
share, because the other workers would also wait for a worker without one.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from commlayer.balance.share_solver import FREE, Communication, solve
from commlayer.balance.time_models import LinearTime, OnlineLine, checked_time, times_of_shares
from commlayer.errors import InvalidInput
from commlayer.records import Record

EVENTS_KEPT = 1000
OUTCOME_AFTER = 3
"""Number of steps after a decision whose median time is compared with the prediction. The median ignores a single spike."""


class Measurement(Record, frozen=True):
    """The seconds that one worker computes for its batch in a step. A worker without a share may report a batch that it
    computed on its own."""

    worker: int
    batch: int
    compute_s: float


class Joined(Record, frozen=True):
    """A worker that the balancer gives shares to: the most samples that the worker computes at once, and its linear time
    model, None if unknown. Workers are numbered from 0."""

    worker: int
    cap: int | None = None
    line: LinearTime | None = None


class Decision(Record, frozen=True):
    """New shares of all workers from a future step on, with the reason and the expected gain."""

    step: int
    from_step: int
    shares: tuple[int, ...]
    reason: str
    before_s: float
    """Expected step time with the previous shares, in seconds."""
    after_s: float
    """Expected step time with the new shares, in seconds; infinite if the caller gave these shares."""
    effect: float = 0.0
    """The straggler effect, (longest - shortest) / mean compute time, in the step of the decision."""

    @property
    def gain_s(self) -> float:
        return self.before_s - self.after_s

    @property
    def by_worker(self) -> dict[int, int]:
        return dict(enumerate(self.shares))


class Outcome(Record, frozen=True):
    """Compares a decision's predicted step time with the median of the first steps under the decision."""

    step: int
    decided: int
    """Number of the step in which the decision was made."""
    expected_s: float
    measured_s: float
    reason: str
    effect: float = 0.0
    """The straggler effect, (longest - shortest) / mean compute time, in the last of the compared steps."""
    whole_s: float = 0.0
    """Seconds of a complete step, including communication; 0 if not measured."""

    @property
    def error(self) -> float:
        return self.measured_s / self.expected_s - 1


class Note(Record, frozen=True):
    """An observation that changed no share: an invalid measurement or a suspected spike."""

    step: int
    text: str


Event = Decision | Outcome | Note


class SharePolicy(Record, frozen=True):
    """Says when a change of shares is worth its cost."""

    minimum: int = 1
    """Smallest share of a worker, in samples. A model with BatchNorm needs 2."""
    lead: int = 1
    """Number of steps between a decision and the first step under the decision; 1: the next step."""
    gain_least: float = 0.03
    """Smallest gain for which shares are changed, as a fraction of the expected step time."""

    def __post_init__(self) -> None:
        if self.minimum < 1 or not self.gain_least >= 0:
            raise InvalidInput("E-SHARES-ARGUMENT", f"SharePolicy: got minimum {self.minimum} and gain_least "
                               f"{self.gain_least}, allowed are 1 or more and 0 or more")


def straggler_effect(times_s: Sequence[float]) -> float:
    """Returns LBB's straggler effect, (longest - shortest) / mean, of the times of the workers that computed."""
    return (max(times_s) - min(times_s)) / (sum(times_s) / len(times_s)) if times_s else 0.0


class Balancer:
    """Decides on shares from measured compute times. Call decide() once per step with the measurements of that step. The
    balancer keeps the current shares, in order to match a time to its batch."""

    def __init__(
        self, joined: Sequence[Joined], total: int, policy: SharePolicy | None = None, communication: Communication = FREE,
        *, shares: Mapping[int, int] | Decision | None = None, from_step: int = 0,
    ) -> None:
        """`shares`: current shares, or a decision announced for `from_step` with its predictions. None: the balancer begins
        with the best shares according to the known time models."""
        self.total, self.policy, self.communication = total, policy or SharePolicy(), communication
        self.caps = [one.cap or total for one in joined]
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._online = [OnlineLine(one.line) for one in joined]
        self._effect = 0.0
        self._under: list[float] = []
        if isinstance(shares, Decision):
            self.latest = shares
        elif shares is None:
            best = solve(self.lines, total, self.caps, minimum=self.policy.minimum).shares
            reason = "the profile" if all(one.line for one in joined) else "no profile"
            self.latest = self._decision(-1, from_step, best, reason, math.inf)
        else:
            if set(shares) - set(range(len(joined))) or sum(shares.values()) != total:
                raise InvalidInput("E-SHARES-ARGUMENT", f"balancer: got shares {dict(shares)}, allowed are those of workers 0 "
                                   f"to {len(joined) - 1} with the sum {total}")
            given = [shares.get(worker, 0) for worker in range(len(joined))]
            self.latest = self._decision(-1, from_step, given, "given", math.inf, math.inf)

    def copy(self) -> Balancer:
        """Returns an independent copy: decisions of one do not affect the other."""
        clone = copy.copy(self)
        clone._online = [one.copy() for one in self._online]
        clone.events, clone._under = deque(self.events, maxlen=EVENTS_KEPT), list(self._under)
        return clone

    @property
    def shares(self) -> dict[int, int]:
        """The latest shares by worker. The latest shares may be announced for a later step."""
        return self.latest.by_worker

    @property
    def lines(self) -> list[LinearTime]:
        """Each worker's linear time model. A worker without measurements gets the median of the other workers' models."""
        known = [one.line for one in self._online if one.known]
        typical = LinearTime(statistics.median(line.slope_s for line in known),
                             statistics.median(line.intercept_s for line in known)) if known else LinearTime(1.0)
        return [one.line if one.known else typical for one in self._online]

    def decide(self, step: int, measurements: Sequence[Measurement]) -> Decision | None:
        """Processes the measurements of `step`. Returns new shares from step + lead on if they are worth a change; otherwise
        None."""
        times_s = self._observed(step, measurements)
        if step < self.latest.from_step:
            return None
        if times_s:
            self._effect = straggler_effect(list(times_s.values()))
            self._compare(step, max(times_s.values()))
        decision = self._proposed(step)
        if decision is not None:
            self.latest, self._under = decision, []
            self.events.append(decision)
        return decision

    def _observed(self, step: int, measurements: Sequence[Measurement]) -> dict[int, float]:
        """Returns the seconds of each worker that computed its latest share. Invalid times are dropped, with a Note in
        `events`."""
        times_s: dict[int, float] = {}
        for worker, batch, compute_s in ((one.worker, one.batch, one.compute_s) for one in measurements if one.batch > 0):
            try:
                checked_time(worker, compute_s)
            except ValueError as error:
                self.events.append(Note(step, str(error)))
                continue
            self._follow(step, worker, batch, compute_s)
            if batch == self.latest.shares[worker]:
                times_s[worker] = compute_s
        return times_s

    def _follow(self, step: int, worker: int, batch: int, compute_s: float) -> None:
        pieces = -(-batch // self.caps[worker])
        seen = self._online[worker].observe(-(-batch // pieces), compute_s / pieces)
        if seen != "follows":
            what = "measured one outlier: shares unchanged" if seen == "suspect" else "changed its speed: new time model"
            self.events.append(Note(step, f"worker {worker} {what} ({compute_s:.4g} s for {batch})"))

    def _compare(self, step: int, slowest_s: float) -> None:
        self._under.append(slowest_s)
        latest = self.latest
        if len(self._under) == OUTCOME_AFTER and latest.after_s < math.inf:
            measured_s = self._iteration_s(statistics.median(self._under))
            self.events.append(Outcome(step, latest.step, latest.after_s, measured_s, latest.reason, self._effect))

    def _proposed(self, step: int) -> Decision | None:
        """Returns a decision with the best shares if they shorten the step enough; otherwise None."""
        before_s = self._expected_s(self.latest.shares)
        best = solve(self.lines, self.total, self.caps, minimum=self.policy.minimum).shares
        if before_s - self._expected_s(best) < self.policy.gain_least * before_s:
            return None
        return self._decision(step, step + self.policy.lead, best, "measured times changed", before_s)

    def _expected_s(self, shares: Sequence[int]) -> float:
        """Returns the step time with these shares, according to the current time models."""
        return self._iteration_s(max(times_of_shares(self.lines, shares, self.caps)))

    def _iteration_s(self, makespan_s: float) -> float:
        return makespan_s + self.communication.exposed_s(makespan_s)

    def _decision(self, step: int, from_step: int, shares: Sequence[int], reason: str, before_s: float,
                  after_s: float | None = None) -> Decision:
        return Decision(step, from_step, tuple(shares), reason, before_s,
                        self._expected_s(shares) if after_s is None else after_s, self._effect)


def describe(event: Decision | Outcome) -> str:
    if isinstance(event, Outcome):
        suffix = f"; {event.whole_s * 1e3:.1f} ms with communication" if event.whole_s else ""
        return (f"shares of step {event.decided}: measured {event.measured_s * 1e3:.1f} ms per step, expected "
                f"{event.expected_s * 1e3:.1f} ms ({event.error:+.0%}); straggler effect {event.effect:.2f}{suffix}")
    shares = ", ".join(f"worker {worker} {share}" for worker, share in enumerate(event.shares))
    return (f"new shares from step {event.from_step}: {shares}; {event.reason} (straggler effect {event.effect:.2f}); expected "
            f"{event.after_s * 1e3:.1f} ms per step (was {event.before_s * 1e3:.1f})")

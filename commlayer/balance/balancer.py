"""The default balancer: measurements in, shares for a future step out. Pure: no clock, no threads, no network.

Each worker has a line T(B) that follows its measurements. In each step the best shares are computed, and announced only if
they gain more than the change costs. A worker is left out only when its line is settled, and is tried again later with the
smallest share.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from commlayer.balance.share_solver import FREE, Communication, Solution, solve
from commlayer.balance.time_models import Accumulated, Line, OnlineLine, checked_time
from commlayer.errors import InvalidInput
from commlayer.records import Record


class Measurement(Record, frozen=True):
    """A worker's compute seconds in a step. A worker without a share may report a batch that it computed on its own."""

    worker: int
    batch: int
    compute_s: float


class Joined(Record, frozen=True):
    """A worker that can take part from now on. Without a line it first gets the smallest share."""

    worker: int
    cap: int | None = None
    line: Line | None = None


class Vanished(Record, frozen=True):
    """A worker that left or died."""

    worker: int


Input = Measurement | Joined | Vanished


class Decision(Record, frozen=True):
    """New shares for all members from a future step on, with reason and expected gain."""

    step: int
    from_step: int
    workers: tuple[int, ...]
    shares: tuple[int, ...]
    micro_batches: tuple[int, ...]
    reason: str
    before_s: float
    """Expected iteration time with the current shares; infinite if they are no longer possible."""
    after_s: float
    effect: float = 0.0
    """The straggler effect in the step of the decision."""

    @property
    def gain_s(self) -> float:
        return self.before_s - self.after_s

    @property
    def by_worker(self) -> dict[int, int]:
        return dict(zip(self.workers, self.shares, strict=True))


class Outcome(Record, frozen=True):
    """Compares the median of the first iterations under a decision with its prediction."""

    step: int
    decided: int
    """The step of the decision."""
    expected_s: float
    measured_s: float
    reason: str
    effect: float = 0.0
    """The straggler effect in the last of these steps."""
    whole_s: float = 0.0
    """Time of a whole step, including communication; 0 if it was not measured."""

    @property
    def error(self) -> float:
        return self.measured_s / self.expected_s - 1


class Note(Record, frozen=True):
    """An observation that changed no share: a invalid measurement, a suspected spike, no worker left."""

    step: int
    text: str


Event = Decision | Outcome | Note


def straggler_effect(times_s: Sequence[float]) -> float:
    """LBB's straggler effect, (longest - shortest) / mean, over the workers that computed."""
    return (max(times_s) - min(times_s)) / (sum(times_s) / len(times_s)) if times_s else 0.0


def describe(event: Decision | Outcome) -> str:
    if isinstance(event, Outcome):
        suffix = f"; {event.whole_s * 1e3:.1f} ms with communication" if event.whole_s else ""
        return (f"shares of step {event.decided}: measured {event.measured_s * 1e3:.1f} ms per step, expected "
                f"{event.expected_s * 1e3:.1f} ms ({event.error:+.0%}); straggler effect {event.effect:.2f}{suffix}")
    shares = ", ".join(f"worker {w} {share}" for w, share in zip(event.workers, event.shares, strict=True))
    return (f"new shares from step {event.from_step}: {shares}; {event.reason} (straggler effect {event.effect:.2f}); expected "
            f"{event.after_s * 1e3:.1f} ms per step (was {event.before_s * 1e3:.1f})")


EVENTS_KEPT = 1000
OUTCOME_AFTER = 3
"""Iterations under a decision whose median is compared with the prediction; the median ignores a single spike."""


class Policy(Record, frozen=True):
    """When a change of shares is worth its cost."""

    minimum: int = 1
    """Smallest share of a worker that takes part: 2 with BatchNorm."""
    lead: int = 1
    """Steps between a decision and the first step under it: 1 is the next step."""
    gain_least: float = 0.03
    """Least gain of a change, as a part of the expected iteration."""
    change_s: float = 0.0
    """Seconds that a change costs."""
    horizon: int = 50
    """The gain must win back `change_s` within this many steps."""
    exclude_gain: float = 0.05
    """Leaving a worker out must shorten the iteration by this part."""
    readmit_after: int = 50
    """Steps until an excluded worker is tried again; doubled at each further exclusion."""

    def __post_init__(self) -> None:
        for name in ("minimum", "horizon", "readmit_after"):
            if getattr(self, name) < 1:
                raise InvalidInput("E-SHARES-ARGUMENT", f"Policy: {name} {getattr(self, name)}: allowed is 1 or more")
        for name in ("gain_least", "change_s", "exclude_gain"):
            if not getattr(self, name) >= 0:
                raise InvalidInput("E-SHARES-ARGUMENT", f"Policy: {name} {getattr(self, name)}: allowed is 0 or more")


class BalancedWorker:
    def __init__(self, cap: int | None, line: Line | None) -> None:
        self.cap = cap
        self.online = OnlineLine(line)
        self.excluded_since: int | None = None
        self.retry_after = 0

    def copy(self) -> BalancedWorker:
        clone = copy.copy(self)
        clone.online = self.online.copy()
        return clone


class Balancer:
    """Call decide() once per step with the measurements of that step. The balancer keeps the current shares, so that it
    can match a time to its batch."""

    def __init__(
        self, joined: Sequence[Joined], total: int, policy: Policy | None = None, communication: Communication = FREE,
        *, shares: Mapping[int, int] | Decision | None = None, from_step: int = 0,
    ) -> None:
        """`shares`: current shares, or a decision announced for `from_step` with its predictions. Without them, the
        balancer begins with the best shares by the profiles."""
        self.total, self.policy, self.communication = total, policy or Policy(), communication
        self.members = {one.worker: BalancedWorker(one.cap, one.line) for one in joined}
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._effect = 0.0
        workers = self._eligible(self.members)
        if not workers:
            raise InvalidInput("E-SHARES-ARGUMENT",
                f"balancer: got {len(joined)} workers of which none has room for the minimum batch {self.policy.minimum} "
                f"within the total {total}; raise a cap or lower the minimum"
            )
        solution = self._solve(workers, frozenset(workers) if any(one.line is None for one in joined) else frozenset())
        reason = "the profile" if all(one.line for one in joined) else "no profile"
        self.latest = self._decision(-1, from_step, workers, solution, reason, math.inf)
        if shares is not None:
            self.latest = shares if isinstance(shares, Decision) else self._given(shares, from_step)
        self._in_force, self._announced = self.latest, deque[Decision]()
        self._now = self.latest.by_worker
        self._mark_excluded(self.latest)
        self._under: list[float] = []
        self._forced = ""

    def _given(self, shares: Mapping[int, int], from_step: int) -> Decision:
        for worker, share in shares.items():
            if share and worker not in self.members:
                raise InvalidInput("E-SHARES-ARGUMENT",
                                   f"balancer: got a share of {share} for worker {worker}, who has not joined")
        if sum(shares.values()) != self.total:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               f"balancer: shares add up to {sum(shares.values())}, allowed is the total, which is "
                               f"{self.total}")
        named = {worker: shares.get(worker, 0) for worker in sorted(self.members)}
        caps = [self.members[worker].cap or self.total for worker in named]
        pieces = tuple(-(-share // cap) for share, cap in zip(named.values(), caps, strict=True))
        return Decision(-1, from_step, tuple(named), tuple(named.values()), pieces, "given", math.inf, math.inf)

    def copy(self) -> Balancer:
        """Independent: decisions of one copy do not affect the other."""
        clone = copy.copy(self)
        clone.members = {worker: member.copy() for worker, member in self.members.items()}
        clone.events = deque(self.events, maxlen=EVENTS_KEPT)
        clone._announced, clone._under = self._announced.copy(), list(self._under)
        return clone

    @property
    def shares(self) -> dict[int, int]:
        """The latest shares. They may be announced for a later step."""
        return self.latest.by_worker

    def decide(self, step: int, inputs: Sequence[Input]) -> Decision | None:
        """Takes the measurements and membership changes of `step`. Returns new shares for step + lead if they are worth
        it."""
        # If membership changes while a decision is announced, there are two pending decisions. Each takes effect at its step.
        while self._announced and step >= self._announced[0].from_step:
            self._in_force = self._announced.popleft()
            self._now = self._in_force.by_worker
        self._take(step, inputs)
        if not self._eligible(self.members):
            self._forced = ""
            self.events.append(Note(step, "no worker can take the minimum batch: shares unchanged until a worker joins"))
            return None
        decision: Decision | None
        if self._forced:
            decision, self._forced = self._replanned(step, self._forced), ""
        elif step < self.latest.from_step:
            return None
        else:
            decision = self._improved(step) or self._probe(step)
        if decision is not None:
            self.latest, self._under = decision, []
            self._announced.append(decision)
            self.events.append(decision)
            self._mark_excluded(decision)
        return decision

    def _take(self, step: int, inputs: Sequence[Input]) -> None:
        times: dict[int, float] = {}
        for one in inputs:
            match one:
                case Joined(worker, cap, line):
                    self.members[worker] = BalancedWorker(cap, line)
                    self._forced = f"worker {worker} joined"
                case Vanished(worker):
                    if self.members.pop(worker, None) is not None:
                        self._forced = f"worker {worker} left"
                case Measurement(worker, batch, compute_s):
                    if (counted_s := self._measured(step, worker, batch, compute_s)):
                        times[worker] = counted_s
        if times:
            self._effect = straggler_effect(list(times.values()))
            if self._in_force is self.latest:
                self._compare(step, max(times.values()))

    def _measured(self, step: int, worker: int, batch: int, compute_s: float) -> float:
        """The seconds if they count, else 0. Bad measurements are noted and dropped."""
        member = self.members.get(worker)
        if member is None or batch < 1:
            return 0.0
        try:
            checked_time(worker, compute_s)
        except ValueError as error:
            self.events.append(Note(step, str(error)))
            return 0.0
        pieces = -(-batch // member.cap) if member.cap else 1
        seen = member.online.observe(-(-batch // pieces), compute_s / pieces)
        if seen != "follows":
            what = "measured one outlier: shares unchanged" if seen == "suspect" else "changed its speed: new time model"
            self.events.append(Note(step, f"worker {worker} {what} ({compute_s:.4g} s for {batch})"))
        return compute_s if self._now.get(worker) == batch else 0.0

    def _compare(self, step: int, slowest_s: float) -> None:
        if self._in_force.after_s == math.inf:
            return  # given shares have no prediction
        self._under.append(slowest_s)
        if len(self._under) == OUTCOME_AFTER:
            exposed_s = self.communication.exposed_s(self._places(self._in_force), statistics.median(self._under))
            measured_s = statistics.median(self._under) + exposed_s
            promised = self._in_force
            self.events.append(Outcome(step, promised.step, promised.after_s, measured_s, promised.reason, self._effect))

    def _improved(self, step: int) -> Decision | None:
        workers = self._eligible(w for w, one in self.members.items() if one.excluded_since is None or self._reported(w))
        present = frozenset(worker for worker in workers if self._now.get(worker))
        before_s = self._expected_s(self._in_force)
        # A guessed offset does not justify excluding a worker, unless it was measured at the smallest possible share.
        open_yet = frozenset(
            w for w in present if self.members[w].online.ambiguous and self._now[w] > self.policy.minimum
        )
        # If exclusion is never worth it, keep all workers instead of searching for one to drop.
        solution = self._solve(workers, open_yet | present if self.policy.exclude_gain >= 1 else open_yet)
        out = [w for w, share in zip(workers, solution.shares, strict=True) if not share and w in present]
        if out:
            kept = self._solve(workers, open_yet | present)
            if solution.iteration_s > kept.iteration_s * (1 - self.policy.exclude_gain):
                solution, out = kept, []
        least_s = max(self.policy.gain_least * before_s, self.policy.change_s / self.policy.horizon)
        if before_s - solution.iteration_s < least_s:
            return None
        back = [w for w, share in zip(workers, solution.shares, strict=True) if share and w not in present]
        why = [f"steps are faster without worker {w}" for w in out] + [f"steps are faster with worker {w}" for w in back]
        reason = "; ".join(why) or "measured times changed"
        return self._decision(step, step + self.policy.lead, workers, solution, reason, before_s)

    def _replanned(self, step: int, reason: str) -> Decision:
        """After a membership change the shares must change, whatever the gain. A newcomer without a line gets the minimum."""
        present = [worker for worker, one in self.members.items() if one.excluded_since is None]
        workers = self._eligible(present) or self._eligible(self.members)
        new = frozenset(worker for worker in workers if not self.members[worker].online.known)
        solution = self._solve(workers, new, dict.fromkeys(new, self.policy.minimum) if len(new) < len(workers) else {})
        departed = any(share and worker not in self.members for worker, share in self.shares.items())
        before_s = math.inf if departed else self._expected_s(self._in_force)
        return self._decision(step, step + self.policy.lead, workers, solution, reason, before_s)

    def _probe(self, step: int) -> Decision | None:
        """Tries one worker that was excluded long enough ago, with the smallest share."""
        for worker, member in sorted(self.members.items()):
            since = member.excluded_since
            if since is not None and step - since >= member.retry_after and self._eligible([worker]):
                workers = self._eligible([worker, *(w for w, m in self.members.items() if m.excluded_since is None)])
                if worker not in workers:  # the total is too small for all of them
                    member.excluded_since, member.retry_after = step, 2 * member.retry_after
                    continue
                member.online.doubt()
                solution = self._solve(workers, frozenset([worker]), {worker: self.policy.minimum})
                before_s, reason = self._expected_s(self._in_force), f"trial of worker {worker}"
                return self._decision(step, step + self.policy.lead, workers, solution, reason, before_s)
        return None

    def _reported(self, worker: int) -> bool:
        """Whether a worker without a share has measured, on its own, times that would fit below the current makespan."""
        return self._line(worker).time_s(self.policy.minimum) < self._expected_s(self._in_force)

    def _eligible(self, workers: Iterable[int]) -> list[int]:
        """Workers with room for the smallest share, sorted. If the total is too small for all of them, the fastest at the
        smallest share."""
        least = self.policy.minimum
        room = [worker for worker in workers if self.members[worker].cap is None or (self.members[worker].cap or 0) >= least]
        return sorted(sorted(room, key=lambda worker: (self._line(worker).time_s(least), worker))[: self.total // least])

    def _solve(self, workers: Sequence[int], keep: frozenset[int], most: dict[int, int] | None = None) -> Solution:
        """`most`: upper bounds of single workers' shares."""
        caps = [self.members[worker].cap for worker in workers]
        at_most = {place: most[worker] for place, worker in enumerate(workers) if most and worker in most}
        places = [place for place, worker in enumerate(workers) if worker in keep]
        names = tuple(workers)
        comm = self.communication
        named = comm if comm is FREE else Communication(lambda at: comm.seconds(tuple(names[p] for p in at)), comm.overlap)
        lines = [self._line(worker) for worker in workers]
        return solve(lines, self.total, caps, minimum=self.policy.minimum, keep=places, communication=named, most=at_most)

    def _line(self, worker: int) -> Line:
        """The worker's own line, or the median of the other workers' lines if it has none yet."""
        if self.members[worker].online.known:
            return self.members[worker].online.line
        known = [member.online.line for member in self.members.values() if member.online.known]
        if not known:
            return Line(1.0)
        return Line(statistics.median(one.slope_s for one in known), statistics.median(one.intercept_s for one in known))

    def _expected_s(self, decision: Decision) -> float:
        """Iteration time of these shares by the current lines."""
        times = []
        for worker, share in zip(decision.workers, decision.shares, strict=True):
            if share and worker in self.members:
                cap, line = self.members[worker].cap, self._line(worker)
                times.append((Accumulated(line, cap) if cap and share > cap else line).time_s(share))
        makespan = max(times, default=math.inf)
        return makespan + self.communication.exposed_s(self._places(decision), makespan)

    @staticmethod
    def _places(decision: Decision) -> tuple[int, ...]:
        return tuple(worker for worker, share in zip(decision.workers, decision.shares, strict=True) if share)

    def _decision(
        self, step: int, from_step: int, workers: Sequence[int], found: Solution, reason: str, before_s: float
    ) -> Decision:
        return Decision(step, from_step, tuple(workers), found.shares, found.micro_batches, reason, before_s, found.iteration_s,
                        self._effect)

    def _mark_excluded(self, decision: Decision) -> None:
        shares = decision.by_worker
        for worker, member in self.members.items():
            if shares.get(worker):
                member.excluded_since = None
                if shares[worker] > self.policy.minimum:
                    member.retry_after = 0
            elif member.excluded_since is None:
                member.excluded_since = decision.from_step
                member.retry_after = max(2 * member.retry_after, self.policy.readmit_after)


HEADINGS = f"{'decided':>7} {'from':>5}  {{shares}}  {'SE':>5}  {'ms a step':>16}  why"


def heading(workers: int) -> str:
    """The table's heading.

    >>> heading(3)
    'decided  from  share of each     SE         ms a step  why'
    """
    return HEADINGS.format(shares=f"{'share of each':<{_width(workers)}}")


def line(event: Event, workers: int) -> str:
    """Empty for events that changed no shares.

    >>> line(Decision(7, 9, (0, 1, 2), (20, 8, 4), (1, 1, 1), "measured times changed", 0.08, 0.0321, 0.96), 3)
    '      7     9   20   8   4     0.96     80.0 ->  32.1  measured times changed'
    """
    if isinstance(event, Decision):
        shares = event.by_worker
        named = "".join(f"{shares.get(worker, 0):4d}" for worker in range(workers))
        before = f"{event.before_s * 1e3:.1f}" if event.before_s < math.inf else "?"
        moved = f"{before:>7} -> {event.after_s * 1e3:5.1f}"
        steps = f"{event.step:7d} {event.from_step:5d}"
        return f"{steps} {named:<{_width(workers)}}   {event.effect:5.2f}  {moved:>16}  {event.reason}"
    if isinstance(event, Outcome):
        came = f"{event.measured_s * 1e3:.1f}"
        space = " " * (_width(workers) + 3)
        suffix = f"; {event.whole_s * 1e3:.1f} ms with communication" if event.whole_s else ""
        return f"{'':7} {'':5} {space}{event.effect:5.2f}  {came:>16}  measured, {event.error:+.0%} against expected{suffix}"
    return ""


def _width(workers: int) -> int:
    return max(4 * workers, len("share of each"))

"""The default balancer: measurements in, shares for a future step out. Pure: no clock, no threads, no network.

Each worker has an online line; each step the best shares are solved for and announced only where they gain more than the change
costs. A worker is left out only when its line is settled, and is tried again later with the smallest share.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from commlayer.balance.events import Decision, Event, Input, Joined, Measurement, Note, Outcome, Vanished, straggler_effect
from commlayer.balance.models import Accumulated, Line
from commlayer.balance.recursive_fit import OnlineLine, checked_time
from commlayer.balance.share_solver import FREE, Communication, Solution, solve
from commlayer.errors import InvalidInput
from commlayer.records import Record

EVENTS_KEPT = 1000
OUTCOME_AFTER = 3
"""Iterations under a decision whose median is compared with what it expected: one spike does not count."""


class Policy(Record, frozen=True):
    """When a change of shares is worth it."""

    minimum: int = 1
    """Smallest share of a worker that takes part: 2 with BatchNorm."""
    lead: int = 1
    """Steps between a decision and the first step under it: 1 is the next step."""
    gain_least: float = 0.03
    """A change must shorten the expected iteration by this part ..."""
    change_s: float = 0.0
    """... and win back these seconds, which a change costs, ..."""
    horizon: int = 50
    """... within this many steps."""
    exclude_gain: float = 0.05
    """Leaving a worker out must shorten the iteration by this part against keeping it."""
    readmit_after: int = 50
    """Steps until a worker that was left out is tried again; doubled each time it is left out again."""

    def __post_init__(self) -> None:
        for name in ("minimum", "horizon", "readmit_after"):
            if getattr(self, name) < 1:
                raise InvalidInput("E-SHARES-ARGUMENT", f"Policy: {name} {getattr(self, name)}: allowed is 1 or more")
        for name in ("gain_least", "change_s", "exclude_gain"):
            if not getattr(self, name) >= 0:
                raise InvalidInput("E-SHARES-ARGUMENT", f"Policy: {name} {getattr(self, name)}: allowed is 0 or more")


class BalancedWorker:
    """A worker as the balancer sees it."""

    def __init__(self, cap: int | None, line: Line | None) -> None:
        self.cap = cap
        self.online = OnlineLine(line)
        self.out_since: int | None = None
        self.patience = 0

    def copy(self) -> BalancedWorker:
        """Independent of this one."""
        made = copy.copy(self)
        made.online = self.online.copy()
        return made


class Balancer:
    """decide() once per step, with what was measured in it. Shares in force are kept here, so that a time finds its batch."""

    def __init__(
        self, joined: Sequence[Joined], total: int, policy: Policy | None = None, communication: Communication = FREE,
        *, shares: Mapping[int, int] | Decision | None = None, from_step: int = 0,
    ) -> None:
        """`shares`: those in force already, or announced for `from_step`, with what they promise if it is a decision that they
        come from; without them the best by the profile are."""
        self.total, self.policy, self.communication = total, policy or Policy(), communication
        self.members = {one.worker: BalancedWorker(one.cap, one.line) for one in joined}
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self._effect = 0.0
        workers = self._able(self.members)
        if not workers:
            raise InvalidInput("E-SHARES-ARGUMENT",
                f"balancer: got {len(joined)} workers of which none has room for the minimum batch {self.policy.minimum} "
                f"within the total {total}; raise a cap or lower the minimum"
            )
        found = self._solve(workers, frozenset(workers) if any(one.line is None for one in joined) else frozenset())
        reason = "the profile" if all(one.line for one in joined) else "no profile"
        self.latest = self._decision(-1, from_step, workers, found, reason, math.inf)
        if shares is not None:
            self.latest = shares if isinstance(shares, Decision) else self._given(shares, from_step)
        self._in_force, self._announced = self.latest, deque[Decision]()
        self._now = self.latest.by_worker
        self._mark_out(self.latest)
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
        """Independent of this one: what either decides leaves the other as it is."""
        made = copy.copy(self)
        made.members = {worker: member.copy() for worker, member in self.members.items()}
        made.events = deque(self.events, maxlen=EVENTS_KEPT)
        made._announced, made._under = self._announced.copy(), list(self._under)
        return made

    @property
    def shares(self) -> dict[int, int]:
        """The latest shares, which may be announced for a step that is still to come."""
        return self.latest.by_worker

    def decide(self, step: int, inputs: Sequence[Input]) -> Decision | None:
        """What was measured and who came or went in `step`; new shares if they are worth it, announced for step + lead."""
        # Someone may come or go while a decision is still announced: then two are on their way, and both will be in force.
        while self._announced and step >= self._announced[0].from_step:
            self._in_force = self._announced.popleft()
            self._now = self._in_force.by_worker
        self._take(step, inputs)
        if not self._able(self.members):
            self._forced = ""
            self.events.append(Note(step, "no worker with room is left: shares stay as they are until one joins"))
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
            self._mark_out(decision)
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
                        self._forced = f"worker {worker} is gone"
                case Measurement(worker, batch, compute_s):
                    if (counted_s := self._measured(step, worker, batch, compute_s)):
                        times[worker] = counted_s
        if times:
            self._effect = straggler_effect(list(times.values()))
            if self._in_force is self.latest:
                self._compare(step, max(times.values()))

    def _measured(self, step: int, worker: int, batch: int, compute_s: float) -> float:
        """The seconds if they count; a bad measurement is said and left out, training goes on."""
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
            what = "is slower or faster than its line, once: no trend yet" if seen == "suspect" else "has a new line"
            self.events.append(Note(step, f"worker {worker} {what} ({compute_s:.4g} s for {batch})"))
        return compute_s if self._now.get(worker) == batch else 0.0

    def _compare(self, step: int, slowest_s: float) -> None:
        if self._in_force.after_s == math.inf:
            return  # shares that were given promised nothing
        self._under.append(slowest_s)
        if len(self._under) == OUTCOME_AFTER:
            exposed_s = self.communication.exposed_s(self._places(self._in_force), statistics.median(self._under))
            measured_s = statistics.median(self._under) + exposed_s
            promised = self._in_force
            self.events.append(Outcome(step, promised.step, promised.after_s, measured_s, promised.reason, self._effect))

    def _improved(self, step: int) -> Decision | None:
        """The best shares, if they gain enough."""
        workers = self._able(worker for worker, one in self.members.items() if one.out_since is None or self._reported(worker))
        here = frozenset(worker for worker in workers if self._now.get(worker))
        before_s = self._expected_s(self._in_force)
        # A guessed offset is no reason to leave a worker out, unless it was measured at the smallest share that it could have.
        open_yet = frozenset(
            w for w in here if self.members[w].online.ambiguous and self._now[w] > self.policy.minimum
        )
        # Where leaving one out is never worth it, nobody need look whom.
        found = self._solve(workers, open_yet | here if self.policy.exclude_gain >= 1 else open_yet)
        out = [w for w, share in zip(workers, found.shares, strict=True) if not share and w in here]
        if out:
            kept = self._solve(workers, open_yet | here)
            if found.iteration_s > kept.iteration_s * (1 - self.policy.exclude_gain):
                found, out = kept, []
        least_s = max(self.policy.gain_least * before_s, self.policy.change_s / self.policy.horizon)
        if before_s - found.iteration_s < least_s:
            return None
        back = [w for w, share in zip(workers, found.shares, strict=True) if share and w not in here]
        why = [f"worker {w} only holds the others up" for w in out] + [f"worker {w} is worth having again" for w in back]
        reason = "; ".join(why) or "the times moved apart"
        return self._decision(step, step + self.policy.lead, workers, found, reason, before_s)

    def _replanned(self, step: int, reason: str) -> Decision:
        """After someone came or went: the shares must change, whatever they gain. A newcomer without a line gets the least."""
        workers = self._able(w for w, one in self.members.items() if one.out_since is None) or self._able(self.members)
        new = frozenset(worker for worker in workers if not self.members[worker].online.known)
        found = self._solve(workers, new, dict.fromkeys(new, self.policy.minimum) if len(new) < len(workers) else {})
        gone = any(share and worker not in self.members for worker, share in self.shares.items())
        before_s = math.inf if gone else self._expected_s(self._in_force)
        return self._decision(step, step + self.policy.lead, workers, found, reason, before_s)

    def _probe(self, step: int) -> Decision | None:
        """One worker that was left out long enough ago, tried with the smallest share."""
        for worker, member in sorted(self.members.items()):
            if member.out_since is not None and step - member.out_since >= member.patience and self._able([worker]):
                workers = self._able([worker, *(w for w, m in self.members.items() if m.out_since is None)])
                if worker not in workers:  # the total is too small for so many
                    member.out_since, member.patience = step, 2 * member.patience
                    continue
                member.online.doubt()
                found = self._solve(workers, frozenset([worker]), {worker: self.policy.minimum})
                before_s, reason = self._expected_s(self._in_force), f"worker {worker} is tried again"
                return self._decision(step, step + self.policy.lead, workers, found, reason, before_s)
        return None

    def _reported(self, worker: int) -> bool:
        """A worker without share whose line stands below the present makespan, from what it measured for itself."""
        return self._line(worker).time_s(self.policy.minimum) < self._expected_s(self._in_force)

    def _able(self, workers: Iterable[int]) -> list[int]:
        """Those with room for the smallest share, by name; if the total is too small for so many, those that start first."""
        least = self.policy.minimum
        room = [worker for worker in workers if self.members[worker].cap is None or (self.members[worker].cap or 0) >= least]
        return sorted(sorted(room, key=lambda worker: (self._line(worker).time_s(least), worker))[: self.total // least])

    def _solve(self, workers: Sequence[int], keep: frozenset[int], most: dict[int, int] | None = None) -> Solution:
        """`most`: what single workers are to get at most, in all."""
        caps = [self.members[worker].cap for worker in workers]
        at_most = {place: most[worker] for place, worker in enumerate(workers) if most and worker in most}
        places = [place for place, worker in enumerate(workers) if worker in keep]
        names = tuple(workers)
        comm = self.communication
        named = comm if comm is FREE else Communication(lambda at: comm.seconds(tuple(names[p] for p in at)), comm.overlap)
        lines = [self._line(worker) for worker in workers]
        return solve(lines, self.total, caps, minimum=self.policy.minimum, keep=places, communication=named, most=at_most)

    def _line(self, worker: int) -> Line:
        """Its own line, or before it has one the middle of the others'."""
        if self.members[worker].online.known:
            return self.members[worker].online.line
        known = [member.online.line for member in self.members.values() if member.online.known]
        if not known:
            return Line(1.0)
        return Line(statistics.median(one.slope_s for one in known), statistics.median(one.intercept_s for one in known))

    def _expected_s(self, decision: Decision) -> float:
        """What an iteration takes with these shares, by the lines as they are now."""
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

    def _mark_out(self, decision: Decision) -> None:
        shares = decision.by_worker
        for worker, member in self.members.items():
            if shares.get(worker):
                member.out_since = None
                if shares[worker] > self.policy.minimum:
                    member.patience = 0
            elif member.out_since is None:
                member.out_since = decision.from_step
                member.patience = max(2 * member.patience, self.policy.readmit_after)

"""Keeps a running job within its loss budget: compares with exact gradients now and then, and makes codecs finer. No model.

All ranks count steps alike and hear the same rows, so they come to the same decision at the same step, and go over to the finer
plan together. How often they compare follows from what comparing costs, which is measured, too, and told with the rows.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch

from commlayer.balance.guard import Fidelity, Guard, Limits, Rise, Slope, comparisons_every, steps_until_paid
from commlayer.config import Config
from commlayer.errors import CommError
from commlayer.job.start import Connection, switch
from commlayer.records import Plan
from commlayer.runtime import codec_floor, gradient_comparison
from commlayer.runtime.gradient_comparison import Dots, Piece, worst
from commlayer.runtime.worker import Worker

log = logging.getLogger("commlayer")

PRICE = 0.01
"""Most part of the time that all of it may take."""
LOCALLY = 0.2
"""Of that: for looking at what this rank sends. The rest is for comparing over all ranks."""
SETTLE = 4
"""Steps under a plan before looking, and between comparisons over all ranks, at least."""
DRAINING = 32
"""At most so many where the guard has changed the plan: what the one before owed is sent first, within some 1 / ratio steps,
and tells nothing of the gradients of these steps."""
OFTEN, SELDOM = 8, 32
"""Steps between them from which it looks at more, or at less, at a time."""
FIRST, MOST = 1 << 12, 1 << 16
"""Elements compared: few while nobody knows what that costs here."""
FADE = 0.5
"""Of what earlier comparisons saw, against the latest."""


class GradientError(NamedTuple):
    """What a rank says at a comparison. Numbers only: the exchange carries nothing else."""

    sent: Dots
    summed: Dots
    loss: Rise
    here_s: float
    """Of a look at what it sends itself, on average."""
    everywhere_s: float
    """Of the comparison over all ranks before this one; of the first, as far as it has come."""
    step_s: float
    elapsed_s: float
    """Since the start."""


class CodecChange(NamedTuple):
    """A finer, or again a coarser, plan: why, and what is expected of it."""

    step: int
    """The first that runs under it."""
    before: float
    after: float
    """Levels of the coarsest codec (runtime/codec_floor.py)."""
    reason: str
    nbytes_factor: float
    """Expected: what a step sends, against before."""
    seen: Fidelity
    step_s: float
    """When it was decided."""


class ChangeOutcome(NamedTuple):
    """What came of it."""

    step: int
    change: CodecChange
    seen: Fidelity
    step_s: float


def guard_of(connection: Connection, config: Config) -> AccuracyGuard | None:
    """For a job of several ranks where a budget is named, or the guard asked for: bounds nobody stated shall slow no job."""
    if connection.worker is None or connection.groups is None:
        return None
    if config.guard == "off" or (config.guard == "auto" and not (config.max_loss or config.loss)):
        return None
    return AccuracyGuard(connection, Limits(budget=connection.max_loss), config.guard, config.deadline_s)


class AccuracyGuard:
    """Every rank calls `look` when a step's exchange is over and `after_step` when it is committed."""

    def __init__(self, connection: Connection, limits: Limits, mode: str = "act", deadline_s: float = 600.0) -> None:
        self._connection, self._limits, self._mode, self._deadline_s = connection, limits, mode, deadline_s
        self._slope = Slope()
        self._sent = self._summed = Dots()
        self._losses: deque[float | torch.Tensor] = deque(maxlen=4096)
        self._steps = 0
        self._times: deque[float] = deque(maxlen=9)
        self._ended = 0.0
        self._looking_s = 0.0
        self._here_s = self._everywhere_s = 0.0
        self._looks = 0
        self._spent_s, self._begin = 0.0, time.perf_counter()
        self._here_every, self._next, self._most = 1, SETTLE, FIRST
        self._pending: CodecChange | None = None
        self._waiting: CodecChange | None = None
        self.history: list[CodecChange | ChangeOutcome] = []
        """Of this run; the same on all ranks."""
        self._take(self._plan)
        level = codec_floor.lowest(self._plan)
        self._guard = Guard(level, Limits(limits.budget, min(limits.lowest, level)))

    def report(self, loss: float | torch.Tensor) -> None:
        """The training loss of a step. A tensor is read when the next comparison is made, so that nobody waits for a device."""
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else float(loss))

    @property
    def acts(self) -> bool:
        """Or only says what it sees: a plan that somebody asked for is theirs to change."""
        return self._mode == "act" or (self._mode == "auto" and self._connection.auto)

    # ---- at the end of a step's exchange

    def look(self) -> None:
        """Compares, where it is time to. CommError, latched in the worker, if another rank is gone."""
        worker = self._connection.worker
        assert worker is not None
        if self._piece is None and not self._due():
            return
        begin = time.perf_counter()
        try:
            self._look(worker)
        except CommError as error:
            worker.latch(error)
            worker.check()
        self._looking_s = time.perf_counter() - begin
        worker.counters.guard_s += self._looking_s

    def _due(self) -> bool:
        """Whether all ranks compare in this step."""
        # Where everything has been made exact there is nothing to look at, but time to see whether less will do again.
        concerned = bool(self._watched) or self._lifted
        return concerned and self._under >= self._apart and self._steps >= self._next

    def _look(self, worker: Worker) -> None:
        groups = self._connection.groups
        assert groups is not None
        begin = time.perf_counter()
        mine, summed = None, Dots()
        if self._piece is not None:
            mine = gradient_comparison.exact(worker, self._piece)
            sent = gradient_comparison.here(worker, self._piece, mine, groups, self._deadline_s)
            self._sent = self._sent.plus(sent) if all(map(math.isfinite, sent)) else self._sent
            self._here_s += time.perf_counter() - begin
            self._looks += 1
        if not self._due():
            return
        begin = time.perf_counter()
        if self._piece is not None and mine is not None:
            summed = gradient_comparison.everywhere(self._piece, mine, groups, self._deadline_s)
        compared_s = time.perf_counter() - begin
        row = GradientError(self._sent, summed, self._rise(), self._here_s / max(self._looks, 1),
                            self._everywhere_s or compared_s, self._step_s, begin - self._begin)
        flat = [*row.sent, *row.summed, *row.loss, *row[3:]]
        rows = groups.gather_all(torch.tensor(flat, dtype=torch.float64, device=groups.device)).tolist()
        self._judge([GradientError(Dots(*r[:4]), Dots(*r[4:8]), Rise(*r[8:10]), *r[10:]) for r in rows])
        self._everywhere_s = time.perf_counter() - begin

    def _rise(self) -> Rise:
        while self._losses:
            self._slope.add(float(self._losses.popleft()))
        return self._slope.seen()

    @property
    def _step_s(self) -> float:
        return median(self._times) if self._times else 0.0

    # ---- what follows from the rows, alike on all ranks

    def _judge(self, rows: Sequence[GradientError]) -> None:
        self._price(rows)
        if not all(math.isfinite(x) for row in rows for x in row.summed):
            return  # a step that the optimizer will skip, or that paid debts
        self._sent = Dots(*(FADE * x for x in self._sent))
        self._summed = self._summed.plus(rows[0].summed, FADE)
        seen = worst([self._summed.fidelity(), *(row.sent.fidelity() for row in rows)])
        rise = Rise(fmean(row.loss.rise for row in rows), fmean(row.loss.noise for row in rows))
        step_s = median(row.step_s for row in rows)
        if self._waiting is not None:
            self._came(ChangeOutcome(self._steps, self._waiting, seen, step_s))
        if not self.acts:
            self._warn(self._guard.complaint(seen, rise))
            return
        before = codec_floor.lowest(self._plan)
        decision = self._guard.observe(seen, rise, needed=codec_floor.lowest(self._base))
        # What was measured beforehand goes before what a job happened to begin with, but not before what it showed.
        self._connection.floor = self._guard.floor if self._guard.complained or not self._connection.loss else 0.0
        if decision.changed:
            reason = decision.reason if decision.ratio > before else f"accuracy has borne {before:.3g} without complaint"
            self._pending = CodecChange(self._steps, before, decision.ratio, reason, 1.0, seen, step_s)

    def _price(self, rows: Sequence[GradientError]) -> None:
        """When next, and how much at a time."""
        step_s = max(median(row.step_s for row in rows), 1e-6)
        self._here_every = comparisons_every(max(row.here_s for row in rows), step_s, PRICE * LOCALLY)
        # The last rank to come waits for nobody; the others would have waited for it in the next step.
        cost_s, elapsed_s = min(row.everywhere_s for row in rows), min(row.elapsed_s for row in rows)
        self._spent_s += cost_s
        part = PRICE * (1 - LOCALLY)
        self._next = self._steps + max(self._apart, steps_until_paid(self._spent_s, cost_s, elapsed_s, step_s, part))
        every = comparisons_every(cost_s, step_s, part)
        if every <= OFTEN:
            self._most = min(MOST, 2 * self._most)
        elif every > SELDOM:
            self._most = max(FIRST, self._most // 2)

    def _warn(self, complaint: str) -> None:
        """Each kind of complaint once for each plan."""
        kind = complaint[:7]
        if complaint and kind not in self._said:
            self._said.add(kind)
            self._say(f'{complaint}; the plan stays as it was asked for (guard="act" would make its codecs finer)', warn=True)

    # ---- between two steps

    def after_step(self) -> None:
        """Counts it, goes over to another plan if the last comparison asked for that, and prepares the next look."""
        self._steps += 1
        self._under += 1
        now = time.perf_counter()
        if self._ended:
            self._times.append(now - self._ended - self._looking_s)
        self._ended, self._looking_s = now, 0.0
        worker = self._connection.worker
        assert worker is not None
        if self._plan is not self._held:
            self._take(self._plan)  # somebody else has gone over to it
            level, floor = codec_floor.lowest(self._plan), self._guard.floor
            self._pending = self._waiting = None
            if self.acts and self._guard.complained and level < floor * codec_floor.EQUAL:
                seen = self._summed.fidelity()
                why = "accuracy has not borne less"
                self._change(worker, CodecChange(self._steps, level, floor, why, 1.0, seen, self._step_s))
            else:
                self._guard.follow(level)
        elif self._pending is not None:
            pending, self._pending = self._pending, None
            self._change(worker, pending)
        begin = time.perf_counter()
        self._prepare()
        if self._piece is not None:
            prepared_s = time.perf_counter() - begin
            self._here_s += prepared_s
            worker.counters.guard_s += prepared_s  # a worker hands its counters on to the next

    def _change(self, worker: Worker, change: CodecChange) -> None:
        groups, before = self._connection.groups, self._plan
        assert groups is not None
        nodes = groups.world // groups.ranks_per_node
        made = codec_floor.lift(self._base, change.after, nodes, cuda=worker.device.type == "cuda")
        if made.buckets == before.buckets:
            return
        base = self._base
        try:
            switch(self._connection, made)
        except ValueError as error:  # on all ranks, and nothing has changed
            self._say(f"{change.reason}, but the plan in force stays: {error}", warn=True)
            return
        self._take(self._plan, base)
        self._guard.settle()
        self._slope = Slope()  # a loss does not fall back in a few steps: only what rises from here counts
        change = change._replace(step=self._steps, nbytes_factor=codec_floor.nbytes(made) / codec_floor.nbytes(before))
        self._waiting = change
        self.history.append(change)
        way = "finer" if change.after > change.before else "coarser"
        self._say(f"{change.reason}: codecs are {way} from here on, {change.before:.3g} -> {change.after:.3g} of the gradient; "
                  f"expected: {change.nbytes_factor:.1f} times the bytes, cosine {self._guard.limits.least_cosine:.2f} or more",
                  warn=change.after > change.before)

    def _came(self, outcome: ChangeOutcome) -> None:
        change, seen = outcome.change, outcome.seen
        self._waiting = None
        self.history.append(outcome)
        self._say(f"what changed at step {change.step} brought: cosine {change.seen.cosine:.2f} -> {seen.cosine:.2f}, residual "
                  f"{change.seen.residual_ratio:.2g} -> {seen.residual_ratio:.2g} gradients, "
                  f"{1e3 * change.step_s:.1f} -> {1e3 * outcome.step_s:.1f} ms a step")

    @property
    def _plan(self) -> Plan:
        assert self._connection.plan is not None
        return self._connection.plan

    def _take(self, plan: Plan, base: Plan | None = None) -> None:
        """Looks at this plan from now on. `base`: the one that it was lifted from."""
        worker = self._connection.worker
        assert worker is not None
        self._held, self._base = plan, base or plan
        self._lifted = self._base.buckets != plan.buckets
        self._said: set[str] = set()
        self._watched = gradient_comparison.watched(worker) if plan.local_steps == 1 else []
        self._under = 0
        self._apart = max(SETTLE, min(DRAINING, math.ceil(1 / codec_floor.lowest(plan)))) if self._lifted else SETTLE
        self._pieces = 0
        self._piece: Piece | None = None
        self._sent = self._summed = Dots()

    def _prepare(self) -> None:
        """The piece of the next step; its residual is what it is now."""
        looks = self._under >= self._apart and (self._under - self._apart) % self._here_every == 0
        self._piece = None
        if self._watched and (looks or self._due()):
            self._piece = gradient_comparison.piece(self._watched, self._pieces, self._most)
            self._pieces += 1

    def _say(self, what: str, *, warn: bool = False) -> None:
        self._connection.decisions.append(f"step {self._steps}: {what}")
        if self._connection.rank == 0:
            log.log(logging.WARNING if warn else logging.INFO, "step %d: %s", self._steps, what)

"""Shell of the quality guard: feeds measurements to autotune/quality/policy.py and carries out its decisions.

Runs on every rank. It compares gradients at the end of a step's exchange and changes plans between two steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import SupportsFloat

import torch

from commlayer.autotune.quality import policy
from commlayer.autotune.quality.policy import (
    AccuracyLimits,
    Action,
    BoundPlanner,
    ChangeCodecs,
    CodecChange,
    GradientError,
    LogLine,
    LossTrend,
    PlanLevels,
    SetErrorMultiplier,
    least_usual,
    typical_cosine,
)
from commlayer.cluster.collectives import Groups
from commlayer.config import Config
from commlayer.engine import gradient_comparison, plan_choice
from commlayer.engine.connection import JobContext
from commlayer.engine.gradient_comparison import SampledPiece
from commlayer.engine.switch import switch
from commlayer.engine.worker import Worker
from commlayer.errors import CommError
from commlayer.loss_budget import BUDGET
from commlayer.observe.fidelity import Dots
from commlayer.records import Plan


def guard_of(connection: JobContext, config: Config) -> AccuracyGuard | None:
    """The guard for jobs of several ranks with an automatic plan or a loss budget, or if requested; otherwise None."""
    if connection.worker is None or connection.groups is None:
        return None
    has_budget = bool(config.max_loss or config.loss)
    if config.guard == "off" or (config.guard == "auto" and not (has_budget or connection.terms.auto)):
        return None
    by_budget = has_budget or not connection.terms.auto
    # Without a given budget the loss is not judged, unless the guard was requested explicitly.
    budget = connection.terms.max_loss or (BUDGET if by_budget or config.guard != "auto" else math.inf)
    return AccuracyGuard(connection, AccuracyLimits(budget=budget), config.guard, config.deadline_s, by_budget=by_budget)


class AccuracyGuard:
    """Every rank calls `compare_if_due` when a step's exchange is over and `after_step` when the step is committed."""

    def __init__(
        self, connection: JobContext, limits: AccuracyLimits, mode: str = "act", deadline_s: float = 600.0, *,
        by_budget: bool = True,
    ) -> None:
        """With `by_budget` bounds follow from the limits; otherwise from what is usual under the active codecs."""
        self._connection, self._mode, self._deadline_s, self._by_budget = connection, mode, deadline_s, by_budget
        assert connection.rows is not None
        self._rows = connection.rows.rows("what compressing loses")
        self._sent_rows: tuple[int, Plan] | None = None
        """The step after which rows were last sent, and the plan then active."""
        self._own = OwnMeasurements(time.perf_counter())
        self._exposed_s = 0.0
        """Total wait for communication at the end of the last step."""
        self._piece: SampledPiece | None = None
        self._state = policy.begin(limits, self._take())

    def report(self, loss: float | torch.Tensor) -> None:
        """Records the training loss of a step. A tensor is read at the next comparison, so that no step waits for the device.
        """
        self._own.report(loss.detach() if isinstance(loss, torch.Tensor) else float(loss))

    @property
    def acts(self) -> bool:
        """Whether the guard changes plans. Otherwise it only logs, because the user chose the plan."""
        return self._mode == "act" or (self._mode == "auto" and self._connection.terms.auto)

    @property
    def idle(self) -> bool:
        """Whether the user has since set a plan and gave no budget for it; the same on all ranks."""
        return self._mode == "auto" and not self._by_budget and not self._connection.terms.auto

    # ---- at the end of a step's exchange

    def has_work(self) -> bool:
        """Whether `compare_if_due` has work to do."""
        # A piece selected under a previous plan belongs to buckets that are no longer sent.
        return (self._piece is not None or self._due) and self._in_force is self._plan and not self.idle

    @property
    def _due(self) -> bool:
        """Whether all ranks compare in the present step. The previous rows must have been read."""
        return policy.due(self._state, self._steps) and not self._rows.under_way

    def compare_if_due(self) -> None:
        """Compares gradients if due. A CommError is latched in the worker if another rank is lost."""
        if not self.has_work():
            return
        due, worker, begin_s = self._due, self._worker, time.perf_counter()
        try:
            exact = None if self._piece is None else self._look_here(worker, self._piece)
            if due:
                self._compare(exact)
        except CommError as error:
            self._connection.broke(error)
        check_s = time.perf_counter() - begin_s
        self._own.set_check_time(check_s)
        worker.counters.guard_s += check_s

    def _look_here(self, worker: Worker, piece: SampledPiece) -> torch.Tensor:
        """The exact gradients of the piece, after comparing them with what this rank has sent."""
        begin_s = time.perf_counter()
        exact = gradient_comparison.exact(worker, piece)
        comparison = gradient_comparison.here(worker, piece, exact, self._groups, self._deadline_s)
        self._own.add_check(comparison, time.perf_counter() - begin_s)
        return exact

    def _compare(self, exact: torch.Tensor | None) -> None:
        """Collective: compares the sum with the exact one, and sends this rank's row."""
        groups, begin_s, summed = self._groups, time.perf_counter(), Dots()
        if self._piece is not None and exact is not None:
            summed = gradient_comparison.everywhere(self._piece, exact, groups, self._deadline_s)
        # With overlapped results the comparison makes the step wait for them: that wait is part of its cost.
        held_s = self._worker.counters.exposed_s - self._exposed_s if self._state.plan.overlapped else 0.0
        self._rows.start(*self._own.row(summed, held_s + time.perf_counter() - begin_s, begin_s).numbers())
        self._sent_rows = self._steps, self._plan
        self._own.compared(held_s + time.perf_counter() - begin_s)

    # ---- between two steps

    def after_step(self) -> None:
        """Switches plans if the rows of the previous step require it, and prepares the next check."""
        self._own.step_over(time.perf_counter())
        self._exposed_s = self._worker.counters.exposed_s
        self._read_rows()
        entered = self._take() if self._in_force is not self._plan else None
        self._state, changes = policy.after_step(self._state, self._steps, acts=self.acts, entered=entered)
        self._carry_out(changes)
        begin_s, self._piece = time.perf_counter(), None
        if self.idle or self._rows.under_way:
            return
        self._state, sample = policy.next_sample(self._state, self._steps)
        if sample is not None:
            self._piece = gradient_comparison.piece(self._watched, sample.number, sample.elements)
            prepared_s = time.perf_counter() - begin_s
            self._own.prepared(prepared_s)
            self._worker.counters.guard_s += prepared_s  # counters pass to the worker of the next plan

    def _read_rows(self) -> None:
        """Reads the rows sent after the previous step and carries out the decisions, unless the plan has changed since."""
        if self._sent_rows is None or self._sent_rows[0] + 1 == self._steps:
            return
        (step, plan), self._sent_rows = self._sent_rows, None
        try:
            rows = [GradientError.of(row) for row in self._rows.read()]
        except CommError as error:
            self._connection.broke(error)
            return
        if plan is not self._in_force:
            return
        if policy.is_usable(rows):
            self._own.fade(policy.fade(self._state))
        self._state, actions = policy.decide(self._state, rows, step, acts=self.acts)
        self._carry_out(actions)

    # ---- carrying out decisions

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case LogLine(text, warning):
                    self._connection.say(text, logging.WARNING if warning else logging.INFO)
                case BoundPlanner(level):
                    self._connection.terms.floor = level
                case SetErrorMultiplier(times):
                    # under a finer plan the excess is less visible, so the largest value stays
                    self._connection.terms.error_multiplier = max(self._connection.terms.error_multiplier, times)
                case ChangeCodecs(change):
                    self._change(change)

    def _change(self, change: CodecChange) -> None:
        nodes, before = self._groups.world // self._groups.ranks_per_node, self._plan
        lifted = plan_choice.lift(self._base, change.after, nodes, cuda=self._worker.device.type == "cuda")
        if lifted.buckets == before.buckets:
            return
        try:
            switch(self._connection, lifted)
        except ValueError as error:  # raised on all ranks, and nothing has changed
            self._carry_out([policy.change_refused(change, error)])
            return
        self._own.new_codecs()
        entered, factor = self._take(self._base), plan_choice.nbytes(lifted) / plan_choice.nbytes(before)
        self._state, lines = policy.change_done(self._state, change, self._steps, entered=entered, nbytes_factor=factor)
        self._carry_out(lines)

    def _take(self, base: Plan | None = None) -> PlanLevels:
        """Adopts the active plan. `base` is the plan that it was made finer from."""
        self._plan = self._in_force
        self._base = base or self._plan
        self._watched = gradient_comparison.watched(self._worker) if not self._plan.steps_locally else []
        self._own.new_plan()
        watched = [b.planned for b in self._watched]
        bounds = (0.0, 0.0) if self._by_budget else least_usual(watched)
        typical = typical_cosine(watched) if self._connection.terms.optimizer == "adam" else 0.0
        return PlanLevels(plan_choice.lowest(self._plan), plan_choice.lowest(self._base), bool(self._watched),
                          self._base.buckets != self._plan.buckets, *bounds, typical, self._plan.overlap == "forward")

    @property
    def _steps(self) -> int:
        return self._connection.exchanges

    @property
    def _in_force(self) -> Plan:
        assert self._connection.plan is not None
        return self._connection.plan

    @property
    def _worker(self) -> Worker:
        assert self._connection.worker is not None
        return self._connection.worker

    @property
    def _groups(self) -> Groups:
        assert self._connection.groups is not None
        return self._connection.groups


# ---- one rank's measurements between two comparisons

LOSSES_KEPT = 4096
STEPS_KEPT = 9


class OwnMeasurements:
    """This rank's checks of its own payloads, its losses, and the time of steps and checks."""

    def __init__(self, now_s: float) -> None:
        self._begin_s = now_s
        self._sent, self._trend = Dots(), LossTrend()
        self._losses: deque[SupportsFloat] = deque(maxlen=LOSSES_KEPT)
        self._steps_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._ended_s: float | None = None
        self._looking_s = 0.0
        self._here_s, self._looks = 0.0, 0
        self._everywhere_s = 0.0

    def report(self, loss: SupportsFloat) -> None:
        """Records the training loss of a step. It is read for the next row, so that no step waits for the device."""
        self._losses.append(loss)

    def add_check(self, sent: Dots, seconds: float) -> None:
        """Adds a comparison of sent values with the gradient. Ignored if not finite."""
        self._sent = self._sent.plus(sent) if all(map(math.isfinite, sent)) else self._sent
        self._here_s += seconds
        self._looks += 1

    def prepared(self, seconds: float) -> None:
        """Adds the cost of preparing a check before its step."""
        self._here_s += seconds

    def compared(self, seconds: float) -> None:
        """Sets the duration of a comparison over all ranks, including its exchange of rows."""
        self._everywhere_s = seconds

    def set_check_time(self, seconds: float) -> None:
        """Sets the part of the present step that was not training."""
        self._looking_s = seconds

    def step_over(self, now_s: float) -> None:
        if self._ended_s is not None:
            self._steps_s.append(now_s - self._ended_s - self._looking_s)
        self._ended_s, self._looking_s = now_s, 0.0

    def row(self, summed: Dots, compared_s: float, now_s: float) -> GradientError:
        """The row for the other ranks. `compared_s`: duration of the present comparison so far."""
        while self._losses:
            self._trend = self._trend.add(float(self._losses.popleft()))
        return GradientError(
            self._sent, summed, self._trend.seen(), self._here_s / max(self._looks, 1), self._everywhere_s or compared_s,
            median(self._steps_s) if self._steps_s else 0.0, now_s - self._begin_s,
        )

    def fade(self, factor: float) -> None:
        """Reduces the weight of earlier observations."""
        self._sent = Dots(*(factor * x for x in self._sent))

    def new_plan(self) -> None:
        self._sent = Dots()

    def new_codecs(self) -> None:
        """Restarts the loss trend: a loss takes many steps to fall, so after a change only new rises count."""
        self._trend = LossTrend()

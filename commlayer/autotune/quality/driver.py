"""Shell of the quality guard: feeds measurements to autotune/quality/decide.py and carries out its decisions.

Runs on every rank. It compares gradients at the end of a step's exchange and changes plans between two steps.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

import torch

from commlayer.autotune.quality import decide
from commlayer.autotune.quality.codec_level import AccuracyLimits
from commlayer.autotune.quality.own_measurements import OwnMeasurements
from commlayer.autotune.quality.state import (
    Action,
    BoundPlanner,
    ChangeCodecs,
    CodecChange,
    GradientError,
    Harder,
    PlanLevels,
    Tell,
)
from commlayer.autotune.quality.usual_training import least_usual, typical_cosine
from commlayer.cluster.groups import Groups
from commlayer.config import Config
from commlayer.engine import codec_floor, gradient_comparison
from commlayer.engine.connection import Connection
from commlayer.engine.gradient_comparison import Piece
from commlayer.engine.switch import switch
from commlayer.engine.worker import Worker
from commlayer.errors import CommError
from commlayer.loss_budget import BUDGET
from commlayer.observe.fidelity import Dots
from commlayer.records import Plan


def guard_of(connection: Connection, config: Config) -> AccuracyGuard | None:
    """The guard for jobs of several ranks with an automatic plan or a loss budget, or if requested; otherwise None."""
    if connection.worker is None or connection.groups is None:
        return None
    named = bool(config.max_loss or config.loss)
    if config.guard == "off" or (config.guard == "auto" and not (named or connection.terms.auto)):
        return None
    by_budget = named or not connection.terms.auto
    # Without a given budget the loss is not judged, unless the guard was requested explicitly.
    budget = connection.terms.max_loss or (BUDGET if by_budget or config.guard != "auto" else math.inf)
    return AccuracyGuard(connection, AccuracyLimits(budget=budget), config.guard, config.deadline_s, by_budget=by_budget)


class AccuracyGuard:
    """Every rank calls `look` when a step's exchange is over and `after_step` when the step is committed."""

    def __init__(
        self, connection: Connection, limits: AccuracyLimits, mode: str = "act", deadline_s: float = 600.0, *,
        by_budget: bool = True,
    ) -> None:
        """With `by_budget` bounds follow from the limits; otherwise from what is usual under the active codecs."""
        self._connection, self._mode, self._deadline_s, self._by_budget = connection, mode, deadline_s, by_budget
        assert connection.rows is not None
        self._rows = connection.rows.rows("what compressing loses")
        self._told: tuple[int, Plan] | None = None
        """The step after which rows were last sent, and the plan then active."""
        self._own = OwnMeasurements(time.perf_counter())
        self._exposed_s = 0.0
        """Total wait for communication at the end of the last step."""
        self._piece: Piece | None = None
        self._state = decide.begin(limits, self._take())

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

    def looks(self) -> bool:
        """Whether `look` has work to do."""
        # A piece selected under a previous plan belongs to buckets that are no longer sent.
        return (self._piece is not None or self._due) and self._in_force is self._plan and not self.idle

    @property
    def _due(self) -> bool:
        """Whether all ranks compare in the present step. The previous rows must have been read."""
        return decide.due(self._state, self._steps) and not self._rows.under_way

    def look(self) -> None:
        """Compares gradients if due. A CommError is latched in the worker if another rank is lost."""
        if not self.looks():
            return
        due, worker, begin_s = self._due, self._worker, time.perf_counter()
        try:
            exact = None if self._piece is None else self._look_here(worker, self._piece)
            if due:
                self._compare(exact)
        except CommError as error:
            self._connection.broke(error)
        looking_s = time.perf_counter() - begin_s
        self._own.looking(looking_s)
        worker.counters.guard_s += looking_s

    def _look_here(self, worker: Worker, piece: Piece) -> torch.Tensor:
        """The exact gradients of the piece, after comparing them with what this rank has sent."""
        begin_s = time.perf_counter()
        exact = gradient_comparison.exact(worker, piece)
        sent = gradient_comparison.here(worker, piece, exact, self._groups, self._deadline_s)
        self._own.looked(sent, time.perf_counter() - begin_s)
        return exact

    def _compare(self, exact: torch.Tensor | None) -> None:
        """Collective: compares the sum with the exact one, and sends this rank's row."""
        groups, begin_s, summed = self._groups, time.perf_counter(), Dots()
        if self._piece is not None and exact is not None:
            summed = gradient_comparison.everywhere(self._piece, exact, groups, self._deadline_s)
        # With overlapped results the comparison makes the step wait for them: that wait is part of its cost.
        held_s = self._worker.counters.exposed_s - self._exposed_s if self._state.plan.overlapped else 0.0
        self._rows.start(*self._own.row(summed, held_s + time.perf_counter() - begin_s, begin_s).numbers())
        self._told = self._steps, self._plan
        self._own.compared(held_s + time.perf_counter() - begin_s)

    # ---- between two steps

    def after_step(self) -> None:
        """Switches plans if the rows of the previous step require it, and prepares the next check."""
        self._own.step_over(time.perf_counter())
        self._exposed_s = self._worker.counters.exposed_s
        self._hear()
        entered = self._take() if self._in_force is not self._plan else None
        self._state, changes = decide.after_step(self._state, self._steps, acts=self.acts, entered=entered)
        self._carry_out(changes)
        begin_s, self._piece = time.perf_counter(), None
        if self.idle or self._rows.under_way:
            return
        self._state, look = decide.next_look(self._state, self._steps)
        if look is not None:
            self._piece = gradient_comparison.piece(self._watched, look.number, look.elements)
            prepared_s = time.perf_counter() - begin_s
            self._own.prepared(prepared_s)
            self._worker.counters.guard_s += prepared_s  # counters pass to the worker of the next plan

    def _hear(self) -> None:
        """Reads the rows sent after the previous step and carries out the decisions, unless the plan has changed since."""
        if self._told is None or self._told[0] + 1 == self._steps:
            return
        (step, plan), self._told = self._told, None
        try:
            rows = [GradientError.of(row) for row in self._rows.read()]
        except CommError as error:
            self._connection.broke(error)
            return
        if plan is not self._in_force:
            return
        if decide.telling(rows):
            self._own.fade(decide.fade(self._state))
        self._state, actions = decide.decide(self._state, rows, step, acts=self.acts)
        self._carry_out(actions)

    # ---- carrying out decisions

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Tell(text, warning):
                    self._connection.say(text, logging.WARNING if warning else logging.INFO)
                case BoundPlanner(level):
                    self._connection.terms.floor = level
                case Harder(times):
                    # under a finer plan the excess is less visible, so the largest value stays
                    self._connection.terms.harder = max(self._connection.terms.harder, times)
                case ChangeCodecs(change):
                    self._change(change)

    def _change(self, change: CodecChange) -> None:
        nodes, before = self._groups.world // self._groups.ranks_per_node, self._plan
        lifted = codec_floor.lift(self._base, change.after, nodes, cuda=self._worker.device.type == "cuda")
        if lifted.buckets == before.buckets:
            return
        try:
            switch(self._connection, lifted)
        except ValueError as error:  # raised on all ranks, and nothing has changed
            self._carry_out([decide.kept(change, error)])
            return
        self._own.new_codecs()
        entered, factor = self._take(self._base), codec_floor.nbytes(lifted) / codec_floor.nbytes(before)
        self._state, lines = decide.changed(self._state, change, self._steps, entered=entered, nbytes_factor=factor)
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
        return PlanLevels(codec_floor.lowest(self._plan), codec_floor.lowest(self._base), bool(self._watched),
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

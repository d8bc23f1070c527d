"""The quality guard of a running job: compares sent with exact gradients, for the decisions of policy.py.

Every rank compares a piece of a bucket at the end of a step's exchange. The controller exchanges the results and changes plans.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence

import torch

from commlayer.autotune.quality import policy
from commlayer.autotune.quality.loss_trend import LossTrend
from commlayer.autotune.quality.policy import Bounds, CodecChange, GradientError, PlanLevels
from commlayer.autotune.quality.usual_errors import usual_bounds
from commlayer.cluster.processes.collectives import all_or_none
from commlayer.config import Config
from commlayer.engine.guards import gradient_comparison
from commlayer.engine.guards.gradient_comparison import SampledPiece
from commlayer.engine.job import codec_floor
from commlayer.engine.job.job import DistributedJob
from commlayer.loss_budget import BUDGET
from commlayer.observe.events import NoiseScaleEvent, QualityEvent
from commlayer.observe.fidelity import Dots
from commlayer.observe.noise_scale import NoiseScale
from commlayer.planner.convergence import steps_alone
from commlayer.records import Plan

LOSSES_KEPT = 4096


def make_quality_guard(context: DistributedJob, config: Config) -> QualityGuard | None:
    """Returns the quality guard of a job of several ranks with an automatic plan or a loss budget, or if the user requested a
    guard; otherwise None."""
    has_budget = bool(config.max_loss or config.loss)
    if config.guard == "off" or (config.guard == "auto" and not (has_budget or context.terms.auto)):
        return None
    by_budget = has_budget or not context.terms.auto
    # Without a given budget the loss is not checked, unless the guard was requested explicitly.
    budget = context.terms.max_loss or (BUDGET if by_budget or config.guard != "auto" else math.inf)
    return QualityGuard(context, Bounds(budget=budget), config.guard, config.deadline_s, by_budget=by_budget)


class QualityGuard:
    def __init__(
        self, context: DistributedJob, bounds: Bounds, mode: str, deadline_s: float, *, by_budget: bool,
    ) -> None:
        """`by_budget`: True: bounds follow from the loss budget. False: they follow from usual values under the active
        codecs."""
        self._context, self._mode, self._deadline_s, self._by_budget = context, mode, deadline_s, by_budget
        self._groups = context.groups
        self._begin_s = time.perf_counter()
        self._exposed_s = 0.0
        """Total seconds of waiting for communication, at the end of the last step."""
        self._losses: deque[float | torch.Tensor] = deque(maxlen=LOSSES_KEPT)
        self._trend, self._sent = LossTrend(), Dots()
        self._compares = False
        """Whether this step, under `_plan`, measures the compression error on all ranks."""
        self._piece: SampledPiece | None = None
        self._prepared_s = 0.0
        self.error: GradientError | None = None
        """This rank's comparison of the last step, whose results all ranks send. The value is None if the step had no
        comparison."""
        self._noise, self._logged_noise = NoiseScale(), 0.0
        self._state = policy.begin(bounds, self._levels())

    def report(self, loss: float | torch.Tensor) -> None:
        """Records the training loss of a step. A tensor is read before the next report, so no step waits for the device."""
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else float(loss))

    @property
    def acts(self) -> bool:
        """True: the guard changes plans. False: it only logs, because the user chose the plan."""
        return self._mode == "act" or (self._mode == "auto" and self._context.terms.auto)

    def has_work(self) -> bool:
        """Returns whether `compare` reads the sums of the present step. After a change of plans it does not, because the
        compared piece is of a bucket that is no longer sent."""
        return self._compares and self._context.plan is self._plan

    def compare(self, step: int, failure: Exception | None = None) -> None:
        """Compares the averaged gradient with the exact one, and this rank's payload with its own gradient. All ranks call it
        together. `failure`: an earlier error on this rank; then no rank compares."""
        if not self.has_work():
            return
        # From now on, all ranks send their errors.
        self._state, self.error = policy.record_comparison(self._state, step), GradientError()
        worker, begin_s, summed = self._context.worker, time.perf_counter(), Dots()
        # With overlapped results the comparison makes the step wait for them: that wait is part of its cost.
        held_s = worker.counters.exposed_s - self._exposed_s if self._state.plan.overlapped else 0.0
        with all_or_none(self._groups, "comparing gradients"):
            if failure is not None:
                raise failure
            exact = None if self._piece is None else gradient_comparison.exact_gradients(worker, self._piece)
        if self._piece is not None and exact is not None:
            sent = gradient_comparison.compare_on_node(self._piece, exact, self._groups, self._deadline_s)
            if all(map(math.isfinite, sent)):
                self._sent = self._sent.plus(sent, self._state.fade)
            summed = gradient_comparison.compare_sums(self._piece, exact, self._groups, self._deadline_s)
        while self._losses:
            self._trend = self._trend.add(float(self._losses.popleft()))
        took_s = time.perf_counter() - begin_s
        self.error = GradientError(self._sent, summed, self._trend.measure_rise(), held_s + self._prepared_s + took_s,
                                   time.perf_counter() - self._begin_s)
        worker.counters.guard_s += took_s

    def schedule(self, step: int) -> None:
        """Determines whether all ranks compare in the next step, number `step`."""
        # A user's plan without a budget is not checked.
        idle = self._mode == "auto" and not self._by_budget and not self._context.terms.auto
        self._compares = not idle and policy.is_comparison_due(self._state, step)

    def prepare(self) -> None:
        """Prepares the comparison in the next step, if that step has one."""
        begin_s, self._piece, worker = time.perf_counter(), None, self._context.worker
        self._exposed_s = worker.counters.exposed_s
        if self._compares and self._state.plan.compared:
            self._piece = gradient_comparison.piece(worker, self._watched, self._state.samples, self._state.elements)
            self._prepared_s = time.perf_counter() - begin_s
            worker.counters.guard_s += self._prepared_s  # counters pass to the worker of the next plan

    def _observe_noise(self, rows: Sequence[GradientError]) -> None:
        """Updates the gradient noise scale. Logs the noise scale when it is first known, and whenever it has doubled or
        halved."""
        if not policy.is_usable(rows):
            return
        # The exact gradients of each node are weighted so that their sum is the mean. A node without residuals reports none.
        squares = [row.sent.xx for row in rows if row.sent.xx > 0]
        nodes = len(self._groups.sites)
        summed = self._state.summed.xx
        if len(squares) < nodes or nodes == 1:
            return
        self._noise = self._noise.plus([nodes**2 * square for square in squares], summed)
        batches = self._noise.known * self._groups.world / nodes
        self._context.worker.counters.noise_scale = batches
        if batches and self._context.rank == 0:
            self._context.stream.log.append(NoiseScaleEvent(batches=batches))
        if batches and not 0.5 < self._logged_noise / batches < 2:
            self._logged_noise, world = batches, self._groups.world
            steps = steps_alone(batches, world, self._context.worker.job.numel)
            self._context.log(f"gradient noise scale: about {batches:.2g} batches of one worker; one worker alone would "
                              f"need {steps:.2f} times as many steps as these {world}")

    def decide(self, rows: Sequence[GradientError], step_s: float) -> CodecChange | None:
        self._state, change, complaint = policy.decide(self._state, rows, step_s, acts=self.acts)
        self._observe_noise(rows)
        if policy.is_usable(rows) and self._context.rank == 0:
            self._context.stream.log.append(QualityEvent(cosine=self._state.summed.fidelity().cosine,
                                                         residual=self._state.mean_residual or 0.0))
        self._context.terms.floor = self._state.planner_floor if self.acts else self._context.terms.floor
        if complaint is not None:
            self._context.log_decision(f'{complaint.text}; the plan stays as the user set it (guard="act" would make its '
                                       f'codecs '
                                       "finer)", logging.WARNING)
        return change

    def plan_at_floor(self, change: CodecChange) -> Plan | None:
        """Returns the base plan without codecs coarser than `change` allows; None if that is the active plan."""
        groups, worker = self._groups, self._context.worker
        lifted = codec_floor.raise_precision(self._base, change.after, len(groups.sites),
                                             cuda=worker.device.type == "cuda")
        return None if lifted.buckets == self._plan.buckets else lifted

    def adapt_to_plan(self, step: int, *, by_guard: bool = False) -> CodecChange | None:
        """Adapts to a plan that became active. `by_guard`: True: the guard made its codecs finer or coarser. Returns a further
        change of codecs if earlier complaints require one."""
        if by_guard:
            self._trend = LossTrend()  # a loss takes many steps to fall, so only its rises from now on count
        levels = self._levels(self._base if by_guard else None)
        self._state, change = policy.adapt_to_plan(self._state, levels, step, by_guard=by_guard, acts=self.acts)
        return change

    def _levels(self, base: Plan | None = None) -> PlanLevels:
        """Reads the compression levels of the active plan. `base`: the plan from which the guard made the active one finer."""
        plan, worker = self._context.plan, self._context.worker
        self._plan, self._base, self._sent, self._piece, self._compares = plan, base or plan, Dots(), None, False
        self._watched = [] if plan.steps_locally else gradient_comparison.compared_buckets(plan, worker.job)
        bounds = (0.0, 0.0) if self._by_budget else usual_bounds(self._watched)
        return PlanLevels(codec_floor.lowest(plan), codec_floor.lowest(self._base), bool(self._watched),
                          self._base.buckets != plan.buckets, *bounds, plan.overlap == "forward")

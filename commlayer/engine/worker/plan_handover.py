"""Transfers residuals, shared buffer values and counters from one plan's worker to the next plan's worker, between two steps.

Residuals continue as inherited residuals of the buckets that contain their elements, whatever path and codec these buckets now
have. Under plans that average gradients, residuals are gradients; under local steps they are weight changes. Only an optimizer
can convert gradients into weight changes. So when local steps begin, residuals stay gradients: each rank adds its own residuals
to its next gradients (`pending_residuals`). Residuals that are still pending when a later plan averages gradients again are
inherited unchanged. Weight changes become gradients only if the effect of a gradient on a weight is a constant: the learning
rate of SGD without momentum. Otherwise they are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from commlayer.compressors.feedback import ResidualSlice
from commlayer.engine.buckets.entries_sent import inherit
from commlayer.engine.buckets.shared_buffers import pass_on

if TYPE_CHECKING:
    from commlayer.engine.worker.worker import Worker

log = logging.getLogger("commlayer")


def hand_over(
    before: Worker, after: Worker, effect: Callable[[int], float] = lambda _: 0.0, rate: float = 1.0, *, world: int = 0,
) -> None:
    """Makes worker `after` continue where `before` stopped, with the residuals of `before`.

    `effect(tensor)`: see OptimizerMemory.effect. `rate`: the learning rate. `world`: present number of workers; 0: that with
    which the job began.
    """
    after.now.number, after.now.joined = before.step, before.now.joined
    after.units.take(before.units)
    if before.plan.steps_locally != after.plan.steps_locally:
        after.units.rate = rate
    pass_on(before.shared_buffers, after.shared_buffers)
    before.release_memory()
    _carry(before, after, effect, world or before.units.members)
    inherit(before.buckets, after.buckets)
    after.now.counters, after.now.recorder, after.stopwatch = before.counters, before.recorder, before.stopwatch
    after.reorder(before.places)


def _carry(before: Worker, after: Worker, effect: Callable[[int], float], world: int) -> None:
    unsent = [(bucket, each) for bucket in before.buckets for each in bucket.ledger.residuals()]
    unsent += before.late.residuals(world, before.units.members)
    residuals = [_times(d, 1.0 / before.units.rate_of(bucket)) for bucket, d in unsent]
    if after.plan.steps_locally and not before.plan.steps_locally:
        units = before.units
        # A worker's residual is a part of the mean. Its gradient is multiplied by its weight.
        worth = units.total / (units.weight * units.members) if units.weight else 0.0
        after.pending_residuals = [_times(d, worth) for d in residuals]
        return
    if before.plan.steps_locally and not after.plan.steps_locally:
        rates = {d.tensor: effect(d.tensor) for d in residuals}
        if lost := {tensor for tensor, rate in rates.items() if not rate}:
            log.info("the residuals of %d tensors were dropped when the plan changed: they are weight changes, "
                     "and gradients are averaged now", len(lost))
        residuals = [ResidualSlice(d.tensor, d.start, d.values / rates[d.tensor]) for d in residuals if rates[d.tensor]]
    inherit_residuals(after, residuals)


def inherit_residuals(worker: Worker, residuals: Sequence[ResidualSlice], *, members: int = 0) -> None:
    """Makes a worker send residuals, in units of the gradient, that count toward the mean of `members` workers. 0: all workers
    of the current job."""
    worth = worker.units.members / members if members else 1.0
    for bucket in worker.buckets:
        bucket.ledger.inherited = None
        bucket.ledger.carry(residuals, worth * worker.units.rate_of(bucket))


def _times(residual: ResidualSlice, factor: float) -> ResidualSlice:
    """Multiplies a residual by `factor`. Returns the same memory if the factor is 1, because residuals are as large as the
    model."""
    return residual if factor == 1.0 else residual._replace(values=residual.values * factor)


def carry_pending(worker: Worker, residuals: Sequence[ResidualSlice]) -> None:
    """Makes a worker that averages gradients also send `residuals`, pending residuals of this rank's own gradients."""
    units = worker.units
    part = units.weight * units.members / units.total if units.total else 0.0
    if residuals and not part:
        log.info("the residuals of %d tensors were dropped, because this worker's gradients have weight 0", len(residuals))
        return
    for bucket in worker.buckets:
        bucket.ledger.carry(residuals, part * units.rate_of(bucket))

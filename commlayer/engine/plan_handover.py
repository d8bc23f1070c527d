"""Transfers residuals, shared buffer values and counters from one plan's worker to the next plan's worker, between two steps.

Residuals continue as `carry` of the buckets that contain their elements, whatever path and codec these elements now have. Under
plans that average gradients, residuals are gradients; under local steps they are weight changes. Only an optimizer can convert
gradients into weight changes. So from gradients to local steps they stay gradients: each rank adds its own to its next step
(`unpaid`). Residuals that are still pending when a later plan averages gradients again return to `carry` unchanged. Weight
changes become gradients only if the effect of a gradient on a weight is a constant: the learning rate of SGD without momentum.
Otherwise they are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from commlayer.compressors.feedback import ResidualSlice, residual_on
from commlayer.engine.buckets import pass_on
from commlayer.engine.entries_sent import inherit

if TYPE_CHECKING:
    from commlayer.engine.worker import Worker

log = logging.getLogger("commlayer")


def hand_over(before: Worker, after: Worker, effect: Callable[[int], float] = lambda _: 0.0, rate: float = 1.0) -> None:
    """Makes worker `after` continue where `before` stopped, with the residuals of `before`.

    `effect(tensor)`: by how much a gradient of 1 decreases a tensor's weights; 0 if that is not a constant. `rate`: the
    learning rate.
    """
    after.step = before.step
    after.units.take(before.units)
    if before.plan.steps_locally != after.plan.steps_locally:
        after.units.rate = rate
    pass_on(before.shared_buffers, after.shared_buffers)
    before.let_go()
    _owe(before, after, effect)
    inherit(before.buckets, after.buckets)
    after.counters, after.stopwatch = before.counters, before.stopwatch
    after.record(before.recorder)
    after.eager, after.bring_in = before.eager, before.bring_in
    after.reorder(before.places)
    after.settle = before.settle


def _owe(before: Worker, after: Worker, effect: Callable[[int], float]) -> None:
    owing = [(bucket, debt) for bucket in before.buckets for debt in bucket.debts()]
    owing += before.late.debts(before.units.members)
    # Residuals of the old members' mean count toward the mean of the remaining members.
    worth = after.units.members / before.units.members
    debts = [_times(d, worth / before.units.rate_of(bucket)) for bucket, d in owing]
    if after.plan.steps_locally and not before.plan.steps_locally:
        units = before.units
        # A worker's residual counts as a part of the mean; its gradient counts by its weight.
        worth = units.total / (units.weight * units.members) if units.weight else 0.0
        after.unpaid = [_times(d, worth) for d in debts]
        return
    if before.plan.steps_locally and not after.plan.steps_locally:
        rates = {d.tensor: effect(d.tensor) for d in debts}
        if lost := {tensor for tensor, rate in rates.items() if not rate}:
            log.info("the residuals of %d tensors were dropped when the plan changed: they are weight changes, "
                     "and gradients are averaged now", len(lost))
        debts = [ResidualSlice(d.tensor, d.start, d.values / rates[d.tensor]) for d in debts if rates[d.tensor]]
    _carry(after, debts)


def inherit_residuals(worker: Worker, debts: Sequence[ResidualSlice], *, members: int) -> None:
    """Makes a worker send residuals, in units of the gradient, that count toward the mean of `members` workers."""
    _carry(worker, [_times(debt, worker.units.members / members) for debt in debts])


def _carry(worker: Worker, debts: Sequence[ResidualSlice]) -> None:
    for bucket in worker.buckets:
        paid = residual_on(debts, bucket.slices)
        bucket.carry = None if paid is None else torch.from_numpy(paid).mul_(worker.units.rate_of(bucket))


def _times(debt: ResidualSlice, factor: float) -> ResidualSlice:
    """Multiplies a residual by `factor`. Returns the same memory if the factor is 1, because residuals are as large as the
    model."""
    return debt if factor == 1.0 else debt._replace(values=debt.values * factor)


def owe(worker: Worker, unpaid: Sequence[ResidualSlice]) -> None:
    """Adds pending residuals of this worker's own gradients (`unpaid`) to a worker that averages gradients."""
    units = worker.units
    part = units.weight * units.members / units.total if units.total else 0.0
    if unpaid and not part:
        log.info("the residuals of %d tensors were dropped, because this worker's gradients have weight 0", len(unpaid))
        return
    for bucket in worker.buckets:
        if (paid := residual_on(unpaid, bucket.slices)) is not None:
            more = torch.from_numpy(paid) * part * units.rate_of(bucket)
            bucket.carry = more if bucket.carry is None else bucket.carry + more

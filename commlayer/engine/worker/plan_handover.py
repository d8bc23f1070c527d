"""Transfers residuals, shared buffer values and counters from one plan's worker to the next plan's worker, between two steps.

Residuals continue as inherited residuals of the buckets that contain their elements, whatever path and codec these buckets now
have. compressors/residual_slices.py says what becomes of residuals when local steps begin or end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from commlayer.compressors.residual_slices import Effect, Residuals, ResidualSlice
from commlayer.engine.buckets.entries_sent import inherit
from commlayer.engine.buckets.shared_buffers import copy_known_values

if TYPE_CHECKING:
    from commlayer.engine.worker.worker import Worker

log = logging.getLogger("commlayer")


def hand_over(
    before: Worker, after: Worker, effect: Effect = lambda _: 0.0, rate: float = 1.0, *, world: int = 0,
    pending: Sequence[ResidualSlice] = (),
) -> None:
    """Makes worker `after` continue where `before` stopped, with the residuals of `before`.

    `effect`: see OptimizerMemory.effect. `rate`: the learning rate. `world`: present number of workers; 0: that with
    which the job began. `pending`: gradients that are pending under local steps.
    """
    after.now.number, after.now.joined = before.step, before.now.joined
    after.units.copy_from(before.units)
    if before.plan.steps_locally != after.plan.steps_locally:
        after.units.rate = rate
    copy_known_values(before.shared_buffers, after.shared_buffers)
    before.release_memory()
    inherit_residuals(after, _unsent(before, world or before.units.members, pending), effect)
    inherit(before.buckets, after.buckets)
    after.now.counters, after.now.recorder, after.stopwatch = before.counters, before.recorder, before.stopwatch
    after.reorder(before.places)


def _unsent(worker: Worker, world: int, pending: Sequence[ResidualSlice]) -> Residuals:
    unsent = [(bucket, part) for bucket in worker.buckets for part in bucket.ledger.residuals()]
    unsent += worker.late.residuals(world, worker.units.members)
    parts = [part.times(1.0 / worker.units.encoding_rate(bucket)) for bucket, part in unsent]
    return Residuals(pending, parts) if worker.plan.steps_locally else Residuals(parts)


def inherit_residuals(worker: Worker, residuals: Residuals, effect: Effect) -> None:
    """Makes a worker send residuals, before its first step. Residuals that stay gradients under local steps become the worker's
    `pending_residuals`."""
    planned = residuals.for_plan(steps_locally=worker.plan.steps_locally, effect=effect)
    if planned.dropped:
        log.info("the residuals of %d tensors were dropped: they are weight changes, and gradients are averaged now",
                 len(planned.dropped))
    worker.pending_residuals = planned.pending
    for bucket in worker.buckets:
        bucket.ledger.inherit(planned.sent, worker.units.encoding_rate(bucket))

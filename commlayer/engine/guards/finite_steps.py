"""Keeps optimizers from applying gradients that are not finite, and reports the ranks and tensors that these gradients come
from.

Averages that are not finite are still written to `.grad`, so that a GradScaler or a script that checks them can skip the step
itself. If an optimizer is about to step with such averages, they are removed. All ranks have the same averages, so all ranks
drop that step. Under local steps each rank checks its own gradients and drops only its own step; the other ranks log this
after a later exchange.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from commlayer.cluster.processes.collectives import decode_json
from commlayer.engine.buckets.bucket_layout import all_finite
from commlayer.engine.components import Component, ComponentOrder
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.model.optimizers import HeldParameters, find_closure, watch
from commlayer.errors import CommError

MOST = 5
"""Number of steps or exchanges in a row that are dropped before the job ends."""
SHARED_EVERY = 4
"""Number of local steps after which ranks exchange how many steps each has dropped, at the next exchange of weight changes."""
COUNTS = "dropped in a row"
"""Name of the counts that a joining rank receives."""
REMEDY = "check the data and the learning rate, and continue from the last checkpoint"


class FiniteSteps(Component):
    """Checks the gradients of one attached model for values that are not finite, before they are applied."""

    order = ComponentOrder.CHECKS

    def __init__(self, context: DistributedJob, parameters: Sequence[nn.Parameter], held: HeldParameters) -> None:
        """`parameters`: the averaged parameters, in the order of their numbers. `held`: returns which parameters belong to an
        optimizer."""
        self._context, self._parameters, self.held = context, parameters, held
        self._rows = context.rows.section("gradients that are not finite")
        self._found: str | None = None
        """Text that names the ranks and the tensor with non-finite gradients; "" if the averages in `.grad` are finite. The
        value is None if this is not known yet."""
        self._dropped = False
        """True: the log already reports that this step was dropped."""
        self._in_row: dict[int, int] = {}
        """Maps the smallest parameter number of an optimizer to the number of its steps that were dropped in a row."""
        self._spoilt = 0
        """Number of exchanges of weight changes that were dropped in a row."""
        self._drops = context.rows.section("dropped steps")
        self._own_drops, self._first_dropped = 0, -1
        """Number of local steps that this rank has dropped and not reported yet, and the first tensor of the last one."""
        self._unshared = 0
        """Number of local steps since ranks last exchanged how many steps each has dropped."""
        context.on_close.append(watch(self._check_before_step))
        if context.joined is not None and (counts := context.joined.followed.get(COUNTS)):
            self._spoilt, self._in_row = decode_json(counts.encode(), tuple[int, dict[int, int]], COUNTS, "the running job")
        context.followers[COUNTS] = self._common_counts

    def _common_counts(self) -> str:
        """Returns what all ranks have counted alike. Under local steps each rank drops its own steps."""
        return msgspec.json.encode((self._spoilt, {} if self._context.local else self._in_row)).decode()

    def averaged(self, own: int, *, finite: bool, dropped: bool) -> None:
        """Records whether a step's averages are finite. All ranks call it with the same `finite`. `own`: number of the first
        tensor whose gradient on this rank is not finite; -1 if there is none. `dropped`: True if averages that were not finite
        have not been applied."""
        if finite and self._found is None:
            self._in_row.pop(0, None)
        self._found, self._dropped = "" if finite else self._name_ranks_not_finite(own), False
        if dropped and self._found:
            self._count_dropped_step(0, f"gradients of {self._found}", "they are dropped on all ranks")

    def check_running_steps(self) -> None:
        """Checks the gradients of a backward pass that has just ended, for optimizers whose step is running because its closure
        ran that pass."""
        for optimizer in self.held.stepping():
            self._check(self.held.parameter_numbers(optimizer))

    def reset(self) -> None:
        """Resets the check, because new averages for `.grad` are being exchanged."""
        self._found = None

    def _check_before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mine = self.held.parameter_numbers(optimizer)
        if not mine or find_closure(args, kwargs) is not None or getattr(optimizer, "found_inf", None) is not None:
            return  # gradients arrive during that step, or a fused optimizer skips the step by itself
        self._check(mine)

    def _check(self, mine: Sequence[int]) -> None:
        if self._context.local is not None:
            self._check_local_gradients(mine)
        else:
            self._drop(mine)

    def _drop(self, mine: Sequence[int]) -> None:
        if self._found is None:
            return
        # Ranks of a site with a sharded model have different parts of the averages, so none of them looks at its own.
        if not self._found or (self._first(mine) < 0 and not self._context.site.shards):
            self._in_row.pop(min(mine), None)
            return
        worker = self._context.worker
        # Under sync="forward" other ranks may have applied the finite averages of this step already (forward_overlap.py).
        forward = worker.plan.overlap == "forward"
        bad = worker.spoilt if forward else mine
        for number in mine:
            if number in bad:
                self._parameters[number].grad = None
        if not self._dropped:  # otherwise the drop is logged already, for another optimizer of the same step
            self._dropped = True
            self._count_dropped_step(0 if forward else min(mine), f"gradients of {self._found}",
                                     "the step is dropped on all ranks")

    def _first(self, mine: Sequence[int]) -> int:
        """Returns the first of these parameter numbers whose gradient is not finite; -1 if all are finite."""
        return first_not_finite([(number, grad) for number in mine if (grad := self._parameters[number].grad) is not None])

    def _check_local_gradients(self, mine: Sequence[int]) -> None:
        """Checks the gradients that this rank is about to apply locally, and drops the step if some are not finite. On a GPU
        this waits for the device once per step."""
        context, local = self._context, self._context.local
        deadline = time.monotonic() + context.groups.timeout_s
        first = int(context.site.largest([self._first(mine)], deadline, lambda: context.worker.error)[0])
        if first < 0:
            self._in_row.pop(min(mine), None)
            return
        for number in mine:
            self._parameters[number].grad = None
        if local is not None:
            local.pending_residuals.remove_from_gradients(mine)
        self._own_drops, self._first_dropped = self._own_drops + 1, first
        self._count_dropped_step(min(mine), f"gradients of {context.called(context.rank)}, first in {self._name(first)},",
                                 "this rank drops the step", own=True)

    def end_exchange(self, *, early: bool) -> None:
        """Reports the steps that this rank has dropped, and logs those that the other ranks have reported. A report is read
        when the next one is sent, so no rank waits for the transfer."""
        context = self._context
        if early:
            return
        self._unshared += context.plan.exchange_steps
        if self._unshared < SHARED_EVERY:
            return
        rows = self._drops.read() if self._drops.under_way else []
        self._drops.start(float(self._own_drops), float(self._first_dropped))
        self._own_drops = self._unshared = 0
        for place, (count, first) in enumerate(rows):
            if count and place != context.rank:
                whose = f"gradients of {context.called(place)}, first in {self._name(int(first))},"
                context.decisions.append(f"step {context.passes}: {whose} were not finite: that rank has dropped "
                                         f"{int(count)} of its last steps ({MOST} in a row end training)")
                context.log(context.decisions[-1], logging.WARNING, event=False)  # that rank's event is in the stream

    def new_members(self) -> None:
        """Restarts the count of steps until the next report, so that it is equal on all ranks."""
        self._unshared = 0

    def exchanged(self, own: int, *, finite: bool) -> None:
        """Records whether averaged weight changes are finite. `own`: number of the first parameter whose weight change is not
        finite on this rank; -1 if there is none."""
        self._spoilt = 0 if finite else self._spoilt + 1
        if not finite:
            self._report_dropped_step(f"weights of {self._name_ranks_not_finite(own)}",
                                      "all ranks return to those of the last exchange", self._spoilt)

    def _name_ranks_not_finite(self, own: int) -> str:
        """Returns a text that names the ranks with non-finite values, and the first such tensor. All ranks call it together."""
        context, guilty, numbers = self._context, list[int](), list[int]()
        first = -1
        try:
            self._rows.start(float(own))
            numbers = [int(row[0]) for row in self._rows.read()]
            guilty = [rank for rank, number in enumerate(numbers) if number >= 0]
            first = next((number for number in numbers if number >= 0), -1)
        except CommError as error:
            context.drop_call(error)
        if not guilty:
            return "no single rank, but of their compressed sum,"
        who = "all ranks" if len(guilty) == len(numbers) else ", ".join(map(context.called, guilty))
        return f"{who}, first in {self._name(first)},"

    def _name(self, number: int) -> str:
        return self._context.worker.job.tensors[number].name

    def _count_dropped_step(self, key: int, what: str, then: str, *, own: bool = False) -> None:
        self._in_row[key] = self._in_row.get(key, 0) + 1
        self._report_dropped_step(what, then, self._in_row[key], own=own)

    def _report_dropped_step(self, what: str, then: str, in_row: int, *, own: bool = False) -> None:
        """Logs a dropped step. Raises CommError after MOST dropped steps in a row. `own`: True if the other ranks do not know
        of the drop."""
        context = self._context
        if in_row < MOST:
            context.log_decision(f"{what} are not finite: {then} ({in_row} in a row; {MOST} in a row end training)", own=own)
            return
        diverged = "the loss has diverged: " if "all ranks" in what else ""
        error = CommError(f"step {context.passes}: {what} are not finite, {MOST} times in a row: {diverged}{REMEDY}",
                          code="E-NOT-FINITE")
        context.worker.latch(error)
        raise error


def first_not_finite(gradients: Sequence[tuple[int, torch.Tensor]]) -> int:
    """Returns the number of the first gradient that is not finite; -1 if all are finite."""
    dense = [(number, grad._values() if grad.is_sparse else grad) for number, grad in gradients]
    sums = [grad.sum(dtype=torch.float32) for _, grad in dense if grad.device.type != "cpu"]
    if sums and bool(torch.stack(sums).isfinite().all()):  # an infinite sum may be an overflow: check each
        dense = [(number, grad) for number, grad in dense if grad.device.type == "cpu"]
    return next((number for number, grad in dense if not all_finite(grad)), -1)

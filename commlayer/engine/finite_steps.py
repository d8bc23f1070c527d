"""Keeps optimizers from applying gradients that are not finite, and names the ranks and the tensor that they come from.

Averages that are not finite reach `.grad` as they are: a GradScaler, or a script that looks at them, skips the step by itself.
Where an optimizer is about to step with them all the same, it finds none. All ranks have the same averages, so all drop that
step. Under local steps each rank looks at its own gradients, and drops that step alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commlayer.engine.connection import Connection
from commlayer.engine.finite import all_finite
from commlayer.engine.optimizer_steps import Held, closure_of, watch
from commlayer.engine.step import Regroup
from commlayer.errors import CommError

MOST = 5
"""So many steps, or exchanges, in a row end the job."""
REMEDY = "look at the data and the learning rate, and go on from the last checkpoint"


class FiniteSteps:
    """Of one attached model."""

    def __init__(self, connection: Connection, parameters: Sequence[nn.Parameter], held: Held) -> None:
        """`parameters`: those that are averaged, by number. `held`: which of them optimizers hold."""
        self._connection, self._parameters, self._held = connection, parameters, held
        assert connection.rows is not None
        self._rows = connection.rows.rows("gradients that are not finite")
        self._found: str | None = None
        """Whose the averages in `.grad` are; "" if they are finite; None if that is not known yet."""
        self._dropped = False
        """Whether that has been said."""
        self._in_row: dict[int, int] = {}
        """By the least number of an optimizer's parameters: how many of its steps have been dropped one after the other."""
        self._spoilt = 0
        """The same of exchanges of weights."""
        connection.on_close.append(watch(self._before))

    # ---- averaged gradients

    def averaged(self, own: int, *, finite: bool) -> None:
        """The averages of a step are known. All ranks call it with the same `finite`. `own`: the first tensor of which this
        rank's own gradients are not; -1 if there is none."""
        self._found, self._dropped = "" if finite else self._whose(own), False

    def written(self) -> None:
        """The averages are in `.grad`: an optimizer whose closure asked for them goes on to apply them."""
        for optimizer in self._held.stepping():
            self._drop(self._held.by(optimizer))

    def dropped(self, own: int, *, finite: bool) -> None:
        """The same as `averaged`, of a step whose averages that are not finite were not applied."""
        self.averaged(own, finite=finite)
        if self._found:
            self._count(0, f"gradients of {self._found}", "they are dropped on all ranks")
        else:
            self._in_row.pop(0, None)

    def begun(self) -> None:
        """The averages in `.grad` are others now, and are on their way."""
        self._found = None

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mine = self._held.by(optimizer)
        if not mine or closure_of(args, kwargs) is not None or getattr(optimizer, "found_inf", None) is not None:
            return  # gradients come in that step; or a fused optimizer skips it by itself
        if self._connection.local is not None:
            self._look(mine)
        else:
            self._drop(mine)

    def _drop(self, mine: Sequence[int]) -> None:
        if self._found is None:
            return
        if not self._found or self._first(mine) < 0:
            self._in_row.pop(min(mine), None)
            return
        worker = self._connection.worker
        assert worker is not None
        # Ranks that take this step bucket by bucket have applied the others' averages: see forward_overlap.py.
        bad = worker.spoilt if worker.plan.overlap == "forward" else mine
        for number in mine:
            if number in bad:
                self._parameters[number].grad = None
        if not self._dropped:  # else another optimizer of the same step has
            self._dropped = True
            self._count(min(mine), f"gradients of {self._found}", "the step is dropped on all ranks")

    def _first(self, mine: Sequence[int]) -> int:
        """The first of these parameters whose gradient is not finite; -1 if there is none."""
        return first_not_finite([(number, grad) for number in mine if (grad := self._parameters[number].grad) is not None])

    # ---- local steps

    def counted(self) -> None:
        """The backward pass of a local step is over: an optimizer whose closure made it goes on to apply its gradients."""
        for optimizer in self._held.stepping():
            self._look(self._held.by(optimizer))

    def _look(self, mine: Sequence[int]) -> None:
        """This rank is about to step with its own gradients. On a GPU that waits for them, once a step: what is not known to be
        finite must not be applied."""
        first, local = self._first(mine), self._connection.local
        if first < 0:
            self._in_row.pop(min(mine), None)
            return
        for number in mine:
            self._parameters[number].grad = None
        if local is not None:
            local.take_back()
        made = self._connection
        self._count(min(mine), f"gradients of {made.called(made.rank)}, first in {self._name(first)},",
                    "this rank drops the step", own=True)

    def exchanged(self, own: int, *, finite: bool) -> None:
        """Changes of weights have been averaged. `own`: as in `averaged`, of weights."""
        self._spoilt = 0 if finite else self._spoilt + 1
        if not finite:
            self._say(f"weights of {self._whose(own)}", "all go back to those of the last exchange", self._spoilt)

    # ---- what is said

    def _whose(self, own: int) -> str:
        """Asks all ranks, which call it together."""
        made, guilty, heard = self._connection, list[int](), list[int]()
        first = -1
        try:
            self._rows.start(float(own))
            heard = [int(row[0]) for row in self._rows.read()]
            guilty = [rank for rank, number in enumerate(heard) if number >= 0]
            first = next((number for number in heard if number >= 0), -1)
        except CommError as error:
            with contextlib.suppress(Regroup):
                made.broke(error)
        if not guilty:
            return "no single rank, but of their compressed sum,"
        who = "all ranks" if len(guilty) == len(heard) else ", ".join(map(made.called, guilty))
        return f"{who}, first in {self._name(first)},"

    def _name(self, number: int) -> str:
        assert self._connection.worker is not None
        return self._connection.worker.job.tensors[number].name

    def _count(self, key: int, what: str, then: str, *, own: bool = False) -> None:
        self._in_row[key] = self._in_row.get(key, 0) + 1
        self._say(what, then, self._in_row[key], own=own)

    def _say(self, what: str, then: str, in_row: int, *, own: bool = False) -> None:
        """CommError where that has been so too often. `own`: the other ranks do not know of it."""
        made = self._connection
        if in_row < MOST:
            made.say(f"{what} are not finite: {then}", own=own)
            return
        diverged = "the loss has diverged: " if "all ranks" in what else ""
        error = CommError(f"step {made.passes}: {what} are not finite, {MOST} times in a row: {diverged}{REMEDY}",
                          code="E-NOT-FINITE")
        if made.worker is not None:
            made.worker.latch(error)
        raise error


def first_not_finite(gradients: Sequence[tuple[int, torch.Tensor]]) -> int:
    """The number of the first that is not finite; -1 if all are."""
    held = [(number, grad._values() if grad.is_sparse else grad) for number, grad in gradients]
    away = [grad.sum(dtype=torch.float32) for _, grad in held if grad.device.type != "cpu"]
    if away and bool(torch.stack(away).isfinite().all()):  # a sum of finite ones may be infinite: then each is looked at
        held = [(number, grad) for number, grad in held if grad.device.type == "cpu"]
    return next((number for number, grad in held if not all_finite(grad)), -1)

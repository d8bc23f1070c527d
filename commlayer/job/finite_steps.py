"""Keeps optimizers from applying gradients that are not finite, and names the ranks and the tensor that they come from.

Averages that are not finite reach `.grad` as they are: a GradScaler, or a script that looks at them, skips the step by itself.
Where an optimizer is about to step with them all the same, it finds none. All ranks have the same averages, so all drop that
step. Under local steps each rank looks at its own gradients, and drops that step alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from commlayer.errors import CommError
from commlayer.job.connection import Connection
from commlayer.runtime.finite import all_finite
from commlayer.runtime.optimizer_steps import closure_of, watch
from commlayer.runtime.step import Regroup

log = logging.getLogger("commlayer")

MOST = 5
"""So many steps, or exchanges, in a row end the job."""
REMEDY = "look at the data and the learning rate, and go on from the last checkpoint"


class FiniteSteps:
    """Of one attached model."""

    def __init__(self, connection: Connection, parameters: Sequence[nn.Parameter]) -> None:
        """`parameters`: those that are averaged, by number."""
        self._connection, self._parameters = connection, parameters
        self._numbers = {id(p): number for number, p in enumerate(parameters)}
        assert connection.rows is not None
        self._rows = connection.rows.rows("gradients that are not finite")
        self._found = ""
        """Whose the averages in `.grad` are, if they are not finite."""
        self._dropped = False
        """Whether that has been said."""
        self._inside = False
        """Whether an optimizer is inside a step, with a closure."""
        self._in_row = self._spoilt = 0
        """So many steps have been dropped one after the other, and so many exchanges."""
        connection.on_close.append(watch(self._before, self._after))

    # ---- averaged gradients

    def averaged(self, own: int, *, finite: bool) -> None:
        """The averages of a step are known. All ranks call it with the same `finite`. `own`: the first tensor of which this
        rank's own gradients are not; -1 if there is none."""
        self._found, self._dropped = "" if finite else self._whose(own), False
        if finite:
            self._in_row = 0

    def written(self) -> None:
        """The averages are in `.grad`: an optimizer whose closure asked for them goes on to apply them."""
        if self._found and self._inside:
            self._drop(self._parameters)

    def dropped(self, own: int, *, finite: bool) -> None:
        """The same as `averaged`, of a step whose averages that are not finite were not applied."""
        self.averaged(own, finite=finite)
        if self._found:
            self._count(f"gradients of {self._found}", "they are dropped on all ranks")

    def begun(self) -> None:
        """The averages in `.grad` are others now."""
        self._found = ""

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        local = self._connection.local is not None
        self._inside = False
        if not (self._found or local or args[1:] or kwargs) or getattr(optimizer, "found_inf", None) is not None:
            return  # a fused optimizer skips the step by itself
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._numbers]
        if not mine:
            return
        self._inside = closure_of(args, kwargs) is not None
        if self._inside:
            return  # gradients come in that step
        if local:
            self._look(mine)
        else:
            self._drop(mine)

    def _after(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._inside = False

    def _drop(self, mine: Sequence[torch.Tensor]) -> None:
        if not self._found or first_not_finite(mine) is None:
            return  # the script has made them so
        for p in mine:
            p.grad = None
        if not self._dropped:  # else another optimizer of the same step has
            self._dropped = True
            self._count(f"gradients of {self._found}", "the step is dropped on all ranks")

    # ---- local steps

    def _look(self, mine: Sequence[torch.Tensor]) -> None:
        """This rank is about to step with its own gradients."""
        first = first_not_finite(mine)
        if first is None:
            self._in_row = 0
            return
        for p in mine:
            p.grad = None
        self._count(f"gradients of rank {self._connection.rank}, first in {self._name(self._numbers[id(first)])},",
                    "this rank drops the step")

    def exchanged(self, own: int, *, finite: bool) -> None:
        """Changes of weights have been averaged. `own`: as in `averaged`, of weights."""
        self._spoilt = 0 if finite else self._spoilt + 1
        if not finite:
            self._say(f"weights of {self._whose(own)}", "all go back to those of the last exchange", self._spoilt)

    # ---- what is said

    def _whose(self, own: int) -> str:
        """Asks all ranks, which call it together."""
        made, guilty = self._connection, list[int]()
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
        assert made.groups is not None
        there = made.groups.members.ranks
        who = "all ranks" if len(guilty) == len(there) else f"rank {', '.join(str(there[rank]) for rank in guilty)}"
        return f"{who}, first in {self._name(first)},"

    def _name(self, number: int) -> str:
        assert self._connection.worker is not None
        return self._connection.worker.job.tensors[number].name

    def _count(self, what: str, then: str) -> None:
        self._in_row += 1
        self._say(what, then, self._in_row)

    def _say(self, what: str, then: str, in_row: int) -> None:
        """CommError where that has been so too often."""
        made = self._connection
        said = f"step {made.passes}: {what} are not finite"
        if in_row < MOST:
            made.decisions.append(f"{said}: {then}")
            log.warning("%s: %s", said, then)
            return
        diverged = "the loss has diverged: " if "all ranks" in what else ""
        error = CommError(f"{said}, {MOST} times in a row: {diverged}{REMEDY}")
        if made.worker is not None:
            made.worker.latch(error)
        raise error


def first_not_finite(parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The first whose gradient is not finite."""
    held = [(p, p.grad._values() if p.grad.is_sparse else p.grad) for p in parameters if p.grad is not None]
    away = [grad.sum(dtype=torch.float32) for _, grad in held if grad.device.type != "cpu"]
    if away and bool(torch.stack(away).isfinite().all()):  # a sum of finite ones may be infinite: then each is looked at
        held = [(p, grad) for p, grad in held if grad.device.type == "cpu"]
    return next((p for p, grad in held if not all_finite(grad)), None)

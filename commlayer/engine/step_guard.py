"""Checks before every optimizer step that the gradients it applies were averaged. Each session has one guard.

The check is per parameter, not per gradient tensor: an exchange averages all parameters of its session. So a script may clip,
scale or replace the gradients. It may also step twice with the same gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from commlayer.engine.accepted_models import STEP_AFTER_BACKWARD
from commlayer.engine.attached_model import AttachedModel
from commlayer.engine.gradient_mark import GradientMark
from commlayer.engine.optimizer_steps import Held, closure_of, watch
from commlayer.errors import InvalidInput, InvalidState

OUTSIDE = -1
"""torch._C._current_graph_task_id() in a thread that runs no backward pass."""
WITNESSES = 8
"""Number of gradients that are compared to detect a second step with the same gradients."""
Gradient = tuple[int, int, int]
"""A parameter's number, the identity of its `.grad`, and the version of that tensor."""

WITH_HOOKS = "call backward() outside session.no_sync(), or session.synchronize() before the optimizer's step"
WITH_DDP = ("call backward() on what the DistributedDataParallel module returns, outside no_sync(); for gradients of "
            "torch.autograd.grad attach the module inside it, and call session.synchronize()")


class StepGuard:
    """Counts exchanges, and records for each parameter the count at its last optimizer step."""

    def __init__(
        self, attached: AttachedModel, named: Sequence[tuple[str, torch.Tensor]], latch: Callable[[BaseException], None],
        remedy: str = WITH_HOOKS,
    ) -> None:
        """`latch` keeps an error, so that no later step of this rank succeeds, and reports it to the other ranks."""
        self._attached, self._latch, self._remedy = attached, latch, remedy
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        self._dtypes = [p.dtype for p in self._parameters]
        self._held = Held(self._parameters)
        self._checked = False
        """Whether `check` was called since the last step."""
        self._exchanges = 0
        self._stepped_at = [0] * len(self._parameters)
        self._applied: weakref.WeakKeyDictionary[Optimizer, list[Gradient]] = weakref.WeakKeyDictionary()
        self.local_step: Callable[[bool], bool] = _not_local
        """Called before each step. Returns whether steps are local, so that gradients need not be averaged. The argument:
        whether to count this step, because its gradients come from no exchange and from no counted backward pass."""
        self._end = watch(self._before_step, self._after_step)

    def exchanged(self) -> None:
        """All parameters have taken part in an exchange; under local steps, in a backward pass that counts as a step."""
        self._exchanges += 1

    def check(self) -> None:
        """After a backward pass: ValueError if a trained parameter is not averaged."""
        self._attached.check(self._latch)
        self._checked = True

    def remove(self) -> None:
        self._end()
        self._attached.remove()

    @property
    def inside(self) -> bool:
        """Whether an optimizer's step is running now, for example when a closure calls backward()."""
        return bool(self._held.stepping())

    def awaits_step(self, optimizer: Any) -> bool:
        """Whether this optimizer has not stepped since the last exchange."""
        return any(self._stepped_at[number] < self._exchanges for number in self._held.by(optimizer))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        mine = self._held.by(optimizer)
        if mine and torch._C._current_graph_task_id() != OUTSIDE:
            raise InvalidState("E-STEP-IN-BACKWARD",
                               f"{type(optimizer).__name__} steps {self._names[mine[0]]} inside backward, with what its own "
                               f"rank has: {STEP_AFTER_BACKWARD}")
        if not self._checked:
            self._attached.check(self._latch, None if mine else optimizer)
        if not mine:
            return
        self._checked = False
        if not self.inside:  # an optimizer may call another
            closure = closure_of(args, kwargs)
            late = [] if self._applied_by_another(optimizer, mine) else self._late(mine)
            counts = bool(late or closure is not None) and not self.awaits_step(optimizer)
            if not self.local_step(counts) and closure is None:
                self._judge(optimizer, mine, late)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not (mine := self._held.by(optimizer)):
            return
        if not self.inside and closure_of(args, kwargs) is not None:
            self._judge(optimizer, mine, self._late(mine))  # the closure may have made the exchange; a local step was counted
        for number in mine:
            self._stepped_at[number] = self._exchanges
        self._applied[optimizer] = self._witnesses(mine)

    def _applied_by_another(self, optimizer: Optimizer, mine: Sequence[int]) -> bool:
        """Whether another optimizer, such as a preconditioner, has already stepped with these same gradients."""
        others = [applied for one, applied in self._applied.items() if one is not optimizer]
        return bool(others) and bool(witnesses := self._witnesses(mine)) and witnesses in others

    def _late(self, mine: Sequence[int]) -> list[int]:
        """The parameters whose gradients have not taken part in an exchange since their last step."""
        return [n for n in mine if self._stepped_at[n] >= self._exchanges and self._parameters[n].grad is not None]

    def _judge(self, optimizer: Optimizer, mine: Sequence[int], late: Sequence[int]) -> None:
        """Raises and latches ValueError if the optimizer is about to apply gradients not averaged since its last step."""
        if not late:
            return
        if (witnesses := self._witnesses(mine)) and witnesses == self._applied.get(optimizer):
            return
        if not (own := [n for n in late if _any(self._parameters[n].grad)]):
            return
        p, name = self._parameters[own[0]], self._names[own[0]]
        if p.dtype != self._dtypes[own[0]]:
            before, now = (str(dtype).removeprefix("torch.") for dtype in (self._dtypes[own[0]], p.dtype))
            error = InvalidInput("E-MODEL-CHANGED",
                                 f"parameter {name} was {before} when the model was attached, and is {now}: its gradient is "
                                 "not averaged; remedy: session.close(), then attach again")
        else:
            more = f", nor those of {len(own) - 1} others" if len(own) > 1 else ""
            error = InvalidInput("E-GRADIENT-LOCAL",
                                 f"the gradient of {name} was not averaged since its last step{more}: each rank would apply "
                                 f"its own; remedy: {self._remedy}")
        self._latch(error)
        raise error

    def _witnesses(self, mine: Sequence[int]) -> list[Gradient]:
        """Identities of some gradients, spread over all: enough to detect that a script has replaced them."""
        chosen = mine[::max(1, len(mine) // WITNESSES)]
        return [(n, id(grad), grad._version) for n in chosen if (grad := self._parameters[n].grad) is not None]


def _not_local(_whole: bool) -> bool:
    return False


def _any(grad: torch.Tensor | None) -> bool:
    """Whether an optimizer would apply nonzero values of it. A mark stands for an average that is still in flight."""
    if grad is None or isinstance(grad, GradientMark):
        return False
    return bool((grad._values() if grad.is_sparse else grad).any())

"""Checks before every optimizer step that the gradients which it applies were averaged."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from commlayer.engine.guards.attached_model import AttachedModel
from commlayer.engine.guards.local_parameters import LocalParameters
from commlayer.engine.guards.model_checks import STEP_AFTER_BACKWARD
from commlayer.engine.hooks.callbacks import in_backward
from commlayer.engine.hooks.gradient_mark import GradientMark
from commlayer.engine.model.optimizers import HeldParameters, find_closure, watch
from commlayer.errors import InvalidInput, InvalidState

WITNESSES = 8
"""Number of gradients that are compared to detect that an optimizer steps a second time with the same gradients."""
Gradient = tuple[int, int, int]
"""Identity of a gradient: its parameter's number, the id of its tensor, and the tensor's version."""
Applied = weakref.WeakKeyDictionary[Optimizer, list[Gradient]]
"""Maps an optimizer to some of the gradients with which it stepped last."""
REMEDY_LAST = ("make the last backward pass of each optimizer step outside no_sync(), or call session.synchronize() before the "
               "step")
REMEDY_LOCAL = "call backward() outside no_sync(), or session.synchronize() before the optimizer's step"


class AveragingGuard:
    """Checks before each optimizer step of one session that its gradients were averaged. The guard counts exchanges, and
    records for each parameter the count at its last optimizer step. The gradient tensors themselves are not compared, so a
    script can clip, scale or replace gradients, or step twice with them."""

    def __init__(
        self, attached: AttachedModel, named: Sequence[tuple[str, torch.Tensor]], latch: Callable[[BaseException], None],
    ) -> None:
        """`latch` stores an error, so that no later step of this rank succeeds, and reports it to the other ranks."""
        self._attached, self._latch = attached, latch
        self._names, self._parameters = [name for name, _ in named], [p for _, p in named]
        self._dtypes = [p.dtype for p in self._parameters]
        self.held, self._local_parameters = HeldParameters(self._parameters), LocalParameters()
        self._checked = False
        """True: `check` was called since the last optimizer step."""
        self._exchanges = 0
        self.own: set[int] = set()
        """Numbers of the parameters to whose gradients a backward pass inside no_sync() has added since the last exchange."""
        self._stepped_at = [0] * len(self._parameters)
        self._applied: Applied = weakref.WeakKeyDictionary()
        self._begun: tuple[list[int], Applied] = [], self._applied
        """Copies of `_stepped_at` and `_applied` from the beginning of the running step with a closure."""
        self.local_step: Callable[[bool], bool] = _not_local
        """Function that is called before each optimizer step. It returns True if steps are local, so that gradients need not be
        averaged. Its argument is True if the step must be counted now, because its gradients come from no exchange and no
        counted backward pass."""
        self.remove = watch(self._before_step, self._after_step)

    def exchanged(self) -> None:
        """Counts an exchange, in which all parameters take part. Under local steps it counts a backward pass that belongs to a
        step."""
        self._exchanges += 1
        self.own.clear()

    def check(self) -> None:
        """Checks parameters after a backward pass. Raises ValueError if a trained parameter is not averaged."""
        self._attached.check(self._latch)
        self._checked = True

    @property
    def step_is_running(self) -> bool:
        """True: an optimizer's step is running now, for example because its closure calls backward()."""
        return bool(self.held.stepping())

    def awaits_step(self, optimizer: Any) -> bool:
        """Returns True if this optimizer has not stepped since the last exchange."""
        return any(self._stepped_at[number] < self._exchanges for number in self.held.parameter_numbers(optimizer))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        mine = self.held.parameter_numbers(optimizer)
        if mine and in_backward():
            raise InvalidState("E-STEP-IN-BACKWARD",
                               f"{type(optimizer).__name__} updates {self._names[mine[0]]} inside backward, with this "
                               f"rank's own gradient: {STEP_AFTER_BACKWARD}")
        if not self._checked:
            self._attached.check(self._latch, None if mine else optimizer)
        self._local_parameters.look(optimizer)
        if not mine:
            return
        self._checked = False
        if not self.step_is_running:  # an optimizer may call another
            closure = find_closure(args, kwargs)
            late = self._late(optimizer, mine, self._stepped_at, self._applied)
            if closure is not None:
                self._begun = [*self._stepped_at], self._applied.copy()
            counts = bool(late or closure is not None) and not self.awaits_step(optimizer)
            if not self.local_step(counts) and closure is None:
                self._refuse_unaveraged(optimizer, mine, late)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not (mine := self.held.parameter_numbers(optimizer)):
            return
        if not self.step_is_running and find_closure(args, kwargs) is not None:
            # An exchange that the closure made counts. A nested step used the same gradients, so what counted before this step
            # decides.
            self._refuse_unaveraged(optimizer, mine, self._late(optimizer, mine, *self._begun))
        for number in mine:
            self._stepped_at[number] = self._exchanges
        self._applied[optimizer] = self._sample_gradients(mine)

    def _late(self, optimizer: Optimizer, mine: Sequence[int], stepped_at: Sequence[int], applied: Applied) -> list[int]:
        """Returns the numbers of the parameters whose gradients have not taken part in an exchange since their last optimizer
        step, or not completely. Empty if another optimizer, such as a preconditioner, has already stepped with the same
        gradients."""
        others = [witnesses for one, witnesses in applied.items() if one is not optimizer]
        if others and (witnesses := self._sample_gradients(mine)) and witnesses in others:
            return []
        return [n for n in mine if (stepped_at[n] >= self._exchanges or n in self.own)
                and self._parameters[n].grad is not None]

    def _refuse_unaveraged(self, optimizer: Optimizer, mine: Sequence[int], late: Sequence[int]) -> None:
        """Raises ValueError, also passed to `latch`, if the optimizer is about to apply gradients that were not averaged since
        its last step."""
        if not late:
            return
        if (witnesses := self._sample_gradients(mine)) and witnesses == self._applied.get(optimizer):
            return
        if not (own := [n for n in late if _any(self._parameters[n].grad)]):
            return
        p, name = self._parameters[own[0]], self._names[own[0]]
        if p.dtype != self._dtypes[own[0]]:
            before, now = (str(dtype).removeprefix("torch.") for dtype in (self._dtypes[own[0]], p.dtype))
            error = InvalidInput("E-MODEL-CHANGED",
                                 f"parameter {name} had dtype {before} when the model was attached, but has {now} now, so "
                                 "its gradient is not averaged; call session.close(), then attach again")
        elif own[0] in self.own and self._stepped_at[own[0]] < self._exchanges:
            more = f" and those of {len(own) - 1} others" if len(own) > 1 else ""
            error = InvalidInput("E-GRADIENT-LOCAL",
                                 f"a backward pass inside no_sync() added to the gradient of {name}{more} after it was "
                                 f"averaged, so each rank would apply its own sum; {REMEDY_LAST}")
        else:
            more = f", nor those of {len(own) - 1} others" if len(own) > 1 else ""
            error = InvalidInput("E-GRADIENT-LOCAL",
                                 f"the gradient of {name} was not averaged since the last step of its optimizer{more}, so "
                                 f"each rank would apply its own gradient; {REMEDY_LOCAL}")
        self._latch(error)
        raise error

    def _sample_gradients(self, mine: Sequence[int]) -> list[Gradient]:
        """Returns the identities of some of these parameters' gradients. These identities are enough to detect that a script
        has replaced gradients."""
        chosen = mine[::max(1, len(mine) // WITNESSES)]
        return [(n, id(grad), grad._version) for n in chosen if (grad := self._parameters[n].grad) is not None]


def _not_local(_whole: bool) -> bool:
    return False


def _any(grad: torch.Tensor | None) -> bool:
    """Returns True if the gradient has nonzero values; False for a placeholder of an average that has not arrived."""
    if grad is None or isinstance(grad, GradientMark):
        return False
    return bool((grad._values() if grad.is_sparse else grad).any())

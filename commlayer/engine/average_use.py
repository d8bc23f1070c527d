"""Finds out what became of a step's averages: applied, added to, or thrown away. Knows parameters and torch's optimizers.

What an exchange coded is final once an optimizer has stepped with its averages, or a further backward pass has added to them.
Where they are cleared without either (a GAN's generator loss that runs through the discriminator, a probe, a step that a
scaler skips), that is reported, so that the exchange can be taken back. What is written inside an optimizer's step is its own.

Whether gradients are cleared cannot be seen when it happens. So it is looked at when a tensor's next gradient is about to be
added, or an optimizer is about to step with it: then `.grad` is still what was left, gone, or zeros. That takes two hooks on
every parameter, which are there only while a plan keeps something back: where results are the gradients themselves, nothing
could be taken back. Numbers are read only of gradients that were written to since (clipping does that, too), and of these
seldom more than one tensor.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from commlayer.engine.hooks import uncompiled
from commlayer.engine.optimizer_steps import Held, watch

log = logging.getLogger("commlayer")

NOBODY_STEPS = (
    "gradients were cleared without a step of a torch optimizer, and none that holds these parameters is known: their averages "
    "count as applied. Put backward passes whose gradients are thrown away into session.no_sync(), or name an optimizer"
)
BY_LOSS = (
    "LBFGS with line_search_fn=%r goes by the loss that its closure returns: return the mean over all ranks (all-reduce it), "
    "or ranks make unequal numbers of backward passes to a step, and average gradients of different steps"
)


SMALL_NUMEL = 1 << 12
"""Below it an average may well be zeros, where few entries are sent."""


class AverageUse:
    """Of one model's parameters."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizer: Any, cleared: Callable[[int], None],
        applied: Callable[[Collection[int]], None], anything: Callable[[int], bool], held: Held | None = None,
    ) -> None:
        """`cleared(number)` hears of a tensor whose average was thrown away, `applied(numbers)` of those that were stepped.
        `anything(number)`: whether that average was other than zeros."""
        self._parameters, self._cleared, self._applied, self._anything = parameters, cleared, applied, anything
        self._held = held or Held(parameters)
        self._open: dict[int, int] = {}
        """Tensors with an average whose use is not known yet, and the version of `.grad` that it is."""
        self.touched: set[int] = set()
        """Tensors that some backward pass has added a gradient to since the last exchange."""
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._known: set[int] = set()
        """Tensors that some optimizer holds, so that it is seen when they are stepped."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self._meet(optimizer)
        self._said = False
        self._end_watch = watch(self._before_step, self._after_step)
        self._of_parameters: list[Any] = []

    @property
    def watching(self) -> bool:
        """Whether it sees gradients being added, and has since the pass began: it does not in the first."""
        return bool(self._of_parameters)

    def wrote(self, *, keeps: bool, known: Collection[int] = ()) -> None:
        """A step is over, its averages are in `.grad`. `keeps`: part of it could be taken back, so it matters what becomes of
        them, except of those of which that is `known` already."""
        self.touched.clear()
        self._open.clear()
        if keeps != self.watching:
            self._watch() if keeps else self._look_away()
        if keeps:
            final = frozenset(known).union(*map(self._held.by, self._held.stepping()))
            self._open = {n: p.grad._version for n, p in enumerate(self._parameters) if p.grad is not None and n not in final}

    def _watch(self) -> None:
        for number, p in enumerate(self._parameters):
            if p.requires_grad:
                self._of_parameters.append(p.register_hook(uncompiled(functools.partial(self._before_adding, number))))
                self._of_parameters.append(p.register_post_accumulate_grad_hook(
                    uncompiled(functools.partial(self._added, number))))

    def _look_away(self) -> None:
        for handle in self._of_parameters:
            handle.remove()
        self._of_parameters.clear()

    def settle(self) -> None:
        """Reports what has been cleared by now."""
        for number in [n for n in self._open if self._gone(n)]:
            self._report(number)

    def end(self) -> None:
        """Gradients are about to be exchanged, also those to which this pass has added nothing."""
        self.settle()
        self._open.clear()

    def detach(self) -> None:
        self._end_watch()
        self._look_away()
        self._open.clear()

    def _before_adding(self, number: int, _gradient: torch.Tensor) -> None:
        if number in self._open and self._gone(number):
            self._report(number)

    def _added(self, number: int, _parameter: torch.Tensor) -> None:
        self.touched.add(number)
        self._open.pop(number, None)

    def _gone(self, number: int) -> bool:
        grad = self._parameters[number].grad
        if grad is None or grad._version == self._open[number]:
            return grad is None
        return not _any(grad)

    def _look(self, numbers: Iterable[int]) -> None:
        """Reports which of these were cleared, ahead of each step with them: it reads as few numbers as may be. Of those that
        were written to equally often one that is no zero speaks for all: who clips, or takes a scale out, writes to all."""
        alike: dict[int, list[int]] = {}
        for number in sorted(numbers):
            if (grad := self._parameters[number].grad) is None:
                self._report(number)
            elif times := grad._version - self._open[number]:
                alike.setdefault(times, []).append(number)
        zeroed = [its for its in alike.values() if self._zeros(its)]
        told = [any(map(self._anything, its)) for its in zeroed]
        for its, sure in zip(zeroed, told, strict=True):
            # Averages that came as zeros say nothing by themselves.
            if sure or (any(told) and len(zeroed) == len(alike)):
                for number in its:
                    self._report(number)

    def _zeros(self, numbers: Iterable[int]) -> bool:
        grads = [(p.grad, number) for number in numbers if (p := self._parameters[number]).grad is not None]
        grads.sort(key=lambda pair: (pair[0].numel() < SMALL_NUMEL, pair[0].numel(), pair[1]))
        return not any(_any(grad) for grad, _ in grads if grad is not None)

    def _report(self, number: int) -> None:
        del self._open[number]
        if number in self._known:
            self._cleared(number)
        elif not self._said:
            self._said = True
            log.warning("%s", NOBODY_STEPS)

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if mine := self._meet(optimizer):
            self._look(self._open.keys() & mine)  # what is gone it passes over, and with zeros it applies nothing

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if mine := self._held.by(optimizer):
            stepped = self._open.keys() & mine
            for number in stepped:
                del self._open[number]
            # A fused optimizer is called for a step that the scaler skips, too, and finds that out by itself.
            if not getattr(optimizer, "_step_supports_amp_scaling", False):
                self._applied(stepped)

    def _meet(self, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
        """The numbers of the parameters that it is about to step."""
        mine = self._held.by(optimizer)
        self._known.update(mine)
        if mine and optimizer not in self._met:
            self._met.add(optimizer)
            search = optimizer.param_groups[0].get("line_search_fn")
            if search and isinstance(optimizer, torch.optim.LBFGS):
                log.warning(BY_LOSS, search)
        return mine


def _any(grad: torch.Tensor) -> bool:
    """Whether it is anything but zeros."""
    return bool((grad._values() if grad.is_sparse else grad).any())

"""Detects how the script used a step's averages: applied by an optimizer, accumulated, or discarded.

An exchange becomes final once an optimizer has stepped with its averages, or a later backward pass has added to them. If the
script clears averages before that, this module reports it, and the exchange can be undone. Examples are a GAN's generator loss
that runs through the discriminator, a probe, and a step that a scaler skips. Writes inside an optimizer's step do not count.

Clearing a gradient triggers no hook. So `.grad` is checked later: when a tensor's next gradient is about to be added, or when
an optimizer is about to step with it. By then `.grad` is unchanged, None or zeros. The check needs two hooks on every
parameter. They are registered only while a codec of the plan keeps residuals; otherwise nothing could be undone. Values are
read only of gradients that were written to since (also by clipping), and of these seldom more than one tensor.
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
"""Smaller averages may well be all zeros if few entries are sent."""


class AverageUse:
    """Watches the parameters of one model."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizer: Any, cleared: Callable[[int], None],
        applied: Callable[[Collection[int]], None], anything: Callable[[int], bool], held: Held | None = None,
    ) -> None:
        """`cleared(number)` receives a tensor whose average was discarded, `applied(numbers)` those that an optimizer has
        applied. `anything(number)` returns whether that average had nonzero elements."""
        self._parameters, self._cleared, self._applied, self._anything = parameters, cleared, applied, anything
        self._held = held or Held(parameters)
        self._open: dict[int, int] = {}
        """Tensors whose average's use is not known yet, with the version of `.grad` that holds the average."""
        self.touched: set[int] = set()
        """Tensors to which a backward pass has added a gradient since the last exchange."""
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._known: set[int] = set()
        """Tensors held by a known optimizer, whose steps can be observed."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self._meet(optimizer)
        self._said = False
        self._end_watch = watch(self._before_step, self._after_step)
        self._of_parameters: list[Any] = []

    @property
    def watching(self) -> bool:
        """Whether the hooks are registered. They are not during the first backward pass."""
        return bool(self._of_parameters)

    def wrote(self, *, keeps: bool, known: Collection[int] = ()) -> None:
        """A step has ended and its averages are in `.grad`. `keeps`: part of the exchange could be undone, so the use of the
        averages matters. Tensors in `known` are known to be applied already."""
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
        """Reports the averages cleared so far."""
        for number in [n for n in self._open if self._gone(n)]:
            self._report(number)

    def discard(self) -> None:
        """Averages that no optimizer has applied yet count as discarded: this rank has no further pass of its own."""
        for number in [*self._open]:
            self._report(number)

    def end(self) -> None:
        """The pass has ended and its gradients are about to be exchanged. Tensors without a gradient in this pass are checked
        now."""
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
        """Reports which of these were cleared. It runs before each optimizer step, so it reads few values. Tensors written to
        equally often form a group, and one nonzero tensor proves the group uncleared: clipping and unscaling write to all."""
        alike: dict[int, list[int]] = {}
        for number in sorted(numbers):
            if (grad := self._parameters[number].grad) is None:
                self._report(number)
            elif times := grad._version - self._open[number]:
                alike.setdefault(times, []).append(number)
        zeroed = [its for its in alike.values() if self._zeros(its)]
        nonzero = [any(map(self._anything, its)) for its in zeroed]
        for its, certain in zip(zeroed, nonzero, strict=True):
            # An average that arrived as zeros proves nothing by itself.
            if certain or (any(nonzero) and len(zeroed) == len(alike)):
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
            self._look(self._open.keys() & mine)  # the optimizer skips missing gradients and applies zeros without effect

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if mine := self._held.by(optimizer):
            stepped = self._open.keys() & mine
            for number in stepped:
                del self._open[number]
            # A fused optimizer is also called for a step that the scaler skips, and detects that by itself.
            if not getattr(optimizer, "_step_supports_amp_scaling", False):
                self._applied(stepped)

    def _meet(self, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
        """The numbers of the parameters that the optimizer is about to step."""
        mine = self._held.by(optimizer)
        self._known.update(mine)
        if mine and optimizer not in self._met:
            self._met.add(optimizer)
            search = optimizer.param_groups[0].get("line_search_fn")
            if search and isinstance(optimizer, torch.optim.LBFGS):
                log.warning(BY_LOSS, search)
        return mine


def _any(grad: torch.Tensor) -> bool:
    return bool((grad._values() if grad.is_sparse else grad).any())

"""Detects whether the script applied, accumulated or discarded a step's averages, and writes late averages.

An exchange becomes final once an optimizer has stepped with its averages, or a later backward pass has added to them. If the
script clears averages before that, this module reports them, and the exchange can be rolled back. Examples are a GAN's
generator loss that runs through the discriminator, a backward pass that only inspects gradients, and a step that a GradScaler
skips. Writes inside an optimizer's step do not count.

Clearing a gradient triggers no hook. `.grad` is therefore checked later: when a tensor's next gradient is about to be added, or
when an optimizer is about to step with it. By then a cleared `.grad` is None or zeros. The check needs two hooks on every
parameter. The hooks are registered only while a codec of the plan keeps residuals; without residuals there is nothing to roll
back. Values are read only from gradients that have been written since (also by clipping), and usually from one tensor only.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from commlayer.engine.hooks.callbacks import uncompiled, weakly
from commlayer.engine.model.optimizers import HeldParameters, watch
from commlayer.engine.model.shard_parameters import ShardParameter
from commlayer.engine.worker.worker import Worker

log = logging.getLogger("commlayer")
NOBODY_STEPS = (
    "gradients were cleared without a step of a torch optimizer, and commlayer knows no optimizer of these parameters: it "
    "treats their averages as applied. Run backward passes whose gradients are discarded inside session.no_sync(), or pass "
    "the optimizer to attach()"
)
BY_LOSS = (
    "LBFGS with line_search_fn=%r depends on the loss that its closure returns: return the mean over all ranks (all-reduce "
    "the loss). Otherwise ranks make unequal numbers of backward passes per step, and average gradients of different steps"
)
SMALL_NUMEL = 1 << 12
"""Number of elements below which all elements of an average can be zero by chance, if a sparse codec sends few entries."""


class AverageUse:
    """Observes whether the script applies or clears the averages in the gradients of one model's parameters."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizer: Any, worker: Callable[[], Worker], held: HeldParameters,
    ) -> None:
        """`worker` returns the current worker, which receives the reports of applied and cleared averages."""
        self._parameters, self._worker, self._held = parameters, worker, held
        self._open: dict[int, int] = {}
        """Maps tensor number to the version of `.grad` after its average was written, for each average that has been neither
        applied nor cleared yet."""
        self._met: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._known: set[int] = set()
        """Numbers of the tensors that some observed optimizer updates."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self._observe_optimizer(optimizer)
        self._said = False
        self._shards: dict[int, weakref.ref[torch.Tensor]] = {}
        """Maps the number of a sharded parameter to the gradient into which its average was written."""
        self._end_watch = watch(self._before_step, self._after_step)
        self._of_parameters: list[Any] = []

    @property
    def watching(self) -> bool:
        """True: hooks on the parameters are registered, which is not the case during the first backward pass."""
        return bool(self._of_parameters)

    def note_written(self, *, can_roll_back: bool, known: Collection[int] = ()) -> None:
        """Starts to observe the averages that a step has written into `.grad`. `can_roll_back`: True if part of the exchange
        can be rolled back. `known`: numbers of tensors whose averages have already been applied."""
        self._open.clear()
        if can_roll_back != self.watching:
            self._watch() if can_roll_back else self._remove_parameter_hooks()
        if can_roll_back:
            final = frozenset(known).union(*map(self._held.parameter_numbers, self._held.stepping()))
            self._open = {n: p.grad._version for n, p in enumerate(self._parameters) if p.grad is not None and n not in final}
            self._shards = {n: weakref.ref(grad) for n in self._open
                            if isinstance(p := self._parameters[n], ShardParameter) and (grad := p.grad) is not None}

    def _watch(self) -> None:
        for number, p in enumerate(self._parameters):
            if p.requires_grad:
                self._of_parameters.append(p.register_hook(uncompiled(functools.partial(self._before_accumulation, number))))
                self._of_parameters.append(p.register_post_accumulate_grad_hook(uncompiled(weakly(self._added, number))))

    def _remove_parameter_hooks(self) -> None:
        for handle in self._of_parameters:
            handle.remove()
        self._of_parameters.clear()

    def settle(self) -> None:
        """Reports to the worker the averages that the script has cleared so far."""
        for number in [n for n in self._open if self._was_cleared(n)]:
            self._report(number)

    def discard(self) -> None:
        """Reports all averages that no optimizer has applied yet as discarded, because this rank has no further backward pass.
        """
        for number in [*self._open]:
            self._report(number)

    def end(self) -> None:
        """Ends the observation at the end of a backward pass, before its gradients are exchanged: reports cleared averages, and
        forgets the others."""
        self.settle()
        self._open.clear()

    def detach(self) -> None:
        self._end_watch()
        self._remove_parameter_hooks()
        self._open.clear()

    def _before_accumulation(self, number: int, _gradient: torch.Tensor) -> None:
        if number in self._open and self._was_cleared(number):
            self._report(number)

    def _added(self, number: int, _parameter: torch.Tensor) -> None:
        if number in self._shards:
            self._added_to_shard(number)
        self._open.pop(number, None)

    def _added_to_shard(self, number: int) -> None:
        """Reports cleared averages. FSDP calls no hook before it adds to a gradient, so this method runs after the first
        gradient has changed. If the script cleared that gradient in place, this is not noticed."""
        written, self._shards = self._shards[number](), {}
        if number in self._open and written is not self._parameters[number].grad:
            self._report(number)
        for other in [n for n in self._open if n != number and self._was_cleared(n)]:
            self._report(other)

    def _was_cleared(self, number: int) -> bool:
        grad = self._parameters[number].grad
        if grad is None or grad._version == self._open[number]:
            return grad is None
        return not _any(grad)

    def _check_cleared(self, numbers: Iterable[int]) -> None:
        """Reports which averages of the given tensors were cleared. The check runs before each optimizer step, so it reads few
        values. Tensors whose `.grad` was written equally often form a group. One nonzero tensor shows that its group was not
        cleared, because clipping and unscaling write to all tensors."""
        alike: dict[int, list[int]] = {}
        for number in sorted(numbers):
            if (grad := self._parameters[number].grad) is None:
                self._report(number)
            elif times := grad._version - self._open[number]:
                alike.setdefault(times, []).append(number)
        zeroed = [group for group in alike.values() if self._zeros(group)]
        nonzero = [any(map(self._worker().any_nonzero, group)) for group in zeroed]
        for group, certain in zip(zeroed, nonzero, strict=True):
            # If the received average was all zeros, a `.grad` of zeros does not prove that the script cleared it.
            if certain or (any(nonzero) and len(zeroed) == len(alike)):
                for number in group:
                    self._report(number)

    def _zeros(self, numbers: Iterable[int]) -> bool:
        grads = [(p.grad, number) for number in numbers if (p := self._parameters[number]).grad is not None]
        grads.sort(key=lambda pair: (pair[0].numel() < SMALL_NUMEL, pair[0].numel(), pair[1]))
        return not any(_any(grad) for grad, _ in grads if grad is not None)

    def _report(self, number: int) -> None:
        del self._open[number]
        if number in self._known:
            self._worker().mark_discarded(number)
        elif not self._said:
            self._said = True
            log.warning("%s", NOBODY_STEPS)

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if mine := self._observe_optimizer(optimizer):
            # the optimizer skips missing gradients and applies zeros without effect
            self._check_cleared(self._open.keys() & mine)

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if mine := self._held.parameter_numbers(optimizer):
            stepped = self._open.keys() & mine
            for number in stepped:
                del self._open[number]
            # A fused optimizer's step is also called if the GradScaler skips it; the optimizer then updates nothing.
            if not getattr(optimizer, "_step_supports_amp_scaling", False):
                self._worker().mark_applied(stepped)

    def _observe_optimizer(self, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
        """Starts to observe an optimizer that is about to step. Returns the numbers of the parameters that it will update."""
        mine = self._held.parameter_numbers(optimizer)
        self._known.update(mine)
        if mine and optimizer not in self._met:
            self._met.add(optimizer)
            search = optimizer.param_groups[0].get("line_search_fn")
            if search and isinstance(optimizer, torch.optim.LBFGS):
                log.warning(BY_LOSS, search)
        return mine


def _any(grad: torch.Tensor) -> bool:
    return bool((grad._values() if grad.is_sparse else grad).any())


def averaging_targets(worker: Worker, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor | None]:
    """Returns the tensors into which to write averages: `.grad`; a new tensor if only other ranks had a gradient. The entry is
    None if no rank had a gradient."""
    pairs = zip(parameters, worker.used(), strict=False)
    return [None if not anyone else torch.empty_like(p) if p.grad is None else p.grad for p, anyone in pairs]


def hand_out(worker: Worker, parameters: Sequence[nn.Parameter]) -> bool:
    """Waits for averages that are applied one step late and writes them into `.grad`; all other gradients become None. Returns
    True if there were any such averages."""
    worker.drain()
    grads = averaging_targets(worker, parameters)
    has_late = any(grad is not None for grad in grads)
    if has_late:
        for grad in grads:
            if grad is not None:
                grad.detach().zero_()
        worker.hand_out([*grads, *[None] * (len(worker.job.tensors) - len(grads))])
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
    return has_late

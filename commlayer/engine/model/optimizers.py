"""Calls functions around every optimizer step, and finds which optimizers hold which parameters.

One pair of torch's global optimizer hooks serves all these functions.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from commlayer.callbacks import ignore
from commlayer.engine.model.shard_parameters import original_parameter

Call = Callable[[Optimizer, Any, Any], None]
"""Function to call before or after a step. It receives the optimizer and the step's arguments: a tuple that starts with the
optimizer, and a dict."""
Weak = Callable[[], Call | None]


class _Watcher(NamedTuple):
    before: Weak
    after: Weak


class _Step(NamedTuple):
    thread: int
    optimizer: weakref.ref[Optimizer]


_watchers: list[_Watcher] = []
_handles: list[Any] = []
_running: list[_Step] = []
"""Optimizer steps that are running now, in all threads; outer steps precede steps inside them."""


def watch(before: Call | None = None, after: Call | None = None) -> Callable[[], None]:
    """Calls `before` and `after` around every optimizer step of this process. Returns a function that ends these calls.
    Functions are called in the order in which they were added.

    Both arguments are methods. They are referenced weakly, so a session that a script drops is freed with its model.
    """
    watcher = _Watcher(ignore if before is None else weakref.WeakMethod(before),
                       ignore if after is None else weakref.WeakMethod(after))
    if not _handles:
        _handles[:] = [register_optimizer_step_pre_hook(torch.compiler.disable(_before)),
                       register_optimizer_step_post_hook(torch.compiler.disable(_after))]
    _watchers.append(watcher)

    def end() -> None:
        _watchers[:] = [each for each in _watchers if each is not watcher]
        if not _watchers:
            for handle in _handles:
                handle.remove()
            _handles.clear()
            _running.clear()

    return end


class HeldParameters:
    """Returns which of a model's parameters belong to an optimizer, by parameter number. While functions added by `watch`
    exist, also returns which optimizers of these parameters are inside a step."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._numbers = {id(original_parameter(p)): number for number, p in enumerate(parameters)}
        self._by: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], tuple[int, ...]]] = weakref.WeakKeyDictionary()

    def parameter_numbers(self, optimizer: Any) -> tuple[int, ...]:
        """Returns the numbers of the parameters that belong to the optimizer, in the optimizer's order. Empty if the argument
        is not an optimizer."""
        ids = [*map(id, chain.from_iterable(group["params"] for group in getattr(optimizer, "param_groups", ())))]
        known, numbers = self._by.get(optimizer, (None, ()))
        if known != ids:
            numbers = tuple(self._numbers[i] for i in ids if i in self._numbers)
            if isinstance(optimizer, Optimizer):
                self._by[optimizer] = ids, numbers
        return numbers

    def stepping(self) -> list[Optimizer]:
        """Returns the optimizers with some of these parameters that are inside a step; outer steps precede steps inside them.
        """
        inside = (step.optimizer() for step in tuple(_running))
        return [optimizer for optimizer in inside if optimizer is not None and self.parameter_numbers(optimizer)]


def find_closure(args: Any, kwargs: Any) -> Any:
    """Returns the closure among the arguments of an optimizer's step. Returns None if there is no closure. Backward passes of
    the closure are part of the step."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)



def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    thread = threading.get_ident()
    if any(step.thread == thread for step in _running) and not _nested():
        _running[:] = [step for step in _running if step.thread != thread]  # an earlier step has raised
    for watcher in tuple(_watchers):
        if (call := watcher.before()) is not None:
            call(optimizer, args, kwargs)
    _running.append(_Step(thread, weakref.ref(optimizer)))


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    thread, place = threading.get_ident(), len(_running)
    while place:
        place -= 1
        if _running[place].thread == thread and _running[place].optimizer() is optimizer:
            # A step that was called inside this one and raised an exception has not been removed yet.
            _running[place:] = [step for step in _running[place:] if step.thread != thread]
            break
    for watcher in tuple(_watchers):
        if (call := watcher.after()) is not None:
            call(optimizer, args, kwargs)


def _nested() -> bool:
    """Returns True if the step that is beginning was called by another optimizer's step."""
    frame: FrameType | None = sys._getframe()
    steps = 0
    while frame is not None:
        steps += frame.f_code.co_filename == torch_optimizer.__file__ and frame.f_code.co_name == "wrapper"
        frame = frame.f_back
    return steps > 1

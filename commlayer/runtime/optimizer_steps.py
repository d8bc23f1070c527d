"""Calls watchers before and after every step of a torch optimizer. One pair of torch's global hooks serves all watchers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Call = Callable[[Optimizer, Any, Any], None]
"""Takes the optimizer, and the arguments of its step: positional ones with the optimizer first, then those by name."""
Weak = Callable[[], Call | None]


class _Watcher(NamedTuple):
    before: Weak
    after: Weak


_watchers: list[_Watcher] = []
_handles: list[Any] = []


def watch(before: Call | None = None, after: Call | None = None) -> Callable[[], None]:
    """Returns the function that ends the watch. The calls come in the order in which watchers came.

    Both are methods. A watch keeps no object alive, so a session that a script drops goes with its model.
    """
    watcher = _Watcher(_nothing if before is None else weakref.WeakMethod(before),
                       _nothing if after is None else weakref.WeakMethod(after))
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

    return end


def closure_of(args: Any, kwargs: Any) -> Any:
    """The closure among the arguments of a step, whose backward passes are part of that step. None without one."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _nothing() -> None:
    return None


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in tuple(_watchers):
        if (call := watcher.before()) is not None:
            call(optimizer, args, kwargs)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in tuple(_watchers):
        if (call := watcher.after()) is not None:
            call(optimizer, args, kwargs)

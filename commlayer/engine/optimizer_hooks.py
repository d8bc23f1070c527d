"""Calls members before and after each step of one optimizer, through torch's hooks.

Members may join and leave inside a step, as when a sync mode changes after an exchange; torch's own hooks may not. Without
members there are no hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.optim import optimizer as torch_optimizer

from commlayer.engine.other_names import ours

Call = Callable[[Any, Sequence[Any], dict[str, Any]], None]


def _nothing(_optimizer: Any, _args: Sequence[Any], _kwargs: dict[str, Any]) -> None:
    """Default of a call: nothing."""


class Around(NamedTuple):
    """The calls of one member around a step."""

    before: Call = _nothing
    """Before the script's own hooks, and before clipping."""
    first: Call = _nothing
    """After the step, before the script's own hooks."""
    last: Call = _nothing
    """After the hooks that existed when this member joined."""


class OptimizerHooks:
    """For one optimizer. Reads nothing of it before a member joins."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._members: list[Around] = []
        self._handles: list[Any] = []
        self._stepping = False

    @property
    def others(self) -> bool:
        """Whether hooks other than commlayer's run before steps; these may read gradients."""
        called = (self._optimizer._optimizer_step_pre_hooks, torch_optimizer._global_optimizer_pre_hooks)
        return not all(ours(hook) for hooks in called for hook in hooks.values())

    def join(self, around: Around) -> None:
        self._members.append(around)
        if self._handles:
            return
        optimizer = self._optimizer
        before, first = optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._first)
        for hooks, handle in ((optimizer._optimizer_step_pre_hooks, before), (optimizer._optimizer_step_post_hooks, first)):
            hooks.move_to_end(handle.id, last=False)
        self._handles += [before, first, optimizer.register_step_post_hook(self._last)]

    def leave(self, around: Around) -> None:
        self._members = [each for each in self._members if each is not around]
        if not self._members and not self._stepping:
            self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._stepping = True
        try:
            for each in tuple(self._members):
                each.before(optimizer, args, kwargs)
        except BaseException:
            self._stepping = False  # there will be no step
            raise

    def _first(self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        for each in tuple(self._members):
            each.first(optimizer, args, kwargs)

    def _last(self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            for each in tuple(self._members):
                each.last(optimizer, args, kwargs)
        finally:
            self._stepping = False
            # torch iterates over the hooks while it calls them, so they may be removed only in the last one.
            if not self._members and self._handles[-1].id == next(reversed(self._optimizer._optimizer_step_post_hooks)):
                self._remove()

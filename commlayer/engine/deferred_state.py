"""Makes reads of an optimizer's `state` wait while updates of some parameters are pending.

The optimizer object stays the same. Its class is replaced by a subclass whose `state` first waits and then restores the class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

_waits: WeakKeyDictionary[Optimizer, Callable[[], None]] = WeakKeyDictionary()
"""By optimizer, the function that the first use of its state calls."""


class _Deferred:
    @property
    def state(self) -> Any:
        return vars(_fetched(self))["state"]

    @state.setter
    def state(self, value: Any) -> None:
        vars(_fetched(self))["state"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _fetched(self).__reduce_ex__(protocol)


@functools.cache
def _deferred(kind: type) -> type:
    return type(kind.__name__, (_Deferred, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def defer_state(optimizer: Optimizer, wait: Callable[[], None]) -> None:
    """From now on `wait()` is called before the first use of its state."""
    if optimizer not in _waits:
        _waits[optimizer] = wait
        kind: Any = type(optimizer)
        optimizer.__class__ = _deferred(kind)


def undefer_state(optimizer: Any) -> None:
    """Called when no update is pending."""
    _waits.pop(optimizer, None)
    if isinstance(optimizer, _Deferred):
        optimizer.__class__ = type(optimizer).__mro__[2]


def _fetched(optimizer: Any) -> Any:
    wait = _waits.get(optimizer)
    if wait is not None:
        wait()
    undefer_state(optimizer)
    return optimizer

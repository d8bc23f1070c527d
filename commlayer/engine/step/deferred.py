"""Makes reads of an optimizer's `state`, and of tensors, wait while their new values are pending."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

_waiting_method: WeakKeyDictionary[Optimizer, Callable[[], None]] = WeakKeyDictionary()
"""Maps an optimizer to the function that the first use of its state calls."""


class _DeferredState:
    @property
    def state(self) -> Any:
        return vars(_fetched(self))["state"]

    @state.setter
    def state(self, value: Any) -> None:
        vars(_fetched(self))["state"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _fetched(self).__reduce_ex__(protocol)


@functools.cache
def _deferred_class(kind: type) -> type:
    return type(kind.__name__, (_DeferredState, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def defer_state(optimizer: Optimizer, wait: Callable[[], None]) -> None:
    """Makes the first use of the optimizer's state call `wait()`."""
    if optimizer not in _waiting_method:
        _waiting_method[optimizer] = wait
        kind: Any = type(optimizer)
        optimizer.__class__ = _deferred_class(kind)


def undefer_state(optimizer: Any) -> None:
    """Ends `defer_state`: use of the optimizer's state no longer waits. Called when no update is pending."""
    _waiting_method.pop(optimizer, None)
    if isinstance(optimizer, _DeferredState):
        optimizer.__class__ = type(optimizer).__mro__[2]


def _fetched(optimizer: Any) -> Any:
    wait = _waiting_method.get(optimizer)
    if wait is not None:
        wait()
    undefer_state(optimizer)
    return optimizer


_waits: Any = WeakIdKeyDictionary()
"""Maps a deferred tensor to the function that its first use calls."""
_T: Any = torch.Tensor
_ATTRIBUTES = (
    _T.grad, _T.shape, _T.dtype, _T.device, _T.layout, _T.requires_grad, _T.is_leaf, _T.ndim, _T.grad_fn, _T._version,
    _T.is_cuda, _T.is_cpu, _T.is_sparse,
)
_HARMLESS: set[Any] = {
    *(attribute.__get__ for attribute in _ATTRIBUTES), _T.grad.__set__, _T.requires_grad.__set__, _T.requires_grad_,
    _T.size, _T.dim, _T.numel, _T.nelement, _T.stride, _T.is_contiguous, _T.is_floating_point, _T.is_complex, _T.element_size,
    _T.register_hook, _T.register_post_accumulate_grad_hook, _T.get_device, _T.__len__,
}
"""Functions of torch that do not read a tensor's contents, so calling them on a deferred tensor does not wait."""


class _Deferred:
    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            for tensor in _deferred([*args, *kwargs.values()]):
                _fetch(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # torch's versions use the class before they read the contents, so the class must be restored first.
    def __deepcopy__(self, memo: Any) -> Any:
        return _fetch(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _fetch(self).__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:
        return str(_fetch(self).__repr__(**kwargs))


class _DeferredParameter(_Deferred, nn.Parameter):  # type: ignore[misc]
    pass


class _DeferredTensor(_Deferred, torch.Tensor):  # type: ignore[misc]
    pass


_CLASSES: dict[type, type] = {nn.Parameter: _DeferredParameter, torch.Tensor: _DeferredTensor}
_OWN = {deferred: own for own, deferred in _CLASSES.items()}


def defer(tensor: torch.Tensor, wait: Callable[[], None]) -> bool:
    """Makes the first use of the tensor call `wait()`, which must also end the deferral. Returns False if this kind of tensor
    cannot be deferred."""
    if type(tensor) not in _CLASSES:
        return False
    _waits[tensor] = wait
    tensor.__class__ = _CLASSES[type(tensor)]
    return True


def undefer(tensor: torch.Tensor) -> None:
    """Ends the deferral of a tensor: its use no longer waits. Called when its new value has been written, or will never be."""
    if type(tensor) in _OWN:
        tensor.__class__ = _OWN[type(tensor)]
        _waits.pop(tensor, None)


def _fetch(tensor: Any) -> Any:
    wait = _waits.get(tensor)
    if wait is not None:
        wait()
    undefer(tensor)
    return tensor


def _deferred(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, _Deferred):
            yield value  # type: ignore[misc]
        elif isinstance(value, list | tuple):
            yield from _deferred(value)
        elif isinstance(value, dict):
            yield from _deferred([*value.values()])

"""Makes reads of an optimizer's `state`, and of tensors, wait while their new values are pending."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

_waits: Any = WeakIdKeyDictionary()
"""Maps a deferred tensor or optimizer to the function that its first use calls."""


class _Deferred:
    """Base class of the temporary classes of deferred objects. The second base of such a class is the object's own class."""

    # The own class's methods read the class first, then the contents. _fetch() therefore restores the class before the call.
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _fetch(self).__reduce_ex__(protocol)


class _DeferredState(_Deferred):
    @property
    def state(self) -> Any:
        return vars(_fetch(self))["state"]

    @state.setter
    def state(self, value: Any) -> None:
        vars(_fetch(self))["state"] = value


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
"""Functions of torch that do not read a tensor's contents. Calling them on a deferred tensor therefore does not wait."""


class _DeferredTensor(_Deferred):
    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            for tensor in _find_deferred([*args, *kwargs.values()]):
                _fetch(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return _fetch(self).__deepcopy__(memo)

    def __repr__(self, **kwargs: Any) -> str:
        return str(_fetch(self).__repr__(**kwargs))


@functools.cache
def _deferred_class(kind: type) -> type:
    base = _DeferredState if issubclass(kind, Optimizer) else _DeferredTensor
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


def defer(value: torch.Tensor | Optimizer, wait: Callable[[], None]) -> bool:
    """Makes the first use of a tensor, or of an optimizer's state, call `wait()`, which must also end the deferral. Returns
    False if this kind of tensor cannot be deferred."""
    if value not in _waits:
        kind: Any = type(value)
        if kind not in (nn.Parameter, torch.Tensor) and not issubclass(kind, Optimizer):
            return False
        value.__class__ = _deferred_class(kind)
    _waits[value] = wait
    return True


def undefer(value: Any) -> None:
    """Ends the deferral: uses no longer wait. Called when the new value has been written, or will never be."""
    if isinstance(value, _Deferred):
        value.__class__ = type(value).__bases__[1]
        _waits.pop(value, None)


def _fetch(value: Any) -> Any:
    wait = _waits.get(value)
    if wait is not None:
        wait()
    undefer(value)
    return value


def _find_deferred(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, _DeferredTensor):
            yield value  # type: ignore[misc]
        elif isinstance(value, list | tuple):
            yield from _find_deferred(value)
        elif isinstance(value, dict):
            yield from _find_deferred([*value.values()])

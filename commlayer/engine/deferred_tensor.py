"""Makes reads of a tensor wait while its new value is pending.

The tensor object stays the same. Its class is replaced by a subclass that intercepts each use (`__torch_function__`, a protocol
of torch) and restores the class before the use continues. Reads of shape, type or `.grad` do not wait. Only plain tensors and
parameters can be deferred. Compiled code, and C++ code that is not called through torch's functions, is not intercepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

_waits: Any = WeakIdKeyDictionary()
"""By deferred tensor, the function that its first use calls."""
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
"""Functions that do not read a tensor's contents."""


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
    """From now on `wait()` is called before the tensor's first use, which also ends the deferral. False if the tensor cannot be
    deferred."""
    if type(tensor) not in _CLASSES:
        return False
    _waits[tensor] = wait
    tensor.__class__ = _CLASSES[type(tensor)]
    return True


def undefer(tensor: torch.Tensor) -> None:
    """Called when the value has been written, or never will be."""
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

"""A device that is neither a CPU nor CUDA, as an Apple GPU is: only operations of torch reach its tensors. It has no float64.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
KEY = "PrivateUse1"
VIEWS = ("select.int", "slice.Tensor", "transpose.int", "permute", "unsqueeze", "squeeze", "squeeze.dim", "expand",
         "unbind.int", "split.Tensor", "split_with_sizes", "t", "diagonal", "unfold")
"""Operations for which torch would use the strides of a tensor, which only its memory has here."""
_registered: list[Any] = []
_memory: dict[int, torch.Tensor] = {}
"""Maps the address of a storage on the device to the tensor that has the contents. Entries of freed storages stay until their
address is used again."""


def register() -> None:
    """Adds the device to torch, in this process."""
    _setup_privateuseone_for_python_backend(NAME)
    every, views = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_call, KEY)
    for name in VIEWS:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        views.impl(name, functools.partial(_call, op), KEY)
    _registered.extend((every, views))


def _on_device(result: Any) -> Any:
    if not isinstance(result, torch.Tensor):
        return result
    if result.dtype == torch.float64:
        raise TypeError(f"{NAME} has no float64")
    tensor: Any = torch._C._acc.create_empty_tensor(result.shape, result.dtype)
    _memory[tensor.untyped_storage()._cdata] = result
    return tensor


def _on_host(argument: Any) -> Any:
    is_there = isinstance(argument, torch.Tensor) and argument.device.type == NAME
    return _memory[argument.untyped_storage()._cdata] if is_there else argument


def _call(op: Any, *args: Any, **named: Any) -> Any:
    """Runs any operation of torch on the memory of its tensors."""
    host, host_named = tree_map(_on_host, args), tree_map(_on_host, named)
    if op._schema.name in ("aten::_copy_from", "aten::_copy_from_and_resize"):
        host[1].copy_(host[0])
        return args[1]
    host = [torch.tensor(given) if isinstance(given, int | float) and str(argument.type) == "Tensor" else given
            for given, argument in zip(host, op._schema.arguments, strict=False)]  # torch has unwrapped the number
    to_host = "device" in named and torch.device(named["device"]).type == "cpu"
    if "device" in named:
        host_named = {**host_named, "device": torch.device("cpu")}
    result = op(*host, **host_named)
    written = [given for given, argument in zip(args, op._schema.arguments, strict=False) if _is_written(argument)]
    written += [named[argument.name] for argument in op._schema.arguments if argument.name in named and _is_written(argument)]
    for tensor in written:
        if isinstance(tensor, torch.Tensor) and tensor.shape != (memory := _on_host(tensor)).shape:
            tensor.data = _on_device(memory)  # the operation has chosen the size of its result
    if written:
        return None if not op._schema.returns else written[0] if len(written) == 1 else tuple(written)
    return result if to_host else tree_map(_on_device, result)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write

"""Tensors with shapes but without values, and a script that runs on them as on a machine with a GPU."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any] | None
T = TypeVar("T")
SMALL = 256
"""Tensors of up to this many elements that a script creates have values: scripts read them, such as the rates of stochastic
depth."""


class ShapeTensor(torch.Tensor):
    """A CPU tensor without values. Operations compute shapes, on `meta`."""

    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor) -> ShapeTensor:
        tensor: ShapeTensor = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, layout=meta.layout,
            device=torch.device("cpu"))
        tensor.meta = meta
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShapeTensor({list(self.shape)}, {self.dtype})"

    def __format__(self, form: str) -> str:
        return format(self.item(), form)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
        return memo[id(self)]  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        if func in FINITE:
            return torch.tensor(FINITE[func])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None,
    ) -> Any:
        return run(func, args, kwargs or {})


FINITE = {torch.isfinite: True, torch.isnan: False, torch.isinf: False,
          torch.Tensor.isfinite: True, torch.Tensor.isnan: False, torch.Tensor.isinf: False}
"""Absent values pass as finite ones."""


def run(func: Any, args: Args, kwargs: dict[str, Any]) -> Any:
    """Runs an operation: on shapes if any argument has no values."""
    if not any(isinstance(each, ShapeTensor) for each in tree_leaves((args, kwargs))):
        return func(*args, **kwargs)
    if func is aten._local_scalar_dense.default and args[0].is_floating_point():
        return math.nan  # for a log
    if _writes_in_place(func):
        return args[0]
    if func is aten.index.Tensor:
        args = (args[0], _places(args[1]))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
    result = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
    return return_and_correct_aliasing(func, args, kwargs, tree_map(_shape, result))


def _meta(value: Any) -> Any:
    if isinstance(value, ShapeTensor):
        return value.meta
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _shape(value: Any) -> Any:
    return ShapeTensor(value) if isinstance(value, torch.Tensor) else value


def _writes_in_place(func: Any) -> bool:
    """Returns whether an operation changes only the values of its first argument."""
    return func._schema.is_mutable and func._schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags


def _places(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices without masks, whose number of elements depends on values."""
    places: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8) and not isinstance(index, ShapeTensor):
            places += index.nonzero().unbind(1)
        else:
            places.append(index)
    return places


class ShapeMode(TorchDispatchMode):
    """Runs operations on shapes where values are absent."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, which takes longer than a count

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        return run(func, args, kwargs or {})


class _LargeWithoutValues(ShapeMode):
    """Creates large floating-point tensors without values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        kwargs = kwargs or {}
        if any(argument.name == "device" for argument in func._schema.arguments) and \
                not any(isinstance(each, torch.Tensor) for each in tree_leaves((args, kwargs))):
            meta = func(*args, **{**kwargs, "device": torch.device("meta")})
            if meta.is_floating_point() and meta.numel() > SMALL:
                return ShapeTensor(meta)
        return run(func, args, kwargs)


def without_values(made: Callable[[], tuple[nn.Module, T]]) -> tuple[nn.Module, T]:
    """The model that `made` returns, without values. If its constructor reads values, they are dropped after it."""
    try:
        with on_a_gpu(), _LargeWithoutValues():
            model, other = made()
    except Exception:
        with on_a_gpu():
            model, other = made()
    same: dict[int, nn.Parameter] = {}  # modules share parameters
    with ShapeMode():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in same:
                        same[id(parameter)] = nn.Parameter(_shape(_meta(parameter.detach())), parameter.requires_grad)
                    setattr(module, name, same[id(parameter)])
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = _shape(_meta(buffer))
    return model, other


CUDA = {"is_available": True, "is_bf16_supported": True, "device_count": 1, "current_device": 0, "set_device": None,
        "get_device_capability": (8, 6), "synchronize": None}
"""Functions of torch.cuda, and what they return `on_a_gpu`."""


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """Context manager that runs a script as on a machine with a GPU, so the script chooses the precision in which it will
    train. Its tensors are on the CPU."""
    with contextlib.ExitStack() as stack:
        for name, answer in CUDA.items():
            stack.enter_context(replaced(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        stack.enter_context(_without_compiler())
        stack.enter_context(on_cpu())
        yield


def _uncompiled(model: Any = None, **_: Any) -> Any:
    return model if model is not None else lambda function: function


class _Compiler(types.ModuleType):
    """Stands for torch's compiler until a script uses it."""

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)  # `inspect` looks at every module
        del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    """Context manager in which torch's functions on shapes do not import its compiler, only to disable it for themselves: the
    import takes longer than a count."""
    compiler = _Compiler("torch._dynamo")
    absent = sys.modules.setdefault(compiler.__name__, compiler) is compiler
    try:
        yield
    finally:
        if absent and sys.modules.get(compiler.__name__) is compiler:
            del sys.modules[compiler.__name__]


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Context manager in which devices "cuda" and their autocast mean the CPU, and nothing is compiled."""
    begin = torch.autocast.__init__

    def begin_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, _cuda_to_cpu(device_type), *args, **kwargs)

    with replaced(torch.autocast, "__init__", begin_on_cpu), replaced(torch, "compile", _uncompiled), _CudaIsCpu():
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        return func(*map(_cuda_to_cpu, args), **{name: _cuda_to_cpu(value) for name, value in (kwargs or {}).items()})


def _cuda_to_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value

"""Counts the work of a model's step: operations of matrix products, bytes of all other kernels, and kernels. The model has shapes
but no values, so a step needs neither time nor memory, and its count is the same on every machine.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from commlayer.autotune.measure.step_times import DrawnLoss, PassClock, StepHooks, kept_nbytes, room_nbytes, timing_at
from commlayer.engine.optimizers import job_of
from commlayer.errors import InvalidInput
from commlayer.planner.models import product_s, update_s
from commlayer.planner.tables import LAUNCH_S, stream_bytes_s
from commlayer.records import Job, Work

aten = torch.ops.aten
SMALL = 256
"""Tensors of up to this many elements that a script creates have values: scripts read them, such as the rates of stochastic
depth."""

Made = Callable[[], tuple[nn.Module, DrawnLoss]]


def counted_job(
    model: nn.Module, loss_of: DrawnLoss, made: Made, *, batch: int | None = None, name: str = "",
) -> tuple[Job, str]:
    """Returns the Job of a model without values, with its Timing on a V100, by one step of its loss function. The text is empty,
    or says why the step was computed with the values of the model that `made` returns."""
    try:
        with on_a_gpu():
            return _counted(model, loss_of, batch, name), ""
    except InvalidInput:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    # Weights and gradients; the step keeps activations, too.
    needed, room = 2 * sum(p.nbytes for p in model.parameters()), room_nbytes()
    if needed > room:
        raise InvalidInput("E-USER-CODE",
                           f"it reads values ({reason}), and with values it needs more than {needed / 1e9:.0f} GB of "
                           f"memory, of which {room / 1e9:.0f} GB are free: leave out what reads values, or measure the step "
                           f"where it trains (`commlayer profile {name}`)")
    with _on_cpu():
        return _counted(*made(), batch, name), reason


def without_values(made: Made) -> tuple[nn.Module, DrawnLoss]:
    """The model that `made` returns, without values. Where its constructor reads values, they are dropped after it."""
    try:
        with on_a_gpu(), _LargeWithoutValues():
            model, loss_of = made()
    except Exception:
        with on_a_gpu():
            model, loss_of = made()
    same: dict[int, nn.Parameter] = {}  # modules share parameters
    with _Shapes():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in same:
                        same[id(parameter)] = nn.Parameter(_shape(_meta(parameter.detach())), parameter.requires_grad)
                    setattr(module, name, same[id(parameter)])
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = _shape(_meta(buffer))
    return model, loss_of


def _counted(model: nn.Module, loss_of: DrawnLoss, batch: int | None, name: str) -> Job:
    counter = _Counter()
    with _replaced(torch.backends.mkldnn, "enabled", False), StepHooks(model, counter.now) as hooks, \
            kept_nbytes(model) as activation_nbytes, counter, _Layers(counter):
        clock = hooks.step(loss_of)
    total = clock.forward + clock.backward
    limit = int(np.argmax(total))  # the passes take as long as what limits them
    timing = timing_at(PassClock(*(each[..., limit] for each in clock)))
    job = job_of(model)
    trained = sum(tensor.numel for tensor in job.tensors if not tensor.buffer)
    return Job(job.tensors, batch, structs.replace(
        timing, update_s=update_s(trained), half=counter.half_s > total[0] / 2, activation_nbytes=activation_nbytes(),
        frozen_nbytes=float(sum(p.nbytes for p in model.parameters() if not p.requires_grad)), work=Work(*total.tolist())), name)


class ShapeTensor(torch.Tensor):
    """A CPU tensor without values. Operations compute shapes, on `meta`."""

    meta: torch.Tensor

    @staticmethod
    def __new__(cls, meta: torch.Tensor) -> ShapeTensor:
        tensor: ShapeTensor = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, meta.stride(), meta.storage_offset(), dtype=meta.dtype, layout=meta.layout, device="cpu")
        tensor.meta = meta
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"ShapeTensor({list(self.shape)}, {self.dtype})"

    def __format__(self, form: str) -> str:
        return format(self.item(), form)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = nn.Parameter(copy, self.requires_grad) if isinstance(self, nn.Parameter) else copy
        return memo[id(self)]  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in FINITE:
            return torch.tensor(FINITE[func])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _run(func, args, kwargs or {})


FINITE = {torch.isfinite: True, torch.isnan: False, torch.isinf: False}
"""Absent values pass as finite ones."""


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def _shape(value: Any) -> Any:
    return ShapeTensor(value) if isinstance(value, torch.Tensor) else value


def _writes_in_place(func: Any) -> bool:
    """Returns whether an operation changes only the values of its first argument."""
    return func._schema.is_mutable and func._schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags


def _meta(value: Any) -> Any:
    if isinstance(value, ShapeTensor):
        return value.meta
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _places(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Indices without masks, whose number of elements depends on values."""
    places: list[torch.Tensor | None] = []
    for index in indices:
        mask = index is not None and index.dtype in (torch.bool, torch.uint8) and not isinstance(index, ShapeTensor)
        places += index.nonzero().unbind(1) if mask and index is not None else [index]
    return places


class _Shapes(TorchDispatchMode):
    """Runs operations on shapes where values are absent."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, which takes longer than a count

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _run(func, args, kwargs or {})


class _LargeWithoutValues(_Shapes):
    """Creates large floating-point tensors without values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if any(arg.name == "device" for arg in func._schema.arguments) and \
                not any(isinstance(each, torch.Tensor) for each in tree_leaves((args, kwargs))):
            meta = func(*args, **{**kwargs, "device": torch.device("meta")})
            if meta.is_floating_point() and meta.numel() > SMALL:
                return ShapeTensor(meta)
        return _run(func, args, kwargs)


NO_KERNEL = {aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.empty, aten.empty_like, aten.empty_strided,
             aten.new_empty, aten.new_empty_strided, aten._local_scalar_dense, aten.sym_size, aten._reshape_alias}
CONVOLVING = {aten.convolution, aten.convolution_backward}
SELECTING = {aten.embedding, aten._embedding_bag, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward,
             aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward}
"""Operations that read only the elements that indices name: what they write counts."""
ATTENDING = {aten._scaled_dot_product_flash_attention_for_cpu: 2.0,
             aten._scaled_dot_product_flash_attention_for_cpu_backward: 5.0}
"""Products of queries and keys, or of the same size, in an attention that keeps no scores."""


class _Counter(_Shapes):
    """Counts what runs while it is active: in `Work`, the seconds on a V100."""

    def __init__(self) -> None:
        super().__init__()
        self._product_s = self._stream_nbytes = 0.0
        self.half_s = 0.0
        """Part of the seconds of products that is in half precision."""
        self.launches = 0

    def launched(self, kernels: int) -> None:
        self.launches += kernels

    def now(self) -> np.ndarray:
        return np.array([self._product_s, self._stream_nbytes / stream_bytes_s("v100"), self.launches * LAUNCH_S])

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = _run(func, args, kwargs or {})
        packet = func.overloadpacket
        if not func.is_view and packet not in NO_KERNEL:
            self.launches += 1
            if (flops := _flops(packet, args, kwargs or {}, result)) is not None:
                half = next(each.itemsize for each in args if isinstance(each, torch.Tensor)) < 4
                seconds = product_s(flops, convolution=packet in CONVOLVING, half=half)
                self._product_s += seconds
                self.half_s += seconds * half
            else:
                self._stream_nbytes += _nbytes(result) + (0 if packet in SELECTING else _nbytes((args, kwargs)))
        return result


def _flops(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float | None:
    """Operations of a matrix product, a convolution or an attention; None for other kernels."""
    if packet in ATTENDING:
        query, key = args[:2] if ATTENDING[packet] == 2 else args[1:3]
        return 2 * ATTENDING[packet] * query.numel() * key.shape[-2]
    count = flop_counter.flop_registry.get(packet)
    return None if count is None else float(count(*args, **kwargs, out_val=result))


def _nbytes(tensors: Any) -> int:
    return sum(each.numel() * each.itemsize for each in tree_leaves(tensors) if isinstance(each, torch.Tensor))


class _Layers(TorchFunctionMode):
    """Runs layers for which GPUs have kernels of their own in a form that costs as much: attention that keeps no scores, and
    recurrent layers, whose steps become samples of a single step."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention and isinstance(args[0], ShapeTensor) and args[0].dim() == 4:
            return _attention(*args[:3])
        if func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
            return self._recurrent(func, *args)
        return func(*args, **kwargs)

    def _recurrent(self, func: Any, x: torch.Tensor, *others: Any) -> Any:
        packed = isinstance(others[0], torch.Tensor) and not others[0].is_floating_point()
        hidden, (weights, biases, layers, *rest) = others[packed], others[packed + 1 :]
        samples = x.numel() // x.shape[-1]
        steps = len(others[0]) if packed else x.shape[1 if rest[-1] else 0]
        states = hidden if isinstance(hidden, (tuple, list)) else (hidden,)
        wide = tuple(state[:, :1].expand(-1, samples, -1) for state in states)
        wide_hidden = wide if isinstance(hidden, (tuple, list)) else wide[0]
        if packed:
            result, *last = func(x, torch.tensor([samples]), wide_hidden, weights, biases, layers, *rest)
        else:
            one_step = x.reshape((samples, 1, -1) if rest[-1] else (1, samples, -1))
            result, *last = func(one_step, wide_hidden, weights, biases, layers, *rest)
            result = result.reshape(*x.shape[:2], -1)
        launches = steps * len(weights) // (4 if biases else 2)
        self._counter.launched(launches)
        if result.requires_grad:
            result.register_hook(lambda _: self._counter.launched(2 * launches))
        return (result, *(state[:, : states[0].shape[1]] for state in last))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    if key.shape[1] != query.shape[1]:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    result: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
    return result


CUDA = {"is_available": True, "is_bf16_supported": True, "device_count": 1, "current_device": 0, "set_device": None,
        "get_device_capability": (8, 6), "synchronize": None}
"""Functions of torch.cuda, and what they return to a script that is counted."""


@contextlib.contextmanager
def on_a_gpu() -> Iterator[None]:
    """Context manager that runs a script as on a machine with a GPU, whose tensors are on the CPU: the script chooses the
    precision in which it will train."""
    with contextlib.ExitStack() as stack:
        for name, answer in CUDA.items():
            stack.enter_context(_replaced(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        stack.enter_context(_replaced(torch, "compile", lambda model=None, **_: model if model is not None else lambda one: one))
        stack.enter_context(_without_compiler())
        stack.enter_context(_on_cpu())
        yield


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
def _on_cpu() -> Iterator[None]:
    """Context manager in which devices "cuda" and their autocast mean the CPU."""
    begin = torch.autocast.__init__

    def begin_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, _cpu_of(device_type), *args, **kwargs)

    with _replaced(torch.autocast, "__init__", begin_on_cpu), _CudaIsCpu():
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        return func(*map(_cpu_of, args), **{name: _cpu_of(value) for name, value in (kwargs or {}).items()})


def _cpu_of(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value

"""Counts the work of a model's step: operations of matrix products, bytes of all other kernels, and kernels. The model has no
values, so a step needs neither time nor memory, and its count is the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

from commlayer.autotune.measure.batch_trial import room_nbytes
from commlayer.autotune.measure.shape_tensors import Args, Kwargs, ShapeMode, ShapeTensor, aten, on_a_gpu, on_cpu, replaced, run
from commlayer.autotune.measure.step_times import DrawnLoss, PassClock, StepHooks, described_step, timing_from_clock
from commlayer.engine.model.model_tensors import describe_model
from commlayer.errors import InvalidInput
from commlayer.planner.data.models import product_s, update_s
from commlayer.planner.data.tables import LAUNCH_S, stream_bytes_s
from commlayer.records import Job, Work

NO_KERNEL = {aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.empty, aten.empty_like,
             aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten._local_scalar_dense, aten._reshape_alias}
CONVOLVING = {aten.convolution, aten.convolution_backward}
SELECTING = {aten.embedding, aten._embedding_bag, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward,
             aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward}
"""Operations that read only the elements that indices name: what they write counts."""
ATTENDING = {aten._scaled_dot_product_flash_attention_for_cpu: 2,
             aten._scaled_dot_product_flash_attention_for_cpu_backward: 5}
"""Attention that keeps no scores: its number of products of the size of queries and keys."""


def counted_job(
    model: nn.Module, loss_of: DrawnLoss, made: Callable[[], tuple[nn.Module, DrawnLoss]], *, batch: int | None = None,
    name: str = "",
) -> tuple[Job, str]:
    """Returns the Job of a model whose tensors have no values, with its Timing on a V100, from one step of its loss function.
    If the step reads values, it is computed with the model that `made` returns, and the second result is the reason; otherwise
    that is empty."""
    try:
        with on_a_gpu():
            return _count_job(model, loss_of, batch, name), ""
    except InvalidInput:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    # Weights and gradients; the step keeps activations, too.
    needed, room = 2 * sum(p.nbytes for p in model.parameters()), room_nbytes()
    if needed > room:
        raise InvalidInput("E-USER-CODE",
                           f"it reads values ({reason}), and with values it needs more than {needed / 1e9:.3g} GB of memory, "
                           f"of which {room / 1e9:.3g} GB are free: leave out what reads values, or measure the step where "
                           f"it trains (`commlayer profile {name}`)")
    with on_cpu():
        return _count_job(*made(), batch, name), reason


def _count_job(model: nn.Module, loss_of: DrawnLoss, batch: int | None, name: str) -> Job:
    counter = _Counter()
    with replaced(torch.backends.mkldnn, "enabled", False), StepHooks(model, counter.now) as hooks, counter, _Layers(counter):
        clock, shown = described_step(hooks, model, loss_of)
    total = clock.forward + clock.backward
    limit = int(np.argmax(total))  # a pass takes as long as the slowest of its limits
    timing = timing_from_clock(PassClock(*(each[..., limit] for each in clock)))
    job = describe_model(model)
    trained = sum(tensor.numel for tensor in job.tensors if not tensor.buffer)
    return Job(job.tensors, batch, structs.replace(
        timing, update_s=update_s(trained), half=counter.half_s > counter.product_s / 2,
        work=Work(*total.tolist()), **shown), name)


class _Counter(ShapeMode):
    """Counts what runs while it is active: in `Work`, the seconds on a V100."""

    def __init__(self) -> None:
        super().__init__()
        self.product_s = self._stream_nbytes = 0.0
        self._kernels = 0
        self.half_s = 0.0
        """The part of the seconds of products that is in half precision."""

    def now(self) -> np.ndarray:
        return np.array([self.product_s, self._stream_nbytes / stream_bytes_s("v100"), self._kernels * LAUNCH_S])

    def launch(self, kernels: int = 1) -> None:
        self._kernels += kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        kwargs = kwargs or {}
        result, packet = run(func, args, kwargs), func.overloadpacket
        if func.is_view or packet in NO_KERNEL:
            return result
        self.launch()
        if (flops := _flops(packet, args, kwargs, result)) is not None:
            half = next(each.itemsize for each in args if isinstance(each, torch.Tensor)) < 4
            seconds = product_s(flops, convolution=packet in CONVOLVING, half=half)
            self.product_s += seconds
            self.half_s += seconds * half
        else:
            self._stream_nbytes += _nbytes(result) + (0 if packet in SELECTING else _nbytes((args, kwargs)))
        return result


def _flops(packet: Any, args: Args, kwargs: dict[str, Any], result: Any) -> float | None:
    """Operations of a matrix product, a convolution or an attention; None for other kernels."""
    if packet in ATTENDING:
        query, key = args[:2] if ATTENDING[packet] == 2 else args[1:3]
        return float(2 * ATTENDING[packet] * query.numel() * key.shape[-2])
    count = flop_counter.flop_registry.get(packet)
    return None if count is None else float(count(*args, **kwargs, out_val=result))


def _nbytes(tensors: Any) -> int:
    return sum(each.numel() * each.itemsize for each in tree_leaves(tensors) if isinstance(each, torch.Tensor))


class _Layers(TorchFunctionMode):
    """Replaces layers for which GPUs have special kernels by operations of the same cost. Attention then keeps no scores. The
    steps of a recurrent layer become samples of a single step."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention and len(args) > 2 and args[0].dim() == 4 and \
                isinstance(args[0], ShapeTensor):
            return _attention(*args[:3])
        if func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
            return self._recurrent(func, *args)
        return func(*args, **(kwargs or {}))

    def _recurrent(self, func: Any, x: torch.Tensor, *others: Any) -> Any:
        packed = isinstance(others[0], torch.Tensor) and not others[0].is_floating_point()
        hidden, (weights, biases, layers, *rest) = others[packed], others[packed + 1 :]
        samples = x.numel() // x.shape[-1]
        steps = len(others[0]) if packed else x.shape[1 if rest[-1] else 0]
        states = hidden if isinstance(hidden, tuple | list) else (hidden,)
        wide = tuple(state[:, :1].expand(-1, samples, -1) for state in states)
        if x.requires_grad or any(weight.requires_grad for weight in weights):  # steps pass gradients to the ones before
            wide = tuple(state if state.requires_grad else state.detach().requires_grad_() for state in wide)
        settings = (wide if isinstance(hidden, tuple | list) else wide[0], weights, biases, layers, *rest)
        if packed:
            result, *last = func(x, torch.tensor([samples]), *settings)
        else:
            result, *last = func(x.reshape((samples, 1, -1) if rest[-1] else (1, samples, -1)), *settings)
            result = result.reshape(*x.shape[:2], -1)
        kernels = steps * len(weights) // (4 if biases else 2)
        self._counter.launch(kernels)
        if result.requires_grad:
            result.register_hook(lambda _: self._counter.launch(2 * kernels))
        return (result, *(state[:, : states[0].shape[1]] for state in last))


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    if key.shape[1] != query.shape[1]:
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    result: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]
    return result

"""Calls functions around every optimizer step, compares optimizer settings between ranks, and digests optimizer states.

One pair of torch's global optimizer hooks serves all these functions.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from commlayer.errors import InvalidInput
from commlayer.optim import OuterSGD, family_of
from commlayer.records import Job, TensorInfo
from commlayer.transport.crc import crc32c

Call = Callable[[Optimizer, Any, Any], None]
"""Function to call before or after a step. It receives the optimizer and the step's arguments: a tuple that starts with the
optimizer, and a dict."""
Weak = Callable[[], Call | None]


class _Watcher(NamedTuple):
    before: Weak
    after: Weak


class _Step(NamedTuple):
    thread: int
    optimizer: weakref.ref[Optimizer]


_watchers: list[_Watcher] = []
_handles: list[Any] = []
_running: list[_Step] = []
"""Optimizer steps that are running now, in all threads; outer steps precede steps inside them."""


def watch(before: Call | None = None, after: Call | None = None) -> Callable[[], None]:
    """Calls `before` and `after` around every optimizer step of this process. Returns a function that ends these calls.
    Functions are called in the order in which they were added.

    Both arguments are methods. They are referenced weakly, so a session that a script drops is freed with its model.
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
            _running.clear()

    return end


class HeldParameters:
    """Returns which of a model's parameters belong to an optimizer, by parameter number. While functions added by `watch`
    exist, also returns which optimizers of these parameters are inside a step."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._numbers = {id(p): number for number, p in enumerate(parameters)}
        self._by: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], tuple[int, ...]]] = weakref.WeakKeyDictionary()

    def by(self, optimizer: Any) -> tuple[int, ...]:
        """Returns the numbers of the parameters that belong to the optimizer, in the optimizer's order. Empty if the argument
        is not an optimizer."""
        ids = [*map(id, chain.from_iterable(group["params"] for group in getattr(optimizer, "param_groups", ())))]
        known, numbers = self._by.get(optimizer, (None, ()))
        if known != ids:
            numbers = tuple(self._numbers[i] for i in ids if i in self._numbers)
            if isinstance(optimizer, Optimizer):
                self._by[optimizer] = ids, numbers
        return numbers

    def stepping(self) -> list[Optimizer]:
        """Returns the optimizers with some of these parameters that are inside a step; outer steps precede steps inside them.
        """
        inside = (step.optimizer() for step in tuple(_running))
        return [optimizer for optimizer in inside if optimizer is not None and self.by(optimizer)]


def closure_of(args: Any, kwargs: Any) -> Any:
    """Returns the closure among the arguments of an optimizer's step; None if there is none. Backward passes of the closure are
    part of the step."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _nothing() -> None:
    return None


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    thread = threading.get_ident()
    if any(step.thread == thread for step in _running) and not _nested():
        _running[:] = [step for step in _running if step.thread != thread]  # an earlier step has raised
    for watcher in tuple(_watchers):
        if (call := watcher.before()) is not None:
            call(optimizer, args, kwargs)
    _running.append(_Step(thread, weakref.ref(optimizer)))


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    thread, place = threading.get_ident(), len(_running)
    while place:
        place -= 1
        if _running[place].thread == thread and _running[place].optimizer() is optimizer:
            # Steps that were called inside this one and have raised end with it.
            _running[place:] = [step for step in _running[place:] if step.thread != thread]
            break
    for watcher in tuple(_watchers):
        if (call := watcher.after()) is not None:
            call(optimizer, args, kwargs)


def _nested() -> bool:
    """Returns True if the step that is beginning was called by another optimizer's step."""
    frame: FrameType | None = sys._getframe()
    steps = 0
    while frame is not None:
        steps += frame.f_code.co_filename == torch_optimizer.__file__ and frame.f_code.co_name == "wrapper"
        frame = frame.f_back
    return steps > 1


# ---- reads an optimizer's settings (class, parameter groups and hyperparameters) by name, to compare them between ranks

ALWAYS = frozenset({"lr"})
"""Keys of a parameter group that are compared even if the optimizer's constructor has no such parameter."""
OWN = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "param_names"})
"""Keys of a parameter group that are not compared between ranks: parameters are compared by name, and the implementation of a
step can differ between processors."""


def settings_of(optimizer: Any, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Maps names of the optimizer's settings, which the user knows, to their values as text. `named`: the model's parameters.
    Empty without an optimizer."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return {}
    names = {id(tensor): name for name, tensor in named}
    settings = {"optimizer": type(optimizer).__name__, "number of the optimizer's groups": str(len(groups))}
    for number, group in enumerate(groups):
        where = f"the optimizer's group {number}" if len(groups) > 1 else "the optimizer"
        held = [names.get(id(p), f"(another tensor of {p.numel()} elements)") for p in group["params"]]
        order = zlib.crc32("\n".join(held).encode())
        ends = " to ".join(dict.fromkeys([*held[:1], *held[-1:]]))
        settings[f"parameters of {where}"] = f"{len(held)} ({ends}; {order:08x})" if held else "none"
        for name in sorted(map(str, _hyperparameters(optimizer, group) - OWN)):
            if text := _spelled(group[name]):
                settings[f"{name} of {where}"] = text
    return settings


def scaler_settings(scaler: Any) -> str:
    """Returns how a GradScaler changes its loss scale, as text. Gradients with different scales must not be averaged."""
    if scaler is None or not scaler.is_enabled():
        return "not given" if scaler is None else "disabled"
    return (f"scale x {scaler.get_growth_factor():g} every {scaler.get_growth_interval()} steps, "
            f"x {scaler.get_backoff_factor():g} after inf or NaN")


def _hyperparameters(optimizer: Any, group: Mapping[str, Any]) -> set[str]:
    """Returns the keys of a parameter group that are parameters of the optimizer's constructor; all keys if none is, as in a
    wrapper.

    Other keys are values that the optimizer's steps change, such as the estimated distance of Prodigy.
    """
    taken: set[str] = set()
    for kind in type(optimizer).__mro__:
        if "__init__" in vars(kind):
            taken |= inspect.signature(vars(kind)["__init__"]).parameters.keys()
    return set(group.keys() & (taken | ALWAYS)) if taken & group.keys() - OWN else set(group)


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError for an object that lacks what commlayer reads of an optimizer: learning rate, parameters, state."""
    if lacking := [name for name in ("param_groups", "state_dict", "load_state_dict")
                   if optimizer is not None and not hasattr(optimizer, name)]:
        raise InvalidInput("E-ARGUMENT",
                           f"optimizer: got {type(optimizer).__name__}, which has no {' and no '.join(lacking)}, allowed: a "
                           "torch.optim.Optimizer; if it wraps one, pass attach() that one and step the wrapper as before")


def structural(name: str) -> bool:
    """Returns True if ranks that differ in this setting cannot use each other's optimizer state."""
    return name.partition(" ")[0] in ("optimizer", "number", "parameters")


def digest(settings: Mapping[str, str]) -> int:
    return zlib.crc32(repr(sorted(settings.items())).encode())


def differences(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Maps each setting that differs between ranks to its values, one per rank."""
    every = dict.fromkeys(name for each in settings for name in each)
    rows = {name: [each.get(name, "not given") for each in settings] for name in every}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _spelled(value: Any) -> str:
    """Returns a setting's value as text; "" if the value is not a simple one. Floats have six digits, because a learning rate
    might be a float32 tensor on some ranks."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple | list):
        parts = [_spelled(part) for part in value]
        return f"({', '.join(parts)})" if all(parts) else ""
    return ""


# ---- digests of an optimizer's state, and the optimizer's effect on weights, for changes of the sync mode

class OptimizerMemory:
    """Describes one optimizer's state and effect on weights, for changes of the sync mode. Parameters are identified by number.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: Any, outer: OuterSGD) -> None:
        self._parameters, self._optimizer, self._outer = parameters, optimizer, outer

    @property
    def family(self) -> str:
        """Name of the optimizer's family, such as "adam"; "other" if the family is unknown."""
        return family_of(self._optimizer)

    @property
    def matched(self) -> bool:
        """True: averages of weight changes are scaled to the norm of the ranks' changes (norm-matched averaging)."""
        return self._outer.matched

    @property
    def remembers(self) -> bool:
        state: Mapping[Any, Any] = getattr(self._optimizer, "state", {})
        return any(value is not None for p in self._parameters for _, value in _flat(state.get(p, {})))

    def digest(self) -> int:
        """Returns a digest of the optimizer's state for the averaged parameters. Ranks with equal states stay equal under equal
        gradients."""
        return zlib.crc32(repr(state_digests(self._parameters, self._optimizer)).encode())

    @property
    def rate(self) -> float:
        return learning_rate(self._optimizer, 1.0)

    def effect(self, number: int) -> float:
        """Returns the weight change, as local steps exchange it, that has the same effect as a gradient of 1 in a synchronous
        step; 0 if this ratio is not a constant."""
        optimizer, p = self._optimizer, self._parameters[number]
        if type(optimizer) is not torch.optim.SGD or self._outer.momentum or self._outer.matched:
            return 0.0
        group = next((group for group in optimizer.param_groups if any(q is p for q in group["params"])), {})
        rate = float(group.get("lr", 0.0))
        if group.get("momentum") or not 0 < rate < math.inf:
            return 0.0
        return (-rate if group.get("maximize") else rate) / self._outer.lr


def state_digests(parameters: Sequence[torch.Tensor], optimizer: Any, *, moments: bool = True) -> list[int]:
    """Returns a digest of the optimizer's state for each parameter. Without `moments` it covers only names and types of the
    entries, and scalars such as step counts: under local steps only those are equal on all ranks."""
    state: Mapping[Any, Any] = getattr(optimizer, "state", {})
    digests_of = [0] * len(parameters)
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, p in enumerate(parameters):
        for name, value in _flat(state.get(p, {})):
            scalar = isinstance(value, torch.Tensor) and value.numel() == 1 and not moments
            text = f"{name} {_kind(value)} {value.item() if scalar else ''}"
            digests_of[number] = zlib.crc32(text.encode(), digests_of[number])
            if isinstance(value, torch.Tensor) and moments:
                by_device.setdefault(value.device, []).append((number, value.detach()))
    for held in by_device.values():
        tensors = [tensor for _, tensor in held]
        digests = Digests(tensors)
        for piece in pieces(tensors):
            digests.add(piece)
        for (number, _), digest in zip(held, digests.take(), strict=True):
            digests_of[number] = zlib.crc32(digest.to_bytes(8, "little"), digests_of[number])
    return digests_of


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in sorted(values, key=str):
        value = values[name]
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    # The repr of an object can contain its address.
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


# ---- digests of tensors, computed piece by piece so that no single step takes the time of all digests

PIECE_NBYTES = 4 << 20
"""Number of bytes that are digested at once; this takes about 0.4 ms on a CPU."""
EXACT_BITS = 52
"""Number of bits of a digest. Digests are sent as float64, which represents integers of this size exactly."""
ROW = 1024
ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Multiplier for digests on a GPU: the golden ratio's bits as an int64."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DigestPiece(NamedTuple):
    """A range of elements [start, stop) of a tensor, which is identified by its number."""

    tensor: int
    start: int
    stop: int


def pieces(tensors: Sequence[torch.Tensor], most_nbytes: int = PIECE_NBYTES) -> list[DigestPiece]:
    """Divides all elements of all tensors into pieces of at most `most_nbytes` bytes. A tensor that is not contiguous is one
    piece."""
    parts = []
    for number, tensor in enumerate(tensors):
        most = max(1, most_nbytes // tensor.element_size()) if tensor.is_contiguous() else max(1, tensor.numel())
        edges = [*range(0, tensor.numel(), most), tensor.numel()]
        parts += [DigestPiece(number, start, stop) for start, stop in pairwise(edges)]
    return parts


class Digests:
    """Digests of tensors on one device, over the pieces added since the last `afresh`. They compare bits: -0.0 differs from
    0.0, and equal NaNs are equal.

    On a CPU, a digest is a CRC-32C over the bytes. A CRC on a GPU would wait for copies, so the GPU sums the elements' bits by
    row and by column, with odd weights. Two changes that cancel in a plain sum do not cancel under these weights.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        device = tensors[0].device if tensors else torch.device("cpu")
        self.by_sums = device.type != "cpu"
        """True: digests are weighted sums (on a GPU). False: they are CRCs (on a CPU). The two kinds cannot be compared."""
        self._device, self._weights = device, torch.empty(0, dtype=torch.int64, device=device)
        self.afresh()

    def afresh(self) -> None:
        self._crcs = [0] * len(self._tensors)
        self._sums = torch.zeros(len(self._tensors) if self.by_sums else 0, dtype=torch.int64, device=self._device)

    def add(self, piece: DigestPiece) -> None:
        """Adds a piece to its tensor's digest. Pieces of a tensor must be added in order."""
        tensor = self._tensors[piece.tensor].detach()
        flat = tensor.contiguous().view(-1)[piece.start : piece.stop]
        if self.by_sums:
            mine = self._sums[piece.tensor]
            mine.mul_(ODD).add_(self.sum_of(flat))
        else:
            self._crcs[piece.tensor] = crc32c(flat.view(torch.uint8).numpy().data, self._crcs[piece.tensor])

    def sum_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a weighted sum of the elements' bits. It is a tensor on the device, so the host does not wait."""
        bits = flat.view(_INTEGERS[flat.element_size()])
        table_numel = bits.numel() // ROW * ROW
        table, rest = bits[:table_numel].view(-1, ROW), bits[table_numel:].to(torch.int64)
        weights = self._weights_for(max(ROW, table.shape[0]))
        rows, columns = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
        return ((rows * weights[: rows.numel()]).sum() * ODD + (columns * weights[:ROW]).sum()) * ODD \
            + (rest * weights[: rest.numel()]).sum()

    def _weights_for(self, count: int) -> torch.Tensor:
        if self._weights.numel() < count:
            multiples = torch.arange(1, count + 1, dtype=torch.int64, device=self._device) * ODD
            self._weights = (multiples ^ (multiples >> 29)) * ODD | 1
        return self._weights

    def take(self) -> list[int]:
        """Returns the digest of each tensor, and restarts all digests."""
        values = (self._sums & (1 << EXACT_BITS) - 1).tolist() if self.by_sums else self._crcs
        self.afresh()
        return values


# ---- reads the tensors to average from a model, and learning rate and loss scale from optimizer and scaler

def parameters_of(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the trained parameters with their names, in registration order. Tied weights occur once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def buffers_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns the floating-point buffers that workers average, such as running statistics. Buffers with infinite values, such
    as masks, are excluded."""
    named = model.named_buffers()
    return [(name, b) for name, b in named if b.is_floating_point() and b.numel() and bool(torch.isfinite(b).all())]


def job_of(model: nn.Module) -> Job:
    """Returns the description of the averaged tensors: gradients of trained parameters, then floating-point buffers."""
    named: list[tuple[str, torch.Tensor, bool]] = [(name, tensor, False) for name, tensor in parameters_of(model)]
    named += [(name, tensor, True) for name, tensor in buffers_of(model)]
    return Job(tuple(
        TensorInfo(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), buffer)
        for name, tensor, buffer in named
    ))


def check_dense(name: str, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise InvalidInput("E-GRADIENT-LAYOUT",
                           f"the gradient of {name} has layout {gradient.layout}, but it must be dense; pass sparse=False "
                           "to its layer, as in nn.Embedding(sparse=False)")


def learning_rate(optimizer: Any, before: float) -> float:
    """Returns the learning rate of the optimizer's first parameter group. Returns `before` while that rate is 0 or infinite,
    and without an optimizer."""
    rate = float(optimizer.param_groups[0]["lr"]) if optimizer is not None else before
    return rate if 0 < rate < math.inf else before


def loss_scale(scaler: Any) -> float:
    """Returns the current loss scale of a GradScaler; 1 without an enabled scaler."""
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0

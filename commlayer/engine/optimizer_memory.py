"""Digests of an optimizer's state, and its effect on weights: what a change of sync mode needs to know of it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from commlayer.engine.model_job import learning_rate
from commlayer.engine.tensor_digests import Digests, pieces
from commlayer.optim import Outer


class Stepped:
    """For one model's parameters, by number."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: Any, outer: Outer) -> None:
        self._parameters, self._optimizer, self._outer = parameters, optimizer, outer

    @property
    def matched(self) -> bool:
        """Whether means of its changes are norm-matched."""
        return self._outer.matched

    @property
    def remembers(self) -> bool:
        state: Mapping[Any, Any] = getattr(self._optimizer, "state", {})
        return any(value is not None for p in self._parameters for _, value in _flat(state.get(p, {})))

    def digest(self) -> int:
        """A digest of the optimizer's state of these parameters. Ranks with equal states stay equal under equal gradients."""
        return zlib.crc32(repr(state_digests(self._parameters, self._optimizer)).encode())

    @property
    def rate(self) -> float:
        return learning_rate(self._optimizer, 1.0)

    def effect(self, number: int) -> float:
        """By how much a gradient of 1 decreases that tensor's weights in an exchanged step. 0 if that is not a fixed number."""
        optimizer, p = self._optimizer, self._parameters[number]
        if type(optimizer) is not torch.optim.SGD or self._outer.momentum or self._outer.matched:
            return 0.0
        group = next((group for group in optimizer.param_groups if any(q is p for q in group["params"])), {})
        rate = float(group.get("lr", 0.0))
        if group.get("momentum") or not 0 < rate < math.inf:
            return 0.0
        return (-rate if group.get("maximize") else rate) / self._outer.lr


def state_digests(parameters: Sequence[torch.Tensor], optimizer: Any, *, moments: bool = True) -> list[int]:
    """By parameter, a digest of the optimizer's state. Without `moments`, only of the entries' names and kinds, and of scalars
    such as step counts: ranks that step locally agree only on those."""
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
    # The repr of an object may hold its address.
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__

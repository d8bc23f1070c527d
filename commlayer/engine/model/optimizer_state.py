"""Digests of an optimizer's state, and the optimizer's effect on weights, for changes of the sync mode."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from commlayer.engine.model.digests import Digests, pieces
from commlayer.engine.model.model_tensors import learning_rate
from commlayer.engine.model.shard_parameters import local_elements
from commlayer.optim import OuterSGD, family_of

RESTARTED_STEPS = 32
"""Maximum number of a job's first steps whose optimizer state may be dropped."""


class OptimizerMemory:
    """Describes one optimizer's state and effect on weights, for changes of the sync mode. Parameters are identified by number.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: Any, outer: OuterSGD) -> None:
        self._parameters, self._optimizer, self.outer = parameters, optimizer, outer
        self._first_state: object = None
        """The optimizer's `state`, if it was empty before the first local step. load_state_dict() replaces that object."""

    @property
    def family(self) -> str:
        """Name of the optimizer's family, such as "adam"; "other" if the family is unknown."""
        return family_of(self._optimizer)

    @property
    def matched(self) -> bool:
        """True: averages of weight changes are scaled to the norm of the ranks' changes (norm-matched averaging)."""
        return self.outer.matched

    @property
    def has_optimizer_state(self) -> bool:
        state: Mapping[Any, Any] = getattr(self._optimizer, "state", {})
        return any(value is not None for p in self._parameters for _, value in _flat(state.get(p, {})))

    def begin_local_steps(self) -> None:
        """Called before the optimizer's first local step."""
        # Other packages' optimizers may keep a part of their state elsewhere, such as counters in `param_groups`.
        of_torch = type(self._optimizer).__module__.startswith("torch.optim.")
        self._first_state = self._optimizer.state if of_torch and not self.has_optimizer_state else None

    def can_restart(self, steps: int) -> bool:
        """Returns True if the state may be dropped after this many steps of the job, because it contains only these steps."""
        return self._first_state is not None and self._optimizer.state is self._first_state and steps <= RESTARTED_STEPS

    def restart(self) -> None:
        """Drops the optimizer's state, which its next step creates again. Learning rates stay."""
        self._first_state = None
        for p in self._parameters:
            self._optimizer.state.pop(p, None)

    def digest(self) -> int:
        """Returns a digest of the optimizer's state for the averaged parameters. Ranks with equal states stay equal under equal
        gradients."""
        return zlib.crc32(repr(state_digests(self._parameters, self._optimizer)).encode())

    @property
    def rate(self) -> float:
        return learning_rate(self._optimizer, 1.0)

    def gradient_effect(self, number: int) -> float:
        """Returns which exchanged weight change of local steps has the same effect as a gradient of 1 in a synchronous step. 0
        if this ratio is not a constant."""
        optimizer, p = self._optimizer, self._parameters[number]
        if type(optimizer) is not torch.optim.SGD or self.outer.momentum or self.outer.matched:
            return 0.0
        group = next((group for group in optimizer.param_groups if any(q is p for q in group["params"])), {})
        rate = float(group.get("lr", 0.0))
        if group.get("momentum") or not 0 < rate < math.inf:
            return 0.0
        return (-rate if group.get("maximize") else rate) / self.outer.lr


def state_digests(parameters: Sequence[torch.Tensor], optimizer: Any, *, moments: bool = True) -> list[int]:
    """Returns a digest of the optimizer's state for each parameter. Without `moments` it covers only names and types of the
    entries, and scalars such as step counts: under local steps only those are equal on all ranks."""
    state: Mapping[Any, Any] = getattr(optimizer, "state", {})
    digests_of = [0] * len(parameters)
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, p in enumerate(parameters):
        for name, value in _flat(state.get(p, {})):
            scalar = isinstance(value,
                                torch.Tensor) and value.numel() == 1 and value.shape != local_elements(p).shape and not moments
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
            yield f"{prefix}{name}", local_elements(value)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    # The repr of an object can contain its address.
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__

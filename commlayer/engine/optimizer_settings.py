"""Reads an optimizer's settings by name, to compare them between ranks: class, groups, and their hyperparameters."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

ALWAYS = frozenset({"lr"})
"""Keys of a group that are compared even if the constructor does not take them."""
OWN = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "param_names"})
"""Keys of a group that are not compared: parameters are compared by name, and how a step is computed may differ between
processors."""


def settings_of(optimizer: Any, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """By a name that the user knows. `named`: the model's parameters. Empty without an optimizer."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return {}
    names = {id(tensor): name for name, tensor in named}
    settings = {"optimizer": type(optimizer).__name__, "number of the optimizer's groups": str(len(groups))}
    for number, group in enumerate(groups):
        where = f"the optimizer's group {number}" if len(groups) > 1 else "the optimizer"
        held = [names.get(id(p), f"(another tensor of {p.numel()} elements)") for p in group["params"]]
        order = zlib.crc32("\n".join(held).encode())
        ends = held[0] if len(set(held)) < 2 else f"{held[0]} to {held[-1]}"
        settings[f"parameters of {where}"] = f"{len(held)} ({ends}; {order:08x})" if held else "none"
        for name in sorted(map(str, _hyperparameters(optimizer, group) - OWN)):
            if text := _spelled(group[name]):
                settings[f"{name} of {where}"] = text
    return settings


def _hyperparameters(optimizer: Any, group: Mapping[str, Any]) -> set[str]:
    """The keys of a group that the optimizer's constructor takes; all keys if it takes none of them, as in a wrapper.

    Other keys are values that the optimizer's steps change, such as the estimated distance of Prodigy."""
    taken: set[str] = set()
    for kind in type(optimizer).__mro__:
        if "__init__" in vars(kind):
            taken |= inspect.signature(vars(kind)["__init__"]).parameters.keys()
    return set(group.keys() & (taken | ALWAYS)) if taken & group.keys() - OWN else set(group)


def structural(name: str) -> bool:
    """Whether ranks that differ in this setting cannot take each other's state."""
    return name.partition(" ")[0] in ("optimizer", "number", "parameters")


def digest(settings: Mapping[str, str]) -> int:
    return zlib.crc32(repr(sorted(settings.items())).encode())


def differences(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """By setting that differs between ranks, the value of each rank."""
    every = dict.fromkeys(name for each in settings for name in each)
    rows = {name: [each.get(name, "not given") for each in settings] for name in every}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _spelled(value: Any) -> str:
    """Empty if the value is not plain. Six digits, because a rate may be a float32 tensor on some ranks."""
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

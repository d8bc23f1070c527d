"""What an optimizer was told, by name, to compare it between ranks: its class, its groups, and their hyperparameters."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

ALWAYS = frozenset({"lr"})
"""Of a group: compared whatever the constructor takes."""
OWN = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "param_names"})
"""Of a group: parameters are compared by name, and how a step is computed may differ between processors."""


def settings_of(optimizer: Any, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """By what the user would call it. `named`: the model's parameters. Empty without an optimizer."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return {}
    names = {id(tensor): name for name, tensor in named}
    found = {"optimizer": type(optimizer).__name__, "number of the optimizer's groups": str(len(groups))}
    for number, group in enumerate(groups):
        where = f"the optimizer's group {number}" if len(groups) > 1 else "the optimizer"
        held = [names.get(id(p), f"(another tensor of {p.numel()} elements)") for p in group["params"]]
        order = zlib.crc32("\n".join(held).encode())
        ends = held[0] if len(set(held)) < 2 else f"{held[0]} to {held[-1]}"
        found[f"parameters of {where}"] = f"{len(held)} ({ends}; {order:08x})" if held else "none"
        for name in sorted(map(str, _hyperparameters(optimizer, group) - OWN)):
            if said := _spelled(group[name]):
                found[f"{name} of {where}"] = said
    return found


def _hyperparameters(optimizer: Any, group: Mapping[str, Any]) -> set[str]:
    """What of a group the optimizer's constructor takes: others are values that it changes by its own steps, such as the
    estimated distance of Prodigy. All of the group where the constructor names none, as of a wrapper."""
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
    """By setting that is not the same on all ranks, what each rank has."""
    every = dict.fromkeys(name for each in settings for name in each)
    rows = {name: [each.get(name, "not given") for each in settings] for name in every}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _spelled(value: Any) -> str:
    """Empty for what is no plain value. To six digits: a rate may be a tensor of float32 on some ranks."""
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

"""Reads an optimizer's settings (class, parameter groups and hyperparameters) by name, to compare them between ranks."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from commlayer.errors import InvalidInput

ALWAYS = frozenset({"lr"})
"""Keys of a parameter group that are compared even if the optimizer's constructor has no such parameter."""
OWN = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "param_names"})
"""Keys of a parameter group that are not compared between ranks: parameters are compared by name, and the implementation of a
step can differ between processors."""


def read_optimizer_settings(optimizer: Any, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
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
            if text := _format_value(group[name]):
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
                           "torch.optim.Optimizer; for a wrapper, pass the optimizer inside to attach(), and step the wrapper")


def is_structural(name: str) -> bool:
    """Returns True if ranks that differ in this setting cannot use each other's optimizer state."""
    return name.partition(" ")[0] in ("optimizer", "number", "parameters")


def digest(settings: Mapping[str, str]) -> int:
    return zlib.crc32(repr(sorted(settings.items())).encode())


def differences(settings: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Maps each setting that differs between ranks to its values, one per rank."""
    every = dict.fromkeys(name for each in settings for name in each)
    rows = {name: [each.get(name, "not given") for each in settings] for name in every}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def _format_value(value: Any) -> str:
    """Returns a setting's value as text; "" if the value is not a simple one. Floats have six digits, because a learning rate
    might be a float32 tensor on some ranks."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple | list):
        parts = [_format_value(part) for part in value]
        return f"({', '.join(parts)})" if all(parts) else ""
    return ""

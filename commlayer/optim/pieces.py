"""Steps some parameters of an optimizer now and the others later, after a test that this equals one complete step.

torch's optimizers skip a parameter whose `.grad` is None and keep their state per parameter, so stepping in pieces equals one
complete step. A trial with a few small tensors detects an optimizer that mixes parameters or counts its own steps.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

Group = dict[str, Any]
"""One of an optimizer's `param_groups`."""
ROUNDS = 3
MOST = 3
"""Maximum number of parameters per group in a trial, and maximum size of each of their dimensions."""
RATE = 0.01
"""Learning rate that replaces 0 in a trial (for example at the start of a warm-up), since a rate of 0 would not change
parameters."""
HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def copy_hyperparameters(group: Mapping[str, Any]) -> Group:
    """Returns a copy of a group's current hyperparameters. Tensors are cloned, because schedules change them in place."""
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


def step_piece(optimizer: Optimizer, groups: Sequence[Group]) -> None:
    """Steps only the parameters in `groups`, with the hyperparameters in `groups`. Does not call step hooks."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.__dict__.pop("step", None)
    twin.__dict__.update({hook: OrderedDict() for hook in HOOKS})
    twin.param_groups = list(groups)
    _plain_step(type(optimizer))(twin)


def _plain_step(kind: type) -> Callable[..., Any]:
    """Returns the class's step() without torch's wrapper, which calls the hooks."""
    step: Callable[..., Any] = kind.step  # type: ignore[attr-defined]
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def calls_step_hooks(optimizer: Any) -> bool:
    """True: the optimizer calls hooks before and after its steps. (A wrapper can be an Optimizer by type but lack hooks.)"""
    return isinstance(optimizer, Optimizer) and all(hook in vars(optimizer) for hook in HOOKS)


def why_indivisible(optimizer: Any) -> str:
    """Returns the reason why the optimizer cannot be stepped in pieces; "" if it can."""
    name = type(optimizer).__name__
    if not calls_step_hooks(optimizer):
        return f"{name} is not a torch.optim.Optimizer that calls step hooks: pass the optimizer that it wraps"
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return f"{name}.step was replaced on this instance"
    if any(group.get("capturable") for group in optimizer.param_groups):
        return f"{name} is capturable (for CUDA graphs, which replay a complete step): do not set capturable"
    try:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(mode=False):
            difference = _try(optimizer)
    except Exception as error:
        message = str(error).splitlines()[0] if str(error) else ""
        return f"a trial step of {name} without a closure raised {type(error).__name__}: {message}"
    return f"{name} {difference}" if difference else ""


def _try(optimizer: Optimizer) -> str:
    """Steps two small copies, one completely and one in pieces. Returns how the results differ; "" if they are equal."""
    whole, parts = _small(optimizer), _small(optimizer)
    before = [copy_hyperparameters(group) for group in whole.param_groups]
    generator = torch.Generator().manual_seed(0)
    for number in range(ROUNDS):
        pairs = list(zip(_parameters(whole), _parameters(parts), strict=True))
        for p, q in pairs:
            p.grad = torch.randn(p.shape, generator=generator).to(p)
            q.grad = None
        _plain_step(type(whole))(whole)
        later = [place % 2 == number % 2 for place in range(len(pairs))]
        for (p, q), wait in zip(pairs, later, strict=True):
            q.grad = None if wait else _copy(p.grad)
        _plain_step(type(parts))(parts)
        rest = {id(q) for (_, q), wait in zip(pairs, later, strict=True) if wait}
        for p, q in pairs:
            q.grad = _copy(p.grad) if id(q) in rest else None
        groups = [{**copy_hyperparameters(g), "params": [q for q in g["params"] if id(q) in rest]} for g in parts.param_groups]
        step_piece(parts, [group for group in groups if group["params"]])
    if not all(torch.equal(p, q) for p, q in zip(_parameters(whole), _parameters(parts), strict=True)):
        return "mixes parameters, or counts its own steps: stepping in pieces results in different weights"
    if not _equal_values([whole.state.get(p) for p in _parameters(whole)], [parts.state.get(q) for q in _parameters(parts)]):
        return "mixes parameters, or counts its own steps: stepping in pieces results in a different state"
    if not _equal_values(before, [copy_hyperparameters(group) for group in whole.param_groups]):
        return "changes its own param_groups in a step"
    return ""


def _small(optimizer: Optimizer) -> Optimizer:
    """Returns a copy of the optimizer with small parameters and an empty state."""
    generator, memo = torch.Generator().manual_seed(1), {}
    for p in _parameters(optimizer):
        shape = [min(size, MOST) for size in p.shape]
        memo[id(p)] = torch.nn.Parameter(torch.randn(shape, generator=generator).to(p.device, p.dtype))
    new = object.__new__(type(optimizer))
    kept = {k: v for k, v in vars(optimizer).items() if k not in {"state", "param_groups", "step", *HOOKS}}
    new.__dict__.update(copy.deepcopy({k: v for k, v in kept.items() if not k.endswith("_hooks")}, memo))
    new.__dict__.update({k: OrderedDict() for k in vars(optimizer) if k.endswith("_hooks")})
    new.state = defaultdict(dict)
    new.param_groups = []
    for group in optimizer.param_groups:
        values = copy.deepcopy({k: v for k, v in group.items() if k != "params"}, memo)
        rate = values.get("lr")
        if isinstance(rate, int | float | torch.Tensor) and not float(rate):
            values["lr"] = torch.full_like(rate, RATE) if isinstance(rate, torch.Tensor) else RATE
        new.param_groups.append({**values, "params": [memo[id(p)] for p in group["params"][:MOST]]})
    return new


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _equal_values(one: Any, other: Any) -> bool:
    """Returns True if two nested values are equal, bit for bit."""
    (leaves, structure), (others, other_structure) = tree_flatten(one), tree_flatten(other)
    return bool(structure == other_structure and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b
        for a, b in zip(leaves, others, strict=True)))

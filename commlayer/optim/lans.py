"""LANS, and CLAN for compressed gradients: Nesterov momentum with step lengths relative to each tensor's norm.

Zheng, Lin, Zha, Li: Accelerated Large Batch Optimization of BERT Pretraining in 54 Minutes (2020), algorithm 2. A block is a
parameter tensor, and phi(z) clamps z. If a norm is 0, its ratio is 1 as in the published code, so parameters that are zero at
first can change.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from commlayer.errors import InvalidInput

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
"""Dtypes whose moments and norms are stored as float32, because squares of normalized gradients are too small for half
precision."""


class LANS(torch.optim.Optimizer):
    """The LANS optimizer: changes each tensor by lr x phi(the tensor's norm) in the direction beta1 x momentum + (1 - beta1) x
    gradient, with both terms rescaled.

    So lr is relative to the weights: with 1e-3, a step changes each tensor by about a thousandth of its norm. With `normalize`,
    only the direction of each tensor's gradient counts, so clipping its norm has no effect. `phi`: lower and upper limit to
    which a tensor's norm is clamped.

    >>> optimizer = LANS(model.parameters(), lr=2e-3)           # doctest: +SKIP
    """

    def __init__(
        self, params: Any, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.01, *, phi: tuple[float, float] = (0.0, math.inf), normalize: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "phi": phi,
                                  "normalize": normalize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check(type(self).__name__, {**self.defaults, **param_group})
        super().add_param_group(param_group)
        wrong = next((p for p in self.param_groups[-1]["params"] if p.dtype not in DTYPES), None)
        if wrong is not None:
            del self.param_groups[-1]
            raise InvalidInput("E-OPTIM-PARAMETER", f"{type(self).__name__}: got a parameter of dtype {wrong.dtype}, allowed: "
                                                    f"{', '.join(map(str, DTYPES))}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in _group_by_kind(type(self).__name__, group["params"]):
                self._update(group, parameters)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch casts the moments of half-precision parameters to half precision: restore them as float32.
        loaded = zip((i for group in state_dict["param_groups"] for i in group["params"]),
                     (p for group in self.param_groups for p in group["params"]), strict=True)
        for i, p in loaded:
            if p.dtype in HALVES and i in state_dict["state"]:
                for name in ("m", "v"):
                    self.state[p][name] = state_dict["state"][i][name].to(p.device, torch.float32, copy=True)

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Updates all tensors of one device and dtype at once."""
        (beta1, beta2), (low, high) = group["betas"], group["phi"]
        states = [self._state(p) for p in parameters]
        for state in states:
            state["step"] += 1
        m, v = [s["m"] for s in states], [s["v"] for s in states]
        x, g = _wide(parameters), _wide([p.grad for p in parameters if p.grad is not None])
        if group["normalize"]:
            g = list(torch._foreach_div(g, _positive(_norms(g)).unbind()))
        torch._foreach_lerp_(m, g, 1 - beta1)
        torch._foreach_mul_(v, beta2)
        torch._foreach_addcmul_(v, g, g, 1 - beta2)

        scale = torch._foreach_sqrt(v)
        torch._foreach_div_(scale, [math.sqrt(1 - beta2 ** s["step"]) for s in states])
        torch._foreach_add_(scale, group["eps"])
        r = torch._foreach_div(m, [1 - beta1 ** s["step"] for s in states])
        torch._foreach_div_(r, scale)
        c = torch._foreach_div(g, scale)
        if group["weight_decay"]:
            torch._foreach_add_(r, x, alpha=group["weight_decay"])
            torch._foreach_add_(c, x, alpha=group["weight_decay"])

        length = _norms(x).clamp(low, high)
        for direction, part in ((r, beta1), (c, 1 - beta1)):
            norms = _norms(direction)
            ratio = torch.where((length > 0) & (norms > 0), length / _positive(norms), 1.0)
            torch._foreach_mul_(direction, (ratio * (part * group["lr"])).unbind())
            torch._foreach_sub_(x, direction)
        if x[0] is not parameters[0]:
            torch._foreach_copy_(parameters, x)

    def _state(self, p: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if not state:
            kind = torch.float32 if p.dtype in HALVES else p.dtype
            state["step"] = 0
            state["m"], state["v"] = (torch.zeros_like(p, dtype=kind, memory_format=torch.preserve_format) for _ in "mv")
        return state


class CLAN(LANS):
    """Compressed LANS: for gradients that are compressed to and from servers, with residuals on workers and servers.

    Zhong, Xie, Zheng, Lin: Compressed Communication for Distributed Training: Adaptive Methods and System (2021). As in the
    paper's code, gradients are not normalized. The plan chooses the codec: any codec whose sums the servers compress again.

    >>> optimizer = CLAN(model.parameters(), lr=2e-3)           # doctest: +SKIP
    >>> session = commlayer.attach(model, optimizer, plan=commlayer.compressors.onebit())       # doctest: +SKIP
    """

    def __init__(
        self, params: Any, lr: float | torch.Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.01, *, phi: tuple[float, float] = (0.0, math.inf), normalize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, phi=phi, normalize=normalize)


def _check(name: str, group: dict[str, Any]) -> None:
    lr, betas, phi = group["lr"], group["betas"], group["phi"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise InvalidInput("E-OPTIM-ARGUMENT",
                           f"{name}: lr is a tensor of {lr.numel()} elements, allowed: a number, or a tensor of one element")
    for what in ("lr", "eps", "weight_decay"):
        if not 0 <= float(group[what]) < math.inf:
            raise InvalidInput("E-OPTIM-ARGUMENT", f"{name}: {what} is {float(group[what])}, allowed: a finite number of at "
                                                   "least 0")
    if not _pair(betas) or not all(0 <= beta < 1 for beta in betas):
        raise InvalidInput("E-OPTIM-ARGUMENT", f"{name}: betas are {betas}, allowed: two numbers of at least 0 and below 1")
    if not _pair(phi) or not 0 <= phi[0] <= phi[1] or phi[1] == 0:
        raise InvalidInput("E-OPTIM-ARGUMENT",
                           f"{name}: phi is {phi}, allowed: (least, most) with 0 <= least <= most and most above 0")


def _pair(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) == 2


def _group_by_kind(name: str, parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields lists of parameters with equal device and dtype, in order. Parameters without a gradient are left out."""
    by_kind = defaultdict(list)
    for p in parameters:
        if p.grad is not None:
            if p.grad.is_sparse:
                raise InvalidInput("E-OPTIM-PARAMETER",
                                   f"{name}: got a sparse gradient, allowed: dense gradients, since norms include "
                                   "every element; use nn.Embedding(sparse=False)")
            by_kind[p.device, p.dtype].append(p)
    yield from by_kind.values()


def _wide(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns half-precision tensors as float32; the others unchanged."""
    return [t.float() if t.dtype in HALVES else t for t in tensors]


def _norms(tensors: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(tensors))


def _positive(norms: torch.Tensor) -> torch.Tensor:
    """Replaces norms of 0 by 1 for use as divisors, so a zero tensor stays zero."""
    return torch.where(norms > 0, norms, 1.0)

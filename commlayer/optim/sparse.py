"""Optimizers for sparse gradients, with lazy updates (see lazy.py).

Adam: let q be sqrt(v) at the last touch. Step i after that would have moved the element by W_i * m / (q + E_i). The moments
decay by known factors. W_i combines those of m over those of sqrt(v), the rate and the bias corrections; E_i is eps over the
same decay of sqrt(v). The sum over k steps is therefore the same function of q and m for all elements. If eps is small relative
to q, the sum is m / q times the sum of W. Otherwise two terms W / (q + E) with the first four moments of all k terms replace
them (Gauss quadrature). docs/how-to/optimizers.md states the accuracy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from commlayer.optim.lazy import ROWS, LazyOptimizer, Memo, flat, groups, zeros
from commlayer.optim.sparse_gradients import SparseEntries, core

NO_ROWS = torch.zeros(ROWS, 4)


class SparseSGD(LazyOptimizer):
    """torch.optim.SGD whose step costs only the touched elements if `.grad` is sparse. Dense gradients use torch's own step.

    `lag`: largest number of missed steps of any weight; see docs/how-to/optimizers.md.

    >>> optimizer = SparseSGD(model.parameters(), lr=0.1, momentum=0.9)  # doctest: +SKIP
    """

    _no_steps = torch.eye(2, dtype=torch.float64)[None]

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, lag: int = 4,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            self._require(name, value, "a number >= 0", value >= 0)
        fits = not nesterov or (momentum > 0 and dampening == 0)
        self._require("nesterov", nesterov, "with momentum > 0 and dampening 0", fits)
        super().__init__(params, {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
                                  "nesterov": nesterov, "lag": lag})

    def _dense(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        buffers = [self.state[p].get("momentum_buffer") for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        sgd(params, grads, buffers, lr=group["lr"], momentum=group["momentum"], dampening=group["dampening"],
            weight_decay=group["weight_decay"], nesterov=group["nesterov"], maximize=False)
        if group["momentum"]:
            for p, buffer in zip(params, buffers, strict=True):
                self.state[p]["momentum_buffer"] = buffer

    def _changes_untouched(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] or group["weight_decay"])

    def _number(self, p: torch.Tensor) -> int:
        """Returns 1 if the next step creates the momentum buffer, which then equals the gradient without dampening; otherwise
        0."""
        return int("momentum_buffer" not in self.state[p])

    def _advance(self, group: dict[str, Any], rows: torch.Tensor, number_: int) -> torch.Tensor:
        rate, mu, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
        gain = 1.0 if number_ else 1.0 - group["dampening"]
        if mu == 0:
            step = [[1 - rate * decay, 0.0], [0.0, 1.0]]
        elif group["nesterov"]:
            step = [[1 - rate * decay * (1 + mu * gain), -rate * mu * mu], [gain * decay, mu]]
        else:
            step = [[1 - rate * gain * decay, -rate * mu], [gain * decay, mu]]
        return torch.cat([self._no_steps, torch.tensor(step, dtype=torch.float64) @ rows])

    def _kernel_table(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows - torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)).view(-1, 4)

    def _sparse(self, group: dict[str, Any], p: torch.Tensor, entries: SparseEntries, memo: Memo) -> None:
        state = self.state[p]
        if not group["momentum"] and "momentum_buffer" in state and "rows" in state and bool(state["rows"][:, 0, 1].any()):
            self._catch_up(p)  # momentum was switched off, after which torch leaves the buffer unchanged
        super()._sparse(group, p, entries, memo)

    def _touch(self, group: dict[str, Any], p: torch.Tensor, entries: SparseEntries, table: torch.Tensor | None) -> None:
        state, gain, buffer = self.state[p], 1.0 - group["dampening"], None
        if group["momentum"]:
            if "momentum_buffer" not in state:
                gain, state["momentum_buffer"] = 1.0, zeros(p)
            buffer = state["momentum_buffer"].view(-1)
        stamp, now = (state["stamp"], state["lazy_steps"] & 255) if table is not None else (None, 0)
        core().sgd_sparse(
            flat(p), buffer, stamp, now, NO_ROWS if table is None else table, *entries, float(group["lr"]),
            group["momentum"], gain, group["weight_decay"], group["nesterov"],
        )

    def _catch_up_range(self, p: torch.Tensor, low: int, high: int, table: torch.Tensor) -> None:
        state = self.state[p]
        buffer = state["momentum_buffer"].view(-1)[low:high] if "momentum_buffer" in state else None
        stamp = state["stamp"][groups(low, high)]
        core().sgd_catch_up(flat(p)[low:high], buffer, stamp, state["lazy_steps"] & 255, table)


FLAT = 1e-12
"""Relative variance below which all E of an element's missed steps count as equal."""
KEPT, BETA1, BETA2, MOMENTS = 0, 1, 2, 3
"""Columns of a table of missed updates: the factors of w, m and v, then the sums of W * E**j for j = 0 to 3."""


class SparseAdamW(LazyOptimizer):
    """torch.optim.AdamW whose step costs only the touched elements if `.grad` is sparse. Dense gradients use torch's own step.

    Unlike in torch.optim.SparseAdam, moments and weights of untouched elements change too. `lag`: largest number of missed
    steps of any weight; see docs/how-to/optimizers.md.

    >>> optimizer = SparseAdamW(model.parameters(), lr=3e-4)  # doctest: +SKIP
    """

    _unsupported: tuple[str, ...] = ("maximize", "amsgrad")
    _no_steps = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, lag: int = 4,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            self._require(name, value, "a number >= 0", value >= 0)
        self._require("betas", betas, "two numbers from 0 and below 1", len(betas) == 2 and all(0 <= b < 1 for b in betas))
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "lag": lag})

    def _moments(self, p: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if "exp_avg" not in state:
            state.update(step=torch.tensor(0.0), exp_avg=zeros(p), exp_avg_sq=zeros(p))
        return state

    def _dense(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        states = [self._moments(p) for p in params]
        beta1, beta2 = group["betas"]
        adamw(params, [p.grad for p in params if p.grad is not None], [s["exp_avg"] for s in states],
              [s["exp_avg_sq"] for s in states], [], [s["step"] for s in states], amsgrad=False, beta1=beta1, beta2=beta2,
              lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False)

    def _changes_untouched(self, group: dict[str, Any]) -> bool:
        return True

    def _number(self, p: torch.Tensor) -> int:
        """Returns the number of the next step, which determines the bias corrections."""
        return int(self._moments(p)["step"]) + 1

    def _advance(self, group: dict[str, Any], rows: torch.Tensor, number_: int) -> torch.Tensor:
        (beta1, beta2), rate, root = group["betas"], float(group["lr"]), math.sqrt(1 - group["betas"][1] ** number_)
        keep = 1 - rate * group["weight_decay"]
        later = rows * torch.tensor([keep, beta1, beta2, keep, keep, keep, keep], dtype=torch.float64)
        fallen = later[:, BETA2].sqrt()
        weight = rate * root / (1 - beta1**number_) * later[:, BETA1] / fallen
        for j in range(4):
            later[:, MOMENTS + j] += weight * (group["eps"] * root / fallen) ** j
        return torch.cat([self._no_steps, later])

    def _kernel_table(self, rows: torch.Tensor) -> torch.Tensor:
        kept, beta1, beta2, total, *sums = rows.unbind(1)
        sum_or_one = torch.where(total > 0, total, 1.0)
        mean, second, third = (s / sum_or_one for s in sums)
        variance = (second - mean**2).clamp(min=0)
        lean = third - 3 * mean * second + 2 * mean**3
        spread = variance > FLAT * mean**2
        half = torch.where(spread, lean / (2 * torch.where(spread, variance, 1.0)), 0.0)
        reach = (half**2 + variance).sqrt()  # the two nodes lie at mean + half - reach and mean + half + reach
        low, high = (torch.where(spread, mean + half + side * reach, mean).clamp(min=0) for side in (-1, 1))
        upper = torch.where(spread, total * (mean - low) / torch.where(spread, high - low, 1.0), 0.0)
        low, high = (torch.where(total > 0, node, 1.0) for node in (low, high))  # avoids 0 / 0 where no update is pending
        return torch.stack([kept - 1, beta1, beta2, total - upper, low, upper, high, torch.zeros_like(kept)], 1)

    def _step_numbers(self, group: dict[str, Any], number_: int) -> torch.Tensor:
        (beta1, beta2), rate = group["betas"], float(group["lr"])
        return torch.tensor([1 - rate * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, math.sqrt(1 - beta2**number_),
                             group["eps"], rate / (1 - beta1**number_)], dtype=torch.float64).to(torch.float32)

    def _touch(self, group: dict[str, Any], p: torch.Tensor, entries: SparseEntries, table: torch.Tensor | None) -> None:
        state = self._moments(p)
        assert table is not None
        numbers = self._step_numbers(group, self._number(p))
        core().adam_sparse(flat(p), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1), state["stamp"],
                           state["lazy_steps"] & 255, table, *entries, numbers)
        state["step"] += 1

    def _catch_up_range(self, p: torch.Tensor, low: int, high: int, table: torch.Tensor) -> None:
        state = self.state[p]
        memory = (x.view(-1)[low:high] for x in (p.detach(), state["exp_avg"], state["exp_avg_sq"]))
        stamp = state["stamp"][groups(low, high)]
        core().adam_catch_up(*memory, stamp, state["lazy_steps"] & 255, table)


class SparseAdam(SparseAdamW):
    """torch.optim.Adam whose step costs only the touched elements; otherwise like SparseAdamW. Weight decay is not supported:
    Adam adds it to v, so missed updates have no closed form.

    >>> optimizer = SparseAdam(model.parameters(), lr=3e-4)  # doctest: +SKIP
    """

    _unsupported: tuple[str, ...] = ("maximize", "amsgrad", "weight_decay")

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, *, lag: int = 4
    ) -> None:
        super().__init__(params, lr, betas, eps, 0.0, lag=lag)

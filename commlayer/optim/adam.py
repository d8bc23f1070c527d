"""Adam and AdamW on sparse gradients, equal to torch's after `flush`, except where eps matters.

The update that an untouched element has missed: let q be sqrt(v) at the last touch. Step i after that would have moved the
element by W_i * m / (q + E_i). The moments decay by known factors. W_i combines those of m over those of sqrt(v), the rate and
the bias corrections; E_i is eps over the same decay of sqrt(v). So the sum over k steps depends on q and m alone, by the same
function for all elements. Where eps is small relative to q, the sum is m / q times the sum of W. Elsewhere two terms W / (q +
E) with the first four moments of all k terms replace them (Gauss quadrature). docs/how-to/optimizers.md states the accuracy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from commlayer.optim.entries import Entries
from commlayer.optim.lazy import Lazy, flat, groups, number, zeros

FLAT = 1e-12
"""Below this relative variance all E count as equal."""
KEPT, BETA1, BETA2, MOMENTS = 0, 1, 2, 3
"""Columns of a table: the factors of w, m and v, then the sums of W * E**j for j = 0 to 3."""


class SparseAdamW(Lazy):
    """torch.optim.AdamW whose step costs only the touched elements if `.grad` is sparse. Dense gradients take torch's own step.

    Unlike in torch.optim.SparseAdam, moments and weights of untouched elements change too. `lag`: no weight is more than `lag`
    steps out of date; see docs/how-to/optimizers.md.

    >>> optimizer = SparseAdamW(model.parameters(), lr=3e-4)  # doctest: +SKIP
    """

    _without: tuple[str, ...] = ("maximize", "amsgrad")
    _nothing = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, lag: int = 4,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            self._allow(name, value, "a number >= 0", value >= 0)
        self._allow("betas", betas, "two numbers from 0 up to, but not, 1", len(betas) == 2 and all(0 <= b < 1 for b in betas))
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

    def _owes(self, group: dict[str, Any]) -> bool:
        return True

    def _number(self, p: torch.Tensor) -> int:
        """The number of the next step, which sets the bias corrections."""
        return int(self._moments(p)["step"]) + 1

    def _advance(self, group: dict[str, Any], rows: torch.Tensor, number_: int) -> torch.Tensor:
        (beta1, beta2), rate, root = group["betas"], number(group["lr"]), math.sqrt(1 - group["betas"][1] ** number_)
        keep = 1 - rate * group["weight_decay"]
        later = rows * torch.tensor([keep, beta1, beta2, keep, keep, keep, keep], dtype=torch.float64)
        fallen = later[:, BETA2].sqrt()
        weight = rate * root / (1 - beta1**number_) * later[:, BETA1] / fallen
        for j in range(4):
            later[:, MOMENTS + j] += weight * (group["eps"] * root / fallen) ** j
        return torch.cat([self._nothing, later])

    def _written(self, rows: torch.Tensor) -> torch.Tensor:
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
        (beta1, beta2), rate = group["betas"], number(group["lr"])
        return torch.tensor([1 - rate * group["weight_decay"], 1 - beta1, beta2, 1 - beta2, math.sqrt(1 - beta2**number_),
                             group["eps"], rate / (1 - beta1**number_)], dtype=torch.float64).to(torch.float32)

    def _touch(self, group: dict[str, Any], p: torch.Tensor, entries: Entries, table: torch.Tensor | None) -> None:
        state = self._moments(p)
        assert table is not None
        numbers = self._step_numbers(group, self._number(p)).to(p.device)
        self._kernels(p).adam_sparse(flat(p), state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1), state["stamp"],
                                     state["made"] & 255, table.to(p.device), *entries, numbers)
        state["step"] += 1

    def _make_up(self, p: torch.Tensor, low: int, high: int, table: torch.Tensor) -> None:
        state = self.state[p]
        memory = (x.view(-1)[low:high] for x in (p.detach(), state["exp_avg"], state["exp_avg_sq"]))
        self._kernels(p).adam_catch_up(*memory, state["stamp"][groups(low, high)], state["made"] & 255, table.to(p.device))


class SparseAdam(SparseAdamW):
    """As SparseAdamW, for torch.optim.Adam. No weight decay: Adam adds that to v, and missed updates then have no closed form.

    >>> optimizer = SparseAdam(model.parameters(), lr=3e-4)  # doctest: +SKIP
    """

    _without: tuple[str, ...] = ("maximize", "amsgrad", "weight_decay")

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, *, lag: int = 4
    ) -> None:
        super().__init__(params, lr, betas, eps, 0.0, lag=lag)

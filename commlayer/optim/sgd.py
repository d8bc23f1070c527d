"""SGD with momentum on sparse gradients, equal to torch.optim.SGD after `flush`."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from commlayer.optim.entries import Entries
from commlayer.optim.lazy import ROWS, Lazy, Memo, flat, groups, number, zeros

NO_ROWS = torch.zeros(ROWS, 4)


class SparseSGD(Lazy):
    """torch.optim.SGD whose step costs only the touched elements if `.grad` is sparse. Dense gradients take torch's own step.

    `lag`: no weight is more than `lag` steps out of date; see docs/how-to/optimizers.md.

    >>> optimizer = SparseSGD(model.parameters(), lr=0.1, momentum=0.9)  # doctest: +SKIP
    """

    _nothing = torch.eye(2, dtype=torch.float64)[None]

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, lag: int = 4,
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            self._allow(name, value, "a number >= 0", value >= 0)
        fits = not nesterov or (momentum > 0 and dampening == 0)
        self._allow("nesterov", nesterov, "with momentum > 0 and dampening 0", fits)
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

    def _owes(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] or group["weight_decay"])

    def _number(self, p: torch.Tensor) -> int:
        """1 if the next step creates the momentum buffer, which then is the gradient without dampening."""
        return int("momentum_buffer" not in self.state[p])

    def _advance(self, group: dict[str, Any], rows: torch.Tensor, number_: int) -> torch.Tensor:
        rate, mu, decay = number(group["lr"]), group["momentum"], group["weight_decay"]
        gain = 1.0 if number_ else 1.0 - group["dampening"]
        if mu == 0:
            step = [[1 - rate * decay, 0.0], [0.0, 1.0]]
        elif group["nesterov"]:
            step = [[1 - rate * decay * (1 + mu * gain), -rate * mu * mu], [gain * decay, mu]]
        else:
            step = [[1 - rate * gain * decay, -rate * mu], [gain * decay, mu]]
        return torch.cat([self._nothing, torch.tensor(step, dtype=torch.float64) @ rows])

    def _written(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows - torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)).view(-1, 4)

    def _sparse(self, group: dict[str, Any], p: torch.Tensor, entries: Entries, memo: Memo) -> None:
        state = self.state[p]
        if not group["momentum"] and "momentum_buffer" in state and "rows" in state and bool(state["rows"][:, 0, 1].any()):
            self._catch_up(p)  # momentum was switched off: from now on torch leaves the buffer unchanged
        super()._sparse(group, p, entries, memo)

    def _touch(self, group: dict[str, Any], p: torch.Tensor, entries: Entries, table: torch.Tensor | None) -> None:
        state, gain, buffer = self.state[p], 1.0 - group["dampening"], None
        if group["momentum"]:
            if "momentum_buffer" not in state:
                gain, state["momentum_buffer"] = 1.0, zeros(p)
            buffer = state["momentum_buffer"].view(-1)
        stamp, now = (state["stamp"], state["made"] & 255) if table is not None else (None, 0)
        self._kernels(p).sgd_sparse(
            flat(p), buffer, stamp, now, NO_ROWS if table is None else table.to(p.device), *entries, number(group["lr"]),
            group["momentum"], gain, group["weight_decay"], group["nesterov"],
        )

    def _make_up(self, p: torch.Tensor, low: int, high: int, table: torch.Tensor) -> None:
        state = self.state[p]
        buffer = state["momentum_buffer"].view(-1)[low:high] if "momentum_buffer" in state else None
        stamp = state["stamp"][groups(low, high)]
        self._kernels(p).sgd_catch_up(flat(p)[low:high], buffer, stamp, state["made"] & 255, table.to(p.device))

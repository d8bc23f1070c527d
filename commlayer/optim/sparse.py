"""Optimizers for sparse gradients: a step costs only the elements that the gradient touches (lazy updates).

After `flush`, SparseSGD and SparseAdamW equal torch's optimizers (Adam: except where eps matters). An untouched element misses
the update of a dense step with zero gradient, in which momentum moves it and decay shrinks it. One small table contains these
missed updates for all elements: row a applies the last a steps, with their learning rates. Each step multiplies the table by a
matrix, so any learning rate schedule is exact. Each group of elements has a stamp of one byte: the number of the last step that
was applied to the group. A group fills a cache line: if one of its elements is touched, the step updates the complete group.
Missed updates are applied when a group is touched, and by a sweep that passes through the tensor once in `lag` steps, which
limits the number of rows.

Adam: let q be sqrt(v) at the last touch. Step i after that would have moved the element by W_i * m / (q + E_i). The moments
decay by known factors. W_i combines those of m over those of sqrt(v), the rate and the bias corrections; E_i is eps over the
same decay of sqrt(v). So the sum over k steps is the same function of q and m for all elements. If eps is small relative to q,
the sum is m / q times the sum of W. Otherwise two terms W / (q + E) with the first four moments of all k terms replace them
(Gauss quadrature). docs/how-to/optimizers.md states the accuracy.

The kernels are native, for parameters on the CPU only. native/include/commlayer.h specifies each kernel. Dense gradients
work on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT
from torch.optim.sgd import sgd

from commlayer import native
from commlayer.errors import CorruptFrame, InvalidInput

GROUP = 16
"""Number of elements per stamp, as in native/include/commlayer.h."""
ROWS = 256
"""Number of rows of a table of missed updates, as in native/include/commlayer.h."""
MOST_LAG = 250
"""Largest allowed `lag`. If `lag` changes during a pass of the sweep, that pass takes one or two additional steps, which ROWS
allows for."""
PENDING_KEYS = ("stamp", "rows", "lazy_steps", "sweep_position")
"""Keys of a parameter's state that exist while some of its elements are out of date. torch's own optimizer has all other
keys."""

Memo = dict[Any, tuple[torch.Tensor, torch.Tensor]]
"""Cache for one step of the tables that several parameters share. The key is a table's id; the stored table keeps the id
unique."""


class LazyOptimizer(Optimizer):
    """Base class of SparseSGD and SparseAdamW."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._require("lag", defaults["lag"], f"1 to {MOST_LAG}", 1 <= defaults["lag"] <= MOST_LAG)
        super().__init__(params, defaults)

    def _require(self, name: str, got: Any, allowed: str, fits: bool, code: str = "E-OPTIM-ARGUMENT") -> None:
        if not fits:
            raise InvalidInput(code, f"{type(self).__name__}: {name}: got {got}, allowed: {allowed}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in param_group["params"]:
            if p.dtype != torch.float32:
                self.param_groups.pop()
                raise InvalidInput("E-OPTIM-PARAMETER",
                                   f"{type(self).__name__}: a parameter of shape {tuple(p.shape)} is {p.dtype}, allowed: "
                                   "torch.float32; use torch's optimizer for other dtypes")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps each parameter that has a `.grad`, dense or sparse COO. Checks all gradients before it changes any
        parameter."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, *self._split_parameters(group)) for group in self.param_groups]
        memo: Memo = {}
        for group, dense, sparse in work:
            for p in dense:
                self._catch_up(p)
            if dense:
                self._dense(group, dense)
            for p, entries in sparse:
                self._sparse(group, p, entries, memo)
        return loss

    def _split_parameters(self, group: dict[str, Any]) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, SparseEntries]]]:
        dense, sparse = [], []
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                sparse.append((p, gradient_entries(p, f"{type(self).__name__}: parameter of shape {tuple(p.shape)}")))
            else:
                dense.append(p)
        return dense, sparse

    def _sparse(self, group: dict[str, Any], p: torch.Tensor, entries: SparseEntries, memo: Memo) -> None:
        state = self.state[p]
        # A copied optimizer lacks this attribute.
        addresses: set[int] = self.__dict__.setdefault("_huge_page_requests", set())
        if p.data_ptr() not in addresses:
            addresses.add(p.data_ptr())
            core().huge_pages(flat(p))
        if "stamp" not in state and self._changes_untouched(group):
            stamp = torch.zeros(groups_of(p), dtype=torch.uint8)
            state.update(stamp=stamp, rows=self._no_steps, lazy_steps=0, sweep_position=0)
        if "stamp" not in state:
            self._touch(group, p, entries, None)
            return
        before, number = state["rows"], self._number(p)
        self._touch(group, p, entries, self._table(before, memo))
        key = (id(group), id(before), number)
        if key not in memo:
            memo[key] = before, self._advance(group, before, number)[:ROWS]
        state["rows"] = memo[key][1]
        state["lazy_steps"] += 1
        size = -(-groups_of(p) // group["lag"]) * GROUP
        low, high = state["sweep_position"], min(p.numel(), state["sweep_position"] + size)
        self._catch_up_range(p, low, high, self._table(state["rows"], memo))
        state["sweep_position"] = 0 if high == p.numel() else high

    def _table(self, rows: torch.Tensor, memo: Memo) -> torch.Tensor:
        """Returns the table of missed updates in the form of the kernels: float32, padded with rows of zeros to ROWS rows."""
        if id(rows) not in memo:
            written = self._kernel_table(rows)
            table = torch.zeros(ROWS, written.shape[1])
            table[: len(written)] = written
            memo[id(rows)] = rows, table
        return memo[id(rows)][1]

    def _catch_up(self, p: torch.Tensor) -> None:
        state = self.state[p]
        if "stamp" in state:
            self._catch_up_range(p, 0, p.numel(), self._table(state["rows"], {}))
            for name in PENDING_KEYS:
                del state[name]

    @torch.no_grad()
    def flush(self) -> None:
        """Applies all missed updates, after which weights equal those of the dense optimizer.

        Costs one pass over parameters with missed updates. Call `flush` before an evaluation, an export, or any other read of
        weights. If replicas must stay equal, all ranks must call `flush` after the same step.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    self._catch_up(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state. A state of torch's optimizer of the same kind can also be loaded. After `flush`, torch's optimizer can
        load a state of this one."""
        theirs: dict[Any, dict[str, Any]] = state_dict["state"]
        for group in state_dict["param_groups"]:
            for name in self._unsupported:
                self._require(f"option {name} of the loaded state", group.get(name), "none", not group.get(name),
                              "E-OPTIM-STATE")
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        plain = {**state_dict, "state": {n: {k: v for k, v in s.items() if k not in PENDING_KEYS} for n, s in theirs.items()}}
        plain["param_groups"] = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        super().load_state_dict(plain)
        copies: dict[int, torch.Tensor] = {}
        for number, p in zip(numbers, (p for group in self.param_groups for p in group["params"]), strict=True):
            for name in PENDING_KEYS:  # torch would cast these to the parameter's dtype
                if name in theirs.get(number, {}):
                    value = theirs[number][name]
                    if name == "rows":
                        value = copies.setdefault(id(value), value.detach().clone().to("cpu"))
                    self.state[p][name] = value.detach().clone() if name == "stamp" else value

    # ---- defined by each kind of optimizer

    _unsupported: tuple[str, ...] = ("maximize",)
    """Options of torch's optimizer that this optimizer does not support."""
    _no_steps: torch.Tensor
    """The table of missed updates before the first step."""

    def _dense(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """Steps parameters with dense gradients with torch's own step."""
        raise NotImplementedError

    def _changes_untouched(self, group: dict[str, Any]) -> bool:
        """True: a step changes elements that its gradient does not touch, through momentum or weight decay."""
        raise NotImplementedError

    def _number(self, p: torch.Tensor) -> int:
        """Returns the number that, with the hyperparameters, determines the next step's row of the table."""
        raise NotImplementedError

    def _advance(self, group: dict[str, Any], rows: torch.Tensor, number: int) -> torch.Tensor:
        """Returns the table of missed updates after one more step."""
        raise NotImplementedError

    def _kernel_table(self, rows: torch.Tensor) -> torch.Tensor:
        """Converts the rows of a table of missed updates to the form of the kernels."""
        raise NotImplementedError

    def _touch(self, group: dict[str, Any], p: torch.Tensor, entries: SparseEntries, table: torch.Tensor | None) -> None:
        raise NotImplementedError

    def _catch_up_range(self, p: torch.Tensor, low: int, high: int, table: torch.Tensor) -> None:
        raise NotImplementedError


def groups_of(p: torch.Tensor) -> int:
    return -(-p.numel() // GROUP)


def groups(low: int, high: int) -> slice:
    """Returns the groups of these elements, as a slice. `low` must be the first element of a group."""
    return slice(low // GROUP, -(-high // GROUP))


def flat(p: torch.Tensor) -> torch.Tensor:
    return p.detach().view(-1)


def zeros(p: torch.Tensor) -> torch.Tensor:
    """Returns zeros of the parameter's shape in huge pages, since accesses are scattered."""
    result = torch.empty_like(p, memory_format=torch.preserve_format, requires_grad=False)
    if result.is_contiguous() and result.device.type == "cpu" and native.core is not None:
        core().huge_pages(result)
    return result.zero_()


def core() -> ModuleType:
    """Returns the native kernels."""
    if native.core is None:
        raise InvalidInput("E-CODEC-BACKEND", "sparse gradients need the native core, which is not installed: install a C++ "
                                              "compiler and reinstall commlayer, or use torch's optimizers")
    return native.core


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


MOST = 2**32 - 1
POSITIONS_ATTRIBUTE = "_commlayer_positions"
"""Attribute of gradients that sparse_gradient() creates: their flat positions, and the gradient's version. Without it,
coordinates would be converted to positions, which takes longer than a step."""


class SparseEntries(NamedTuple):
    """Entries of a tensor in row-major order: each element at most once, positions increasing."""

    idx: torch.Tensor
    """Flat positions, as uint32 stored in int32."""
    values: torch.Tensor


def gradient_entries(parameter: torch.Tensor, what: str) -> SparseEntries:
    """Returns the entries of `parameter.grad`, which is sparse COO. Raises a one-line error that begins with `what` if they are
    invalid."""
    grad = cast(torch.Tensor, parameter.grad)
    if parameter.device.type != "cpu":
        raise InvalidInput("E-OPTIM-PARAMETER", f"{what}: it is on {parameter.device}, but a sparse gradient requires a "
                                                "parameter on the CPU; use torch's optimizer on a GPU")
    known: torch.Tensor | None
    known, version = getattr(grad, POSITIONS_ATTRIBUTE, (None, 0))
    if parameter.numel() > MOST:
        raise InvalidInput("E-OPTIM-PARAMETER",
                           f"{what}: it has {parameter.numel()} elements, allowed with a sparse gradient: {MOST}; split the "
                           "parameter")
    if not parameter.is_contiguous():
        raise InvalidInput("E-OPTIM-PARAMETER",
                           f"{what}: its strides are {tuple(parameter.stride())}, but a sparse gradient requires a row-major "
                           "parameter: make it contiguous()")
    if known is not None and grad._version == version and grad.shape == parameter.shape:
        return SparseEntries(known, grad._values().contiguous())
    if not grad.is_coalesced():
        _check_range(grad, what)
        grad = grad.coalesce()
    at, values, sparse = grad._indices(), grad._values(), grad.sparse_dim()
    block = math.prod(parameter.shape[sparse:])
    idx = (torch.empty if sparse else torch.zeros)(at.shape[1], dtype=torch.int32)
    if sparse:
        try:
            core().flat_positions(idx, at.contiguous(), tuple(parameter.shape[:sparse]))
        except CorruptFrame:
            _check_range(grad, what)
            raise InvalidInput("E-OPTIM-GRADIENT",
                               f"{what}: the positions of its sparse gradient do not increase, although it is marked "
                               "as coalesced: build it without is_coalesced=True") from None
    if block != 1:  # complete rows, as from nn.Embedding(sparse=True)
        rows = (idx.to(torch.int64) & MOST) * block
        idx = (rows[:, None] + torch.arange(block)).view(-1).to(torch.int32)
    return SparseEntries(idx, values.contiguous().view(-1))


def _check_range(grad: torch.Tensor, what: str) -> None:
    at, shape = grad._indices(), grad.shape
    for d in range(at.shape[0]):
        low, high = (int(x) for x in at[d].aminmax()) if at.shape[1] else (0, -1)
        if low < 0 or high >= shape[d]:
            got = low if low < 0 else high
            raise InvalidInput("E-OPTIM-GRADIENT",
                               f"{what}: its sparse gradient has index {got} in dimension {d}, allowed: 0 to {shape[d] - 1}")


def sparse_gradient(idx: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a sparse COO gradient with these entries. Positions must increase and be inside the shape."""
    shape = tuple(shape)
    at = torch.empty((len(shape), idx.numel()), dtype=torch.int64)
    if shape:
        core().coordinates(at, idx, shape)
    gradient = torch.sparse_coo_tensor(at, values, shape, is_coalesced=True, check_invariants=False)
    setattr(gradient, POSITIONS_ATTRIBUTE, (idx, gradient._version))
    return gradient

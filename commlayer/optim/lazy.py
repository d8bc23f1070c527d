"""Lazy updates: a step with a sparse gradient costs only the elements that the gradient touches.

After `flush`, SparseSGD and SparseAdamW equal torch's optimizers (Adam: except where eps matters). An untouched element misses
the update of a dense step with zero gradient, in which momentum moves it and decay shrinks it. One small table contains these
missed updates for all elements: row a applies the last `a` steps, with their learning rates. Each step multiplies the table by
a matrix, so any learning rate schedule is exact. Each group of elements has a stamp of one byte: the number of the last step
that was applied to the group. A group fills a cache line: if one of its elements is touched, the step updates the complete
group. Missed updates are applied when a group is touched, and by a sweep that passes through the tensor once in `lag` steps,
which limits the number of rows.

The kernels are native, for parameters on the CPU only. native/include/commlayer.h specifies each kernel. Dense gradients
work on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from commlayer import native
from commlayer.errors import InvalidInput
from commlayer.optim.sparse_gradients import SparseEntries, core, gradient_entries

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
            stamp = torch.zeros(count_groups(p), dtype=torch.uint8)
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
        size = -(-count_groups(p) // group["lag"]) * GROUP
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

    # Each kind of optimizer defines the following.

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


def count_groups(p: torch.Tensor) -> int:
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

"""Base of optimizers whose step costs only the elements that a sparse gradient touches (lazy updates).

An untouched element misses the update of a dense step with zero gradient: momentum moves it and decay shrinks it. One small
table holds these updates for all elements: row a makes up for the last a steps, with the rates of those steps. The table is a
product of each step's own row, so any schedule stays exact. One byte per group of elements, its stamp, states the step up to
which the group is current. A group fills a cache line: if one of its elements is touched, all of them make that step.
Groups are brought up to date when touched, and by a sweep that passes through the tensor once in `lag` steps. So no older row
is ever needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from commlayer.errors import InvalidInput
from commlayer.optim import kernels
from commlayer.optim.entries import Entries, entries_of
from commlayer.optim.torch_kernels import GROUP

ROWS = 256
"""As in native/include/commlayer.h."""
MOST_LAG = 250
"""If `lag` changes during a pass of the sweep, that pass takes a step or two longer: ROWS leaves room for them."""
BEHIND = ("stamp", "rows", "made", "swept")
"""Keys of a parameter's state while some of its elements are out of date. The rest is the state of torch's own optimizer."""

Memo = dict[Any, tuple[torch.Tensor, torch.Tensor]]
"""Cache of one step for tables that parameters share. Keyed by a table's id; holding the table keeps the id unique."""


class Lazy(Optimizer):
    """Common part of SparseSGD and SparseAdamW."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._allow("lag", defaults["lag"], f"1 to {MOST_LAG}", 1 <= defaults["lag"] <= MOST_LAG)
        super().__init__(params, defaults)

    def _allow(self, name: str, got: Any, allowed: str, fits: bool, code: str = "E-OPTIM-ARGUMENT") -> None:
        if not fits:
            raise InvalidInput(code, f"{type(self).__name__}: {name} {got}, allowed: {allowed}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in param_group["params"]:
            if p.dtype != torch.float32:
                self.param_groups.pop()
                raise InvalidInput("E-OPTIM-PARAMETER",
                                   f"{type(self).__name__}: a parameter of shape {tuple(p.shape)} is {p.dtype}, allowed is "
                                   f"torch.float32; give the others to an optimizer of torch's")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps each parameter that has a `.grad`, dense or sparse COO. All are checked before any is changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, *self._sorted(group)) for group in self.param_groups]
        memo: Memo = {}
        for group, dense, sparse in work:
            for p in dense:
                self._catch_up(p)
            if dense:
                self._dense(group, dense)
            for p, entries in sparse:
                self._sparse(group, p, entries, memo)
        return loss

    def _sorted(self, group: dict[str, Any]) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, Entries]]]:
        dense, sparse = [], []
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                sparse.append((p, entries_of(p, f"{type(self).__name__}: parameter of shape {tuple(p.shape)}")))
            else:
                dense.append(p)
        return dense, sparse

    def _sparse(self, group: dict[str, Any], p: torch.Tensor, entries: Entries, memo: Memo) -> None:
        state = self.state[p]
        addresses: set[int] = self.__dict__.setdefault("_asked", set())  # copies of an optimizer lack attributes of their own
        if p.data_ptr() not in addresses:
            addresses.add(p.data_ptr())
            self._kernels(p).huge_pages(flat(p))
        if "stamp" not in state and self._owes(group):
            stamp = torch.zeros(groups_of(p), dtype=torch.uint8, device=p.device)
            state.update(stamp=stamp, rows=self._nothing, made=0, swept=0)
        if "stamp" not in state:
            self._touch(group, p, entries, None)
            return
        before, number = state["rows"], self._number(p)
        self._touch(group, p, entries, self._table(before, memo))
        key = (id(group), id(before), number)
        if key not in memo:
            memo[key] = before, self._advance(group, before, number)[:ROWS]
        state["rows"] = memo[key][1]
        state["made"] += 1
        size = -(-groups_of(p) // group["lag"]) * GROUP
        low, high = state["swept"], min(p.numel(), state["swept"] + size)
        self._make_up(p, low, high, self._table(state["rows"], memo))
        state["swept"] = 0 if high == p.numel() else high

    def _table(self, rows: torch.Tensor, memo: Memo) -> torch.Tensor:
        """The table in the kernels' form: float32, padded with rows of zeros to ROWS."""
        if id(rows) not in memo:
            written = self._written(rows)
            table = torch.zeros(ROWS, written.shape[1])
            table[: len(written)] = written
            memo[id(rows)] = rows, table
        return memo[id(rows)][1]

    def _catch_up(self, p: torch.Tensor) -> None:
        state = self.state[p]
        if "stamp" in state:
            self._make_up(p, 0, p.numel(), self._table(state["rows"], {}))
            for name in BEHIND:
                del state[name]

    @torch.no_grad()
    def flush(self) -> None:
        """Brings all weights up to date: they then equal those of the dense optimizer.

        Costs one pass over the parameters that are out of date. Call it before an evaluation, an export, or any read of
        weights. If replicas must stay equal, all ranks must call it after the same step.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    self._catch_up(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also loads a state of torch's optimizer of the same kind. After `flush`, torch's can load this one's."""
        theirs: dict[Any, dict[str, Any]] = state_dict["state"]
        for group in state_dict["param_groups"]:
            for name in self._without:
                self._allow(f"a state with {name}", group.get(name), "none", not group.get(name), "E-OPTIM-STATE")
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, p in zip(numbers, (p for group in self.param_groups for p in group["params"]), strict=False):
            stamps = theirs.get(number, {}).get("stamp")
            self._allow("a state with stamps for", None if stamps is None else stamps.numel(),
                        f"{groups_of(p)}, one for every {GROUP} weights; an older version saves none behind flush()",
                        stamps is None or stamps.numel() == groups_of(p), "E-OPTIM-STATE")
        plain = {**state_dict, "state": {n: {k: v for k, v in s.items() if k not in BEHIND} for n, s in theirs.items()}}
        plain["param_groups"] = [{**self.defaults, **group} for group in state_dict["param_groups"]]
        super().load_state_dict(plain)
        copies: dict[int, torch.Tensor] = {}
        for number, p in zip(numbers, (p for group in self.param_groups for p in group["params"]), strict=True):
            for name in BEHIND:  # torch would cast these to the parameter's dtype
                if name in theirs.get(number, {}):
                    value = theirs[number][name]
                    if name == "rows":
                        value = copies.setdefault(id(value), value.detach().clone().to("cpu"))
                    self.state[p][name] = value.detach().to(p.device, copy=True) if name == "stamp" else value

    def _kernels(self, p: torch.Tensor) -> Any:
        return kernels.kernels_of(p)

    # ---- defined by each kind of optimizer

    _without: tuple[str, ...] = ("maximize",)
    """Options of torch's optimizer that this one does not support."""
    _nothing: torch.Tensor
    """The table after no step."""

    def _dense(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """torch's own step."""
        raise NotImplementedError

    def _owes(self, group: dict[str, Any]) -> bool:
        """Whether a step changes elements that it does not touch."""
        raise NotImplementedError

    def _number(self, p: torch.Tensor) -> int:
        """A number on which the next step's row depends, in addition to the group."""
        raise NotImplementedError

    def _advance(self, group: dict[str, Any], rows: torch.Tensor, number: int) -> torch.Tensor:
        """The table after one more step."""
        raise NotImplementedError

    def _written(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of a table in the kernels' form."""
        raise NotImplementedError

    def _touch(self, group: dict[str, Any], p: torch.Tensor, entries: Entries, table: torch.Tensor | None) -> None:
        raise NotImplementedError

    def _make_up(self, p: torch.Tensor, low: int, high: int, table: torch.Tensor) -> None:
        raise NotImplementedError


def groups_of(p: torch.Tensor) -> int:
    return -(-p.numel() // GROUP)


def groups(low: int, high: int) -> slice:
    """The groups of these elements. `low` must begin a group."""
    return slice(low // GROUP, -(-high // GROUP))


def flat(p: torch.Tensor) -> torch.Tensor:
    return p.detach().view(-1)


def zeros(p: torch.Tensor) -> torch.Tensor:
    """Zeros of the parameter's shape, on huge pages, since accesses are far apart."""
    result = torch.empty_like(p, memory_format=torch.preserve_format, requires_grad=False)
    if result.is_contiguous():
        kernels.kernels_of(result).huge_pages(result)
    return result.zero_()


def number(x: Any) -> float:
    """A learning rate as a float; it may be a tensor."""
    return float(cast(float, x))

"""Optimizers whose step costs what its sparse gradient touches. Knows torch's optimizers and kernels; no plans and no peers.

An element that a step does not touch owes what dense steps with a gradient of zero would have done to it: momentum moves it and
decay shrinks it. How much is one small table for all elements: row a makes up for the last a steps, with the rates that these
had. It is a product of each step's own row, so schedules of any kind stay exact. A byte for each group of elements says with
which step they are up to date. A group is what a cache line holds: where one of its elements is touched, all make that step.
Groups are brought up to date then, and by a sweep that goes round the tensor once in `lag` steps: no row further back is ever
needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from commlayer.errors import InvalidInput
from commlayer.optim import kernels
from commlayer.optim.entries import Entries, entries_of
from commlayer.optim.reference import GROUP

ROWS = 256
"""As in native/include/commlayer.h."""
MOST_LAG = 250
"""Where `lag` changes during a round of the sweep, that round takes a step or two more."""
BEHIND = ("stamp", "rows", "made", "swept")
"""Of a parameter's state, while some of its elements are behind. The rest is that of torch's own optimizer."""

Memo = dict[Any, tuple[torch.Tensor, torch.Tensor]]
"""Within a step: what was made of a table that parameters share, by its identity, and the table, so that this stays its own."""


class Lazy(Optimizer):
    """What SparseSGD and SparseAdamW share."""

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
        """One step of every parameter that has a `.grad`, dense or sparse COO. All are checked before any is changed."""
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
        asked: set[int] = self.__dict__.setdefault("_asked", set())  # copies of an optimizer have no attributes of their own
        if p.data_ptr() not in asked:
            asked.add(p.data_ptr())
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
        """As kernels read it: all rows, in float32, what is not there being zeros."""
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
        """Brings every weight up to date: then all are what the dense optimizer would have made of them.

        One pass over the parameters that are behind, ahead of an evaluation, of reading weights, or of an export. Where
        replicas must stay the same, all ranks call it behind the same step.
        """
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    self._catch_up(p)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also takes a state of torch's optimizer of the same kind, and gives it one after `flush`."""
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
        return kernels.of(p)

    # ---- what a kind of optimizer says

    _without: tuple[str, ...] = ("maximize",)
    """Options of torch's that it has not."""
    _nothing: torch.Tensor
    """The table behind no step."""

    def _dense(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """A step of torch's own."""
        raise NotImplementedError

    def _owes(self, group: dict[str, Any]) -> bool:
        """Whether a step changes what it does not touch."""
        raise NotImplementedError

    def _number(self, p: torch.Tensor) -> int:
        """What the next step's row depends on besides the group."""
        raise NotImplementedError

    def _advance(self, group: dict[str, Any], rows: torch.Tensor, number: int) -> torch.Tensor:
        """The table behind one more step."""
        raise NotImplementedError

    def _written(self, rows: torch.Tensor) -> torch.Tensor:
        """A table's rows as kernels read them."""
        raise NotImplementedError

    def _touch(self, group: dict[str, Any], p: torch.Tensor, entries: Entries, table: torch.Tensor | None) -> None:
        raise NotImplementedError

    def _make_up(self, p: torch.Tensor, low: int, high: int, table: torch.Tensor) -> None:
        raise NotImplementedError


def groups_of(p: torch.Tensor) -> int:
    return -(-p.numel() // GROUP)


def groups(low: int, high: int) -> slice:
    """Those of these elements, the first of which begins one."""
    return slice(low // GROUP, -(-high // GROUP))


def flat(p: torch.Tensor) -> torch.Tensor:
    """A parameter's memory."""
    return p.detach().view(-1)


def zeros(p: torch.Tensor) -> torch.Tensor:
    """Of a parameter's shape, for entries that are far apart."""
    made = torch.empty_like(p, memory_format=torch.preserve_format, requires_grad=False)
    if made.is_contiguous():
        kernels.of(made).huge_pages(made)
    return made.zero_()


def number(x: Any) -> float:
    """A rate, which may be a tensor."""
    return float(cast(float, x))

"""A stale bucket's results, from their arrival to the step that uses them. Knows one flow; no peers, no optimizer.

The bucket's exchange of step t runs on behind that step. Its result lies in the flow's y until the flow is pushed again, moves
here then, and is written with the averages of step t + 1. So a flow has one exchange under way at a time, codecs see their
steps in order, and every rank uses the same result in the same step.

A result that was written but not applied (the optimizer skipped the step, or gradients were cleared) is held again and added
to the next. What such a step itself coded is taken back, as with buckets that are in time. A late result that is not finite is
taken back, too, and makes the step that would have used it one to skip: unless the step that it belongs to was skipped already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from commlayer.compressors.codec import ranges
from commlayer.compressors.debts import Debt, cut_of, spread

if TYPE_CHECKING:
    from commlayer.runtime.flow import Flow

NAN = float("nan")
LOOK_S = 0.1
"""Between two looks whether the wait for a result has become useless."""


class LateResult:
    """One flow's. `push` and `arrived` come from different threads; the rest is for who drives the flow just then."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.x = torch.zeros_like(flow.x)
        self._views = flow.views_of(self.x)
        self.weight = 0.0
        self._slices = self._written = 0
        """One bit per slice: what is held to be used, and what was written and may come back."""
        self._spoilt = self._skipped = False
        self._unread = False
        """Whether the flow's y holds a result that has not been taken."""
        self._lock = threading.Lock()
        self._here = threading.Event()
        self._here.set()
        self._next: Callable[[], None] | None = None

    # ---- the exchange

    def push(self, start: Callable[[], None]) -> None:
        """Starts the flow's next exchange: now, or when the result under way is here."""
        with self._lock:
            if not self._here.is_set():
                self._next = start
                return
            self._here.clear()
        start()

    def arrived(self) -> None:
        """The flow's y holds a result."""
        with self._lock:
            self._unread = True
            start, self._next = self._next, None
            if start is None:
                self._here.set()
        if start is not None:
            start()

    @property
    def blocked(self) -> bool:
        """Whether a step waits for the result of the one before."""
        return self._next is not None

    def wait(self, deadline: float, failed: Callable[[], BaseException | None]) -> bool:
        """Until nothing is under way. False: something was, when the deadline passed or there was an error."""
        while not self._here.wait(LOOK_S):
            if failed() is not None or time.monotonic() > deadline:
                return False
        return True

    def take(self) -> None:
        """Makes room in the flow's y. After the step that the result belongs to."""
        flow = self._flow
        dropped, flow.unapplied = flow.unapplied, 0
        self._slices |= dropped & self._written
        self._written &= ~dropped
        if not self._unread:
            return
        self._unread = False
        if not flow.finite:
            self._spoilt = self._spoilt or not self._skipped
            dropped = flow.all_slices
        flow.unapplied = dropped | flow.all_slices & ~flow.used
        self._add(flow.used & ~flow.unapplied)
        flow.take_back()

    def _add(self, slices: int) -> None:
        """y's slices, beside or on top of what is held."""
        flow = self._flow
        if not slices:
            return
        if self._slices and not flow.in_means:  # in means all results are of one unit
            self.x.mul_(flow.weight / self.weight)
        for start, stop in ranges(cut_of(flow.bucket.slices, slices & self._slices), flow.numel):
            self.x[start:stop] += flow.y[start:stop]
        for start, stop in ranges(cut_of(flow.bucket.slices, slices & ~self._slices), flow.numel):
            self.x[start:stop] = flow.y[start:stop]
        self.weight = flow.weight
        self._slices |= slices

    # ---- its use

    @property
    def full(self) -> bool:
        """Whether there is something to use."""
        return self._slices > 0

    @property
    def used(self) -> int:
        """Slices that get something written: none before the first result, so that optimizers leave them alone."""
        return self._flow.all_slices if self._spoilt else self._slices

    def commit(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> bool:
        """targets = what is held times factor, zeros where that is nothing. False: it is NaN, and the step one to skip."""
        self._forget_others()
        for view, target in self._flow.parts(targets, self._views):
            if self._slices and not self._spoilt:
                torch.mul(view, factor, out=target.detach())
            else:
                target.detach().fill_(NAN if self._spoilt else 0.0)
        return not self._spoilt

    def _forget_others(self) -> None:
        """What was written in an earlier step and not held again."""
        for start, stop in ranges(cut_of(self._flow.bucket.slices, self._flow.all_slices & ~self._slices), self._flow.numel):
            self.x[start:stop] = 0.0

    def settle(self, *, applied: bool) -> None:
        """After a commit: whether the optimizer got it."""
        self._spoilt, self._skipped = False, not applied
        self._written = self._slices if applied else 0
        self._slices = 0 if applied else self._slices

    def debts(self, weight: float, members: int) -> list[Debt]:
        """What is held, as something that each worker owes in proportion to its weight."""
        if not self._slices or not self.weight:
            return []
        self._forget_others()
        worth = 1.0 if self._flow.in_means else members / self.weight
        return list(spread(self._flow.bucket.slices, 0, self.x * (worth * weight / self.weight)))

    def snapshot(self) -> dict[str, torch.Tensor]:
        """For a checkpoint, with nothing under way or unread."""
        told = {"spoilt": torch.tensor(self._spoilt)}
        if not self._slices:
            return told
        flags = [bool(self._slices >> i & 1) for i in range(self._flow.nslices)]
        weight = torch.tensor(self.weight, dtype=torch.float64)
        return told | {"x": self.x.cpu().clone(), "weight": weight, "used": torch.tensor(flags)}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The reverse; of nothing: as before the first step."""
        self._spoilt = bool(tensors.get("spoilt", False))
        self._slices = self._written = 0
        if "x" in tensors:
            self.x.copy_(tensors["x"])
            self.weight = float(tensors["weight"])
            self._slices = sum(1 << i for i, flag in enumerate(tensors["used"].tolist()) if flag)

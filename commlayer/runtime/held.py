"""A stale bucket's results, from their arrival to the step that uses them. Knows one flow; no peers, no optimizer.

The bucket's exchange of step t runs on behind that step. Its result lies in the flow's x until the flow is pushed again, moves
here then, and is written with the averages of step t + 1. So a flow has one exchange under way at a time, codecs see their
steps in order, and every rank uses the same result in the same step.

A step that the optimizer skips keeps its late results for the next one that it does not skip; they add up. A late result that
is not finite goes back to the workers' residuals at once, and makes the step that would have used it one to skip: unless the
step that it belongs to was skipped already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from commlayer.compressors.debts import Debt, spread

if TYPE_CHECKING:
    from commlayer.runtime.flow import Flow

NAN = float("nan")
LOOK_S = 0.1
"""Between two looks whether the wait for a result has become useless."""


class Held:
    """One flow's. `push` and `arrived` come from different threads; the rest is for who drives the flow just then."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.x = torch.zeros_like(flow.x)
        self._views = flow.views_of(self.x)
        self.weight, self._used = 0.0, 0
        self._full = self._spoilt = self._skipped = False
        self._unread = False
        """Whether the flow's x holds a result that has not been taken."""
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
        """The flow's x holds a result."""
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
        """Makes room in the flow's x. After the step that the result belongs to."""
        if not self._unread:
            return
        self._unread = False
        flow = self._flow
        if not flow.finite:
            flow.undo()
            flow.keep_carried()
            self._spoilt = self._spoilt or not self._skipped
        elif self._full and self.weight:
            self.x.mul_(flow.weight / self.weight).add_(flow.x)
            self.weight, self._used = flow.weight, self._used | flow.used
        else:
            self.x.copy_(flow.x)
            self.weight, self._used, self._full = flow.weight, flow.used, True

    # ---- its use

    @property
    def full(self) -> bool:
        """Whether there is something to use."""
        return self._full

    @property
    def used(self) -> int:
        """Slices that get something written: none before the first result, so that optimizers leave them alone."""
        return (1 << self._flow.nslices) - 1 if self._spoilt else self._used if self._full else 0

    def commit(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> bool:
        """targets = what is held times factor, zeros where that is nothing. False: it is NaN, and the step one to skip."""
        for view, target in self._flow.parts(targets, self._views):
            if self._full and not self._spoilt:
                torch.mul(view, factor, out=target.detach())
            else:
                target.detach().fill_(NAN if self._spoilt else 0.0)
        return not self._spoilt

    def settle(self, *, applied: bool) -> None:
        """After a commit: whether the optimizer got it."""
        self._spoilt, self._skipped = False, not applied
        self._full = self._full and not applied

    def debts(self, weight: float) -> list[Debt]:
        """What is held, as something that each worker owes in proportion to its weight."""
        return list(spread(self._flow.bucket.slices, 0, self.x * (weight / self.weight))) if self._full and self.weight else []

    def snapshot(self) -> dict[str, torch.Tensor]:
        """For a checkpoint, with nothing under way or unread."""
        flags = [bool(self._used >> i & 1) for i in range(self._flow.nslices)]
        told = {"spoilt": torch.tensor(self._spoilt)}
        if not self._full:
            return told
        weight = torch.tensor(self.weight, dtype=torch.float64)
        return told | {"x": self.x.cpu().clone(), "weight": weight, "used": torch.tensor(flags)}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The reverse; of nothing: as before the first step."""
        self._spoilt = bool(tensors.get("spoilt", False))
        self._full = "x" in tensors
        if self._full:
            self.x.copy_(tensors["x"])
            self.weight = float(tensors["weight"])
            self._used = sum(1 << i for i, flag in enumerate(tensors["used"].tolist()) if flag)

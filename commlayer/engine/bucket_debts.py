"""What one bucket owes: residuals, debts of earlier plans, and what of its last exchange was not applied. Knows no routes.

What is owed has one word for each thing. A residual is what a codec keeps back of what it was given, in its state. A debt is
any of it, by elements, as it goes from plan to plan. `carry` is the debt that this bucket took over from an earlier plan; it
goes out with the next gradients, and `carried` is what of it went with the last.
"""

from __future__ import annotations

from typing import Protocol

import torch

from commlayer.compressors.codec import Codec, State
from commlayer.compressors.debts import Debt, cut_of, owed, spread
from commlayer.compressors.feedback import add_where
from commlayer.records import Slice

TINY = 1e-30
"""In place of a weight of nothing, which ends the step with an error."""


class Entries(Protocol):
    """Tells codecs how much to send: entries_sent.py."""

    def begin(self, step: int) -> None:
        """Ahead of each encode of that step."""
        ...

    def forget(self) -> None:
        """States are others now, and the step may come again."""
        ...


class BucketDebts:
    """A WorkerBucket's."""

    codec: Codec
    state: State
    slices: tuple[Slice, ...]
    coders: list[tuple[tuple[int, int], State]]
    carry: torch.Tensor | None
    carried: torch.Tensor | None
    entries: Entries | None
    tail_y: torch.Tensor
    numel: int
    nslices: int
    used: int
    unapplied: int
    undone: int
    weight: float
    total: float
    buffer: bool
    codes: bool
    finite: bool
    served: bool
    sound: bool

    @property
    def coded_x(self) -> torch.Tensor:
        """What the codec is given."""
        raise NotImplementedError

    @property
    def result(self) -> torch.Tensor:
        """What came back, where it is read at least cost."""
        raise NotImplementedError

    def debts(self) -> list[Debt]:
        """What this worker owes on the bucket's elements, in the unit of residuals: see Units.worth."""
        found = [] if self.carry is None else list(spread(self.slices, 0, self.carry))
        for (low, high), state in self.coders:
            if (values := owed(state, high - low)) is not None:
                found += spread(self.slices, low, values)
        return found

    def judge(self, *, finite: bool) -> None:
        """The step is over. A slice that nobody used is applied nowhere, nor is anything of a step that is not finite."""
        if self.buffer:
            return
        self.sound = self.finite
        self.unapplied = self.all_slices & ~self.used if finite else self.all_slices
        if finite:
            self.carry_on(self.used)

    def carry_on(self, slices: int) -> None:
        """Of these slices' average, applied: what went along has reached the mean but for a part, which goes with the next."""
        if self.carried is not None and (left := 1.0 - self._paid()):
            rest = torch.zeros_like(self.carried)
            add_where(rest, self.carried * left, cut_of(self.slices, slices))
            self.carried = self.carried - rest  # a part that is taken back yet
            self.carry = rest if self.carry is None else self.carry + rest

    def _paid(self) -> float:
        """The part of what was carried that reached the mean: all of it, where all workers weighed what this one took for
        granted, or where it has coded again. Other ranks of its node took what they did."""
        return self.total / max(self.weight if self.served else float(self.tail_y[-1]), TINY)

    @property
    def all_slices(self) -> int:
        return (1 << self.nslices) - 1

    def forget(self) -> None:
        """Its state is another now: what the last exchange coded is in none that could be taken back."""
        self.codes, self.unapplied, self.undone, self.carried = False, 0, 0, None
        if self.entries is not None:
            self.entries.forget()

    def take_back(self) -> int:
        """Makes undone what of the last exchange was not applied, ahead of the next one. The slices that it took back."""
        back, self.unapplied = self.unapplied, 0
        if back:
            cut = cut_of(self.slices, back)
            if self.codes:
                self.codec.undo(self.state, self.coded_x, cut)
            if self.carried is not None:
                self.carry = torch.zeros_like(self.carried) if self.carry is None else self.carry
                add_where(self.carry, self.carried, cut)
            self.undone |= back
        return back

"""What one bucket still has to send: residuals, residuals of earlier plans, and averages that were not applied.

A residual is the part of a codec's input that was not sent; the codec keeps it in its state. A `ResidualSlice` is a residual by
element range, in the form in which it moves between plans. `carry` is the inherited residual, from an earlier plan. `carry` is
sent with the next gradients; `carried` is the part that was sent with the last ones.
"""

from __future__ import annotations

from typing import Protocol

import torch

from commlayer.compressors.codec import Codec, State
from commlayer.compressors.feedback import ResidualSlice, add_ranges, ranges_of, residual_of, split_by_tensor
from commlayer.records import Slice

TINY = 1e-30
"""Replaces a total weight of 0, which ends the step with an error."""


class Entries(Protocol):
    """Sets how much codecs send: entries_sent.py."""

    def begin(self, step: int) -> None:
        """Called before each encode of that step."""
        ...

    def forget(self) -> None:
        """Codec states were replaced, and the step may be repeated."""
        ...


class BucketDebts:
    """The residuals of a WorkerBucket."""

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
        """The codec's input."""
        raise NotImplementedError

    @property
    def result(self) -> torch.Tensor:
        """The received sum, in the memory where reading it costs least."""
        raise NotImplementedError

    def debts(self) -> list[ResidualSlice]:
        """This worker's residuals on the bucket's elements, in the unit of residuals (Units.worth)."""
        debts = [] if self.carry is None else list(split_by_tensor(self.slices, 0, self.carry))
        for (low, high), state in self.coders:
            if (values := residual_of(state, high - low)) is not None:
                debts += split_by_tensor(self.slices, low, values)
        return debts

    def judge(self, *, finite: bool) -> None:
        """Finalizes a step. A slice that no rank used is not applied; neither is anything of a step that is not finite."""
        if self.buffer:
            return
        self.sound = self.finite
        self.unapplied = self.all_slices & ~self.used if finite else self.all_slices
        if finite:
            self.carry_on(self.used)

    def carry_on(self, slices: int) -> None:
        """These slices' average was applied. The part of the inherited residual that did not reach the mean goes with the next
        step."""
        if self.carried is not None and (unsent := 1.0 - self._paid()):
            remainder = torch.zeros_like(self.carried)
            add_ranges(remainder, self.carried * unsent, ranges_of(self.slices, slices))
            self.carried = self.carried - remainder  # so that `take_back` undoes only the part that was sent
            self.carry = remainder if self.carry is None else self.carry + remainder

    def _paid(self) -> float:
        """The fraction of `carried` that reached the mean. It is 1 if all workers weighed what this worker had assumed, or if
        this worker encoded again. Other ranks of its node keep their assumption."""
        return self.total / max(self.weight if self.served else float(self.tail_y[-1]), TINY)

    @property
    def all_slices(self) -> int:
        return (1 << self.nslices) - 1

    def forget(self) -> None:
        """The codec state was replaced, so the last exchange cannot be undone any more."""
        self.codes, self.unapplied, self.undone, self.carried = False, 0, 0, None
        if self.entries is not None:
            self.entries.forget()

    def take_back(self) -> int:
        """Undoes the part of the last exchange that was not applied, before the next exchange. Returns the slices that were
        undone."""
        slices, self.unapplied = self.unapplied, 0
        if slices:
            cut = ranges_of(self.slices, slices)
            if self.codes:
                self.codec.undo(self.state, self.coded_x, cut)
            if self.carried is not None:
                self.carry = torch.zeros_like(self.carried) if self.carry is None else self.carry
                add_ranges(self.carry, self.carried, cut)
            self.undone |= slices
        return slices

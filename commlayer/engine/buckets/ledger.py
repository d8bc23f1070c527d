"""Keeps the ledger of one bucket: the values that this worker still has to send, and which averages of the last exchange were
not applied.

A residual is the part of a codec's input that was not sent; the codec keeps it in its state. An inherited residual comes from
an earlier plan and is sent with the next gradients. An average that no optimizer applies is rolled back before the next
exchange: its content returns to the residuals. For every element, applied averages plus residuals therefore equal the
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from commlayer.compressors.codec import Ranges, State, states
from commlayer.compressors.feedback import add_ranges, find_residual, flagged_ranges
from commlayer.compressors.residual_slices import ResidualSlice, residual_on, split_by_tensor
from commlayer.records import Slice

Undo = Callable[[Ranges], None]
"""Function that rolls back the last encode of the given element ranges in the state of their codec."""


class Ledger:
    """Residuals and rollback of one bucket. Bit masks have one bit for each slice."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._slices = slices
        self.all_slices = (1 << len(slices)) - 1
        self.state: State = {}
        """State of the codec; with several encoders, maps the name of each encoder to its state."""
        self.encoders: list[tuple[tuple[int, int], State]] = []
        """Element range and codec state of each encoder whose residuals belong to this worker."""
        self.inherited: torch.Tensor | None = None
        """The residual of an earlier plan that will be sent with the next gradients."""
        self.sent: torch.Tensor | None = None
        """The inherited residual that was sent with the last gradients."""
        self._undo: Undo | None = None
        self.discarded = 0
        """Bit mask of the slices whose average in the last exchange was not applied and is not rolled back yet."""
        self.unreported = 0
        """Bit mask of the slices that were rolled back on this worker, but not yet reported to the server."""
        self.finite = True

    def open(self, x: torch.Tensor, worth: float) -> None:
        """Begins an exchange: adds the inherited residual times `worth` to the gradients `x`."""
        self._undo = None
        self.sent, self.inherited = self.inherited, None
        if self.sent is not None:
            x += self.sent.to(x.device) * worth

    def record(self, undo: Undo) -> None:
        """Records that a codec has encoded the gradients of this exchange. `undo` is the function that rolls back this encode.
        """
        self._undo = undo

    def applied(self, slices: int, share: float) -> None:
        """Records that the averages of the given slices were applied. `share`: the fraction of the sent inherited residual that
        reached the mean. The rest is sent again."""
        if self.sent is not None and share != 1.0:
            rest = torch.zeros_like(self.sent)
            add_ranges(rest, self.sent * (1.0 - share), flagged_ranges(self._slices, slices))
            self.sent = self.sent - rest  # so `roll_back` undoes only the part that was sent
            self.inherited = rest if self.inherited is None else self.inherited + rest

    def keep_for_later(self, x: torch.Tensor, worth: float) -> None:
        """Sends what was encoded in this exchange (`x`), which had no result, again with the next gradients."""
        self.sent, self.inherited = None, x / worth

    def discard(self, slices: int) -> None:
        self.discarded |= slices

    def roll_back(self) -> int:
        """Rolls back the discarded slices of the last exchange, before the next exchange: their content returns to the
        residuals. Returns the bit mask of these slices."""
        slices, self.discarded = self.discarded, 0
        if slices:
            cut = flagged_ranges(self._slices, slices)
            if self._undo is not None:
                self._undo(cut)
            if self.sent is not None:
                self.inherited = torch.zeros_like(self.sent) if self.inherited is None else self.inherited
                add_ranges(self.inherited, self.sent, cut)
            self.unreported |= slices
        return slices

    def report(self) -> int:
        """Returns the bit mask of rolled-back slices that the server does not know yet, for a message to the server."""
        slices, self.unreported = self.unreported, 0
        return slices

    def keep(self) -> None:
        """Makes the last exchange final, so that it cannot be rolled back: the codec's memory is about to be reused."""
        self._undo = None

    def forget(self) -> None:
        """Drops all records of the last exchange, because codec states were replaced."""
        self._undo, self.sent, self.discarded, self.unreported = None, None, 0, 0

    def clear(self) -> None:
        """Sets residuals and momenta to zero, because those of a checkpoint replace them."""
        self.inherited = None
        for _, owner in states(self.state):
            for name in owner.keys() & {"residual", "velocity"}:
                owner[name][:] = 0

    def residuals(self) -> list[ResidualSlice]:
        """Returns all residuals of this worker, as slices of tensors. Units defines their unit."""
        inherited = [] if self.inherited is None else split_by_tensor(self._slices, 0, self.inherited)
        return [*inherited, *self.unsent()]

    def unsent(self) -> Iterator[ResidualSlice]:
        """Yields the residuals that codecs keep."""
        for (low, _), state in self.encoders:
            if (values := find_residual(state)) is not None:
                yield from split_by_tensor(self._slices, low, values)

    def inherit(self, residuals: Sequence[ResidualSlice], factor: float) -> None:
        """Makes residuals on this bucket's elements, times `factor`, the inherited residual."""
        values = residual_on(residuals, self._slices)
        self.inherited = None if values is None else torch.from_numpy(values).mul_(factor)

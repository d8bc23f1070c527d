"""What wrappers ask of sparse codecs: to pick entries, and to say which ones a payload holds. Knows no selection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from commlayer.compressors.codec import Buffer, State
from commlayer.compressors.selection import Picked

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Picks(Protocol):
    """A codec that can hand on the entries it would send, as float32, instead of coding them."""

    def capacity(self, numel: int) -> int:
        """Most entries that `pick` hands on."""
        ...

    def pick(self, x: torch.Tensor, residual: torch.Tensor | None, state: State) -> Picked:
        """Takes entries out of x + residual; the residual keeps the others. Not finite: it took the finite part of x.

        Positions increase and values are exact. What it returns stays as it is until the next call.
        """
        ...


@runtime_checkable
class Placed(Protocol):
    """A codec of one round that sends some entries and not others."""

    def places(self, payload_: Buffer, numel: int) -> torch.Tensor:
        """int32 positions of the entries in a payload; none in a flagged one."""
        ...

"""What codecs of several rounds have in common: headers that name the round, sums of floats. Knows no format.

Payloads are judged (`vet`) before anything is added (`put`), so that bytes that break the format change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import Buffer, Cut, Out, State
from commlayer.compressors.one_round import Named

if TYPE_CHECKING:
    import torch

HEADER = payload.HEADER_NBYTES


class SeveralRounds(Named, frozen=True):
    """Keeps nothing back itself; error feedback asks it for what it sent."""

    biased: ClassVar[bool] = True

    def vet(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> Any:
        """What `put` adds: the checked body, or None of a flagged payload. Changes nothing."""
        raise NotImplementedError

    def put(self, r: int, vetted: Any, acc: Any, *, first: bool) -> None:
        """Cannot fail."""
        raise NotImplementedError

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        self.put(r, self.vet(r, payload_, acc, first=first), acc, first=first)

    def read_result(self, r: int, result: Buffer, state: State) -> Any:
        """What a result of round r says, checked in full, or None of a flagged one. Changes nothing."""
        raise NotImplementedError

    def undo(self, state: State, x: torch.Tensor, cut: Cut = None) -> None:
        """Keeps nothing back, so there is nothing to take back."""

    def undo_server(self, state: State, cut: Cut = None) -> None:
        """As `undo`."""


def write_floats(out: Out, codec: int, numel: int, r: int, values: torch.Tensor) -> int:
    """The payload that carries these floats in round r; flagged unless all are finite."""
    if not kernels.all_finite(values):
        return payload.write_flagged(out, codec, numel)
    n = values.numel()
    payload.write(out, codec, numel, n, aux=r)
    kernels.store_f32(out[HEADER : HEADER + 4 * n], values)
    return HEADER + 4 * n


def read_floats(message: Buffer, codec: int, numel: int, r: int, count: int) -> memoryview | None:
    """The body of what `write_floats` wrote: `count` floats. None if it is flagged."""
    head = payload.read(message, codec, numel)
    if head.flagged:
        return None
    payload.expect("seed", head.seed, 0)
    payload.expect("round", head.aux, r)
    payload.expect("count", head.entries, count)
    payload.expect("bytes of body", head.body.nbytes, 4 * count)
    return payload.on_host(head.body)


def add_floats(body: memoryview | None, acc: Any, *, first: bool) -> None:
    """Adds such a body to acc["sum"], or sets its flag."""
    total = acc["sum"]
    if first:
        acc["flagged"][0] = False
    if body is not None:
        (kernels.copy_f32 if first else kernels.add_f32)(total, body)
        return
    acc["flagged"][0] = True
    if first:
        total.zero_()

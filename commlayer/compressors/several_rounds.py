"""Base of codecs of several rounds: headers that name the round, and sums of floats.

`vet` checks a payload before `put` adds it, so that corrupt bytes change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import Cut, Named, State
from commlayer.compressors.payload import Buffer, Out

if TYPE_CHECKING:
    import torch

HEADER = payload.HEADER_NBYTES


class SeveralRounds(Named, frozen=True):
    """Keeps no residual itself; error feedback calls its `sent`."""

    biased: ClassVar[bool] = True

    def vet(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> Any:
        """Checks a payload for `put`: returns the body to add, or None if it is flagged. Changes nothing."""
        raise NotImplementedError

    def put(self, r: int, vetted: Any, acc: Any, *, first: bool) -> None:
        """Adds what `vet` returned. Cannot fail."""
        raise NotImplementedError

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        self.put(r, self.vet(r, payload_, acc, first=first), acc, first=first)

    def read_result(self, r: int, result: Buffer, state: State) -> Any:
        """The content of a result of round r, fully checked, or None if it is flagged. Changes nothing."""
        raise NotImplementedError

    def undo(self, state: State, x: torch.Tensor, cut: Cut = None) -> None:
        """Nothing to undo: the codec keeps no residual."""

    def undo_server(self, state: State, cut: Cut = None) -> None:
        """Nothing to undo, as in `undo`."""


def write_floats(out: Out, codec: int, numel: int, r: int, values: torch.Tensor) -> int:
    """Writes the payload of these floats for round r; flagged unless all are finite."""
    if not kernels.all_finite(values):
        return payload.write_flagged(out, codec, numel)
    n = values.numel()
    payload.write(out, codec, numel, n, aux=r)
    kernels.store_f32(out[HEADER : HEADER + 4 * n], values)
    return HEADER + 4 * n


def read_floats(message: Buffer, codec: int, numel: int, r: int, count: int) -> memoryview | None:
    """The body that `write_floats` wrote: `count` floats. None if it is flagged."""
    head = payload.read(message, codec, numel)
    if head.flagged:
        return None
    payload.expect("seed", head.seed, 0)
    payload.expect("round", head.aux, r)
    payload.expect("count", head.entries, count)
    payload.expect("bytes of body", head.body.nbytes, 4 * count)
    return payload.on_host(head.body)


def add_floats(body: memoryview | None, acc: Any, *, first: bool) -> None:
    """Adds a body of `read_floats` to acc["sum"], or sets the accumulator's flag."""
    total = acc["sum"]
    if first:
        acc["flagged"][0] = False
    if body is not None:
        (kernels.copy_f32 if first else kernels.add_f32)(total, body)
        return
    acc["flagged"][0] = True
    if first:
        total.zero_()

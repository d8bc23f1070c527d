"""The interface of codecs: what a worker and a server call for one step of one bucket.

A codec is a small frozen value. One step of one bucket runs

    worker:  start(x, state, out) -> nbytes         payload of round 0
             next(r, result, state, out) -> nbytes  payload of round r + 1, from the result of round r
             decode(result, state, out)             the summed tensor, from the result of the last round
    server:  acc = zeros(spec, r); add(r, payload, acc) per member, in member order; emit(r, acc, state, out) -> nbytes

A SUM round is linear in the payload, so an all-reduce could add its payloads. A GATHER round decodes each payload into the
accumulator that `zeros` made. The caller owns all memory: `out` holds `bound(spec)` bytes and is allocated once. State is
updated in place. `x` is float32, contiguous and one-dimensional; `spec.shape` is the shape of its tensor. Codecs do not modify
`x`. The caller leaves `x` unchanged until the last `next`, so a codec of several rounds may keep a reference.

On a CUDA device x, state (see `place`) and payloads lie on the device. Payloads are uint8 tensors aligned as torch allocates
them, and their memory reaches to the next multiple of 4 bytes. The bytes equal those that the CPU would make.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from commlayer.compressors.payload import Buffer, Out
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

State = dict[str, Any]
"""What changes from step to step, by name: tensors and plain numbers, so that a checkpoint can walk over it."""


def place(state: State, device: torch.device) -> None:
    """Moves a state made by `init`, scratch included, to the device where its codec will run."""
    for name, value in state.items():
        if isinstance(value, dict):
            place(value, device)
        elif isinstance(value, torch.Tensor):
            state[name] = value.to(device)


Cut = Sequence[tuple[int, int]] | None
"""Some elements of a bucket, as ordered ranges. None means all."""


def ranges(cut: Cut, numel: int) -> Sequence[tuple[int, int]]:
    return [(0, numel)] if cut is None else cut


class Round(enum.Enum):
    """How the payloads of one round combine."""

    SUM = "sum"
    GATHER = "gather"


@runtime_checkable
class Codec(Protocol):
    """See the module docstring. `str(codec)` is its spelling in plans, and `commlayer.compressors.parse` reads it back."""

    @property
    def id(self) -> int:
        """The codec's number in payload headers. A wrapper has the id of its inner codec, since the bytes are the same."""
        ...

    @property
    def rounds(self) -> tuple[Round, ...]: ...

    @property
    def biased(self) -> bool:
        """Whether the codec needs error feedback. A plan then wraps it, unless the user passes `ef=False`."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether one step's payload affects later steps. If so, an aborted step must be undone."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether the payload is the header followed by x itself, so that x may live inside its payload."""
        ...

    def bound(self, spec: Spec) -> int:
        """The largest size in bytes of any payload of any round, of a worker or of a server."""
        ...

    def init(self, spec: Spec) -> State:
        """The worker's state before the first step."""
        ...

    def init_server(self, spec: Spec) -> State:
        """The server's state before the first step."""
        ...

    def start(self, x: torch.Tensor, state: State, out: Out) -> int: ...

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int: ...

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        """Writes the sum into `out` (float32, 1-D). Returns False if the sum is non-finite; `out` is then all NaN.

        Raises CorruptPayload for bytes that break the format, before anything is written.
        """
        ...

    def undo(self, state: State, x: torch.Tensor, cut: Cut = None) -> None:
        """Rolls back the last `start` where its result was not applied: the residual there becomes what it was before.

        `x` is the unchanged argument of that `start`, and the payload is unchanged too. Undoing all elements is idempotent.
        When undoing some, name each element at most once.
        """
        ...

    def undo_server(self, state: State, cut: Cut = None) -> None:
        """Rolls back the last `emit` in the same manner, since each worker rolls back what it sent.

        Called before the first `add` of the next step, while the accumulator and payload of that emit are unchanged.
        """
        ...

    def zeros(self, spec: Spec, r: int) -> Mapping[str, Any]:
        """A new accumulator of round r. The server reuses it from step to step: `add` with first=True overwrites it."""
        ...

    def add(self, r: int, payload: Buffer, acc: Mapping[str, Any], *, first: bool) -> None:
        """Checks the whole payload, then adds it. CorruptPayload leaves `acc` unchanged."""
        ...

    def emit(self, r: int, acc: Mapping[str, Any], state: State, out: Out) -> int: ...

"""The codec contract. Knows no ranks, names, transports or logs: only memory, specs and payload bytes.

A codec is a small frozen value. One step of one bucket runs

    worker:  start(x, state, out) -> nbytes         payload of round 0
             next(r, result, state, out) -> nbytes  payload of round r + 1, from the result of round r
             decode(result, state, out)             the summed tensor, from the result of the last round
    server:  acc = zeros(spec, r); add(r, payload, acc) per member, in member order; emit(r, acc, state, out) -> nbytes

What a SUM round adds is linear in the payload (an all-reduce could do it), GATHER decodes into the accumulator space that
`zeros` made. Memory is the caller's: `out` holds `bound(spec)` bytes, sized once. State is donated
and updated in place. `x` is float32, contiguous and one-dimensional; `spec.shape` says what it was. It is not modified, and
stays as it is until the last `next`, so a codec of several rounds may keep a reference.

On a CUDA device everything of a call lies there: x, the state (see `place`), and payloads as uint8 tensors, aligned as torch
allocates them, whose memory reaches to the next multiple of 4 bytes. The bytes are those that the CPU would make.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, Union, runtime_checkable

from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

# Union, since a bar would want torch loaded.
Out: TypeAlias = Union[memoryview, "torch.Tensor"]
"""Payload memory of the caller, to be written: host memory, or uint8 on a device."""

Buffer: TypeAlias = Out | bytes | bytearray
"""Payload bytes, to be read."""

State = dict[str, Any]
"""What changes from step to step, by name: tensors and plain numbers, so that a checkpoint is a walk over it."""


def place(state: State, device: torch.device) -> None:
    """Moves a state made by `init`, scratch included, to where its codec will run."""
    for name, value in state.items():
        if isinstance(value, dict):
            place(value, device)
        elif isinstance(value, torch.Tensor):
            state[name] = value.to(device)


Cut = Sequence[tuple[int, int]] | None
"""Some elements of a bucket, as ranges in order; None: all."""


def ranges(cut: Cut, numel: int) -> Sequence[tuple[int, int]]:
    return [(0, numel)] if cut is None else cut


class Round(enum.Enum):
    """How the payloads of one round combine."""

    SUM = "sum"
    GATHER = "gather"


@runtime_checkable
class Codec(Protocol):
    """See the module's text. `str(codec)` is the plan's spelling of it, and `commlayer.compressors.parse` reads it back."""

    @property
    def id(self) -> int:
        """Its number in headers. A wrapper has that of what it wraps: the bytes are the same."""
        ...

    @property
    def rounds(self) -> tuple[Round, ...]: ...

    @property
    def biased(self) -> bool:
        """Whether it needs error feedback: then a plan wraps it unless told `ef=False`."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether what it did not send, or has sent, bears on later steps: then an abandoned step must be undone."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether the payload is the header followed by x itself, so that a caller may let x live inside its payload."""
        ...

    def bound(self, spec: Spec) -> int:
        """Most bytes any payload of any round can have, worker's or server's."""
        ...

    def init(self, spec: Spec) -> State:
        """Worker state before the first step."""
        ...

    def init_server(self, spec: Spec) -> State:
        """Server state before the first step."""
        ...

    def start(self, x: torch.Tensor, state: State, out: Out) -> int: ...

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int: ...

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        """Writes the sum into `out` (float32, 1-D). False if it is non-finite; `out` is then all NaN.

        Raises CorruptPayload, having written nothing, for bytes that break the format.
        """
        ...

    def undo(self, state: State, x: torch.Tensor, cut: Cut = None) -> None:
        """Takes back the last `start` where its result was not applied: what is owed there is what it was before.

        `x` is what `start` was given, unchanged; the payload is as it was, too. Of all elements, twice does it once; of some,
        each is named at most once.
        """
        ...

    def undo_server(self, state: State, cut: Cut = None) -> None:
        """Takes back the last `emit` likewise, since each worker takes back what it sent.

        Called before the first `add` of the next step, while accumulator and payload of that emit are as they were.
        """
        ...

    def zeros(self, spec: Spec, r: int) -> Mapping[str, Any]:
        """A fresh accumulator of round r. It is reused from step to step: `add` with first=True overwrites it."""
        ...

    def add(self, r: int, payload: Buffer, acc: Mapping[str, Any], *, first: bool) -> None:
        """Checks the whole payload, then adds it. CorruptPayload leaves `acc` as it was."""
        ...

    def emit(self, r: int, acc: Mapping[str, Any], state: State, out: Out) -> int: ...

"""The interface of codecs, and the base classes: Named, OneRound and CodecWrapper.

A codec is a small frozen value. For one step of one bucket a worker and a server call

    worker:  start(x, state, out) -> nbytes         payload of round 0
             next(r, result, state, out) -> nbytes  payload of round r + 1, from the result of round r
             decode(result, state, out)             the summed tensor, from the result of the last round
    server:  acc = zeros(spec, r); add(r, payload, acc) per member, in member order; emit(r, acc, state, out) -> nbytes

A SUM round is linear in the payload, so an all-reduce could add its payloads. A GATHER round decompresses each payload into the
accumulator that `zeros` created. The caller owns all memory: `out` has `bound(spec)` bytes and is allocated once. State is
updated in place. The input `x` is float32, contiguous and one-dimensional; `spec.shape` is the shape of its tensor. Codecs do
not modify `x`. The caller leaves `x` unchanged until the last `next`, so a codec of several rounds may keep a reference.

On a CUDA device x, state (see `place`) and payloads are in device memory. Payloads are uint8 tensors aligned as torch allocates
them, and their memory extends to the next multiple of 4 bytes. The bytes equal those that the CPU would produce.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable

import msgspec

from commlayer.compressors import payload
from commlayer.compressors.payload import Buffer, Out
from commlayer.errors import InvalidInput
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

State = dict[str, Any]
"""A codec's data that changes from step to step, by name. Values are tensors, plain numbers or nested states, so a checkpoint
can save them."""


def place(state: State, device: torch.device) -> None:
    """Moves a state that `init` created, including temporary memory, to the device where the codec will run."""
    for name, value in state.items():
        if isinstance(value, dict):
            place(value, device)
        elif isinstance(value, torch.Tensor):
            state[name] = value.to(device)


Ranges = Sequence[tuple[int, int]] | None
"""Some elements of a bucket, as ordered ranges (start, stop). None: all elements."""


def ranges(elements: Ranges, numel: int) -> Sequence[tuple[int, int]]:
    return [(0, numel)] if elements is None else elements


class Round(enum.Enum):
    """How the payloads of one round of a codec are combined."""

    SUM = "sum"
    GATHER = "gather"


@runtime_checkable
class Codec(Protocol):
    """A compression method for gradient buckets; see the module docstring. `str(codec)` is its name in plans, which
    `commlayer.compressors.parse` converts back."""

    @property
    def id(self) -> int:
        """The codec's number in payload headers. A wrapper has the number of its inner codec, since their bytes are the
        same."""
        ...

    @property
    def rounds(self) -> tuple[Round, ...]: ...

    @property
    def biased(self) -> bool:
        """Whether the codec needs error feedback. A plan then adds error feedback, unless the user passes `ef=False`."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether one step's payload affects later steps. If so, an aborted step must be undone."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether the payload is the header followed by the unchanged input, so the input may be stored inside its own
        payload."""
        ...

    def bound(self, spec: Spec) -> int:
        """Returns the largest size in bytes of any payload of any round, of a worker or of a server."""
        ...

    def init(self, spec: Spec) -> State:
        """Creates the worker's state before the first step."""
        ...

    def init_server(self, spec: Spec) -> State:
        """Creates the server's state before the first step."""
        ...

    def start(self, x: torch.Tensor, state: State, out: Out) -> int: ...

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int: ...

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        """Writes the sum into `out` (float32, 1-D). Returns False if the sum is not finite; `out` is then all NaN.

        Raises CorruptPayload, before anything is written, if the bytes violate the format.
        """
        ...

    def undo(self, state: State, x: torch.Tensor, elements: Ranges = None) -> None:
        """Rolls back the last `start` for elements to which its result was not applied: their residual becomes what it was
        before.

        `x` is the unchanged argument of that `start`, and the payload is unchanged too. Undoing all elements is idempotent.
        When undoing only some, name each element at most once.
        """
        ...

    def undo_server(self, state: State, elements: Ranges = None) -> None:
        """Rolls back the last `emit` for elements to which the result was not applied, since each worker rolls back what it
        sent.

        Call it before the first `add` of the next step, while the accumulator and the payload of that emit are unchanged.
        """
        ...

    def zeros(self, spec: Spec, r: int) -> Mapping[str, Any]:
        """Creates an accumulator of round r. The server reuses it in every step: `add` with first=True overwrites it."""
        ...

    def add(self, r: int, payload: Buffer, acc: Mapping[str, Any], *, first: bool) -> None:
        """Checks the complete payload, then adds it to the accumulator. If it raises CorruptPayload, `acc` is unchanged."""
        ...

    def emit(self, r: int, acc: Mapping[str, Any], state: State, out: Out) -> int: ...


def check_input(codec: str, what: str, tensor: torch.Tensor, numel: int, device: torch.device | None = None) -> None:
    """Raises InvalidInput unless the tensor is float32, contiguous, one-dimensional, of `numel` elements, and on `device` if
    given."""
    fits = tensor.dtype == torch.float32 and tensor.dim() == 1 and tensor.numel() == numel and tensor.is_contiguous()
    if fits and (device is None or tensor.device == device):
        return
    place = "" if device is None else f" on {device}"
    raise InvalidInput("E-CODEC-INPUT",
                       f"{codec}: {what} is {_described(tensor)}; it must be contiguous float32 of {numel} elements and one "
                       f"dimension{place}")


def _described(tensor: torch.Tensor) -> str:
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}{layout}"


NAN = float("nan")


def spell(codec: msgspec.Struct) -> str:
    """Returns the codec's name in plans: `name(argument=value, ...)` with every argument. A later change of a default must not
    change a plan's meaning."""
    fields = {name: getattr(codec, name) for name in codec.__struct_fields__}
    parts = [str(v) if isinstance(v, msgspec.Struct) else f"{name}={v!r}" for name, v in fields.items()]
    return f"{cast(Any, codec).name}({', '.join(parts)})"


def check_numel(spec: Spec) -> int:
    """Returns the number of elements of the spec. Raises InvalidInput if the number exceeds the payload header's 32 bits."""
    if spec.numel > payload.MAX_NUMEL:
        raise InvalidInput("E-CODEC-INPUT",
                           f"bucket of {spec.numel} elements: a payload has at most {payload.MAX_NUMEL}; split it into slices")
    return spec.numel


def accumulator(total: torch.Tensor) -> dict[str, Any]:
    """Creates an accumulator for `add` around existing memory. Its `flagged` is a list of one value, so `add` can set it."""
    return {"sum": total, "flagged": [False]}


class Named(msgspec.Struct, frozen=True):
    """Base class of every codec that is not a wrapper: its name, number and default properties."""

    name: ClassVar[str] = ""
    rounds: ClassVar[tuple[Round, ...]] = ()
    biased: ClassVar[bool] = False
    keeps: ClassVar[bool] = False
    in_place: ClassVar[bool] = False

    def __str__(self) -> str:
        return spell(self)

    @property
    def id(self) -> int:
        return payload.CODEC_IDS[self.name]


class OneRound(Named, frozen=True):
    """Base class of codecs of one round with a dense float32 accumulator. A subclass implements `check` and `apply`.

    Payload and result have one format. `emit` compresses the sum by calling `start` with the server's state.
    """

    rounds: ClassVar[tuple[Round, ...]] = (Round.GATHER,)

    def bound(self, spec: Spec) -> int:
        raise NotImplementedError

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        """Checks a payload's body completely. Returns its parts in the form that `apply` needs."""
        raise NotImplementedError

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        """Adds the decompressed parts to `out`, or overwrites `out` with them (`assign`). Cannot fail."""
        raise NotImplementedError

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        raise NotImplementedError

    def init(self, spec: Spec) -> State:
        check_numel(spec)
        return {}

    def init_server(self, spec: Spec) -> State:
        return self.init(spec)

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        raise InvalidInput("E-CODEC-INPUT", f"{self} has one round, got round {r + 1}")

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        head = payload.read(result, self.id, out.numel())
        if head.flagged:
            out.fill_(NAN)
            return False
        self.apply(self.check(head, out.numel()), out, assign=True)
        return True

    def undo(self, state: State, x: torch.Tensor, elements: Ranges = None) -> None:
        """Does nothing, because the codec keeps no residual."""

    def undo_server(self, state: State, elements: Ranges = None) -> None:
        """Does nothing, because the codec keeps no residual."""

    def zeros(self, spec: Spec, r: int) -> dict[str, Any]:
        return accumulator(torch.zeros(math.prod(spec.shape)))

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        total = acc["sum"]
        head = payload.read(payload_, self.id, total.numel())
        if not head.flagged:
            self.apply(self.check(head, total.numel()), total, assign=first)
        elif first:
            total.zero_()
        acc["flagged"][0] = head.flagged or (acc["flagged"][0] and not first)

    def add_to(self, payload_: Buffer, out: torch.Tensor) -> None:
        """Adds the decompressed payload to `out`. A payload that is flagged as not finite adds nothing."""
        self.add(0, payload_, accumulator(out), first=False)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        if acc["flagged"][0]:
            return payload.write_flagged(out, self.id, acc["sum"].numel())
        return self.start(acc["sum"], state, out)


class CodecWrapper(msgspec.Struct, frozen=True):
    """Base class of codecs around an `inner` codec, which produces the payload bytes.

    Forwards each call to the inner codec, whose state is stored under "inner" in the wrapper's state.
    """

    name: ClassVar[str] = ""
    in_place: ClassVar[bool] = False
    feedback_inside: ClassVar[bool] = False
    """Whether a plan's error feedback must wrap the inner codec instead of this wrapper, since this wrapper changes the
    input."""

    inner: Any

    def __str__(self) -> str:
        return spell(self)

    @property
    def id(self) -> int:
        return int(self.inner.id)

    @property
    def rounds(self) -> tuple[Round, ...]:
        rounds: tuple[Round, ...] = self.inner.rounds
        return rounds

    @property
    def biased(self) -> bool:
        return bool(self.inner.biased)

    @property
    def keeps(self) -> bool:
        return bool(self.inner.keeps)

    def bound(self, spec: Spec) -> int:
        return int(self.inner.bound(spec))

    def init(self, spec: Spec) -> State:
        return {"inner": self.inner.init(spec)}

    def init_server(self, spec: Spec) -> State:
        return {"inner": self.inner.init_server(spec)}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        return int(self.inner.start(x, state["inner"], out))

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        return int(self.inner.next(r, result, state["inner"], out))

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        return bool(self.inner.decode(result, state["inner"], out))

    def undo(self, state: State, x: torch.Tensor, elements: Ranges = None) -> None:
        self.inner.undo(state["inner"], x, elements)

    def undo_server(self, state: State, elements: Ranges = None) -> None:
        self.inner.undo_server(state["inner"], elements)

    def zeros(self, spec: Spec, r: int) -> Any:
        return self.inner.zeros(spec, r)

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        self.inner.add(r, payload_, acc, first=first)

    def add_to(self, payload_: Buffer, out: torch.Tensor) -> None:
        self.inner.add_to(payload_, out)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        return int(self.inner.emit(r, acc, state["inner"], out))


def check_codec(name: str, inner: object) -> Codec:
    if not isinstance(inner, Codec):
        raise InvalidInput("E-CODEC-ARGUMENT", f"{name}: inner is {inner!r}, but it must be a codec")
    return inner


def check_outermost(name: str, inner: object) -> None:
    """Raises InvalidInput if `inner` is a wrapper with `feedback_inside`. A residual around it would be added to the input as
    if it were a gradient."""
    if isinstance(inner, CodecWrapper) and inner.feedback_inside:
        raise InvalidInput("E-CODEC-ARGUMENT",
                           f"{name}: inner is {inner}, but {inner.name} changes the input; put {inner.name} around {name} "
                           "instead")


def check_plain(name: str, inner: object) -> Codec:
    """Checks that `inner` is a codec of one round without a residual, for wrappers that keep a residual themselves."""
    codec = check_codec(name, inner)
    check_outermost(name, inner)
    if codec.keeps or len(codec.rounds) != 1:
        raise InvalidInput("E-CODEC-ARGUMENT",
                           f"{name}: inner is {inner}, but it must be a codec of one round that keeps no residual itself")
    return codec

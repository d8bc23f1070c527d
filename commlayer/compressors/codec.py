"""The base classes of codecs: Codec, OneRound and CodecWrapper.

A codec is a small frozen value. For one step of one bucket a worker and a server call

    worker:  start(x, state, out) -> nbytes         payload of round 0
             next(r, result, state, out) -> nbytes  payload of round r + 1, from the result of round r
             decode(result, state, out)             the summed array, from the result of the last round
    server:  acc = new_accumulator(spec, r); add(r, payload, acc) per member, in member order;
             emit(r, acc, state, out) -> nbytes

A SUM round is linear in the payload, so an all-reduce could add its payloads. A GATHER round decompresses each payload into
the accumulator. The caller owns all memory: `out` has `bound(spec)` bytes and is allocated once. State is updated in place.
The input `x` is float32, contiguous and one-dimensional; `spec.shape` is the shape of its tensor. Codecs do not modify `x`. The
caller leaves `x` unchanged until the last `next`, so a codec of several rounds may keep a reference.

On the host, arrays are numpy arrays; `x` and the array to decode into may also be CPU tensors. On a CUDA device x, state (see
`place`) and payloads are torch tensors in device memory. Payloads are uint8 tensors aligned as torch allocates them, and their
memory extends to the next multiple of 4 bytes. The bytes equal those that the CPU would produce.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from commlayer.codec_spec import RULES, check_arguments
from commlayer.compressors import payload
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer, Out, on_device
from commlayer.errors import InvalidInput
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch

NAN = float("nan")
FLOATS = {"ratio", "beta"}
"""Arguments of codecs that may be given as whole numbers."""

State = dict[str, Any]
"""A codec's data that persists from step to step, by name. Values are arrays, plain numbers or nested states, so a checkpoint
can save them."""


def states(state: State, prefix: str = "") -> Iterator[tuple[str, State]]:
    """Yields the state and all states inside it, each with the beginning of its values' paths, for example "inner."."""
    yield prefix, state
    for name, value in state.items():
        if isinstance(value, dict):
            yield from states(value, f"{prefix}{name}.")


def place(state: State, device: torch.device) -> None:
    """Moves a state that `init` created, including temporary memory, to the device where the codec will run."""
    import torch

    for _, owner in states(state):
        owner.update({name: torch.from_numpy(value).to(device) for name, value in owner.items()
                      if isinstance(value, np.ndarray)})


Ranges = Sequence[tuple[int, int]] | None
"""Some elements of a bucket, as ordered ranges (start, stop). None: all elements."""


def ranges(elements: Ranges, numel: int) -> Sequence[tuple[int, int]]:
    return [(0, numel)] if elements is None else elements


class Reduction(enum.Enum):
    """How the payloads of one round of a codec are combined."""

    SUM = "sum"
    GATHER = "gather"


class Codec(msgspec.Struct, frozen=True):
    """A compression method for gradient buckets; see the module docstring. `str(codec)` is its name in plans, which
    `commlayer.compressors.parse` converts back."""

    name: ClassVar[str] = ""
    rounds: ClassVar[tuple[Reduction, ...]] = ()
    biased: ClassVar[bool] = False
    """True: the codec needs error feedback. A plan then adds error feedback, unless the user passes `ef=False`."""
    needs_undo: ClassVar[bool] = False
    """True: a step's payload affects later steps, for example through a residual. An aborted step must then be rolled back with
    `undo`."""
    has_residual: ClassVar[bool] = False
    """True: workers keep a residual, so `reweigh` can correct payloads that were sent."""
    has_server_residual: ClassVar[bool] = False
    """True: the server keeps a residual of its sum."""
    in_place: ClassVar[bool] = False
    """True: the payload is the header followed by the unchanged input, so the input may be stored inside its own payload."""
    most: ClassVar[float] = math.inf
    """Largest magnitude that the codec can send. Error feedback clamps larger numbers, and the residual keeps the rest."""

    def __post_init__(self) -> None:
        rules = RULES.get(self.name, {})
        check_arguments(self.name, **{name: getattr(self, name) for name in rules if name != "inner"})
        for name in FLOATS & rules.keys():  # topk(ratio=1) is spelled topk(ratio=1.0)
            msgspec.structs.force_setattr(self, name, float(getattr(self, name)))

    def __str__(self) -> str:
        """Returns `name(argument=value, ...)` with every argument: a later change of a default must not change a plan's
        meaning."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        parts = [str(v) if isinstance(v, msgspec.Struct) else f"{name}={v!r}" for name, v in fields.items()]
        return f"{self.name}({', '.join(parts)})"

    @property
    def parts(self) -> dict[str, Codec]:
        """The codecs in this one's arguments, by the argument's name."""
        return {name: part for name in self.__struct_fields__ if isinstance(part := getattr(self, name), Codec)}

    @property
    def id(self) -> int:
        """The codec's number in payload headers. A wrapper has the number of its inner codec, since their bytes are the
        same."""
        return payload.CODEC_IDS[self.name]

    def bound(self, spec: Spec) -> int:
        """Returns the largest size in bytes of any payload of any round, of a worker or of a server."""
        raise NotImplementedError

    def init(self, spec: Spec) -> State:
        """Creates the worker's state before the first step."""
        check_numel(spec)
        return {}

    def init_server(self, spec: Spec) -> State:
        """Creates the codec's state on a summation server before the first step."""
        return self.init(spec)

    def start(self, x: Array, state: State, out: Out) -> int:
        raise NotImplementedError

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        raise InvalidInput("E-CODEC-INPUT", f"{self} has one round, got round {r + 1}")

    def decode(self, result: Buffer, state: State, out: Array) -> bool:
        """Writes the sum into `out`. Returns False if the sum is not finite; `out` is then all NaN.

        Raises CorruptPayload, before anything is written, if the bytes violate the format.
        """
        raise NotImplementedError

    def sent(self, state: State, out: Array) -> None:
        """For a codec of several rounds: writes the part of its input that this worker has sent, after its last payload.

        That part is zero if the input or a result was not finite, because all later payloads of the step are then flagged.
        """
        raise NotImplementedError

    def undo(self, state: State, x: Array, elements: Ranges = None) -> None:
        """Rolls back the last `start` for elements to which its result was not applied: their residuals get their earlier
        values again.

        `x` is the unchanged argument of that `start`, and the payload is unchanged too. Undoing all elements is idempotent. If
        only some elements are undone, name each element at most once.
        """

    def reweigh(self, state: State, share: float, more: Array) -> None:
        """Corrects the state after the result of the last `start` has arrived, if the true total weight differs from the one
        by which `x` was divided. The server has applied `share` times the payload, and the argument of `start` should have been
        x + `more`. The residual keeps the difference, so applied + residual is as if the total had been known.

        Called at most once for each `start`, only if the result is finite and `has_residual` is True.
        """
        raise NotImplementedError

    def undo_server(self, state: State, elements: Ranges = None) -> None:
        """Rolls back the last `emit` for elements to which the result was not applied. (Each worker rolls back its own
        payload.)

        Call `undo_server` before the first `add` of the next step, while the accumulator and the payload of that emit are
        unchanged.
        """

    def new_accumulator(self, spec: Spec, r: int) -> Mapping[str, Any]:
        """Creates an accumulator, the server's memory for the sum of the payloads of round r. The server reuses it in every
        step: `add` with first=True overwrites it."""
        raise NotImplementedError

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        """Checks the complete payload, then adds it to the accumulator. If it raises CorruptPayload, `acc` is unchanged."""
        raise NotImplementedError

    def add_to(self, payload_: Buffer, out: Array) -> None:
        """Adds the decompressed payload to `out`. A payload that is flagged as not finite adds nothing."""
        raise NotImplementedError

    def before_emit(self, acc: Any, state: State) -> None:
        """Lets the codec read an accumulator's data other than the sum, such as the members' numbers of entries. Error feedback
        calls `before_emit` before it compresses the sum."""

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        raise NotImplementedError


def as_array(codec: str, what: str, x: Array, numel: int, like: Array) -> Array:
    """Validates x and returns it as an array of the kind of `like`; a CPU tensor becomes a numpy array if `like` is a numpy
    array.

    Raises InvalidInput unless x is float32, contiguous, one-dimensional, of `numel` elements, and on the device of `like`.
    """
    if type(x) is type(like) is np.ndarray and x.dtype == np.float32 and x.shape == (numel,) and x.flags.c_contiguous:
        return x  # a fast path: the checks below take four times as long
    dtype, contiguous = str(x.dtype).removeprefix("torch."), x.is_contiguous() if on_device(x) else x.flags.c_contiguous
    place, wanted = (str(y.device) if on_device(y) else "cpu" for y in (x, like))
    if dtype != "float32" or x.ndim != 1 or len(x) != numel or not contiguous or place != wanted:
        layout = "" if contiguous else ", not contiguous"
        raise InvalidInput("E-CODEC-INPUT",
                           f"{codec}: {what} is {dtype} of shape {tuple(x.shape)} on {place}{layout}; it must be contiguous "
                           f"float32 of {numel} elements and one dimension on {wanted}")
    return x.detach().numpy() if on_device(x) and not on_device(like) else x


def check_numel(spec: Spec) -> int:
    """Returns the number of elements of the spec. Raises InvalidInput if the number exceeds the payload header's 32 bits."""
    if spec.numel > payload.MAX_NUMEL:
        raise InvalidInput("E-CODEC-INPUT",
                           f"bucket of {spec.numel} elements: a payload has at most {payload.MAX_NUMEL}; split it into slices")
    return spec.numel


def accumulator(total: Array) -> dict[str, Any]:
    """Creates an accumulator for `add` that sums into the array `total`. Its `flagged` is a list of one value, so `add` can set
    it."""
    return {"sum": total, "flagged": [False]}


class OneRound(Codec, frozen=True):
    """Base class of codecs of one round with a dense float32 accumulator. A subclass implements `check` and `apply`.

    Payload and result have one format. `emit` compresses the sum by calling `start` with the server's state.
    """

    rounds: ClassVar[tuple[Reduction, ...]] = (Reduction.GATHER,)

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        """Checks a payload's body completely. Returns the body's parts in the form that `apply` needs."""
        raise NotImplementedError

    def apply(self, parts: tuple[Any, ...], out: Array, *, assign: bool) -> None:
        """Adds the decompressed parts to `out`, or overwrites `out` with them if `assign` is True. Cannot fail."""
        raise NotImplementedError

    def unpack(self, payload_: Buffer, numel: int) -> tuple[Any, ...] | None:
        """Checks a complete payload, and returns its parts in the form that `apply` needs. Returns None if the payload is
        flagged as not finite."""
        head = payload.read(payload_, self.id, numel)
        return None if head.flagged else self.check(head, numel)

    def decode(self, result: Buffer, state: State, out: Array) -> bool:
        parts = self.unpack(result, len(out))
        if parts is None:
            out[:] = NAN
            return False
        self.apply(parts, out, assign=True)
        return True

    def new_accumulator(self, spec: Spec, r: int) -> dict[str, Any]:
        return accumulator(np.zeros(spec.numel, np.float32))

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        total = acc["sum"]
        parts = self.unpack(payload_, len(total))
        if parts is not None:
            self.apply(parts, total, assign=first)
        elif first:
            total[:] = 0.0
        acc["flagged"][0] = parts is None or (acc["flagged"][0] and not first)

    def add_to(self, payload_: Buffer, out: Array) -> None:
        if (parts := self.unpack(payload_, len(out))) is not None:
            self.apply(parts, out, assign=False)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        if acc["flagged"][0]:
            return payload.write_flagged(out, self.id, len(acc["sum"]))
        return self.start(acc["sum"], state, out)


class FusedCodec(OneRound, frozen=True):
    """Base class of codecs that compress x + residual and update the residual in one pass."""

    def start(self, x: Array, state: State, out: Out) -> int:
        return self.start_fused(x, None, state, out)

    def start_fused(self, x: Array, residual: Array | None, state: State, out: Out) -> int:
        """Writes the payload of x + residual in one pass. The residual becomes the part that is not sent. If x + residual is
        not finite, the residual becomes the finite part of x + residual."""
        raise NotImplementedError


class CodecWrapper(Codec, frozen=True):
    """Base class of codecs around an `inner` codec, which produces the payload bytes.

    Forwards each call to the inner codec, whose state is stored under "inner" in the wrapper's state.
    """

    inner: Codec

    id = property(attrgetter("inner.id"))
    rounds = property(attrgetter("inner.rounds"))
    biased = property(attrgetter("inner.biased"))
    needs_undo = property(attrgetter("inner.needs_undo"))
    has_residual = property(attrgetter("inner.has_residual"))
    has_server_residual = property(attrgetter("inner.has_server_residual"))

    def bound(self, spec: Spec) -> int:
        return self.inner.bound(spec)

    def init(self, spec: Spec) -> State:
        return {"inner": self.inner.init(spec)}

    def init_server(self, spec: Spec) -> State:
        return {"inner": self.inner.init_server(spec)}

    def start(self, x: Array, state: State, out: Out) -> int:
        return self.inner.start(x, state["inner"], out)

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        return self.inner.next(r, result, state["inner"], out)

    def decode(self, result: Buffer, state: State, out: Array) -> bool:
        return self.inner.decode(result, state["inner"], out)

    def undo(self, state: State, x: Array, elements: Ranges = None) -> None:
        self.inner.undo(state["inner"], x, elements)

    def reweigh(self, state: State, share: float, more: Array) -> None:
        self.inner.reweigh(state["inner"], share, more)

    def undo_server(self, state: State, elements: Ranges = None) -> None:
        self.inner.undo_server(state["inner"], elements)

    def new_accumulator(self, spec: Spec, r: int) -> Any:
        return self.inner.new_accumulator(spec, r)

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        self.inner.add(r, payload_, acc, first=first)

    def add_to(self, payload_: Buffer, out: Array) -> None:
        self.inner.add_to(payload_, out)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        return self.inner.emit(r, acc, state["inner"], out)

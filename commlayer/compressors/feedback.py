"""Error feedback, momentum, and residuals that a later plan inherits.

Error feedback: the part of its input that a codec does not send stays in a residual and is added to the input of the next step.
Sent + new residual = input + old residual, on workers and servers. A codec of one round may offer `start_fed(x, residual,
state, out)`, which does this in its own pass. A test compares it with the general method below.

Momentum before compression: the codec keeps the velocity, in the residual's units. Set the optimizer's own momentum to 0.

A residual is stored under the key `residual`, at any depth of a state. When the plan changes, residuals are converted to values
on elements of tensors. A worker adds an inherited residual to the next gradients of the same elements, whatever their new path
and codec. So no residual is sent, and none is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import msgspec.structs

from commlayer.codec_spec import check_arguments
from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import (
    Codec,
    CodecWrapper,
    Ranges,
    Round,
    State,
    accumulator,
    check_codec,
    check_input,
    check_numel,
    check_outermost,
    ranges,
    spell,
)
from commlayer.compressors.payload import Buffer, Out
from commlayer.compressors.tensors import fresh_zeros
from commlayer.errors import InvalidInput
from commlayer.records import Slice, Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

@runtime_checkable
class Fed(Protocol):
    """A codec that compresses x + residual and updates the residual in one pass."""

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int: ...


@runtime_checkable
class ReportsSent(Protocol):
    """A codec of several rounds that can compute, after its last payload, which part of its input this worker has sent.

    That part is zero if the input or a result was not finite, because all later payloads of the step are then flagged.
    """

    def sent(self, state: State, out: torch.Tensor) -> None: ...


@runtime_checkable
class Limited(Protocol):
    """A codec that flags its payload if a finite number exceeds `most`. Error feedback clamps such numbers to `most`, and the
    residual keeps the rest."""

    @property
    def most(self) -> float: ...


class ErrorFeedback(CodecWrapper, frozen=True):
    """Adds error feedback to a codec; the payloads are those of the inner codec.

    State: the float32 residual, the inner state, and under `_sent` the last payload as a view of the caller's memory. The
    caller leaves that memory unchanged until the next `start` (`emit`) or `undo` (`undo_server`). Between the rounds of a step
    `_sent` is empty, since nothing has been sent yet. A server's state also refers to the last accumulator, which must stay
    unchanged until `undo_server` or the next `add`.

    Undo computes the old residual as residual + sent - x, which is exact up to rounding, instead of keeping a copy.
    """

    name: ClassVar[str] = "error_feedback"
    biased: ClassVar[bool] = False
    keeps: ClassVar[bool] = True

    lr_correction: bool = False
    """Whether the input is in units of weight updates, gradient times learning rate: see `in_updates`."""

    def __str__(self) -> str:
        # Omitted if false, since older plans without this option must keep their spelling.
        return spell(self) if self.lr_correction else f"{self.name}({self.inner})"

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        state: State = {"residual": fresh_zeros(n), "inner": self.inner.init(spec), "_sent": None}
        if not isinstance(self.inner, Fed):
            state["_scratch"] = torch.empty(n)
        return state

    def init_server(self, spec: Spec) -> State:
        if self._lossy_emit():
            return {**self.init(spec), "inner": self.inner.init_server(spec), "_added": None}
        return {"inner": self.inner.init_server(spec)}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        state["_sent"] = None  # the last payload was applied, so undo must not roll it back if this step fails
        _check(self.name, "x", x, state)
        nbytes = self._start(x, state, out)
        state["_sent"] = out[: nbytes if len(self.rounds) == 1 else 0]
        return nbytes

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        nbytes = int(self.inner.next(r, result, state["inner"], out))
        if r + 2 == len(self.rounds):
            self.inner.sent(state["inner"], state["_scratch"])
            state["residual"] -= state["_scratch"]
            state["_sent"] = out[:nbytes]
        return nbytes

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        _check(self.name, "out", out, state)
        return bool(self.inner.decode(result, state["inner"], out))

    def undo(self, state: State, x: torch.Tensor, elements: Ranges = None) -> None:
        if state["_sent"] is None:
            return
        back = state["residual"] if elements is None else torch.zeros_like(state["residual"])
        if len(self.rounds) == 1:
            self.inner.add_to(state["_sent"], back)
        elif len(state["_sent"]):
            self.inner.sent(state["inner"], state["_scratch"])
            back += state["_scratch"]
        back -= x if kernels.all_finite(x) else x.nan_to_num(0.0, 0.0, 0.0)  # non-finite elements never entered the residual
        _settle(state, back, elements)

    def undo_server(self, state: State, elements: Ranges = None) -> None:
        if state.get("_sent") is None:
            return
        back = state["residual"] if elements is None else torch.zeros_like(state["residual"])
        back -= state["_added"]
        self.inner.add(0, state["_sent"], accumulator(back), first=False)
        _settle(state, back, elements)
        if elements is None:
            state["_added"] = None

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        if not self._lossy_emit():
            return int(self.inner.emit(r, acc, state["inner"], out))
        state["_sent"] = state["_added"] = None
        total = acc["sum"]
        if acc["flagged"][0] or not kernels.all_finite(total, state["residual"]):
            return payload.write_flagged(out, self.id, total.numel())
        before_emit(self.inner, acc, state["inner"])
        nbytes = self._start(total, state, out)
        if payload.read(out[:nbytes], self.id, total.numel()).flagged:
            state["residual"] -= total
        else:
            state["_sent"], state["_added"] = out[:nbytes], total
        return nbytes

    def _lossy_emit(self) -> bool:
        """Returns whether a server compresses its sum again and keeps a residual, which is the case for GATHER codecs. A server
        sends the sum of a SUM codec unchanged."""
        return self.rounds == (Round.GATHER,)

    def _start(self, x: torch.Tensor, state: State, out: Out) -> int:
        residual, inner = state["residual"], state["inner"]
        if fused := getattr(self.inner, "start_fed", None):  # isinstance(_, Fed) costs as much as selection in a small bucket
            return int(fused(x, residual, inner, out))
        v = state["_scratch"]
        torch.add(x, residual, out=v)
        if not kernels.all_finite(v):
            kernels.absorb(residual, x)
            return int(self.inner.start(v, inner, out))  # flagged; start still increments inner step counters
        residual.copy_(v)
        nbytes = int(self.inner.start(v, inner, out))
        if len(self.rounds) > 1:
            return nbytes
        carried = self.inner.decode(out[:nbytes], inner, v)
        if not carried and isinstance(limited := self.inner, Limited):
            torch.clamp(residual, -limited.most, limited.most, out=v)
            nbytes = int(self.inner.start(v, inner, out))
            carried = self.inner.decode(out[:nbytes], inner, v)
        if carried:
            residual -= v
        return nbytes


def error_feedback(inner: Codec, lr_correction: bool = False) -> ErrorFeedback:
    """Adds error feedback to a codec of one round, or to a codec of several rounds that has `sent()`.

    With `lr_correction`, each part of a residual keeps the learning rate of its own step (Zheng et al. 2019), on workers and
    servers.
    """
    if not isinstance(inner, Codec) or isinstance(inner, ErrorFeedback):
        raise InvalidInput("E-CODEC-ARGUMENT",
                           f"error_feedback: inner is {inner}, but it must be a codec other than error_feedback")
    check_outermost("error_feedback", inner)
    if inner.keeps:
        raise InvalidInput("E-CODEC-ARGUMENT",
                           f"error_feedback: inner is {inner}, which already keeps a residual or velocity; put error_feedback "
                           "inside it instead")
    if len(inner.rounds) > 1 and not isinstance(inner, ReportsSent):
        raise InvalidInput("E-CODEC-ARGUMENT",
                           f"error_feedback: inner is {inner}, which has {len(inner.rounds)} rounds but no method sent() to "
                           "compute the residual with")
    check_arguments("error_feedback", lr_correction=lr_correction)
    return ErrorFeedback(inner, lr_correction)


def _check(name: str, what: str, tensor: torch.Tensor, state: State) -> None:
    check_input(name, what, tensor, state["residual"].numel(), state["residual"].device)


def _settle(state: State, back: torch.Tensor, elements: Ranges) -> None:
    """Ends an undo. `back`: the change of the residual, or the new residual itself if all elements are undone."""
    if elements is None:
        state["_sent"] = None
    else:
        add_ranges(state["residual"], back, elements)


def add_ranges(into: torch.Tensor, values: torch.Tensor, elements: Ranges) -> None:
    """Adds `values` to `into` on these elements only."""
    for start, stop in ranges(elements, into.numel()):
        into[start:stop] += values[start:stop]


def before_emit(codec: Codec, acc: Any, state: State) -> None:
    """Passes the accumulator to a codec that needs more than the sum, such as BudgetedTopK. A server calls it before it
    compresses the sum."""
    if prepare := getattr(codec, "before_emit", None):
        prepare(acc, state)


def wrap(codec: Codec) -> Codec:
    """Returns the codec that a plan uses: with error feedback if the codec is biased, otherwise unchanged."""
    if isinstance(codec, CodecWrapper) and codec.feedback_inside:
        wrapped: Codec = msgspec.structs.replace(codec, inner=wrap(codec.inner))
        return wrapped
    return error_feedback(codec) if codec.biased else codec


def in_updates(codec: Any) -> bool:
    """Returns whether the codec's input must be gradient times learning rate, so its sum must be divided by that rate again.

    In these units every residual keeps its learning rate, also on servers, and a change of the rate needs no message.
    """
    if isinstance(codec, ErrorFeedback) and codec.lr_correction:
        return True
    return any(in_updates(part) for part in msgspec.structs.astuple(codec) if isinstance(part, msgspec.Struct))


MOST = kernels.MOST["fp32"]


class Momentum(CodecWrapper, frozen=True):
    """Sends the velocity, velocity = beta * velocity + x, instead of the input x. If x is not finite, x is sent instead, so it
    is flagged, and the velocity stays unchanged."""

    name: ClassVar[str] = "momentum"
    feedback_inside: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    beta: float

    def init(self, spec: Spec) -> State:
        return {"velocity": torch.zeros(spec.numel), "inner": self.inner.init(spec), "_moved": False}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        check_input(self.name, "x", x, state["velocity"].numel(), state["velocity"].device)
        state["_moved"] = kernels.all_finite(x)
        if state["_moved"]:
            x = accelerate(state["velocity"], self.beta, x)
        return int(self.inner.start(x, state["inner"], out))

    def undo(self, state: State, x: torch.Tensor, elements: Ranges = None) -> None:
        self.inner.undo(state["inner"], state["velocity"] if state["_moved"] else x, elements)
        if state["_moved"]:
            brake(state["velocity"], self.beta, x, elements)
            state["_moved"] = elements is not None


def accelerate(velocity: torch.Tensor, beta: float, x: torch.Tensor) -> torch.Tensor:
    """Computes velocity = beta * velocity + x in place. Infinite elements are clamped to the largest finite number."""
    velocity.mul_(beta).add_(x)
    if not kernels.all_finite(velocity):
        velocity.clamp_(-MOST, MOST)
    return velocity


def brake(velocity: torch.Tensor, beta: float, x: torch.Tensor, elements: Ranges = None) -> None:
    """Undoes `accelerate` on these elements. The rounding error grows by 1 / beta and shrinks by beta in the next step."""
    for start, stop in ranges(elements, velocity.numel()):
        part = velocity[start:stop]
        part.copy_((part - x[start:stop]) / beta if beta else torch.zeros_like(part))


def momentum(inner: Codec, beta: float = 0.9) -> Momentum:
    """Adds momentum before any codec. A plan adds error feedback to the inner codec if that codec needs it."""
    check_arguments("momentum", beta=beta)
    return Momentum(check_codec("momentum", inner), float(beta))


class ResidualSlice(NamedTuple):
    """Residual values for the elements [start, stop) of the tensor with number `tensor`."""

    tensor: int
    start: int
    values: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def residual_of(state: State, numel: int) -> torch.Tensor | None:
    """Returns the residual of all elements, concatenated if a wrapper keeps it in parts. None if the codec keeps no
    residual."""
    parts = list(_residuals(state))
    if not parts or sum(p.numel() for p in parts) != numel:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _residuals(state: State) -> Iterator[torch.Tensor]:
    for name, value in state.items():
        if name == "residual" and isinstance(value, torch.Tensor):
            yield value.reshape(-1)
        elif isinstance(value, dict):
            yield from _residuals(value)


def split_by_tensor(slices: Sequence[Slice], start: int, values: torch.Tensor) -> Iterator[ResidualSlice]:
    """Converts values on a bucket's elements from `start` on to values on elements of the tensors in the bucket's slices."""
    at = 0
    for s in slices:
        low, high = max(start, at), min(start + values.numel(), at + s.numel)
        if low < high:
            yield ResidualSlice(s.tensor, s.start + low - at, values[low - start : high - start])
        at += s.numel


def ranges_of(slices: Sequence[Slice], word: int) -> Ranges:
    """Returns the elements of the slices whose bits are set in `word`."""
    if word == (1 << len(slices)) - 1:
        return None
    edges = [0, *accumulate(s.numel for s in slices)]
    return [(edges[i], edges[i + 1]) for i in range(len(slices)) if word >> i & 1]


def residual_on(inherited: Sequence[ResidualSlice], slices: Sequence[Slice]) -> torch.Tensor | None:
    """Returns the inherited residuals of the elements of a bucket with these slices, 0 where there are none; None if there are
    none at all."""
    total: torch.Tensor | None = None
    at = 0
    for s in slices:
        for part in inherited:
            low, high = max(s.start, part.start), min(s.stop, part.stop)
            if part.tensor == s.tensor and low < high:
                if total is None:
                    total = torch.zeros(sum(each.numel for each in slices))
                values = part.values[low - part.start : high - part.start]
                total[at + low - s.start : at + high - s.start] += values.to(total.device)
        at += s.numel
    return total

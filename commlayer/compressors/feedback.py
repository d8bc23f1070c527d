"""Error feedback, momentum, and residuals that a later plan inherits.

Error feedback: what a codec does not send stays in a residual and is added to the next step. Conservation: sent + residual =
input + old residual, for workers and for servers. A codec of one round may offer `start_fed(x, residual, state, out)`, which
does this in its own pass. A test compares it with the general method below.

Momentum before compression: the codec keeps the velocity, in the residual's units. Set the optimizer's own momentum to 0.

A residual is stored under the key `residual`, at any depth of a state. When the plan changes, residuals become values on
elements of tensors. A worker adds an inherited residual to the next gradients of the same elements, whatever their new path
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
    """A codec that encodes x + residual and updates the residual in one pass."""

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int: ...


@runtime_checkable
class ReportsSent(Protocol):
    """A codec of several rounds that can compute, after its last payload, which part of x this worker sent.

    That part is zero where x or a result was not finite: all later payloads of the step are then flagged.
    """

    def sent(self, state: State, out: torch.Tensor) -> None: ...


@runtime_checkable
class Limited(Protocol):
    """A codec that flags finite numbers above `most`. Error feedback clamps them to `most`, and the residual keeps the rest."""

    @property
    def most(self) -> float: ...


class ErrorFeedback(CodecWrapper, frozen=True):
    """Wraps a codec; payloads are those of the inner codec.

    State: the float32 residual, the inner state, and under `_sent` the last payload as a view of the caller's memory. The
    caller leaves that memory unchanged until the next `start` (`emit`) or `undo` (`undo_server`). Between the rounds of a step
    `_sent` is empty, since nothing has been sent yet. A server's state also points to the last accumulator, which must stay
    unchanged until `undo_server` or the next `add`.

    Undo is arithmetic, not a saved copy: residual + sent - x, exact to a rounding of x.
    """

    name: ClassVar[str] = "error_feedback"
    biased: ClassVar[bool] = False
    keeps: ClassVar[bool] = True

    lr_correction: bool = False
    """Whether x is in units of the update, gradient times learning rate: see `in_updates`."""

    def __str__(self) -> str:
        # Absent means off: plans from before this option are spelled so.
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
        state["_sent"] = None  # the last payload was applied: if this step fails from now on, undo must not take that one back
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
        """A server returns a SUM unchanged. It encodes a GATHER again and keeps the encoding error in its residual."""
        return self.rounds == (Round.GATHER,)

    def _start(self, x: torch.Tensor, state: State, out: Out) -> int:
        residual, inner = state["residual"], state["inner"]
        if fused := getattr(self.inner, "start_fed", None):  # isinstance(_, Fed) costs as much as selection in a small bucket
            return int(fused(x, residual, inner, out))
        v = state["_scratch"]
        torch.add(x, residual, out=v)
        if not kernels.all_finite(v):
            kernels.absorb(residual, x)
            return int(self.inner.start(v, inner, out))  # the payload is flagged; start still advances the inner step counters
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
    """Wraps a codec of one round, or a codec of several rounds that has `sent()`.

    With `lr_correction`, each part of a residual keeps the learning rate of its own step (Zheng et al. 2019), on workers and
    servers.
    """
    if not isinstance(inner, Codec) or isinstance(inner, ErrorFeedback):
        raise InvalidInput("E-CODEC-ARGUMENT",
                           f"error_feedback: inner is {inner}, allowed is a codec that is not error_feedback itself")
    check_outermost("error_feedback", inner)
    if inner.keeps:
        raise InvalidInput("E-CODEC-ARGUMENT",
                           f"error_feedback: {inner} keeps back itself what it does not send; error_feedback goes inside it")
    if len(inner.rounds) > 1 and not isinstance(inner, ReportsSent):
        raise InvalidInput("E-CODEC-ARGUMENT",
                           f"error_feedback: {inner} has {len(inner.rounds)} rounds and no sent(), so its residual is not "
                           "known")
    check_arguments("error_feedback", lr_correction=lr_correction)
    return ErrorFeedback(inner, lr_correction)


def _check(name: str, what: str, tensor: torch.Tensor, state: State) -> None:
    check_input(name, what, tensor, state["residual"].numel(), state["residual"].device)


def _settle(state: State, back: torch.Tensor, elements: Ranges) -> None:
    """Ends an undo. If all elements are undone, `back` is the residual itself."""
    if elements is None:
        state["_sent"] = None
    else:
        add_ranges(state["residual"], back, elements)


def add_ranges(into: torch.Tensor, values: torch.Tensor, elements: Ranges) -> None:
    """into += values on the elements of `elements`."""
    for start, stop in ranges(elements, into.numel()):
        into[start:stop] += values[start:stop]


def before_emit(codec: Codec, acc: Any, state: State) -> None:
    """Before a server encodes: passes the accumulator to a codec that needs more than the sum, such as BudgetedTopK."""
    if prepare := getattr(codec, "before_emit", None):
        prepare(acc, state)


def wrap(codec: Codec) -> Codec:
    """The codec that a plan runs: error feedback around a biased codec, any other codec unchanged."""
    if isinstance(codec, CodecWrapper) and codec.feedback_inside:
        wrapped: Codec = msgspec.structs.replace(codec, inner=wrap(codec.inner))
        return wrapped
    return error_feedback(codec) if codec.biased else codec


def in_updates(codec: Any) -> bool:
    """Whether x must be gradient times learning rate, and the sum be divided by that rate again.

    In these units every residual keeps its learning rate, also on servers, and a change of the rate needs no message.
    """
    if isinstance(codec, ErrorFeedback) and codec.lr_correction:
        return True
    return any(in_updates(part) for part in msgspec.structs.astuple(codec) if isinstance(part, msgspec.Struct))


MOST = kernels.MOST["fp32"]


class Momentum(CodecWrapper, frozen=True):
    """Sends velocity = beta * velocity + x. A non-finite x is passed on, to be flagged, and leaves the velocity unchanged."""

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
    """velocity = beta * velocity + x, kept finite."""
    velocity.mul_(beta).add_(x)
    if not kernels.all_finite(velocity):
        velocity.clamp_(-MOST, MOST)
    return velocity


def brake(velocity: torch.Tensor, beta: float, x: torch.Tensor, elements: Ranges = None) -> None:
    """The reverse of `accelerate`. Its rounding error grows by 1 / beta and shrinks by beta in the next step."""
    for start, stop in ranges(elements, velocity.numel()):
        part = velocity[start:stop]
        part.copy_((part - x[start:stop]) / beta if beta else torch.zeros_like(part))


def momentum(inner: Codec, beta: float = 0.9) -> Momentum:
    """Momentum before any codec. A plan adds error feedback inside it where the codec needs that."""
    check_arguments("momentum", beta=beta)
    return Momentum(check_codec("momentum", inner), float(beta))


class ResidualSlice(NamedTuple):
    """Residual values on elements [start, stop) of a tensor."""

    tensor: int
    start: int
    values: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + self.values.numel()


def residual_of(state: State, numel: int) -> torch.Tensor | None:
    """The residual of all elements, concatenated where a wrapper keeps it in parts. None if the codec keeps none."""
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
    """Maps values on a bucket's elements from `start` on to elements of the tensors in its slices."""
    at = 0
    for s in slices:
        low, high = max(start, at), min(start + values.numel(), at + s.numel)
        if low < high:
            yield ResidualSlice(s.tensor, s.start + low - at, values[low - start : high - start])
        at += s.numel


def ranges_of(slices: Sequence[Slice], word: int) -> Ranges:
    """The elements of the slices whose bits are set in `word`."""
    if word == (1 << len(slices)) - 1:
        return None
    edges = [0, *accumulate(s.numel for s in slices)]
    return [(edges[i], edges[i + 1]) for i in range(len(slices)) if word >> i & 1]


def residual_on(inherited: Sequence[ResidualSlice], slices: Sequence[Slice]) -> torch.Tensor | None:
    """The part of the inherited residuals that falls on a bucket of these slices, or None."""
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

"""Error feedback and momentum.

Error feedback: the part of its input that a codec does not send stays in a residual and is added to the input of the next step.
Sent + new residual = input + old residual, on workers and servers. A codec of one round may have `start_fused(x, residual,
state, out)`, which compresses and updates the residual in one pass. A test compares `start_fused` with the general method.

Momentum before compression: the codec keeps the velocity, in the residual's units. Set the optimizer's own momentum to 0.

A residual is stored under the key `residual`, at any depth of a state. residual_slices.py converts residuals to values on
elements of tensors, which another plan or another worker can inherit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, ClassVar

import msgspec.structs
import numpy as np

from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import (
    NAN,
    Codec,
    CodecWrapper,
    Ranges,
    Reduction,
    State,
    as_array,
    check_numel,
    ranges,
    states,
)
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer, Out
from commlayer.errors import InvalidInput
from commlayer.records import Slice, Spec


class ErrorFeedback(CodecWrapper, frozen=True):
    """Adds error feedback to a codec of one round, or to a codec of several rounds that has `sent()`. The payloads are those of
    the inner codec.

    State: the float32 residual, the inner state, and under `_sent` the last payload as a view of the caller's memory. The
    caller leaves that memory unchanged until the next `start` (`emit`) or `undo` (`undo_server`). Between the rounds of a step
    `_sent` is empty, since nothing has been sent yet. A server's state also refers to the last accumulator, which must stay
    unchanged until `undo_server` or the next `add`. `_reweighed` has the arguments of `reweigh`, if it was called.

    Undo computes the old residual as residual + sent - x, which is exact up to rounding, instead of keeping a copy.
    """

    name: ClassVar[str] = "error_feedback"
    biased: ClassVar[bool] = False
    needs_undo: ClassVar[bool] = True
    has_residual: ClassVar[bool] = True

    lr_correction: bool = False
    """True: the input is in units of weight updates (gradient times learning rate), so each step's contribution to a residual
    keeps the learning rate of its step (Zheng et al. 2019), on workers and servers; see `encodes_updates`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = ""
        if not isinstance(self.inner, Codec) or isinstance(self.inner, ErrorFeedback):
            wrong = "but it must be a codec other than error_feedback"
        elif isinstance(self.inner, Momentum):  # a residual around it would be added to the input as if it were a gradient
            wrong = "but momentum changes the input; put momentum around error_feedback instead"
        elif self.inner.needs_undo:
            wrong = "which already keeps a residual or velocity; put error_feedback inside it instead"
        if wrong:
            raise InvalidInput("E-CODEC-ARGUMENT", f"error_feedback: inner is {self.inner}, {wrong}")

    @property
    def has_server_residual(self) -> bool:  # type: ignore[override]
        """True if a server compresses its sum again, as for GATHER codecs. A server sends the sum of a SUM codec unchanged."""
        return bool(self.rounds == (Reduction.GATHER,))

    def __str__(self) -> str:
        # Omitted if False, since older plans without this option must keep their spelling.
        return super().__str__() if self.lr_correction else f"{self.name}({self.inner})"

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        state: State = {"residual": kernels.fresh_zeros(n), "inner": self.inner.init(spec), "_sent": None, "_reweighed": None}
        if not hasattr(self.inner, "start_fused"):
            state["_scratch"] = np.empty(n, np.float32)
        return state

    def init_server(self, spec: Spec) -> State:
        if self.has_server_residual:
            return {**self.init(spec), "inner": self.inner.init_server(spec), "_added": None}
        return {"inner": self.inner.init_server(spec)}

    def start(self, x: Array, state: State, out: Out) -> int:
        # The optimizer has applied the last payload, so `undo` must not roll this payload back if the step fails.
        state["_sent"] = state["_reweighed"] = None
        nbytes = self._start(as_array(self.name, "x", x, len(state["residual"]), state["residual"]), state, out)
        state["_sent"] = out[: nbytes if len(self.rounds) == 1 else 0]
        return nbytes

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        nbytes = self.inner.next(r, result, state["inner"], out)
        if r + 2 == len(self.rounds):
            self.inner.sent(state["inner"], state["_scratch"])
            state["residual"] -= state["_scratch"]
            state["_sent"] = out[:nbytes]
        return nbytes

    def decode(self, result: Buffer, state: State, out: Array) -> bool:
        out = as_array(self.name, "out", out, len(state["residual"]), state["residual"])
        return self.inner.decode(result, state["inner"], out)

    def undo(self, state: State, x: Array, elements: Ranges = None) -> None:
        if state["_sent"] is None:
            return
        residual = state["residual"]
        x = as_array(self.name, "x", x, len(residual), residual)
        back = residual if elements is None else 0.0 * residual
        if (reweighed := state["_reweighed"]) is None:
            self._add_sent(state, back)
        else:
            share, more = reweighed
            back -= more
            back += share * self._sent(state)
        kernels.add_finite(back, -x)  # non-finite elements never entered the residual
        _end_undo(state, back, elements)

    def reweigh(self, state: State, share: float, more: Array) -> None:
        residual = state["residual"]
        residual += more
        residual += (1.0 - share) * self._sent(state)
        state["_reweighed"] = share, more

    def _sent(self, state: State) -> Array:
        """Returns what the last payload has sent."""
        sent = 0.0 * state["residual"]
        self._add_sent(state, sent)
        return sent

    def _add_sent(self, state: State, out: Array) -> None:
        """Adds what the last payload has sent to `out`."""
        if len(self.rounds) == 1:
            self.inner.add_to(state["_sent"], out)
        elif len(state["_sent"]):
            self.inner.sent(state["inner"], state["_scratch"])
            out += state["_scratch"]

    def undo_server(self, state: State, elements: Ranges = None) -> None:
        if state.get("_sent") is None:
            return
        back = state["residual"] if elements is None else 0.0 * state["residual"]
        back -= state["_added"]
        self.inner.add_to(state["_sent"], back)
        _end_undo(state, back, elements)
        if elements is None:
            state["_added"] = None

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        if not self.has_server_residual:
            return self.inner.emit(r, acc, state["inner"], out)
        state["_sent"] = state["_added"] = None
        total = acc["sum"]
        if acc["flagged"][0] or not kernels.of(total).all_finite(total, state["residual"]):
            return payload.write_flagged(out, self.id, len(total))
        self.inner.before_emit(acc, state["inner"])
        nbytes = self._start(total, state, out)
        if payload.read(out[:nbytes], self.id, len(total)).flagged:
            state["residual"] -= total
        else:
            state["_sent"], state["_added"] = out[:nbytes], total
        return nbytes

    def _start(self, x: Array, state: State, out: Out) -> int:
        residual, inner = state["residual"], state["inner"]
        if fused := getattr(self.inner, "start_fused", None):
            return int(fused(x, residual, inner, out))
        v = state["_scratch"]
        if not kernels.add_finite(residual, x):
            v[:] = NAN
            return int(self.inner.start(v, inner, out))  # flagged; start still increments inner step counters
        nbytes = self.inner.start(residual, inner, out)
        if len(self.rounds) > 1:
            return nbytes
        sent = self.inner.decode(out[:nbytes], inner, v)
        if not sent:
            v[:] = residual.clip(-self.inner.most, self.inner.most)
            nbytes = self.inner.start(v, inner, out)
            sent = self.inner.decode(out[:nbytes], inner, v)
        if sent:
            residual -= v
        return nbytes


def _end_undo(state: State, back: Array, elements: Ranges) -> None:
    """Ends an undo. `back`: the change of the residual, or the new residual itself if all elements are undone."""
    if elements is None:
        state["_sent"] = state["_reweighed"] = None
    else:
        add_ranges(state["residual"], back, elements)


def add_ranges(into: Array, values: Array, elements: Ranges) -> None:
    """Adds `values` to `into` only on the elements in `elements`."""
    for start, stop in ranges(elements, len(into)):
        into[start:stop] += values[start:stop]


def wrap(codec: Codec) -> Codec:
    """Returns the codec that a plan uses: with error feedback if the codec is biased, otherwise unchanged."""
    if isinstance(codec, Momentum):
        return msgspec.structs.replace(codec, inner=wrap(codec.inner))
    return error_feedback(codec) if codec.biased else codec


def encodes_updates(codec: Codec) -> bool:
    """Returns True if the codec's input must be gradient times learning rate, so its sum must be divided by that rate again.

    With such input, residuals contain the learning rate of their own step, also on servers, and a change of the rate needs no
    message.
    """
    return (isinstance(codec, ErrorFeedback) and codec.lr_correction) or any(map(encodes_updates, codec.parts.values()))


class Momentum(CodecWrapper, frozen=True):
    """Sends the velocity, velocity = beta * velocity + x, instead of the input x. A plan adds error feedback to the inner codec
    if that codec needs it. If x is not finite, x is sent instead, so it is flagged, and the velocity stays unchanged."""

    name: ClassVar[str] = "momentum"
    needs_undo: ClassVar[bool] = True

    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner, Codec):
            raise InvalidInput("E-CODEC-ARGUMENT", f"momentum: inner is {self.inner!r}, but it must be a codec")

    def init(self, spec: Spec) -> State:
        return {"velocity": np.zeros(spec.numel, np.float32), "inner": self.inner.init(spec), "_moved": False,
                "_more": None}

    @np.errstate(over="ignore")
    def start(self, x: Array, state: State, out: Out) -> int:
        velocity = state["velocity"]
        x = as_array(self.name, "x", x, len(velocity), velocity)
        k = kernels.of(x)
        state["_moved"], state["_more"] = k.all_finite(x), None
        if state["_moved"]:
            velocity *= self.beta
            velocity += x
            if not k.all_finite(velocity):
                velocity[:] = velocity.clip(-kernels.MOST["fp32"], kernels.MOST["fp32"])
            x = velocity
        return self.inner.start(x, state["inner"], out)

    def undo(self, state: State, x: Array, elements: Ranges = None) -> None:
        velocity = state["velocity"]
        x = as_array(self.name, "x", x, len(velocity), velocity)
        if state["_more"] is not None:
            for start, stop in ranges(elements, len(velocity)):
                velocity[start:stop] -= state["_more"][start:stop]
        self.inner.undo(state["inner"], velocity if state["_moved"] else x, elements)
        if state["_moved"]:
            # The rounding error grows by 1 / beta and shrinks by beta in the next step.
            for start, stop in ranges(elements, len(velocity)):
                part = velocity[start:stop]
                part -= x[start:stop] if self.beta else part
                part /= self.beta or 1.0
            state["_moved"] = elements is not None

    def reweigh(self, state: State, share: float, more: Array) -> None:
        velocity = state["velocity"]
        velocity += more
        state["_more"] = more
        self.inner.reweigh(state["inner"], share, more)


error_feedback, momentum = ErrorFeedback, Momentum


def find_residual(state: State) -> Array | None:
    """Returns the residual in a codec's state. Returns None if the codec keeps no residual."""
    return next((owner["residual"] for _, owner in states(state) if "residual" in owner), None)


def flagged_ranges(slices: Sequence[Slice], word: int) -> Ranges:
    """Returns the elements of the slices whose bits are set in `word`."""
    if word == (1 << len(slices)) - 1:
        return None
    edges = [0, *accumulate(s.numel for s in slices)]
    return [(edges[i], edges[i + 1]) for i in range(len(slices)) if word >> i & 1]

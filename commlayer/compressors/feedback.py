"""Error feedback: what a codec does not send stays in a residual and is added to the next step. Knows no codec's format.

Conservation: sent + residual = input + old residual, for the worker and for the server. A codec of one round may offer
`start_fed(x, residual, state, out)`, which does it in its own pass; a test pins it equal to the general way below.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec
import torch

from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import Buffer, Codec, Out, Round, State
from commlayer.compressors.oneround import accumulator, check_numel, spell
from commlayer.records import Spec


@runtime_checkable
class Fed(Protocol):
    """A codec that codes x + residual and updates the residual in one pass."""

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int: ...


@runtime_checkable
class Sent(Protocol):
    """A codec of several rounds that can tell, after its last payload, what part of x this worker's payloads carried.

    Zeros where x or a result was not finite: then all later payloads of the step are flagged and nothing was carried.
    """

    def sent(self, state: State, out: torch.Tensor) -> None: ...


@runtime_checkable
class Limited(Protocol):
    """A codec that flags finite numbers above `most`. With feedback they are cut there, and the residual keeps the rest."""

    @property
    def most(self) -> float: ...


class ErrorFeedback(msgspec.Struct, frozen=True):
    """Payloads are the inner codec's.

    State: the float32 residual, the inner state, and under `_sent` the last payload as a view of the caller's memory, which
    must stay unchanged until the next `start` (`emit`) or `undo` (`undo_server`). A server's state also points to the last
    accumulator, which must stay unchanged until `undo_server` or the next `add`.
    """

    name: ClassVar[str] = "error_feedback"
    biased: ClassVar[bool] = False
    in_place: ClassVar[bool] = False

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

    def bound(self, spec: Spec) -> int:
        return int(self.inner.bound(spec))

    def init(self, spec: Spec) -> State:
        n = check_numel(spec)
        state: State = {"residual": torch.zeros(n), "inner": self.inner.init(spec), "_sent": None}
        if not isinstance(self.inner, Fed):
            state["_scratch"] = torch.empty(n)
        return state

    def init_server(self, spec: Spec) -> State:
        if self._lossy_emit():
            return {**self.init(spec), "inner": self.inner.init_server(spec), "_added": None}
        return {"inner": self.inner.init_server(spec)}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        state["_sent"] = None  # what the last step sent was delivered: a step that fails from here on must not give it back
        nbytes = self._start(x, state, out)
        if len(self.rounds) == 1:
            state["_sent"] = out[:nbytes]
        return nbytes

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        nbytes = int(self.inner.next(r, result, state["inner"], out))
        if r + 2 == len(self.rounds):
            self.inner.sent(state["inner"], state["_scratch"])
            state["residual"] -= state["_scratch"]
            state["_sent"] = out[:nbytes]
        return nbytes

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        return bool(self.inner.decode(result, state["inner"], out))

    def undo(self, state: State) -> None:
        if state["_sent"] is None:
            return
        if len(self.rounds) == 1:
            self.inner.add(0, state["_sent"], accumulator(state["residual"]), first=False)
        else:
            self.inner.sent(state["inner"], state["_scratch"])
            state["residual"] += state["_scratch"]
        state["_sent"] = None

    def undo_server(self, state: State) -> None:
        if state.get("_sent") is None:
            return
        state["residual"] -= state["_added"]
        self.inner.add(0, state["_sent"], accumulator(state["residual"]), first=False)
        state["_sent"] = state["_added"] = None

    def zeros(self, spec: Spec, r: int) -> Any:
        return self.inner.zeros(spec, r)

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        self.inner.add(r, payload_, acc, first=first)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        if not self._lossy_emit():
            return int(self.inner.emit(r, acc, state["inner"], out))
        state["_sent"] = state["_added"] = None
        total = acc["sum"]
        if acc["flagged"][0] or not kernels.all_finite(total, state["residual"]):
            return payload.write_flagged(out, self.id, total.numel())
        nbytes = self._start(total, state, out)
        if payload.read(out[:nbytes], self.id, total.numel()).flagged:
            state["residual"] -= total
        else:
            state["_sent"], state["_added"] = out[:nbytes], total
        return nbytes

    def _lossy_emit(self) -> bool:
        """A SUM is sent back as it is; only a GATHER is coded again, and then the server keeps what that loses."""
        return self.rounds == (Round.GATHER,)

    def _start(self, x: torch.Tensor, state: State, out: Out) -> int:
        residual, inner = state["residual"], state["inner"]
        if isinstance(self.inner, Fed):
            return self.inner.start_fed(x, residual, inner, out)
        v = state["_scratch"]
        torch.add(x, residual, out=v)
        if not kernels.all_finite(v):
            kernels.absorb(residual, x)
            several = len(self.rounds) > 1
            return int(self.inner.start(v, inner, out)) if several else payload.write_flagged(out, self.id, x.numel())
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


def error_feedback(inner: Codec) -> ErrorFeedback:
    """Wraps a codec of one round, or one of several rounds that can say what it sent."""
    if not isinstance(inner, Codec) or isinstance(inner, ErrorFeedback):
        raise ValueError(f"error_feedback: inner is {inner}, allowed is a codec that is not error_feedback itself")
    if len(inner.rounds) > 1 and not isinstance(inner, Sent):
        raise ValueError(f"error_feedback: {inner} has {len(inner.rounds)} rounds and no sent(), so its residual is not known")
    return ErrorFeedback(inner)


def wrap(codec: Codec) -> Codec:
    """What a plan runs: error feedback around a biased codec, any other as it is."""
    return error_feedback(codec) if codec.biased else codec

"""Momentum before compression: plain, or corrected for what is not sent yet (DGC, Lin et al. 2018). Knows no codec's format.

With either the optimizer's own momentum is 0: velocity is kept here, in the residual's units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.codec_name import checked
from commlayer.compressors import inputs, kernels
from commlayer.compressors.codec import Buffer, Codec, Cut, Out, State, ranges
from commlayer.compressors.feedback import ErrorFeedback
from commlayer.compressors.selection import Placed
from commlayer.compressors.wrapper import Wrapper, check_codec, check_plain
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

MOST = kernels.MOST["fp32"]


class Momentum(Wrapper, frozen=True):
    """Sends velocity = beta * velocity + x. What is not finite passes through to be flagged and leaves the velocity alone."""

    name: ClassVar[str] = "momentum"
    feedback_inside: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    beta: float

    def init(self, spec: Spec) -> State:
        return {"velocity": torch.zeros(spec.numel), "inner": self.inner.init(spec), "_moved": False}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        inputs.check(self.name, "x", x, state["velocity"].numel(), state["velocity"].device)
        state["_moved"] = kernels.all_finite(x)
        if state["_moved"]:
            x = accelerate(state["velocity"], self.beta, x)
        return int(self.inner.start(x, state["inner"], out))

    def undo(self, state: State, x: torch.Tensor, cut: Cut = None) -> None:
        self.inner.undo(state["inner"], state["velocity"] if state["_moved"] else x, cut)
        if state["_moved"]:
            brake(state["velocity"], self.beta, x, cut)
            state["_moved"] = cut is not None


class MomentumCorrection(Wrapper, frozen=True):
    """Adds velocity, not gradients, to the residual, so that an entry sent late arrives with the momentum it has gathered.

    Entries that are sent lose their velocity (factor masking), or stale momentum would push on. The worker's residual and
    the server are error feedback's; the state is that of error feedback and `velocity`.
    """

    name: ClassVar[str] = "momentum_correction"
    biased: ClassVar[bool] = False
    keeps: ClassVar[bool] = True

    beta: float
    nesterov: bool
    clip: float | None

    @property
    def feedback(self) -> ErrorFeedback:
        return ErrorFeedback(self.inner)

    def init(self, spec: Spec) -> State:
        return {**self.feedback.init(spec), "velocity": torch.zeros(spec.numel), "_masked": None}

    def init_server(self, spec: Spec) -> State:
        return self.feedback.init_server(spec)

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        state["_sent"] = state["_masked"] = None
        inputs.check(self.name, "x", x, state["velocity"].numel(), state["velocity"].device)
        if not kernels.all_finite(x):
            return self.feedback.start(x, state, out)
        velocity, x = state["velocity"], self._clipped(x)
        if self.nesterov:
            feed = accelerate(velocity, 1.0, x).mul_(self.beta) + x
        else:
            feed = accelerate(velocity, self.beta, x)
        nbytes = self.feedback.start(feed, state, out)
        places = self.inner.places(out[:nbytes], x.numel()).long()
        state["_masked"] = places, velocity[places]
        velocity[places] = 0.0
        return nbytes

    def undo(self, state: State, x: torch.Tensor, cut: Cut = None) -> None:
        if state["_sent"] is None or state["_masked"] is None:
            self.feedback.undo(state, x, cut)
            return
        places, values = state["_masked"]
        velocity, x = state["velocity"], self._clipped(x)
        moved = velocity.index_copy(0, places, values)
        self.feedback.undo(state, moved + x if self.nesterov else moved, cut)
        if self.nesterov:
            brake(moved, self.beta, torch.zeros_like(x))
            brake(moved, 1.0, x)
        else:
            brake(moved, self.beta, x)
        for start, stop in ranges(cut, velocity.numel()):
            velocity[start:stop] = moved[start:stop]
        if cut is None:
            state["_masked"] = None

    def undo_server(self, state: State, cut: Cut = None) -> None:
        self.feedback.undo_server(state, cut)

    def _clipped(self, x: torch.Tensor) -> torch.Tensor:
        if self.clip is not None and (norm := float(torch.linalg.vector_norm(x, dtype=torch.float64))) > self.clip:
            return x * (self.clip / norm)
        return x

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        return self.feedback.emit(r, acc, state, out)

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        return self.feedback.decode(result, state, out)


def accelerate(velocity: torch.Tensor, beta: float, x: torch.Tensor) -> torch.Tensor:
    """velocity = beta * velocity + x, kept finite."""
    velocity.mul_(beta).add_(x)
    if not kernels.all_finite(velocity):
        velocity.clamp_(-MOST, MOST)
    return velocity


def brake(velocity: torch.Tensor, beta: float, x: torch.Tensor, cut: Cut = None) -> None:
    """The reverse of `accelerate`. Its rounding grows by 1 / beta here and shrinks by beta with the next step."""
    for start, stop in ranges(cut, velocity.numel()):
        part = velocity[start:stop]
        part.copy_((part - x[start:stop]) / beta if beta else torch.zeros_like(part))


def momentum(inner: Codec, beta: float = 0.9) -> Momentum:
    """Momentum ahead of any codec; a plan adds error feedback inside it where the codec needs that."""
    checked("momentum", beta=beta)
    return Momentum(check_codec("momentum", inner), float(beta))


def momentum_correction(
    inner: Codec, beta: float = 0.9, nesterov: bool = False, clip: float | None = None
) -> MomentumCorrection:
    """For codecs that send some entries and not others. It is its own error feedback.

    `clip` bounds the norm of this worker's bucket; for a bound c on the norm of a mean over N workers, DGC takes c / sqrt(N).
    """
    check_plain("momentum_correction", inner)
    if not isinstance(inner, Placed):
        raise ValueError(f"momentum_correction: {inner} sends every entry, so masking would leave no momentum: use "
                         "momentum(error_feedback(...)), or a sparse codec")
    checked("momentum_correction", beta=beta, nesterov=nesterov, clip=clip)
    return MomentumCorrection(inner, float(beta), nesterov, None if clip is None else float(clip))

"""Momentum before compression: plain, or corrected for what is not sent yet (DGC, Lin et al. 2018). Knows no codec's format.

With either the optimizer's own momentum is 0: velocity is kept here, in the residual's units.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from commlayer.compressors import inputs, kernels
from commlayer.compressors.codec import Buffer, Codec, Out, State
from commlayer.compressors.feedback import ErrorFeedback
from commlayer.compressors.picking import Placed
from commlayer.compressors.wrapper import Wrapper, check_codec, check_plain, check_share
from commlayer.records import Spec

MOST = torch.finfo(torch.float32).max


class Momentum(Wrapper, frozen=True):
    """Sends velocity = beta * velocity + x. What is not finite passes through to be flagged and leaves the velocity alone."""

    name: ClassVar[str] = "momentum"
    feedback_inside: ClassVar[bool] = True

    beta: float

    def init(self, spec: Spec) -> State:
        return {"velocity": torch.zeros(spec.numel), "inner": self.inner.init(spec)}

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        inputs.check(self.name, "x", x, state["velocity"].numel(), state["velocity"].device)
        if kernels.all_finite(x):
            x = accelerate(state["velocity"], self.beta, x)
        return int(self.inner.start(x, state["inner"], out))


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
        velocity = state["velocity"]
        if self.clip is not None and (norm := float(torch.linalg.vector_norm(x, dtype=torch.float64))) > self.clip:
            x = x * (self.clip / norm)
        if self.nesterov:
            feed = accelerate(velocity, 1.0, x).mul_(self.beta) + x
        else:
            feed = accelerate(velocity, self.beta, x)
        nbytes = self.feedback.start(feed, state, out)
        places = self.inner.places(out[:nbytes], x.numel()).long()
        state["_masked"] = places, velocity[places]
        velocity[places] = 0.0
        return nbytes

    def undo(self, state: State) -> None:
        if state["_sent"] is not None and state["_masked"] is not None:
            places, values = state["_masked"]
            state["velocity"][places] = values
        state["_masked"] = None
        self.feedback.undo(state)

    def undo_server(self, state: State) -> None:
        self.feedback.undo_server(state)

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


def momentum(inner: Codec, beta: float = 0.9) -> Momentum:
    """Momentum ahead of any codec; a plan adds error feedback inside it where the codec needs that."""
    return Momentum(check_codec("momentum", inner), check_share("momentum", "beta", beta))


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
    if not isinstance(nesterov, bool):
        raise ValueError(f"momentum_correction: nesterov is {nesterov!r}, allowed is True or False")
    if clip is not None and (not isinstance(clip, int | float) or isinstance(clip, bool) or not 0 < clip < math.inf):
        raise ValueError(f"momentum_correction: clip is {clip!r}, allowed is None or a number above 0")
    beta = check_share("momentum_correction", "beta", beta)
    return MomentumCorrection(inner, beta, nesterov, None if clip is None else float(clip))

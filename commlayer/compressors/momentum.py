"""Momentum before compression. Set the optimizer's own momentum to 0: the codec keeps the velocity, in the residual's units."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from commlayer.codec_name import checked
from commlayer.compressors import kernels
from commlayer.compressors.codec import Codec, Cut, State, Wrapper, check_codec, check_input, ranges
from commlayer.compressors.payload import Out
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

MOST = kernels.MOST["fp32"]


class Momentum(Wrapper, frozen=True):
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

    def undo(self, state: State, x: torch.Tensor, cut: Cut = None) -> None:
        self.inner.undo(state["inner"], state["velocity"] if state["_moved"] else x, cut)
        if state["_moved"]:
            brake(state["velocity"], self.beta, x, cut)
            state["_moved"] = cut is not None


def accelerate(velocity: torch.Tensor, beta: float, x: torch.Tensor) -> torch.Tensor:
    """velocity = beta * velocity + x, kept finite."""
    velocity.mul_(beta).add_(x)
    if not kernels.all_finite(velocity):
        velocity.clamp_(-MOST, MOST)
    return velocity


def brake(velocity: torch.Tensor, beta: float, x: torch.Tensor, cut: Cut = None) -> None:
    """The reverse of `accelerate`. Its rounding error grows by 1 / beta and shrinks by beta in the next step."""
    for start, stop in ranges(cut, velocity.numel()):
        part = velocity[start:stop]
        part.copy_((part - x[start:stop]) / beta if beta else torch.zeros_like(part))


def momentum(inner: Codec, beta: float = 0.9) -> Momentum:
    """Momentum before any codec. A plan adds error feedback inside it where the codec needs that."""
    checked("momentum", beta=beta)
    return Momentum(check_codec("momentum", inner), float(beta))

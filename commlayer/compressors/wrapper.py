"""Base of wrappers: codecs around an `inner` codec, whose bytes they send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from commlayer.compressors.codec import Codec, Cut, Round, State
from commlayer.compressors.one_round import spell
from commlayer.compressors.payload import Buffer, Out
from commlayer.errors import InvalidInput
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch


class Wrapper(msgspec.Struct, frozen=True):
    """Forwards each call to the inner codec, whose state lies under "inner" in the wrapper's state."""

    name: ClassVar[str] = ""
    in_place: ClassVar[bool] = False
    feedback_inside: ClassVar[bool] = False
    """Whether a plan's error feedback belongs around the inner codec, since this wrapper changes the input."""

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

    def undo(self, state: State, x: torch.Tensor, cut: Cut = None) -> None:
        self.inner.undo(state["inner"], x, cut)

    def undo_server(self, state: State, cut: Cut = None) -> None:
        self.inner.undo_server(state["inner"], cut)

    def zeros(self, spec: Spec, r: int) -> Any:
        return self.inner.zeros(spec, r)

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        self.inner.add(r, payload_, acc, first=first)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        return int(self.inner.emit(r, acc, state["inner"], out))


def check_codec(name: str, inner: object) -> Codec:
    if not isinstance(inner, Codec):
        raise InvalidInput("E-CODEC-ARGUMENT", f"{name}: inner is {inner!r}, allowed is a codec")
    return inner


def check_outermost(name: str, inner: object) -> None:
    """Raises if `inner` has `feedback_inside`: a residual around it would be added to the input as if it were gradient."""
    if isinstance(inner, Wrapper) and inner.feedback_inside:
        raise InvalidInput("E-CODEC-ARGUMENT",
                           f"{name}: inner is {inner}; {inner.name} changes what is to be sent, so it goes around {name}")


def check_plain(name: str, inner: object) -> Codec:
    """Checks that `inner` is a codec of one round without a residual, for wrappers that keep a residual themselves."""
    codec = check_codec(name, inner)
    check_outermost(name, inner)
    if codec.keeps or len(codec.rounds) != 1:
        raise InvalidInput("E-CODEC-ARGUMENT",
                           f"{name}: inner is {inner}, allowed is a codec of one round that keeps nothing back itself")
    return codec

"""Base of codecs of one round with a dense float32 accumulator. A subclass implements `check` and `apply`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from commlayer.compressors import payload
from commlayer.compressors.codec import Cut, Round, State
from commlayer.compressors.payload import Buffer, Out
from commlayer.errors import InvalidInput
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

NAN = float("nan")


def spell(codec: msgspec.Struct) -> str:
    """`name(argument=value, ...)` with every argument: a later change of a default must not change a plan's meaning."""
    fields = {name: getattr(codec, name) for name in codec.__struct_fields__}
    parts = [str(v) if isinstance(v, msgspec.Struct) else f"{name}={v!r}" for name, v in fields.items()]
    return f"{cast(Any, codec).name}({', '.join(parts)})"


def check_numel(spec: Spec) -> int:
    """numel of the spec. Raises if it exceeds the header's 32 bits."""
    if spec.numel > payload.MAX_NUMEL:
        raise InvalidInput("E-CODEC-INPUT",
                           f"bucket of {spec.numel} elements: at most {payload.MAX_NUMEL} fit a payload; cut it into slices")
    return spec.numel


def accumulator(total: torch.Tensor) -> dict[str, Any]:
    """An accumulator for `add`, around existing memory. `flagged` is a list of one, so that `add` can set it."""
    return {"sum": total, "flagged": [False]}


class Named(msgspec.Struct, frozen=True):
    """Spelling, id and default properties of every codec that is not a wrapper."""

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
    """Payload and result have one format. `emit` encodes the sum: it is `start` with the server's state."""

    rounds: ClassVar[tuple[Round, ...]] = (Round.GATHER,)

    def bound(self, spec: Spec) -> int:
        raise NotImplementedError

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        """Returns the parts of a body, fully checked."""
        raise NotImplementedError

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        """Adds the parts to `out`, or overwrites `out` with them. Cannot fail."""
        raise NotImplementedError

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        raise NotImplementedError

    def init(self, spec: Spec) -> State:
        check_numel(spec)
        return {}

    def init_server(self, spec: Spec) -> State:
        return self.init(spec)

    def next(self, r: int, result: Buffer, state: State, out: Out) -> int:
        raise InvalidInput("E-CODEC-INPUT", f"{self} has one round, round {r + 1} was asked for")

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        head = payload.read(result, self.id, out.numel())
        if head.flagged:
            out.fill_(NAN)
            return False
        self.apply(self.check(head, out.numel()), out, assign=True)
        return True

    def undo(self, state: State, x: torch.Tensor, cut: Cut = None) -> None:
        """Nothing to undo: the codec keeps no residual."""

    def undo_server(self, state: State, cut: Cut = None) -> None:
        """Nothing to undo, as in `undo`."""

    def zeros(self, spec: Spec, r: int) -> dict[str, Any]:
        return accumulator(torch.zeros(math.prod(spec.shape)))

    def vet(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> tuple[Any, ...] | None:
        """Checks a payload for `put`: returns the parts to add, or None if it is flagged. Changes nothing."""
        numel = acc["sum"].numel()
        head = payload.read(payload_, self.id, numel)
        return None if head.flagged else self.check(head, numel)

    def put(self, r: int, vetted: tuple[Any, ...] | None, acc: Any, *, first: bool) -> None:
        """Adds what `vet` returned. Cannot fail."""
        if first:
            acc["flagged"][0] = False
        if vetted is None:
            acc["flagged"][0] = True
            if first:
                acc["sum"].zero_()
        else:
            self.apply(vetted, acc["sum"], assign=first)

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        self.put(r, self.vet(r, payload_, acc, first=first), acc, first=first)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        if acc["flagged"][0]:
            return payload.write_flagged(out, self.id, acc["sum"].numel())
        return self.start(acc["sum"], state, out)

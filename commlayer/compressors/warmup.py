"""Warm-up of sparse codecs: the ratio comes down from 25 % over the first steps. Knows ratios; the bytes are the inner codec's.

A reader needs not know the step: how many entries a payload holds is in its header.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec.structs

from commlayer.codec_name import checked
from commlayer.compressors import payload
from commlayer.compressors.codec import Buffer, Codec, Out, Round, State
from commlayer.compressors.feedback import Fed
from commlayer.compressors.selection import Placed
from commlayer.compressors.wrapper import Wrapper, check_plain
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch

FIRST = 0.25
"""The ratio of the first step."""


def stages_of(ratio: float) -> int:
    """Stages before the last one, which has the ratio itself; none where that is no less than the first."""
    return max(0, math.ceil(math.log2(FIRST / ratio)))


def ratio_of(ratio: float, stage: int) -> float:
    """
    >>> [round(ratio_of(0.02, stage), 3) for stage in range(stages_of(0.02) + 1)]
    [0.25, 0.133, 0.071, 0.038, 0.02]
    """
    stages = stages_of(ratio)
    return ratio if stage == stages else FIRST * (ratio / FIRST) ** (stage / stages)


def ratio_at(ratio: float, steps: int, step: int) -> float:
    """In that step, of a warm-up over so many; 0 for none."""
    return ratio_of(ratio, min(stages_of(ratio), step * stages_of(ratio) // steps)) if step < steps else ratio


class Warmup(Wrapper, frozen=True):
    """The ratio falls in stages of equal length, each about half of the one before; after `steps` it is the inner codec's.

    Workers count their payloads and a server its results, flagged ones left out. State: `step`, and the inner state, whose
    memory is made anew with a stage while what it has learned stays.
    """

    name: ClassVar[str] = "warmup"

    steps: int

    @property
    def stages(self) -> int:
        return stages_of(self.inner.ratio)

    def stage(self, step: int) -> int:
        return min(self.stages, step * self.stages // self.steps)

    def at(self, stage: int) -> Any:
        """The codec of that stage."""
        if stage == self.stages:
            return self.inner
        return msgspec.structs.replace(self.inner, ratio=ratio_of(self.inner.ratio, stage))

    def bound(self, spec: Spec) -> int:
        return max(int(self.at(0).bound(spec)), int(self.inner.bound(spec)))

    def init(self, spec: Spec) -> State:
        return {"step": 0, "inner": self.at(0).init(spec), "_stage": 0, "_spec": spec}

    def init_server(self, spec: Spec) -> State:
        return self.init(spec)

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        return self.start_fed(x, None, state, out)

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int:
        """See feedback.Fed."""
        stage = self.stage(state["step"])
        codec = self.at(stage)
        if stage != state["_stage"]:
            fresh = codec.init(state["_spec"])
            state["inner"] |= {name: value for name, value in fresh.items() if name.startswith("_")}
            state["_stage"] = stage
        nbytes = int(codec.start_fed(x, residual, state["inner"], out))
        state["step"] += not payload.read(out[:nbytes], self.id, x.numel()).flagged
        return nbytes

    def places(self, payload_: Buffer, numel: int) -> torch.Tensor:
        """See selection.Placed."""
        places: torch.Tensor = self.inner.places(payload_, numel)
        return places

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        if acc["flagged"][0]:
            return payload.write_flagged(out, self.id, acc["sum"].numel())
        return self.start(acc["sum"], state, out)


def warmup(inner: Codec, steps: int) -> Warmup:
    """For sparse codecs with a ratio, below error feedback or momentum_correction."""
    check_plain("warmup", inner)
    fits = isinstance(inner, Fed) and isinstance(inner, Placed) and hasattr(inner, "ratio")
    if not fits or inner.rounds != (Round.GATHER,):
        raise ValueError(f"warmup: inner is {inner}, allowed is a sparse codec with a ratio, such as topk")
    checked("warmup", steps=steps)
    return Warmup(inner, steps)

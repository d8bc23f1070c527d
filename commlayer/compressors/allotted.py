"""Allotted: a sparse codec whose number of entries is set before each step, for a plan's `ratio_over` and `warmup`.

Plans create it; it has no spelling. On a worker, the code that knows all buckets of every step calls `tell`. A server derives
the number itself: it sends as many entries as its members sent on average. So downloads follow uploads, per bucket and in all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec.structs

from commlayer.compressors import payload
from commlayer.compressors.allotment import Ask, Tail
from commlayer.compressors.codec import OneRound, Round, State, Wrapper, place
from commlayer.compressors.feedback import Fed
from commlayer.compressors.payload import Buffer, Out
from commlayer.compressors.selection import ENOUGH, HUGE, SLOPES, Picks, clamp_threshold
from commlayer.compressors.warmup import FIRST
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch

NUMBERS: Mapping[str, tuple[float, float]] = {
    "asked": (0, payload.MAX_NUMEL),
    "sent": (-1, payload.MAX_NUMEL),
    "there": (0, payload.MAX_NUMEL),
    "least": (0.0, HUGE),
}
"""Limits of the numbers in a state. `slope` has the limits of selection.NUMBERS."""

CAP = 8
"""A bucket gets at most CAP times its own share of a plan's entries, and at least 1 / CAP of it."""

DIGITS = 6
"""Decimals of a slope. Devices add in different orders, but all must ask for the same entries."""

UNKNOWN = -1
"""`sent` if there is no last payload or it was flagged."""


class Allotted(Wrapper, frozen=True):
    """State: `asked`, the entries of the next payload, and the inner state, whose memory is allocated again when `asked`
    changes.

    A worker also keeps facts of its last payload: `sent` (entries), the `least` magnitude, and `slope`, how steeply counts fall
    above it. `there` is the number of entries that can be sent, if the payload held all that are not zero.
    """

    name: ClassVar[str] = "allotted"

    utmost: float
    """The largest ratio that can be requested."""
    heard: float
    """The mean of the members' own ratios. A server with another ratio keeps the proportion to it."""
    steps: int = 0
    """Warm-up steps."""
    shared: bool = False
    """Whether its entries are shared with other buckets."""

    def __str__(self) -> str:
        return str(self.inner)

    def bound(self, spec: Spec) -> int:
        return max(int(self._at(self._count(spec, self.utmost), spec).bound(spec)), int(self.inner.bound(spec)))

    def init(self, spec: Spec) -> State:
        return self.init_server(spec) | {"sent": UNKNOWN, "there": spec.numel, "least": 0.0, "slope": SLOPES[0]}

    def init_server(self, spec: Spec) -> State:
        entries = self._count(spec, self.inner.ratio)
        return {"asked": entries, "inner": self.inner.init(spec), "_made": entries, "_codec": self.inner, "_spec": spec}

    def tell(self, state: State, asked: int) -> None:
        """Sets the entries from the next step on. A tracked threshold moves to where that many entries should pass."""
        before, inner = state["asked"], state["inner"]
        if inner["threshold"] and asked != before:
            inner["threshold"] = clamp_threshold(inner["threshold"] * (before / asked) ** (1 / inner["slope"]))
        state["asked"] = asked

    def ask(self, state: State, ratio: float) -> Ask:
        """The request of this bucket, whose own ratio is now `ratio`."""
        spec, sent = state["_spec"], state["sent"]
        plain = self._count(spec, ratio)
        fewest, most = max(1, plain // CAP), self._count(spec, min(self.utmost, CAP * ratio))
        most = max(fewest, min(most, state["there"]))
        return Ask(state["asked"], fewest, plain, most, None if sent == UNKNOWN else Tail(sent, state["least"], state["slope"]))

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        return self.start_fed(x, None, state, out)

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int:
        """See feedback.Fed."""
        self._follow(state, x)
        nbytes = int(state["_codec"].start_fed(x, residual, state["inner"], out))
        if self.shared and "sent" in state:
            head = payload.read(out[:nbytes], self.id, x.numel())
            self._learn(state, UNKNOWN if head.flagged else head.entries)
        return nbytes

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        return bool(self.inner.decode(result, state["inner"], out))

    def places(self, payload_: Buffer, numel: int) -> torch.Tensor:
        """See selection.Placed."""
        result: torch.Tensor = self.inner.places(payload_, numel)
        return result

    def zeros(self, spec: Spec, r: int) -> Any:
        return {**self.inner.zeros(spec, r), "entries": [0, 0]}

    def add(self, r: int, payload_: Buffer, acc: Any, *, first: bool) -> None:
        self.inner.add(r, payload_, acc, first=first)
        if (counted := acc.get("entries")) is not None:
            head = payload.read(payload_, self.id, acc["sum"].numel())
            entries, members = (0, 0) if first else counted
            counted[:] = entries + head.entries, members + (not head.flagged)

    def emit(self, r: int, acc: Any, state: State, out: Out) -> int:
        self.heed(acc, state)
        if acc["flagged"][0]:
            return payload.write_flagged(out, self.id, acc["sum"].numel())
        return self.start(acc["sum"], state, out)

    def heed(self, acc: Any, state: State) -> None:
        """Before an emit: sets the entries to the members' average. See feedback.heed."""
        entries, members = acc.get("entries", (0, 0))
        if members:
            share = self.inner.ratio / self.heard
            spec, least = state["_spec"], max(1, self._count(state["_spec"], self.inner.ratio) // CAP)
            self.tell(state, min(max(round(share * entries / members), least), self._count(spec, self.utmost)))

    def _follow(self, state: State, x: torch.Tensor) -> None:
        if state["_made"] != state["asked"]:
            state["_codec"], state["_made"] = self._at(state["asked"], state["_spec"]), state["asked"]
            fresh = {name: value for name, value in state["_codec"].init(state["_spec"]).items() if name.startswith("_")}
            if x.device.type != "cpu":
                place(fresh, x.device)
            state["inner"] |= fresh

    def _learn(self, state: State, sent: int) -> None:
        state["sent"] = sent
        state["there"] = sent if 0 < sent < ENOUGH * state["asked"] else state["_spec"].numel
        if sent <= 0:
            return
        magnitudes = state["inner"]["_scratch"]["val"][:sent].abs()
        least = magnitudes.min()
        rise = float((magnitudes / least).double().log().mean())  # Hill's estimate of a tail's exponent is its inverse
        slope = min(max(1 / rise, SLOPES[0]), SLOPES[1]) if rise > 0 else SLOPES[1]
        state["least"], state["slope"] = float(least), round(slope, DIGITS)

    def _at(self, asked: int, spec: Spec) -> Any:
        """The inner codec at the ratio at which it sends `asked` entries of the bucket."""
        return msgspec.structs.replace(self.inner, ratio=min(1.0, max(asked - 0.5, 0.5) / max(spec.numel, 1)))

    def _count(self, spec: Spec, ratio: float) -> int:
        return min(spec.numel, max(1, math.ceil(ratio * spec.numel)))


def allotted(codec: Any, heard: float | None, *, steps: int, shared: bool) -> Any:
    """Wraps the core of a codec in Allotted, inside the same wrappers, if its entries can vary.

    `heard`: the mean ratio of the payloads that a server receives; None if they have no ratio.
    """
    if isinstance(codec, Wrapper):
        return msgspec.structs.replace(codec, inner=allotted(codec.inner, heard, steps=steps, shared=shared))
    sparse = isinstance(codec, Fed) and isinstance(codec, OneRound) and hasattr(codec, "ratio") and Round.GATHER in codec.rounds
    shared = shared and isinstance(codec, Picks)
    if not sparse or not (steps or shared):
        return codec
    utmost = max(codec.ratio * (CAP if shared else 1), FIRST if steps else 0.0)
    return Allotted(codec, min(1.0, utmost), codec.ratio if heard is None else heard, steps, shared)

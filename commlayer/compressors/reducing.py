"""Adding payloads up without a server: which codecs allow it, and what of their accumulators is combined. Knows no groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from commlayer.compressors.codec import Codec, Round
from commlayer.compressors.ef21 import EF21
from commlayer.compressors.one_round import OneRound
from commlayer.compressors.wrapper import Wrapper
from commlayer.errors import CorruptFrame


def adds_up(codec: Codec) -> bool:
    """Whether accumulators of single payloads can be combined elementwise (an all-reduce), and what is emitted is their sum."""
    return all(r is not Round.GATHER for r in codec.rounds)


def stands_alone(codec: Codec) -> bool:
    """Whether a payload by itself says what was sent, so that whoever has all of them may add them to a dense sum.

    Not those of several rounds, nor random-k's accumulators of values, nor differences to what only a server has summed.
    """
    inner: Any = codec
    while isinstance(inner, Wrapper):
        if isinstance(inner, EF21):
            return False
        inner = inner.inner
    return isinstance(inner, OneRound) and type(inner).zeros is OneRound.zeros


class Reduced:
    """An accumulator of one payload, on its way to the sum of all members' by two all-reduces.

    `values` are combined as the codec's round says, `facts` by their maximum; both in place.
    """

    def __init__(self, acc: Any, members: int) -> None:
        self._accs, self._members = list(_flat(acc)), members
        parts = [_tensor(part, members) for part in self._accs if "sum" in part or "max" in part]
        self._sizes = [p.numel() for p in parts]
        self.values = parts[0] if len(parts) == 1 else torch.cat(parts)
        seeds = [part["seed"][0] for part in self._accs if "seed" in part]
        flags = [int(part["flagged"][0]) for part in self._accs]
        self.facts = torch.tensor([*flags, *seeds, *(-s for s in seeds)], dtype=torch.int64)
        self._seeds = len(seeds)

    @property
    def nbytes(self) -> int:
        """What a member puts in."""
        return int(self.values.nbytes + self.facts.nbytes)

    def merge(self) -> None:
        """Both are over: the accumulator is that of all payloads. CorruptFrame if they cannot be added, on all alike."""
        facts: list[int] = self.facts.tolist()
        flags = facts[: len(self._accs)]
        for part, flag in zip(self._accs, flags, strict=True):
            part["flagged"][0] = bool(flag)
            if "members" in part:
                part["members"][0] = self._members
        drawn = facts[len(self._accs) :]
        if not any(flags) and any(high != -low for high, low in zip(drawn[: self._seeds], drawn[self._seeds :], strict=True)):
            raise CorruptFrame("members have drawn with different seeds, so their payloads are of different entries")
        combined = [part for part in self._accs if "sum" in part or "max" in part]
        for part, values in zip(combined, self.values.split(self._sizes), strict=True):
            _take(part, values, self._members)


def _flat(acc: Any) -> Iterator[Any]:
    """A wrapper's accumulator, if it holds several, goes as those and itself."""
    yield acc
    parts: Sequence[Any] = acc.get("parts", ())
    for part in parts:
        yield from _flat(part)


def _tensor(part: Any, members: int) -> torch.Tensor:
    """Of a type that collectives can combine."""
    if "max" in part:
        return torch.from_numpy(part["max"].astype(np.int32))
    values: torch.Tensor = part["sum"]
    lane = _lane(part, members)
    if lane is None:
        return values
    # Collectives add no 16 bits. But lanes of a word add up as one number if none is negative and none overflows.
    per_word = 4 // lane.itemsize
    lanes = torch.empty(-(-values.numel() // per_word) * per_word, dtype=lane)
    lanes[: values.numel()].copy_(values).add_(part["most"])
    lanes[values.numel() :].zero_()
    return lanes.view(torch.int32)


def _lane(part: Any, members: int) -> torch.dtype | None:
    """The narrowest lane that holds any sum of so many members' integers, where their magnitudes have a limit."""
    if "most" not in part:
        return None
    top = 2 * part["most"] * members
    # With the sign bit free a word never overflows either, which for signed integers nobody defines.
    return next((lane for lane in (torch.int8, torch.int16) if top < 1 << 8 * lane.itemsize - 1), None)


def _take(part: Any, values: torch.Tensor, members: int) -> None:
    """Writes into an accumulator what belongs to it."""
    if "max" in part:
        part["max"][:] = values.numpy()
        return
    own: torch.Tensor = part["sum"]
    lane = _lane(part, members)
    if lane is not None:
        own.copy_(values.view(lane)[: own.numel()]).sub_(part["most"] * members)
    elif own.data_ptr() != values.data_ptr():
        own.copy_(values)

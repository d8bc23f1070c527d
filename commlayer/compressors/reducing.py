"""Sums payloads without a server, by all-reduce: which codecs allow it, and which parts of an accumulator are combined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from commlayer.compressors.codec import Codec, OneRound, Round, Wrapper
from commlayer.errors import CorruptPayload


def adds_up(codec: Codec) -> bool:
    """Whether an all-reduce can combine accumulators of single payloads elementwise, so that `emit` sends their sum."""
    return all(r is not Round.GATHER for r in codec.rounds)


def stands_alone(codec: Codec) -> bool:
    """Whether each payload can be decoded alone and added to a dense sum.

    This excludes codecs of several rounds, and random-k, whose accumulators hold values alone.
    """
    inner: Any = codec
    while isinstance(inner, Wrapper):
        inner = inner.inner
    return isinstance(inner, OneRound) and type(inner).zeros is OneRound.zeros


class Reduced:
    """An accumulator of one payload that two all-reduces turn into the sum of all members' payloads.

    The caller sums `values` and combines `facts` by maximum, both in place.
    """

    def __init__(self, acc: Any) -> None:
        self._accs = list(_flat(acc))
        parts = [part["sum"] for part in self._accs if "sum" in part]
        self._sizes = [p.numel() for p in parts]
        self.values = parts[0] if len(parts) == 1 else torch.cat(parts)
        seeds = [part["seed"][0] for part in self._accs if "seed" in part]
        flags = [int(part["flagged"][0]) for part in self._accs]
        self.facts = torch.tensor([*flags, *seeds, *(-s for s in seeds)], dtype=torch.int64)
        self._seeds = len(seeds)

    @property
    def nbytes(self) -> int:
        """Bytes that each member contributes."""
        return int(self.values.nbytes + self.facts.nbytes)

    def merge(self) -> None:
        """Updates the accumulator after both all-reduces. All members raise CorruptPayload if payloads cannot be added."""
        facts: list[int] = self.facts.tolist()
        flags = facts[: len(self._accs)]
        for part, flag in zip(self._accs, flags, strict=True):
            part["flagged"][0] = bool(flag)
        drawn = facts[len(self._accs) :]
        if not any(flags) and any(high != -low for high, low in zip(drawn[: self._seeds], drawn[self._seeds :], strict=True)):
            raise CorruptPayload("members have drawn with different seeds, so their payloads are of different entries")
        combined = [part for part in self._accs if "sum" in part]
        for part, values in zip(combined, self.values.split(self._sizes), strict=True):
            if part["sum"].data_ptr() != values.data_ptr():
                part["sum"].copy_(values)


def _flat(acc: Any) -> Iterator[Any]:
    """The accumulator, followed by those nested in it."""
    yield acc
    parts: Sequence[Any] = acc.get("parts", ())
    for part in parts:
        yield from _flat(part)

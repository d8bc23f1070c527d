"""Sums payloads without a server, by all-reduce: which codecs allow it, and which parts of an accumulator are combined."""

from __future__ import annotations

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
        self._acc = acc
        self.values = acc["sum"]
        seeds = acc.get("seed", [])
        self.facts = torch.tensor([int(acc["flagged"][0]), *seeds, *(-seed for seed in seeds)], dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """Bytes that each member contributes."""
        return int(self.values.nbytes + self.facts.nbytes)

    def merge(self) -> None:
        """Updates the accumulator after both all-reduces. All members raise CorruptPayload if payloads cannot be added."""
        flagged, *seeds = self.facts.tolist()
        self._acc["flagged"][0] = bool(flagged)
        if not flagged and seeds and seeds[0] != -seeds[1]:
            raise CorruptPayload("members drew with different seeds, so their payloads hold different entries")

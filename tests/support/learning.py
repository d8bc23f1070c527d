"""A small table of convergence factors, in round numbers, for the planner's tests."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from commlayer.planner.convergence import LearningRow
from commlayer.planner.data.tables import profile_from_tables
from commlayer.planner.model import Cluster, Profile

CODECS = {"int8()": 0.002, "int4()": 0.01, "onebit()": 0.3, "topk(ratio=0.1)": 0.12, "topk(ratio=0.01)": 0.6,
          "topk(ratio=0.001)": 2.0}
"""Excess of the convergence factor when each step's gradients are exchanged; the cautious value is half as much again."""
LOCAL = {1: 0.0, 2: 0.01, 4: 0.04, 8: 0.09, 16: 0.2}
"""The same of steps to an exchange."""


def _row(
    optimizer: str, codec: str, extra: float, *, codes: str, every: int = 1, overlap: str = "", late: bool = False,
) -> LearningRow:
    return LearningRow(optimizer, codes, codec, every, overlap, late, 0, 1 + extra, 1 + 1.5 * extra, extra / 8, extra / 4, 3, 9)


def _rows() -> Iterator[LearningRow]:
    for optimizer, bears in (("sgd", 0.7), ("adam", 1.0)):
        for codec, extra in CODECS.items():
            yield _row(optimizer, codec, bears * extra, codes="gradients")
        for codec, extra in {"identity()": 0.02, **CODECS}.items():
            yield _row(optimizer, codec, bears * (extra + 0.05), codes="gradients", late=True)
            for every, rarer in LOCAL.items():
                for overlap, later in (("", 0.0), ("round", 0.03 * every**0.5)):
                    extra_here = bears * (0.7 * extra + rarer + later)
                    yield _row(optimizer, codec, extra_here, codes="updates", every=every, overlap=overlap)


ROWS = tuple(_rows())


def learnt(cluster: Cluster) -> Profile:
    """The tables' profile with these rows."""
    return structs.replace(profile_from_tables(cluster), learning=ROWS)

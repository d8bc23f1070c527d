"""The trainings of `bench learning`, the most important first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.learning.tasks import TASKS
from bench.virtual_training import Variant

OPTIMIZERS = ("adam", "sgd")
INT4, TOP = "int4()", "topk(ratio={})".format
DENSE: dict[str, Any] = {}
FIRST: tuple[dict[str, Any], ...] = (
    DENSE,
    {"codec": INT4},
    {"codec": TOP(0.01)},
    {"codec": INT4, "every": 4},
    {"codec": TOP(0.1)},
    {"codec": INT4, "every": 8},
    {"codec": INT4, "codes": "updates"},
    {"codec": TOP(0.01), "codes": "updates"},
    {"codec": INT4, "every": 4, "overlap": "round"},
    {"codec": "onebit()"},
    {"codec": TOP(0.001)},
    {"codec": INT4, "every": 2},
    {"codec": INT4, "every": 16},
    {"codec": TOP(0.01), "every": 4},
    {"codec": "int8()"},
    {"codec": INT4, "late": True},
)
ROUND: dict[str, Any] = {"overlap": "round"}
LONG: tuple[dict[str, Any], ...] = tuple({"codec": INT4, "every": n} | how for n in (32, 64) for how in (ROUND, DENSE))
"""Outer steps so long that a run of 240 steps has few of them."""
COARSE: tuple[dict[str, Any], ...] = tuple({"codec": TOP(ratio), "every": n} | how
                                           for n in (16, 64) for ratio in (0.1, 0.01) for how in (ROUND, DENSE))
"""Strong compression and long outer steps, for the slowest links."""
SECOND: tuple[dict[str, Any], ...] = (
    {"every": 4},
    {"codes": "updates"},
    {"codec": TOP(0.001), "codes": "updates"},
    {"codec": TOP(0.1), "codes": "updates"},
    {"codec": INT4, "every": 8, "overlap": "round"},
    {"codec": TOP(0.1), "every": 4},
    {"codec": "powersgd(rank=4)"},
    {"codec": "randomk(ratio=0.01)"},
    {"codec": TOP(0.03)},
    {"codec": TOP(0.003)},
    {"every": 16},
    {"codec": INT4, "every": 16, "overlap": "round"},
    {"codec": TOP(0.01), "late": True},
    {"late": True},
    {"codec": "onebit()", "codes": "updates"},
    {"codec": "onebit()", "every": 4},
    {"codec": TOP(0.01), "every": 4, "overlap": "round"},
    {"every": 4, "overlap": "round"},
    {"codec": INT4, "codes": "updates", "overlap": "round"},
    {"codes": "updates", "overlap": "round"},
    {"codec": "qsgd()"},
    {"codec": "bf16()"},
    {"codec": "randomk(ratio=0.1)"},
    {"codec": "powersgd(rank=1)"},
    {"codec": TOP(0.3)},
)
CROWDS: tuple[dict[str, Any], ...] = (
    DENSE,
    {"codec": INT4},
    {"codec": TOP(0.01)},
    {"codec": INT4, "every": 4},
    {"codec": TOP(0.01), "codes": "updates"},
)
"""Also measured with 2 and 8 workers."""
ALONE: dict[str, Any] = {"workers": 1}
"""One worker without the others: the baseline that distributed training must beat."""
SEEDS = 3


def campaign() -> Iterator[Variant]:
    yield from _everywhere((*FIRST, ALONE), 0)
    yield from _everywhere(LONG, 0)
    yield from _everywhere(COARSE, 0)
    yield from _everywhere(SECOND, 0)
    yield from _everywhere(FIRST, 1)
    yield from _everywhere(tuple(variant | {"workers": n} for n in (8, 2) for variant in CROWDS), 0)
    for seed in range(1, SEEDS):
        yield from _everywhere((*FIRST, ALONE, *LONG, *COARSE, *SECOND), seed)


def quick() -> Iterator[Variant]:
    """Two tasks and four configurations."""
    for variant in FIRST[:4]:
        for task in ("mlp", "words"):
            yield Variant(task, "adam", **variant)


def _everywhere(variants: tuple[dict[str, Any], ...], seed: int) -> Iterator[Variant]:
    for variant in variants:
        for optimizer in OPTIMIZERS:
            for task in TASKS:
                yield Variant(task, optimizer, seed=seed, **variant)

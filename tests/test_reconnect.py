"""Connections that break in the middle of a step: the step goes on, with the same bits, and nothing is added twice."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from broken_kit import Breakable, Counted, random_cuts
from runtime_kit import Rig, on_ranks, step

WORLD, STEPS = 3, 4
CODECS = ["identity()", "int8()", "topk(ratio=0.1)", "powersgd(rank=2)", "shared_int()", "randomk(ratio=0.1)",
          "momentum(topk(ratio=0.1))"]


def gradients(rank: int, number: int, shapes: list[torch.Size]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class Outcome:
    """What the ranks got, and what the servers added."""

    def __init__(self, hub: Any, codec: str, **rig: Any) -> None:
        self.added: Counter[tuple[int, int]] = Counter()
        with Rig(WORLD, codec, hub=hub, **rig) as job:
            cells = [cell for server in job.servers for cell in server._core.cells.values()]
            for cell in cells:
                cell.ops = Counted(cell.ops, self.added, cell.bucket)
            shapes = [info.shape for info in job.job.tensors]

            def train(rank: int) -> list[torch.Tensor]:
                told = [step(job.workers[rank], gradients(rank, n, shapes)) for n in range(STEPS)]
                return [t for targets in told for t in targets if t is not None]

            self.results = on_ranks(WORLD, train, 60.0)
            self.repeats = sum(getattr(t, "repeats", 0) for t in job.transports)
        for result in self.results:
            if isinstance(result, BaseException):
                raise result

    def same(self, other: Outcome) -> bool:
        pairs = [pair for a, b in zip(self.results, other.results, strict=True) for pair in zip(a, b, strict=True)]
        return all(torch.equal(a, b) for a, b in pairs) and self.added == other.added


@pytest.mark.parametrize("codec", CODECS)
def test_cuts_at_any_byte_change_no_bit_and_add_nothing_twice(codec: str) -> None:
    uncut = Breakable()
    expected = Outcome(uncut, codec)
    assert expected.added
    assert set(expected.added.values()) == {WORLD * STEPS}
    passed = [max(c.passed[way] for c in uncut.cutters.values()) for way in (0, 1)]
    uncut.close()
    fired = 0
    for seed in range(4):
        chance = random.Random(f"{codec} {seed}")
        hub = Breakable({rank: random_cuts(chance, *passed) for rank in range(WORLD)})
        assert Outcome(hub, codec).same(expected), seed
        fired += hub.shots
        hub.close()
    assert fired >= 4

"""A server holds a step's payloads where they are smaller than their sum, and takes steps back to the bit all the same."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from support.workers import Rig, job, on_ranks, step

from commlayer.cluster.server_codecs import CodecOps
from commlayer.compressors import codec_of
from commlayer.planner import default_plan
from commlayer.records import Job, Plan

NUMEL = 1 << 18
PAGE = 4096


def planned(codec: str) -> tuple[Job, Plan]:
    of = job([(NUMEL,), (NUMEL,)])
    return of, default_plan(of, codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=8 * NUMEL,
                            cut_nbytes=8 * NUMEL)


def train(codec: str) -> tuple[list[torch.Tensor], list[bytes], list[Any]]:
    """Averages of 6 steps, two of which are taken back, then each bucket's state on the server, and its sum."""
    of, plan = planned(codec)
    with Rig(2, codec, of=of, plan=plan) as rig:
        def run(rank: int) -> list[torch.Tensor]:
            made, worker = [], rig.workers[rank]
            for number in range(6):
                generator = torch.Generator().manual_seed(10 * number + rank)
                made += [a for a in step(worker, [torch.randn(NUMEL, generator=generator) for _ in range(2)]) if a is not None]
                if number in (1, 3):
                    worker.mark_discarded(number // 2)
            return made

        averages = on_ranks(2, run)[0]
        cells = rig.servers[0]._core.cells.values()
        sums = [cell.accs[0]["sum"].copy() for cell in cells]
        for cell in cells:
            cell.undo(1)  # of the last step, whose sum may be gone
        return averages, [cell.ops.snapshot() for cell in cells], sums


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
@pytest.mark.parametrize("codec", ["int4()", "topk(ratio=0.01)", "onebit(block=64)"])
def test_steps_are_taken_back_to_the_bit_from_payloads(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    averages, states, sums = train(codec)
    assert not any(bool(each[PAGE:-PAGE].any()) for each in sums)
    monkeypatch.setattr(CodecOps, "worth_giving_back", lambda *_: False)
    expected, expected_states, held = train(codec)
    assert all(bool(each.any()) for each in held)
    assert states == expected_states
    assert all(map(torch.equal, averages, expected))


def test_a_sum_is_held_where_its_payloads_are_as_large() -> None:
    _, plan = planned("int4()")
    ops = CodecOps(codec_of(plan.buckets[0]), plan.buckets[0], "job")
    assert ops.worth_giving_back(2)
    assert not ops.worth_giving_back(8)

"""overlap="forward" gives the bits of waiting: optimizers, schedules, codecs, places of zero_grad, accumulation. Real ranks."""

from __future__ import annotations

import pytest
import torch
from support import rank_pool
from support.forward import Held, Training
from support.rank_pool import pool

WORLD, STEPS = 2, 200
_ranks = rank_pool.ranks_first(WORLD)


def trained(rank: int, address: str, overlap: str | None, optimizer: str, codec: str) -> list[dict[str, torch.Tensor]]:
    training = Training(rank, address, overlap, optimizer=optimizer, codec=codec)
    training.train(0, 10)
    found = [training.state()]
    held = Held(training.worker, until_awaited=True) if overlap == "forward" else None
    for first, last in ((10, 60), (60, STEPS)):
        training.train(first, last)
        found.append(training.state())
    assert held is None or held.count >= STEPS - 10
    training.session.close()
    return found


@pytest.mark.parametrize(("optimizer", "codec"), [
    ("sgd", "topk(ratio=0.1)"), ("adam", "int4()"), ("adamw", "identity()"), ("tensor rate", "int8()"),
])
def test_training_is_the_same_bit_for_bit(optimizer: str, codec: str) -> None:
    results: dict[str | None, list[list[dict[str, torch.Tensor]]]] = {}
    for overlap in (None, "forward"):
        with rank_pool.Servers(WORLD, 1) as servers:
            results[overlap] = pool(WORLD).call(trained, servers.address, overlap, optimizer, codec)
    for waited, overlapped in zip(results[None], results["forward"], strict=True):
        for wanted, got in zip(waited, overlapped, strict=True):
            assert wanted.keys() == got.keys()
            assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []

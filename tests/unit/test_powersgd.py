"""powersgd, a codec of two rounds: what it promises beyond the laws, and payloads that are off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support import codecs as kit

from commlayer.compressors import Codec, powersgd, seed
from commlayer.records import Spec

PLAIN: list[Codec] = [
    powersgd(rank=2),
    powersgd(rank=200),
    powersgd(rank=2, shapes=((30, 40), (11,))),
]
each = pytest.mark.parametrize("codec", PLAIN, ids=str)
GOLDEN = Path(__file__).parents[1] / "golden" / "payloads"


@pytest.mark.parametrize("backend", kit.AVAILABLE)
def test_golden_payload(backend: str) -> None:
    """Payload and result of each round, one after another, for two workers with keys of their own."""
    codec, spec, seen = powersgd(rank=1), Spec((4, 6)), b""
    with kit.use(backend):
        states, server = [codec.init(spec) for _ in range(2)], codec.init_server(spec)
        rooms, result = [kit.room(codec, spec) for _ in range(2)], b""
        for rank, state in enumerate(states):
            seed(state, "golden", 3, rank)
        for r in range(len(codec.rounds)):
            acc = codec.zeros(spec, r)
            for rank, (state, room) in enumerate(zip(states, rooms, strict=True)):
                x = torch.tensor([(i * 37 + 11 * rank) % 29 - 14.0 for i in range(spec.numel)])
                nbytes = codec.start(x, state, room) if r == 0 else codec.next(r - 1, result, state, room)
                codec.add(r, room[:nbytes], acc, first=rank == 0)
                seen += bytes(room[:nbytes])
            out = kit.room(codec, spec)
            result = bytes(out[: codec.emit(r, acc, server, out)])
            seen += result
    file = GOLDEN / "powersgd.bin"
    if os.environ.get("COMMLAYER_WRITE_GOLDEN"):
        file.write_bytes(seen)
    wanted, first = file.read_bytes(), 3 * (16 + 4 * 4)
    assert seen[:first] == wanted[:first]
    # Round 1 has been through square roots and torch's products.
    numbers = [torch.frombuffer(bytearray(one[first:]), dtype=torch.float32)[4:10] for one in (seen, wanted)]
    torch.testing.assert_close(*numbers)


# ---- powersgd


def low_rank(m: int, n: int, rank: int, number: int = 0) -> torch.Tensor:
    return (kit.noise(m * rank, number).view(m, rank) @ kit.noise(rank * n, number + 1).view(rank, n)).view(-1)


def test_powersgd_finds_a_matrix_of_its_rank_and_keeps_it() -> None:
    spec, x = Spec((60, 50)), low_rank(60, 50, 3)
    cluster = kit.Cluster(powersgd(rank=3), spec, 2)
    torch.testing.assert_close(cluster.step([x, x])[0], 2 * x, rtol=1e-4, atol=1e-3)
    small = kit.Cluster(powersgd(rank=1), spec, 1)
    errors = [float((small.step([x])[0] - x).norm()) for _ in range(8)]
    singular = torch.linalg.svdvals(x.view(60, 50))
    assert errors[-1] < 1.05 * float(singular[1:].norm()), "the warm start has not found the best rank-one part"
    assert errors[-1] < errors[0]


def test_powersgd_survives_steps_without_gradient_and_lost_directions() -> None:
    spec, zero = Spec((60, 50)), torch.zeros(3000)
    cluster = kit.Cluster(powersgd(rank=3), spec, 2)
    assert not cluster.step([zero, zero])[0].any()
    one = low_rank(60, 50, 1)
    torch.testing.assert_close(cluster.step([one, zero])[0], one, rtol=1e-4, atol=1e-4)
    x = low_rank(60, 50, 3, 5)
    torch.testing.assert_close(cluster.step([x, zero])[0], x, rtol=1e-4, atol=1e-3)

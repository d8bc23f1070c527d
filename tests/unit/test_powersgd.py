"""powersgd, a codec of two rounds: what it promises beyond the laws, and payloads that are off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import codecs as kit

from commlayer.compressors import Codec, error_feedback, powersgd, seed
from commlayer.compressors.powersgd import orthonormal, signs
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

PLAIN: list[Codec] = [
    powersgd(rank=2),
    powersgd(rank=200),
    powersgd(rank=2, shapes=((30, 40), (11,))),
]
SPEC = Spec((7, 173))
each = pytest.mark.parametrize("codec", PLAIN, ids=str)
GOLDEN = Path(__file__).parents[1] / "golden" / "payloads"


def noises(step: int, workers: int = 3, n: int = SPEC.numel) -> list[torch.Tensor]:
    return [kit.noise(n, 100 * step + i) for i in range(workers)]


@each
def test_the_first_contribution_overwrites_and_broken_bytes_change_nothing(codec: Codec) -> None:
    cluster = kit.Cluster(codec, SPEC, 2)
    wanted = cluster.step(noises(3, 2))[0]
    other = kit.Cluster(codec, SPEC, 2)
    other.step(noises(9, 2))
    other.states = [codec.init(SPEC) for _ in other.states]
    assert torch.equal(other.step(noises(3, 2))[0], wanted), "accumulators of another step were not overwritten"
    for r in range(len(codec.rounds)):
        good = payload_of(codec, r)
        acc = codec.zeros(SPEC, r)
        before = image(acc)
        for bad in (good[:-1], good + b"\0", good[:15], b"", bytes([99]) + good[1:], good[:3] + b"\x63" + good[4:]):
            with pytest.raises(CorruptFrame):
                codec.add(r, bad, acc, first=False)
        assert image(acc) == before
        codec.add(r, good, acc, first=False)
        moved = memoryview(b"xyz" + good)[3:]
        codec.add(r, moved, acc, first=False)


def image(acc: Any) -> Any:
    """All that an accumulator holds, comparable."""
    if isinstance(acc, dict):
        return {name: image(value) for name, value in acc.items()}
    if isinstance(acc, list):
        return [image(value) for value in acc]
    return bytes(memoryview(acc)) if hasattr(acc, "shape") else acc


def payload_of(codec: Codec, r: int) -> bytes:
    state, room, server, result = codec.init(SPEC), kit.room(codec, SPEC), codec.init_server(SPEC), kit.room(codec, SPEC)
    nbytes = codec.start(kit.noise(SPEC.numel), state, room)
    for earlier in range(r):
        acc = codec.zeros(SPEC, earlier)
        codec.add(earlier, room[:nbytes], acc, first=True)
        done = codec.emit(earlier, acc, server, result)
        nbytes = codec.next(earlier, bytes(result[:done]), state, room)
    return bytes(room[:nbytes])


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


def test_undo_between_the_rounds() -> None:
    """Also after a step that was applied: what that sent must not come back."""
    codec = error_feedback(powersgd(rank=2))
    cluster = kit.Cluster(codec, SPEC, 1)
    cluster.step([kit.noise(SPEC.numel, 1)])
    state = cluster.states[0]
    old, x = kit.residual(state), kit.noise(SPEC.numel)
    codec.start(x, state, kit.room(codec, SPEC))
    codec.undo(state, x)
    torch.testing.assert_close(kit.residual(state), old, rtol=1e-6, atol=1e-6)


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


def test_powersgd_sends_dense_what_has_no_factors_to_gain() -> None:
    codec = powersgd(rank=4)
    for spec, dense in ((Spec((1000,)), True), (Spec((8, 8)), True), (Spec((9, 9)), False), (Spec((64, 3, 3, 3)), False)):
        assert (codec.factors(spec)[0].rank == 0) is dense
        xs = noises(0, 2, spec.numel)
        sums = kit.Cluster(codec, spec, 2).step(xs)
        assert torch.equal(sums[0], xs[0] + xs[1]) is dense
    assert codec.bound(Spec((1024, 1024))) == 16 + 4 * 4 * 1024


def test_rows_become_orthonormal_or_zero() -> None:
    p = kit.noise(5 * 37).view(5, 37).numpy()
    p[3] = 2 * p[0] - p[1]
    q = orthonormal(p).astype(np.float64)
    kept = q[[0, 1, 2, 4]]
    np.testing.assert_allclose(kept @ kept.T, np.eye(4), rtol=0, atol=1e-6)
    assert not q[3].any()
    assert not orthonormal(np.zeros((2, 9), np.float32)).any()
    assert orthonormal(np.array([[3.0]], np.float32)).item() == 1.0
    assert set(signs(1000, 1, 2, 3).tolist()) == {-1.0, 1.0}
    assert abs(float(signs(100_000, 1, 2, 3).mean())) < 0.02
    assert not np.array_equal(signs(64, 1, 2, 3), signs(64, 1, 2, 4))

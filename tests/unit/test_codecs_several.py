"""Codecs of several rounds through worker and server sides: laws, what each promises, and payloads that are off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import codecs as kit

from commlayer.compressors import Codec, error_feedback, powersgd, seed, wrap
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
def test_sums_are_near_finite_and_the_same_for_all(codec: Codec) -> None:
    runs = []
    for _ in range(2):
        cluster, seen = kit.Cluster(codec, SPEC, 3), []
        for step in range(4):
            xs = noises(step)
            copies = [x.clone() for x in xs]
            sums = cluster.step(xs)
            seen += [bytes(p) for p in cluster.payloads]
            assert cluster.finite == [True] * 3
            assert torch.equal(sums[0], sums[1])
            assert torch.equal(sums[0], sums[2])
            assert all(torch.equal(x, c) for x, c in zip(xs, copies, strict=True))
            whole = torch.stack(xs).sum(0)
            assert float((sums[0] * whole).sum()) > 0.05 * float((whole * whole).sum())
        runs.append(seen)
    assert runs[0] == runs[1]


@each
@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (5, 1), (31,), (64, 65), (3, 4, 5, 6)], ids=str)
def test_any_shape(codec: Codec, shape: tuple[int, ...]) -> None:
    if "shapes=((" in str(codec):
        with pytest.raises(ValueError, match="powersgd: shapes of 1211 elements.*E-CODEC-ARGUMENT"):
            kit.Cluster(codec, Spec(shape), 2)
        return
    cluster = kit.Cluster(codec, Spec(shape), 2)
    for step in range(3):
        sums = cluster.step(noises(step, 2, Spec(shape).numel))
        assert bool(torch.isfinite(sums[0]).all())


@each
@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=30))
def test_extreme_input_is_coded_or_flagged(codec: Codec, values: list[float]) -> None:
    x = torch.tensor(values).repeat(SPEC.numel)[: SPEC.numel].contiguous()
    cluster = kit.Cluster(wrap(codec), SPEC, 2)
    for _ in range(2):
        sums = cluster.step([x, kit.noise(SPEC.numel)])
        assert cluster.finite[0] is bool(torch.isfinite(sums[0]).all())
        assert cluster.finite[0] or bool(torch.isnan(sums[0]).all())
        assert bool(torch.isfinite(x).all()) or not cluster.finite[0]
        assert all(bool(torch.isfinite(s["residual"]).all()) for s in cluster.states if "residual" in s)


@each
@pytest.mark.parametrize("sender", [0, 2])
def test_non_finite_input_is_flagged_through_all_rounds(codec: Codec, sender: int) -> None:
    cluster = kit.Cluster(codec, SPEC, 3)
    xs = noises(0)
    cluster.step(xs)
    xs[sender][100] = float("inf")
    sums = cluster.step(xs)
    assert cluster.finite == [False] * 3
    assert all(p.nbytes == 16 for p in cluster.payloads)
    assert bool(torch.isnan(sums[1]).all())
    assert bool(torch.isfinite(cluster.step(noises(1))[0]).all())


@each
def test_error_feedback_conserves_over_skips(codec: Codec) -> None:
    cluster = kit.Cluster(error_feedback(codec), SPEC, 3)
    put, got = torch.zeros(SPEC.numel, dtype=torch.float64), torch.zeros(SPEC.numel, dtype=torch.float64)
    for step in range(8):
        xs = noises(step)
        if step == 4:
            xs[0][9] = float("nan")
        sums = cluster.step(xs)
        if step in (1, 4):
            cluster.undo()
            cluster.undo()
        else:
            put += torch.stack(xs).double().sum(0)
            got += sums[0].double()
    torch.testing.assert_close(got + cluster.kept(), put, rtol=1e-5, atol=2e-5)


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
    return bytes(memoryview(acc.numpy() if isinstance(acc, torch.Tensor) else acc)) if hasattr(acc, "shape") else acc


def payload_of(codec: Codec, r: int) -> bytes:
    state, room, server, result = codec.init(SPEC), kit.room(codec, SPEC), codec.init_server(SPEC), kit.room(codec, SPEC)
    nbytes = codec.start(kit.noise(SPEC.numel), state, room)
    for earlier in range(r):
        acc = codec.zeros(SPEC, earlier)
        codec.add(earlier, room[:nbytes], acc, first=True)
        done = codec.emit(earlier, acc, server, result)
        nbytes = codec.next(earlier, bytes(result[:done]), state, room)
    return bytes(room[:nbytes])


@each
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_mutated_payloads_raise_or_add(codec: Codec, data: st.DataObject) -> None:
    r = data.draw(st.integers(0, len(codec.rounds) - 1))
    good = bytearray(payload_of(codec, r))
    for _ in range(data.draw(st.integers(1, 3))):
        good[data.draw(st.integers(0, min(60, len(good) - 1)))] = data.draw(st.integers(0, 255))
    acc = codec.zeros(SPEC, r)
    before = image(acc)
    try:
        codec.add(r, bytes(good), acc, first=True)
    except CorruptFrame:
        assert image(acc) == before
    state = codec.init(SPEC)
    codec.start(kit.noise(SPEC.numel), state, kit.room(codec, SPEC))
    out = torch.full((SPEC.numel,), 7.0)
    try:
        codec.decode(bytes(good), state, out)
    except CorruptFrame:
        assert bool((out == 7.0).all())


@each
def test_backends_agree(codec: Codec) -> None:
    """To the bit but for the products of matrices, which are torch's on both."""
    runs = []
    for backend in kit.AVAILABLE:
        with kit.use(backend):
            cluster = kit.Cluster(codec, SPEC, 2)
            runs.append([cluster.step(noises(step, 2))[0] for step in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[-1], strict=True))


CASES: dict[str, tuple[Any, Spec]] = {
    "powersgd": (powersgd(rank=1), Spec((4, 6))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", kit.AVAILABLE)
def test_golden_payloads(name: str, backend: str) -> None:
    """Payload and result of each round, one after another, for two workers with keys of their own."""
    codec, spec = CASES[name]
    seen = b""
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
    file = GOLDEN / f"{name}.bin"
    if os.environ.get("COMMLAYER_WRITE_GOLDEN"):
        file.write_bytes(seen)
    if name == "powersgd":  # round 1 has been through square roots and torch's products
        first = 3 * (16 + 4 * 4)
        torch.testing.assert_close(torch.frombuffer(bytearray(seen[first:]), dtype=torch.float32)[4:10],
                                   torch.frombuffer(bytearray(file.read_bytes()[first:]), dtype=torch.float32)[4:10])
        seen, kept = seen[:first], file.read_bytes()[:first]
        assert seen == kept
    else:
        assert seen == file.read_bytes()


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
    p = kit.noise(5 * 37).view(5, 37)
    p[3] = 2 * p[0] - p[1]
    q = orthonormal(p).double()
    kept = q[[0, 1, 2, 4]]
    torch.testing.assert_close(kept @ kept.T, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-6)
    assert not q[3].any()
    assert not orthonormal(torch.zeros(2, 9)).any()
    assert orthonormal(torch.tensor([[3.0]])).item() == 1.0
    assert set(signs(1000, 1, 2, 3).tolist()) == {-1.0, 1.0}
    assert abs(float(signs(100_000, 1, 2, 3).mean())) < 0.02
    assert not torch.equal(signs(64, 1, 2, 3), signs(64, 1, 2, 4))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: powersgd(rank=0), "powersgd: rank is 0.*1 to 256.*E-CODEC-ARGUMENT"),
    ],
)
def test_arguments_are_checked(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()

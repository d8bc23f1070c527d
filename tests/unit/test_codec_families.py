"""Properties of codec families beyond the laws: selection, rounding, recovery of structure."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support import codecs as kit

from commlayer.compressors import (
    Codec,
    block_threshold,
    error_feedback,
    int4,
    int8,
    onebit,
    payload,
    powersgd,
    qsgd,
    randomk,
    seed,
    topk,
)
from commlayer.compressors.state import SERVER
from commlayer.compressors.topk import BlockThreshold
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

N = 60_000


GRID = [(4097, 0.00122), (4097, 0.01), (40_000, 0.001), (65_536, 0.001), (65_536, 0.1), (500_000, 0.002), (1_000_000, 0.001)]
TIED = {"equal": torch.ones_like, "sign": torch.sign, "integers": lambda x: (2 * x).round()}


def front_loaded(n: int, seed: int) -> torch.Tensor:
    return kit.noise(n, seed) * torch.linspace(3, 0.01, n) ** 3


KINDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": kit.noise,
    "heavy": lambda n, seed: kit.noise(n, seed) * torch.exp(1.5 * kit.noise(n, seed + 1000)),
    "sorted": lambda n, seed: kit.noise(n, seed).sort().values,
    "front-loaded": front_loaded,
    "back-loaded": lambda n, seed: front_loaded(n, seed).flip(0),
    "layers": lambda n, seed: kit.noise(n, seed) * torch.tensor([1.0, 0.01, 5.0, 0.1]).repeat_interleave(n // 4),
    "rows": lambda n, seed: kit.noise(n, seed) * (kit.noise(n // 64 + 1, seed + 1) > 1).repeat_interleave(64)[:n],
}


def count(message: memoryview) -> int:
    return int.from_bytes(message[8:12], "little")


def run(codec: Codec, xs: list[torch.Tensor]) -> list[int]:
    state = codec.init(Spec((xs[0].numel(),)))
    return [count(kit.encode(codec, x, state)) for x in xs]


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"rows"}))
@pytest.mark.parametrize("ratio", [0.01, 0.1])
def test_recall_and_energy_against_exact_selection(kind: str, ratio: float) -> None:
    codec = topk(ratio=ratio, values="fp32")
    state, recalls = codec.init(Spec((N,))), []
    for step in range(6):
        x = KINDS[kind](N, step)
        got = kit.decoded(codec, kit.encode(codec, x, state), N)
        best = torch.topk(x.abs(), codec.wanted(N)).indices
        recall = float((got[best] != 0).float().mean())
        energy = float((got * got).sum() / (x[best] ** 2).sum())
        assert torch.equal(got[got != 0], x[got != 0])
        recalls.append(recall)
        assert energy >= 0.9, (step, energy)
    assert sum(recalls) / len(recalls) >= 0.93
    assert min(recalls) >= 0.87, "the count may be 10 % low in one step"


# Ties cost the same at any size, so large tensors are tried with normal values alone.
COUNTED = [(n, ratio, kind) for n, ratio in GRID for kind in ["normal", *TIED] if n <= 100_000 or kind == "normal"]


@pytest.mark.parametrize(("n", "ratio", "kind"), COUNTED)
@pytest.mark.parametrize("fed", [False, True])
def test_selected_count_is_within_a_tenth_of_k(n: int, ratio: float, kind: str, fed: bool) -> None:
    """At all sizes and ratios, with ties, and from the first step on."""
    plain = topk(ratio=ratio)
    codec, k = error_feedback(plain) if fed else plain, plain.wanted(n)
    xs = [TIED.get(kind, torch.clone)(kit.noise(n, seed)) for seed in range(5)]
    counts = run(codec, xs * 8)
    assert max(counts) <= plain.capacity(n) <= k + max(1, k // 10)
    assert min(counts) >= min(0.9 * k, k - 1), counts


@pytest.mark.parametrize("kind", ["normal", "equal"])
def test_trimming_and_reselection_conserve_the_gradient(kind: str) -> None:
    """The threshold is far too low, then far too high: the step corrects it, and the residual holds the rest bit for bit."""
    plain = topk(ratio=0.01, values="fp32")
    codec = error_feedback(plain)
    k, state = plain.wanted(N), codec.init(Spec((N,)))
    for step, factor in enumerate((1.0, 0.5, 2.0, 0.9, 1.1)):
        x = kit.noise(N, step) if kind == "normal" else torch.ones(N)
        state["inner"]["threshold"] *= factor
        v = kit.residual(state) + x
        message = kit.encode(codec, x, state)
        sent = kit.decoded(codec, message, N)
        assert 0.9 * k <= count(message) <= 1.1 * k
        assert torch.equal(sent + kit.residual(state), v)
        assert not kit.residual(state)[sent != 0].any()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("n", [1, 5, 4096, 4097, 50_000])
def test_zeros_are_never_sent(n: int, exact: bool) -> None:
    codec = topk(ratio=0.3, exact=exact)
    zeros = torch.zeros(n)
    spike = torch.zeros(n)
    spike[n // 3] = -5.0
    pair = spike.clone()
    pair[-1] = 1.2e-38
    assert run(codec, [zeros, spike, zeros, pair, kit.noise(n), zeros, spike]) == [
        0, 1, 0, min(2, codec.wanted(n)) if n > 1 else 1, pytest.approx(codec.wanted(n), rel=0.1, abs=1), 0, 1,
    ]  # fmt: skip


def test_error_feedback_sends_every_entry_of_a_constant_gradient() -> None:
    codec = error_feedback(topk(ratio=0.05))
    x, total = kit.noise(N).abs() + 0.2, torch.zeros(N)
    state = codec.init(Spec((N,)))
    for _ in range(120):
        total += kit.decoded(codec, kit.encode(codec, x, state), N)
    assert bool((total > 0).all())
    assert float((total / 120 / x).mean()) > 0.75


def test_exact_selection_equals_torch_topk() -> None:
    codec = topk(ratio=0.013, values="fp32", exact=True)
    state = codec.init(Spec((N,)))
    for step in range(3):
        x = kit.noise(N, step)
        got = kit.decoded(codec, kit.encode(codec, x, state), N)
        wanted = torch.zeros(N)
        best = torch.topk(x.abs(), math.ceil(0.013 * N)).indices
        wanted[best] = x[best]
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1, 0.5, 1.0])
def test_bytes_per_entry(ratio: float) -> None:
    """Positions cost within 1.15 of log2 C(n, k) / k for many entries; int8 values cost 8 bits and an eighth."""
    n = 1 << 18
    codec = topk(ratio=ratio)
    message = kit.encode(codec, kit.noise(n), codec.init(Spec((n,))))
    k = count(message)
    bits = 8 * message.nbytes / k
    least = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / k
    assert bits - 8.2 - 8 * payload.HEADER_NBYTES / k <= max(1.15 * least, 1.01 * n / k) + 0.1
    assert ratio != 0.01 or bits <= 17.5


N_THRESHOLD = 100_003


def runs_of(x: torch.Tensor, run: int) -> torch.Tensor:
    rows = torch.zeros(-(-x.numel() // run) * run)
    rows[: x.numel()] = x
    return rows.view(-1, run)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"layers", "back-loaded"}))
@pytest.mark.parametrize("ratio", [0.01, 0.1])
def test_runs_are_whole_and_hold_the_energy_of_the_best_runs(kind: str, ratio: float) -> None:
    codec = block_threshold(ratio=ratio, values="fp32")
    state = codec.init(Spec((N_THRESHOLD,)))
    for step in range(5):
        x = KINDS[kind](N_THRESHOLD, step)
        got, rows = runs_of(kit.decoded(codec, kit.encode(codec, x, state), N_THRESHOLD), 16), runs_of(x, 16)
        sent = got.ne(0).any(1)
        assert torch.equal(got[sent], rows[sent])
        best = rows.abs().sum(1).topk(codec.wanted(N_THRESHOLD)).indices
        assert float(got.square().sum()) >= 0.9 * float(rows[best].square().sum()), step


def test_count_that_does_not_fit_the_runs_is_refused() -> None:
    """The last run below n is short: a payload may contain it only with the number of values that it has."""
    codec, n = BlockThreshold(1.0, 16, "fp32"), 40
    good = bytes(kit.encode(codec, kit.noise(n), codec.init(Spec((n,)))))
    assert torch.equal(kit.decoded(codec, good, n), kit.noise(n))
    for other in (39, 38, 33):
        bad = bytearray(good[:16] + good[16 : 16 + 4 * other] + good[16 + 4 * n :])
        bad[8:12] = other.to_bytes(4, "little")
        with pytest.raises(CorruptFrame, match="last run.*E-PAYLOAD"):
            codec.decode(bytes(bad), {}, torch.empty(n))


N_RANDOMK = 5000


def keyed(codec: Codec, sender: int, job: str = "job") -> dict[str, object]:
    state = codec.init(Spec((N_RANDOMK,)))
    seed(state, job, 3, sender)
    return state


def test_members_draw_the_same_positions_and_steps_differ() -> None:
    codec = randomk(ratio=0.02)
    states = [keyed(codec, sender) for sender in (0, 1)] + [keyed(codec, 0, "another job")]
    before = None
    for _ in range(3):
        one, two, other = (kit.decoded(codec, kit.encode(codec, torch.ones(N_RANDOMK), state), N_RANDOMK) for state in states)
        assert torch.equal(one, two)
        assert not torch.equal(one, other)
        assert before is None or not torch.equal(one, before)
        assert int(one.sum()) == codec.entries(N_RANDOMK)
        before = one


def test_every_entry_is_drawn_once_per_cycle() -> None:
    codec, hits = randomk(ratio=0.1), torch.zeros(N_RANDOMK)
    state = keyed(codec, 0)
    for _ in range(200):
        hits += kit.decoded(codec, kit.encode(codec, torch.ones(N_RANDOMK), state), N_RANDOMK)
    assert float(hits.min()) >= 3
    assert float(hits.mean()) == pytest.approx(20, rel=1e-3)


@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16"])
def test_server_stores_only_values_and_sends_their_float32_sum(values: str) -> None:
    codec = randomk(ratio=0.1, values=values)
    cluster = kit.Cluster(codec, Spec((N_RANDOMK,)), 3)
    xs = [kit.noise(N_RANDOMK, i) for i in range(3)]
    sums = cluster.step(xs)
    assert len(cluster.accs[0]["sum"]) == 500
    sent = torch.stack([kit.decoded(codec, payload, N_RANDOMK) for payload in cluster.payloads])
    assert torch.equal(sums[0], sent[0] + sent[1] + sent[2])
    assert cluster.payloads[0].nbytes == 16 + 500 * (4 if values == "fp32" else 2)


def test_contribution_of_another_draw_is_refused_without_effect() -> None:
    codec = randomk(ratio=0.1)
    acc = codec.new_accumulator(Spec((N_RANDOMK,)), 0)
    first, other = keyed(codec, 0), keyed(codec, 1, "another job")
    codec.add(0, kit.encode(codec, kit.noise(N_RANDOMK), first), acc, first=True)
    before = acc["sum"].copy()
    with pytest.raises(CorruptFrame, match="seed.*E-PAYLOAD"):
        codec.add(0, kit.encode(codec, kit.noise(N_RANDOMK), other), acc, first=False)
    assert np.array_equal(acc["sum"], before)
    codec.add(0, kit.encode(codec, kit.noise(N_RANDOMK), other), acc, first=True)


N_BLOCKWISE = 4480
STEP_OF_MAX = {  # codec -> (block, largest error in largest magnitudes of the block); the scale is up to 2^-7 above
    int8(block=64): (64, 0.5 / 127),
    int4(block=64): (64, 0.5 / 7 * (1 + 2**-7)),
    qsgd(block=64, levels=1): (64, 1 + 2**-7),
    qsgd(block=64): (64, (1 + 2**-7) / 7),
    qsgd(block=64, levels=127): (64, (1 + 2**-7) / 127),
    onebit(block=64): (64, 1 + 2**-7),
}


@pytest.mark.parametrize("codec", STEP_OF_MAX, ids=str)
def test_error_is_at_most_one_quantization_step(codec: Codec) -> None:
    block, bound = STEP_OF_MAX[codec]
    x = kit.noise(N_BLOCKWISE) ** 3
    error = (kit.decoded(codec, kit.encode(codec, x, codec.init(Spec((N_BLOCKWISE,)))), N_BLOCKWISE) - x).abs()
    for part, most in zip(error.split(block), x.abs().split(block), strict=True):
        assert float(part.max()) <= bound * float(most.max()) * 1.0001


@pytest.mark.parametrize("codec", [onebit(block=64), int4(block=64), int8(block=64)], ids=str)
def test_codecs_that_need_feedback_are_contractions(codec: Codec) -> None:
    """The condition under which error feedback converges: |v - sent| < |v|, here for every block."""
    for x in (kit.noise(N_BLOCKWISE), kit.noise(N_BLOCKWISE) ** 3, kit.noise(N_BLOCKWISE).abs() + 1.0):
        rest = x - kit.decoded(codec, kit.encode(codec, x, codec.init(Spec((N_BLOCKWISE,)))), N_BLOCKWISE)
        assert bool((rest.view(-1, 64).norm(dim=1) < x.view(-1, 64).norm(dim=1)).all())


def test_senders_steps_and_server_draw_different_random_numbers() -> None:
    x, seen = kit.noise(N_BLOCKWISE), set()
    for sender in (0, 1, SERVER):
        for bucket in (0, 1):
            state = qsgd().init(Spec((N_BLOCKWISE,)))
            seed(state, "job", bucket, sender)
            seen |= {bytes(kit.encode(qsgd(), x, state)) for _ in range(3)}
    assert len(seen) == 18


BROKEN = [  # codec, numel, (byte of the body, value), words
    (int4(block=8), 16, {1: 0x7E}, "scale"),
    (int4(block=8), 16, {1: 0x80}, "scale"),
    (int4(block=8), 15, {11: 0x10}, "after its last element"),
    (qsgd(block=8, levels=1), 16, {0: 0x00, 1: 0x7F}, "scale"),
    (qsgd(block=8, levels=3), 10, {7: 0x40}, "after its last element"),
    (onebit(block=8), 16, {0: 0x80, 1: 0x7F}, "scale"),
    (onebit(block=8), 9, {5: 0x02}, "after its last element"),
]


@pytest.mark.parametrize(("codec", "n", "bad", "words"), BROKEN, ids=lambda v: v if isinstance(v, str) else str(v))
def test_malformed_bytes_are_named(codec: Codec, n: int, bad: dict[int, int], words: str) -> None:
    payload = bytearray(kit.encode(codec, torch.zeros(n), codec.init(Spec((n,)))))
    assert not kit.decoded(codec, bytes(payload), n).any()
    for at, value in bad.items():
        payload[16 + at] = value
    out = torch.full((n,), 7.0)
    with pytest.raises(CorruptFrame, match=f"{codec.name} .*{words}.*E-PAYLOAD"):
        codec.decode(bytes(payload), codec.init(Spec((n,))), out)
    assert bool((out == 7.0).all())


LARGEST = [  # the largest scale that each takes, and every byte of codes set
    (int4(block=8), (0x7DFF).to_bytes(2, "little"), 4),
    (qsgd(block=8, levels=1), (0x7EFF).to_bytes(2, "little"), 2),
    (qsgd(block=8, levels=127), (0x7BFF).to_bytes(2, "little"), 8),
    (onebit(block=8), (0x7F7F).to_bytes(2, "little"), 1),
]


@pytest.mark.parametrize(("codec", "scale", "nbytes"), LARGEST, ids=str)
def test_no_valid_byte_decodes_to_infinity(codec: Codec, scale: bytes, nbytes: int) -> None:
    good = bytes(kit.encode(codec, torch.zeros(8), codec.init(Spec((8,)))))
    for byte in range(256):
        assert bool(torch.isfinite(kit.decoded(codec, good[:16] + scale + bytes([byte]) * nbytes, 8)).all())
    above = (int.from_bytes(scale, "little") + 1).to_bytes(len(scale), "little")
    with pytest.raises(CorruptFrame):
        kit.decoded(codec, good[:16] + above + bytes(nbytes), 8)


GOLDEN = Path(__file__).parents[1] / "golden" / "payloads"


@pytest.mark.parametrize("backend", kit.AVAILABLE)
def test_golden_payload(backend: str) -> None:
    """Payload and result of each round, in order, for two workers with different keys."""
    codec, spec, seen = powersgd(rank=1), Spec((4, 6)), b""
    with kit.use(backend):
        states, server = [codec.init(spec) for _ in range(2)], codec.init_server(spec)
        rooms, result = [kit.room(codec, spec) for _ in range(2)], b""
        for rank, state in enumerate(states):
            seed(state, "golden", 3, rank)
        for r in range(len(codec.rounds)):
            acc = codec.new_accumulator(spec, r)
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


def low_rank(m: int, n: int, rank: int, number: int = 0) -> torch.Tensor:
    return (kit.noise(m * rank, number).view(m, rank) @ kit.noise(rank * n, number + 1).view(rank, n)).view(-1)


def test_powersgd_recovers_a_matrix_of_its_rank_and_keeps_it() -> None:
    spec, x = Spec((60, 50)), low_rank(60, 50, 3)
    cluster = kit.Cluster(powersgd(rank=3), spec, 2)
    torch.testing.assert_close(cluster.step([x, x])[0], 2 * x, rtol=1e-4, atol=1e-3)
    small = kit.Cluster(powersgd(rank=1), spec, 1)
    errors = [float((small.step([x])[0] - x).norm()) for _ in range(8)]
    singular = torch.linalg.svdvals(x.view(60, 50))
    assert errors[-1] < 1.05 * float(singular[1:].norm()), "the warm start has not found the best rank-one part"
    assert errors[-1] < errors[0]


def test_powersgd_survives_zero_gradients_and_degenerate_directions() -> None:
    spec, zero = Spec((60, 50)), torch.zeros(3000)
    cluster = kit.Cluster(powersgd(rank=3), spec, 2)
    assert not cluster.step([zero, zero])[0].any()
    one = low_rank(60, 50, 1)
    torch.testing.assert_close(cluster.step([one, zero])[0], one, rtol=1e-4, atol=1e-4)
    x = low_rank(60, 50, 3, 5)
    torch.testing.assert_close(cluster.step([x, zero])[0], x, rtol=1e-4, atol=1e-3)

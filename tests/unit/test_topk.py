"""What topk selects: the right count, most of the mass, every part of the tensor in its turn."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from support import codecs as kit

from commlayer.compressors import Codec, error_feedback, payload, topk
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
}


def count(message: memoryview) -> int:
    return int.from_bytes(message[8:12], "little")


def run(codec: Codec, xs: list[torch.Tensor]) -> list[int]:
    state = codec.init(Spec((xs[0].numel(),)))
    return [count(kit.encode(codec, x, state)) for x in xs]


@pytest.mark.parametrize("kind", KINDS)
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
def test_count_is_within_a_tenth_of_k(n: int, ratio: float, kind: str, fed: bool) -> None:
    """At all sizes and ratios, for ties as well, from the first step on."""
    plain = topk(ratio=ratio)
    codec, k = error_feedback(plain) if fed else plain, plain.wanted(n)
    xs = [TIED.get(kind, torch.clone)(kit.noise(n, seed)) for seed in range(5)]
    counts = run(codec, xs * 8)
    assert max(counts) <= plain.capacity(n) <= k + max(1, k // 10)
    assert min(counts) >= min(0.9 * k, k - 1), counts


@pytest.mark.parametrize("kind", ["normal", "equal"])
def test_what_is_trimmed_or_looked_for_again_is_conserved(kind: str) -> None:
    """A threshold far too low, then far too high: the step puts it right, and the residual has the rest bit for bit."""
    codec = error_feedback(topk(ratio=0.01, values="fp32"))
    k, state = codec.inner.wanted(N), codec.init(Spec((N,)))
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


def test_error_feedback_serves_every_entry_of_a_constant_gradient() -> None:
    codec = error_feedback(topk(ratio=0.05))
    x, total = kit.noise(N).abs() + 0.2, torch.zeros(N)
    state = codec.init(Spec((N,)))
    for _ in range(120):
        total += kit.decoded(codec, kit.encode(codec, x, state), N)
    assert bool((total > 0).all())
    assert float((total / 120 / x).mean()) > 0.75


def test_exact_selection_is_torch_topk() -> None:
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
    """Positions within 1.15 of log2 C(n, k) / k where they are many; int8 values cost 8 bits and an eighth."""
    n = 1 << 18
    codec = topk(ratio=ratio)
    message = kit.encode(codec, kit.noise(n), codec.init(Spec((n,))))
    k = count(message)
    bits = 8 * message.nbytes / k
    least = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / k
    assert bits - 8.2 - 8 * payload.HEADER_NBYTES / k <= max(1.15 * least, 1.01 * n / k) + 0.1
    assert ratio != 0.01 or bits <= 17.5

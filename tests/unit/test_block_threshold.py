"""What block_threshold selects: whole runs, the right count, most of the energy that runs can hold, every part in its turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support import codecs as kit

from commlayer.compressors import block_threshold
from commlayer.compressors.topk import BlockThreshold
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

N = 100_003
KINDS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": kit.noise,
    "heavy": lambda n, seed: kit.noise(n, seed) * torch.exp(1.5 * kit.noise(n, seed + 1000)),
    "sorted": lambda n, seed: kit.noise(n, seed).sort().values,
    "front-loaded": lambda n, seed: kit.noise(n, seed) * torch.linspace(3, 0.01, n) ** 3,
    "rows": lambda n, seed: kit.noise(n, seed) * (kit.noise(n // 64 + 1, seed + 1) > 1).repeat_interleave(64)[:n],
}


def count(message: memoryview) -> int:
    return int.from_bytes(message[8:12], "little")


def runs_of(x: torch.Tensor, run: int) -> torch.Tensor:
    rows = torch.zeros(-(-x.numel() // run) * run)
    rows[: x.numel()] = x
    return rows.view(-1, run)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [0.01, 0.1])
def test_runs_are_whole_and_hold_the_energy_that_the_best_runs_hold(kind: str, ratio: float) -> None:
    codec = block_threshold(ratio=ratio, values="fp32")
    state = codec.init(Spec((N,)))
    for step in range(5):
        x = KINDS[kind](N, step)
        got, rows = runs_of(kit.decoded(codec, kit.encode(codec, x, state), N), 16), runs_of(x, 16)
        sent = got.ne(0).any(1)
        assert torch.equal(got[sent], rows[sent])
        best = rows.abs().sum(1).topk(codec.wanted(N)).indices
        assert float(got.square().sum()) >= 0.9 * float(rows[best].square().sum()), step


@pytest.mark.parametrize("n", [1, 15, 16, 17, 40_000, N])
def test_zeros_are_never_sent_and_a_spike_always_is(n: int) -> None:
    codec = block_threshold(ratio=0.3, values="fp32")
    state, spike = codec.init(Spec((n,))), torch.zeros(n)
    spike[n - 1] = -5.0
    for x in (torch.zeros(n), spike, torch.zeros(n), spike):
        message = kit.encode(codec, x, state)
        assert torch.equal(kit.decoded(codec, message, n), x)
        assert count(message) <= (16 if x.any() else 0)


def test_a_count_that_does_not_fit_the_runs_is_refused() -> None:
    """The last run below n is short: a payload may end in it only with as many values as it has."""
    codec, n = BlockThreshold(1.0, 16, "fp32"), 40
    good = bytes(kit.encode(codec, kit.noise(n), codec.init(Spec((n,)))))
    assert torch.equal(kit.decoded(codec, good, n), kit.noise(n))
    for other in (39, 38, 33):
        bad = bytearray(good[:16] + good[16 : 16 + 4 * other] + good[16 + 4 * n :])
        bad[8:12] = other.to_bytes(4, "little")
        with pytest.raises(CorruptFrame, match="last run.*E-PAYLOAD"):
            codec.decode(bytes(bad), {}, torch.empty(n))

"""DeMo and SparseLoCo follow their papers: sent values leave the residual, and all ranks step equally."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.paced.demo import Chunks, DeMo, dct
from bench.paced.sparseloco import CHUNK, SparseLoCo, decode, encode


def test_cosines_are_orthonormal_and_chunks_round_trip() -> None:
    assert torch.allclose(dct(64) @ dct(64).T, torch.eye(64), atol=1e-5)
    for shape in ((128, 96), (70,), (8, 3, 3, 3), (97, 64)):
        x, chunks = torch.randn(shape), Chunks(torch.Size(shape))
        coefficients = chunks.encode(x)
        assert coefficients.shape[1] <= CHUNK
        assert torch.allclose(chunks.decode(coefficients), x, atol=1e-4)
        assert coefficients.square().sum() == pytest.approx(float(x.square().sum()), rel=1e-4)


def test_demo_keeps_unsent_values_and_steps_by_the_sign_of_the_mean() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    gradients = [torch.randn(64, 64) for _ in weights]
    sent: list[torch.Tensor] = []

    def first(own: torch.Tensor) -> list[torch.Tensor]:
        sent.append(own)
        return [own]

    alone = [DeMo([p], first, lr=0.1) for p in weights]
    for p, gradient, optimizer in zip(weights, gradients, alone, strict=True):
        p.grad = gradient.clone()
        optimizer.step()
        assert optimizer.sent == 32 * 2 * 2, "32 places and values of 16 bits for 4096 numbers"
        owed = optimizer.state[p]["momentum"]
        chunks = Chunks(p.shape)
        gone = chunks.encode(0.1 * gradient) - chunks.encode(owed)
        assert int((gone.abs() > 1e-4).sum()) == 32
        assert chunks.encode(owed).abs().max() <= chunks.encode(0.1 * gradient).abs().topk(33).values[0, -1] + 1e-4
        assert p.detach().abs().unique().tolist() == [pytest.approx(0.1)]
    # Together: the sign of the mean of both.
    both = nn.Parameter(torch.zeros(64, 64))
    both.grad = gradients[0].clone()
    DeMo([both], lambda own: sent, lr=0.1).step()
    means = [Chunks(both.shape).encode(0.1 * g) for g in gradients]
    kept = sum(m * (m.abs() >= m.abs().topk(32).values[0, -1]) for m in means)
    assert ((both < 0) == (Chunks(both.shape).decode(kept) > 0)).float().mean() > 0.995


def test_sparseloco_sends_the_largest_with_two_bits() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, CHUNK)
    sent, levels = encode(x, 64)
    assert (sent.dtype, sent.shape, levels.shape) == (torch.int16, (3, 64), (3, 2))
    back = decode(sent, levels, CHUNK)
    places = back != 0
    assert places.sum(1).tolist() == [64, 64, 64]
    assert all(row.abs()[sent].min() >= row.abs()[~sent].max() for row, sent in zip(x, places, strict=True))
    assert torch.equal(back.sign()[places], x.sign()[places])
    assert all(len(row[row != 0].abs().unique()) == 2 for row in back)
    assert (back - x)[places].square().mean() < 0.1 * x[places].square().mean()


def test_sparseloco_steps_periodically_and_keeps_the_rest() -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(5000))
    start, inner = p.detach().clone(), torch.optim.SGD([p], lr=0.1)
    outer = SparseLoCo([p], inner, lambda own: [own, own], every=2, entries=64, decay=0.5)
    for _ in range(2):
        p.grad = torch.randn(5000)
        before = p.detach().clone()
        inner.step()
        local = before - 0.1 * p.grad
    moved = start - p.detach()
    assert 0 < int((moved != 0).sum()) <= 2 * 64
    assert torch.allclose(moved + outer._residual.view(-1)[:5000], start - local, atol=1e-5), "all of the change"
    assert outer.sent == 2 * (2 * 64) + 2 * (2 * 2), "two chunks: 64 entries of two bytes, two levels"

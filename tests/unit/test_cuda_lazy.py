"""Lazy optimizers by the kernels in cuda/lazy.cu, on a GPU or else on the shim: the bits of the host's."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda import DEVICE, here, raw, running, there
from support.native_builds import core, numbers, positions
from torch import nn

from commlayer.errors import CorruptFrame
from commlayer.optim import SparseAdamW, SparseSGD, device_kernels, torch_kernels
from commlayer.optim.sparse import sparse_gradient

There = Callable[[np.ndarray], torch.Tensor]
SIZES = [(1, 0), (1, 1), (257, 256), (1000, 33), (5000, 5000)]


def stamps_of(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, -(-n // torch_kernels.GROUP)).astype(np.uint8)


def same(run: Callable[[ModuleType, There], list[bytes]]) -> None:
    found = run(core, here)
    assert run(torch_kernels, here) == found
    with running() as recorder:
        assert run(device_kernels, there) == found
        assert recorder.launched


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize(("momentum", "nesterov", "decay"), [(0.0, False, 0.0), (0.9, False, 0.1), (0.9, True, 0.0)])
def test_sgd(n: int, k: int, momentum: float, nesterov: bool, decay: float) -> None:
    stamp, idx = stamps_of(n), positions(n, k, 1).view(np.int32)

    def run(module: ModuleType, there: There) -> list[bytes]:
        w, stamps, rows, g = there(numbers(n, 1)), there(stamp), there(numbers(1024, 3)), there(numbers(k, 4))
        v = there(numbers(n, 2)) if momentum else None
        module.sgd_sparse(w, v, stamps, 255, rows, there(idx), g, 0.1, momentum, 0.7, decay, nesterov)
        found = [raw(w), raw(stamps)]
        module.sgd_catch_up(w, v, stamps, 7, rows)
        module.sgd_sparse(w, v, None, 7, rows, there(idx), g, 0.1, momentum, 0.7, decay, nesterov)
        return [*found, raw(w), raw(stamps), b"" if v is None else raw(v)]

    same(run)


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_adam(n: int, k: int) -> None:
    stamp, idx = stamps_of(n), positions(n, k, 1).view(np.int32)
    numbers_of_step = np.array([0.99, 0.1, 0.999, 0.001, 0.3, 1e-8, 0.01], np.float32)

    def run(module: ModuleType, there: There) -> list[bytes]:
        w, m, v = there(numbers(n, 1)), there(numbers(n, 2)), there(numbers(n, 3) ** 2)
        stamps, rows = there(stamp), there(np.abs(numbers(2048, 4)))
        module.adam_sparse(w, m, v, stamps, 3, rows, there(idx), there(numbers(k, 5)), there(numbers_of_step))
        found = [raw(x) for x in (w, m, v, stamps)]
        module.adam_catch_up(w, m, v, stamps, 99, rows)
        return found + [raw(x) for x in (w, m, v, stamps)]

    same(run)


def test_positions_are_checked_before_anything_is_written() -> None:
    with running():
        w, g, rows = there(numbers(9, 1)), there(numbers(2, 2)), there(numbers(1024, 3))
        before = raw(w)
        for bad in ([3, 3], [4, 9]):
            with pytest.raises(CorruptFrame):
                device_kernels.sgd_sparse(w, None, None, 0, rows, there(np.array(bad, np.int32)), g, 0.1, 0.0, 1.0, 0.0, False)
        assert raw(w) == before


KINDS: list[Callable[[list[nn.Parameter]], Any]] = [
    lambda p: SparseSGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, lag=4),
    lambda p: SparseAdamW(p, lag=4),
]


@pytest.mark.parametrize("make", KINDS)
def test_a_training_on_the_device_gives_the_bits_of_the_host(make: Callable[[list[nn.Parameter]], Any]) -> None:
    def train(device: torch.device) -> torch.Tensor:
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(20, 31).to(device))
        optimizer = make([p])
        for _ in range(12):
            idx, values = torch.randperm(620)[:40].sort().values.to(torch.int32), torch.randn(40)
            p.grad = sparse_gradient(idx.to(device), values.to(device), (20, 31))
            optimizer.step()
        optimizer.flush()
        return p.detach().cpu()

    found = train(torch.device("cpu"))
    with running() as recorder:
        assert torch.equal(train(DEVICE), found)
        assert any(name.endswith("_sparse") for name in recorder.launched)

"""Trial runs leave a model as it was, and find the memory limit from any kind of error."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import commlayer
from commlayer.autotune.measure import step_times
from commlayer.autotune.measure.step_times import BatchTrial, batches_of, out_of_memory
from commlayer.balance import Sampler
from commlayer.balance.profile import profile


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


def mean_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module(x + random.random() + np.random.rand()).mean()
    return out


def drawn() -> tuple[Any, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


@pytest.mark.parametrize("ends", [False, True])
def test_a_trial_leaves_no_trace(ends: bool) -> None:
    one, twin = model(), model()
    for each in (one, twin):
        random.seed(2), np.random.seed(2), torch.manual_seed(2)
        mean_of(each, torch.ones(4, 6)).backward()
    gradient = one[0].weight.grad
    trial = BatchTrial(one, mean_of, lambda samples: torch.randn(samples, 6))
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = drawn()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)

    def run(samples: int) -> float:
        if ends and samples > 5:
            raise MemoryError
        return trial(samples)

    with trial.untouched(begun=False):
        result = profile(run, 8)
    assert result.ended == ends
    assert len(result.points) == (2 if ends else 3)
    assert drawn() == expected
    assert one[0].weight.grad is gradient
    for (name, a), (_, b) in zip(one.state_dict().items(), twin.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(one.parameters(), twin.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


@pytest.mark.commit(2)
@pytest.mark.parametrize(("error", "memory"), [
    (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True), (MemoryError(), True),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False), (ValueError("no"), False),
])
def test_what_says_that_memory_has_ended(error: Exception, memory: bool) -> None:
    assert out_of_memory(error) == memory

    def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            raise error
        return mean_of(module, x)

    trial = BatchTrial(model(), loss_of, lambda samples: torch.randn(samples, 6))
    if memory:
        result = profile(trial, 16)
        assert (result.ended, [batch for batch, _ in result.points], result.cap) == (True, [2, 4], 3)
    else:
        with pytest.raises(type(error)):
            profile(trial, 16)


class Counted(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


def test_batches_come_from_the_loader_or_a_function() -> None:
    loader = DataLoader(TensorDataset(torch.arange(9), torch.arange(9) * 2), batch_size=3)
    x, y = batches_of(loader)(4)
    assert (x.tolist(), y.tolist()) == ([0, 1, 2, 3], [0, 2, 4, 6])
    assert batches_of(lambda samples: "x" * samples)(3) == "xxx"
    with pytest.raises(ValueError, match="dataset Counted .*E-USER-CODE"):
        batches_of(DataLoader(Counted(), batch_size=3))
    with pytest.raises(ValueError, match="got int .*E-USER-CODE"):
        batches_of(3)


@pytest.mark.parametrize(("loss_of", "text"), [
    (lambda module, x: module(x), r"loss\b.*\(4, 1\).*E-USER-CODE"), (lambda module, x: 0.5, "loss is float.*E-USER-CODE"),
])
def test_a_loss_of_another_kind_is_named(loss_of: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BatchTrial(model(), loss_of, lambda samples: torch.randn(samples, 6))(4)


def test_what_waits_for_others_is_refused() -> None:
    with pytest.raises(ValueError, match="SyncBatchNorm.*E-USER-CODE"):
        BatchTrial(nn.Sequential(nn.SyncBatchNorm(3)), mean_of, lambda samples: None)


@pytest.mark.parametrize(("given", "found_cap"), [(0, 8), (6, 6), (15, 8)])
def test_alone_it_finds_the_cap(given: int, found_cap: int) -> None:
    """A job of one worker: its share is the batch, in pieces that fit; no more is tried than is allowed."""
    one = nn.Linear(6, 1)
    sampler = Sampler(40, 20, rank=0, world=1, cap=given)
    with commlayer.attach(one) as session:
        controller = commlayer.LoadBalancer(session, sampler)
        (result,) = controller.profile(one, lambda module, x: _holds(module, x, 9), lambda samples: torch.randn(samples, 6))
        assert result.ended
        assert sampler.cap == result.cap == found_cap
        assert max(batch for batch, _ in result.points) <= (given or 20)
        sizes = [len(x) for (x,) in controller.follow(DataLoader(TensorDataset(torch.randn(40, 6)), batch_sampler=sampler))]
    assert max(sizes) <= found_cap
    assert sum(sizes) == 40


def _holds(module: nn.Module, x: torch.Tensor, most: int) -> torch.Tensor:
    if len(x) > most:
        raise MemoryError
    return mean_of(module, x)


@pytest.mark.parametrize(("mode", "limit_s", "text"), [
    ("fast", 1.0, "mode: .*'fast'.*makespan, lbb.*E-SHARES-ARGUMENT"), ("lbb", 0.0, r"limit_s: .*0\.0.*E-SHARES-ARGUMENT"),
])
def test_arguments_are_named(mode: Any, limit_s: float, text: str) -> None:
    def profiled() -> None:
        with commlayer.attach(nn.Linear(6, 1)) as session:
            controller = commlayer.LoadBalancer(session, Sampler(40, 20, rank=0, world=1), mode=mode)
            controller.profile(nn.Linear(6, 1), mean_of, lambda samples: torch.randn(samples, 6), limit_s=limit_s)

    with pytest.raises(ValueError, match=text):
        profiled()


def takes(nbytes: int) -> Any:
    """A loss that holds so much for each sample."""
    def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return mean_of(module, x) + torch.ones(len(x) * nbytes // 4).sum() * 0

    return loss_of


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux says how much memory was taken")
@pytest.mark.parametrize(("room", "sharing", "least", "most"), [
    (100 << 20, 1, 8, 30), (100 << 20, 4, 3, 8), (1 << 40, 1, 64, 64)])
def test_on_a_cpu_it_stops_before_the_machine_has_no_memory(
    room: int, sharing: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_times, "room_nbytes", lambda: float(room))
    trial = BatchTrial(nn.Linear(6, 1), takes(4 << 20), lambda samples: torch.randn(samples, 6), sharing=sharing)
    result = profile(trial, 64, repeats=1)
    assert result.ended == (most < 64)
    assert least <= result.cap <= most

"""What the module accepts and how it refuses: each mistake names the argument."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from native_kit import core

from commlayer.errors import CorruptFrame


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.numpy(),
        lambda x: memoryview(x.numpy()),
        torch.nn.Parameter,
        lambda x: x.view(2, 4, 1),
        lambda x: torch.cat([x, x])[8:],
    ],
    ids=["tensor", "numpy", "memoryview", "parameter", "shaped", "offset"],
)
def test_every_kind_of_float32_memory_is_read_in_place(make: object) -> None:
    x = torch.arange(8, dtype=torch.float32)
    acc = torch.ones(8)
    core.add_f32(acc, make(x))
    assert acc.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    target = make(torch.zeros(8))
    core.add_f32(target, x)
    assert np.asarray(target.detach() if isinstance(target, torch.Tensor) else target).ravel().tolist() == list(range(8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_tensors_are_payloads_too(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -2.5, 3.0]).to(dtype)
    acc = torch.zeros(3)
    (core.add_f16 if dtype == torch.float16 else core.add_bf16)(acc, x)
    assert acc.tolist() == [1.0, -2.5, 3.0]


F = torch.zeros(8)
MISTAKES = {
    "dtype": (lambda: core.add_f32(F.double(), F), ValueError, "acc"),
    "wrong width": (lambda: core.add_f16(F, F), ValueError, "x"),
    "strided": (lambda: core.add_f32(torch.zeros(4, 4).t(), F), BufferError, "acc"),
    "strided numpy": (lambda: core.add_f32(np.zeros(8, np.float32)[::2], F), BufferError, "acc"),
    "read-only": (lambda: core.f32_to_f16(bytes(16), F), BufferError, "dst"),
    "not memory": (lambda: core.all_finite(3.0), (TypeError, BufferError), "x"),
    "meta device": (lambda: core.all_finite(torch.zeros(8, device="meta")), ValueError, "x"),
    "sparse": (lambda: core.all_finite(torch.zeros(8).to_sparse()), ValueError, "x"),
    "short payload": (lambda: core.f16_to_f32(F, bytes(15)), ValueError, "src"),
    "offset past the end": (lambda: core.f16_to_f32(F, bytes(16), 17), ValueError, "src"),
    "negative offset": (lambda: core.f16_to_f32(F, bytes(16), -1), ValueError, "src"),
    "residual of another length": (
        lambda: core.select(F, F[:7], 1.0, 0, torch.zeros(8, dtype=torch.int32), F),
        ValueError,
        "residual",
    ),
    "threshold zero": (
        lambda: core.select(F, None, 0.0, 0, torch.zeros(8, dtype=torch.int32), torch.zeros(8)),
        ValueError,
        "threshold",
    ),
    "start past the end": (
        lambda: core.select(F, None, 1.0, 8, torch.zeros(8, dtype=torch.int32), torch.zeros(8)),
        ValueError,
        "start",
    ),
    "float positions": (lambda: core.scatter_add(F, F, F), ValueError, "idx"),
    "no block": (lambda: core.int8_encode(bytearray(8), bytearray(32), F, None, 0), ValueError, "block"),
    "scale too short": (lambda: core.int8_encode(bytearray(8), bytearray(3), F, None, 8), ValueError, "scale"),
    "more positions than places": (lambda: core.ef_bound(3, 4), ValueError, "ef_bound"),
    "corrupt": (lambda: core.bitmap_decode(torch.zeros(3, dtype=torch.int32), 8, b"\x01"), CorruptFrame, "positions"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_the_argument(mistake: str) -> None:
    call, error, name = MISTAKES[mistake]
    with pytest.raises(error, match=name):
        call()
    assert not F.any()


def test_buffers_are_released_after_errors() -> None:
    memory = bytearray(15)
    with pytest.raises(ValueError):
        core.f16_to_f32(F, memory)
    memory.extend(b"x")  # BufferError while anyone still holds a view
    core.f16_to_f32(torch.zeros(8), memory)
    memory.extend(b"x")


def test_large_calls_run_beside_other_threads() -> None:
    sums = [torch.zeros(200_000) for _ in range(4)]
    x = torch.ones(200_000)
    threads = [threading.Thread(target=lambda acc: [core.add_f32(acc, x) for _ in range(20)], args=(acc,)) for acc in sums]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(bool((acc == 20).all()) for acc in sums)

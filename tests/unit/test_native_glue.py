"""What the module accepts and how it refuses: each mistake names the argument."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support.native_builds import core

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
    "threshold below all normal numbers": (
        lambda: core.select(F, None, 1e-39, 0, torch.zeros(8, dtype=torch.int32), torch.zeros(8)),
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


def test_a_long_call_lets_other_threads_run() -> None:
    """With no forced switches another thread can only run while a call has given the GIL away."""
    big, ready, go, seen = torch.zeros(4_000_000), threading.Event(), threading.Event(), []

    def other() -> None:
        ready.set()
        go.wait()
        seen.append(True)

    thread, interval = threading.Thread(target=other), sys.getswitchinterval()
    thread.start()
    ready.wait(60)
    sys.setswitchinterval(1000.0)
    try:
        go.set()
        for _ in range(1000):
            core.crc32c(big)
            if seen:
                break
        assert seen
    finally:
        sys.setswitchinterval(interval)
        thread.join(60)


class TensorView(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class ExchangeTable(ctypes.Structure):
    """The part of DLPack's exchange table that is read."""

    View = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(TensorView))
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p), ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p), ("to_object", ctypes.c_void_p), ("view", View),
    ]  # fmt: skip


class OnDevice:
    """A tensor that says that it lies on another kind of device, as pinned memory does."""

    def __init__(self, values: np.ndarray, device_type: int) -> None:
        self.values, self.device_type, self.shape = values, device_type, (ctypes.c_int64 * 1)(len(values))


@ExchangeTable.View
def view_of(tensor: OnDevice, out: Any) -> int:
    out[0] = TensorView(tensor.values.ctypes.data, tensor.device_type, 0, 1, 2, 32, 1, tensor.shape, None, 0)
    return 0


TABLE = ExchangeTable(1, 0, None, None, None, None, view_of)
capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
CAPSULE_NAME = b"dlpack_exchange_api"
OnDevice.__dlpack_c_exchange_api__ = capsule(ctypes.addressof(TABLE), CAPSULE_NAME, None)  # type: ignore[attr-defined]


def test_pinned_memory_is_read_in_place_and_gpu_memory_is_refused() -> None:
    values = np.arange(8, dtype=np.float32)
    acc = torch.zeros(8)
    core.add_f32(acc, OnDevice(values, 3))
    assert acc.tolist() == values.tolist()
    core.add_f32(OnDevice(values, 3), acc)
    assert values.tolist() == (2 * acc).tolist()
    with pytest.raises(ValueError, match="x: the tensor is not on the CPU"):
        core.add_f32(acc, OnDevice(values, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_tensors_in_pinned_memory() -> None:
    x = torch.arange(8, dtype=torch.float32).pin_memory()
    core.add_f32(x, torch.ones(8))
    assert x.tolist() == list(range(1, 9))

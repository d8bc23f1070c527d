"""The native core: accepted arguments, and kernels without a device twin compared with the reference."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import codec_kernels as reference
from oracle.codec_kernels.draws import philox4x32
from support.native_builds import KINDS, SIZES, bits, core, numbers, portable, positions, same, unaligned

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
MISTAKES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
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
    "a shape whose product overflows": (
        lambda: core.flat_positions(torch.zeros(0, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int64), (2**32 - 1,) * 2),
        ValueError,
        "shape",
    ),
    "no block": (lambda: core.int8_encode(bytearray(8), bytearray(32), F, None, 0), ValueError, "block"),
    "scale too short": (lambda: core.int8_encode(bytearray(8), bytearray(3), F, None, 8), ValueError, "scale"),
    "more positions than places": (lambda: core.ef_bound(3, 4), ValueError, "ef_bound"),
    "corrupt": (lambda: core.bitmap_decode(torch.zeros(3, dtype=torch.int32), 8, b"\x01"), CorruptFrame, "positions"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_call_names_the_argument(mistake: str) -> None:
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


def test_long_calls_release_the_gil() -> None:
    """With no forced switches another thread can only run while a call has released the GIL."""
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
    """A tensor that claims another kind of device, as pinned memory does."""

    def __init__(self, values: np.ndarray, device_type: int) -> None:
        self.values, self.device_type, self.shape = values, device_type, (ctypes.c_int64 * 1)(len(values))


@ExchangeTable.View
def epoch_of(tensor: OnDevice, out: Any) -> int:
    out[0] = TensorView(tensor.values.ctypes.data, tensor.device_type, 0, 1, 2, 32, 1, tensor.shape, None, 0)
    return 0


TABLE = ExchangeTable(1, 0, None, None, None, None, epoch_of)
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


pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
quick = settings(max_examples=50, deadline=None)
sizes = st.sampled_from((*SIZES, 159, 160, 161, 320, 1283))
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("width", ["f16", "bf16"])
def test_every_16_bit_number_survives_the_round_trip(width: str) -> None:
    every = np.arange(65536, dtype=np.uint16)
    for force in (False, True):
        with portable(force):
            wide, back = np.empty(65536, np.float32), np.empty(65536, np.uint16)
            getattr(core, f"{width}_to_f32")(wide, every)
            getattr(core, f"f32_to_{width}")(back, wide)
        finite = np.isfinite(wide)
        assert (back[finite] == every[finite]).all()
        assert np.isnan(wide).sum() == (2046 if width == "f16" else 254)
        expected = np.empty(65536, np.float32)
        getattr(reference, f"{width}_to_f32")(expected, every)
        assert bits(expected) == bits(wide)


@quick
@given(st.sampled_from(SIZES[1:]), seeds, st.floats(0.01, 1), st.integers(0, 10**6))
def test_scatter_refuses_positions_out_of_order_or_range(n: int, seed: int, density: float, where: int) -> None:
    k = max(1, int(n * density))
    idx, val, acc = positions(n, k, seed), numbers(k, seed), numbers(n, seed + 1)
    j = where % k
    bad = idx.copy()
    bad[j] = n + where if j == k - 1 else idx[j + 1]

    def run(module: ModuleType) -> bytes:
        mine = acc.copy()
        with pytest.raises(CorruptFrame):
            module.scatter_add(mine, bad, val)
        with pytest.raises(CorruptFrame):
            module.scatter_add_int8(mine, bad, np.ones(k, np.int8), np.ones(k, np.float32), 1)
        return mine.tobytes()

    assert same(run) == acc.tobytes()


@quick
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 6), seeds)
def test_outer(m: int, n: int, rank: int, seed: int) -> None:
    p, q = numbers(m * rank, seed), numbers(n * rank, seed + 1)

    def run(module: ModuleType) -> bytes:
        out = np.empty(m * n, np.float32)
        module.outer(out, p, q, rank)
        return out.tobytes()

    wanted = p.reshape(rank, m).T.astype(np.float64) @ q.reshape(rank, n)
    assert np.allclose(np.frombuffer(same(run), np.float32).reshape(m, n), wanted, rtol=1e-4, atol=1e-4)


filled = st.sampled_from(SIZES[1:])
kinds = st.sampled_from(KINDS)
runs = st.sampled_from([8, 16, 32, 64])
MODULES = (core, reference)


@quick
@given(sizes, seeds, kinds, runs, st.sampled_from([1e-9, 8.0, 14.0, 100.0, float("inf")]), st.floats(0, 0.999), st.data())
def test_select_runs(n: int, seed: int, kind: str, run: int, threshold: float, place: float, data: st.DataObject) -> None:
    g = numbers(n, seed, kind=kind)
    old = numbers(n, seed + 1) * np.float32(0.5) if data.draw(st.booleans()) else None
    every = -(-n // run)
    start, cap = int(place * every), data.draw(st.sampled_from([every, every // 3, 1, 0]))

    def go(module: ModuleType) -> tuple[object, ...]:
        kept = None if old is None else old.copy()
        ids, scores = np.full(cap, 7, np.uint32), np.full(cap, 7, np.float32)
        k, overflow, finite = module.select_runs(g, kept, run, threshold, start, ids, scores)
        spread = np.full(every + 3, 7, np.float32)
        module.score_runs(g, old, run, start, spread)
        return k, overflow, finite, ids[:k].tobytes(), scores[:k].tobytes(), b"" if kept is None else bits(kept), bits(spread)

    same(go)


@quick
@given(filled, seeds, runs, st.floats(0, 1))
def test_gather_and_scatter_of_runs(n: int, seed: int, run: int, density: float) -> None:
    every = -(-n // run)
    ids = positions(every, int(density * every), seed)
    src, acc = numbers(n, seed), numbers(n, seed + 1)
    where = (ids[:, None].astype(np.int64) * run + np.arange(run)).reshape(-1)
    where = where[where < n]

    def go(module: ModuleType) -> tuple[bytes, ...]:
        val = np.zeros(len(where), np.float32)
        assert module.gather_runs(src, run, ids, val) == len(where)
        added, assigned, refused = acc.copy(), acc.copy(), acc.copy()
        module.scatter_runs(added, run, ids, val)
        module.scatter_runs(assigned, run, ids, val, True)
        for bad, values in ((ids[::-1].copy() if len(ids) > 1 else ids + every, val), (ids, np.append(val, val[:1] * 0 + 1))):
            if len(ids):
                with pytest.raises(CorruptFrame):
                    module.scatter_runs(refused, run, bad, values)
        return val.tobytes(), added.tobytes(), assigned.tobytes(), refused.tobytes()

    assert same(go)[-1] == acc.tobytes()


def test_philox_known_answers() -> None:
    """Known answers of the authors' Random123: counter and key of zeros, of ones, and of the digits of pi."""
    assert [hex(w) for w in philox4x32(0, np.zeros(1, np.uint64), 0)[0]] == [
        "0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    ones = (1 << 64) - 1
    assert [hex(w) for w in philox4x32(ones, np.array([ones], np.uint64), ones)[0]] == [
        "0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd",
    ]  # fmt: skip
    block, step, key = 0x85A308D3243F6A88, 0x0370734413198A2E, 0x299F31D0A4093822
    assert [hex(w) for w in philox4x32(key, np.array([block], np.uint64), step)[0]] == [
        "0xd16cfe09", "0x94fdcceb", "0x5001e420", "0x24126ea1",
    ]  # fmt: skip
    for module in MODULES:
        assert module.draw_word(key, step) == int(philox4x32(key, np.zeros(1, np.uint64), step)[0, 0])


@quick
@given(filled, seeds, st.floats(0, 1))
def test_draws(n: int, seed: int, density: float) -> None:
    k = max(1, int(n * density))
    src = numbers(n, seed)

    def run(module: ModuleType) -> tuple[bytes, ...]:
        idx, val = np.zeros(k, np.uint32), np.zeros(k, np.float32)
        module.draw_strata(idx, n, seed)
        module.take(src, idx, val)
        return idx.tobytes(), val.tobytes()

    same(run)


@pytest.mark.parametrize("module", MODULES)
def test_golden_bytes(module: ModuleType) -> None:
    idx = np.array([2, 3, 5, 7, 11, 13, 24], np.uint32)
    out = bytearray(16)
    # 32 / 7 gives two low bits: 2 3 1 3 3 1 0; upper parts 0 0 1 1 2 3 6 set bits 0 1 3 4 6 8 12.
    assert module.ef_encode(out, idx, 32) == 4
    assert bytes(out[:4]) == bytes([0b11_01_11_10, 0b00_01_11, 0b0101_1011, 0b0001_0001])
    assert module.bitmap_encode(out, idx, 32) == 4
    assert bytes(out[:4]) == bytes([0b1010_1100, 0b0010_1000, 0, 1])


keys = st.integers(0, 2**63 - 1)


def run_coder(
    name: str, n: int, seed: int, kind: str, fed: bool, shift: int, block: int, scale_nbytes: int, *how: object
) -> None:
    """All bodies agree, in bytes, residual and guard bytes; and the residual is the unsent part."""
    x, old, acc = numbers(n, seed, kind=kind), numbers(n, seed + 1, kind=kind) if fed else None, numbers(n, seed + 2)
    if fed and kind == "wild":
        assert old is not None
        old[~np.isfinite(old)] = 1.0
    width = how[0] if name == "linear" else 1
    nbytes = (n * int(str(width)) + 7) // 8
    count = -(-n // block)

    def run(module: ModuleType) -> tuple[object, ...]:
        kept = None if old is None else old.copy()
        q, guarded_q = unaligned(nbytes, shift)
        scale, guarded_scale = unaligned(scale_nbytes * count, shift)
        finite = getattr(module, f"{name}_encode")(q, scale, x, kept, block, *how)
        if not finite:
            q[:], scale[:] = bytes(nbytes), bytes(scale_nbytes * count)  # may hold anything now
        decoded, assigned = acc.copy(), acc.copy()
        shape = how[:1] if name == "linear" else ()
        getattr(module, f"{name}_decode")(decoded, q, scale, block, *shape)
        getattr(module, f"{name}_decode")(assigned, q, scale, block, *shape, True)
        return (
            finite,
            bytes(guarded_q),
            bytes(guarded_scale),
            b"" if kept is None else bits(kept),
            bits(decoded),
            bits(assigned),
        )

    with np.errstate(all="ignore"):
        v = x if old is None else x + old
    # If a number is not finite, sent values are added back to the residual with rounding, and threads stop at other places.
    finite, _, _, kept, _, assigned = same(run, threads=bool(np.isfinite(v).all()))
    assert finite == bool(np.isfinite(v).all())
    sent = np.frombuffer(assigned, np.float32)
    assert np.isfinite(sent).all()
    if old is not None and finite:
        total, most = sent.astype(np.float64) + np.frombuffer(kept, np.float32), float(np.abs(v).max(initial=0))
        np.testing.assert_allclose(total, v, rtol=1e-6, atol=1e-6 * most + 1e-37)


@quick
@given(sizes, seeds, kinds, st.booleans(), st.sampled_from([0, 1]), st.sampled_from([8, 32, 40, 64, 1024]), keys, st.data())
@pytest.mark.parametrize("width", [2, 3, 4, 5, 8])
def test_linear(
    width: int, n: int, seed: int, kind: str, fed: bool, shift: int, block: int, key: int, data: st.DataObject
) -> None:
    euclidean, dither, step = data.draw(st.booleans()), data.draw(st.booleans()), data.draw(st.sampled_from([0, 1, 2**32 + 5]))
    run_coder("linear", n, seed, kind, fed, shift, block, 2, width, euclidean, dither, key, step)


@quick
@given(sizes, seeds, kinds, st.booleans(), st.sampled_from([0, 1]), st.sampled_from([8, 32, 40, 1024]))
def test_onebit(n: int, seed: int, kind: str, fed: bool, shift: int, block: int) -> None:
    run_coder("onebit", n, seed, kind, fed, shift, block, 2)

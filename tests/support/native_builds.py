"""Memory and numbers for tests of the kernels: difficult cases for vectors, formats and float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from oracle import codec_kernels as reference

core = pytest.importorskip("commlayer._core", reason="built without the native core")

SIZES = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 1000, 4095, 4096, 4097)

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 1.2e-38, 6e-8, 5.96e-8, 2.98e-8, 6.1e-5, 65504.0, 65519.9, 65520.0, 1e-7]
    + [3.4028235e38, -3.4028235e38, 3.3895314e38, 3.4e38, 0.5, 1.5, 2.5, 127.0, 127.5, 1 / 3],
    dtype=np.float32,
)
NOT_FINITE = np.array([np.nan, -np.nan, np.inf, -np.inf], dtype=np.float32)


@contextlib.contextmanager
def portable(on: bool) -> Iterator[None]:
    """Within it the portable bodies run, or those that the CPU allows."""
    before = core.force_portable(on)
    try:
        yield
    finally:
        core.force_portable(before)


def numbers(n: int, seed: int, *, kind: str = "normal") -> np.ndarray:
    """n float32: "normal", "special" (finite extremes among them), "wild" (non-finite too), "equal", "spike" or "tiny"."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n).astype(np.float32)
    if kind == "equal":
        x[:] = rng.standard_normal()
    elif kind == "spike":
        x[:] = 0
        x[n // 2 : n // 2 + 1] = 3.0
    elif kind == "tiny":
        x *= np.float32(1e-36)  # around where the scale of int8 would stop being a normal number
    elif kind in ("special", "wild"):
        pool = SPECIAL if kind == "special" else np.concatenate([SPECIAL, NOT_FINITE])
        some = rng.random(n) < (0.5 if kind == "special" else 0.05)
        x[some] = rng.choice(pool, int(some.sum()))
    return x


KINDS = ("normal", "special", "wild", "equal", "spike", "tiny")


def positions(n: int, k: int, seed: int) -> np.ndarray:
    return np.sort(np.random.default_rng(seed).choice(n, k, replace=False)).astype(np.uint32) if k else np.empty(0, np.uint32)


def unaligned(nbytes: int, shift: int, fill: int = 0xA5) -> tuple[memoryview, bytearray]:
    """A writable view `shift` bytes into memory with guard bytes on both sides."""
    full = bytearray([fill]) * (nbytes + shift + 16)
    return memoryview(full)[shift : shift + nbytes], full


def bits(x: np.ndarray) -> bytes:
    """The bytes of x with every NaN made the same: which NaN comes out is left open."""
    y = x.copy()
    y[np.isnan(y)] = np.nan
    return y.tobytes()


def same(run: Callable[[ModuleType], object], *, threads: bool = True) -> Any:
    """What run(module) gives for the vector bodies, after checking that the other bodies and several threads give the same."""
    with portable(False):
        vector = run(core)
        try:
            for count, grain in ((2, 1), (3, 64), (16, 200)) if threads else ():
                core.threads(count, grain)
                assert run(core) == vector, f"{count} threads, {grain} elements each"
        finally:
            core.threads(1, 1)
    with portable(True):
        assert core.isa() == "portable"
        plain = run(core)
    assert vector == plain, "vector body and portable body differ"
    assert run(reference) == vector, "reference and native differ"
    return vector

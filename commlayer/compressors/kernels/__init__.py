"""Kernels of codecs, the choice of their backend, and the memory they work on.

On the host, arrays are numpy arrays and payload bytes are memoryviews of any alignment. On a CUDA device both are torch
tensors. Arrays are float32 or int32, contiguous and one-dimensional. `of(memory)` returns the kernels for some memory: on a
CUDA device those of cuda.py, on the host the native core, or fallback.py if it is not built. All have the same names, arguments
and results, and produce the same bytes; sum_squares is on the host only. native/include/commlayer.h specifies each kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import mmap
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from commlayer import native
from commlayer.codec_spec import CodecSpec
from commlayer.compressors.kernels import fallback
from commlayer.compressors.payload import Buffer, on_device
from commlayer.errors import InvalidInput

Array: TypeAlias = Any
"""A numpy array on the host, or a torch tensor on a CUDA device. Codecs use only what both have."""

MOST_SCALE = np.finfo(np.float32).max / np.float32(128)
"""Largest scale for which every int8 number times the scale is finite."""

MOST = {
    "fp16": float(np.finfo(np.float16).max),
    "bf16": float(np.uint32(0x7F7F << 16).view(np.float32)),
    "fp32": float(np.finfo(np.float32).max),
}
"""Largest finite number of each format."""

GRAIN = 1 << 18
"""Minimum number of elements per thread, since starting a thread takes about 20 us."""

BACKENDS: Mapping[str, ModuleType] = {"fallback": fallback} | ({} if native.core is None else {"native": native.core})

_chosen: list[ModuleType] = [native.core or fallback]


def choose(backend: str) -> None:
    """Sets the host's backend of this process: "fallback", "native", or "auto" for the fastest available."""
    if backend not in ("auto", *BACKENDS):
        raise InvalidInput("E-CODEC-BACKEND", f"backend: got {backend!r}, available: {', '.join(BACKENDS)}")
    _chosen[0] = (native.core or fallback) if backend == "auto" else BACKENDS[backend]


@contextlib.contextmanager
def use(backend: ModuleType) -> Iterator[None]:
    """Context manager that sets the host's backend. For tests and measurements."""
    before, _chosen[0] = _chosen[0], backend
    try:
        yield
    finally:
        _chosen[0] = before


def check_supported(spec: CodecSpec) -> None:
    """Raises InvalidInput if the host's backend has no kernels for this codec. The inner codec is not checked."""
    if _chosen[0] is fallback and (spec.family not in fallback.FAMILIES or spec.get("values") == "int4"):
        raise fallback.unsupported(f"codec {spec}")


def threads(count: int) -> None:
    """Lets up to `count` threads share a native call on a large bucket. Results do not depend on the number of threads."""
    if native.core is not None:
        native.core.threads(count, GRAIN)


def host() -> ModuleType:
    """Returns the host's kernels."""
    return _chosen[0]


def of(memory: Array | Buffer) -> ModuleType:
    """Returns the kernels for an array or a payload."""
    return device() if on_device(memory) and device().has_kernels_for(memory.device) else _chosen[0]


@functools.cache
def device() -> ModuleType:
    """Returns the kernels for CUDA. Loads torch."""
    return importlib.import_module("commlayer.compressors.kernels.cuda")


LEAST_NBYTES = 1 << 16
"""Buffers smaller than this are allocated and freed normally, since a system call would cost more than it saves."""


def fresh_zeros(count: int) -> Array:
    """Returns float32 zeros in host memory whose pages are allocated at the first write and returned to the system when
    freed."""
    if 4 * count < LEAST_NBYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros(count, np.float32)
    return np.frombuffer(mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.float32, count)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def give_back(array: Array) -> None:
    """Returns the complete pages inside a contiguous numpy array to the system; the addresses stay valid. An element reads as
    zero or as its old value until the next write."""
    if sys.platform != "linux" or array.nbytes < LEAST_NBYTES:
        return
    low = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (array.ctypes.data + array.nbytes - low) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(ctypes.c_void_p(low), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def to_host(array: Array) -> Array:
    """Returns a numpy array of any array: the same memory on the host, a copy of a device's memory."""
    return array.detach().cpu().numpy() if on_device(array) else array


def empty(count: int, like: Array | Buffer, dtype: type[np.float32] | type[np.int32] = np.float32) -> Array:
    """Allocates an array on the device of `like`."""
    return device().empty(count, like, dtype) if of(like) is not _chosen[0] else np.empty(count, dtype)


def copy_f32(dst: Array, src: Buffer) -> None:
    """Copies the float32 numbers in the bytes `src` to `dst`."""
    if on_device(src):
        device().copy_f32(dst, src)
    else:
        to_host(dst)[:] = np.frombuffer(src, np.float32)


def store_f32(dst: Buffer, src: Array) -> None:
    """Writes the float32 numbers of `src` as bytes. Does nothing if `dst` is the memory of `src`."""
    if on_device(dst):
        device().store_f32(dst, src)
    else:
        np.copyto(np.frombuffer(dst, np.float32), to_host(src))  # numpy copies nothing if both have the same address


def largest(src: Buffer) -> int:
    """Returns the largest of the unsigned numbers of 16 bits in `src`; 0 if there are none."""
    return int(device().largest(src) if on_device(src) else np.maximum.reduce(np.frombuffer(src, np.uint16), initial=0))


def scales_valid(src: Buffer, most: np.floating[Any] = MOST_SCALE) -> bool:
    """Returns True if every float32 scale in `src` is from 0 to `most`."""
    if on_device(src):
        return bool(device().scales_within(src, float(most)))
    scales = np.frombuffer(src, np.float32)
    return scales.size == 0 or bool(scales.min() >= 0 and scales.max() <= most)


def add_finite(residual: Array, x: Array) -> bool:
    """Adds x to the residual where the sum is finite. Returns True if all sums are finite."""
    nothing = empty(0, residual, np.int32), empty(0, residual)
    return bool(of(residual).select(x, residual, np.inf, 0, *nothing)[2])

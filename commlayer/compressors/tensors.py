"""The module that codecs import as `torch`: torch itself, or numpy_tensors.py in a server's process, which runs without torch.

Loading torch takes 1.5 to 3 s and 200 MB. A server needs only arrays from it, since its kernels are native. Codecs import this
module as `torch` and use none of its names at import time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import mmap
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

LEAST_NBYTES = 1 << 16
"""Buffers smaller than this are allocated and freed normally, since a system call would cost more than it saves."""
_chosen = "torch"
real = True
"""Whether the module in use is torch, not numpy_tensors."""
_handed: set[str] = set()
"""Names that were copied into this module's globals, so later accesses are fast."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = getattr(library(), name)
    globals()[name] = value
    _handed.add(name)
    return value


def library() -> ModuleType:
    return importlib.import_module(_chosen)


def fresh_zeros(count: int) -> Any:
    """Returns float32 zeros whose memory is allocated only when written, and returned to the system when freed. torch.zeros, in
    contrast, writes each page at once."""
    if 4 * count < LEAST_NBYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return library().zeros(count)
    fresh = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return library().from_numpy(np.frombuffer(fresh, np.float32, count))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def give_back(buffer: Any) -> None:
    """Returns the complete pages inside a contiguous CPU buffer to the system; the addresses stay valid. Until it is written
    again, each element reads as zero or as its old value."""
    if sys.platform != "linux" or buffer.nbytes < LEAST_NBYTES or buffer.device.type != "cpu" or (real and buffer.is_pinned()):
        return
    low = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (buffer.data_ptr() + buffer.nbytes - low) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(ctypes.c_void_p(low), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def without_torch() -> None:
    """Makes the codecs of this process use numpy_tensors.py from now on. For a process that never uses tensors of torch."""
    # Codecs check for non-finite values themselves, so numpy's warnings are not needed.
    warnings.filterwarnings("ignore", r"(overflow|invalid value) encountered", RuntimeWarning)
    _choose(f"{__package__}.numpy_tensors")


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Context manager in which codecs use numpy_tensors.py. For tests."""
    before = _chosen
    without_torch()
    try:
        yield
    finally:
        _choose(before)


def _choose(name: str) -> None:
    global _chosen, real
    _chosen, real = name, name == "torch"
    for handed in _handed:
        del globals()[handed]
    _handed.clear()

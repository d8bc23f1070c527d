"""What codecs import as `torch`: torch itself, or numpy_tensors.py in a server's process, which runs without torch.

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
"""Below this an ordinary allocation is as good, and a system call is not worth its time."""
_chosen = "torch"
real = True
"""Whether the library is torch."""
_handed: set[str] = set()
"""Names copied into this module's globals, so that later accesses cost nothing."""


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
    """float32 zeros that take no memory and no time until written, and whose memory returns to the system when freed.

    torch.zeros, in contrast, touches each page at once.
    """
    if 4 * count < LEAST_NBYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return library().zeros(count)
    fresh = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return library().from_numpy(np.frombuffer(fresh, np.float32, count))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def give_back(buffer: Any) -> None:
    """Returns the whole pages inside a contiguous host buffer to the system; the addresses stay valid.

    Until written, each element reads as zero or as its old value.
    """
    if sys.platform != "linux" or buffer.nbytes < LEAST_NBYTES or buffer.device.type != "cpu" or (real and buffer.is_pinned()):
        return
    low = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (buffer.data_ptr() + buffer.nbytes - low) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(ctypes.c_void_p(low), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def without_torch() -> None:
    """From now on codecs of this process use numpy_tensors.py. For a process that never uses tensors of torch."""
    # Codecs check for non-finite values themselves; numpy would warn of each.
    warnings.filterwarnings("ignore", r"(overflow|invalid value) encountered", RuntimeWarning)
    _choose(f"{__package__}.numpy_tensors")


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """`without_torch` inside a with block. For tests."""
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

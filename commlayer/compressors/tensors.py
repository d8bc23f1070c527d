"""What codecs take for torch: torch itself, or in a server's process, which does without it, numpy_tensors.py. Knows no codec.

Loading torch takes a processor 1.5 to 3 s and 200 MB, and all that a server wants of it are arrays: its kernels are native. So
codecs import this module under the name of torch, and nothing of it when they are imported.
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
"""Below that an allocator is as good, and a system call not worth its time."""
_chosen = "torch"
real = True
"""Whether it is torch."""
_handed: set[str] = set()
"""Names that lie among this module's own by now, where the next look finds them at no cost."""


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
    """float32 zeros that take no memory and no time until they are written, and give it back to the system when they are freed.
    torch.zeros touches each page at once."""
    if 4 * count < LEAST_NBYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return library().zeros(count)
    fresh = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return library().from_numpy(np.frombuffer(fresh, np.float32, count))


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def give_back(buffer: Any) -> None:
    """The whole pages inside a contiguous buffer on the host go back to the system, at the same addresses. Its elements are
    zeros, or what they were, until written."""
    if sys.platform != "linux" or buffer.nbytes < LEAST_NBYTES or buffer.device.type != "cpu" or (real and buffer.is_pinned()):
        return
    low = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (buffer.data_ptr() + buffer.nbytes - low) // mmap.PAGESIZE * mmap.PAGESIZE
    _libc().madvise(ctypes.c_void_p(low), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def without_torch() -> None:
    """From now on codecs of this process take and give numpy_tensors.py's: for one that never sees a tensor of torch."""
    # Codecs look for themselves at what is not finite; numpy would tell the user of each.
    warnings.filterwarnings("ignore", r"(overflow|invalid value) encountered", RuntimeWarning)
    _choose(f"{__package__}.numpy_tensors")


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """The same within it. For tests."""
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

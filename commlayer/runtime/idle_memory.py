"""Gives memory that nobody reads until it is written again back to the system, at the same addresses."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys

import torch

LEAST_NBYTES = 1 << 16
"""A buffer below that is not worth a system call."""


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def give_back(buffer: torch.Tensor) -> None:
    """The whole pages inside a contiguous buffer on the host. Its elements are zeros, or what they were, until written."""
    if buffer.nbytes < LEAST_NBYTES:
        return
    low = -(-buffer.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (buffer.data_ptr() + buffer.nbytes - low) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and buffer.device.type == "cpu" and nbytes >= LEAST_NBYTES and not buffer.is_pinned():
        _libc().madvise(ctypes.c_void_p(low), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def trim() -> None:
    """What was freed, and the allocator still holds. After a change of plans: it takes a few milliseconds."""
    if sys.platform == "linux" and hasattr(_libc(), "malloc_trim"):  # glibc has it, musl does not
        _libc().malloc_trim(ctypes.c_size_t(0))

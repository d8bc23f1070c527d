"""Returns freed memory from the allocator to the system."""

from __future__ import annotations

import ctypes
import sys


def trim() -> None:
    """Takes a few milliseconds; called after a change of plan."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc has it, musl does not
        libc.malloc_trim(ctypes.c_size_t(0))

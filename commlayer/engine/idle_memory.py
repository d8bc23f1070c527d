"""What the allocator holds goes back to the system."""

from __future__ import annotations

import ctypes
import sys


def trim() -> None:
    """What was freed, and the allocator still holds. After a change of plans: it takes a few milliseconds."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc has it, musl does not
        libc.malloc_trim(ctypes.c_size_t(0))

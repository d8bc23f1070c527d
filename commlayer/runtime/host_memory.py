"""Memory on the host for codecs: on boundaries of 64 bytes, and pinned where a device copies from it. Knows no buckets."""

from __future__ import annotations

import torch

ALIGN = 64


def aligned(lead: int, nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Room for `lead` bytes and then so many, those on a 64-byte boundary."""
    raw = torch.empty(ALIGN + lead + nbytes + ALIGN, dtype=torch.uint8, pin_memory=pinned)
    skip = -(raw.data_ptr() + lead) % ALIGN
    return raw[skip : skip + lead + nbytes]

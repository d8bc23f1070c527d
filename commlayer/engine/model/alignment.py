"""Copies one rank's parameters and buffers to all ranks, sending only tensors that differ."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from commlayer.cluster.processes.collectives import Groups
from commlayer.transport.crc import crc32c


def fingerprint(tensor: torch.Tensor) -> int:
    """Returns the CRC-32C of a tensor's elements in logical order. It is not secure against attackers, but ten times as fast as
    SHA-256."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return crc32c(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


PIECE_NUMEL = 4 << 20
"""Number of elements per broadcast. Each broadcast has its own deadline, because a large model can take long over a slow link.
"""


def align(tensors: Sequence[torch.Tensor], groups: Groups, deadline_s: float, source: int = 0) -> list[int]:
    """Overwrites tensors that differ between ranks with the values of rank `source`. Returns the numbers of these tensors."""
    if not tensors:
        return []
    device = tensors[0].device
    rows = groups.gather_all(torch.tensor([fingerprint(t) for t in tensors], dtype=torch.int64, device=device))
    differing: list[int] = (rows != rows[source]).any(dim=0).nonzero().view(-1).tolist()
    for number in differing:
        tensor = tensors[number].detach()
        contiguous = tensor.contiguous()
        for piece in contiguous.view(-1).split(PIECE_NUMEL):
            groups.broadcast_all(piece, source).wait(time.monotonic() + deadline_s)
        if contiguous.data_ptr() != tensor.data_ptr():
            tensor.copy_(contiguous)
    return differing

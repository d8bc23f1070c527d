"""Copies one rank's parameters and buffers to all ranks, sending only tensors that differ."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from commlayer.cluster.processes.collectives import Groups
from commlayer.engine.model.shard_parameters import is_sharded, local_of
from commlayer.planner.shards import Shards
from commlayer.transport.crc import crc32c


def fingerprint(tensor: torch.Tensor) -> int:
    """Returns the CRC-32C of a tensor's elements in logical order. It is not secure against attackers, but ten times as fast as
    SHA-256."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return crc32c(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


PIECE_NUMEL = 4 << 20
"""Number of elements per broadcast. Each broadcast has its own deadline, because a large model can take long over a slow link.
"""


def align(
    tensors: Sequence[torch.Tensor], groups: Groups, deadline_s: float, source: int = 0, shards: Shards = Shards(),
) -> list[int]:
    """Overwrites tensors that differ between ranks with the values of rank `source`. Returns the numbers of these tensors. Of a
    sharded tensor (a DTensor), each rank gets its shard from the first site."""
    if not tensors:
        return []
    own = [local_of(tensor).detach() for tensor in tensors]
    rows = groups.gather_all(torch.tensor([fingerprint(t) for t in own], dtype=torch.int64, device=own[0].device))
    wanted = [rows[torch.arange(len(rows)) % shards.ranks, n] if is_sharded(tensor) else rows[source, n]
              for n, tensor in enumerate(tensors)]
    differing = [n for n, values in enumerate(wanted) if bool((rows[:, n] != values).any())]
    for number in differing:
        for rank in range(shards.ranks) if is_sharded(tensors[number]) else [source]:
            _copy(own[number], tensors[number], groups, deadline_s, rank, shards)
    return differing


def _copy(own: torch.Tensor, tensor: torch.Tensor, groups: Groups, deadline_s: float, rank: int, shards: Shards) -> None:
    """Copies a tensor, or its shard on `rank`, from that rank to all ranks that need it. All ranks take part."""
    mine = not is_sharded(tensor) or shards.local == rank
    start, end = shards.elements(tensor.shape, rank) if is_sharded(tensor) else (0, tensor.numel())
    contiguous = own.contiguous() if mine else own.new_empty(end - start)
    for piece in contiguous.view(-1).split(PIECE_NUMEL) if contiguous.numel() else ():
        groups.broadcast_all(piece, rank).wait(time.monotonic() + deadline_s)
    if mine and contiguous.data_ptr() != own.data_ptr():
        own.copy_(contiguous)

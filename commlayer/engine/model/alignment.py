"""Copies one rank's parameters and buffers to all ranks, sending only tensors that differ."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from commlayer.cluster.processes.collectives import Groups
from commlayer.engine.model.shard_parameters import TensorPart, comparable_parts, is_sharded, local_elements
from commlayer.errors import InvalidInput
from commlayer.planner.shards import Shards
from commlayer.records import Job, chunk_with
from commlayer.transport.crc import crc32c


def fingerprint(tensor: torch.Tensor) -> int:
    """Returns the CRC-32C of a tensor's elements in logical order. The digest is not secure against attackers, but ten times as
    fast as SHA-256."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return crc32c(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


PIECE_NUMEL = 4 << 20
"""Number of elements per broadcast. Each broadcast has its own deadline, because a large model can take long over a slow link.
"""


def agreed_shards(own: Shards, job: Job, groups: Groups) -> Shards:
    """Returns how this rank shares the job's model with its site: a site of one rank may have whole tensors. All ranks call it
    together. Raises ValueError if sites shard other tensors."""
    flags = groups.gather_all(torch.tensor([n in own.tensors for n in range(len(job.tensors))], dtype=torch.int64,
                                           device=groups.device))
    kinds = {frozenset(n for n, flag in enumerate(row) if flag) for row in flags.tolist()} - {frozenset()}
    if len(kinds) > 1:
        raise InvalidInput("E-SHARDED", f"sites shard {' and '.join(str(len(kind)) for kind in kinds)} of the "
                                        f"{len(job.tensors)} tensors, but all must shard the same ones")
    return own or Shards(1, 0, *kinds)


def align(
    tensors: Sequence[torch.Tensor], groups: Groups, deadline_s: float, source: int = 0, shards: Shards = Shards(),
) -> list[int]:
    """Overwrites tensors that differ between ranks with the values of rank `source`. Returns the numbers of these tensors. Of a
    sharded tensor (a DTensor), each rank gets its shard from the first site."""
    if not tensors:
        return []
    own = [local_elements(tensor).detach() for tensor in tensors]
    sharded = set[int]()
    if shards:  # a site of one rank may have whole tensors
        flags = groups.gather_all(torch.tensor([*map(is_sharded, tensors)], dtype=torch.int64, device=groups.device))
        sharded = {n for n, flag in enumerate(flags.any(0).tolist()) if flag}
    parts = comparable_parts(tensors, sharded, groups.sites)
    held = [part.own_piece(own[part.tensor], shards) for part in parts]
    prints = [-1 if x is None else fingerprint(x) for x in held]
    rows = groups.gather_all(torch.tensor(prints, dtype=torch.int64, device=groups.device))
    differing = set()
    for part, mine, values in zip(parts, held, rows.T, strict=True):
        site = groups.sites[0]
        holder = site[chunk_with(part.first, part.rows, len(site))] if part.rows else source
        if bool(((values != values[holder]) & (values >= 0)).any()):
            differing.add(part.tensor)
            _copy(mine, part, tensors[part.tensor], groups, deadline_s, holder)
    return sorted(differing)


def _copy(mine: torch.Tensor | None, part: TensorPart, like: torch.Tensor, groups: Groups, deadline_s: float,
          holder: int) -> None:
    """Copies a part of a tensor from rank `holder` to all ranks that have it. All ranks take part."""
    sent = local_elements(like).new_empty((part.end - part.first, *like.shape[1:])) if mine is None else mine.contiguous()
    for piece in sent.view(-1).split(PIECE_NUMEL) if sent.numel() else ():
        groups.broadcast_all(piece, holder).wait(time.monotonic() + deadline_s)
    if mine is not None and sent.data_ptr() != mine.data_ptr():
        mine.copy_(sent)

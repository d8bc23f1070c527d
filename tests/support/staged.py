"""Gradients and plans of two nodes of two ranks."""

from __future__ import annotations

import torch

from commlayer.records import Bucket, Plan, Slice
from support.workers import job

WORLD, PER_NODE = 4, 2
SHAPES: list[tuple[int, ...]] = [(64, 33), (64,), (5, 3, 3, 3), (1,), (3,), (4001,), (7,)]


def plan(text: str, codec: str) -> Plan:
    """Three buckets: several tensors, a part of one, the rest."""
    result = job(SHAPES)
    slices = [tuple(Slice(t, 0, result.tensors[t].numel) for t in (6, 4, 3, 2)), (Slice(5, 0, 1500),),
              (Slice(5, 1500, 4001), Slice(1, 0, 64)), (Slice(0, 0, 64 * 33),)]
    buckets = tuple(Bucket(i, s, text, codec, owner=i % PER_NODE) for i, s in enumerate(slices))
    return Plan(result.digest(), buckets, ranks_per_node=PER_NODE)


def gradients(rank: int, number: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    results: list[torch.Tensor | None] = [torch.randn(shape, generator=generator) for shape in SHAPES]
    results[3] = None if rank == 1 else results[3]
    results[6] = None
    return results

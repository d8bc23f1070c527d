"""Sums inside a node and results handed on, bucket by bucket and as shards: the plain sums, on four ranks over Gloo."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.rank_pool import pool
from support.workers import job
from torch.distributed import distributed_c10d

from commlayer.cluster.collectives import Groups
from commlayer.compressors import codec_of
from commlayer.engine.buckets import bucket_of
from commlayer.engine.paths.node import ShardedSum, node_sums
from commlayer.records import Bucket, Slice

RANKS = 4


def planned(numel: int, owners: list[int]) -> list[Bucket]:
    edges = [numel * i // len(owners) for i in range(len(owners) + 1)]
    return [Bucket(i, (Slice(0, edges[i], edges[i + 1]),), "service", codec="topk(ratio=0.5)", owner=owner)
            for i, owner in enumerate(owners)]


def through(rank: int, numel: int, owners: list[int]) -> dict[str, Any]:
    """Rounds of: ranks 1, 2, 3 and 4 added up, its owner's result the sum times ten, weight and used with it."""
    groups, seen = Groups(RANKS, 30.0, torch.device("cpu")), []
    cpu, tensors = torch.device("cpu"), job([(numel,)])
    buckets: list[Any] = [bucket_of(b, tensors, codec_of(b, 0), cpu, 0, local=rank, rank=rank) for b in planned(numel, owners)]
    ones = node_sums(buckets, RANKS, rank)
    try:
        for _ in range(3):
            for one in ones:
                for bucket in one.buckets:
                    bucket.x.fill_(rank + 1.0)
                    bucket.exchange.used, bucket.exchange.weight = int(rank == 2), 0.5
                    bucket.write_tail(bucket.memory.tail)
                one.reduce(groups.inside.out)
                one.reduced(time.monotonic() + 20.0, lambda: None)
                if (mine := one.mine) is not None:
                    mine.y.copy_(mine.x * 10)
                    mine.read_sum()
                    mine.write_tail(mine.memory.tail_y)
                one.distribute(groups.inside.back).wait(time.monotonic() + 20.0)
                for bucket in one.buckets:
                    if bucket is not mine:
                        bucket.read_result()
            seen.append(torch.cat([bucket.y for bucket in buckets]).clone())
        return {"seen": seen, "weights": [b.exchange.weight for b in buckets], "used": [b.exchange.used for b in buckets],
                "shards": [isinstance(one, ShardedSum) for one in ones]}
    finally:
        groups.close()


@pytest.mark.parametrize("numel", [4, 7, 1001])
@pytest.mark.parametrize(("owners", "shards"), [([0, 1, 2, 3], [True]), ([2, 0], [False, False])], ids=["shards", "owners"])
def test_every_rank_gets_what_the_owners_made_of_the_sums(numel: int, owners: list[int], shards: list[bool]) -> None:
    for result in pool(RANKS).call(through, numel, owners):
        assert result["shards"] == shards
        assert all(torch.equal(y, torch.full((numel,), 100.0)) for y in result["seen"])
        assert result["weights"] == [2.0] * len(owners)
        assert result["used"] == [1] * len(owners)


def told(rank: int, key: str) -> bool:
    """Whether this rank has not heard of a result that its owner does not have, where collectives run on GPUs."""
    groups = Groups(RANKS, 30.0, torch.device("cuda"))
    ready = groups.inside.ready
    assert ready is not None
    try:
        store = distributed_c10d._get_default_store()
        if rank == 1:
            store.wait([f"{key} {other}" for other in (0, 2, 3)])
        pending = ready.allreduce(torch.zeros(1))
        early = rank != 1 and pending.is_over()
        store.set(f"{key} {rank}", b"")
        pending.wait(time.monotonic() + 20.0)
        return not early
    finally:
        groups.close()


def test_on_gpus_nobody_begins_before_the_owner_has_the_result() -> None:
    assert pool(RANKS).call(told, f"told {time.time_ns()}") == [True] * RANKS


def crosswise(rank: int, key: str) -> bool:
    """Whether what the owner told of a late result was not taken for word of one that is in time."""
    groups = Groups(RANKS, 30.0, torch.device("cuda"))
    ready, late = groups.inside.ready, groups.inside.late_ready
    assert ready is not None
    assert late is not None
    store, until = distributed_c10d._get_default_store(), time.monotonic() + 20.0
    try:
        if rank == 1:
            lines = late.allreduce(torch.zeros(1))
            time.sleep(0.3)
            store.set(key, b"")
            ready.allreduce(torch.zeros(1)).wait(until)
            good = True
        else:
            ready.allreduce(torch.zeros(1)).wait(until)
            good = store.check([key])
            lines = late.allreduce(torch.zeros(1))
        lines.wait(until)
        return good
    finally:
        groups.close()


def test_on_gpus_late_results_and_others_are_told_apart_in_whatever_order() -> None:
    assert pool(RANKS).call(crosswise, f"crosswise {time.time_ns()}") == [True] * RANKS

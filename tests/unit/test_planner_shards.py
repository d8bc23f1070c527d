"""Which buckets of a plan go through a node as one, and how a bucket is cut so that they do."""

from __future__ import annotations

import pytest

from commlayer.planner.plan_rules import cut, together
from commlayer.records import Bucket, Slice

Shard = tuple[int, int, int, int]
"""Owner, tensor, start, stop."""


def buckets(*shards: Shard) -> list[Bucket]:
    return [Bucket(i, (Slice(tensor, start, stop),), "service", owner=owner)
            for i, (owner, tensor, start, stop) in enumerate(shards)]


@pytest.mark.parametrize(("shards", "runs"), [
    ([(0, 0, 0, 5), (1, 0, 5, 10)], [(0, 1)]),
    ([(0, 0, 0, 5), (1, 0, 5, 11), (0, 0, 11, 16), (1, 0, 16, 21)], [(0, 1), (2, 3)]),
    ([(1, 0, 0, 5), (0, 0, 5, 10), (1, 0, 10, 15)], [(0,), (1, 2)]),
    ([(0, 0, 0, 5), (1, 1, 0, 5)], [(0,), (1,)]),
    ([(0, 0, 0, 5), (1, 0, 6, 11)], [(0,), (1,)]),
    ([(0, 0, 0, 5), (1, 0, 5, 12)], [(0,), (1,)]),
    ([(0, 0, 0, 5)], [(0,)]),
], ids=["two halves", "twice", "owners one after the other, from 0", "two tensors", "a gap", "unlike sizes", "one alone"])
def test_shards_stand_side_by_side_and_continue_one_another(shards: list[Shard], runs: list[tuple[int, ...]]) -> None:
    assert [tuple(run) for run in together(buckets(*shards), 2)] == runs


def test_where_a_node_has_one_rank_every_bucket_is_alone() -> None:
    assert [*map(len, together(buckets((0, 0, 0, 5), (0, 0, 5, 10)), 1))] == [1, 1]


def test_a_fused_bucket_is_cut_into_runs_of_one_size() -> None:
    parts = cut((Slice(3, 0, 4), Slice(2, 10, 17)), 3)
    assert parts == [(Slice(3, 0, 3),), (Slice(3, 3, 4), Slice(2, 10, 13)), (Slice(2, 13, 17),)]
    results = [Bucket(i, part, "service", owner=i) for i, part in enumerate(parts)]
    assert [*map(len, together(results, 3))] == [3]

"""Plans that are cut where shards of a site's ranks end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.planner import default_plan, verify
from commlayer.planner.shards import Shards
from commlayer.records import Job, Plan, TensorInfo

JOB = Job((TensorInfo("weight", (50, 40)), TensorInfo("bias", (7,)), TensorInfo("scale", (3,)), TensorInfo("one", (1, 4)),
           TensorInfo("mean", (4,), buffer=True)))
SHARDED = frozenset({0, 1, 3})


def plan(codec: str = "int8()", path: str = "service", ranks: int = 2) -> Plan:
    return default_plan(JOB, codec=codec, path=path, servers=1, ranks_per_node=ranks, fuse_nbytes=2048, cut_nbytes=4096)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("path", ["service", "allreduce"])
def test_each_bucket_has_elements_of_one_rank(ranks: int, path: str) -> None:
    shards = Shards(ranks, 0, SHARDED)
    cut = shards.cut(plan(path=path), JOB)
    assert verify(cut, JOB) == []
    assert shards.cut(cut, JOB) == cut
    held = [Shards(ranks, local, SHARDED).own_bucket(bucket, JOB) for bucket in cut.buckets for local in range(ranks)]
    sharded = [bucket for bucket in held if bucket is not None and bucket.slices[0].tensor in SHARDED]
    assert sum(bucket.numel for bucket in sharded) == sum(JOB.tensors[tensor].numel for tensor in SHARDED)
    assert all(0 <= s.start < s.stop for bucket in sharded for s in bucket.slices)
    for bucket in cut.buckets:
        assert len({s.tensor in SHARDED for s in bucket.slices}) == 1
        assert bucket.served or bucket.slices[0].tensor not in SHARDED


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3)), min_size=1, max_size=4),
       st.sets(st.integers(1, 9), min_size=1, max_size=4))
def test_each_bucket_has_one_owner_in_sites_of_each_size(shapes: list[tuple[int, int]], sizes: set[int]) -> None:
    job = Job(tuple(TensorInfo(str(number), shape) for number, shape in enumerate(shapes)))
    tensors = frozenset(range(len(shapes)))
    made = default_plan(job, codec="int8()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=64, cut_nbytes=128)
    cut = Shards(min(sizes), 0, tensors).cut(made, job, sizes)
    assert verify(cut, job) == []  # each element is in one bucket
    assert Shards(max(sizes), 0, tensors).cut(cut, job, sizes) == cut
    for ranks in sizes:
        for bucket in cut.buckets:
            owner = bucket.owner_in(range(ranks))
            for s in bucket.slices:
                first, end = Shards(ranks).elements(job.tensors[s.tensor].shape, owner)
                assert first <= s.start < s.stop <= end


def test_shapes_are_those_of_the_shards() -> None:
    cut = Shards(2, 0, SHARDED).cut(plan("error_feedback(powersgd(rank=1))"), JOB)
    for bucket in cut.buckets:
        if {s.tensor for s in bucket.slices} == {0}:
            assert bucket.shape == (bucket.numel // 40, 40)


def test_paths_and_delays_without_shards_are_refused() -> None:
    for change in ({"stale": True}, {"path": "encode@cpu net.allgather decode@cpu"}):
        base = plan()
        other = structs.replace(base, buckets=tuple(structs.replace(b, **change) for b in base.buckets))
        with pytest.raises(InvalidInput, match="E-PLAN-REFUSED"):
            Shards(2, 0, SHARDED).cut(other, JOB)


def test_whole_models_keep_their_plans() -> None:
    assert Shards().cut(plan(), JOB) == plan()


def test_home_joins_if_no_bucket_crosses_its_shards() -> None:
    cut = Shards(4, 0, SHARDED).cut(plan(), JOB, {4, 2})
    assert [ranks for ranks in range(1, 9) if Shards(ranks, 0, SHARDED).fits(cut, JOB, ranks)] == [1, 2, 4]
    assert Shards(2, 1, SHARDED).joining(cut, JOB, 2) == Shards(2, 1, SHARDED)
    assert Shards().joining(cut, JOB, 1) == Shards(1, 0, SHARDED), "a home of one rank may have whole tensors"
    assert not Shards().joining(plan(), JOB, 2)
    for own, running, ranks in ((Shards(3, 0, SHARDED), cut, 3), (Shards(), cut, 2), (Shards(2, 0, SHARDED), plan(), 2)):
        with pytest.raises(InvalidInput, match="E-SHARDED"):
            own.joining(running, JOB, ranks)

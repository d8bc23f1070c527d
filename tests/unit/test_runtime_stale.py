"""Results that are a step late, over loopback: the numbers of the step before, nothing lost, and no wait for the others."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch
from support.workers import Rig, job, on_ranks, step

from commlayer.engine.plan_choice import unsuited
from commlayer.errors import DeadlineExceeded
from commlayer.planner import default_plan
from commlayer.records import Plan

WORLD, STEPS = 3, 6
CODECS = ["identity()", "int8(block=64)", "topk(ratio=0.1)", "qsgd(levels=7)", "powersgd(rank=2)"]
WHICH = {"none": lambda _: False, "some": lambda b: b % 3 == 1, "all": lambda _: True}


def plan(codec: str, which: str, **changes: object) -> Plan:
    """Small buckets: tensor 0 and tensor 5 are cut, so that they may be late in part."""
    result = default_plan(job(), codec=codec, path="service", servers=2, ranks_per_node=1, fuse_nbytes=2048, cut_nbytes=4096)
    buckets = (msgspec.structs.replace(b, stale=WHICH[which](b.id), **changes) for b in result.buckets)
    return msgspec.structs.replace(result, buckets=tuple(buckets))


def gradients(rank: int, rig: Rig, s: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1000 * s + rank)
    results: list[torch.Tensor | None] = [torch.randn(info.shape, generator=generator) for info in rig.job.tensors]
    if (s + rank) % 3 == 0:
        results[6] = None
    return results


def train(rig: Rig) -> list[list[list[torch.Tensor | None]]]:
    def run(rank: int) -> list[list[torch.Tensor | None]]:
        rows = []
        for s in range(STEPS):
            rig.workers[rank].units.weight = 1.0 + (rank + s) % 3
            rows.append(step(rig.workers[rank], gradients(rank, rig, s)))
        return rows

    results = on_ranks(WORLD, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("codec", CODECS)
def test_a_late_bucket_gives_the_bits_of_the_step_before_and_nothing_in_the_first(codec: str, which: str) -> None:
    with Rig(WORLD, codec, plan=plan(codec, "none")) as rig:
        fresh = train(rig)
    with Rig(WORLD, codec, plan=plan(codec, which)) as rig:
        late, buckets = train(rig), rig.plan.buckets
    assert {b.stale for b in buckets} == {"none": {False}, "some": {False, True}, "all": {True}}[which]
    for bucket in buckets:
        for part in bucket.slices:
            for rank in range(WORLD):
                for s in range(STEPS):
                    expected = fresh[0][s - bucket.stale][part.tensor] if s >= bucket.stale else None
                    got = late[rank][s][part.tensor]
                    if got is None:
                        assert expected is None
                        continue
                    mine = got.view(-1)[part.start : part.stop]
                    wanted = torch.zeros_like(mine) if expected is None else expected.reshape(-1)[part.start : part.stop]
                    assert torch.equal(mine, wanted), (bucket.id, rank, s)
    if which == "all":
        assert all(t is None for t in late[0][0])


@pytest.mark.parametrize("which", ["all", "some"])
def test_a_step_ends_without_the_others_where_all_is_late(which: str) -> None:
    with Rig(2, "identity()", plan=plan("identity()", which)) as rig:
        ended = threading.Event()

        def run(rank: int) -> None:
            if rank == 1 and (not ended.wait(20.0) or which == "some"):
                return
            try:
                step(rig.workers[rank], gradients(rank, rig, 0), deadline_s=20.0 if which == "all" else 0.3)
            finally:
                ended.set()
            step(rig.workers[rank], gradients(rank, rig, 1))

        results = on_ranks(2, run)
    if which == "all":
        assert results == [None, None]
    else:
        assert isinstance(results[0], DeadlineExceeded)


def test_the_one_who_is_missing_is_named_with_the_step_and_what_was_sent_is_given_back() -> None:
    with Rig(2, "topk(ratio=0.1)", plan=plan("topk(ratio=0.1)", "all"), stall_s=0.05) as rig:
        def run(rank: int) -> None:
            step(rig.workers[rank], gradients(rank, rig, 0))
            if rank == 0:
                step(rig.workers[rank], gradients(rank, rig, 1))
                step(rig.workers[rank], gradients(rank, rig, 2), deadline_s=1.0)

        error, _ = on_ranks(2, run)
        assert isinstance(error, DeadlineExceeded)
        assert (error.peer, error.step) == ("worker 1", 1)
        bucket = rig.workers[0].buckets[0]
        put = gradients(0, rig, 0)[bucket.slices[0].tensor]
        (debt,) = [d for d in bucket.ledger.residuals() if d.tensor == bucket.slices[0].tensor]
        span = slice(debt.start, debt.stop)
        assert put is not None
        sent = put.view(-1)[span] - torch.as_tensor(debt.values)
        # A tenth went with step 0; step 1 is abandoned, so the residual is what it was before.
        assert 0 < int((sent.abs() > 1e-6).sum()) <= 0.12 * sent.numel()


@pytest.mark.parametrize("codec", ["identity()", "topk(ratio=0.2)", "int8(block=64)"])
@pytest.mark.parametrize("where", ["fresh", "late"])
def test_a_skipped_step_loses_nothing_of_late_results(codec: str, where: str) -> None:
    """One gradient is not finite. Late results of the steps before and after are applied once, or stay in residuals; those of
    the skipped step are dropped."""
    bad = 2
    result = plan(codec, "some", down="identity()")
    late = {b.id for b in result.buckets if b.stale}
    with Rig(WORLD, codec, plan=result) as rig:
        spoil = next(b.slices[0] for b in result.buckets if (b.id in late) == (where == "late"))

        def run(rank: int) -> tuple[list[list[torch.Tensor | None]], list[torch.Tensor]]:
            worker, got = rig.workers[rank], []
            for s in range(STEPS):
                mine = gradients(rank, rig, s)
                hit = mine[spoil.tensor]
                if s == bad and rank == 1 and hit is not None:
                    hit.view(-1)[spoil.start] = float("inf")
                got.append(step(worker, mine))
            worker.drain()
            used = worker.used()
            last = [torch.zeros(i.shape) if u else None for i, u in zip(rig.job.tensors, used, strict=True)]
            worker.hand_out(last)
            owed = [torch.zeros(info.numel) for info in rig.job.tensors]
            for bucket in worker.buckets:
                for debt in bucket.ledger.residuals():
                    owed[debt.tensor][debt.start : debt.stop] += torch.as_tensor(debt.values)
            return [*got, last], owed

        results = on_ranks(WORLD, run)
        steps = [s for s in range(STEPS + 1) if all(t is None or bool(t.isfinite().all()) for t in results[0][0][s])]
        # The late bucket's own step goes through; the one that would have used its result is skipped, no other.
        skipped = bad if where == "fresh" else bad + 1
        assert steps == [s for s in range(STEPS + 1) if s != skipped]
        for bucket in (b for b in result.buckets if b.id in late):
            for part in bucket.slices:
                put, got = torch.zeros(part.numel), torch.zeros(part.numel)
                for s in range(STEPS):
                    rows = [g.view(-1)[part.start : part.stop] for r in range(WORLD)
                            if (g := gradients(r, rig, s)[part.tensor]) is not None]
                    if s == skipped or (where == "late" and s == bad and bucket.slices[0] == spoil):
                        continue
                    put += sum(rows, torch.zeros(part.numel))
                for s in steps:
                    if (t := results[0][0][s][part.tensor]) is not None:
                        got += WORLD * t.reshape(-1)[part.start : part.stop]
                got += sum(owed[part.tensor][part.start : part.stop] for _, owed in results)
                torch.testing.assert_close(got, put, rtol=1e-3, atol=1e-3)


def test_what_cannot_be_late_is_refused_in_one_line() -> None:
    result = plan("identity()", "some")
    buckets = tuple(msgspec.structs.replace(b, path="allreduce") for b in result.buckets)
    problems = unsuited(msgspec.structs.replace(result, buckets=buckets), 2, 1)
    assert problems
    assert all("path 'allreduce' does not support results that are one step late" in line for line in problems)

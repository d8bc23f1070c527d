"""A gradient's path over loopback: sums, weights, failures, stale results, order. Ranks are threads."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from support.residuals import by_tensor, slices_of
from support.workers import Rig, job, on_ranks, step

from commlayer.cluster.processes.bounded_calls import PendingCollective
from commlayer.compressors import make_codec
from commlayer.engine.buckets.current_step import Arrivals
from commlayer.engine.job.plan_checks import node_problems
from commlayer.engine.paths.lanes import Lane
from commlayer.engine.worker.worker import Worker
from commlayer.errors import CorruptFrame, DeadlineExceeded, PeerLost
from commlayer.planner import default_plan
from commlayer.records import Plan
from commlayer.transport.protocol import Header, Kind

CODECS = ["identity()", "fp16()", "bf16()", "int8(block=64)", "topk(ratio=0.05, values='fp32', exact=False)"]


def gradients(rank: int, rig: Rig, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randn(info.shape, generator=generator) for info in rig.job.tensors]


@pytest.mark.parametrize(("world", "servers"), [(1, 1), (2, 3), (3, 1), (5, 3), (9, 3)])
def test_identity_gives_the_weighted_mean_on_every_rank(world: int, servers: int) -> None:
    with Rig(world, "identity()", servers=servers) as rig:
        def train(rank: int) -> list[list[torch.Tensor | None]]:
            rig.workers[rank].units.weight = float(rank + 1)
            return [step(rig.workers[rank], list(gradients(rank, rig, s))) for s in range(3)]

        results = on_ranks(world, train)
    total = sum(range(1, world + 1))
    for s in range(3):
        for tensor, info in enumerate(rig.job.tensors):
            if not info.numel:
                continue  # nothing to average
            expected = sum((r + 1) / total * gradients(r, rig, s)[tensor] for r in range(world))
            for rank in range(world):
                torch.testing.assert_close(results[rank][s][tensor], expected)
                assert torch.equal(results[rank][s][tensor], results[0][s][tensor])


def test_wait_for_results_returns_without_any_and_after_an_error() -> None:
    arrivals = Arrivals()
    assert arrivals.wait(time.monotonic()), "no step has begun"
    arrivals.expect(1)
    assert not arrivals.wait(time.monotonic())
    arrivals.arrived()
    assert arrivals.wait(time.monotonic())
    arrivals.end()
    arrivals.expect(1)
    assert arrivals.wait(time.monotonic()), "the error was latched before the step began"


def test_layouts() -> None:
    """Channels-last, transposed and bf16 gradients keep their layout."""
    with Rig(2, "identity()", shapes=[(4, 3, 8, 8), (64, 80), (10,)]) as rig:
        def train(rank: int) -> list[torch.Tensor]:
            g = gradients(rank, rig)
            mine = [g[0].to(memory_format=torch.channels_last), g[1].t().contiguous().t(), g[2].bfloat16()]
            worker = rig.workers[rank]
            for tensor, gradient in enumerate(mine):
                worker.ready(tensor, gradient)
            worker.finish([None] * 3, 20.0)
            worker.commit(mine)
            return mine

        results = on_ranks(2, train)
    for tensor in range(3):
        a, b = (gradients(r, rig)[tensor] for r in range(2))
        expected = ((a + b) / 2) if tensor < 2 else ((a.bfloat16().float() + b.bfloat16().float()) / 2).bfloat16()
        torch.testing.assert_close(results[0][tensor], expected)
    assert results[0][0].is_contiguous(memory_format=torch.channels_last)
    assert not results[0][1].is_contiguous()
    assert results[0][2].dtype == torch.bfloat16


def test_non_finite_buffer_is_kept_and_skips_no_step() -> None:
    """The optimizer reads no buffers, so the step is applied; a rollback would apply its gradients twice."""
    with Rig(2, "topk(ratio=0.5, values='fp32', exact=True)", shapes=[(10,), (4,)], buffers=1) as rig:
        def train(rank: int) -> list[torch.Tensor]:
            worker, total = rig.workers[rank], torch.zeros(10)
            mask = torch.tensor([0.0, 1.0, -float("inf"), float("nan")])
            for s in range(6):
                grads = [torch.arange(10.0) if s == 0 else torch.zeros(10), mask]
                worker.ready(0, grads[0])
                worker.finish([None, mask], 20.0)
                worker.commit([grads[0], mask])
                total += grads[0]
            return [total, mask]

        results = on_ranks(2, train)
    for total, mask in results:
        torch.testing.assert_close(total, torch.arange(10.0))
        torch.testing.assert_close(mask, torch.tensor([0.0, 1.0, -float("inf"), float("nan")]), equal_nan=True)


@pytest.mark.parametrize(("place", "own"), [(None, False), *itertools.product((0, 4095, 4096, 89_999), (True, False))])
def test_sum_is_checked_while_it_is_written_over_the_gradient(place: int | None, *, own: bool) -> None:
    """What the gradient has where the sum is not finite still says whether this worker contributed it."""
    shapes = job([(3,), (300, 300), (5, 7)])
    layout = default_plan(shapes, codec="identity()", path="allreduce", servers=0, ranks_per_node=1, fuse_nbytes=0,
                          cut_nbytes=1 << 20)
    alone: Any = SimpleNamespace(world=1, site=[0], local=0, allreduce=lambda _: PendingCollective(None, "", on_device=False))
    worker = Worker(shapes, layout, {b.id: make_codec(b) for b in layout.buckets}, torch.device("cpu"), groups=alone)
    grads = [torch.randn(info.shape) for info in shapes.tensors]
    expected = [grad.clone() for grad in grads]
    if place is not None:
        expected[1].view(-1)[place] = float("inf")
    if own:
        grads = [grad.clone() for grad in expected]
    for tensor, grad in enumerate(grads):
        worker.ready(tensor, grad)
    worker.finish([*grads], 20.0)
    if place is not None:
        slot = [s.tensor for s in worker.buckets[0].slices].index(1)
        worker.buckets[0].memory.views_y[slot].view(-1)[place] = float("inf")  # if not its own, of another worker
    worker.commit(grads)
    assert all(torch.equal(grad, value) for grad, value in zip(grads, expected, strict=True))
    assert worker.not_finite == (1 if own else -1)
    assert worker.spoilt == (set() if place is None else {0, 1, 2})
    worker.close()


def test_gradients_of_zero_samples_have_no_weight_even_if_nan() -> None:
    with Rig(2, "identity()", shapes=[(5,)]) as rig:
        def train(rank: int) -> torch.Tensor | None:
            rig.workers[rank].units.weight = float(rank)
            return step(rig.workers[rank], [torch.full((5,), 2.0 if rank else float("nan"))])[0]

        results = on_ranks(2, train)
    for result in results:
        torch.testing.assert_close(result, torch.full((5,), 2.0))


def test_corrupt_result_names_its_server() -> None:
    with Rig(1, "fp16()", shapes=[(5,)]) as rig:
        emit = rig.sums[0].cells[0].ops.emit
        rig.sums[0].cells[0].ops.emit = lambda r, acc, out: emit(r, acc, out) - 1
        with pytest.raises(CorruptFrame, match=r"server 0: .*\b9\b.*\b10 \(step 0, bucket 0\).*E-PAYLOAD"):
            step(rig.workers[0], [torch.ones(5)])


def test_deadline_error_names_the_missing_worker() -> None:
    with Rig(3, "identity()") as rig:
        def train(rank: int) -> object:
            return "absent" if rank == 1 else step(rig.workers[rank], list(gradients(rank, rig)), deadline_s=1.5)

        results = on_ranks(3, train)
    for rank in (0, 2):
        assert isinstance(results[rank], DeadlineExceeded)
        assert results[rank].peer == "worker 1"
        assert results[rank].code == "E-DEADLINE"
        assert "server 0" in results[rank].what


def test_error_latches_and_writes_no_gradients() -> None:
    with Rig(2, CODECS[4]) as rig:
        worker = rig.workers[0]
        mine = gradients(0, rig)
        before = [g.clone() for g in mine]
        error = PeerLost("no heartbeat", peer="worker 1")
        for tensor, g in enumerate(mine):
            worker.ready(tensor, g)
        deadline = time.monotonic() + 20.0
        while not any(bucket.exchange.started for bucket in worker.buckets) and time.monotonic() < deadline:
            time.sleep(0.001)  # for the lane
        worker.latch(error)
        with pytest.raises(PeerLost, match="worker 1: .*E-PEER-LOST"):
            worker.finish(list(mine), 10.0)
        with pytest.raises(PeerLost, match="worker 1: .*E-PEER-LOST"):
            worker.ready(0, mine[0])
        assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))
        assert any(bucket.exchange.started for bucket in worker.buckets)
        for bucket in worker.buckets:  # the step is abandoned, so the residual is what it was before: zero
            assert abs(bucket.ledger.state["residual"]).max() <= 1e-6


def test_sender_of_garbage_is_evicted_and_named() -> None:
    """The other members' error names that member, not the server."""
    with Rig(3, "identity()", stall_s=0.1) as rig:
        def train(rank: int) -> object:
            if rank != 1:
                return step(rig.workers[rank], list(gradients(rank, rig)), deadline_s=2.0)
            header = Header(Kind.PUSH, 1, 0, 0, codec=rig.workers[1].buckets[0].codec.id, sender=1, weight=1.0)
            rig.transports[1].send(rig.transports[1].peers[-1], header, b"\x00" * 40)
            return None

        results = on_ranks(3, train)
        for rank in (0, 2):
            assert results[rank].peer == "worker 1"
        assert [*rig.servers[0].dropped()] == [1]


WORLD, STEPS = 3, 6
LATE_CODECS = ["identity()", "int8(block=64)", "topk(ratio=0.1)", "qsgd(levels=7)", "powersgd(rank=2)"]
WHICH = {"none": lambda _: False, "some": lambda b: b % 3 == 1, "all": lambda _: True}


def plan(codec: str, which: str, **changes: object) -> Plan:
    """Small buckets: tensor 0 and tensor 5 are cut, so that they may be stale in part."""
    result = default_plan(job(), codec=codec, path="service", servers=2, ranks_per_node=1, fuse_nbytes=2048, cut_nbytes=4096)
    buckets = (msgspec.structs.replace(b, stale=WHICH[which](b.id), **changes) for b in result.buckets)
    return msgspec.structs.replace(result, buckets=tuple(buckets))


def late_gradients(rank: int, rig: Rig, s: int) -> list[torch.Tensor | None]:
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
            rows.append(step(rig.workers[rank], late_gradients(rank, rig, s)))
        return rows

    results = on_ranks(WORLD, run)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("which", ["some", "all"])
@pytest.mark.parametrize("codec", LATE_CODECS)
def test_stale_bucket_returns_the_previous_step_and_zero_at_first(codec: str, which: str) -> None:
    with Rig(WORLD, codec, plan=plan(codec, "none")) as rig:
        fresh = train(rig)
    with Rig(WORLD, codec, plan=plan(codec, which)) as rig:
        late, buckets = train(rig), rig.plan.buckets
    assert {b.stale for b in buckets} == {"some": {False, True}, "all": {True}}[which]
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
def test_step_with_only_stale_buckets_does_not_wait_for_peers(which: str) -> None:
    with Rig(2, "identity()", plan=plan("identity()", which)) as rig:
        ended = threading.Event()

        def run(rank: int) -> None:
            if rank == 1 and (not ended.wait(20.0) or which == "some"):
                return
            try:
                step(rig.workers[rank], late_gradients(rank, rig, 0), deadline_s=20.0 if which == "all" else 0.3)
            finally:
                ended.set()
            step(rig.workers[rank], late_gradients(rank, rig, 1))

        results = on_ranks(2, run)
    if which == "all":
        assert results == [None, None]
    else:
        assert isinstance(results[0], DeadlineExceeded)


def test_missing_peer_is_named_with_the_step_and_sent_gradients_are_restored() -> None:
    with Rig(2, "topk(ratio=0.1)", plan=plan("topk(ratio=0.1)", "all"), stall_s=0.05) as rig:
        def run(rank: int) -> None:
            step(rig.workers[rank], late_gradients(rank, rig, 0))
            if rank == 0:
                step(rig.workers[rank], late_gradients(rank, rig, 1))
                step(rig.workers[rank], late_gradients(rank, rig, 2), deadline_s=1.0)

        error, _ = on_ranks(2, run)
        assert isinstance(error, DeadlineExceeded)
        assert (error.peer, error.step) == ("worker 1", 1)
        bucket = rig.workers[0].buckets[0]
        put = late_gradients(0, rig, 0)[bucket.slices[0].tensor]
        (debt,) = [d for d in bucket.ledger.residuals() if d.tensor == bucket.slices[0].tensor]
        span = slice(debt.start, debt.stop)
        assert put is not None
        sent = put.view(-1)[span] - torch.as_tensor(debt.values)
        # A tenth went with step 0; step 1 is abandoned, so the residual is what it was before.
        assert 0 < int((sent.abs() > 1e-6).sum()) <= 0.12 * sent.numel()


@pytest.mark.parametrize("codec", ["identity()", "topk(ratio=0.2)", "int8(block=64)"])
@pytest.mark.parametrize("where", ["fresh", "late"])
def test_skipped_step_conserves_stale_results(codec: str, where: str) -> None:
    """One gradient is not finite.

    Stale results of the steps before and after are applied once or stay in residuals; those of the skipped step are dropped.
    """
    bad = 2
    result = plan(codec, "some", down="identity()")
    late = {b.id for b in result.buckets if b.stale}
    with Rig(WORLD, codec, plan=result) as rig:
        spoil = next(b.slices[0] for b in result.buckets if (b.id in late) == (where == "late"))

        def run(rank: int) -> tuple[list[list[torch.Tensor | None]], list[torch.Tensor]]:
            worker, got = rig.workers[rank], []
            for s in range(STEPS):
                mine = late_gradients(rank, rig, s)
                hit = mine[spoil.tensor]
                if s == bad and rank == 1 and hit is not None:
                    hit.view(-1)[spoil.start] = float("inf")
                got.append(step(worker, mine))
            worker.drain()
            used = worker.used()
            last = [torch.zeros(i.shape) if u else None for i, u in zip(rig.job.tensors, used, strict=True)]
            worker.hand_out(last)
            return [*got, last], by_tensor(slices_of(worker), [info.numel for info in rig.job.tensors])

        results = on_ranks(WORLD, run)
        steps = [s for s in range(STEPS + 1) if all(t is None or bool(t.isfinite().all()) for t in results[0][0][s])]
        # The late bucket's own step goes through; the one that would have used its result is skipped, no other.
        skipped = bad if where == "fresh" else bad + 1
        assert steps == [s for s in range(STEPS + 1) if s != skipped]
        for bucket in (b for b in result.buckets if b.id in late):
            for part in bucket.slices:
                put, got = torch.zeros(part.numel), torch.zeros(part.numel, dtype=torch.float64)
                for s in range(STEPS):
                    rows = [g.view(-1)[part.start : part.stop] for r in range(WORLD)
                            if (g := late_gradients(r, rig, s)[part.tensor]) is not None]
                    if s == skipped or (where == "late" and s == bad and bucket.slices[0] == spoil):
                        continue
                    put += sum(rows, torch.zeros(part.numel))
                for s in steps:
                    if (t := results[0][0][s][part.tensor]) is not None:
                        got += WORLD * t.reshape(-1)[part.start : part.stop]
                got += sum(owed[part.tensor][part.start : part.stop] for _, owed in results)
                torch.testing.assert_close(got.float(), put, rtol=1e-3, atol=1e-3)


def test_buckets_that_cannot_be_stale_are_refused_in_one_line() -> None:
    result = plan("identity()", "some")
    buckets = tuple(msgspec.structs.replace(b, path="allreduce") for b in result.buckets)
    problems = node_problems(msgspec.structs.replace(result, buckets=buckets), 2, 1)
    assert problems
    assert all("path 'allreduce' does not support results that are one step late" in line for line in problems)


def test_highest_priority_runs_first_and_ties_are_fifo() -> None:
    gate, ran, errors = threading.Event(), list[str](), list[BaseException]()
    lane = Lane("test", errors.append)
    lane.put(lambda: gate.wait(20.0) and None)
    for name, urgency in (("later", (2, 0)), ("bulk", (1, 7)), ("equal", ()), ("first", (1, 0)), ("bulk too", (1, 7)),
                          ("equal too", ())):
        lane.put(lambda name=name: ran.append(name), urgency)  # type: ignore[misc]
    lane.put(lambda: 1 // 0, (3,))  # type: ignore[arg-type, return-value]
    gate.set()
    assert lane.drain(20.0)
    assert ran == ["equal", "equal too", "first", "bulk", "bulk too", "later"]
    assert [type(error) for error in errors] == [ZeroDivisionError]
    lane.put(lambda: ran.append("behind"), (9,))
    lane.close(20.0)
    assert ran[-1] == "behind", "tasks added before the end are run"

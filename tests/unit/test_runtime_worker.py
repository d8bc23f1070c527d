"""The way of a gradient over loopback: sums, weights, unused tensors, non-finite steps, failures. Ranks are threads."""

from __future__ import annotations

import time

import pytest
import torch
from support.workers import Rig, on_ranks, step

from commlayer.errors import CorruptFrame, DeadlineExceeded, PeerLost
from commlayer.transport.protocol import Header, Kind

CODECS = ["identity()", "fp16()", "bf16()", "int8(block=64)", "topk(ratio=0.05, values='fp32', exact=False)"]


def gradients(rank: int, rig: Rig, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [torch.randn(info.shape, generator=generator) for info in rig.job.tensors]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("servers", [1, 3])
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


def test_runs_repeat_bit_for_bit() -> None:
    def run() -> list[torch.Tensor]:
        with Rig(4, CODECS[3], servers=2) as rig:
            results = on_ranks(4, lambda rank: [step(rig.workers[rank], list(gradients(rank, rig, s))) for s in range(4)])
            return [t for s in results[0] for t in s if t is not None]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_layouts() -> None:
    """Channels-last, transposed and bf16 gradients come back as they went."""
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


def test_a_buffer_that_is_not_finite_stays_and_costs_nobody_a_step() -> None:
    """The optimizer reads no buffers, so such a step is applied: giving it back would apply its gradients twice."""
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


def test_gradients_of_no_samples_count_nothing_even_as_nan() -> None:
    with Rig(2, "identity()", shapes=[(5,)]) as rig:
        def train(rank: int) -> torch.Tensor | None:
            rig.workers[rank].units.weight = float(rank)
            return step(rig.workers[rank], [torch.full((5,), 2.0 if rank else float("nan"))])[0]

        results = on_ranks(2, train)
    for result in results:
        torch.testing.assert_close(result, torch.full((5,), 2.0))


def test_a_corrupt_result_names_its_server() -> None:
    with Rig(1, "fp16()", shapes=[(5,)]) as rig:
        emit = rig.servers[0]._core.cells[0].ops.emit
        rig.servers[0]._core.cells[0].ops.emit = lambda r, acc, out: emit(r, acc, out) - 1
        with pytest.raises(CorruptFrame, match=r"server 0: .*\b9\b.*\b10 \(step 0, bucket 0\).*E-PAYLOAD"):
            step(rig.workers[0], [torch.ones(5)])


def test_the_deadline_names_the_worker_that_is_missing() -> None:
    with Rig(3, "identity()") as rig:
        def train(rank: int) -> object:
            return "absent" if rank == 1 else step(rig.workers[rank], list(gradients(rank, rig)), deadline_s=1.5)

        results = on_ranks(3, train)
    for rank in (0, 2):
        assert isinstance(results[rank], DeadlineExceeded)
        assert results[rank].peer == "worker 1"
        assert results[rank].code == "E-DEADLINE"
        assert "server 0" in results[rank].what


def test_an_error_latches_and_writes_nothing() -> None:
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


def test_garbage_drops_its_sender_and_names_it() -> None:
    """A member that sends nonsense is out; the others hear its name, not the server's."""
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
        assert "worker 1" in rig.servers[0]._dropped.__repr__() or 1 in rig.servers[0]._dropped

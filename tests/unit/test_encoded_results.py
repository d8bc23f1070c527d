"""Results that a bucket keeps encoded, and memory that is released while nothing reads it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from support.codecs import decoded, encode, noise, room
from support.workers import Rig, job, on_ranks, step
from torch import nn

from commlayer.cluster.servers.server_codecs import CodecOps
from commlayer.compressors import make_codec, parse, topk, two_way
from commlayer.compressors.codec import Codec, State
from commlayer.compressors.feedback import wrap
from commlayer.compressors.plan_codecs import sparse_result_codec
from commlayer.engine.buckets.bucket import BucketExchange, EncodedBucket
from commlayer.engine.buckets.results import SparseResult
from commlayer.engine.buckets.units import Units
from commlayer.engine.sync.local_steps import OuterSteps, StepWeights
from commlayer.engine.worker import worker as worker_module
from commlayer.engine.worker.worker import Worker
from commlayer.errors import CommError, CorruptFrame
from commlayer.optim import OuterSGD
from commlayer.planner import default_plan
from commlayer.records import Bucket, Job, Plan, Slice, Spec, TensorInfo

CODECS = ["int4()", "topk(ratio=0.2)", "onebit()", "int8()"]
SHAPES = [(6, 50), (40,)]
SLICES = {"one": (Slice(0, 0, 300),), "a part": (Slice(0, 100, 250),), "two": (Slice(0, 0, 300), Slice(1, 0, 40))}


def make_bucket(codec: str, slices: tuple[Slice, ...], given: list[memoryview]) -> EncodedBucket:
    bucket = EncodedBucket(Bucket(0, slices, "service", codec=codec), job(SHAPES), wrap(parse(codec)), torch.device("cpu"), 0)
    bucket.keep_encoded(given.append)
    return bucket


def result_of(bucket: EncodedBucket) -> memoryview:
    """A possible server reply: another payload of the same codec."""
    other = EncodedBucket(bucket.planned, job(SHAPES), bucket.codec, torch.device("cpu"), 0)
    other.x.copy_(torch.linspace(-1, 2, other.numel))
    return memoryview(bytearray(other.coder.payload[: other.encode()]))


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("codec", CODECS)
def test_written_gradient_equals_decode(codec: str, slices: str) -> None:
    given: list[memoryview] = []
    bucket = make_bucket(codec, SLICES[slices], given)
    body = result_of(bucket)
    plain = torch.empty(bucket.numel)
    assert bucket.codec.decode(body, bucket.ledger.state, plain)
    bucket.decode(body)
    assert bucket.exchange.finite
    assert bucket.coder.host_y.numel() == 0
    assert torch.equal(bucket.y, plain)
    targets = [torch.full(SHAPES[s.tensor], 7.0) for s in bucket.slices]
    bucket.commit(0.5, targets)
    expected = [torch.full(SHAPES[s.tensor], 7.0) for s in bucket.slices]
    for view, target, s in zip(bucket.layout.views(plain), expected, bucket.slices, strict=True):
        target.view(-1)[s.start : s.stop] = view.reshape(-1) * 0.5
    assert all(map(torch.equal, targets, expected))
    bucket.commit(1.0, [None] * len(targets))
    assert given == []
    bucket.encode()
    assert given == [body]
    bucket.encode()
    assert len(given) == 1


def test_non_finite_result_is_written_as_nan() -> None:
    bucket = make_bucket("int4()", SLICES["two"], [])
    bucket.x.fill_(float("inf"))
    bucket.decode(memoryview(bytearray(bucket.coder.payload[: bucket.encode()])))
    targets = [torch.zeros(shape) for shape in SHAPES]
    bucket.commit(0.5, targets)
    assert not bucket.exchange.finite
    assert all(bool(target.isnan().all()) for target in targets)


N = 5000
READ: list[Codec] = [two_way(wrap(parse("int8()")), wrap(topk(0.1))), *(wrap(parse(text)) for text in (
    "topk(ratio=0.02)", "topk(ratio=0.05, values='fp16')", "topk(ratio=0.05, values='fp32')", "topk(ratio=0.05, values='int4')",
    "randomk(ratio=0.05)", "randomk(ratio=0.05, values='fp16', unbiased=True)", "momentum(topk(ratio=0.02))",
    "error_feedback(topk(ratio=0.02))", "error_feedback(topk(ratio=0.02), lr_correction=True)",
))]


def answer(codec: Codec, server: State, payload: memoryview) -> memoryview:
    acc, out = codec.new_accumulator(Spec((N,)), 0), room(codec, Spec((N,)))
    codec.add(0, payload, acc, first=True)
    return out[: codec.emit(0, acc, server, out)]


@pytest.mark.parametrize("codec", READ, ids=str)
def test_entries_equal_the_decoded_values(codec: Codec) -> None:
    reader = sparse_result_codec(codec)
    assert reader is not None
    state, server = codec.init(Spec((N,))), codec.init_server(Spec((N,)))
    for number in range(3):
        payload = answer(codec, server, encode(codec, noise(N, number), state))
        result = reader.read(payload, N)
        assert result is not None
        idx, values = result
        dense = torch.zeros(N)
        dense[torch.from_numpy(idx).long()] = torch.from_numpy(values)
        assert (idx[1:] > idx[:-1]).all()
        assert torch.equal(dense, decoded(codec, payload, N))
    flagged = answer(codec, server, encode(codec, torch.full((N,), float("nan")), state))
    assert reader.read(flagged, N) is None
    with pytest.raises(CorruptFrame):
        reader.read(bytes(payload)[:-1], N)


def made(codec: str) -> tuple[EncodedBucket, Job]:
    tensors = (TensorInfo("weight", (40, 100)), TensorInfo("bias", (40,)), TensorInfo("long", (6000,)))
    slices = (Slice(0, 0, 4000), Slice(1, 0, 40), Slice(2, 1000, 3000))
    job = Job(tensors)
    planned = Bucket(0, slices, "service", codec)
    return EncodedBucket(planned, job, wrap(parse(codec)), torch.device("cpu"), 0), job


@pytest.mark.parametrize("text", ["topk(ratio=0.1)", "randomk(ratio=0.1)"])
def test_bucket_that_keeps_entries_writes_the_same_without_a_dense_sum(text: str) -> None:
    codec = wrap(parse(text))
    n = 6040
    result = encode(codec, noise(n), codec.init(Spec((n,))))
    written = []
    for keep in (False, True):
        bucket, _ = made(text)
        if keep:
            bucket.keep_entries()
        bucket.decode(result)
        assert bucket.exchange.finite
        if keep:
            assert isinstance(bucket.compact, SparseResult)
            assert bucket.coder.host_y.numel() == bucket.memory.all_y.numel() == bucket.memory.tail_y.numel() == 0
        targets = [torch.full((40, 100), 9.0), None, torch.full((6000,), 9.0)]
        bucket.commit(0.25, targets)
        written.append([targets[0], targets[2], bucket.y / (1.0 if keep else float(bucket.exchange.scaled))])
    for plain, kept in zip(written[0], written[1], strict=True):
        assert torch.equal(plain, kept)
    parts = [bucket.compact.entries(i) for i in (0, 1, 2)]
    full = torch.zeros(6000)
    full[parts[2][0].long()] = parts[2][1] * 0.25
    assert torch.equal(full[1000:3000], written[1][1][1000:3000]), "positions are those in the tensor"
    assert sum(len(idx) for idx, _ in parts) == len(torch.nonzero(written[1][2]))


NUMEL = 1 << 20
PAGE = 4096


def coded() -> EncodedBucket:
    bucket = EncodedBucket(Bucket(0, (Slice(0, 0, NUMEL),), "service", codec="int4()"), job([(NUMEL,)]), wrap(parse("int4()")),
                           torch.device("cpu"), 0)
    bucket.keep_encoded(lambda _: None)
    return bucket


@pytest.mark.parametrize("unapplied", [0, 1])
def test_bucket_keeps_what_a_rollback_needs(unapplied: int) -> None:
    bucket, x = coded(), torch.randn(NUMEL)
    bucket.x.copy_(x)
    bucket.encode()
    bucket.exchange = BucketExchange()
    bucket.ledger.discard(unapplied)
    owed = bucket.ledger.state["residual"].copy()
    bucket.release_memory()
    assert torch.equal(bucket.x, x) == bool(unapplied) or sys.platform != "linux"
    assert np.array_equal(bucket.ledger.state["residual"], owed)
    bucket.ledger.roll_back()
    assert np.array_equal(bucket.ledger.state["residual"], owed) != bool(unapplied)


class Failing:
    """A worker whose servers do not answer."""

    fragments = ((EncodedBucket(Bucket(0, (Slice(0, 0, 12),), "service", codec="int4()"), job([(12,)]), wrap(parse("int4()")),
                                torch.device("cpu"), 0),),)
    units = Units(1)

    def send(self, *_: object) -> None: ...

    def complete(self, _: object) -> None: ...

    def wait(self, *_: object) -> None:
        raise CommError("gone")


def test_weights_survive_a_failed_exchange() -> None:
    p = nn.Parameter(torch.randn(12))
    steps = OuterSteps([p], 2, OuterSGD(), StepWeights(1.0))
    steps.count()
    with torch.no_grad():
        p.add_(0.25)
    now = p.detach().clone()
    with pytest.raises(CommError):
        steps.exchange(Failing(), [], 1.0)  # type: ignore[arg-type]
    torch.testing.assert_close(p.detach(), now)
    assert not torch.equal(p, steps.starts[0])


def large_rig(codec: str) -> Rig:
    of = job([(NUMEL,)])
    return Rig(1, codec, of=of, plan=default_plan(of, codec=codec, path="service", servers=1, ranks_per_node=1,
                                                  fuse_nbytes=NUMEL, cut_nbytes=NUMEL))


def held(worker: Worker) -> bool:
    """Whether the worker's buckets hold data of the last step."""
    return any(bool(bucket.x[PAGE:-PAGE].any()) for bucket in worker.buckets)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
@pytest.mark.parametrize(("codec", "recording", "stays"), [("identity()", False, False), ("identity()", True, True),
                                                           ("int4()", False, True)])
def test_after_a_step_buckets_hold_only_rollback_and_measurement_data(
    codec: str, recording: bool, stays: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "LARGE_NBYTES", NUMEL)
    with large_rig(codec) as rig:
        worker, gradient = rig.workers[0], torch.randn(NUMEL)
        worker.recorder.switch(on=recording)
        averages = [step(worker, [gradient])[0] for _ in range(3)]
        assert held(worker) == stays
        if codec == "identity()":
            assert all(torch.equal(average, gradient) for average in averages if average is not None)


SERVED = 1 << 18


def planned(codec: str) -> tuple[Job, Plan]:
    of = job([(SERVED,), (SERVED,)])
    return of, default_plan(of, codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=8 * SERVED,
                            cut_nbytes=8 * SERVED)


def train(codec: str) -> tuple[list[torch.Tensor], list[bytes], list[Any]]:
    """Averages of 6 steps, two of them rolled back, then each bucket's state on the server, and its sum."""
    of, plan = planned(codec)
    with Rig(2, codec, of=of, plan=plan) as rig:
        def run(rank: int) -> list[torch.Tensor]:
            made, worker = [], rig.workers[rank]
            for number in range(6):
                generator = torch.Generator().manual_seed(10 * number + rank)
                made += [a for a in step(worker, [torch.randn(SERVED, generator=generator) for _ in range(2)]) if a is not None]
                if number in (1, 3):
                    worker.mark_discarded(number // 2)
            return made

        averages = on_ranks(2, run)[0]
        cells = rig.sums[0].cells.values()
        sums = [cell.accs[0]["sum"].copy() for cell in cells]
        for cell in cells:
            cell.undo(1)  # of the last step, whose sum may be gone
        return averages, [cell.ops.snapshot() for cell in cells], sums


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
@pytest.mark.parametrize("codec", ["int4()", "topk(ratio=0.01)", "onebit(block=64)"])
def test_rollback_from_payloads_is_bit_exact(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    averages, states, sums = train(codec)
    assert not any(bool(each[PAGE:-PAGE].any()) for each in sums)
    monkeypatch.setattr(CodecOps, "keeps_payloads", lambda *_: False)
    expected, expected_states, held = train(codec)
    assert all(bool(each.any()) for each in held)
    assert states == expected_states
    assert all(map(torch.equal, averages, expected))


def test_dense_sum_is_kept_if_payloads_are_as_large() -> None:
    _, plan = planned("int4()")
    ops = CodecOps(make_codec(plan.buckets[0]), plan.buckets[0], "job")
    assert ops.keeps_payloads(2)
    assert not ops.keeps_payloads(8)

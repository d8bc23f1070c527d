"""Results that stay entries: what they say is what `decode` writes, bit for bit, whatever is around the codec."""

from __future__ import annotations

import pytest
import torch
from support.codecs import decoded, encode, noise, room

from commlayer.compressors import parse, topk, two_way, wrap
from commlayer.compressors.codec import Codec, State
from commlayer.compressors.plan_codecs import reader_of
from commlayer.engine import buckets
from commlayer.engine.buckets import EncodedBucket
from commlayer.errors import CorruptFrame
from commlayer.records import Bucket, Job, Slice, Spec, TensorInfo

N = 5000
READ: list[Codec] = [two_way(wrap(parse("int8()")), wrap(topk(0.1))), *(wrap(parse(text)) for text in (
    "topk(ratio=0.02)", "topk(ratio=0.05, values='fp16')", "topk(ratio=0.05, values='fp32')", "topk(ratio=0.05, values='int4')",
    "randomk(ratio=0.05)", "randomk(ratio=0.05, values='fp16', unbiased=True)", "momentum(topk(ratio=0.02))",
    "error_feedback(topk(ratio=0.02))", "error_feedback(topk(ratio=0.02), lr_correction=True)",
))]
DENSE = ["int8()", "block_threshold(ratio=0.05)", "powersgd(rank=2)"]


def answer(codec: Codec, server: State, payload: memoryview) -> memoryview:
    acc, out = codec.zeros(Spec((N,)), 0), room(codec, Spec((N,)))
    codec.add(0, payload, acc, first=True)
    return out[: codec.emit(0, acc, server, out)]


@pytest.mark.parametrize("codec", READ, ids=str)
def test_entries_are_what_decoding_writes(codec: Codec) -> None:
    reader = reader_of(codec)
    assert reader is not None
    state, server = codec.init(Spec((N,))), codec.init_server(Spec((N,)))
    for step in range(3):
        payload = answer(codec, server, encode(codec, noise(N, step), state))
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


@pytest.mark.parametrize("text", DENSE)
def test_where_more_than_the_bytes_decides_nobody_reads_entries(text: str) -> None:
    assert reader_of(wrap(parse(text))) is None


def made(codec: str) -> tuple[EncodedBucket, Job]:
    tensors = (TensorInfo("weight", (40, 100)), TensorInfo("bias", (40,)), TensorInfo("long", (6000,)))
    slices = (Slice(0, 0, 4000), Slice(1, 0, 40), Slice(2, 1000, 3000))
    job = Job(tensors)
    planned = Bucket(0, slices, "service", codec)
    return EncodedBucket(planned, job, wrap(parse(codec)), torch.device("cpu"), 0), job


@pytest.mark.parametrize("text", ["topk(ratio=0.1)", "randomk(ratio=0.1)"])
def test_a_bucket_that_keeps_entries_writes_the_same_and_has_no_dense_sum(text: str) -> None:
    codec = wrap(parse(text))
    n = 6040
    result = encode(codec, noise(n), codec.init(Spec((n,))))
    results = []
    for keep in (False, True):
        bucket, _ = made(text)
        if keep:
            bucket.keep_entries()
        bucket.decode(result)
        assert bucket.exchange.finite
        if keep:
            assert isinstance(bucket.compact, buckets.SparseResult)
            assert bucket.coder.host_y.numel() == bucket.memory.all_y.numel() == bucket.memory.tail_y.numel() == 0
        targets = [torch.full((40, 100), 9.0), None, torch.full((6000,), 9.0)]
        bucket.commit(0.25, targets)
        results.append([targets[0], targets[2], bucket.y / (1.0 if keep else float(bucket.exchange.scaled))])
    for plain, kept in zip(results[0], results[1], strict=True):
        assert torch.equal(plain, kept)
    parts = [bucket.compact.entries(i) for i in (0, 1, 2)]
    full = torch.zeros(6000)
    full[parts[2][0].long()] = parts[2][1] * 0.25
    assert torch.equal(full[1000:3000], results[1][1][1000:3000]), "positions are those in the tensor"
    assert sum(len(idx) for idx, _ in parts) == len(torch.nonzero(results[1][2]))


def test_entries_are_written_where_they_belong_without_memory_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strided targets and those of another dtype alone take a dense slice first."""
    bucket, _ = made("topk(ratio=0.1)")
    bucket.keep_entries()
    codec = wrap(parse("topk(ratio=0.1)"))
    bucket.decode(encode(codec, noise(6040), codec.init(Spec((6040,)))))
    spread: list[int] = []
    plain = buckets._spread
    monkeypatch.setattr(buckets, "_spread", lambda idx, values, n: spread.append(n) or plain(idx, values, n))
    results = [torch.full((40, 100), 9.0), None, torch.full((6000,), 9.0)]
    bucket.commit(0.25, results)
    assert not spread
    others = [torch.full((100, 40), 9.0).T, None, torch.full((6000,), 9.0, dtype=torch.float64)]
    bucket.commit(0.25, others)
    assert spread == [4000, 2000]
    for one, other in zip(results, others, strict=True):
        assert one is other is None or torch.equal(one.double(), other.double())


def test_a_flagged_result_is_dense_and_all_nan_and_the_next_is_entries_again() -> None:
    bucket, _ = made("topk(ratio=0.1)")
    bucket.keep_entries()
    codec = wrap(parse("topk(ratio=0.1)"))
    state = codec.init(Spec((6040,)))
    bucket.decode(encode(codec, torch.full((6040,), float("inf")), state))
    assert not bucket.exchange.finite
    assert bucket.compact is None
    target = torch.zeros(40, 100)
    bucket.commit(1.0, [target, None, None])
    assert target.isnan().all()
    bucket.decode(encode(codec, noise(6040), state))
    assert bucket.exchange.finite
    assert isinstance(bucket.compact, buckets.SparseResult)
    assert not bucket.y.isnan().any()


def test_a_dense_codec_keeps_its_dense_sum() -> None:
    bucket, _ = made("int8()")
    bucket.keep_entries()
    assert bucket.y.numel() == 6040

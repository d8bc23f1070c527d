"""Results that stay as they came until they are written: the same bits, no memory of their own, bodies given back once."""

from __future__ import annotations

import pytest
import torch
from support.workers import job

from commlayer.compressors import parse
from commlayer.compressors.feedback import wrap
from commlayer.engine.buckets import EncodedBucket
from commlayer.records import Bucket, Slice

CODECS = ["int4()", "topk(ratio=0.2)", "onebit()", "int8()"]
SHAPES = [(6, 50), (40,)]
SLICES = {"one": (Slice(0, 0, 300),), "a part": (Slice(0, 100, 250),), "two": (Slice(0, 0, 300), Slice(1, 0, 40))}


def bucket_of(codec: str, slices: tuple[Slice, ...], given: list[memoryview]) -> EncodedBucket:
    bucket = EncodedBucket(Bucket(0, slices, "service", codec=codec), job(SHAPES), wrap(parse(codec)), torch.device("cpu"), 0)
    bucket.keep_encoded(given.append)
    return bucket


def result_of(bucket: EncodedBucket) -> memoryview:
    """What a server might send: another payload of the same codec."""
    other = EncodedBucket(bucket.planned, job(SHAPES), bucket.codec, torch.device("cpu"), 0)
    other.x.copy_(torch.linspace(-1, 2, other.numel))
    return memoryview(bytearray(other.coder.payload[: other.encode()]))


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("codec", CODECS)
def test_it_writes_what_decode_gives(codec: str, slices: str) -> None:
    given: list[memoryview] = []
    bucket = bucket_of(codec, SLICES[slices], given)
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


def test_a_result_that_is_not_finite_is_written_as_nan() -> None:
    bucket = bucket_of("int4()", SLICES["two"], [])
    bucket.x.fill_(float("inf"))
    bucket.decode(memoryview(bytearray(bucket.coder.payload[: bucket.encode()])))
    targets = [torch.zeros(shape) for shape in SHAPES]
    bucket.commit(0.5, targets)
    assert not bucket.exchange.finite
    assert all(bool(target.isnan().all()) for target in targets)

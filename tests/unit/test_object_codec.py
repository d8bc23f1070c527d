"""Objects exchanged between sites: encoding round-trips, and arbitrary bytes decode to plain values or are refused."""

from __future__ import annotations

import pathlib
import pickle
import random
import tracemalloc
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from commlayer.cluster.processes import object_codec
from commlayer.cluster.processes.object_codec import MAX_TUPLE, MAX_TUPLES, MAX_VALUES, decode, encode

VALUES = [
    None, True, False, 0, -1, 255, -256, 2**70, -(2**63), 1.5, float("inf"), -0.0, 1j, "h\u00e9\ud800", b"x", bytearray(b"y"),
    [], [1, [2]], (1, (2,)), set(), {1, 2}, frozenset({"a"}), {"a": 1, 2: "b", None: 3, b"c": {}, (1, "d"): 4}, {(1,), (2,)},
    OrderedDict(b=1, a=2),
    torch.Size([1, 2]), torch.float16, torch.device("cpu"), pathlib.Path("/tmp/x")]
TENSORS = [
    torch.tensor(3), torch.zeros(0, 5), torch.randn(2, 3).bfloat16(), torch.randn(2, 3, dtype=torch.complex64).conj(),
    torch.tensor([True]), torch.nn.Parameter(torch.ones(2)), torch.arange(6).view(2, 3).T]
ARRAYS = [np.float32(2), np.bool_(True), np.arange(6).reshape(2, 3).T, np.zeros((0, 3)), np.datetime64("2020-01-01")]


class Other:
    pass


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_round_trip(value: Any) -> None:
    back = decode(encode([value, {"in": value}]))
    assert back == [value, {"in": value}]
    assert type(back[0]) is type(value)


@pytest.mark.parametrize("value", [*TENSORS, *ARRAYS], ids=lambda value: f"{type(value).__name__} {value.dtype}")
def test_tensors_and_arrays_round_trip(value: Any) -> None:
    (back,) = decode(encode((value,)))
    assert (back.dtype, tuple(back.shape)) == (value.dtype, tuple(value.shape))
    assert back.tolist() == value.tolist()


@pytest.mark.parametrize("value", [
    Other(), Other, len, ENDLESS, {(1,) * (MAX_TUPLE + 1): 2}, {2**65: 1}, {((1,),)},
    [{(n,) for n in range(MAX_TUPLES)}, {(1,): 1}], torch.zeros(2).to_sparse(), np.array([object()]),
    [0] * 9001], ids=range(11))
def test_other_objects_are_refused_by_the_sender(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_codec, "MAX_VALUES", 9000)
    with pytest.raises(ValueError, match="contains"):
        encode(value)


def test_damaged_bytes_are_refused_or_decode_to_the_same_types() -> None:
    chance, whole = random.Random(7), encode([*VALUES, *TENSORS[:2], *ARRAYS])
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            encode(decode(data[: chance.choice((len(data), chance.randrange(len(data))))]))
        except ValueError:
            pass


def sized(tag: str, count: int) -> bytes:
    return tag.encode() + object_codec._COUNT.pack(count)


def array(tag: str, dtype: Any, shape: Any, data: Any) -> bytes:
    return bytes(tag.encode() + encode((dtype, shape)) + encode(data))


ATTACKS = {
    "pickle": pickle.dumps([1]), "list": sized("l", 10**12), "set": sized("s", 10**12), "str": sized("u", 8 << 30),
    "bytes": sized("b", 10**12), "dict": sized("d", 1 << 63), "tensor": array("x", torch.float32, (10**12,), b"1234"),
    "no elements": array("x", torch.float32, (-1, 10**12), b""), "array": array("a", "<f4", (10**12,), b"1234"),
    "a number": array("a", "|u1", (), 10**9), "long numbers": array("x", torch.float32, (1 << 5000,) * 60, b""),
    "a repeated shape": array("x", torch.float32, (b"x" * 100, 10**6), b""),
    "another dtype": array("a", b"<f4", (1,), b"1234"), "dimensions": array("x", torch.float32, (1,) * 65, b"1234"),
    "objects": array("a", "|O", (1,), bytes(8)), "long dtype": array("a", ",".join(["f8"] * 1000), (0,), b""),
    "deep": sized("l", 1) * 10_000 + b"N", "many": sized("l", MAX_VALUES + 1) + b"N" * (MAX_VALUES + 1),
    "key": sized("d", 2) + encode([1, 2]) + b"N", "key in a key": sized("s", 1) + encode(((1,),)),
    "tuples": sized("s", MAX_TUPLES + 1) + b"".join(encode((n,)) for n in range(MAX_TUPLES + 1)),
    "long key": sized("s", 1) + encode(1 << 65), "left over": b"NN", "none": b"",
    "unknown": b"?" + bytes(8), "odd": sized("d", 1) + b"N"}


@pytest.mark.parametrize("data", ATTACKS.values(), ids=ATTACKS)
def test_malicious_bytes_are_refused_before_any_object_is_created(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="malformed"):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < (64 << 10) + 4 * len(data)
    finally:
        tracemalloc.stop()

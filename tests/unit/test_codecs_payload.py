"""Payload bytes: golden files fix the format; broken bytes are refused and nothing is written."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import codecs as kit

from commlayer.compressors import (
    Codec,
    bf16,
    block_threshold,
    fp16,
    identity,
    int4,
    int8,
    onebit,
    qsgd,
    randomk,
    topk,
)
from commlayer.compressors.payload import CODEC_IDS
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

GOLDEN = Path(__file__).parents[1] / "golden" / "payloads"
CASES: dict[str, tuple[Codec, int]] = {
    "identity": (identity(), 7),
    "fp16": (fp16(), 7),
    "bf16": (bf16(), 7),
    "int8": (int8(block=8), 21),
    "topk-int8": (topk(ratio=0.05), 600),
    "topk-fp16-bitmap": (topk(ratio=0.6, values="fp16"), 100),
    "topk-fp32": (topk(ratio=0.01, values="fp32", exact=True), 5000),
    "topk-none": (topk(), 9),
    "topk-int4": (topk(ratio=0.05, values="int4"), 500),
    "topk-bf16": (topk(ratio=0.05, values="bf16"), 100),
    "topk-blocks": (topk(ratio=0.1), 700),
    "block_threshold": (block_threshold(ratio=0.1, values="fp16"), 500),
    "randomk": (randomk(ratio=0.05), 300),
    "randomk-bf16-unbiased": (randomk(ratio=0.05, values="bf16", unbiased=True), 300),
    "int8-flagged": (int8(), 5),
    "int4": (int4(block=8), 21),
    "qsgd-3-bits": (qsgd(block=8, levels=3), 21),
    "qsgd-5-bits-l2": (qsgd(block=16, levels=15, norm="l2"), 21),
    "onebit": (onebit(block=8), 21),
}


def golden_input(name: str, n: int) -> torch.Tensor:
    """Values from integers alone, so that no random generator's version matters."""
    if name == "topk-none":
        return torch.zeros(n)
    x = torch.tensor([((i * 2654435761) % 4093 - 2046) / 256.0 for i in range(n)])
    x = x * x * x
    if name == "topk-blocks":
        x[:100] *= 1000.0
    if name == "int8-flagged":
        x[2] = float("inf")
    return x


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", kit.AVAILABLE)
def test_golden_payloads(name: str, backend: str) -> None:
    """Set COMMLAYER_WRITE_GOLDEN=1 to write them anew after a change of format."""
    codec, n = CASES[name]
    file = GOLDEN / f"{name}.bin"
    with kit.use(backend):
        payload = bytes(kit.encode(codec, golden_input(name, n), codec.init(Spec((n,)))))
        if os.environ.get("COMMLAYER_WRITE_GOLDEN"):
            GOLDEN.mkdir(parents=True, exist_ok=True)
            file.write_bytes(payload)
        assert payload == file.read_bytes()
        out = kit.decoded(codec, payload, n)
    assert bool(torch.isnan(out).all()) if name == "int8-flagged" else bool(torch.isfinite(out).all())


def test_every_codec_has_a_golden_file_and_a_row_in_the_format() -> None:
    assert {file.read_bytes()[0] for file in GOLDEN.glob("*.bin")} == set(CODEC_IDS.values())
    page = (GOLDEN.parents[2] / "docs" / "reference" / "wire.md").read_text()
    rows = page.split("The body follows at once", 1)[1].split("\n\n")[1]
    described = {name.strip() for row in rows.splitlines()[2:] for name in row.split("|")[1].split(",")}
    assert described == set(CODEC_IDS)


def header(codec: int, version: int, flags: int, aux: int, numel: int, count: int, seed: int) -> bytes:
    return struct.pack("<BBBBIII", codec, version, flags, aux, numel, count, seed)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "payload of 0 bytes"),
        (header(5, 1, 0, 0, 4, 4, 0) + bytes(16), "coded by topk"),
        (header(99, 1, 0, 0, 4, 4, 0) + bytes(16), "coded by codec 99"),
        (header(1, 2, 0, 0, 4, 4, 0) + bytes(16), "version 2"),
        (header(1, 1, 2, 0, 4, 4, 0) + bytes(16), "flags 0x02"),
        (header(1, 1, 0, 1, 4, 4, 0) + bytes(16), "aux 1"),
        (header(1, 1, 0, 0, 5, 5, 0) + bytes(20), "5 elements, the bucket has 4"),
        (header(1, 1, 0, 0, 4, 3, 0) + bytes(16), "count 3"),
        (header(1, 1, 0, 0, 4, 5, 0) + bytes(16), "5 entries, the bucket has 4"),
        (header(1, 1, 0, 0, 4, 4, 1) + bytes(16), "seed 1"),
        (header(1, 1, 0, 0, 4, 4, 0) + bytes(15), "bytes of body 15"),
        (header(1, 1, 1, 0, 4, 0, 0) + bytes(1), "non-finite payload with 1 bytes"),
    ],
)
def test_a_header_that_is_off_is_named(payload: bytes, words: str) -> None:
    out = torch.full((4,), 7.0)
    with pytest.raises(CorruptFrame, match=re.escape(words) + ".*E-PAYLOAD"):
        identity().decode(payload, {}, out)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize("codec", kit.PLAIN, ids=str)
@pytest.mark.parametrize("backend", kit.AVAILABLE)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_mutated_payloads_raise_or_decode_and_never_write_on_error(codec: Codec, backend: str, data: st.DataObject) -> None:
    n = 300
    with kit.use(backend):
        good = bytearray(kit.encode(codec, kit.noise(n), codec.init(Spec((n,)))))
        for _ in range(data.draw(st.integers(1, 3))):
            where = data.draw(st.integers(0, len(good) - 1) | st.integers(0, min(40, len(good) - 1)))
            good[where] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(0, len(good)) | st.just(len(good)))
        bad = bytes(good[:cut]) + data.draw(st.binary(max_size=3))
        refuses_or_decodes(codec, bad, n)


@pytest.mark.parametrize("codec", kit.PLAIN, ids=str)
def test_every_truncation_is_refused(codec: Codec) -> None:
    n = 64
    good = bytes(kit.encode(codec, kit.noise(n), codec.init(Spec((n,)))))
    for cut in range(len(good)):
        assert refuses_or_decodes(codec, good[:cut], n) is False
    assert refuses_or_decodes(codec, good + b"\0", n) is False
    assert refuses_or_decodes(codec, good, n) is True


@pytest.mark.parametrize("codec", kit.PLAIN, ids=str)
def test_a_payload_may_lie_anywhere(codec: Codec) -> None:
    """Read-only bytes at an odd address, and memory of another element type, decode as the original does."""
    n = 5000
    good = bytes(kit.encode(codec, kit.noise(n), codec.init(Spec((n,)))))
    wanted = kit.decoded(codec, good, n)
    for shift in (1, 2, 3):
        moved = memoryview(bytes(shift) + good)[shift:]
        assert torch.equal(kit.decoded(codec, moved, n), wanted)
        acc = codec.zeros(Spec((n,)), 0)
        codec.add(0, moved, acc, first=False)
        assert torch.equal(kit.summed(codec, acc, n), wanted)
        room = memoryview(bytearray(shift + codec.bound(Spec((n,)))))[shift:]
        assert bytes(room[: codec.start(kit.noise(n), codec.init(Spec((n,))), room)]) == good


def test_identity_in_place() -> None:
    n = 100
    whole = torch.empty(4 + n)
    x = whole[4:].copy_(kit.noise(n))
    out = memoryview(whole.numpy()).cast("B")
    nbytes = identity().start(x, {}, out)
    assert bytes(out[:nbytes]) == bytes(kit.encode(identity(), kit.noise(n), {}))


def refuses_or_decodes(codec: Codec, payload: bytes, n: int) -> bool:
    """False if both sides refused the payload; then neither wrote."""
    out = torch.full((n,), 7.0)
    acc = codec.zeros(Spec((n,)), 0)
    acc["sum"].fill_(7.0)
    try:
        codec.decode(payload, codec.init(Spec((n,))), out)
    except CorruptFrame:
        assert bool((out == 7.0).all())
        with pytest.raises(CorruptFrame):
            codec.add(0, payload, acc, first=True)
        assert bool((acc["sum"] == 7.0).all())
        assert acc["flagged"] == [False]
        return False
    codec.add(0, payload, acc, first=True)
    return True

"""Payload bytes: golden files fix the format; malformed bytes are refused without writing output."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest
import torch
from support import codecs as kit
from support import fuzzing

from commlayer.compressors import (
    Codec,
    bf16,
    block_threshold,
    error_feedback,
    fp16,
    identity,
    int4,
    int8,
    onebit,
    parse,
    qsgd,
    randomk,
    topk,
)
from commlayer.compressors.payload import CODEC_IDS
from commlayer.compressors.plan_codecs import FACTORIES
from commlayer.errors import CorruptFrame, InvalidInput
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
    """Set COMMLAYER_WRITE_GOLDEN=1 to write them again after a change of format."""
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
        (header(5, 1, 0, 0, 4, 4, 0) + bytes(16), "compressed by topk"),
        (header(99, 1, 0, 0, 4, 4, 0) + bytes(16), "compressed by codec 99"),
        (header(1, 2, 0, 0, 4, 4, 0) + bytes(16), "version 2"),
        (header(1, 1, 2, 0, 4, 4, 0) + bytes(16), "flags 0x02"),
        (header(1, 1, 0, 1, 4, 4, 0) + bytes(16), "aux 1"),
        (header(1, 1, 0, 0, 5, 5, 0) + bytes(20), "5 elements, but the bucket has 4"),
        (header(1, 1, 0, 0, 4, 3, 0) + bytes(16), "count 3"),
        (header(1, 1, 0, 0, 4, 5, 0) + bytes(16), "5 entries, but the bucket has only 4"),
        (header(1, 1, 0, 0, 4, 4, 1) + bytes(16), "seed 1"),
        (header(1, 1, 0, 0, 4, 4, 0) + bytes(15), "bytes of body 15"),
        (header(1, 1, 1, 0, 4, 0, 0) + bytes(1), "got 1 bytes of body"),
    ],
)
def test_invalid_header_field_is_named(payload: bytes, words: str) -> None:
    out = torch.full((4,), 7.0)
    with pytest.raises(CorruptFrame, match=re.escape(words) + ".*E-PAYLOAD"):
        identity().decode(payload, {}, out)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize("codec", kit.PLAIN, ids=str)
def test_every_truncation_is_refused_by_all_readers(codec: Codec) -> None:
    target = fuzzing.Target(str(codec), (64,), 0)
    stands, good = fuzzing.FuzzStates(target), fuzzing.fuzz_state(target).payloads[0]
    for bad in (*(good[:cut] for cut in range(len(good))), good + b"\0"):
        assert all(stands.attack(bad)), len(bad)


@pytest.mark.parametrize("codec", kit.PLAIN, ids=str)
def test_payload_memory_may_be_unaligned_or_read_only(codec: Codec) -> None:
    """Read-only bytes at an odd address, and memory of another element type, decode as the original does."""
    n = 5000
    good = bytes(kit.encode(codec, kit.noise(n), codec.init(Spec((n,)))))
    wanted = kit.decoded(codec, good, n)
    for shift in (1, 2, 3):
        moved = memoryview(bytes(shift) + good)[shift:]
        assert torch.equal(kit.decoded(codec, moved, n), wanted)
        acc = codec.new_accumulator(Spec((n,)), 0)
        codec.add(0, moved, acc, first=False)
        assert torch.equal(kit.summed(codec, acc, n), wanted)
        room = memoryview(bytearray(shift + codec.bound(Spec((n,)))))[shift:]
        assert bytes(room[: codec.start(kit.noise(n), codec.init(Spec((n,))), room)]) == good


def test_fuzzer_covers_every_codec_and_round() -> None:
    result = {(target.codec.id, target.r) for target in fuzzing.targets()}
    assert {number for number, _ in result} == set(CODEC_IDS.values())
    assert all(any(t.text == kit.NAMED[name] and t.r == r for t in fuzzing.targets())
               for name in FACTORIES for r in range(len(kit.EVERY[name].rounds)))


def test_corpus_is_still_refused() -> None:
    """Each line by at least one reader, as when it was recorded."""
    for target, bad in fuzzing.read_corpus():
        text = fuzzing.FuzzStates(target).attack(bad)
        assert any(text), fuzzing.line_of(target, bad)


def test_new_damage_is_refused_or_decoded_equally_by_all_readers() -> None:
    assert fuzzing.run(20261121, attacks=10) > 1800


@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_fuzzer_detects_a_faulty_reader(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that writes before it validates is a finding."""
    target = fuzzing.Target(kit.NAMED[name], (300,), 0)
    stands = fuzzing.FuzzStates(target)
    good = fuzzing.fuzz_state(target).payloads[0]
    inner = getattr(target.codec, "inner", target.codec) if "error_feedback" in str(target.codec) else target.codec

    add = type(inner).add

    def hasty(self: object, r: int, payload: object, acc: dict, *, first: bool) -> None:
        acc["flagged"][0] = not acc["flagged"][0]
        add(self, r, payload, acc, first=first)

    monkeypatch.setattr(type(inner), "add", hasty)
    with pytest.raises(AssertionError, match="add changed the accumulator before it refused"):
        stands.attack(good[:-1])


def test_spellings() -> None:
    assert parse("identity()") == identity()
    assert parse(" topk( 0.5 ) ") == topk(ratio=0.5)
    assert parse("error_feedback(topk(ratio=0.01, values='int8'))") == error_feedback(topk())
    assert parse("error_feedback(inner=int8(block=64))") == error_feedback(int8(block=64))
    assert str(error_feedback(topk())) == "error_feedback(topk(ratio=0.01, values='int8', exact=False))"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("topq()", "'topq' is unknown"),
        ("os.system('true')", "'os.system' is unknown"),
        ("topk(rate=0.1)", "topk has no argument 'rate'"),
        ("fp16(1)", "fp16 takes 0 arguments"),
        ("topk(0.1, ratio=0.2)", "topk got 'ratio' twice"),
        ("topk(ratio=__import__('os'))", "'__import__' is unknown"),
        ("topk(ratio=1 + 1)", "'1 + 1' is neither a literal nor a codec"),
        ("topk(ratio=x)", "'x' is neither a literal nor a codec"),
        ("topk(**{'ratio': 1})", "topk has no argument 'None'"),
        ("topk(ratio=2)", "topk: ratio is 2"),
        ("int8(block=0)", "int8: block is 0"),
        ("topk(values=[1])", "topk: values is [1]"), ("topk(values='int3')", "topk: values is 'int3'"),
        ("topk(exact=1)", "topk: exact is 1"), ("topk(ratio=0.0)", "topk: ratio is 0.0"),
        ("topk(ratio=-0.1)", "topk: ratio is -0.1"), ("topk(ratio=1.0001)", "topk: ratio is 1.0001"),
        ("topk(ratio='0.1')", "topk: ratio is '0.1'"), ("topk(ratio=True)", "topk: ratio is True"),
        ("block_threshold(ratio=0)", "block_threshold: ratio is 0"),
        ("block_threshold(run=12)", "block_threshold: run is 12"),
        ("block_threshold(values='int2')", "block_threshold: values is 'int2'"),
        ("randomk(ratio=1.5)", "randomk: ratio is 1.5"), ("randomk(values='int8')", "randomk: values is 'int8'"),
        ("randomk(unbiased=1)", "randomk: unbiased is 1"), ("int4(block=12)", "int4: block is 12"),
        ("onebit(block=0)", "onebit: block is 0"), ("qsgd(levels=2)", "qsgd: levels is 2"),
        ("qsgd(norm='l1')", "qsgd: norm is 'l1'"), ("powersgd(rank=0)", "powersgd: rank is 0"),
        ("error_feedback(int8(), lr_correction=1)", "error_feedback: lr_correction is 1"),
        ("momentum(topk(), 1.0)", "momentum: beta is 1.0"),
        ("error_feedback(momentum(topk()))", "error_feedback: inner is momentum"),
        ("error_feedback(error_feedback(topk()))", "error_feedback: inner is error_feedback"),
        ("error_feedback()", "error_feedback needs inner"),
        ("error_feedback(3)", "error_feedback: inner is 3"),
        ("", "expected a name"),
        ("topk(", "expected a name"),
        ("(" * 4000, "expected a name"),
        ("\0", "expected a name"),
    ],
)
def test_errors_name_the_fault(text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(text)
    assert words in caught.value.what
    assert caught.value.code == ("E-CODEC-ARGUMENT" if ": " in words else "E-CODEC-NAME")
    assert "\n" not in str(caught.value)


WRAPPERS = {"error_feedback", "momentum"}
"""Factories whose codecs have the number of the inner codec."""


def test_tables_agree() -> None:
    for name, number in CODEC_IDS.items():
        assert parse(f"{name}()").id == number
    assert len(set(CODEC_IDS.values())) == len(CODEC_IDS)
    assert set(CODEC_IDS) | WRAPPERS == set(FACTORIES)

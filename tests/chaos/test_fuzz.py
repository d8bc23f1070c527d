"""Readers of bytes from peers refuse damaged ones by their own error; what they must not do is a finding."""

from __future__ import annotations

import random

import pytest

from commlayer.cluster.calls import messages
from commlayer.compressors import parse, wrap
from commlayer.compressors.payload import CODEC_IDS
from commlayer.errors import CorruptFrame
from commlayer.records import Record
from tests.chaos import fuzz
from tests.chaos.fuzz_targets import CODECS, Target, targets


def test_damage_is_refused_or_decoded_by_every_reader() -> None:
    results = targets()
    for target in results:
        for example in target.examples:
            try:
                target.read(example, random.Random(1))
            except target.refusals:
                assert "greeting" in target.name, f"{target.name}: a valid example is refused"
    result = fuzz.fuzz(targets(), 4000, seed=20261122)
    reply = result["rows"][: len(results)]
    assert result["rows"][len(results) :] == []
    assert all(row["refused"] for row in reply)


def test_targets_cover_every_codec_and_control_record() -> None:
    names = {target.name for target in targets()}
    assert {wrap(parse(text)).id for text in CODECS} == set(CODEC_IDS.values())
    own = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Record)]
    kinds = {kind.__name__ for kind in own if kind.__module__ == messages.__name__}
    assert {f"control {name}" for name in kinds} <= names


def test_faults_of_a_reader_are_findings() -> None:
    def read(data: bytes, _: random.Random) -> None:
        if data[0] & 1:
            raise KeyError("a crash")
        raise CorruptFrame("as it should be")

    result = fuzz.fuzz([Target("careless", [bytes(20)], read)], 200)
    assert result["summary"]["findings"] > 0
    assert result["rows"][1]["finding"].startswith("KeyError")


@pytest.mark.parametrize(("text", "shown"), [(b"\xff", "invalid start byte"), (b"\n", r"unknown field `\\n`")])
def test_bytes_of_strangers_are_refused_in_one_line(text: bytes, shown: str) -> None:
    """Found so: bytes that are no text ended the reader's thread, and line breaks made lines of their own in logs."""
    with pytest.raises(CorruptFrame, match=f"{shown}.*E-FRAME") as caught:
        messages.unpack(b"\x81\xa1" + text + b"\xc0", messages.Heartbeat, "worker 1")
    assert "\n" not in str(caught.value)

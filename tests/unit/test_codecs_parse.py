"""The spelling of codecs in plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import codecs as kit

from commlayer.compressors import Codec, error_feedback, identity, int8, parse, topk
from commlayer.compressors.payload import CODEC_IDS
from commlayer.compressors.plan_codecs import FACTORIES
from commlayer.errors import InvalidInput


@pytest.mark.parametrize("codec", kit.CODECS, ids=str)
def test_parse_and_str_are_inverse(codec: Codec) -> None:
    assert parse(str(codec)) == codec
    assert str(parse(str(codec))) == str(codec)


@given(ratio=st.floats(0, 1, exclude_min=True), values=st.sampled_from(["int8", "fp16", "fp32"]), exact=st.booleans())
def test_every_ratio_survives(ratio: float, values: str, exact: bool) -> None:
    codec = error_feedback(topk(ratio, values, exact))
    assert parse(str(codec)) == codec


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
        ("topk(rate=0.1)", "topk has no argument 'rate', allowed are ratio, values, exact"),
        ("fp16(1)", "fp16 takes 0 arguments"),
        ("fp16(x=1)", "fp16 has no argument 'x'"),
        ("topk(0.1, ratio=0.2)", "topk got 'ratio' twice"),
        ("topk(ratio=__import__('os'))", "'__import__' is unknown"),
        ("topk(ratio=1 + 1)", "'1 + 1' is neither a literal nor a codec"),
        ("topk(ratio=x)", "'x' is neither a literal nor a codec"),
        ("topk(**{'ratio': 1})", "topk has no argument 'None'"),
        ("topk(ratio=2)", "topk: ratio is 2"),
        ("int8(block=0)", "int8: block is 0"),
        ("int8(block=True)", "int8: block is True"),
        ("topk(values=[1])", "topk: values is [1]"),
        ("error_feedback()", "error_feedback needs inner"),
        ("error_feedback(3)", "error_feedback: inner is 3"),
        ("topk", "expected name(argument=value, ...)"),
        ("", "expected name"),
        ("topk(", "expected name"),
        ("(" * 5000, "expected name"),
        ("\0", "expected name"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(text)
    assert words in caught.value.what
    assert caught.value.code == ("E-CODEC-ARGUMENT" if ": " in words else "E-CODEC-NAME")
    assert "\n" not in str(caught.value)


WRAPPERS = {"error_feedback", "momentum"}
"""Factories whose codecs have the number of what is inside."""


def test_tables_agree() -> None:
    for name, number in CODEC_IDS.items():
        assert parse(f"{name}()").id == number
    assert len(set(CODEC_IDS.values())) == len(CODEC_IDS)
    assert set(CODEC_IDS) | WRAPPERS == set(FACTORIES)

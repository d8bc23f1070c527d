"""A codec's spelling as a value: the same for all ways to write it, and what it says agrees with the codec that it spells."""

from __future__ import annotations

import inspect

import pytest

from commlayer.codec_spec import RULES, spec_error
from commlayer.compressors import parse, wrap
from commlayer.compressors.plan_codecs import FACTORIES
from commlayer.engine.plan_choice import promise_of
from commlayer.errors import InvalidInput
from commlayer.planner.costs import Prices
from commlayer.planner.model import Cluster, Policy
from commlayer.planner.search import plan
from commlayer.planner.tables import node, profile_from_tables
from commlayer.records import Spec

NUMEL = 1 << 20
PRICED = (
    "identity()", "fp16()", "bf16()", "int8()", "int8(block=64)", "int4()", "int4(block=32)", "qsgd()", "qsgd(levels=1)",
    "qsgd(levels=127)", "onebit()", "onebit(block=64)",
    "topk(0.5)", "topk(0.01)", "topk(0.01, values='fp32')", "topk(0.01, values='int4')", "topk(0.001, values='fp16')",
    "topk(1.0)", "block_threshold()", "block_threshold(0.1, run=64)", "block_threshold(0.1, values='fp32')", "randomk()",
    "randomk(0.3)",
    "error_feedback(topk(0.2), lr_correction=True)", "momentum(topk(0.1))", "momentum(fp16())",
)
NOT_PRICED = ("powersgd()", "powersgd(shapes=((2, 3),))")


@pytest.mark.parametrize("text", PRICED)
def test_tables_price_what_is_sent(text: str) -> None:
    """Not what the family sends with other arguments: half of the entries, whole floats, eight bits."""
    cost, = (c for c in profile_from_tables(Cluster((node("a", "cpu", "10g"),)), (text,)).codecs)
    codec = wrap(parse(text))
    bound = codec.bound(Spec((NUMEL,)))
    assert 0.8 * bound <= cost.nbytes(NUMEL) <= 1.15 * bound
    assert (cost.sums, cost.alone, cost.answers) == promise_of(codec)


@pytest.mark.parametrize("text", NOT_PRICED)
def test_what_depends_on_more_than_a_size_has_to_be_measured(text: str) -> None:
    with pytest.raises(ValueError, match=r"powersgd\(.*E-PLAN-CODEC-COST"):
        profile_from_tables(Cluster(()), (text,))


def test_a_price_is_found_however_a_codec_is_spelled() -> None:
    cluster = Cluster((node("a", "cpu", "10g"),))
    prices = Prices(cluster, profile_from_tables(cluster, ("topk(ratio=0.5)", "qsgd(levels=127)")))
    for text in (" topk(0.5)", "topk( ratio = 0.5, values='int8')", "error_feedback(topk(0.5))", str(wrap(parse("topk(0.5)")))):
        assert prices.cost(text, "cpu", cluster.nodes[0]).codec == "topk(ratio=0.5)"
    with pytest.raises(ValueError, match=r"topk\(0\.4\) on cpu\b.*qsgd.*E-PLAN-CODEC-COST"):
        prices.cost("topk(0.4)", "cpu", cluster.nodes[0])


@pytest.mark.parametrize("family", FACTORIES)
def test_rules_name_the_arguments_of_the_factories(family: str) -> None:
    parameters = inspect.signature(FACTORIES[family]).parameters
    assert list(RULES[family]) == list(parameters)
    given = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert given == {name: rule.default for name, rule in RULES[family].items() if name in given}
    assert set(RULES) == set(FACTORIES)


@pytest.mark.parametrize(("text", "words"), [
    ("topk(0)", "topk: ratio is 0"),
    ("topk(ratio=True)", "topk: ratio is True"),
    ("topk(ratio=1e999)", "topk: ratio is inf"),
    ("block_threshold(-0.1)", "block_threshold: ratio is -0.1"),
    ("topk(values='fp64')", "topk: values is 'fp64'"),
    ("qsgd(levels=8)", "qsgd: levels is 8, but it must be one of 1, 3, 7, 15, 127"),
    ("momentum(7)", "momentum: inner is 7"),
    ("partition(int8(), parts=2)", "partition was removed; use powersgd(shapes=...)"),
    ("powersgd(shapes=(3,))", "powersgd: shapes is (3,)"),
    ("gzip()", "'gzip' is unknown"),
])
def test_what_no_codec_has_is_refused_where_it_is_read(text: str, words: str) -> None:
    """By the planner without a codec at hand, and by the codecs in the same words."""
    assert words in spec_error(text)
    with pytest.raises(InvalidInput) as caught:
        parse(text)
    assert str(caught.value) == spec_error(text)
    assert caught.value.code == (code := "E-CODEC-ARGUMENT" if ": " in words else "E-CODEC-NAME")
    assert "\n" not in spec_error(text)
    cluster = Cluster((node("a", "cpu", "10g"), node("b", "cpu", "10g")))
    for refused in (lambda: profile_from_tables(cluster, (text,)), lambda: plan(toy(), cluster, None, Policy(codecs=(text,)))):
        with pytest.raises(InvalidInput) as caught:
            refused()
        assert words in caught.value.what
        assert caught.value.code == code


def toy():  # type: ignore[no-untyped-def]
    from support.plans import toy_job

    return toy_job()

"""Codec specifications: spellings, nesting, prices, and what is refused."""

from __future__ import annotations

import inspect

import pytest
import torch
from support import codecs as kit

from commlayer.codec_spec import RULES, spec_error
from commlayer.compressors import (
    Codec,
    error_feedback,
    identity,
    int8,
    kernels,
    make_codec,
    momentum,
    onebit,
    parse,
    qsgd,
    topk,
    two_way,
    wrap,
)
from commlayer.compressors.feedback import encodes_updates
from commlayer.compressors.kernels import fallback
from commlayer.compressors.plan_codecs import FACTORIES
from commlayer.engine.job.plan_checks import codec_promise
from commlayer.errors import InvalidInput
from commlayer.planner.costs import Prices
from commlayer.planner.data.tables import node, profile_from_tables
from commlayer.planner.model import Cluster, Policy
from commlayer.planner.search.plan_search import plan
from commlayer.records import Bucket, Slice, Spec

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
def test_tables_price_the_bytes_sent(text: str) -> None:
    """Prices hold for the given arguments, not for the family's other ones: half of the entries, whole floats, eight bits."""
    cost, = (c for c in profile_from_tables(Cluster((node("a", "cpu", "10g"),)), (text,)).codecs)
    codec = wrap(parse(text))
    bound = codec.bound(Spec((NUMEL,)))
    assert 0.8 * bound <= cost.nbytes(NUMEL) <= 1.15 * bound
    assert (cost.sums, cost.alone, cost.answers) == codec_promise(codec)


@pytest.mark.parametrize("text", NOT_PRICED)
def test_costs_that_depend_on_more_than_a_size_must_be_measured(text: str) -> None:
    with pytest.raises(ValueError, match=r"powersgd\(.*E-PLAN-CODEC-COST"):
        profile_from_tables(Cluster(()), (text,))


def test_price_does_not_depend_on_the_spelling() -> None:
    cluster = Cluster((node("a", "cpu", "10g"),))
    prices = Prices(cluster, profile_from_tables(cluster, ("topk(ratio=0.5)", "qsgd(levels=127)")))
    for text in (" topk(0.5)", "topk( ratio = 0.5, values='int8')", "error_feedback(topk(0.5))", str(wrap(parse("topk(0.5)")))):
        assert prices.cost(text, "cpu", cluster.nodes[0]).codec == "topk(ratio=0.5)"
    with pytest.raises(ValueError, match=r"topk\(0\.4\) on cpu\b.*qsgd.*E-PLAN-CODEC-COST"):
        prices.cost("topk(0.4)", "cpu", cluster.nodes[0])


@pytest.mark.parametrize("family", FACTORIES)
def test_rules_use_the_argument_names_of_the_factories(family: str) -> None:
    parameters = inspect.signature(FACTORIES[family]).parameters
    assert list(RULES[family]) == list(parameters)
    given = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert given == {name: rule.default for name, rule in RULES[family].items() if name in given}
    assert set(RULES) == set(FACTORIES)


@pytest.mark.parametrize(("text", "words"), [
    ("topk(0)", "topk: ratio is 0"),
    ("topk(ratio=True)", "topk: ratio is True"),
    ("qsgd(levels=8)", "qsgd: levels is 8, but it must be one of 1, 3, 7, 15, 127"),
    ("gzip()", "'gzip' is unknown"),
    (f"topk({'9' * 400})", "topk: ratio is 9"),
    (f"topk({'1+' * 5000}1)", "10007 characters, allowed 4096"),
    (f"topk({'-' * 4000}1)", "expected a name"),
    (f"a{'.b' * 2000}()", "is unknown"),
])
def test_unknown_arguments_are_refused_when_parsed(text: str, words: str) -> None:
    """By the planner, which has no codec object, and by the codecs with the same message."""
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


LEAVES = (
    "identity()", "fp16()", "int8(block=64)", "qsgd(block=64, levels=127)", "onebit(block=64)", "topk(ratio=0.1)",
    "topk(ratio=0.1, values='fp32')", "block_threshold(ratio=0.2)", "randomk(ratio=0.2)", "powersgd(rank=2)",
    "powersgd(rank=2, shapes=((20, 30), (10, 10)))",
)
WRAPPERS = (
    "error_feedback({})", "momentum({})",
)


def spellings(depth: int) -> list[str]:
    inner = spellings(depth - 1) if depth else []
    return [*LEAVES, *(wrapper.format(text) for wrapper in WRAPPERS for text in inner)]


def refusal(text: str) -> str:
    """Why a specification is refused; empty if accepted."""
    try:
        parse(text)
    except ValueError as error:
        return str(error)
    return ""


WHY = {text: refusal(text) for text in spellings(2)}
ACCEPTED = {str(codec): codec for codec in (wrap(parse(text)) for text, why in WHY.items() if not why)}


@pytest.mark.parametrize("codec", ACCEPTED.values(), ids=ACCEPTED)
def test_spelling_of_a_nested_codec_is_parsed(codec: Codec) -> None:
    assert parse(str(codec)) == codec
    assert not codec.biased


@pytest.mark.parametrize(("up", "down", "says"), [
    ("randomk()", "int8()", "up is error_feedback.randomk"),
    ("int8()", "randomk()", "down is error_feedback.randomk"),
])
def test_codecs_that_cannot_be_two_way_are_refused(up: str, down: str, says: str) -> None:
    with pytest.raises(ValueError, match=rf"two_way: {says}\b.*E-CODEC-ARGUMENT"):
        two_way(wrap(parse(up)), wrap(parse(down)))


@pytest.mark.parametrize(("by_node", "says"), [
    (("topk(ratio=0.1)", "topk(ratio=0.2)"), "ratio=0.2.* larger .*ratio=0.1"),
    (("topk(ratio=0.1)", "topk(ratio=0.05, values='fp16')"), "'fp16'.* does not read"),
    (("topk(ratio=0.1)", "int8()"), "does not read"),
    (("topk(ratio=0.1)", "error_feedback(topk(ratio=0.1), lr_correction=True)"), "does not read"),
])
def test_server_must_decode_the_codec_of_every_node(by_node: tuple[str, ...], says: str) -> None:
    bucket = Bucket(3, (Slice(0, 0, 700),), "service", "topk(ratio=0.1)", by_node=by_node)
    for number in (None, 0, 1):
        with pytest.raises(ValueError, match=f"bucket 3: by_node has .*{says}.*E-PLAN-BY-NODE"):
            make_codec(bucket, number)


SPEC_MOMENTUM = Spec((60, 50))
N = SPEC_MOMENTUM.numel


def test_momentum_equals_sgd_momentum() -> None:
    cluster = kit.Cluster(momentum(identity(), 0.9), SPEC_MOMENTUM, 1)
    weight = torch.zeros(N, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    applied = torch.zeros(N)
    for step in range(5):
        x = kit.noise(N, step)
        weight.grad = x.clone()
        optimizer.step()
        applied -= cluster.step([x])[0]
    torch.testing.assert_close(applied, weight.detach())


def test_feedback_is_placed_inside_accumulating_wrappers() -> None:
    assert wrap(momentum(topk())) == momentum(error_feedback(topk()))
    assert wrap(momentum(momentum(int8()), 0.5)) == momentum(momentum(error_feedback(int8())), 0.5)
    assert wrap(momentum(qsgd())) == momentum(qsgd())


def test_units() -> None:
    on = error_feedback(int8(), lr_correction=True)
    assert encodes_updates(on)
    assert encodes_updates(momentum(on))
    assert not encodes_updates(error_feedback(int8()))
    assert "lr_correction" not in str(error_feedback(int8())), "plans from before there was a choice"


def test_unsupported_codecs_are_refused_in_one_line() -> None:
    with kernels.use(fallback):
        with pytest.raises(InvalidInput, match="randomk") as caught:
            make_codec(Bucket(0, (Slice(0, 0, 10),), "service", "randomk()"))
        assert caught.value.code == "E-CODEC-BACKEND"
        state = onebit().init(Spec((64,)))
        with pytest.raises(InvalidInput) as caught:
            onebit().start(torch.ones(64), state, kit.room(onebit(), Spec((64,))))
        assert caught.value.code == "E-CODEC-BACKEND"

"""Named machines and links: what the tables say, what profiles are made of them, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from commlayer.compressors.plan_codecs import parse
from commlayer.planner.model.cluster import Cluster, Link
from commlayer.planner.pricing.path_cost import Prices
from commlayer.planner.tables.machines import DEFAULT_CODECS, GPUS, INTRA, gpu, link, node, profile_from_tables, speed
from commlayer.records import Spec


@pytest.mark.parametrize(("name", "expected"), [
    ("home-100/20", Link(20e6, 100e6, 10e-3)),
    ("fiber-1000", Link(1e9, 1e9, 4e-3)),
    ("10g", Link(10e9, 10e9, 25e-6)),
    ("100m", Link(100e6, 100e6, 25e-6)),
])
def test_links(name: str, expected: Link) -> None:
    assert link(name) == expected


def test_speeds_are_against_a_v100() -> None:
    assert speed("v100") == 1
    assert speed("cpu") < min(g.speed for g in GPUS.values())
    assert speed("rtx2060") < speed("rtx3060") < speed("rtx3090") < speed("rtx4090") < speed("h100")
    assert speed("RTX3060") == speed("rtx3060")


def test_a_profile_prices_every_codec_on_every_device() -> None:
    cluster = Cluster((node("a", "rtx3060", "home-100/20"), node("b", "h100", "25g", ranks=4, intra="nvlink-h100"),
                       node("c", "cpu", "fiber-1000")))
    prices = Prices(cluster, profile_from_tables(cluster))
    for codec in DEFAULT_CODECS:
        a, b = (prices.cost(codec, "gpu", n) for n in cluster.nodes[:2])
        assert (a.device, b.device) == ("rtx3060", "h100")
        assert a.encode(10**8) >= b.encode(10**8)
        assert prices.cost(codec, "cpu", cluster.nodes[0]).decode(10**7) > a.decode(10**7)


def test_sizes_are_those_of_the_codecs() -> None:
    """What a codec really sends stays near the table."""
    profile = profile_from_tables(Cluster((node("a", "cpu", "10g"),)))
    numel = 1 << 20
    for cost in profile.codecs:
        bound = parse(cost.codec).bound(Spec((numel,)))
        assert 0.5 * bound <= cost.nbytes(numel) <= 1.1 * bound, cost.codec


@pytest.mark.parametrize(("call", "message"), [
    (lambda: gpu("rtx306"), "GPU 'rtx306'.* rtx3060,.*E-GPU-NAME"),
    (lambda: gpu("abacus"), "GPU 'abacus'.* gtx1070,.*E-GPU-NAME"),
    (lambda: node("a", "v1000", "10g"), "'v1000'.* v100,.*E-GPU-NAME"),
    (lambda: link("dsl"), "link 'dsl'.*E-LINK-NAME"),
    (lambda: link("home-100/0"), "link 'home-100/0'.*E-LINK-NAME"),
    (lambda: node("a", "v100", "10g", intra="string"), f"intra 'string': .*{', '.join(INTRA)}.*E-LINK-NAME"),
    (lambda: profile_from_tables(Cluster(()), ("gzip()",)), "'gzip'.* bf16,.*E-CODEC-NAME"),
    (lambda: profile_from_tables(Cluster(()), ("topk(ratio=0)",)), r"topk: ratio is 0\b.*E-CODEC-ARGUMENT"),
])
def test_unknown_names(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

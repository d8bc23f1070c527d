"""Paths that code on GPUs and CPUs by turns: found where they are best, and only what workers run."""

from __future__ import annotations

import pytest
from msgspec import structs
from support.plans import cluster, toy_job

from commlayer.engine.plan_choice import unsuited
from commlayer.planner import tree as grammar
from commlayer.planner.candidates import SIZES, WORTH, alone_s, lane_s, mixed, options
from commlayer.planner.costs import Prices
from commlayer.planner.model import Cluster, CodecCost, Line, Policy, Profile
from commlayer.planner.plan_rules import lower
from commlayer.planner.search import plan
from commlayer.planner.tables import profile_from_tables
from commlayer.planner.tree import parse, spell

GPUS = cluster(4, "1g", device="rtx3090")
CODEC = "int8()"


def lopsided() -> Profile:
    """The GPU codes at no cost and is slow to decode; the host the other way round."""
    size, fast, slow = Line(64.0, 0.25), Line(1e-6, 1e-12), Line(2e-3, 4e-9)
    dense = [CodecCost("identity()", d, slow, slow, Line(16.0, 4.0), alone=True, answers=True) for d in ("gpu", "cpu")]  # type: ignore[arg-type]
    return structs.replace(profile_from_tables(GPUS), codecs=(
        *dense, CodecCost(CODEC, "gpu", fast, slow, size, alone=True, answers=True),
        CodecCost(CODEC, "cpu", slow, fast, size, alone=True, answers=True)), copy=Line(0.0))


@pytest.mark.parametrize("profile", [lopsided(), profile_from_tables(GPUS)], ids=["lopsided", "tables"])
def test_moving_one_coding_at_a_time_finds_what_trying_all_finds(profile: Profile) -> None:
    """On one level, where all can be tried."""
    prices = Prices(GPUS, profile)
    one, every = (grammar.options(GPUS, dense=False, kinds=("flat",), mixed=both) for both in (False, True))
    found = {*one, *mixed(prices, one, CODEC, ("gpu", "cpu"))}
    for size in SIZES:
        for price in (lambda steps, n: alone_s(steps, n), lambda steps, n: max(lane_s(steps, n).values())):
            best = min(price(prices.steps(path, CODEC), size) for path in every)
            assert min(price(prices.steps(path, CODEC), size) for path in found) <= best / (1 - WORTH)


def test_what_pays_is_planned_and_runs() -> None:
    made = plan(toy_job(), GPUS, lopsided(), Policy(codecs=(CODEC,)))
    both = [b for b in made.buckets if not grammar.one_device(parse(b.path))]
    assert both, {b.path for b in made.buckets}
    assert all("encode@gpu" in b.path and "decode@cpu" in b.path for b in both)
    assert unsuited(lower(made), 4, 1, cuda=True) == []
    gpu_alone = plan(toy_job(), GPUS, lopsided(), Policy(codecs=(CODEC,), devices=("gpu",)))
    assert made.step_s < gpu_alone.step_s


@pytest.mark.parametrize(("nodes", "policy"), [
    (GPUS, Policy(devices=("cpu",))), (GPUS, Policy(devices=("gpu",))), (cluster(4, "10g", device="cpu"), Policy()),
    (Cluster((*GPUS.nodes[:3], structs.replace(GPUS.nodes[3], device="cpu"))), Policy()),
], ids=["the host alone", "GPUs alone", "no GPUs", "one without"])
def test_nothing_is_mixed_where_only_one_device_codes(nodes: Cluster, policy: Policy) -> None:
    profile = profile_from_tables(nodes)
    assert all(grammar.one_device(parse(o.path)) for o in options(Prices(nodes, profile), policy))


def test_what_goes_to_a_server_is_coded_in_one_place() -> None:
    served = [path for path in grammar.options(GPUS, dense=False) if grammar.served(path)]
    assert served
    assert mixed(Prices(GPUS, lopsided()), served, CODEC, ("gpu", "cpu")) == (), spell(served[0])

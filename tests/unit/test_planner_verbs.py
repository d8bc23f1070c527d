"""explain, diff and what_if, on plans that the planner made; and golden plans of the papers' cases."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs
from support.learning import learnt
from support.plans import cluster, toy_job

from commlayer.planner import tables
from commlayer.planner.baselines import Curve, Point, at_rate, break_even, point, what_if
from commlayer.planner.explanation import bucket_of, diff, explain, tensor_names
from commlayer.planner.model import Policy
from commlayer.planner.search import plan
from commlayer.planner.simulation import simulate

HOMES = cluster(3, "home-100/20", reachable=False)
JOB = toy_job()
PLAN = plan(JOB, HOMES)
GOLDEN = Path(__file__).parents[1] / "golden" / "plans"


def test_a_timeline_accounts_for_the_step() -> None:
    timeline = simulate(PLAN, JOB, HOMES)
    assert timeline.step_s == PLAN.step_s
    assert timeline.exposed_s == pytest.approx(timeline.step_s - timeline.compute_s)
    assert max(timeline.done_s) <= timeline.step_s
    assert {span.bucket for span in timeline.spans} == {b.id for b in PLAN.buckets}
    assert all(span.start_s >= timeline.ready_s[span.bucket] - 1e-12 for span in timeline.spans)
    assert all(span.end_s >= span.start_s for span in timeline.spans)


def test_lanes_of_a_timeline_are_never_held_twice() -> None:
    held: dict[str, list[tuple[float, float]]] = {}
    for span in simulate(PLAN, JOB, HOMES).spans:
        for lane in span.lanes if len(span.lanes) == 1 else ():
            held.setdefault(lane, []).append((span.start_s, span.end_s))
    assert held
    for spans in held.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans))


def test_local_steps_share_an_exchange() -> None:
    """An exchange after four steps begins when the last is over: nothing hides it."""
    dense = plan(JOB, HOMES, None, Policy(codecs=("identity()",)))
    often, rarely = simulate(dense, JOB, HOMES), simulate(structs.replace(dense, local_steps=4), JOB, HOMES)
    assert rarely.compute_s == pytest.approx(4 * often.compute_s)
    assert often.step_s > rarely.step_s / 4


def test_explaining_a_bucket_gives_its_tasks() -> None:
    told = explain(PLAN, 0, JOB, HOMES)
    assert told.bucket == PLAN.buckets[0]
    assert told.spans
    assert {span.bucket for span in told.spans} == {0}
    assert told.done_s == max(span.end_s for span in told.spans)
    assert told.tensors == tensor_names(PLAN.buckets[0], JOB)


def test_buckets_are_found_by_number_and_by_tensor() -> None:
    assert bucket_of(PLAN, JOB, "1") == 1
    found = bucket_of(PLAN, JOB, "layer3.weight")
    assert any(name.startswith("layer3.weight") for name in tensor_names(PLAN.buckets[found], JOB))
    with pytest.raises(ValueError, match="bucket 'layer99'.*E-PLAN-QUESTION"):
        bucket_of(PLAN, JOB, "layer99")
    with pytest.raises(ValueError, match=f"bucket 999: .* {len(PLAN.buckets) - 1}.*E-PLAN-QUESTION"):
        explain(PLAN, 999, JOB, HOMES)


def test_equal_plans_have_no_difference() -> None:
    assert diff(PLAN, PLAN, JOB).equal
    bare = structs.replace(PLAN, buckets=tuple(structs.replace(b, why=None) for b in PLAN.buckets), step_s=0.0)
    assert diff(PLAN, bare, JOB).equal, "predictions are no decisions"


def test_a_difference_names_the_tensor() -> None:
    other = structs.replace(PLAN.buckets[0], codec="fp16()")
    told = diff(PLAN, structs.replace(PLAN, buckets=(other, *PLAN.buckets[1:]), local_steps=2), JOB)
    assert told.fields == (("local_steps", "1", "2"),)
    names = {JOB.tensors[s.tensor].name for s in other.slices}
    assert {change.tensor for change in told.changes} == names
    assert all("fp16()" in change.after for change in told.changes)


def test_plans_of_different_models_are_not_compared() -> None:
    with pytest.raises(ValueError, match=f"{PLAN.job}.*0{{16}}.*E-PLAN-QUESTION"):
        diff(PLAN, structs.replace(PLAN, job="0" * 16))


@pytest.mark.parametrize("bps", [1e7, 1e8, 1e9])
def test_a_sweep_by_the_shortest_step_keeps_the_plan_whose_step_is_shortest(bps: float) -> None:
    machines = at_rate(HOMES, bps)
    profile, policy = learnt(machines), Policy(objective="step")
    found, made = point("", bps, JOB, machines, profile, policy), plan(JOB, machines, profile, policy)
    assert found.plan_s == pytest.approx(min(made.step_s, found.dense_s))
    assert (found.steps, found.steps_high) == (0, 0), "nobody asked for them"
    assert found.gain == pytest.approx(found.dense_s / found.plan_s)


def test_a_break_even_says_of_what_it_is() -> None:
    coded = Point("a", 1e8, 0.1, 0.3, 1.0, codec="int4()")
    local = structs.replace(coded, mode="H=4", codec="identity()")
    dense = Point("b", 1e9, 0.1, 0.1, 1.0, codec="identity()")
    assert break_even(Curve("bandwidth", (coded, dense), 3e8)) == "compression pays below 300 Mb/s"
    for curve in (Curve("bandwidth", (local, dense), 3e8), Curve("bandwidth", (coded, local, dense), 3e8)):
        assert break_even(curve) == "leaving dense exchange in each step pays below 300 Mb/s"
    assert break_even(Curve("bandwidth", (local,))) == "leaving dense exchange in each step pays at all of these rates"
    assert break_even(Curve("bandwidth", (dense,))) == "compression pays at none of these rates"


def test_more_bandwidth_helps_and_compression_pays_below_the_break_even() -> None:
    machines = cluster(3, "1g")
    curve = what_if(JOB, machines, bandwidths=[1e8, 1e11])
    slow, fast = curve.points
    assert slow.plan_s > fast.plan_s
    assert slow.gain > 1.5
    assert fast.gain == pytest.approx(1.0)
    assert curve.break_even_bps is not None
    assert 1e8 < curve.break_even_bps < 1e11
    for factor, pays in ((0.8, True), (1.25, False)):
        assert (point("", 0, JOB, at_rate(machines, curve.break_even_bps * factor)).gain > 1.02) is pays


def test_a_sweep_needs_no_price_of_what_goes_as_it_is_over_collectives() -> None:
    machines = cluster(2, "1g")
    costs = tables.profile_from_tables(machines)
    coded = structs.replace(costs, codecs=tuple(c for c in costs.codecs if c.codec != "identity()"))
    slow, fast = what_if(JOB, machines, coded, bandwidths=[1e8, 1e11]).points
    assert slow.gain > fast.gain >= 1
    with pytest.raises(ValueError, match=r"profile 'tables' .* identity\(\).*E-PLAN-CODEC-COST"):
        what_if(JOB, HOMES, coded, bandwidths=[1e8])


def test_nodes_may_be_added_counted_and_changed() -> None:
    node = structs.replace(HOMES.nodes[0], name="new")
    assert [p.x for p in what_if(JOB, HOMES, add_nodes=[node]).points] == [3.0, 4.0]
    assert [p.label for p in what_if(JOB, HOMES, counts=[2, 5]).points] == ["2 nodes", "5 nodes"]
    slow, fast = what_if(JOB, HOMES, gpus=["gtx1070", "rtx4090"]).points
    assert slow.plan_s > fast.plan_s


def test_counted_nodes_are_those_that_train() -> None:
    hub = tables.node("hub", "cpu", "fiber-1000", ranks=0)
    served = structs.replace(HOMES, nodes=(hub, *HOMES.nodes))
    curve = what_if(JOB, served, counts=[1, 2, 5])
    assert [p.label for p in curve.points] == ["1 nodes", "2 nodes", "5 nodes"]
    assert [p.samples_per_s * p.plan_s / (JOB.batch or 1) for p in curve.points] == pytest.approx([1, 2, 5])


@pytest.mark.parametrize(
    ("sweep", "message"),
    [({}, r"got 0\b.*E-PLAN-QUESTION"), ({"counts": [2], "gpus": ["v100"]}, r"gpus; got 2\b.*E-PLAN-QUESTION"),
     ({"counts": [0]}, r"nodes: got 0\b.*E-PLAN-QUESTION"),
     ({"bandwidths": [0.0]}, "bandwidth: got 0 bit/s.*E-PLAN-QUESTION"), ({"gpus": ["rtx1"]}, "'rtx1'.*E-GPU-NAME")],
)
def test_impossible_sweeps_are_refused(sweep: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        what_if(JOB, HOMES, **sweep)

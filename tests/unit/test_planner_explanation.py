"""Questions about plans: explain, diff and what_if."""

from __future__ import annotations

import pytest
from msgspec import structs
from support.plans import cluster, toy_job

from commlayer.planner.baselines import Curve, SweepResult, break_even, point, what_if, with_link_rate
from commlayer.planner.explanation import diff, explain, find_bucket, tensor_names
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.search.plan_search import plan
from commlayer.planner.simulation import simulate

HOMES = cluster(3, "home-100/20", reachable=False)
JOB = toy_job()
PLAN = plan(JOB, HOMES)


def test_timeline_accounts_for_the_whole_step() -> None:
    timeline = simulate(PLAN, JOB, HOMES)
    assert timeline.step_s == PLAN.step_s
    assert timeline.exposed_s == pytest.approx(timeline.step_s - timeline.compute_s)
    assert max(timeline.done_s) <= timeline.step_s
    assert {span.bucket for span in timeline.spans} == {b.id for b in PLAN.buckets}
    assert all(span.start_s >= timeline.ready_s[span.bucket] - 1e-12 for span in timeline.spans)
    assert all(span.end_s >= span.start_s for span in timeline.spans)


def test_buckets_are_found_by_number_and_by_tensor() -> None:
    assert find_bucket(PLAN, JOB, "1") == 1
    number = find_bucket(PLAN, JOB, "layer3.weight")
    assert any(name.startswith("layer3.weight") for name in tensor_names(PLAN.buckets[number], JOB))
    with pytest.raises(ValueError, match="bucket 'layer99'.*E-PLAN-QUESTION"):
        find_bucket(PLAN, JOB, "layer99")
    with pytest.raises(ValueError, match=f"bucket 999: .* {len(PLAN.buckets) - 1}.*E-PLAN-QUESTION"):
        explain(PLAN, 999, JOB, HOMES)


def test_equal_plans_have_no_difference() -> None:
    assert diff(PLAN, PLAN, JOB).equal
    bare = structs.replace(PLAN, buckets=tuple(structs.replace(b, why=None) for b in PLAN.buckets), step_s=0.0)
    assert diff(PLAN, bare, JOB).equal, "predictions are no decisions"


def test_difference_names_the_tensor() -> None:
    other = structs.replace(PLAN.buckets[0], codec="fp16()")
    difference = diff(PLAN, structs.replace(PLAN, buckets=(other, *PLAN.buckets[1:]), local_steps=2), JOB)
    assert difference.fields == (("local_steps", "1", "2"),)
    names = {JOB.tensors[s.tensor].name for s in other.slices}
    assert {change.tensor for change in difference.changes} == names
    assert all("fp16()" in change.after for change in difference.changes)


def test_break_even_names_its_quantity() -> None:
    coded = SweepResult("a", 1e8, 0.1, 0.3, 1.0, codec="int4()")
    local = structs.replace(coded, mode="H=4", codec="identity()")
    dense = SweepResult("b", 1e9, 0.1, 0.1, 1.0, codec="identity()")
    assert break_even(Curve("bandwidth", (coded, dense), 3e8)) == "compression pays below 300 Mb/s"
    for curve in (Curve("bandwidth", (local, dense), 3e8), Curve("bandwidth", (coded, local, dense), 3e8)):
        assert break_even(curve) == "a mode other than a dense exchange in every step pays below 300 Mb/s"
    assert break_even(Curve("bandwidth", (local,))).endswith("in every step pays at all of these rates")
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
        assert (point("", 0, checked_inputs(JOB, with_link_rate(machines, curve.break_even_bps * factor))).gain > 1.02) is pays


def test_nodes_may_be_added_counted_and_changed() -> None:
    node = structs.replace(HOMES.nodes[0], name="new")
    assert [p.x for p in what_if(JOB, HOMES, add_nodes=[node]).points] == [3.0, 4.0]
    assert [p.label for p in what_if(JOB, HOMES, counts=[2, 5]).points] == ["2 nodes", "5 nodes"]
    slow, fast = what_if(JOB, HOMES, gpus=["gtx1070", "rtx4090"]).points
    assert slow.plan_s > fast.plan_s


@pytest.mark.parametrize(
    ("sweep", "message"),
    [({}, r"got 0\b.*E-PLAN-QUESTION"), ({"counts": [2], "gpus": ["v100"]}, r"gpus; got 2\b.*E-PLAN-QUESTION"),
     ({"counts": [0]}, r"nodes: got 0\b.*E-PLAN-QUESTION"),
     ({"bandwidths": [0.0]}, "bandwidth: got 0 bit/s.*E-PLAN-QUESTION"), ({"gpus": ["rtx1"]}, "'rtx1'.*E-GPU-NAME")],
)
def test_impossible_sweeps_are_refused(sweep: dict[str, list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        what_if(JOB, HOMES, **sweep)

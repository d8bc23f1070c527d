"""Which sync modes plan="auto" may use: `exact=True`, the arguments of attach(), and when averaged gradients are given up."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from support.autotuning import JOB, candidate, plan_of

from commlayer import planner
from commlayer.autotune import replanner, search
from commlayer.autotune.measuring import RankMeasurement
from commlayer.autotune.plan_policy import LEAVES, MOST_STEPS, steps_of
from commlayer.codec_spec import parse_spec
from commlayer.engine.connection import JobContext
from commlayer.engine.sync_modes import LocalSteps, requested_modes, with_modes
from commlayer.planner.convergence import LearningRow
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Basis, PlanInputs, Policy, Profile
from commlayer.planner.tables import profile_from_tables, published
from commlayer.records import Plan

ROWS = tuple(
    LearningRow("adam", codes, codec, every, overlap, False, 0, 1.0 + more, 1.02 + more, more, more, 5, 5)
    for codec, costs in (("int4()", 0.01), ("topk(ratio=0.1)", 0.3), ("topk(ratio=0.01)", 1.5))
    for codes, every, overlap, more in (("gradients", 1, "", costs), ("updates", 1, "", costs),
                                        ("updates", 16, "", costs + 0.1), ("updates", 16, "round", costs + 0.2)))


FAST = "100/100Gb"


def inputs(links: str, **policy: Any) -> PlanInputs:
    cluster = cluster_from_line(f"2xrtx3060@{links}")
    profile: Profile = structs.replace(profile_from_tables(cluster), learning=ROWS)
    return PlanInputs(published("resnet101") if links == FAST else JOB, cluster, profile, Policy(optimizer="adam", **policy))


@pytest.mark.parametrize(("links", "exact", "away"), [
    ("2/2Mb", False, True), ("2/2Mb", True, False), (FAST, False, False),
])
def test_averaged_gradients_are_left_where_nothing_on_them_keeps_up_and_the_user_hears_why(
    links: str, exact: bool, away: bool,
) -> None:
    result = search.best_plan(inputs(links, exact=exact), plan_of(0.0, "int4()"))
    plan, leaves = result.plan, result.leaves
    assert search.exact(plan) is not away
    assert bool(leaves) is away
    if away:
        assert leaves.startswith("nothing on averaged gradients keeps up with these links (")
        assert "times as many to the loss at best): switches to 16 local steps" in leaves
        assert leaves.endswith("sync='step' keeps to averaged gradients")
        again = search.best_plan(inputs(links, exact=exact), plan)
        assert again == search.Best(plan), "said once"


def test_local_steps_that_are_sooner_but_not_by_enough_are_handed_on_beside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = search.best_plan(inputs("2/2Mb", exact=False), plan_of(0.0, "int4()"))
    sooner = taken.plan.step_s * taken.plan.steps_high
    kept = search.best_plan(inputs("2/2Mb", exact=True), plan_of(0.0, "int4()"))
    enough = sooner / (kept.plan.step_s * kept.plan.steps_high)
    assert enough < LEAVES
    monkeypatch.setattr(search, "LEAVES", 0.9 * enough)
    result = search.best_plan(inputs("2/2Mb", exact=False), plan_of(0.0, "int4()"))
    assert result == search.Best(kept.plan, local=taken.plan, for_local=taken.leaves)
    assert kept.local is None, "averaged gradients"


@pytest.mark.parametrize(("suggests", "links", "hinted"), [
    (True, "2/2Mb", True), (False, "2/2Mb", False), (True, FAST, False),
])
def test_on_averaged_gradients_it_says_what_local_steps_would_bring(suggests: bool, links: str, hinted: bool) -> None:
    current = plan_of(0.0, "int4()")
    kept = search.best_plan(inputs(links, exact=True), current)
    result = search.best_plan(inputs(links, exact=True), current, suggests=suggests)
    assert result == kept._replace(hint=result.hint)
    assert search.exact(result.plan)
    assert bool(result.hint) is hinted
    if hinted:
        away = search.best_plan(inputs(links, exact=False), current).plan
        times = kept.plan.step_s * kept.plan.steps_high / (away.step_s * away.steps_high)
        assert f" {times:.1f} times as fast: {away.local_steps} local steps" in result.hint
        assert "sync='auto'" in result.hint


def test_local_steps_that_would_be_a_little_sooner_are_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SOONER", 1e-3)
    assert not search.best_plan(inputs("2/2Mb", exact=True), plan_of(0.0, "int4()"), suggests=True).hint


def families(plan: Plan) -> set[str]:
    return {parse_spec(codec).core.family for b in plan.buckets for codec in (b.codec, b.down) if codec}


@pytest.mark.parametrize(("links", "factor", "sparse"), [
    ("2/2Mb", search.NOTHING_ELSE, True),  # nothing finer is at a loss in twice the time
    ("2/2Mb", 1e9, False), ("1000/1000Mb", search.NOTHING_ELSE, False),
])
def test_a_young_job_stays_with_fine_codecs_unless_links_leave_nothing_else(
    links: str, factor: float, sparse: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "NOTHING_ELSE", factor)
    made_from, current = inputs(links, exact=True), plan_of(0.0, "int4()")
    young = search.best_plan(made_from, current, young=True).plan
    assert ("topk" in families(young)) is sparse
    if links == "2/2Mb":
        assert "topk" in families(search.best_plan(made_from, current).plan), "which is what an older one takes"
    assert sparse or families(young) <= set(search.FINE)


def test_codecs_that_need_too_many_steps_are_not_searched() -> None:
    made_from, current = inputs("2/2Mb", exact=True), plan_of(0.0, "int4()")
    assert made_from.profile is not None
    hard = tuple(structs.replace(row, steps=4.0, steps_high=4.0) if row.codec.startswith("topk") else row for row in ROWS)
    made_from = structs.replace(made_from, profile=structs.replace(made_from.profile, learning=hard))
    plan = search.best_plan(made_from, current).plan
    assert families(plan) <= set(search.FINE)
    assert steps_of(plan, made_from) < MOST_STEPS


@pytest.mark.parametrize(("fields", "what"), [
    ({"local_steps": 4}, "4 local steps"), ({"codes": "updates"}, "weight changes"),
    ({"stale": True}, "late results"),
])
def test_a_plan_that_is_not_exact_is_refused(fields: dict[str, Any], what: str) -> None:
    plan = plan_of(0.0)
    late = {"buckets": (structs.replace(plan.buckets[0], stale=True), *plan.buckets[1:])}
    plan = structs.replace(plan, **(late if "stale" in fields else fields))
    assert with_modes(plan, requested_modes(None)) == plan
    with pytest.raises(ValueError, match=f"sync='step'.* {what}.*E-SYNC-PLAN"):
        with_modes(plan, requested_modes("step"))


def test_forward_overlap_is_exact() -> None:
    plan = structs.replace(plan_of(0.0), overlap="forward")
    assert with_modes(plan, requested_modes("step")) == plan


def test_what_the_planner_may_do_is_what_the_script_allows() -> None:
    connection = JobContext()
    connection.terms.optimizer = "adam"
    policy, suggests, young = replanner.limits_of(connection)
    assert (policy.optimizer, policy.exact, policy.forward) == ("adam", True, True)
    assert suggests
    assert young
    connection.terms.suggested = True
    assert not replanner.limits_of(connection).suggests, "once"
    connection.terms.requested, connection.terms.suggested = requested_modes("auto"), False
    policy, suggests, _ = replanner.limits_of(connection)
    assert (policy.exact, suggests) == (False, False)
    connection.terms.requested = requested_modes("step")
    assert connection.terms.allowed_modes() == {"forward"}
    assert connection.terms.forbidden_modes()["local"] == "attach() was given sync='step'"
    policy, suggests, _ = replanner.limits_of(connection)
    assert (policy.exact, policy.forward, suggests) == (True, True, False)
    connection.terms.forbids = lambda mode: "no optimizer" if mode != "forward" else ""
    for sync in (None, "auto"):
        connection.terms.requested = requested_modes(sync)
        policy, suggests, _ = replanner.limits_of(connection)
        assert (policy.exact, suggests) == (True, False)
    for passes, young in ((replanner.YOUNG - 1, True), (replanner.YOUNG, False)):
        connection.passes = passes
        assert replanner.limits_of(connection).young is young


@pytest.mark.parametrize(("sync", "may"), [
    (None, True), ("step", True), ("auto", True), ("forward", True), (LocalSteps(1), False), (LocalSteps(4), False),
])
def test_results_may_come_in_during_the_next_forward_pass_and_are_never_a_step_late(sync: Any, may: bool) -> None:
    """A script that reads `.grad` waits for the results of this step; results one step late would change what it reads."""
    connection = JobContext()
    connection.terms.requested = requested_modes(sync)
    policy = replanner.limits_of(connection).policy
    assert policy.forward is may
    assert policy.staleness is False
    connection.terms.forbids = lambda mode: "DistributedDataParallel ends backward() only when" if mode == "forward" else ""
    assert not replanner.limits_of(connection).policy.forward


def test_what_hides_behind_the_next_forward_pass_is_found() -> None:
    result = search.best_plan(inputs("1000/1000Mb", exact=True, forward=True), plan_of(0.0, "int4()"))
    assert (result.plan.overlap, result.leaves, result.local) == ("forward", "", None)
    waits = search.best_plan(inputs("1000/1000Mb", exact=True), plan_of(0.0, "int4()")).plan
    assert result.plan.step_s < waits.step_s
    assert result.plan.steps_high < waits.steps_high, "and what is hidden may be finer"


@pytest.mark.parametrize("late", [None, False])
def test_late_results_are_none_of_the_ways_unless_they_are_allowed(late: bool | None) -> None:
    freely = inputs("2/2Mb", exact=False, staleness=late, max_local_steps=1)
    assert freely.profile is not None
    rows = tuple(structs.replace(row, late=lateness, steps=row.steps + 0.01 * lateness)
                 for row in ROWS if (row.codes, row.every, row.overlap) == ("gradients", 1, "") for lateness in (False, True))
    bad = tuple(structs.replace(row, steps=9.0, steps_high=9.0) for row in ROWS if row.codes == "updates")
    profile = structs.replace(freely.profile, learning=(*rows, *bad))
    assert freely.policy is not None
    plan = planner.plan(freely.job, freely.cluster, profile, freely.policy)
    assert any(b.stale for b in plan.buckets) is (late is None)


@pytest.mark.parametrize(("own", "others"), [(False, False), (True, False), (False, True)])
def test_where_batches_are_shared_out_steps_stay_on_averaged_gradients(own: bool, others: bool) -> None:
    """Controllers refuse local steps: a plan that came by itself must not end a script."""
    connection = JobContext()
    connection.terms.balanced, connection.terms.requested = own, requested_modes("auto")
    rows = [RankMeasurement(0.1, 0.2, 1e8, 1e8, 0.01), RankMeasurement(0.1, 0.2, 1e8, 1e8, 0.01, others)]
    assert replanner.limits_of(connection, rows).policy.exact is (own or others)


def test_a_budget_reaches_the_planner_without_a_loss_model() -> None:
    result, connection = inputs("100/100Mb"), JobContext()
    assert result.profile is not None
    assert result.policy is not None
    assert replanner.bounded(connection, result.profile, result.policy)[1].max_loss == result.policy.max_loss
    connection.terms.max_loss = 0.02
    profile, policy = replanner.bounded(connection, result.profile, result.policy)
    assert (profile, policy.max_loss) == (result.profile, 0.02)




@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("links", ["2/2Mb", FAST])
def test_once_optimizers_remember_different_things_only_what_steps_locally_is_compared(links: str, exact: bool) -> None:
    made_from = inputs(links, exact=exact, staleness=False)
    current = structs.replace(plan_of(0.0, "int4()"), codes="updates", local_steps=16)
    result = search.best_plan(made_from, current, apart=True)
    plan = result.plan
    assert plan.steps_locally
    assert (result.leaves, result.local) == ("", None)
    assert not exact or (plan.codes, plan.local_steps, plan.overlap) == ("updates", 1, "")
    assert plan.step_s == pytest.approx(search.step_s(plan, made_from)), "priced as it runs, by the step"


def test_without_compression_is_in_updates_then_too() -> None:
    made_from, current = inputs("2/2Mb"), structs.replace(plan_of(0.0, "int4()"), codes="updates", local_steps=16)
    assert search.uncompressed(candidate(current)._replace(basis=Basis(current, made_from), current=current)) is None
    made_from = structs.replace(made_from, cluster=structs.replace(made_from.cluster, reachable=True))
    dense = search.uncompressed(candidate(current)._replace(basis=Basis(current, made_from), current=current), apart=True)
    assert dense is not None
    assert (dense.plan.codes, dense.runnable.codes) == ("updates", "updates")
    assert dense.steps == steps_of(dense.plan, made_from)

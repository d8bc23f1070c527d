"""Plans by seconds to a loss: convergence factors count, hidden exchanges use fine codecs, modes change only for a gain."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec import structs
from support.learning import learnt
from support.planner import at, price
from support.plans import toy_job

from commlayer.codec_spec import parse_spec
from commlayer.planner.buckets import default_plan
from commlayer.planner.convergence import Recipe
from commlayer.planner.costs import Excesses, bucket_weights, plan_excess
from commlayer.planner.data.tables import learning_rows as shipped_rows
from commlayer.planner.model import Cluster, Policy, Question
from commlayer.planner.plan_rules import verify
from commlayer.planner.search.plan_search import MOST_LOCAL_STEPS, PAYS, plan, searched_local_steps
from commlayer.planner.simulation import simulate
from commlayer.records import Plan, Slice

FREE = Policy(exact=False)
FP16: dict[str, Any] = {"codec": "fp16()", "path": "service", "servers": 1, "ranks_per_node": 1, "fuse_nbytes": 1,
                        "cut_nbytes": 1 << 24}
"""A bucket for each tensor."""


def made_for(machines: Cluster, policy: Policy) -> Plan:
    return plan(toy_job(), machines, learnt(machines), policy)


def test_slower_links_never_get_finer_codecs() -> None:
    rates = (1e10, 1e9, 1e8, 3e7, 1e7)
    exact = [made_for(at(bps), Policy()) for bps in rates]
    free = [made_for(at(bps), FREE) for bps in rates]
    for result in (exact[0], free[0]):
        assert {parse_spec(b.codec).family for b in result.buckets} <= {"identity", "fp16", "int8", "int4"}
        assert (result.local_steps, result.codes, result.overlap) == (1, "gradients", "")
    for plans in (exact, free):
        needed = [result.steps_high for result in plans]
        assert all(b >= a * (1 - PAYS) for a, b in itertools.pairwise(needed)), needed
        assert needed[-1] > needed[0]
    assert all(b.local_steps >= a.local_steps for a, b in itertools.pairwise(free)), [result.local_steps for result in free]
    assert all(price(f) <= price(e) * (1 + PAYS) for e, f in zip(exact, free, strict=True)), "more may be done"


def test_shortest_step_is_not_the_shortest_training() -> None:
    machines = at(1e8)
    by_step, to_loss = made_for(machines, Policy(objective="step")), made_for(machines, Policy())
    assert by_step.step_s < to_loss.step_s
    assert price(to_loss) < price(by_step)
    profile = learnt(machines)
    more = plan_excess(to_loss, Question(toy_job(), machines, profile, Policy()))
    assert (to_loss.steps, to_loss.steps_high) == pytest.approx((1 + more.steps, 1 + more.high))
    assert price(made_for(machines, Policy(optimizer="sgd"))) < price(to_loss), "it tolerates more than an unknown one"


def test_without_rows_all_steps_have_factor_one() -> None:
    machines = at(1e8)
    bare = structs.replace(learnt(machines), learning=())
    result = plan(toy_job(), machines, bare)
    assert (result.steps, result.steps_high) == (0.0, 0.0)
    assert result == plan(toy_job(), machines, bare, Policy(objective="step"))


@pytest.mark.parametrize("bps", [1e7, 1e8, 3e8, 1e9, 1e10])
def test_forward_overlap_waits_at_the_layer_that_needs_the_result(bps: float) -> None:
    """From backward pass to backward pass no bucket's exchange plus the compute after its result is longer."""
    job, machines = toy_job(), at(bps)
    timing = job.timing
    assert timing is not None
    profile = learnt(machines)
    plain = default_plan(job, **FP16)
    barrier = simulate(plain, job, machines, profile)
    hidden = simulate(structs.replace(plain, overlap="forward"), job, machines, profile)
    ways = [done - timing.forward_s + (timing.forward_s - min(timing.needed_s[s.tensor] for s in bucket.slices))
            for bucket, done in zip(plain.buckets, barrier.done_s, strict=True)]
    computing_s = timing.forward_s + timing.backward_s + timing.update_s
    assert hidden.step_s == pytest.approx(max(computing_s, *ways))
    assert hidden.done_s == pytest.approx(barrier.done_s), "the same transfers"
    assert computing_s <= hidden.step_s * (1 + 1e-9)
    assert hidden.step_s <= barrier.step_s * (1 + 1e-9)


def test_sync_modes_that_change_learning_are_used_only_if_allowed() -> None:
    machines = at(2e7)
    exact = made_for(machines, Policy())
    assert (exact.local_steps, exact.codes, exact.overlap) == (1, "gradients", "")
    assert not any(b.stale for b in exact.buckets)
    free = made_for(machines, FREE)
    assert free.local_steps > 1
    assert free.overlap == "round"
    assert price(free) < 0.9 * price(exact)
    assert made_for(machines, structs.replace(FREE, max_local_steps=2)).local_steps <= 2
    forward = [made_for(at(bps), Policy(forward=True)) for bps in (1e8, 3e8, 1e9)]
    assert any(result.overlap == "forward" for result in forward)
    assert all(result.codes == "gradients" for result in forward)


@pytest.mark.parametrize(("families", "optimizer", "late"), [
    (("sgd", "adam"), "adam", True), ((), "adam", False), (("sgd",), "adam", False), (("sgd",), "sgd", True),
    (("sgd", "adam"), "other", True), (("sgd",), "other", False),
])
def test_stale_results_are_used_only_if_measured(families: tuple[str, ...], optimizer: str, late: bool) -> None:
    """A user's table has such rows only if they were requested; if named explicitly they are used anyway."""
    machines = at(2e7)
    profile = learnt(machines)
    rows = tuple(r for r in profile.learning if r.every == 1 and not r.overlap and (not r.late or r.optimizer in families))
    for staleness, taken in ((None, late), (True, True), (False, False)):
        policy = structs.replace(FREE, optimizer=optimizer, staleness=staleness,
                                 codecs=() if late else ("int4()", "topk(ratio=0.1)"))
        result = plan(toy_job(), machines, structs.replace(profile, learning=rows), policy)
        assert any(b.stale for b in result.buckets) is taken


def test_part_of_a_model_is_weighted_by_its_elements_and_its_energy() -> None:
    job = toy_job()
    results = [(Slice(i, 0, info.numel),) for i, info in enumerate(job.tensors)]
    plain = bucket_weights(job, results)
    assert plain == pytest.approx([info.numel / job.numel for info in job.tensors])
    first = bucket_weights(job, results, [float(i == 0) for i in range(len(job.tensors))])
    assert first == pytest.approx([part / 2 + (i == 0) / 2 for i, part in enumerate(plain)])
    halves = [(Slice(0, 0, job.tensors[0].numel // 2),)]
    assert bucket_weights(job, halves, [1.0] + [0.0] * (len(job.tensors) - 1)) == pytest.approx([first[0] / 2], rel=0.01)


def test_measured_loss_of_the_users_task_holds_and_other_modes_add_to_it() -> None:
    machines = at(1e8)
    bare = learnt(machines)
    tuned = structs.replace(bare, codecs=tuple(structs.replace(c, task_loss=0.001) for c in bare.codecs))
    rows, known = Excesses(bare), Excesses(tuned)
    for codec in ("int4()", "topk(ratio=0.01)"):
        plain = rows.of((codec,), "", Recipe())
        assert known.of((codec,), "", Recipe()) == plain._replace(loss=0.001, loss_high=0.001)
        for recipe in (Recipe(every=16), Recipe(every=4, overlap="round"), Recipe(late=True), Recipe(codes="updates")):
            other = rows.of((codec,), "", recipe)
            assert known.of((codec,), "", recipe) == pytest.approx((
                other.steps, other.high, 0.001 + max(0.0, other.loss - plain.loss),
                0.001 + max(0.0, other.loss_high - plain.loss_high)))


@pytest.mark.parametrize(("policy", "energy", "message"), [
    (Policy(objective="fame"), (), "policy: objective is 'fame', .*loss, step.*E-PLAN-INPUT"),  # type: ignore[arg-type]
    (Policy(max_local_steps=-1), (), r"policy: max_local_steps is -1\b.*E-PLAN-INPUT"),
    (Policy(), (1.0,), r"energy has 1\b.* 12\b.*E-PLAN-INPUT"),
    (Policy(), (0.0,) * 12, "energy .*negative.*E-PLAN-INPUT"),
])
def test_impossible_plan_requests_are_one_line(policy: Policy, energy: tuple[float, ...], message: str) -> None:
    machines = at(1e8)
    with pytest.raises(ValueError, match=message) as caught:
        plan(toy_job(), machines, structs.replace(learnt(machines), energy=energy), policy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("measured", "searched"), [((2,), 2), ((2, 16), MOST_LOCAL_STEPS)])
def test_unmeasured_local_steps_are_searched_if_two_rows_show_their_growth(
    measured: tuple[int, ...], searched: int,
) -> None:
    machines = at(2e5)
    profile = learnt(machines)
    rows = tuple(row for row in profile.learning if row.every in (1, *measured))
    assert searched_local_steps(structs.replace(profile, learning=rows)) == searched
    result = plan(toy_job(), machines, structs.replace(profile, learning=rows), structs.replace(FREE, optimizer="adam"))
    assert result.local_steps == searched if searched == 2 else 16 < result.local_steps <= searched


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("bps", [2e5, 4e6, 3e7])
def test_limit_of_local_steps_only_truncates_the_search(bps: float, optimizer: str) -> None:
    """No limit finds a loss sooner than no limit does, except for what the search considers equal; a limit that is no power of
    two acts as the next lower one; a limit above the whole search has no effect.
    """
    machines = at(bps)
    costs = structs.replace(learnt(machines), learning=shipped_rows())

    def limited(most: int) -> Plan:
        return plan(toy_job(), machines, costs, structs.replace(FREE, optimizer=optimizer, max_local_steps=most))

    free = limited(0)
    for most in (2, 16, 64, 256, 500):
        result = limited(most)
        assert result.local_steps <= most
        assert price(free) <= price(result) * (1 + PAYS)
    assert limited(500) == limited(256)
    assert limited(9999) == limited(MOST_LOCAL_STEPS) == free
    assert bps > 1e6 or free.local_steps > 64, "beyond what was measured"


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("most", [1, 2, 0])
def test_plans_found_with_everything_allowed_obey_the_rules(optimizer: str, most: int) -> None:
    for bps, forward in itertools.product((4e6, 1e8, 4e8, 1e10), (False, True)):
        machines = at(bps)
        policy = structs.replace(FREE, optimizer=optimizer, max_local_steps=most, staleness=True, forward=forward)
        result = plan(toy_job(), machines, structs.replace(learnt(machines), learning=shipped_rows()), policy)
        assert verify(result, toy_job()) == []
        assert result.local_steps <= (most or MOST_LOCAL_STEPS)

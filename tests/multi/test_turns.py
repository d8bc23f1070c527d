"""Rounds in fragments: what a shorter lag costs in steps, how turns are simulated, and where a planner takes them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support import rank_pool
from support.learning import learnt
from support.planner import at, price, random_space
from support.plans import toy_job
from support.rank_pool import Servers, pool
from support.sync_modes import WORLD, Training
from support.sync_modes import plan as plan_for

import commlayer.engine.switch as by_itself
from commlayer.autotune import replanner, search
from commlayer.cli import plan_output
from commlayer.engine.connection import JobContext
from commlayer.engine.sync_modes import LocalSteps, RequestedModes, requested_modes, with_modes
from commlayer.planner import default_plan
from commlayer.planner import search as planning
from commlayer.planner.buckets import fragments_of
from commlayer.planner.convergence import LearningRow, Recipe, excess
from commlayer.planner.costs import hidden, plan_excess
from commlayer.planner.explanation import diff, explain
from commlayer.planner.model import Cluster, PlanInputs, Policy, Profile
from commlayer.planner.plan_rules import verify, way_of
from commlayer.planner.search import plan
from commlayer.planner.simulation import Fragment, Simulation, exact_s, simulate
from commlayer.planner.tables import profile_from_tables
from commlayer.planner.tables import rows as shipped_rows
from commlayer.records import Job, Plan

_ranks = rank_pool.ranks_first(WORLD)
SMALL = toy_job(numel=125_000, step_s=0.03)
"""1.5 M elements."""


def measured(machines: Cluster) -> Profile:
    """With the shipped rows."""
    return structs.replace(profile_from_tables(machines), learning=shipped_rows())


def rounds(job: Job, every: int, count: int, *, overlap: str = "round", codec: str = "int4()") -> Plan:
    """A bucket for each tensor."""
    made = default_plan(job, codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=1, cut_nbytes=1 << 24)
    return structs.replace(made, codes="updates", local_steps=every, overlap=overlap, fragments=count)


def step_s(job: Job) -> float:
    assert job.timing is not None
    return job.timing.forward_s + job.timing.backward_s + job.timing.update_s


# ---- what it costs in steps


@pytest.mark.parametrize("optimizer", ["sgd", "adam", ""])
@pytest.mark.parametrize("every", [2, 8, 32])
def test_a_shorter_lag_lies_on_the_line_between_waiting_and_a_whole_round(optimizer: str, every: int) -> None:
    rows = shipped_rows()
    recipe = Recipe(optimizer, "updates", every, "round")
    for codec in ("int4()", "topk(ratio=0.05)", "identity()"):
        whole, waited = excess(rows, codec, recipe), excess(rows, codec, recipe._replace(overlap=""))
        before = whole
        for count in (1, 2, every):
            found = excess(rows, codec, recipe._replace(fragments=count))
            for mine, late, soon in zip(found, whole, waited, strict=True):
                assert mine == pytest.approx(soon + (late - soon) / count if late > soon else late)
            assert all(a <= b for a, b in zip(found, before, strict=True)), "sooner is never worse"
            before = found
        assert excess(rows, codec, recipe._replace(overlap="", fragments=2)) == waited, "what is waited for is as measured"


def test_what_was_measured_at_lags_of_three_and_five_of_sixteen_lies_on_it() -> None:
    """Virtual workers, int4, AdamW: 1.36 waited for, 1.41 and 1.47 merged 3 and 5 steps late, 1.71 a round late."""
    rows = tuple(LearningRow("adam", "updates", "int4()", 16, overlap, False, 0, steps, steps, 0.0, 0.0, 6, 6)
                 for overlap, steps in (("", 1.36), ("round", 1.71)))
    for lag, steps in ((4, 1.44), (8, 1.54)):
        found = excess(rows, "int4()", Recipe("adam", "updates", 16, "round", fragments=16 // lag))
        assert 1 + found.steps == pytest.approx(steps, abs=0.015)


def test_a_plan_is_priced_by_its_fragments() -> None:
    machines = at(1e7)
    steps = [plan_excess(rounds(SMALL, 8, count), SMALL, machines, measured(machines), Policy(optimizer="sgd")).high
             for count in (1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0] / 2


# ---- how long it takes


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 4, 8, 12, 64]), st.integers(0, 4), st.sampled_from(["", "round"]), st.floats(5.5, 10.5),
       st.sampled_from([0.0, 1e-3, 4e-2]))
def test_a_round_takes_no_less_than_its_steps_its_bytes_and_the_latencies_of_each_turn(
    every: int, doublings: int, overlap: str, magnitude: float, alpha_s: float,
) -> None:
    bps = 10**magnitude
    count = math.gcd(every, 2**doublings)
    machines = at(bps)
    machines = structs.replace(machines, nodes=tuple(
        structs.replace(n, link=structs.replace(n.link, alpha_s=alpha_s)) for n in machines.nodes))
    profile = learnt(machines)
    made = rounds(SMALL, every, count, overlap=overlap)
    if count > len(made.buckets):
        return
    timeline = simulate(made, SMALL, machines, profile)
    computing_s = every * step_s(SMALL)
    pushed: dict[str, float] = {}
    for span in timeline.spans:
        for lane in span.lanes:
            if lane.startswith("up:"):
                pushed[lane] = pushed.get(lane, 0.0) + span.nbytes * 8 / bps
    near = 1 - 1e-9
    assert timeline.compute_s == pytest.approx(computing_s)
    assert timeline.step_s >= computing_s * near
    # Up-links of groups stand for one node each; each turn's results come down behind its own sums.
    worker_s = min(pushed.values())
    assert timeline.step_s >= (worker_s + 2 * alpha_s * count + (0.0 if overlap else computing_s)) * near
    turns = fragments_of(made.buckets, count)
    edge_s = 0.0
    for places in turns:  # no turn's spans reach into another's
        begin = min(s.start_s for s in timeline.spans if s.bucket in places)
        end = max(s.end_s for s in timeline.spans if s.bucket in places)
        assert edge_s <= begin + 1e-9
        edge_s = end
    assert exact_s(made, SMALL, machines, profile, Policy()) == pytest.approx(timeline.step_s / every)


@pytest.mark.parametrize("bps", [3e6, 1e7, 1e8, 1e10])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_round_is_the_sum_of_its_turns_and_each_the_longer_of_its_exchange_and_its_steps(bps: float, count: int) -> None:
    machines = at(bps)
    profile = learnt(machines)
    made = rounds(SMALL, 8, count)
    waited = rounds(SMALL, 8, 1, overlap="")
    turn_s = 8 // count * step_s(SMALL)
    expected = 0.0
    for places in fragments_of(made.buckets, count):
        kept = tuple(structs.replace(waited.buckets[b], id=i) for i, b in enumerate(places))
        alone = simulate(structs.replace(waited, buckets=kept), SMALL, hidden(machines), profile)
        expected += max(turn_s, alone.step_s - 8 * step_s(SMALL))
    found = simulate(made, SMALL, machines, profile).step_s
    assert found == pytest.approx(expected)
    whole = simulate(rounds(SMALL, 8, 1), SMALL, machines, profile).step_s
    assert found >= whole * (1 - 1e-9), "turns hide no more than a round"


@pytest.mark.parametrize("seed", range(6))
def test_a_sweep_over_turns_finds_what_running_each_choice_does(seed: int) -> None:
    parts = [random_space(seed, budget=False), random_space(seed + 50, budget=False)]
    edge = len(parts[0][2])
    counts = [*parts[0][2], *parts[1][2]]
    turns = [Fragment(list(range(edge)), parts[0][1]), Fragment(list(range(edge, len(counts))), parts[1][1])]
    made = Simulation(turns)
    choice = [0] * len(counts)
    assert made.run(choice) == pytest.approx(sum(Simulation([turn]).run([0] * len(turn.places)) for turn in turns))
    same = [b for b in range(len(counts)) if counts[b] == counts[0]]
    for buckets in ([0], same):
        for option, seconds in enumerate(made.sweep(choice, buckets, math.inf)):
            changed = [option if b in buckets else 0 for b in range(len(counts))]
            assert seconds == pytest.approx(made.run(changed))
    limit = made.run(choice) * 1.01
    factors = [1.0 + 0.1 * option for option in range(counts[0])]
    every, within = made.sweep(choice, [0], math.inf), made.sweep(choice, [0], limit, factors=factors)
    for seconds, exact, factor in zip(within, every, factors, strict=True):
        assert exact * factor > limit or seconds == pytest.approx(exact), "what is within the limit is told"


# ---- where they are taken


def test_a_slow_link_takes_rounds_in_fragments_and_a_fast_one_none() -> None:
    free = Policy(exact=False, optimizer="sgd")
    near = structs.replace(at(1e10), nodes=tuple(
        structs.replace(node, link=structs.replace(node.link, alpha_s=1e-5)) for node in at(1e10).nodes))
    slow, fast = (plan(SMALL, machines, measured(machines), free) for machines in (at(1e7), near))
    assert slow.overlap == "round"
    assert slow.fragments > 1
    assert slow.local_steps % slow.fragments == 0
    assert verify(slow, SMALL) == []
    assert len(fragments_of(slow.buckets, slow.fragments)) == slow.fragments
    assert (fast.fragments, fast.overlap) == (1, "")
    whole = plan(SMALL, at(1e7), measured(at(1e7)), structs.replace(free, fragments=False))
    assert whole.fragments == 1
    assert price(slow) < 0.9 * price(whole)
    timeline = simulate(slow, SMALL, at(1e7), measured(at(1e7)), free)
    assert timeline.step_s / slow.local_steps == pytest.approx(slow.step_s), "what it says is what is simulated"
    assert f"H={slow.local_steps} round fragments={slow.fragments}" in way_of(slow)
    assert ("fragments", "1", str(slow.fragments)) in diff(structs.replace(slow, fragments=1), slow).fields
    told = explain(slow, 0, SMALL, at(1e7), measured(at(1e7)), free)
    assert any(f"in {slow.fragments} fragments" in str(part) for part in plan_output.explanation(told, 100))


def test_a_tensor_that_is_most_of_a_model_is_cut_for_turns_of_one_size() -> None:
    one = toy_job(tensors=1, numel=1_500_000, step_s=0.03)
    free = Policy(exact=False, optimizer="sgd")
    made = plan(one, at(1e7), measured(at(1e7)), free)
    assert made.fragments > 1
    assert verify(made, one) == []
    sizes = [sum(made.buckets[place].numel for place in places) for places in fragments_of(made.buckets, made.fragments)]
    assert max(sizes) < 1.1 * sum(sizes) / len(sizes)
    for places in fragments_of(made.buckets, made.fragments):
        loads = [0] * made.servers
        for place in places:
            loads[made.buckets[place].server] += made.buckets[place].numel
        assert max(loads) < 1.3 * sum(loads) / made.servers, "a turn waits for the server that has most of it"
    whole = plan(one, at(1e7), measured(at(1e7)), structs.replace(free, fragments=False))
    assert price(made) < 0.9 * price(whole)
    with pytest.raises(ValueError, match=r"fragments=2: .* 1 .*E-SYNC-FRAGMENTS"):
        simulate(rounds(one, 8, 2), one, at(1e7), measured(at(1e7)))


def test_a_small_model_goes_in_few_turns() -> None:
    assert planning.fragments(8, 1) == [1]
    small = toy_job(tensors=1, numel=20_000, step_s=0.03)
    assert plan(small, at(1e5), measured(at(1e5)), Policy(exact=False, optimizer="sgd")).fragments == 1


def test_what_auto_goes_over_to_says_in_how_many_parts() -> None:
    machines = at(1e7)
    found = search.best_plan(PlanInputs(SMALL, machines, measured(machines), Policy(exact=False, optimizer="sgd")),
                                  structs.replace(rounds(SMALL, 1, 1, overlap=""), codes="gradients"))
    parts = found.plan.fragments
    assert parts > 1
    assert f"{found.plan.local_steps} local steps, exchanged in {parts} parts while the next are taken" in found.leaves


class _Changes:
    """Members may leave."""


def test_auto_chooses_fragments_only_where_nobody_may_leave_and_the_script_has_not() -> None:
    connection = JobContext()
    assert replanner.limits_of(connection).policy.fragments
    connection.terms.requested = requested_modes(LocalSteps(4, fragments=2))
    assert not replanner.limits_of(connection).policy.fragments
    connection.terms.requested, connection.members = RequestedModes(), _Changes()  # type: ignore[assignment]
    assert not replanner.limits_of(connection).policy.fragments


def test_a_prediction_is_not_kept_where_the_script_asks_for_other_fragments() -> None:
    whole = structs.replace(rounds(SMALL, 8, 1), step_s=1.0, steps=1.5, steps_high=2.0)
    assert with_modes(whole, RequestedModes()) == whole
    laid = with_modes(whole, requested_modes(LocalSteps(8, fragments=4)))
    assert (laid.fragments, laid.step_s, laid.steps_high) == (4, 0.0, 0.0)


# ---- a running job goes over to them

ROUNDS = [("round", 1), ("gradients", 1), ("round", 4), ("round", 2), ("updates", 1), ("round", 4), ("every", 1), ("round", 2)]


def goes_over(rank: int, address: str) -> list[dict[str, Any]]:
    training = Training(rank, address, "gradients")
    found = []
    for way, count in ROUNDS:
        fields = {"fragments": count} if way == "round" else {}
        training.train(3)
        job = training.connection.worker.job
        switch = partial(by_itself.switch, training.connection, by_itself=True)
        switch(plan_for(job, way, **fields) if rank == 0 else None)
        worker = training.connection.worker
        found.append({"turns": [[b.id for b in turn] for turn in worker.turns], "plan": worker.plan,
                      "planned": fragments_of(worker.plan.buckets, count), "weights": training.tensors()})
    training.train(5)
    training.session.flush()
    found.append({"weights": training.tensors()})
    training.session.close()
    return found


def test_a_running_job_goes_over_to_any_fragments_by_itself() -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(goes_over, servers.address)
    for (way, count), mine in zip(ROUNDS, first, strict=False):
        assert mine["plan"].fragments == count, way
        assert mine["turns"] == mine["planned"]
    for mine, theirs in zip(first, second, strict=True):
        assert all((a == b).all() for a, b in zip(mine["weights"], theirs["weights"], strict=True))

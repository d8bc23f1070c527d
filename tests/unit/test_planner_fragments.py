"""Rounds of local steps in fragments: their cost in steps, their simulated time, and where the planner chooses them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.attached import assert_refused, outcome
from support.learning import learnt
from support.planner import at, price
from support.plans import toy_job

from commlayer.planner import default_plan
from commlayer.planner.buckets import fragments_of
from commlayer.planner.convergence import Recipe, excess
from commlayer.planner.costs import hidden
from commlayer.planner.model import Cluster, Policy, Profile
from commlayer.planner.plan_rules import verify
from commlayer.planner.search import plan
from commlayer.planner.simulation import exact_s, simulate
from commlayer.planner.tables import profile_from_tables
from commlayer.planner.tables import rows as shipped_rows
from commlayer.records import Job, Plan

SMALL = toy_job(numel=125_000, step_s=0.03)
"""1.5 M elements."""


def measured(machines: Cluster) -> Profile:
    """With the shipped rows."""
    return structs.replace(profile_from_tables(machines), learning=shipped_rows())


def rounds(job: Job, every: int, count: int, *, overlap: str = "round", codec: str = "int4()") -> Plan:
    """A bucket for each tensor."""
    chosen = default_plan(job, codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=1, cut_nbytes=1 << 24)
    return structs.replace(chosen, codes="updates", local_steps=every, overlap=overlap, fragments=count)


def step_s(job: Job) -> float:
    assert job.timing is not None
    return job.timing.forward_s + job.timing.backward_s + job.timing.update_s


@pytest.mark.parametrize("optimizer", ["sgd", "adam", ""])
@pytest.mark.parametrize("every", [2, 8, 32])
def test_a_shorter_lag_lies_on_the_line_between_waiting_and_a_whole_round(optimizer: str, every: int) -> None:
    rows = shipped_rows()
    recipe = Recipe(optimizer, "updates", every, "round")
    for codec in ("int4()", "topk(ratio=0.05)", "identity()"):
        full, waited = excess(rows, codec, recipe), excess(rows, codec, recipe._replace(overlap=""))
        before = full
        for count in (1, 2, every):
            result = excess(rows, codec, recipe._replace(fragments=count))
            for mine, late, soon in zip(result, full, waited, strict=True):
                assert mine == pytest.approx(soon + (late - soon) / count if late > soon else late)
            assert all(a <= b for a, b in zip(result, before, strict=True)), "sooner is never worse"
            before = result
        assert excess(rows, codec, recipe._replace(overlap="", fragments=2)) == waited, "what is waited for is as measured"


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 4, 8, 12, 64]), st.integers(0, 4), st.sampled_from(["", "round"]), st.floats(5.5, 10.5),
       st.sampled_from([0.0, 1e-3, 4e-2]))
def test_a_round_takes_no_less_than_its_steps_its_bytes_and_the_latencies_of_each_fragment(
    every: int, doublings: int, overlap: str, magnitude: float, alpha_s: float,
) -> None:
    bps = 10**magnitude
    count = math.gcd(every, 2**doublings)
    machines = at(bps)
    machines = structs.replace(machines, nodes=tuple(
        structs.replace(n, link=structs.replace(n.link, alpha_s=alpha_s)) for n in machines.nodes))
    profile = learnt(machines)
    chosen = rounds(SMALL, every, count, overlap=overlap)
    if count > len(chosen.buckets):
        return
    timeline = simulate(chosen, SMALL, machines, profile)
    computing_s = every * step_s(SMALL)
    pushed: dict[str, float] = {}
    for span in timeline.spans:
        for lane in span.lanes:
            if lane.startswith("up:"):
                pushed[lane] = pushed.get(lane, 0.0) + span.nbytes * 8 / bps
    near = 1 - 1e-9
    assert timeline.compute_s == pytest.approx(computing_s)
    assert timeline.step_s >= computing_s * near
    # A group's uplink stands for one node; each fragment's results arrive after its own sums.
    worker_s = min(pushed.values())
    assert timeline.step_s >= (worker_s + 2 * alpha_s * count + (0.0 if overlap else computing_s)) * near
    fragments = fragments_of(chosen.buckets, count)
    edge_s = 0.0
    for places in fragments:  # no fragment's spans reach into another's
        begin = min(s.start_s for s in timeline.spans if s.bucket in places)
        end = max(s.end_s for s in timeline.spans if s.bucket in places)
        assert edge_s <= begin + 1e-9
        edge_s = end
    assert exact_s(chosen, SMALL, machines, profile, Policy()) == pytest.approx(timeline.step_s / every)


@pytest.mark.parametrize("bps", [3e6, 1e7, 1e8, 1e10])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_round_is_the_sum_of_its_fragments_and_each_the_longer_of_its_exchange_and_its_steps(bps: float, count: int) -> None:
    machines = at(bps)
    profile = learnt(machines)
    chosen = rounds(SMALL, 8, count)
    waited = rounds(SMALL, 8, 1, overlap="")
    fragment_s = 8 // count * step_s(SMALL)
    expected = 0.0
    for places in fragments_of(chosen.buckets, count):
        kept = tuple(structs.replace(waited.buckets[b], id=i) for i, b in enumerate(places))
        alone = simulate(structs.replace(waited, buckets=kept), SMALL, hidden(machines), profile)
        expected += max(fragment_s, alone.step_s - 8 * step_s(SMALL))
    result = simulate(chosen, SMALL, machines, profile).step_s
    assert result == pytest.approx(expected)
    full = simulate(rounds(SMALL, 8, 1), SMALL, machines, profile).step_s
    assert result >= full * (1 - 1e-9), "fragments hide no more than a round"


def test_a_slow_link_gets_rounds_in_fragments_and_a_fast_one_none() -> None:
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
    full = plan(SMALL, at(1e7), measured(at(1e7)), structs.replace(free, fragments=False))
    assert full.fragments == 1
    assert price(slow) < 0.9 * price(full)
    timeline = simulate(slow, SMALL, at(1e7), measured(at(1e7)), free)
    assert timeline.step_s / slow.local_steps == pytest.approx(slow.step_s), "the plan's time is the simulated one"


def test_a_tensor_that_is_most_of_a_model_is_cut_into_fragments_of_one_size() -> None:
    one = toy_job(tensors=1, numel=1_500_000, step_s=0.03)
    free = Policy(exact=False, optimizer="sgd")
    chosen = plan(one, at(1e7), measured(at(1e7)), free)
    assert chosen.fragments > 1
    assert verify(chosen, one) == []
    sizes = [sum(chosen.buckets[place].numel for place in places) for places in fragments_of(chosen.buckets, chosen.fragments)]
    assert max(sizes) < 1.1 * sum(sizes) / len(sizes)
    for places in fragments_of(chosen.buckets, chosen.fragments):
        loads = [0] * chosen.servers
        for place in places:
            loads[chosen.buckets[place].server] += chosen.buckets[place].numel
        assert max(loads) < 1.3 * sum(loads) / chosen.servers, "a fragment waits for the server that has most of it"
    full = plan(one, at(1e7), measured(at(1e7)), structs.replace(free, fragments=False))
    assert price(chosen) < 0.9 * price(full)
    assert_refused(outcome(lambda: simulate(rounds(one, 8, 2), one, at(1e7), measured(at(1e7)))), "E-SYNC-FRAGMENTS",
                   "fragments=2: ", " 1 ")

"""Plan search: plans are legal, reproducible, within limits and as good as exhaustive search; fragments and sparse gradients.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from oracle.schedule import PortableSchedule
from support.attached import assert_refused, outcome
from support.codecs import NAMED
from support.learning import learnt
from support.loopback import Hub
from support.planner import at, price, random_space
from support.plans import cluster, toy_job

from commlayer import records
from commlayer.autotune.measure import calibration
from commlayer.autotune.measure.measurements import nonzero_fractions
from commlayer.autotune.planning.search import best_plan
from commlayer.compressors import make_codec, parse
from commlayer.compressors.feedback import wrap
from commlayer.engine.job.plan_checks import codec_promise, node_problems
from commlayer.engine.worker.worker import Worker
from commlayer.planner import default_plan, verify
from commlayer.planner.buckets import divide_into_fragments
from commlayer.planner.convergence import Recipe, excess
from commlayer.planner.costs import Prices, overlapped_cluster, plan_excess
from commlayer.planner.data import tables as machines
from commlayer.planner.data.tables import learning_rows as shipped_rows
from commlayer.planner.data.tables import profile_from_tables
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.model import DENSE, Cluster, LinearCost, Link, Node, Policy, Profile, Question
from commlayer.planner.plan_lint import lint
from commlayer.planner.plan_rules import lower, sync_mode
from commlayer.planner.search import choices
from commlayer.planner.search.choices import search, uniform
from commlayer.planner.search.options import options
from commlayer.planner.search.plan_search import plan
from commlayer.planner.simulation import PlannedFragment, Simulation, simulate, step_seconds
from commlayer.planner.tensors import keeps_zeros, sent_numel
from commlayer.planner.tree import Promise, find_misfits, sums_payloads
from commlayer.planner.tree import parse as tensor_file_path
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo, Timing

DENSE_ONLY = Policy(codecs=(DENSE,))


@pytest.mark.parametrize("costly", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_search_matches_exhaustive_search(seed: int, costly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`costly`: options need more steps the more they lose."""
    space, _, counts = random_space(seed, budget=seed % 2 == 0)
    if costly:
        rng = random.Random(seed)
        space = space._replace(excess=[[0.3 * rng.uniform(0.5, 1.5) * loss for loss in losses] for losses in space.loss])
    least = math.inf
    for choice in itertools.product(*map(range, counts)):
        if sum(space.loss[b][o] for b, o in enumerate(choice)) <= space.max_loss + 1e-9:
            steps = 1 + sum(space.excess[b][o] for b, o in enumerate(choice))
            least = min(least, space.steps.run(list(choice)) * steps)
    best = search(space, uniform(space))
    assert best.price == pytest.approx(least, rel=1e-9)
    assert best.loss <= space.max_loss + 1e-9
    monkeypatch.setattr(choices, "FEW", 0)
    assert search(space, uniform(space)).price <= least * 1.1, "also without trying everything it comes near"


@pytest.mark.parametrize("seed", range(4))
def test_search_gives_the_same_plan_without_the_native_core(seed: int) -> None:
    space, problem, _ = random_space(seed, budget=True)
    portable = space._replace(steps=PortableSchedule(problem))
    assert search(portable, uniform(portable)) == search(space, uniform(space))


CLUSTERS = {
    "homes": cluster(4, "home-100/20", reachable=False),
    "one server": cluster(3, "home-100/20", reachable=False, servers=1),
    "rack": cluster(4, "10g"),
    "two GPUs each": cluster(2, "1g", ranks=2),
    "CPUs": cluster(3, "100m", device="cpu"),
    "alone": cluster(1, "1g"),
    "uneven": Cluster((*cluster(3, "fiber-500", reachable=False).nodes,
                       structs.replace(cluster(1, "home-50/5").nodes[0], name="far", speed=0.5)), False),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_plans_are_legal_and_between_the_bound_and_the_dense_plan(name: str) -> None:
    job, machines = toy_job(), CLUSTERS[name]
    _, _, profile, policy = checked_inputs(job, machines)
    result = plan(job, machines)
    assert lint(result, job, machines, profile) == []
    dense = plan(job, machines, None, DENSE_ONLY)
    assert {b.codec for b in dense.buckets} == {DENSE}
    assert result.step_s <= dense.step_s * (1 + 1e-9)
    assert result.step_s == simulate(result, job, machines, profile, policy).step_s
    assert all(b.why is not None and b.why.reason for b in result.buckets)


def test_equal_arguments_give_equal_plans() -> None:
    result = [records.encode(plan(toy_job(), CLUSTERS["uneven"])) for _ in range(2)]
    assert result[0] == result[1]


def test_fast_links_get_no_compression() -> None:
    assert {b.codec for b in plan(toy_job(), cluster(4, "100g")).buckets} == {DENSE}


def test_slow_links_get_compression_and_internet_sites_only_servers() -> None:
    result = plan(toy_job(), CLUSTERS["homes"])
    assert {b.path == "service" or "net.push" in b.path for b in result.buckets} == {True}
    sent = sum(b.numel for b in result.buckets if b.codec != DENSE)
    assert sent > 0.9 * toy_job().numel


@settings(max_examples=8, deadline=None)
@given(bps=st.floats(1e6, 1e10), factor=st.floats(1.0, 10.0))
@pytest.mark.nightly
def test_more_bandwidth_is_never_slower(bps: float, factor: float) -> None:
    """Within a small tolerance: list schedules may lose a little if a task ends sooner (Graham's anomalies)."""
    def step_s(rate: float) -> float:
        nodes = tuple(structs.replace(n, link=Link(rate, rate, 1e-3)) for n in cluster(3, "1g").nodes)
        return plan(toy_job(6), Cluster(nodes), None, Policy(objective="step")).step_s

    assert step_s(bps * factor) <= step_s(bps) * 1.02


@pytest.mark.parametrize("max_loss", [0.0, 0.1, 0.3])
def test_loss_budget_holds(max_loss: float) -> None:
    job, machines = toy_job(), CLUSTERS["homes"]
    for objective in ("loss", "step"):
        question = checked_inputs(job, machines, learnt(machines), Policy(max_loss=max_loss, objective=objective))
        result = plan(*question)
        lost = plan_excess(result, question).loss_high
        assert lost <= max_loss + 1e-9
        assert lost > 0.2 * max_loss or objective == "loss" or not max_loss, "and uses it where only the step counts"


@pytest.mark.parametrize(("link", "narrow"), [("home-100/20", "down"), ("home-20/100", "up")])
def test_narrow_direction_is_compressed_more_for_the_same_loss(link: str, narrow: str) -> None:
    """A ratio of 0.01 in both directions would exceed the loss budget, and 0.1 in both would send too much in the narrow one.

    The link of the site with the server decides: its uplink carries the downloads of the three others.
    """
    job, machines = toy_job(4, 4_000_000), cluster(4, link, reachable=False, servers=1)
    some, few = "topk(ratio=0.1)", "topk(ratio=0.01)"
    budget = Policy(codecs=(some, few), max_loss=0.1, objective="step")
    result = plan(job, machines, learnt(machines), budget)
    sent = {(b.codec, b.down or b.codec): 0 for b in result.buckets}
    for b in result.buckets:
        sent[b.codec, b.down or b.codec] += b.numel
    assert max(sent, key=sent.__getitem__) == ((few, some) if narrow == "up" else (some, few))
    assert result.step_s < 0.8 * plan(job, machines, learnt(machines), structs.replace(budget, codecs=(some,))).step_s


def test_local_steps_are_used_only_if_allowed_and_beneficial() -> None:
    homes = CLUSTERS["homes"]
    slow = Policy(max_local_steps=8, codecs=("fp16()",))
    assert plan(toy_job(), homes, None, slow).local_steps == 8
    assert plan(toy_job(), homes, None, structs.replace(slow, max_local_steps=6)).local_steps == 4, "powers of two"
    assert plan(toy_job(), homes, None, structs.replace(slow, max_local_steps=1)).local_steps == 1
    assert plan(toy_job(), cluster(4, "100g"), None, Policy(max_local_steps=8)).local_steps == 1


def test_stale_results_are_used_only_if_allowed_and_beneficial() -> None:
    late, timely = (Policy(staleness=staleness, objective="step", codecs=("int4()", "topk(ratio=0.1)"))
                    for staleness in (True, False))
    result = plan(toy_job(), CLUSTERS["homes"], None, late)
    assert any(b.stale for b in result.buckets)
    assert result.step_s < plan(toy_job(), CLUSTERS["homes"], None, timely).step_s
    assert all(b.path == "service" for b in lower(result).buckets if b.stale), "what the runtime can have late"
    several = lower(plan(toy_job(), cluster(4, "home-100/20", ranks=2), None, late))
    assert any(b.stale for b in several.buckets)
    assert not node_problems(several, 4, 2), "nor do nodes of several ranks refuse it"
    assert not any(b.stale for b in plan(toy_job(), cluster(4, "100g"), None, late).buckets)
    sparse = structs.replace(late, codecs=("topk(ratio=0.001)",))
    assert not any(b.stale for b in plan(toy_job(), CLUSTERS["homes"], None, sparse).buckets), "not measured"


def test_slow_node_may_use_a_smaller_ratio() -> None:
    policy = Policy(codecs=("topk(ratio=0.1)", "topk(ratio=0.01)"), max_loss=0.1, objective="step")
    result = plan(toy_job(4, 4_000_000), CLUSTERS["uneven"], learnt(CLUSTERS["uneven"]), policy)
    assert any(b.by_node and len(set(b.by_node)) > 1 for b in result.buckets)


def test_codec_without_a_price_is_named() -> None:
    machines, wanted_codecs = cluster(2, "1g"), Policy(codecs=("powersgd()",))
    with pytest.raises(ValueError, match=r"powersgd\(\).* identity.*E-PLAN-CODEC-COST"):
        plan(toy_job(), machines, None, wanted_codecs)
    with pytest.raises(ValueError, match=r"policy: codecs .*powersgd\(\).* 'tables'.*E-PLAN-CODEC-COST"):
        plan(toy_job(), machines, profile_from_tables(machines), wanted_codecs)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_non_finite_numbers_are_named_in_every_field(value: float) -> None:
    """Python objects can hold values that files cannot."""
    job, machines = toy_job(), cluster(2, "1g")
    _, _, profile, policy = checked_inputs(job, machines)
    timing = job.timed
    node = machines.nodes[0]

    def with_link(**fields: float) -> Cluster:
        return Cluster((structs.replace(node, link=structs.replace(node.link, **fields)), *machines.nodes[1:]))

    def with_times(**fields: object) -> Job:
        return structs.replace(job, timing=structs.replace(timing, **fields))

    wrong = LinearCost(0.0, value)
    for name, arguments in {
        "link.up_bps": (job, with_link(up_bps=value), profile, policy),
        "link.down_bps": (job, with_link(down_bps=value), profile, policy),
        "link.alpha_s": (job, with_link(alpha_s=value), profile, policy),
        "node n0: speed": (job, Cluster((structs.replace(node, speed=value), *machines.nodes[1:])), profile, policy),
        "timing.needed_s of layer0.weight": (with_times(needed_s=(value, *timing.needed_s[1:])), machines, profile, policy),
        "timing.update_s": (with_times(update_s=value), machines, profile, policy),
        "server.slope_s": (job, machines, structs.replace(profile, server=wrong), policy),
        "decode.slope_s of identity() on cpu": (
            job, machines, structs.replace(profile, codecs=(structs.replace(profile.codecs[0], decode=wrong),)), policy),
        "bucket_s": (job, machines, structs.replace(profile, bucket_s=value), policy),
        **({} if value == math.inf else {"max_loss": (job, machines, profile, structs.replace(policy, max_loss=value))}),
    }.items():
        with pytest.raises(ValueError, match=f"{re.escape(name)} is {value:g}.*E-PLAN-INPUT"):
            plan(*arguments)


def test_budget_that_no_choice_meets_is_refused() -> None:
    space, _, _ = random_space(3, budget=True)
    losses = [[loss + 2.0 for loss in each] for each in space.loss]
    with pytest.raises(ValueError, match=r"max_loss is 1\b.* 4\b.*E-PLAN-INPUT"):
        uniform(space._replace(loss=losses))


def test_empty_job_has_an_empty_plan() -> None:
    timing = structs.replace(toy_job().timing, ready_s=(), needed_s=())
    assert plan(Job((), timing=timing), cluster(2, "1g")).buckets == ()


FAMILIES = ("topk(ratio=0.1)", "topk(ratio=0.003)", "randomk(ratio=0.1)", "powersgd(rank=2)")
"""One of each codec, and several ratios, so that there is a choice per node and direction."""


@cache
def measured() -> Profile:
    texts = [text for text in (*NAMED.values(), *FAMILIES) if not text.startswith("error_feedback")]
    names = sorted({str(parse(text)) for text in texts})
    return Profile(calibration.measure_codecs(names, sizes=(64, 1024), repeats=1), LinearCost(0.0, 1e-10), source="measured")


def drawn_cluster(rng: random.Random) -> Cluster:
    device = rng.choice(("cpu", "cpu", "rtx3060"))
    nodes, ranks = rng.randint(1, 3), rng.randint(1, 3)
    links = [rng.choice(("home-100/20", "fiber-1000", "10g", "100g", "100m")) for _ in range(nodes)]
    result = tuple(machines.node(f"n{i}", device, link, ranks=ranks, server=i == 0 or rng.random() < 0.5)
                   for i, link in enumerate(links))
    if rng.random() < 0.2:
        result = (*result, Node("spare", 0, "cpu", machines.link("10g")))
    return Cluster(result, rng.random() < 0.6)


def drawn_profile(rng: random.Random, cluster: Cluster) -> Profile:
    """The tables', or measured; with random costs of each codec, so that any path may be the best for some."""
    some = (*machines.DEFAULT_CODECS, *FAMILIES[1:3])
    result = machines.profile_from_tables(cluster, some) if rng.random() < 0.3 else measured()
    codecs = []
    for cost in result.codecs:
        encode, decode = (rng.choice((0.01, 1.0, 100.0)) for _ in range(2))
        codecs.append(structs.replace(cost, task_loss=0.0, **{
            name: LinearCost(line.floor_s * factor, line.slope_s * factor)
            for name, line, factor in (("encode", cost.encode, encode), ("decode", cost.decode, decode))}))
    return structs.replace(result, codecs=tuple(codecs))


def drawn_policy(rng: random.Random) -> Policy:
    return Policy(devices=rng.choice((("cpu",), ("gpu", "cpu"))), max_encodes=rng.randint(1, 4), staleness=rng.random() < 0.3,
                  max_local_steps=rng.choice((1, 4)))


def problems(result: Plan, job: Job, cluster: Cluster, profile: Profile) -> list[str]:
    nodes = sum(node.ranks > 0 for node in cluster.nodes)
    cuda = any(node.device != "cpu" for node in cluster.nodes if node.ranks)
    lowered = lower(result)
    return [*lint(result, job, cluster, profile), *verify(lowered, job),
            *node_problems(lowered, nodes, result.ranks_per_node, cuda=cuda)]


@pytest.mark.parametrize("seed", range(30))
def test_every_option_runs(seed: int) -> None:
    """One plan has a bucket of each option."""
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    profile, policy = drawn_profile(rng, cluster), drawn_policy(rng)
    offered = [option for hosts in ((), None) for option in options(Prices(cluster, profile, hosts), policy)]
    sizes = [rng.choice((1, 5, 4096)) for _ in offered]
    job = Job(tuple(TensorInfo(f"t{i}", (n,)) for i, n in enumerate(sizes)), timing=None)
    buckets = tuple(Bucket(i, (Slice(i, 0, n),), o.path, o.codec, down=o.down, by_node=o.by_node)
                    for i, (o, n) in enumerate(zip(offered, sizes, strict=True)))
    ranks = max(node.ranks for node in cluster.nodes)
    assert problems(Plan(job.digest(), buckets, servers=1, ranks_per_node=ranks), job, cluster, profile) == []


@pytest.mark.parametrize("seed", range(8))
def test_every_plan_runs(seed: int) -> None:
    rng = random.Random(seed)
    cluster = drawn_cluster(rng)
    profile, job = drawn_profile(rng, cluster), toy_job(5, rng.choice((3000, 300_000)))
    assert problems(plan(job, cluster, profile, drawn_policy(rng)), job, cluster, profile) == []


def test_measured_costs_replace_the_declared_ones() -> None:
    for cost in measured().codecs:
        assert Promise(cost.sums, cost.alone, cost.answers) == codec_promise(wrap(parse(cost.codec)))


SUMMED, GATHERED = "encode@cpu all.allreduce decode@cpu", "encode@cpu all.allgather decode@cpu"
PUSHED, FORWARDED = "encode@cpu net.push net.pull decode@cpu", "encode@cpu net.push net.forward decode@cpu"
ADDS, LONELY, NEEDS_SERVER = Promise(True, False, False), Promise(False, True, True), Promise(False, False, False)


@pytest.mark.parametrize(("path", "up", "down", "by_node", "gpus", "text"), [
    ("allreduce", NEEDS_SERVER, None, False, True, ""),
    (SUMMED, ADDS, None, False, False, ""), (SUMMED, LONELY, None, False, False, "an all-reduce adds payloads"),
    (GATHERED, LONELY, None, False, False, ""), (GATHERED, ADDS, None, False, False, "every rank adds payloads to a dense sum"),
    (GATHERED, LONELY, None, False, True, ""), (SUMMED, ADDS, None, False, True, "only in host memory"),
    (GATHERED, LONELY, LONELY, False, False, "`down` and `by_node`"),
    (GATHERED, LONELY, None, True, False, "`down` and `by_node`"),
    (PUSHED, NEEDS_SERVER, None, False, True, ""), (PUSHED, LONELY, LONELY, True, True, ""),
    (PUSHED, ADDS, LONELY, False, False, "a server changes the encoding"),
    (PUSHED, LONELY, ADDS, False, False, "`down` is encoded from a dense sum"),
    (FORWARDED, LONELY, None, False, False, ""), (FORWARDED, ADDS, None, False, False, "a server changes the encoding"),
])
def test_unsuitable_codecs_of_a_path_are_named(
        path: str, up: Promise, down: Promise | None, by_node: bool, gpus: bool, text: str) -> None:
    lines = list(find_misfits(tensor_file_path(path), [up], down=down, by_node=by_node, gpus=gpus))
    assert len(lines) == bool(text)
    assert text in "".join(lines)
    assert sums_payloads(tensor_file_path(path)) == (path == SUMMED)


SMALL = toy_job(numel=125_000, step_s=0.03)
"""1.5 M elements."""


def fragments_measured(machines: Cluster) -> Profile:
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
def test_shorter_lag_interpolates_between_none_and_a_whole_round(optimizer: str, every: int) -> None:
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
        assert excess(rows, codec, recipe._replace(overlap="", fragments=2)) == waited, "as measured"


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 4, 8, 12, 64]), st.integers(0, 4), st.sampled_from(["", "round"]), st.floats(5.5, 10.5),
       st.sampled_from([0.0, 1e-3, 4e-2]))
def test_outer_step_is_bounded_by_compute_bytes_and_fragment_latencies(
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
    fragments = divide_into_fragments(chosen.buckets, count)
    edge_s = 0.0
    for places in fragments:  # no fragment's spans reach into another's
        begin = min(s.start_s for s in timeline.spans if s.bucket in places)
        end = max(s.end_s for s in timeline.spans if s.bucket in places)
        assert edge_s <= begin + 1e-9
        edge_s = end
    assert step_seconds(chosen, Question(SMALL, machines, profile, Policy())) == pytest.approx(timeline.step_s / every)


@pytest.mark.parametrize("bps", [3e6, 1e7, 1e8, 1e10])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_outer_step_is_the_sum_of_fragments_each_bounded_by_exchange_or_compute(bps: float, count: int) -> None:
    machines = at(bps)
    profile = learnt(machines)
    chosen = rounds(SMALL, 8, count)
    waited = rounds(SMALL, 8, 1, overlap="")
    fragment_s = 8 // count * step_s(SMALL)
    expected = 0.0
    for places in divide_into_fragments(chosen.buckets, count):
        kept = tuple(structs.replace(waited.buckets[b], id=i) for i, b in enumerate(places))
        alone = simulate(structs.replace(waited, buckets=kept), SMALL, overlapped_cluster(machines), profile)
        expected += max(fragment_s, alone.step_s - 8 * step_s(SMALL))
    result = simulate(chosen, SMALL, machines, profile).step_s
    assert result == pytest.approx(expected)
    full = simulate(rounds(SMALL, 8, 1), SMALL, machines, profile).step_s
    assert result >= full * (1 - 1e-9), "fragments hide no more than a round"


def test_slow_links_get_fragments_and_fast_links_none() -> None:
    free = Policy(exact=False, optimizer="sgd")
    near = structs.replace(at(1e10), nodes=tuple(
        structs.replace(node, link=structs.replace(node.link, alpha_s=1e-5)) for node in at(1e10).nodes))
    slow, fast = (plan(SMALL, machines, fragments_measured(machines), free) for machines in (at(20e6), near))
    assert slow.overlap == "round"
    assert slow.fragments > 1
    assert slow.local_steps % slow.fragments == 0
    assert verify(slow, SMALL) == []
    assert len(divide_into_fragments(slow.buckets, slow.fragments)) == slow.fragments
    assert (fast.fragments, fast.overlap) == (1, "")
    full = plan(SMALL, at(20e6), fragments_measured(at(20e6)), structs.replace(free, fragments=False))
    assert full.fragments == 1
    assert price(slow) < 0.9 * price(full)
    timeline = simulate(slow, SMALL, at(20e6), fragments_measured(at(20e6)), free)
    assert timeline.step_s / slow.local_steps == pytest.approx(slow.step_s), "the plan's time is the simulated one"


def test_dominant_tensor_is_cut_into_fragments_of_equal_size() -> None:
    one = toy_job(tensors=1, numel=1_500_000, step_s=0.03)
    free = Policy(exact=False, optimizer="sgd")
    chosen = plan(one, at(1e7), fragments_measured(at(1e7)), free)
    assert chosen.fragments > 1
    assert verify(chosen, one) == []
    sizes = [sum(chosen.buckets[place].numel for place in places)
             for places in divide_into_fragments(chosen.buckets, chosen.fragments)]
    assert max(sizes) < 1.1 * sum(sizes) / len(sizes)
    for places in divide_into_fragments(chosen.buckets, chosen.fragments):
        loads = [0] * chosen.servers
        for place in places:
            loads[chosen.buckets[place].server] += chosen.buckets[place].numel
        assert max(loads) < 1.3 * sum(loads) / chosen.servers, "a fragment waits for the server that has most of it"
    full = plan(one, at(1e7), fragments_measured(at(1e7)), structs.replace(free, fragments=False))
    assert price(chosen) < 0.9 * price(full)
    assert_refused(outcome(lambda: simulate(rounds(one, 8, 2), one, at(1e7), fragments_measured(at(1e7)))), "E-SYNC-FRAGMENTS",
                   "fragments=2: ", " 1 ")


@pytest.mark.parametrize("seed", range(4))
def test_fragment_sweep_matches_running_each_choice(seed: int) -> None:
    (_, first, counts), (_, second, more) = random_space(seed, budget=False), random_space(seed + 50, budget=False)
    edge, counts = len(counts), [*counts, *more]
    parts = [PlannedFragment([*range(edge)], first), PlannedFragment([*range(edge, len(counts))], second)]
    simulation, choice = Simulation(parts), [0] * len(counts)
    assert simulation.run(choice) == pytest.approx(sum(Simulation([part]).run(choice) for part in parts))
    options = [*range(counts[0])]
    limit = simulation.run(choice) * 1.01
    exact = simulation.sweep(choice, [0], math.inf, math.nan, 0, options, [1.0] * counts[0])
    assert exact == pytest.approx([simulation.run([option, *choice[1:]]) for option in range(counts[0])])
    factors = [1.0 + 0.1 * option for option in options]
    swept = simulation.sweep(choice, [0], limit, math.nan, 0, options, factors)
    for seconds, full, factor in zip(swept, exact, factors, strict=True):
        assert full * factor > limit or seconds == pytest.approx(full), "all below the limit are reported"


def test_small_models_have_one_fragment_and_auto_reports_the_number_of_large_ones() -> None:
    free = Policy(exact=False, optimizer="sgd")
    small = toy_job(tensors=1, numel=20_000, step_s=0.03)
    assert plan(small, at(1e5), fragments_measured(at(1e5)), free).fragments == 1
    current = structs.replace(rounds(SMALL, 1, 1, overlap=""), codes="gradients")
    best = best_plan(Question(SMALL, at(1e7), fragments_measured(at(1e7)), free), current)
    assert best.plan.fragments > 1
    assert sync_mode(best.plan) in best.leaves
    assert f"{best.plan.fragments} parts" in best.leaves


EXACT, FREE = Policy(optimizer="adam", exact=True), Policy(optimizer="adam", exact=False)
ROWS, WIDTH, DENSE_THIN = 1 << 16, 64, 1 << 20
SOME = 0.02


def job(filled: tuple[float, ...] = ()) -> Job:
    """An embedding and a layer after it."""
    return Job((TensorInfo("words", (ROWS, WIDTH)), TensorInfo("behind", (DENSE_THIN,)), TensorInfo("bias", (64,))),
               timing=Timing((0.1, 0.05, 0.05), (0.0, 0.02, 0.02), 0.1, 0.05, 0.005, filled=filled))


THIN = job((SOME, 1.0, 1.0))


def bucket(codec: str = "fp16()", path: str = "service", down: str = "", tensor: int = 0) -> Bucket:
    numel = THIN.tensors[tensor].numel
    return Bucket(0, (Slice(tensor, 0, numel),), path, codec, down=down)


def test_sparse_gradient_tensor_has_its_own_buckets_on_the_server_path() -> None:
    machines = at(100e6)
    result = plan(THIN, machines, learnt(machines), EXACT)
    of_words = [b for b in result.buckets if any(s.tensor == 0 for s in b.slices)]
    assert of_words
    assert all({s.tensor for s in b.slices} == {0} and keeps_zeros(b) for b in of_words), of_words
    assert all(b.why is not None and "zeros are not sent" in b.why.reason for b in of_words)
    assert sum(b.why.nbytes for b in of_words if b.why) < 4 * 4 * ROWS * WIDTH * SOME


def test_known_sparsity_shortens_the_step_and_the_time_to_a_loss() -> None:
    machines = at(100e6)
    blind, seeing = (plan(each, machines, learnt(machines), EXACT) for each in (job(), THIN))
    assert seeing.step_s * seeing.steps_high < 0.8 * blind.step_s * blind.steps_high


def test_local_steps_are_priced_without_sparsity() -> None:
    machines = at(2e6)
    result = plan(THIN, machines, learnt(machines), FREE)
    assert result.local_steps > 1
    assert any(not keeps_zeros(b) for b in result.buckets if b.slices[0].tensor == 0), "zeros are no reason to send it as it is"
    assert simulate(result, THIN, machines, learnt(machines), FREE) == simulate(result, job(), machines, learnt(machines), FREE)


@pytest.mark.parametrize(("codec", "path", "down", "codes", "every", "thin"), [
    ("fp16()", "service", "", "gradients", 1, True),
    ("identity()", "service", "", "gradients", 1, True),
    ("bf16()", "encode@cpu net.push net.pull decode@cpu", "", "gradients", 1, True),
    ("int4()", "service", "", "gradients", 1, False),  # keeps back, and sends it later
    ("error_feedback(int4())", "service", "", "gradients", 1, False),
    ("fp16()", "service", "int4()", "gradients", 1, False),
    ("identity()", "allreduce", "", "gradients", 1, False),  # a collective sends zeros
    ("fp16()", "service", "", "updates", 1, False),
    ("fp16()", "service", "", "updates", 4, False),
])
def test_number_of_elements_that_a_bucket_sends(codec: str, path: str, down: str, codes: str, every: int, thin: bool) -> None:
    one = bucket(codec, path, down)
    result = Plan(THIN.digest(), (one,), 1, 1, every, codes)  # type: ignore[arg-type]
    assert sent_numel(result, one, THIN) == (round(SOME * ROWS * WIDTH) if thin else ROWS * WIDTH)
    assert sent_numel(result, one, job()) == ROWS * WIDTH
    dense = bucket(codec, path, down, tensor=1)
    assert sent_numel(result, dense, THIN) == DENSE_THIN


@pytest.mark.parametrize("filled", [(1.0,), (1.5, 1.0, 1.0), (-0.1, 1.0, 1.0), (float("nan"), 1.0, 1.0)])
def test_impossible_fractions_are_one_line(filled: tuple[float, ...]) -> None:
    machines = at(1e9)
    with pytest.raises(ValueError, match=rf"timing\.filled has {len(filled)} .*E-PLAN-INPUT"):
        plan(job(filled), machines, learnt(machines), EXACT)


WORDS = (TensorInfo("words", (256, 64)), TensorInfo("behind", (4096,)))


def after_a_step(codec: str, gradients: Sequence[torch.Tensor], weight: float = 1.0) -> Worker:
    """A worker that has sent its gradients and has no results yet."""
    plan = default_plan(Job(WORDS), codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=1, cut_nbytes=1 << 24)
    worker = Worker(Job(WORDS), plan, {b.id: make_codec(b) for b in plan.buckets}, torch.device("cpu"),
                    transport=Hub().transport(0))
    for each in worker.buckets:
        each.sources = [gradients[s.tensor] for s in each.slices]
        each.gather(1.0, weight)
    worker.close()
    return worker


def rows(*named: int) -> tuple[torch.Tensor, torch.Tensor]:
    gradients = torch.zeros(256, 64), torch.ones(4096)
    gradients[0][list(named)] = 1.0
    return gradients


def test_unused_rows_are_counted_in_gradients() -> None:
    """Two of 256 rows for this rank, at most eight for all four."""
    found = nonzero_fractions(after_a_step("error_feedback(int4())", rows(3, 77)), 4)
    assert found == pytest.approx(((2 / 256 + 8 / 256) / 2, 1.0))
    assert nonzero_fractions(after_a_step("error_feedback(int4())", rows(*range(256))), 4) == ()


@pytest.mark.parametrize("codec", ["identity()", "fp16()"])
def test_averaged_gradient_counts_for_all_ranks(codec: str) -> None:
    """Eight rows of all four ranks are two of each: the count equals that of the local gradient."""
    answered = after_a_step(codec, rows(1, 3, 50, 77, 100, 130, 200, 255))
    assert all(bucket.x.data_ptr() == bucket.y.data_ptr() for bucket in answered.buckets)
    assert nonzero_fractions(answered, 4) == pytest.approx(((2 / 256 + 8 / 256) / 2, 1.0))

"""Whatever the planner offers runs: options and plans of random clusters, costs and policies pass what workers ask of them."""

from __future__ import annotations

import random
from functools import cache

import pytest
from msgspec import structs
from support.codecs import NAMED
from support.plans import toy_job

from commlayer.autotune.measure import calibration
from commlayer.compressors import parse
from commlayer.compressors.feedback import wrap
from commlayer.engine.plan_choice import promise_of, unsuited
from commlayer.planner import lower, verify
from commlayer.planner import tables as machines
from commlayer.planner.costs import Prices
from commlayer.planner.model import Cluster, Line, Node, Policy, Profile
from commlayer.planner.options import options
from commlayer.planner.plan_lint import lint
from commlayer.planner.search import plan
from commlayer.planner.tree import Promise, misfits, summing
from commlayer.planner.tree import parse as path_of
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo

FAMILIES = ("topk(ratio=0.1)", "topk(ratio=0.003)", "randomk(ratio=0.1)", "powersgd(rank=2)")
"""Beside one of each codec: ratios, so that there is something to choose by node and both ways."""


@cache
def measured() -> Profile:
    texts = [text for text in (*NAMED.values(), *FAMILIES) if not text.startswith("error_feedback")]
    names = sorted({str(parse(text)) for text in texts})
    return Profile(calibration.measure_codecs(names, sizes=(64, 1024), repeats=1), Line(0.0, 1e-10), source="measured")


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
    """The tables', or measured; and each codec dearer or cheaper by chance, so that any path may be the best for some."""
    some = (*machines.DEFAULT_CODECS, *FAMILIES[1:3])
    result = machines.profile_from_tables(cluster, some) if rng.random() < 0.3 else measured()
    codecs = []
    for cost in result.codecs:
        encode, decode = (rng.choice((0.01, 1.0, 100.0)) for _ in range(2))
        codecs.append(structs.replace(cost, task_loss=0.0, **{
            name: Line(line.floor_s * factor, line.slope_s * factor)
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
            *unsuited(lowered, nodes, result.ranks_per_node, cuda=cuda)]


@pytest.mark.parametrize("seed", range(30))
def test_every_option_runs(seed: int) -> None:
    """A plan with a bucket of each."""
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


def test_what_is_measured_says_what_a_codec_promises() -> None:
    for cost in measured().codecs:
        assert Promise(cost.sums, cost.alone, cost.answers) == promise_of(wrap(parse(cost.codec)))


SUMMED, GATHERED = "encode@cpu all.allreduce decode@cpu", "encode@cpu all.allgather decode@cpu"
PUSHED, FORWARDED = "encode@cpu net.push net.pull decode@cpu", "encode@cpu net.push net.forward decode@cpu"
ADDS, LONELY, NEEDS_SERVER = Promise(True, False, False), Promise(False, True, True), Promise(False, False, False)


@pytest.mark.parametrize(("path", "up", "down", "by_node", "gpus", "text"), [
    ("allreduce", NEEDS_SERVER, None, False, True, ""),
    (SUMMED, ADDS, None, False, False, ""), (SUMMED, LONELY, None, False, False, "payloads go through an all-reduce"),
    (GATHERED, LONELY, None, False, False, ""), (GATHERED, ADDS, None, False, False, "every rank adds payloads to a dense sum"),
    (GATHERED, LONELY, None, False, True, ""), (SUMMED, ADDS, None, False, True, "added up in host memory alone"),
    (GATHERED, LONELY, LONELY, False, False, "`down` and `by_node`"),
    (GATHERED, LONELY, None, True, False, "`down` and `by_node`"),
    (PUSHED, NEEDS_SERVER, None, False, True, ""), (PUSHED, LONELY, LONELY, True, True, ""),
    (PUSHED, ADDS, LONELY, False, False, "a server sends the sum otherwise"),
    (PUSHED, LONELY, ADDS, False, False, "`down` is coded from a dense sum"),
    (FORWARDED, LONELY, None, False, False, ""), (FORWARDED, ADDS, None, False, False, "a server sends the sum otherwise"),
])
def test_the_rule(path: str, up: Promise, down: Promise | None, by_node: bool, gpus: bool, text: str) -> None:
    lines = list(misfits(path_of(path), [up], down=down, by_node=by_node, gpus=gpus))
    assert len(lines) == bool(text)
    assert text in "".join(lines)
    assert summing(path_of(path)) == (path == SUMMED)

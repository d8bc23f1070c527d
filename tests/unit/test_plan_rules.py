"""Default plans obey every rule; verify and lint find all damage to a plan."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.plans import cluster, toy_job

from commlayer import records
from commlayer.compressors import parse, wrap
from commlayer.errors import find_error_code
from commlayer.planner import default_plan, lower, simulate, verify, verify_alone
from commlayer.planner.buckets import (
    COLLECTIVE_NBYTES,
    ELEMENT_NBYTES,
    FIRST_COLLECTIVE_NBYTES,
    divide_into_fragments,
)
from commlayer.planner.data import tables
from commlayer.planner.data.tables import profile_from_tables
from commlayer.planner.model import Cluster, Link, Node
from commlayer.planner.plan_lint import lint
from commlayer.planner.search.plan_search import plan
from commlayer.records import MAX_BUCKET_NBYTES, Bucket, Job, Plan, Slice, Spec, TensorInfo, Timing
from commlayer.transport.framing import DEFAULT_MAX_NBYTES

SIZES = st.one_of(st.integers(0, 40), st.integers(0, 50_000), st.just(20_000_000))
JOBS = st.lists(st.tuples(SIZES, st.sampled_from(["float32", "bfloat16"])), max_size=90).map(
    lambda entries: Job(tuple(TensorInfo(f"t{i}", (n,), dtype) for i, (n, dtype) in enumerate(entries))))


def describe_model(*sizes: int) -> Job:
    return Job(tuple(TensorInfo(f"t{i}", (n,)) for i, n in enumerate(sizes)))


def plan_of(job: Job, **fields: Any) -> Plan:
    """Fuses up to 100 elements and cuts above 1000 by default."""
    base: dict[str, Any] = {"codec": "fp16()", "path": "service", "servers": 1, "ranks_per_node": 1,
                            "fuse_nbytes": 400, "cut_nbytes": 4000}
    return default_plan(job, **base | fields)


def shapes(plan: Plan) -> list[list[tuple[int, int, int]]]:
    return [[(s.tensor, s.start, s.stop) for s in bucket.slices] for bucket in plan.buckets]


CUT = st.sampled_from([40_000, 80_000_000])


@settings(max_examples=60, deadline=None)
@given(JOBS, st.sampled_from(["service", "allreduce"]), st.integers(1, 5), st.integers(1, 4), st.integers(0, 8000), CUT)
def test_default_plans_obey_every_rule(job: Job, path: str, servers: int, ranks: int, fuse: int, limit: int) -> None:
    plan = plan_of(job, path=path, servers=servers, ranks_per_node=ranks, fuse_nbytes=fuse, cut_nbytes=limit)
    assert verify(plan, job) == []
    if path == "allreduce":
        fuse = limit = COLLECTIVE_NBYTES
    ready = [min(s.tensor for s in bucket.slices) for bucket in plan.buckets]
    assert ready == sorted(ready, reverse=True), "buckets follow the order in which backward makes gradients"
    for bucket in plan.buckets:
        nbytes = bucket.numel * ELEMENT_NBYTES
        assert nbytes <= limit if path == "service" else nbytes < 2 * limit
        assert len(bucket.slices) == 1 or nbytes <= fuse or path == "allreduce"
        assert len({job.tensors[s.tensor].dtype for s in bucket.slices}) == 1
    again = plan_of(job, path=path, servers=servers, ranks_per_node=ranks, fuse_nbytes=fuse, cut_nbytes=limit)
    assert records.digest(again) == records.digest(plan)
    assert records.decode(records.encode(plan), Plan, "plan") == plan


def test_small_neighbours_are_fused_and_large_tensors_cut() -> None:
    plan = plan_of(describe_model(60, 30, 20, 2500, 0, 10))
    assert shapes(plan) == [
        [(3, 0, 833)], [(3, 833, 1666)], [(3, 1666, 2500)], [(5, 0, 10), (2, 0, 20), (1, 0, 30)], [(0, 0, 60)]]


def test_buffers_come_last_and_are_never_compressed_nor_fused_with_gradients() -> None:
    job = Job((TensorInfo("w", (4,)), TensorInfo("mean", (3,), buffer=True), TensorInfo("var", (3,), buffer=True)))
    plan = plan_of(job)
    assert [([s.tensor for s in b.slices], b.codec) for b in plan.buckets] == [([0], "fp16()"), ([1, 2], "identity()")]
    assert verify(plan, job) == []
    turned = msgspec.structs.replace(plan, buckets=tuple(
        msgspec.structs.replace(b, id=i) for i, b in enumerate(reversed(plan.buckets))))
    (line,) = verify(turned, job)
    assert line.startswith("bucket 1: gradients come after buffers")


def test_collectives_are_large_except_the_first() -> None:
    quarter_mib = (1 << 18) // ELEMENT_NBYTES
    plan = plan_of(describe_model(*[quarter_mib] * 60), path="allreduce")
    assert [b.numel * ELEMENT_NBYTES for b in plan.buckets] == [FIRST_COLLECTIVE_NBYTES, 14 << 20]
    assert len(plan.buckets[1].slices) == 56
    assert (plan.servers, {b.server for b in plan.buckets}) == (0, {0})


def gpt(width: int = 192, layers: int = 4) -> Job:
    """A small transformer whose layers take equally long; 0.1 s forward, 0.2 s backward."""
    shapes = [("letters", (90, width)), ("places", (64, width))]
    for i in range(layers):
        shapes += [(f"{i}.{name}", shape) for name, shape in (
            ("before", (width,)), ("between", (width,)), ("qkv", (3 * width, width)), ("qkv.bias", (3 * width,)),
            ("out", (width, width)), ("out.bias", (width,)), ("up", (4 * width, width)), ("up.bias", (4 * width,)),
            ("down", (width, 4 * width)), ("down.bias", (width,)))]
    shapes += [("norm", (width,)), ("head", (90, width))]
    place = [int(name.split(".")[0]) + 1 if "." in name else 0 if name in ("letters", "places") else layers + 1
             for name, _ in shapes]
    each = layers + 2
    timing = Timing(tuple(0.2 * (each - i) / each for i in place), tuple(0.1 * i / each for i in place), 0.2, 0.1)
    return Job(tuple(TensorInfo(name, shape) for name, shape in shapes), timing=timing)


@pytest.mark.parametrize(("bps", "part"), [(1e8, 0.65), (5e7, 0.7)])
def test_forward_overlap_uses_small_first_buckets(bps: float, part: float) -> None:
    """By predicted timelines over four sites: the fraction of the exchange that the next forward pass cannot hide."""
    job, link = gpt(), Link(bps, bps, 0.0075)
    homes = Cluster(tuple(Node(f"home-{i}", 1, "cpu", link) for i in range(4)), reachable=False)
    exposed, together = [], []
    for forward in (False, True):
        plan = default_plan(job, codec="int4()", path="service", servers=4, ranks_per_node=1, fuse_nbytes=1 << 20,
                            cut_nbytes=4 << 20, forward=forward)
        result = simulate(structs.replace(plan, overlap="forward"), job, homes, profile_from_tables(homes))
        exposed.append(result.step_s - 0.3)
        together.append(max(b.numel for b in plan.buckets if any(s.tensor == 0 for s in b.slices)))
    assert exposed[1] < part * exposed[0]
    assert together[1] < 0.25 * together[0]
    large = describe_model(*[1 << 22] * 40)
    one, other = (plan_of(large, fuse_nbytes=1 << 20, cut_nbytes=4 << 20, forward=forward) for forward in (False, True))
    assert one == other, "fused tensors are a small part of a large model"


def test_forward_overlap_divides_the_first_layers_evenly_among_servers() -> None:
    plan = default_plan(gpt(), codec="int4()", path="service", servers=4, ranks_per_node=1, fuse_nbytes=1 << 20,
                        cut_nbytes=4 << 20, forward=True)
    numel, loads, largest = sum(b.numel for b in plan.buckets), [0] * 4, 0
    for bucket in reversed(plan.buckets):  # in the order in which the next forward pass needs them
        loads[bucket.server] += bucket.numel
        largest = max(largest, bucket.numel)
        assert max(loads) - min(loads) <= largest or 2 * sum(loads) > numel
    assert max(loads) - min(loads) <= largest / 2


@pytest.mark.parametrize("fragments", [1, 2, 4, 8])
@pytest.mark.parametrize("servers", [2, 4])
def test_each_fragment_is_divided_evenly_among_servers(servers: int, fragments: int) -> None:
    plan = default_plan(gpt(), codec="int4()", path="service", servers=servers, ranks_per_node=1, fuse_nbytes=1 << 20,
                        cut_nbytes=4 << 20, fragments=fragments)
    totals = [0] * servers
    for places in divide_into_fragments(plan.buckets, fragments):
        loads, largest = [0] * servers, max(plan.buckets[place].numel for place in places)
        for place in places:
            loads[plan.buckets[place].server] += plan.buckets[place].numel
        totals = [total + load for total, load in zip(totals, loads, strict=True)]
        assert max(loads) <= sum(loads) / servers + largest
        assert largest <= sum(loads) / 2, "a turn waits for the server that has most"
    assert max(totals) < 1.2 * sum(totals) / servers


@pytest.mark.parametrize("fragments", [1, 2, 4, 8])
def test_collective_of_a_fragment_holds_at_most_its_part_of_the_model(fragments: int) -> None:
    job = Job((TensorInfo("small", (1000,)), TensorInfo("large", (1000, 1000))))
    plan = default_plan(job, codec="fp16()", path="allreduce", servers=0, ranks_per_node=1, fuse_nbytes=1, cut_nbytes=4,
                        fragments=fragments)
    turns = [sum(plan.buckets[place].numel for place in places) for places in divide_into_fragments(plan.buckets, fragments)]
    assert max(turns) < 1.2 * job.numel / fragments
    assert len(plan.buckets) <= fragments + 1, "no smaller than that either: each collective pays per call"


def test_float64_is_all_reduced_uncompressed_and_other_paths_are_refused() -> None:
    job = toy_job(3)
    job = msgspec.structs.replace(job, tensors=tuple(
        msgspec.structs.replace(info, dtype="float64" if i == 1 else "float32") for i, info in enumerate(job.tensors)))
    fixed = plan_of(job, codec="int4()", servers=2, fuse_nbytes=1 << 20, cut_nbytes=4 << 20)
    for result in (fixed, lower(plan(job, cluster(3, "100m")))):
        doubles = [b for b in result.buckets if b.slices[0].tensor == 1]
        assert {(b.path, b.codec, b.down) for b in doubles} == {("allreduce", "identity()", "")}
        assert any(b.codec != "identity()" for b in result.buckets)
        assert all(s.tensor == 1 for b in doubles for s in b.slices)
        assert verify(result, job) == []
    place = next(b.id for b in fixed.buckets if b.path == "allreduce")
    wrong = msgspec.structs.replace(fixed, buckets=tuple(
        msgspec.structs.replace(b, path="service") if b.id == place else b for b in fixed.buckets))
    assert [line.partition(",")[0] for line in verify(wrong, job)] == [f"bucket {place}: layer1.weight is float64"]


@pytest.mark.parametrize(("fields", "line"), [
    ({"path": "ring"}, "path: got 'ring'.*E-PLAN-INPUT"),
    ({"servers": 0}, r"servers: got 0\b.*E-PLAN-INPUT"),
    ({"ranks_per_node": 0}, r"ranks_per_node: got 0\b.*E-PLAN-INPUT"),
    ({"cut_nbytes": 3}, r"cut_nbytes: got 3\b.*E-PLAN-INPUT"),
])
def test_arguments_out_of_range_are_named(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        plan_of(describe_model(1), **fields)


JOB = describe_model(60, 30, 20, 2500)
GOOD = plan_of(JOB)


def changed(index: int, **fields: Any) -> Plan:
    """GOOD with one bucket changed."""
    buckets = list(GOOD.buckets)
    buckets[index] = msgspec.structs.replace(buckets[index], **fields)
    return msgspec.structs.replace(GOOD, buckets=tuple(buckets))


DAMAGE = [
    (msgspec.structs.replace(GOOD, schema=99), "plan has schema 99"),
    (msgspec.structs.replace(GOOD, job="0123"), "this plan was made for another model: job 0123, but this is "),
    (msgspec.structs.replace(GOOD, buckets=GOOD.buckets[:-1]), "t0: elements 0..60 are in no bucket"),
    (changed(0, slices=(Slice(3, 0, 800),)), "t3: elements 800..833 are in no bucket"),
    (changed(0, slices=(Slice(3, 0, 900),)), "t3: elements 833..900 are in buckets 0 and 1"),
    (changed(0, slices=(Slice(3, 833, 1666),)), "t3: elements 833..1666 are in buckets 0 and 1"),
    (changed(0, id=7), "bucket 7 is bucket number 0"),
    (changed(0, server=1), "bucket 0: server 1, but the plan has 1"),
    (changed(0, owner=-1), "bucket 0: owner -1, but the plan has 1 ranks per node"),
    (changed(0, path="carrier pigeon"), "bucket 0: path 'carrier pigeon': 'carrier' is not an op"),
    (changed(0, path="all.allgather"), "bucket 0: path 'all.allgather': at the beginning: got all.allgather, allowed: "),
    (changed(0, codec=" "), "bucket 0: no codec"),
    (changed(0, coder="tpu"), "bucket 0: coder 'tpu', allowed: 'gpu', or nothing for the host"),
    (changed(0, slices=()), "bucket 0: 0 slices, allowed: 1 to 64"),
    (changed(0, slices=(Slice(4, 0, 1),)), "bucket 0: tensor 4, but the model has 4"),
    (changed(0, slices=(Slice(3, 0, 2501),)), "bucket 0: elements 0..2501 of t3, which has only 2500"),
    (changed(0, slices=(Slice(3, 5, 5),)), "bucket 0: elements 5..5 of tensor 3, which is not a valid range"),
    (changed(0, shape=(-833, -1)), "bucket 0: shape (-833, -1) for 833 elements"),
    (msgspec.structs.replace(GOOD, ranks_per_node=0), "ranks_per_node is 0"),
]


@pytest.mark.parametrize(("plan", "line"), DAMAGE)
def test_each_kind_of_damage_is_found(plan: Plan, line: str) -> None:
    assert any(problem.startswith(line) for problem in verify(plan, JOB)), verify(plan, JOB)


def test_all_problems_are_reported_together() -> None:
    bad = msgspec.structs.replace(changed(1, codec=""), buckets=(*changed(1, codec="").buckets[:-1],))
    assert verify(bad, JOB) == ["bucket 1: no codec", "t0: elements 0..60 are in no bucket"]


HUGE = MAX_BUCKET_NBYTES // ELEMENT_NBYTES + 1


def test_bucket_larger_than_a_frame_is_named() -> None:
    job = describe_model(HUGE)
    assert verify(plan_of(job, cut_nbytes=1 << 40), job) == [], "it is cut to the size of a frame"
    copy = msgspec.structs.replace(plan_of(job), buckets=(Bucket(0, (Slice(0, 0, HUGE),), "service", "fp16()"),))
    assert verify(copy, job) == [f"bucket 0: {HUGE} elements, allowed on path service: {HUGE - 1}; cut it into several"]
    assert verify(plan_of(job, cut_nbytes=MAX_BUCKET_NBYTES), job) == []
    assert verify(plan_of(job, path="allreduce"), job) == []


@pytest.mark.parametrize("codec", ["identity()", "fp16()", "int8(block=64)", "topk(ratio=1.0, values='fp32')"])
def test_largest_bucket_fits_a_frame_with_every_codec(codec: str) -> None:
    assert wrap(parse(codec)).bound(Spec((MAX_BUCKET_NBYTES // ELEMENT_NBYTES,))) <= DEFAULT_MAX_NBYTES


@pytest.mark.parametrize(("plan", "world", "line"), [
    (GOOD, 3, ""),
    (msgspec.structs.replace(GOOD, schema=99), 3, "plan has schema 99"),
    (msgspec.structs.replace(GOOD, ranks_per_node=0), 3, "ranks_per_node is 0"),
    (msgspec.structs.replace(GOOD, ranks_per_node=4), 3, "ranks_per_node is 4, but the job has 3 workers"),
    (changed(0, owner=1), 3, "bucket 0: owner 1, but the plan has 1 ranks per node"),
    (changed(1, id=9), 3, "bucket 9 is bucket number 1"),
    (changed(0, path="all.allgather"), 3, "bucket 0: path 'all.allgather': at the beginning: got all.allgather, allowed: "),
    (changed(0, slices=(Slice(0, 0, 1 << 60),)), 3, f"bucket 0: {1 << 60} elements, allowed on path service"),
    (changed(0, slices=(Slice(0, 9, 3),)), 3, "bucket 0: elements 9..3 of tensor 0, which is not a valid range"),
])
def test_damage_detected_without_the_model(plan: Plan, world: int, line: str) -> None:
    problems = verify_alone(plan, world)
    assert problems[0].startswith(line) if line else problems == []


SIZES = {"tensors": 1 + max(s.tensor for b in GOOD.buckets for s in b.slices), "elements": sum(b.numel for b in GOOD.buckets)}


@pytest.mark.parametrize(("plan", "line"), [
    (GOOD, ""),
    (changed(0, slices=(Slice(0, 0, 1 << 60),)), "its buckets have"),
    (msgspec.structs.replace(GOOD, buckets=()), "its buckets have 0 elements"),
    (changed(0, slices=(Slice(SIZES["tensors"], 0, GOOD.buckets[0].numel),)), f"tensor {SIZES['tensors']}, but the job has"),
    (msgspec.structs.replace(GOOD, buckets=GOOD.buckets * 1000), f"{1000 * len(GOOD.buckets)} buckets, allowed for"),
    (changed(0, path="net.push " * 100), "bucket 0: path of 900 characters"),
    (changed(0, shape=(1,) * 65), "bucket 0: path of 7 characters, 65 dimensions"),
    (changed(0, by_node=("int8()",) * 4), "bucket 0: path of 7 characters, 0 dimensions, codecs for 4 nodes"),
])
def test_references_beyond_the_job_are_found_first(plan: Plan, line: str) -> None:
    problems = verify_alone(plan, 3, **SIZES)
    assert problems[0].startswith(line) if line else problems == []


@pytest.mark.parametrize("cut_nbytes", [4096, 1 << 20, MAX_BUCKET_NBYTES])
@pytest.mark.parametrize("numels", [(1,) * 300, (1025, 1, 2047), (10_000_000, 7), (1,)])
def test_plans_within_the_settings_fit_the_limits(numels: tuple[int, ...], cut_nbytes: int) -> None:
    job = Job(tuple(TensorInfo(f"t{i}", (numel,)) for i, numel in enumerate(numels)))
    plan = default_plan(job, codec="int8()", path="service", servers=3, ranks_per_node=1, fuse_nbytes=0, cut_nbytes=cut_nbytes)
    assert verify_alone(plan, 2, len(job.tensors), job.numel) == []


HOMES = cluster(3, "home-100/20", reachable=False)
PLAN = plan(toy_job(), HOMES)


def edited(bucket: int, **fields: object) -> Plan:
    buckets = list(PLAN.buckets)
    buckets[bucket] = structs.replace(buckets[bucket], **fields)
    return structs.replace(PLAN, buckets=tuple(buckets))


def spelled(codec: str) -> str:
    try:
        parse(codec)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "encode@tpu net.push net.pull decode@cpu"}, "'encode@tpu' names no device"),
        ({"path": "encode@cpu net.push decode@cpu"}, "after 'encode@cpu net.push': got decode@cpu, allowed: net.forward"),
        ({"path": "encode@cpu net.push net.pull"}, "after 'encode@cpu net.push net.pull': got the end, allowed: decode@cpu"),
        ({"path": "allreduce"}, "a collective crosses nodes, but"),
        ({"path": "node.reduce encode@cpu net.push net.pull decode@cpu node.broadcast"}, "every node has one rank"),
        ({"codec": "topkk(ratio=0.01)"}, "'topkk' is unknown"),
        ({"codec": "topk(ratio=0.5)"}, "has no cost in profile 'tables'"),
        ({"down": "nothing"}, "'nothing' is unknown"),
        ({"by_node": ("fp16()",)}, "by_node has 1 codecs for 3 nodes with ranks"),
        ({"by_node": ("fp16()", "int8()", "fp16()")}, "by_node mixes fp16, int8"),
        ({"server": 17}, "server 17, but the plan has"),
    ],
)
def test_invalid_bucket_is_named_with_the_rule(fields: dict[str, object], message: str) -> None:
    problems = lint(edited(1, **fields), toy_job(), HOMES, tables.profile_from_tables(HOMES), spelled)
    assert any(line.startswith("bucket 1: ") and message in line for line in problems), problems
    assert all(line.startswith("bucket 1: ") for line in problems), "and nothing else is blamed"


def test_valid_plan_has_no_problems() -> None:
    assert lint(PLAN, toy_job(), HOMES, tables.profile_from_tables(HOMES), spelled) == []
    assert lint(PLAN) == []


def test_buffers_are_sent_uncompressed() -> None:
    job = toy_job(2)
    job = structs.replace(job, tensors=(job.tensors[0], TensorInfo("running", (500_000,), buffer=True)))
    result = plan(job, HOMES)
    assert lint(result, job, HOMES) == []
    last = structs.replace(result.buckets[-1], codec="fp16()", stale=True)
    problems = lint(structs.replace(result, buckets=(*result.buckets[:-1], last)), job)
    assert [line.partition(": ")[2] for line in problems] == [
        "holds buffers, which are averaged uncompressed: codec must be 'identity()', not 'fp16()'",
        "holds buffers, which must not be applied one step late (stale)",
    ]


@pytest.mark.parametrize(("codec", "down", "stale", "wrong"), [
    ("topk(ratio=0.001)", "", True, True), ("topk(ratio=0.001)", "", False, False),
    ("int4()", "randomk(ratio=0.01)", True, True), ("topk(ratio=0.01)", "", True, False),
    ("topk(ratio=0.1)", "", True, False), ("int4()", "int4()", True, False),
])
def test_stale_sparse_results_are_a_problem_unless_measured(codec: str, down: str, stale: bool, wrong: bool) -> None:
    first = structs.replace(PLAN.buckets[0], codec=codec, down=down, stale=stale, path="service", server=0, by_node=())
    assert ["E-PLAN-LATE"] * wrong == [find_error_code(line) for line in lint(structs.replace(
        PLAN, buckets=(first, *PLAN.buckets[1:]))) if "E-PLAN-LATE" in line]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema": 1}, "plan has schema 1, this version reads"),
        ({"job": "0" * 16}, "this plan was made for another model"),
        ({"hosts": (0,)}, "hosts lists 1 nodes for 3 servers"),
        ({"hosts": (0, 1, 9)}, "hosts: node 9, the cluster has 3"),
        ({"ranks_per_node": 2}, "ranks_per_node is 2, the cluster's nodes have 1"),
    ],
)
def test_plan_wide_problems(fields: dict[str, object], message: str) -> None:
    problems = lint(structs.replace(PLAN, **fields), toy_job(), HOMES)
    assert any(message in line for line in problems), problems

"""Every path that a plan may use, each encoding a bucket of one plan, on 2 nodes x 2 ranks as processes: all ranks apply the
same bits, and applied + residuals = input.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.attached import assert_refused, outcome
from support.rank_pool import Servers, pool, quick
from support.residuals import by_tensor, slices_of
from support.workers import job, step
from torch.distributed import distributed_c10d

import commlayer
from commlayer.cluster.processes.collectives import Groups
from commlayer.codec_spec import parse_spec
from commlayer.compressors import error_feedback, int8, make_codec, parse, topk, two_way
from commlayer.compressors.plan_codecs import ReducedAccumulator
from commlayer.config import read_config
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.model.optimizer_state import OptimizerMemory
from commlayer.engine.start.connect import connect
from commlayer.engine.start.rendezvous import StartExchange
from commlayer.engine.worker.worker import Worker
from commlayer.optim import OuterSGD
from commlayer.planner import lower, tree
from commlayer.planner.data import tables as machines
from commlayer.planner.model import Cluster
from commlayer.planner.tree import format_path
from commlayer.records import Bucket, Plan, Slice, Spec

WORLD, PER_NODE = 4, 2
SIZES = (1, 3, 41, 130)
"""Fewer elements than ranks, and sizes that no number of ranks divides."""
Shapes = list[tuple[int, ...]]


def gradients(shapes: Shapes, rank: int, number: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * number + rank)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.view(-1).float() for t in tensors]


def account(worker: Worker, shapes: Shapes, rank: int, steps: int, broken: bool = False) -> dict[str, Any]:
    """Applied in each step, and this rank's residuals, by tensor."""
    applied = []
    for number in range(steps):
        put = gradients(shapes, rank, number)
        if broken and (number, rank) == BROKEN:
            put = [g.fill_(float("inf")) for g in put]
        applied.append(step(worker, [*put]))
    return {"applied": applied, "residuals": flat(by_tensor(slices_of(worker), shapes))}


COLLECTIVES = [path for kind in ("flat", "two-level", "sum") for path in tree.paths_of_kind(kind, ("cpu",))]  # type: ignore[arg-type]
SUMS = tree.paths_of_kind("sum", ("cpu",))
"""Codecs whose payloads add up are all-reduced without being decoded."""
STEPS = 4
BROKEN = 1, 2
"""The step in which that rank's gradients are infinite."""


def over_collectives(codec: str, sums: bool) -> tuple[Plan, Shapes]:
    """Paths that add up payloads need a codec of sums instead of `codec`."""
    paths: list[Any] = [path for path in SUMS for _ in range(3)] if sums else COLLECTIVES
    shapes: Shapes = [((24, 33), (500,), (3,))[i % 3] if sums else (SIZES[i % 4],) for i in range(len(paths))]
    tensors = job(shapes)
    buckets = tuple(
        Bucket(i, (Slice(i, 0, info.numel),), format_path(path), owner=i % PER_NODE, shape=info.shape if sums else (),
               codec="identity()" if tree.sums_payloads(path) and not sums else codec)
        for i, (path, info) in enumerate(zip(paths, tensors.tensors, strict=True)))
    plan = Plan(tensors.digest(), buckets, ranks_per_node=PER_NODE)
    return plan if sums else lower(plan), shapes


def run(rank: int, codec: str, sums: bool, broken: bool, members: int) -> dict[str, Any]:
    groups = Groups(PER_NODE, 30.0, torch.device("cpu"))
    plan, shapes = over_collectives(codec, sums)
    worker = Worker(job(shapes), plan, {b.id: make_codec(b, rank // PER_NODE) for b in plan.buckets}, torch.device("cpu"),
                    rank=rank, groups=groups, members=members)
    try:
        return account(worker, shapes, rank, STEPS, broken)
    finally:
        worker.close()
        groups.close()


@pytest.mark.commit(5)
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(("codec", "sums", "members"), [
    ("identity()", False, WORLD), ("qsgd(levels=7)", False, WORLD), ("topk(ratio=0.3)", False, WORLD),
    ("topk(ratio=0.3)", False, 2 * WORLD), ("int8(block=32)", False, WORLD), ("identity()", True, WORLD),
    ("powersgd(rank=2)", True, WORLD), ("powersgd(rank=2)", True, 3), ("randomk(ratio=0.3)", True, WORLD),
    ("randomk(ratio=0.3, values='bf16')", True, WORLD),
])
def test_collectives_apply_equal_bits_and_conserve_gradients(codec: str, sums: bool, members: int, broken: bool) -> None:
    """`members`: number of workers with which the training began, the unit of residuals."""
    results = pool(WORLD).call(run, codec, sums, broken, members)
    plan, shapes = over_collectives(codec, sums)
    for tensor in range(len(shapes)):
        per_step = [[r["applied"][n][tensor].view(-1) for r in results] for n in range(STEPS)]
        for number, same in enumerate(per_step):
            finite = not broken or number != BROKEN[0]
            assert all(bool(t.isfinite().all()) == finite for t in same)
            assert not finite or all(torch.equal(t, same[0]) for t in same), f"ranks differ in tensor {tensor}"
        if codec.startswith("qsgd"):  # which keeps no residual: its errors are random
            continue
        kept = [n for n in range(STEPS) if not broken or n != BROKEN[0]]  # the others are dropped, as torch alone drops them
        got = WORLD * (sum(per_step[n][0] for n in kept) + sum(r["residuals"][tensor] for r in results) / members)
        put = sum(gradients(shapes, rank, n)[tensor].view(-1) for rank in range(WORLD) for n in kept)
        torch.testing.assert_close(got, put, rtol=1e-4, atol=1e-4, msg=lambda m, t=tensor: f"tensor {t} of {plan}: {m}")


def test_paths_under_test_are_in_the_tree() -> None:
    every = {tuple(op.name for op in p) for p in tree.paths_of_kind("two-level")}
    assert {tuple(op.name for op in p) for p in tree.paths_of_kind("two-level", ("cpu",))} == every
    assert len(set(COLLECTIVES)) == len(COLLECTIVES) == 177
    assert len(SERVED) == 4, "two halves inside, pull and forward"
    assert len(CASES) == 2 * len(CODINGS) + 2 * 5


def test_different_random_draws_are_reported_on_all_ranks() -> None:
    codec, spec = parse("randomk(ratio=0.5)"), Spec((8,))
    accs = []
    for shared in (3, 4):
        state, out = codec.init(spec), memoryview(bytearray(codec.bound(spec)))
        state["shared"] = shared
        accs.append(dict(codec.new_accumulator(spec, 0)))
        codec.add(0, out[: codec.start(torch.ones(8), state, out)], accs[-1], first=True)
    both = [ReducedAccumulator(acc) for acc in accs]
    largest = torch.maximum(both[0].facts, both[1].facts)
    for reduced in both:
        reduced.facts.copy_(largest)
        assert_refused(outcome(reduced.merge), "E-PAYLOAD", "seeds")


SERVERS = 2
NODES = Cluster(tuple(machines.node(f"n{i}", "cpu", "10g", ranks=PER_NODE) for i in range(WORLD // PER_NODE)))
SERVED = [format_path(path) for path in tree.usable_paths(NODES, kinds=("service",))]
CODINGS: dict[str, dict[str, Any]] = {
    "dense": {"codec": "identity()"},
    "cast": {"codec": "fp16()"},
    "quantised": {"codec": "int8(block=32)"},
    "sparse": {"codec": "topk(ratio=0.3)"},
    "denser down": {"codec": "topk(ratio=0.3)", "down": "int8(block=32)"},
    "sparser down": {"codec": "int8(block=32)", "down": "topk(ratio=0.3)"},
    "exact down": {"codec": "topk(ratio=0.3)", "down": "identity()"},
    "by node": {"codec": "topk(ratio=0.5)", "by_node": ("topk(ratio=0.5)", "topk(ratio=0.2)")},
    "by node, denser down": {"codec": "topk(ratio=0.5)", "by_node": ("topk(ratio=0.2)", "topk(ratio=0.5)"),
                             "down": "int8(block=32)"},
    "random": {"codec": "randomk(ratio=0.3)"},
    "low rank": {"codec": "powersgd(rank=1)"},
}
SERVER_ALONE = ("random", "low rank")
"""Their sums are encoded by the same codec, because a server can send them in no other form."""
BOUNDS = {"dense": 1e-5, "cast": 4e-3}
"""How far a step's sum may be from the plain one."""
CASES = [(path, name) for path in SERVED for name in CODINGS
         if "forward" not in path or (name not in SERVER_ALONE and "down" not in CODINGS[name])]
SHAPES: Shapes = [(SIZES[i % 4],) for i in range(len(CASES))]


def attached(rank: int, address: str, per_node: int) -> dict[str, Any]:
    """On one node there is one codec for all."""
    codings = CODINGS if per_node == PER_NODE else {name: fields | {"by_node": ()} for name, fields in CODINGS.items()}
    buckets = tuple(Bucket(i, (Slice(i, 0, SHAPES[i][0]),), path, server=i % SERVERS, owner=i % per_node, **codings[name])
                    for i, (path, name) in enumerate(CASES))
    plan = lower(Plan(job(SHAPES).digest(), buckets, servers=SERVERS, ranks_per_node=per_node))
    config = read_config(quick(join=address, ranks_per_node=per_node), environ={}, cwd="/nonexistent")
    with StartExchange(None, torch.device("cpu")) as start:
        connection = connect(job(SHAPES), torch.device("cpu"), start, OptimizerMemory([], None, OuterSGD()), plan=plan,
                             config=config)
    assert isinstance(connection, DistributedJob)
    try:
        return account(connection.worker, SHAPES, rank, STEPS)
    finally:
        connection.close()


@pytest.fixture(scope="module", params=[PER_NODE, WORLD], ids=lambda n: f"{n} ranks to a node")
def served(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Of the ranks, then of the servers."""
    pool(WORLD).ready(__name__)  # servers wait for ranks, which take their time to start
    with Servers(WORLD, SERVERS) as servers:
        ranks = pool(WORLD).call(attached, servers.address, request.param)
        parts = servers.residuals()
        return [*ranks, {"residuals": flat(by_tensor(parts, SHAPES))}]


@pytest.mark.parametrize("name", CODINGS)
def test_servers_apply_equal_bits_and_conserve_gradients(served: list[dict[str, Any]], name: str) -> None:
    for tensor in (i for i, case in enumerate(CASES) if case[1] == name):
        put = [sum(gradients(SHAPES, rank, n)[tensor] for rank in range(WORLD)) for n in range(STEPS)]
        got = [WORLD * served[0]["applied"][n][tensor] for n in range(STEPS)]
        for number in range(STEPS):
            assert all(torch.equal(WORLD * r["applied"][number][tensor], got[number]) for r in served[:WORLD]), CASES[tensor]
            if name in BOUNDS:
                assert (got[number] - put[number]).abs().max() <= BOUNDS[name] * (1 + put[number].abs().max()), CASES[tensor]
        if name != "cast":  # its residual is no sum of unsent values
            residuals = torch.stack([r["residuals"][tensor] for r in served]).sum(0)
            torch.testing.assert_close(sum(got) + residuals, sum(put), rtol=1e-4, atol=1e-4)


def both_ways(rank: int, address: str) -> tuple[set[tuple[str, str]], torch.Tensor, torch.Tensor]:
    """The plan's codecs, this rank's gradient, and the result."""
    model = torch.nn.Linear(64, 8, bias=False)
    with commlayer.attach(model, compression="two_way(fp16(), bf16())", config=quick(join=address)) as session:
        torch.manual_seed(rank)
        x = torch.randn(4, 64)
        model(x).sum().backward()
        assert model.weight.grad is not None
        ways = {(str(parse_spec(b.codec).core), str(parse_spec(b.down).core)) for b in session.inspect.context.plan.buckets}
        return ways, x.sum(0).expand(8, 64), model.weight.grad


def test_script_may_choose_a_codec_per_direction() -> None:
    with Servers(2, 1) as servers:
        results = pool(2).call(both_ways, servers.address)
    mean = sum(own for _, own, _ in results) / 2
    for ways, _, got in results:
        assert ways == {("fp16()", "bf16()")}
        assert torch.equal(got, got.to(torch.bfloat16).float()), "as it came down"
        torch.testing.assert_close(got, mean, rtol=2**-7, atol=1e-3)
    bucket = Bucket(0, (Slice(0, 0, 8),), "service", "topk(ratio=0.5)", down="int8()")
    assert str(make_codec(bucket)) == str(two_way(error_feedback(topk(0.5)), error_feedback(int8())))
    line = outcome(lambda: two_way(topk(0.5), two_way(topk(0.5), int8())))
    assert_refused(line, "E-CODEC-ARGUMENT", "two_way: down is two_way")


def waits_for_owner(rank: int, key: str) -> bool:
    """Whether this rank starts only after the owner has the result."""
    groups = Groups(WORLD, 30.0, torch.device("cuda"))
    ready = groups.inside.ready
    assert ready is not None
    try:
        store = distributed_c10d._get_default_store()
        if rank == 1:
            store.wait([f"{key} {other}" for other in (0, 2, 3)])
        pending = ready.allreduce(torch.zeros(1))
        early = rank != 1 and pending.is_over()
        store.set(f"{key} {rank}", b"")
        pending.wait(time.monotonic() + 20.0)
        return not early
    finally:
        groups.close()


def crosswise(rank: int, key: str) -> bool:
    """Whether the owner's frame of a stale result is not mistaken for one of this step."""
    groups = Groups(WORLD, 30.0, torch.device("cuda"))
    ready, late = groups.inside.ready, groups.inside.late_ready
    assert ready is not None
    assert late is not None
    store, until = distributed_c10d._get_default_store(), time.monotonic() + 20.0
    try:
        if rank == 1:
            lines = late.allreduce(torch.zeros(1))
            time.sleep(0.3)
            store.set(key, b"")
            ready.allreduce(torch.zeros(1)).wait(until)
            good = True
        else:
            ready.allreduce(torch.zeros(1)).wait(until)
            good = store.check([key])
            lines = late.allreduce(torch.zeros(1))
        lines.wait(until)
        return good
    finally:
        groups.close()


@pytest.mark.parametrize("script", [waits_for_owner, crosswise], ids=lambda f: f.__name__)
def test_gpu_results_start_when_their_owner_has_them(script: Any) -> None:
    assert pool(WORLD).call(script, f"{script.__name__} {time.time_ns()}") == [True] * WORLD

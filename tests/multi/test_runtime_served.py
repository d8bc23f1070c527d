"""Every path over servers for nodes of several ranks, coded in every way that a bucket can be, on 2 nodes x 2 ranks.

Processes over Gloo, servers over TCP; each path and coding is a bucket of one plan, as the planner spells it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_pool import Servers, pool, quick
from support.workers import job, step

from commlayer.engine.start import Start, connect
from commlayer.planner import lower
from commlayer.planner import tables as machines
from commlayer.planner import tree as grammar
from commlayer.planner.model import Cluster
from commlayer.planner.tree import spell
from commlayer.records import Bucket, Plan, Slice

WORLD, PER_NODE, SERVERS, STEPS = 4, 2, 2, 3
NODES = Cluster(tuple(machines.node(f"n{i}", "cpu", "10g", ranks=PER_NODE) for i in range(WORLD // PER_NODE)))
PATHS = [spell(path) for path in grammar.options(NODES, kinds=("service",))]
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
SERVER_ALONE = ("random", "integers", "low rank", "differences")
"""Their sums come back as the codec's own: a server can send them on in no other way."""
ROUNDED = ("cast", "differences")
"""What they keep back is no sum of what was not sent: a cast keeps nothing."""
BOUNDS = {"dense": 1e-5, "cast": 4e-3, "differences": 0.06}
"""How far a step's sum may be from the plain one."""
CASES = [(path, name) for path in PATHS for name in CODINGS
         if "forward" not in path or (name not in SERVER_ALONE and "down" not in CODINGS[name])]
NUMELS = (1, 3, 41, 130)
SHAPES = [(NUMELS[i % 4],) for i in range(len(CASES))]


def plan() -> Plan:
    description = job(SHAPES)
    buckets = tuple(
        Bucket(i, (Slice(i, 0, numel),), path, server=i % SERVERS, owner=i % PER_NODE, **CODINGS[name])
        for i, ((path, name), (numel,)) in enumerate(zip(CASES, SHAPES, strict=True))
    )
    return lower(Plan(description.digest(), buckets, servers=SERVERS, ranks_per_node=PER_NODE))


def gradients(rank: int, number: int) -> list[torch.Tensor | None]:
    draw = torch.Generator().manual_seed(100 * number + rank)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def run(rank: int, address: str) -> dict[str, Any]:
    """What was applied in each step, and this rank's residuals, per tensor."""
    with Start(None, torch.device("cpu")) as start:
        connection = connect(job(SHAPES), torch.device("cpu"), start, plan=plan(), config=config(address))
    try:
        assert connection.worker is not None
        applied = [step(connection.worker, gradients(rank, number)) for number in range(STEPS)]
        residuals = [each for bucket in connection.worker.buckets for each in bucket.ledger.residuals()]
        return {"applied": applied, "residual": spread(residuals)}
    finally:
        connection.close()


def _here(rank: int) -> int:
    return rank


def config(address: str) -> Any:
    from commlayer.config import read_config

    return read_config(quick(join=address, ranks_per_node=PER_NODE), environ={}, cwd="/nonexistent")


def spread(debts: list[Any]) -> list[torch.Tensor]:
    owed = [torch.zeros(shape) for shape in SHAPES]
    for debt in debts:
        owed[debt.tensor][debt.start : debt.stop] += torch.as_tensor(debt.values)
    return owed


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Of the ranks, then of the servers."""
    pool(WORLD).call(_here)  # servers wait for ranks, which take their time to start
    with Servers(WORLD, SERVERS) as servers:
        ranks = pool(WORLD).call(run, servers.address)
        debts = [debt for serving in servers.serving for ops in serving._ops.values() for debt in ops.debts()]
        return [*ranks, {"residual": [values.clone() for values in spread(debts)]}]


def test_the_cases_are_all_that_there_are() -> None:
    assert len(PATHS) == 4, "two halves inside, pull and forward"
    assert len(CASES) == 2 * len(CODINGS) + 2 * 5


@pytest.mark.parametrize("name", CODINGS)
def test_every_class_sums_and_owes_what_it_did_not_send(results: list[dict[str, Any]], name: str) -> None:
    for tensor in (i for i, case in enumerate(CASES) if case[1] == name):
        every = [[g for rank in range(WORLD) if (g := gradients(rank, n)[tensor]) is not None] for n in range(STEPS)]
        got = [WORLD * results[0]["applied"][n][tensor] for n in range(STEPS)]
        for number, put in enumerate(torch.stack(parts).sum(0) for parts in every):
            assert all(torch.equal(WORLD * r["applied"][number][tensor], got[number]) for r in results[:WORLD]), CASES[tensor]
            if name in BOUNDS:
                assert (got[number] - put).abs().max() <= BOUNDS[name] * (1 + put.abs().max()), CASES[tensor]
        if name not in ROUNDED:
            owed = torch.stack([r["residual"][tensor] for r in results]).sum(0)
            put = torch.stack([g for parts in every for g in parts]).sum(0)
            torch.testing.assert_close(torch.stack(got).sum(0) + owed, put, rtol=1e-4, atol=1e-4)

"""Mistakes at the PyTorch surface: one line that names the thing, on every rank, and no hang."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.attached import Run, Setting, coordinators, data, loss_of, mlp
from support.rank_pool import Servers, pool, quick
from torch import nn

import commlayer
from commlayer import planner, records
from commlayer.compressors import parse
from commlayer.engine.optimizers import job_of
from commlayer.errors import RecordError
from commlayer.records import Plan
from commlayer.transport.protocol import SERVER_BASE, Header, Kind

WORLD = 2


def plan_of(model: nn.Module, **changes: Any) -> Plan:
    plan = planner.default_plan(job_of(model), codec="identity()", path="service", servers=1, ranks_per_node=1,
                                fuse_nbytes=2048, cut_nbytes=4096)
    return msgspec.structs.replace(plan, **changes)


def attach(**kwargs: Any) -> None:
    commlayer.attach(mlp(), **kwargs)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "codec": (lambda: parse("topq(ratio=0.1)"), "'topq' .*topk.*E-CODEC-NAME"),
    "codec's argument": (lambda: parse("topk(rate=0.1)"), "topk .*'rate'.* ratio,.*E-CODEC-NAME"),
    "ratio 0": (lambda: parse("topk(ratio=0)"), r"ratio is 0\b.*E-CODEC-ARGUMENT"),
    "ratio above 1": (lambda: parse("topk(ratio=1.5)"), r"ratio is 1\.5.*E-CODEC-ARGUMENT"),
    "ratio nan": (lambda: parse("topk(ratio=1e999)"), "ratio is inf.*E-CODEC-ARGUMENT"),
    "setting": (lambda: attach(config={"deadlin_s": 3}), r"deadlin_s: .*deadline_s\?.*E-SETTING"),
    "setting's value": (lambda: attach(config={"deadline_s": -1.0}), r"deadline_s: got -1\.0 from argument .*E-SETTING"),
    "address": (lambda: attach(config={"join": "nowhere"}), "join: got 'nowhere'.*argument join.*E-ADDRESS"),
    "sync": (lambda: attach(sync="never"), "sync: got 'never'.*E-SYNC-MODE"),
    "plan file": (lambda: attach(plan="missing.json"), "plan 'missing.json'.*E-PLAN-NAME"),
    "plan's type": (lambda: attach(plan=17), "codec '17'.*E-CODEC-NAME"),
    "plan of another model": (lambda: attach(plan=plan_of(mlp(width=8))), r"plan: .* job \w+, .*E-PLAN-REFUSED"),
    "plan with a hole": (lambda: attach(plan=plan_of(mlp(), buckets=plan_of(mlp()).buckets[:-1])),
                         "0.weight: .*E-PLAN-REFUSED"),
    "plan with an unknown codec": (lambda: attach(plan=plan_of(mlp(), buckets=tuple(
        msgspec.structs.replace(b, codec="topq()") for b in plan_of(mlp()).buckets))), "bucket 0: .*'topq' .*E-CODEC-NAME"),
    "complex parameters": (lambda: commlayer.attach(Complex()), "phase is complex64.*E-MODEL-UNSUPPORTED"),
    "hook's setting": (lambda: commlayer.HookState(config={"deadlin_s": 3}), "deadlin_s: .*E-SETTING"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_names_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    act, said = MISTAKES[name]
    with pytest.raises(ValueError, match=said) as raised:
        act()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("text", "said"), [
    ("", "JSON"), ("{", "JSON"), ("x", "JSON"), ("[]", "`list`"), ('{"job": 3}', r"`\$\.job`"),
    ('{"job": "0", "buckets": [], "colour": 1}', "`colour`"),
])
def test_a_malformed_plan_file_is_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=f"plan {path}: .*{said}.*E-PLAN-FILE"):
        attach(plan=path)


def test_a_plan_file_for_this_model_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(records.encode(plan_of(mlp())))
    commlayer.attach(mlp(), plan=str(path)).close()


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_is_a_finite_number(weight: float) -> None:
    with commlayer.attach(mlp()) as session, pytest.raises(ValueError, match=f"weight: got {weight}, .*E-WEIGHT"):
        session.weight(weight)


# ---- with two ranks

def outcome(act: Callable[[], Any]) -> str:
    """What act() raised, as "Type: message"."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def models_that_differ(rank: int) -> str:
    return outcome(lambda: commlayer.attach(mlp(width=8 + rank), config=quick()))


def a_plan_that_is_missing(rank: int) -> str:
    # On the other rank the file is not even looked for.
    return outcome(lambda: commlayer.attach(mlp(), plan="missing.json" if rank == 0 else "elsewhere.json", config=quick()))


def a_plan_for_other_nodes(rank: int) -> str:
    return outcome(lambda: commlayer.attach(mlp(), plan=plan_of(mlp(), ranks_per_node=2), config=quick()))


def nodes_that_do_not_fit(rank: int) -> str:
    return outcome(lambda: commlayer.attach(mlp(), config=quick(ranks_per_node=3)))


TOGETHER: list[tuple[Callable[[int], str], list[str]]] = [
    (models_that_differ, ["InvalidInput: rank 1 .*rank 0: .*E-RANKS-DIFFER"] * 2),
    (a_plan_that_is_missing, ["InvalidInput: plan 'missing.json'.*E-PLAN-NAME",
                              "InvalidInput: rank 0: plan 'missing.json'.*E-PLAN-NAME"]),
    (a_plan_for_other_nodes, ["InvalidInput: plan: .* 2 ranks per node.* 1: .*E-PLAN-REFUSED"] * 2),
    (nodes_that_do_not_fit, ["InvalidInput: ranks_per_node 3 .* 2 ranks.*E-PROCESS-GROUP"] * 2),
]


@pytest.mark.parametrize(("act", "said"), TOGETHER, ids=lambda v: getattr(v, "__name__", ""))
def test_all_ranks_hear_of_it(act: Callable[[int], str], said: list[str]) -> None:
    results = pool(WORLD).call(act)
    assert [bool(re.match(s, r)) for r, s in zip(results, said, strict=True)] == [True, True], results


def join(rank: int, address: str) -> str:
    plan = plan_of(mlp())
    return outcome(lambda: commlayer.attach(mlp(), plan=plan, config=quick(join=address)))


def test_servers_that_wait_for_another_number_of_workers_refuse() -> None:
    with Servers(3, 1) as servers:
        for rank, text in enumerate(pool(WORLD).call(join, servers.address)):
            assert text == (f"Refused: coordinator {servers.address}: {text.partition(': ')[2].partition(': ')[2]}")
            assert re.search(rf"worker {rank} on .* 2 .* 3\b.*E-WORKERS", text), text


def weightless(rank: int, setting: Setting) -> list[str]:
    """The mistake on both ranks; then one more step, which must end, too."""
    run, model = Run(rank, WORLD, setting), mlp()
    wrapped = run.wrap(model)
    run.weight(0)
    said = [outcome(lambda: loss_of(run, wrapped, 0).backward()), outcome(lambda: wrapped(data(0, 0)[0]).sum().backward())]
    run.close()
    return said


@pytest.mark.parametrize("path", ["service", "all-reduce"])
def test_weights_of_0_on_every_rank_raise_on_every_rank(path: str) -> None:
    setting = Setting("module") if path == "service" else Setting("module", servers=0, plan="auto", ranks_per_node=2)
    with coordinators(1, WORLD, setting.servers, deadline_s=2.0) as made:
        setting = setting._replace(addresses=tuple(m.address for m in made), fields=(("deadline_s", 4.0),))
        results = pool(WORLD).call(weightless, setting)
    for first, again in results:
        assert re.match(r"InvalidInput: step 0: .*E-WEIGHT", first), results
        assert again != "nothing", "a step after an error must not pass as if all were well"


def flooded(rank: int, address: str) -> str:
    model, until = mlp(), time.monotonic() + 20.0
    said, session = "nothing", commlayer.attach(model, plan=plan_of(model), config=quick(join=address, dead_after_s=1.5))
    while said == "nothing" and time.monotonic() < until:
        said = outcome(lambda: model(data(rank, 0)[0]).sum().backward())
    session.close()
    return said


def test_a_server_that_sends_more_than_it_has_reason_to_is_let_go() -> None:
    """As soon as it has sent a sum: then its workers follow the plan."""
    pool(WORLD).ready(__name__)
    with Servers(WORLD, 1, dead_after_s=1.5) as servers, ThreadPoolExecutor(1) as trains:
        said = trains.submit(pool(WORLD).call, flooded, servers.address)
        serving: Any = servers.serving[0]
        while not said.done():
            time.sleep(0.01)
            if serving._server is not None and any(cell.results for cell in serving._server._core.cells.values()):
                for rank in range(WORLD):
                    serving._transport.send(rank, Header(Kind.RESULT, 9, sender=SERVER_BASE), bytes(20 << 20))
                break
        for line in said.result():
            assert re.search(r"server 0: .* 16\d{6,7} bytes .*E-FRAME", line), line

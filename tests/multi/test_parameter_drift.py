"""Replica divergence: detected by digests, reported by tensor and rank, and handled as configured."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from support.attached import data, mlp, plan_of, plan_or_codec, train_step
from support.rank_pool import Servers, pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.guards.parameter_drift import LEAST, ParameterDrift, spacing
from commlayer.engine.model.digests import EXACT_BITS, Digests, pieces
from commlayer.errors import find_error_code

WORLD, STEPS = 2, 14


def momentum(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t.clone() for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


def run(rank: int, how: str, drift: str, strays: bool, unlike: bool = False) -> dict[str, Any]:
    """Rank 1 alone changes a weight by its last bits, and what its optimizer keeps of it. "changed": the weight has changed
    during some backward pass."""
    model = mlp().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrapped: Any = DistributedDataParallel(model) if how == "ddp" else model
    plan = "auto" if how != "local" else plan_of(model, path="allreduce", ranks_per_node=WORLD, local_steps=2)
    line, used, changed = "", [model[2].weight.detach().clone()], []
    config = quick(ranks_per_node=WORLD, drift=drift, drift_steps=2)
    session = commlayer.attach(wrapped, optimizer, **plan_or_codec(plan), config=config,
                               sync="forward" if how == "forward" else None)
    model[2].register_forward_pre_hook(lambda module, _: used.append(module.weight.detach().clone()))
    model[0].weight.register_hook(lambda _: changed.append(not torch.equal(model[2].weight, used[-1])))
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = data(rank, step)
            nn.functional.mse_loss(wrapped(x), y).backward()
            if strays and rank and step == 5:
                with torch.no_grad():
                    model[2].weight[3, 4] = torch.nextafter(model[2].weight[3, 4], torch.tensor(9.0))
                    optimizer.state[model[2].weight]["momentum_buffer"][1, 1] += 1e-3
                    if unlike:
                        optimizer.state.clear()
            optimizer.step()
    except commlayer.CommError as error:
        line = str(error)
    decisions = session.inspect.decisions()
    session.close()
    return {"error": line, "decisions": decisions, "weights": [p.detach().clone() for p in model.parameters()],
            "changed": any(changed),
            "momentum": momentum(optimizer)}


def equal(results: list[dict[str, Any]], what: str) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results[0][what], results[1][what], strict=True))


@pytest.mark.parametrize(("how", "drift", "strays", "unlike"), [
    ("module", "resync", True, False), ("ddp", "resync", True, False), ("local", "resync", True, False),
    ("forward", "resync", True, False), ("module", "resync", True, True),
    ("module", "warn", True, False), ("module", "end", True, False), ("local", "end", False, False),
    *(pytest.param(*row, False, marks=pytest.mark.nightly) for row in (
        ("ddp", "warn", True), ("ddp", "end", True), ("module", "end", False), ("ddp", "end", False))),
])
def test_changed_weight_is_reported_and_handled_as_configured(how: str, drift: str, strays: bool, unlike: bool) -> None:
    """After local steps an exchange makes weights equal again. `unlike`: entries of the optimizer's state differ too."""
    results = pool(WORLD).call(run, how, drift, strays, unlike)
    if drift == "end" and strays:
        for result in results:
            assert re.search(r"rank 1 and rank 0 .*2\.weight.*E-REPLICAS", result["error"])
            assert "\n" not in result["error"]
        return
    assert [r["error"] for r in results] == ["", ""]
    assert not any(r["changed"] for r in results)
    reported = strays and how != "local"
    assert any("the weights of rank 1 and rank 0 differ in" in line for line in results[0]["decisions"]) == reported
    assert equal(results, "weights") == (drift != "warn")
    if drift == "resync" and reported:
        assert equal(results, "momentum")


def coded(rank: int, address: str, plan: str, stale: bool) -> list[str]:
    model = mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    layout = plan_of(model, plan)
    if stale:
        layout = structs.replace(layout, buckets=tuple(structs.replace(b, stale=b.id < 2) for b in layout.buckets))
    with commlayer.attach(model, optimizer, plan=layout, config=quick(join=address, drift="end", drift_steps=1)) as session:
        for step in range(8):
            session.weight(1 + rank + step % 2)
            train_step(model, optimizer, rank, step)
        return session.inspect.decisions()


@pytest.mark.parametrize(("plan", "stale"), [("error_feedback(topk(ratio=0.1))", False), ("error_feedback(int8())", True)])
def test_codecs_and_stale_results_keep_replicas_equal(plan: str, stale: bool) -> None:
    with Servers(WORLD) as servers:
        assert pool(WORLD).call(coded, servers.address, plan, stale) == [[], []]


def stepped(rank: int, how: str, drift: str, uneven: str) -> tuple[str, list[str]]:
    """Sixteen passes on each rank. Rank 1 leaves one step out, or takes three passes to a step where rank 0 takes two."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped: Any = DistributedDataParallel(model) if how == "ddp" else model
    lines = ""
    session = commlayer.attach(wrapped, optimizer, config=quick(ranks_per_node=WORLD, drift=drift, drift_steps=4))
    try:
        for number in range(16):
            x, y = data(rank, number)
            nn.functional.mse_loss(wrapped(x), y).backward()
            takes = 3 if rank and uneven == "always" else 2
            if number % takes == 0 and not (rank and number == 6 and uneven == "once"):
                optimizer.step()
                optimizer.zero_grad()
    except commlayer.CommError as error:
        lines = str(error)
    dist.barrier()  # a rank that has left would be the error of one that has not compared
    decisions = session.inspect.decisions()
    session.close()
    return lines, decisions


APART = r"step \d+: rank 1 and rank 0 have stepped their optimizers after different exchanges \(\d and \d steps .*\): ranks"


@pytest.mark.parametrize(("how", "drift", "ends"), [
    ("module", "end", True), ("module", "resync", True), ("ddp", "resync", True), ("module", "warn", False)])
def test_unequal_numbers_of_passes_per_step_are_reported(how: str, drift: str, ends: bool) -> None:
    """Averages then belong to different steps, even if parameters are equal."""
    for lines, decisions in pool(WORLD).call(stepped, how, drift, "always"):
        assert (bool(re.match(APART, lines)), find_error_code(lines)) == (ends, "E-REPLICAS" if ends else ""), lines
        reported = [line for line in decisions if re.match(APART, line)]
        assert len(reported) == (drift != "end"), "once, before the end"


def test_one_omitted_step_is_reported_without_ending_the_job() -> None:
    results = pool(WORLD).call(stepped, "module", "resync", "once")
    assert [lines for lines, _ in results] == ["", ""]
    assert len([line for line in results[0][1] if re.match(APART, line)]) == 1
    assert any("the weights of" in line for line in results[0][1])


def watched(rank: int, drift_steps: int) -> int:
    model = mlp()
    with commlayer.attach(model, config=quick(ranks_per_node=WORLD, drift_steps=drift_steps)) as session:
        return len(session.inspect.components.of(ParameterDrift))


def test_interval_of_zero_disables_the_check() -> None:
    assert pool(WORLD).call(watched, 0) == [0, 0]
    assert pool(WORLD).call(watched, -1) == [1, 1]


def test_check_interval_grows_with_its_cost() -> None:
    assert spacing(0.1, 0.0) == LEAST
    for cost_s, step_s in ((0.02, 0.5), (0.3, 0.2), (0.001, 0.003)):
        assert cost_s <= 0.001 * step_s * spacing(cost_s, step_s) <= cost_s + 0.001 * step_s


class _Sums(Digests):
    """The digests of a device, made here."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self.by_sums = True
        self.restart_digests()


def reported(kind: type[Digests], tensors: list[torch.Tensor], most_nbytes: int = 4 << 20) -> list[int]:
    digests = kind(tensors)
    for piece in pieces(tensors, most_nbytes):
        digests.add(piece)
    return digests.take()


@pytest.mark.parametrize("kind", [Digests, _Sums])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8])
def test_every_change_alters_the_digest_of_its_tensor(kind: type[Digests], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    tensors = [(100 * torch.rand(shape, generator=draw)).to(dtype) for shape in ((3000,), (7, 5), (), (70, 70, 3, 3), (0,))]
    tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    before = reported(kind, tensors)
    assert before == reported(kind, [t.clone() for t in tensors])
    assert all(0 <= digest < 1 << EXACT_BITS for digest in before)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for place in (0, 1023, 1024, 2999):
        changed = [t.clone() for t in tensors]
        changed[0].view(bits)[place] ^= 1
        assert [a == b for a, b in zip(before, reported(kind, changed), strict=True)] == [False, True, True, True, True]
    for one, other in ((5, 6), (5, 5 + 1024), (0, 2999), (1030, 1029 + 1024)):  # changes that cancel in a sum
        changed = [t.clone() for t in tensors]
        changed[0].view(bits)[one] += 1
        changed[0].view(bits)[other] -= 1
        assert reported(kind, changed)[0] != before[0]
        swapped = [t.clone() for t in tensors]
        swapped[0][one], swapped[0][other] = tensors[0][other], tensors[0][one]
        assert (reported(kind, swapped)[0] != before[0]) == bool(tensors[0][one] != tensors[0][other])
    assert reported(kind, [t.contiguous() for t in tensors]) == before


def test_digest_of_pieces_equals_the_digest_of_the_whole() -> None:
    tensors = [torch.arange(5000.0), torch.ones(40, 30)]
    assert reported(Digests, tensors, 1000) == reported(Digests, tensors)
    assert max(piece.stop - piece.start for piece in pieces(tensors, 1000)) == 250

"""Gradients that are not finite on some ranks: named on all, dropped while they are rare, the end of the job if they stay."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from msgspec import structs
from support.arguments import plan_or_codec, sync_of
from support.attached import data, mlp
from support.rank_pool import pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.finite_steps import MOST
from commlayer.engine.optimizers import job_of
from commlayer.planner import default_plan

WORLD, STEPS = 2, 12
NAN = float("nan")


class Script:
    """On one rank. In `bad` steps the ranks `where` get a gradient of 2.weight that is not finite."""

    def __init__(self, rank: int, how: str, codec: str, bad: list[int], where: tuple[int, ...], kind: str = "adamw") -> None:
        self.rank, self.bad, self.where = rank, bad, where
        self.model = mlp()
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.05) if kind == "sgd" else \
            torch.optim.AdamW(parameters, lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if kind == "scaler" else None
        self.kind, self.number = kind, 0
        self.others: list[torch.optim.Optimizer] = []
        if kind == "two":
            first, second = [*parameters_of(self.model, "0.")], [*parameters_of(self.model, "2.")]
            self.optimizer, self.others = torch.optim.SGD(second, lr=0.05), [torch.optim.SGD(first, lr=0.05)]
        self.wrapped: Any = DistributedDataParallel(self.model) if how == "ddp" else self.model
        ways: dict[str, Any] = {"local": {"every": 2}, "updates": {"codes": "updates"}, "forward": {"overlap": "forward"}}
        plan: Any = commlayer.compressors.parse(codec)
        if how == "forward plan":  # that nobody asked for: a script may use gradients as ever
            made = default_plan(job_of(self.model), codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=4096,
                                cut_nbytes=4096)
            plan = structs.replace(made, overlap="forward")
        if how == "late":  # part of the results is used a step late
            made = default_plan(job_of(self.model), codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=4096,
                                cut_nbytes=4096)
            plan = structs.replace(made, buckets=tuple(structs.replace(b, stale=True) for b in made.buckets))
        if how == "allreduce":
            plan = default_plan(job_of(self.model), codec=codec, path="allreduce", servers=0, ranks_per_node=1,
                                fuse_nbytes=4096, cut_nbytes=4096)
        self.session = commlayer.attach(self.wrapped, self.optimizer, **plan_or_codec(plan),
                                        config=quick(ranks_per_node=1, drift="end"), sync=sync_of(**ways.get(how, {})))
        if kind == "whole" and rank == 0:  # it waits for all of a step, the other rank does not
            self.model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
        self.model[2].weight.register_hook(self._spoil)

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.number in self.bad and self.rank in self.where:
            gradient = gradient.clone()
            gradient.view(-1)[3] = NAN
        return gradient

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        x, y = data(self.rank, self.number)
        loss = nn.functional.mse_loss(self.wrapped(x), y)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def step(self) -> None:
        if self.kind == "closure":
            self.optimizer.step(self.backward)
        elif self.scaler is not None:
            self.backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.backward()
            if self.kind == "careful" and not all(bool(p.grad.isfinite().all()) for p in self.model.parameters()
                                                  if p.grad is not None):
                return
            for optimizer in (self.optimizer, *self.others):
                optimizer.step()


def parameters_of(model: nn.Module, start: str) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.startswith(start)]


def run(rank: int, how: str, codec: str, bad: list[int], where: tuple[int, ...], kind: str = "adamw") -> dict[str, Any]:
    script = Script(rank, how, codec, bad, where, kind)
    said = ""
    try:
        for script.number in range(STEPS):
            script.step()
        script.session.flush()
        if "forward" in how and kind != "whole":
            script.session.synchronize()
    except commlayer.CommError as error:
        said = str(error)
    decisions = script.session.inspect.decisions()
    script.session.close()
    return {"said": said, "steps": script.number, "decisions": [line for line in decisions if "not finite" in line],
            "weights": [p.detach().clone() for p in script.model.parameters()],
            "scale": None if script.scaler is None else script.scaler.get_scale()}


WAYS = [("module", "identity()"), ("ddp", "identity()"), ("module", "error_feedback(int4())"), ("ddp", "fp16()"),
        ("forward", "error_feedback(topk(ratio=0.3))"), ("forward plan", "error_feedback(int4())"), ("local", "identity()"),
        ("updates", "error_feedback(int4())")]
LOCAL = ("local", "updates")


def well(results: list[dict[str, Any]]) -> None:
    """All have gone to the end, on equal weights that are finite."""
    assert [r["said"] for r in results] == [""] * len(results)
    for one, other in zip(results[0]["weights"], results[-1]["weights"], strict=True):
        assert bool(one.isfinite().all())
        assert torch.equal(one, other)


@pytest.mark.commit(3)
@pytest.mark.parametrize(("how", "codec"), WAYS)
def test_one_bad_step_at_one_rank_is_dropped_and_named(how: str, codec: str) -> None:
    results = pool(WORLD).call(run, how, codec, [5], (1,))
    well(results)
    for rank, result in enumerate(results):
        if rank == 1 or how not in LOCAL:  # of a local step the others see nothing
            (line,) = result["decisions"]
            assert "gradients of rank 1, first in 2.weight, are not finite" in line


@pytest.mark.commit(2)
@pytest.mark.parametrize(("how", "codec"), WAYS)
def test_a_rank_that_stays_bad_ends_the_job_and_all_name_it(how: str, codec: str) -> None:
    results = pool(WORLD).call(run, how, codec, [*range(3, STEPS)], (1,))
    for result in results:
        assert re.search(rf"rank 1, first in 2\.weight.*\b{MOST} times.*E-NOT-FINITE", result["said"])
        assert "\n" not in result["said"]
        assert result["steps"] <= 3 + MOST + 2
        assert all(bool(p.isfinite().all()) for p in result["weights"])


@pytest.mark.parametrize(("how", "codec"), [WAYS[0], WAYS[1], WAYS[2]])
def test_a_loss_that_has_diverged_everywhere_ends_in_one_line(how: str, codec: str) -> None:
    for result in pool(WORLD).call(run, how, codec, [*range(3, STEPS)], (0, 1)):
        assert re.search(r"all ranks, first in 2\.weight.*diverged.*E-NOT-FINITE", result["said"])


@pytest.mark.parametrize("codec", ["identity()", "error_feedback(int4())"])
def test_bad_steps_far_from_each_other_end_nothing(codec: str) -> None:
    well(pool(WORLD).call(run, "module", codec, [1, 2, 3, 4, 6, 7, 8, 9], (1,)))


@pytest.mark.parametrize(("how", "codec"), [
    ("module", "identity()"), ("ddp", "identity()"), ("module", "error_feedback(int4())"),
    ("forward plan", "error_feedback(int4())")])
def test_a_scaler_skips_such_steps_by_itself(how: str, codec: str) -> None:
    """attach() does not know of it. Its scale falls, as often as it likes, and nothing is said."""
    results = pool(WORLD).call(run, how, codec, [*range(3, 11)], (1,), "scaler")
    well(results)
    assert [r["decisions"] for r in results] == [[], []]
    assert [r["scale"] for r in results] == [4.0 / 2**8] * WORLD


@pytest.mark.commit(2)
@pytest.mark.parametrize("kind", ["careful", "closure", "sgd"])
@pytest.mark.parametrize("codec", ["identity()", "error_feedback(int4())"])
def test_scripts_that_look_themselves_and_optimizers_with_closures(kind: str, codec: str) -> None:
    results = pool(WORLD).call(run, "module", codec, [5], (1,), kind)
    well(results)
    assert [len(r["decisions"]) for r in results] == [int(kind != "careful")] * WORLD


@pytest.mark.parametrize("how", ["local", "module"])
def test_an_optimizer_with_finite_gradients_beside_it_does_not_hide_one_that_stays_bad(how: str) -> None:
    for result in pool(WORLD).call(run, how, "identity()", [*range(3, STEPS)], (1,), "two"):
        assert f"{MOST} times in a row" in result["said"]
        assert all(bool(p.isfinite().all()) for p in result["weights"])


@pytest.mark.parametrize("codec", ["identity()", "error_feedback(int4())"])
def test_a_closure_under_local_steps(codec: str) -> None:
    results = pool(WORLD).call(run, "local", codec, [5], (1,), "closure")
    well(results)
    assert [len(r["decisions"]) for r in results] == [0, 1]
    assert "gradients of rank 1, first in 2.weight, are not finite" in results[1]["decisions"][0]


def test_ranks_that_take_a_step_whole_and_in_parts_drop_the_same_of_it() -> None:
    """overlap="forward": one rank waits for the whole step, the other takes it bucket by bucket."""
    results = pool(WORLD).call(run, "forward plan", "error_feedback(int4())", [5], (1,), "whole")
    well(results)
    assert [len(r["decisions"]) for r in results] == [1] * WORLD


def as_on_a_gpu(rank: int) -> dict[str, Any]:
    """All-reduced buckets that the host reads at a cost, of which rank 0 owes something of an earlier plan."""
    script = Script(rank, "allreduce", "identity()", [3], (1,))
    worker = script.session.inspect.connection.worker
    assert worker is not None
    for bucket in worker.buckets:
        bucket._facts_y = None
    found = []
    for script.number in range(2, 5):
        if rank == 0:
            for bucket in worker.buckets:
                bucket.carry = torch.zeros(bucket.numel)
        script.backward()
        found.append(worker.tentative)
    script.session.close()
    return {"found": found}


def test_ranks_agree_whether_a_step_is_finite_whatever_each_owes() -> None:
    """They talk about it where it is not: a rank that finds it alone would wait for the others."""
    first, second = pool(WORLD).call(as_on_a_gpu)
    assert first == second


@pytest.mark.parametrize("codec", ["identity()", "error_feedback(int4())"])
def test_the_rank_is_named_where_results_are_used_a_step_late(codec: str) -> None:
    results = pool(WORLD).call(run, "late", codec, [5], (1,))
    well(results)
    for result in results:
        (line,) = result["decisions"]
        assert "gradients of rank 1, first in 2.weight, are not finite" in line

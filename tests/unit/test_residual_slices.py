"""Laws of residual slices: each element's sum of residuals is the same after any change of plan, workers or buckets.

Then the same for what n workers and their servers saved and m workers under another plan inherit: applied averages plus
residuals equal the input gradients of both runs.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support import workers as kit
from support.jobs import FakeJob
from support.residuals import by_tensor, slices_of

from commlayer.compressors.residual_slices import Residuals, ResidualSlice, merge_residuals, residual_on, split_by_tensor
from commlayer.engine.checkpoints import checkpoint
from commlayer.engine.checkpoints.checkpoint_files import CheckpointHeader, assign_file_reader, own_files
from commlayer.engine.worker.plan_handover import inherit_residuals
from commlayer.planner import default_plan
from commlayer.records import Slice

Buckets = list[tuple[Slice, ...]]


def cut(sizes: Sequence[int], chance: random.Random) -> Buckets:
    """Any plan: each tensor in any slices, any of them merge_residuals in a bucket."""
    slices = []
    for tensor, size in enumerate(sizes):
        edges = sorted({0, size, *(chance.randrange(size) for _ in range(chance.randrange(4)))})
        slices += [Slice(tensor, low, high) for low, high in pairwise(edges)]
    chance.shuffle(slices)
    buckets: Buckets = []
    while slices:
        count = chance.randint(1, 4)
        buckets.append(tuple(slices[:count]))
        del slices[:count]
    return buckets


def numbers(count: int, chance: random.Random) -> Any:
    """Small integers, whose float32 sums are exact."""
    return np.array([chance.randint(-99, 99) for _ in range(count)], np.float32)


def of(held: list[list[Any]], plan: Buckets) -> list[ResidualSlice]:
    return [part for worker in held for slices, values in zip(plan, worker, strict=True) if values is not None
            for part in split_by_tensor(slices, 0, values)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.lists(st.integers(1, 6), min_size=2, max_size=4),
       st.integers(0, 1 << 30))
def test_sum_of_residuals_is_the_same_for_any_workers_and_plans(sizes: list[int], worlds: list[int], seed: int) -> None:
    """`worlds`: the numbers of workers, one after the other; each has a plan of its own."""
    chance = random.Random(seed)
    plan = cut(sizes, chance)
    held = [[numbers(sum(s.numel for s in slices), chance) for slices in plan] for _ in range(worlds[0])]
    shapes = [(size,) for size in sizes]
    put = by_tensor(of(held, plan), shapes)
    for world in worlds[1:]:
        parts: list[list[ResidualSlice]] = [[] for _ in range(world)]
        for part in of(held, plan):
            chance.choice(parts).append(part)
        plan = cut(sizes, chance)
        held = [[residual_on(mine, slices) for slices in plan] for mine in parts]
        for before, after in zip(put, by_tensor(of(held, plan), shapes), strict=True):
            assert torch.equal(before, after)


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 1 << 30))
def test_units_of_residuals_are_kept_or_converted(modes: list[bool], seed: int) -> None:
    """`modes`: of plans, one after the other; True: local steps. The rates of both tensors are powers of two."""
    chance, rates = random.Random(seed), (0.5, 0.25, 0.0)
    gradients = [ResidualSlice(t, 0, numbers(5, chance)) for t in range(3)]
    changes = [ResidualSlice(t, 0, numbers(5, chance)) for t in range(3)]

    def worth(residuals: Residuals) -> list[torch.Tensor]:
        """In gradients, for the tensors whose rate is a constant."""
        parts = [*residuals.gradients, *(part.times(1 / rates[part.tensor]) for part in residuals.changes if part.tensor < 2)]
        return by_tensor(parts, [(5,)] * 3)[:2]

    residuals = Residuals(gradients, changes)
    put = worth(residuals)
    for steps_locally in modes:
        under = residuals.for_plan(steps_locally=steps_locally, effect=rates.__getitem__)
        assert list(under.dropped) == ([2] if residuals.changes and not steps_locally else [])
        residuals = Residuals(under.pending, under.sent) if steps_locally else Residuals(under.sent)
        assert all(map(torch.equal, put, worth(merge_residuals([residuals, Residuals()]))))
    assert all(map(torch.equal, by_tensor(residuals.gradients, [(5,)] * 3), by_tensor(gradients, [(5,)] * 3))) is all(modes)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(0, 7), st.data())
def test_each_file_has_one_reader_who_has_it(saved: int, world: int, servers: int, data: st.DataObject) -> None:
    for name in [name for r in range(saved) for name in own_files(r, saved, servers)]:
        holders = data.draw(st.lists(st.integers(0, world - 1), min_size=1, unique=True).map(sorted))
        assert assign_file_reader(name, holders, world) in holders
        if saved == world and len(holders) == world:
            assert name in own_files(assign_file_reader(name, holders, world), world, servers)


WORLD, STEPS = 3, 4
SHAPES: list[tuple[int, ...]] = [(40, 30), (40,), (5, 3, 3, 3), (1,), (700,)]


def gradients_of(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def rig(world: int, codec: str, bucket_nbytes: int, *, late: bool) -> kit.Rig:
    plan = default_plan(kit.job(SHAPES), codec=codec, path="service", servers=2, ranks_per_node=1, fuse_nbytes=bucket_nbytes,
                        cut_nbytes=1 << 20)
    plan = replace(plan, buckets=tuple(replace(b, stale=late) for b in plan.buckets))
    return kit.Rig(world, codec, servers=2, shapes=SHAPES, plan=plan)


def train(r: kit.Rig, first: int, weights: Sequence[float]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The sums of the mean gradients that were put in, and of the averages that were applied."""
    def body(rank: int) -> list[torch.Tensor]:
        total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        r.workers[rank].units.weight = weights[rank]
        for step in range(first, first + STEPS):
            for mine, average in zip(total, kit.step(r.workers[rank], list(gradients_of(rank, step))), strict=True):
                if average is not None:
                    mine += average
        r.workers[rank].drain()
        return total

    put = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(first, first + STEPS):
        for rank in range(r.world):
            for mine, g in zip(put, gradients_of(rank, step), strict=True):
                mine += g.double() * weights[rank] / sum(weights[: r.world])
    return put, kit.on_ranks(r.world, body)[0]


def saved(r: kit.Rig) -> dict[str, dict[str, torch.Tensor]]:
    """The files of a checkpoint."""
    undone, *_ = [worker.roll_back() for worker in r.workers]
    files = {f"rank-{n}": checkpoint.worker_state(FakeJob(worker))["tensors"] for n, worker in enumerate(r.workers)}
    for n, core in enumerate(r.sums):
        tensors: dict[str, torch.Tensor] = {}
        for bucket, cell in core.cells.items():
            cell.ops.undo(undone.get(bucket, 0))
            tensors |= {f"{bucket}.{name}": t for name, t in safetensors.torch.load(cell.ops.snapshot()).items()}
        files[f"server-{n}"] = tensors
    return copy.deepcopy(files)


def residual_sums(r: kit.Rig, unit: int) -> list[torch.Tensor]:
    """As parts of the mean, after everything that was not applied has been rolled back."""
    undone, *_ = [worker.roll_back() for worker in r.workers]
    parts = [part for worker in r.workers for part in slices_of(worker)]
    late = [part for _, part in r.workers[0].late.residuals(1, unit)]
    for core in r.sums:
        for bucket, cell in core.cells.items():
            cell.ops.undo(undone.get(bucket, 0))
            parts += cell.ops.residuals()
    return [total / unit for total in by_tensor([*parts, *late], SHAPES)]


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize(("codec", "late", "again"), [
    ("topk(0.1)", False, "int8(64)"), ("int4()", False, "identity()"), ("onebit(64)", True, "topk(0.3)"),
    ("identity()", True, "identity()"), ("error_feedback(int8(), lr_correction=True)", False, "error_feedback(fp16())"),
])
def test_law_holds_across_a_checkpoint_for_other_workers(codec: str, late: bool, again: str, world: int) -> None:
    rate, weights = 0.25 if "lr" in codec else 1.0, [1.0, 0.5, 3.0, 2.0, 1.5]
    with rig(WORLD, codec, 600, late=late) as before:
        for worker in before.workers:
            worker.units.rate = rate
        put, applied = train(before, 0, weights)
        files = saved(before)
    mark = CheckpointHeader("x", STEPS, STEPS, WORLD, 2, "", rate, members=WORLD)
    with rig(world, again, 2500, late=late) as after:
        plan = before.plan
        for rank, worker in enumerate(after.workers):
            own = [checkpoint.residuals_in(tensors, plan, mark, late=name == "rank-0")
                   for name, tensors in files.items() if assign_file_reader(name, range(world), world) == rank]
            worker.units.members = WORLD
            inherit_residuals(worker, merge_residuals(own), lambda _: 0.0)
        more, further = train(after, STEPS, weights)
        rest = residual_sums(after, WORLD)
    for t in range(len(SHAPES)):
        total = put[t] + more[t]
        error = float((applied[t] + further[t] + rest[t] - total).abs().max())
        assert error < 2e-5 * float(total.abs().max()), t

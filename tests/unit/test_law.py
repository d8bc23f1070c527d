"""The law: for every tensor, applied updates + residuals = input gradients, for every codec and every event of a step.

Input is what the optimizer should receive: the weighted mean of the gradients of each applied step. In the events below tensors
are unused, weights change, steps are skipped or aborted, averages are discarded, and a checkpoint is loaded. Each event is one
row for each codec. The error may be 1e-5 of the largest input, at any element.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support import workers as kit
from support.jobs import FakeJob
from support.residuals import by_tensor, slices_of

from commlayer.compressors import parse, wrap
from commlayer.compressors.codec import Codec
from commlayer.compressors.residual_slices import ResidualSlice
from commlayer.engine.buckets.ledger import Ledger
from commlayer.engine.checkpoints import checkpoint
from commlayer.engine.model.model_tensors import learning_rate
from commlayer.engine.worker.plan_handover import hand_over
from commlayer.errors import StepAbandoned
from commlayer.planner import default_plan
from commlayer.records import Slice, Spec

WORLD, STEPS = 3, 6
SHAPES: list[tuple[int, ...]] = [(40, 30), (40,), (5, 3, 3, 3), (1,), (700,)]
CODECS = [
    "identity()", "int8(64)", "int8(2048)", "int4()", "int4(64)", "onebit(64)", "onebit(1024)", "error_feedback(fp16())",
    "error_feedback(bf16())",
    "topk(0.05)", "topk(0.3)", "topk(0.1, 'fp32')", "topk(0.1, 'fp16')", "topk(0.1, 'int4')", "topk(0.05, exact=True)",
    "block_threshold(0.2)", "block_threshold(0.1, run=8, values='int4')", "randomk(0.2)", "randomk(0.3, values='bf16')",
    "powersgd(1)", "powersgd(2)",
    "error_feedback(qsgd())", "error_feedback(qsgd(64, levels=15, norm='l2'))", "int4(8)", "topk(0.1, 'bf16')",
    "block_threshold(0.2, values='bf16')", "randomk(0.3, values='fp16')", "topk(0.3, exact=True)",
    "momentum(randomk(0.3), 0.5)", "momentum(int4(), 0.5)",
    "error_feedback(int8(), lr_correction=True)",
    "momentum(topk(0.2), 0.5)", "momentum(int8(64), 0.9)", "momentum(onebit(64), 0.5)",
]
DOWN = {"topk(0.3)": "int8(64)", "int8(2048)": "onebit(64)", "topk(0.05)": "topk(0.5)"}
"""Answered in another codec, with the server's own residual."""


def nobody(step: int, rank: int = 0) -> set[int]:
    return set()


def equal(step: int) -> list[float]:
    return [1.0] * WORLD


class Event(NamedTuple):
    """What happens in a few steps, the same for all codecs."""

    weights: Callable[[int], list[float]] = equal
    unused: Callable[[int, int], set[int]] = nobody
    """Tensors without gradient on a rank."""
    cleared: Callable[[int], set[int]] = nobody
    """Tensors whose averages are discarded."""
    bad: int = -1
    """A step in which the last rank has an infinity."""
    broken: int = -1
    """A step that the last rank aborts: its backward pass raises."""
    saved: bool = False
    """A checkpoint is saved half-way and loaded two steps later; the steps after it are repeated."""
    scale: Callable[[int], float] = lambda step: 1.0


SAVED = STEPS // 2
ALL = set(range(len(SHAPES)))
EVENTS = {
    "plain": Event(),
    "unused by all in every second step": Event(unused=lambda step, rank: {0, 4} if step % 2 else set()),
    "unused by all, by turns": Event(unused=lambda step, rank: {step % 5, (step + 2) % 5}),
    "nothing used": Event(unused=lambda step, rank: ALL if step % 2 else set()),
    "used by one rank alone": Event(unused=lambda step, rank: {0, 2} if rank != step % WORLD else set()),
    "unequal weights": Event(weights=lambda step: [1.0, 0.25, 3.0]),
    "a short last batch": Event(weights=lambda step: [3.0 if step == 4 else 64.0] * WORLD),
    "totals of 1 and 10 in turns": Event(weights=lambda step: [10.0 if step % 2 else 1.0] * WORLD),
    "weights 100 times smaller from one step on": Event(weights=lambda step: [0.01 if step > 2 else 1.0] * WORLD),
    "a rank without samples": Event(weights=lambda step: [0.0 if step % 2 else 1.0, 1.0, 2.0]),
    "reweighted, some averages discarded": Event(
        weights=lambda step: [10.0 if step % 2 else 1.0] * WORLD, cleared=lambda step: {step % 5, 3}),
    "reweighted, skipped and aborted": Event(weights=lambda step: [2.0**step] * WORLD, bad=2, broken=4,
                                             scale=lambda step: 2.0 ** (10 - step)),
    "weights that change in every step": Event(weights=lambda step: [1.0 + step, 2.0, 0.5 * (step % 3)]),
    "a scaler that skips": Event(bad=3, scale=lambda step: 2.0 ** (10 - step)),
    "discarded averages": Event(cleared=lambda step: ALL if step % 2 else set()),
    "some discarded averages": Event(cleared=lambda step: {1, 4} if step % 2 else {0}),
    "an aborted step": Event(broken=2),
    "an aborted step after discarded averages": Event(cleared=lambda step: ALL if step == 1 else {step % 5}, broken=2),
    "saved, and loaded two steps later": Event(saved=True),
    "saved after discarded averages, and loaded": Event(
        saved=True, cleared=lambda step: {1, 4} if step == SAVED - 1 else {step % 5}),
    "unused, skipped, aborted, discarded, reweighted, loaded": Event(
        weights=lambda step: [1.0, 2.0 + step, 1.0], unused=lambda step, rank: {step % 5},
        cleared=lambda step: {(step + 1) % 5}, bad=2, broken=4, saved=True),
}


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def rig(codec: str, *, late: bool = False, **fields: Any) -> kit.Rig:
    down = str(wrap(parse(DOWN[codec]))) if codec in DOWN else ""
    plan = default_plan(kit.job(SHAPES), codec=codec, path="service", servers=2, ranks_per_node=1, fuse_nbytes=600,
                        cut_nbytes=1 << 20)
    plan = replace(plan, buckets=tuple(replace(b, down=down, stale=late) for b in plan.buckets), **fields)
    assert any(len(b.slices) > 1 for b in plan.buckets)
    return kit.Rig(WORLD, codec, servers=2, shapes=SHAPES, plan=plan)


class Account:
    """One rank's account: by tensor, what was put in and what was applied, in float64."""

    def __init__(self) -> None:
        self.put = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        self.applied = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]


def fed(worker: Any, mine: list[Any], share: float) -> list[torch.Tensor]:
    """What codecs are given to send: the gradient's part in the mean, or the velocity that momentum makes of it."""
    parts = [torch.zeros(shape) if g is None else g * share for shape, g in zip(SHAPES, mine, strict=True)]
    for bucket in worker.buckets:
        codec, state = bucket.codec, bucket.ledger.state
        if "velocity" in state:
            at = 0
            for s in bucket.slices:
                velocity = torch.from_numpy(state["velocity"][at : at + s.numel])
                parts[s.tensor].view(-1)[s.start : s.stop] += codec.beta * velocity
                at += s.numel
    return parts


def happen(r: kit.Rig, codec: str, event: Event, first: int, accounts: list[Account]) -> None:
    if not event.saved:
        go(r, codec, event, first, range(STEPS), accounts)
        return
    go(r, codec, event, first, range(SAVED), accounts)
    kept, before = save(r), copy.deepcopy(accounts)
    go(r, codec, event, first, range(SAVED, SAVED + 2), accounts)
    load(r, kept)
    accounts[:] = before
    go(r, codec, event, first, range(SAVED, STEPS), accounts)


def save(r: kit.Rig) -> tuple[list[Any], list[dict[int, bytes]]]:
    """As checkpoints/checkpoint.py: workers and servers after one step, without what was not applied of it."""
    words, *_ = [worker.roll_back() for worker in r.workers]
    servers = []
    for core in r.sums:
        for bucket, cell in core.cells.items():
            cell.ops.undo(words.get(bucket, 0))
        servers.append({bucket: cell.ops.snapshot() for bucket, cell in core.cells.items()})
    for worker in r.workers:
        worker.acknowledge_rollbacks()
    return [copy.deepcopy(checkpoint.worker_state(FakeJob(worker))) for worker in r.workers], servers


def load(r: kit.Rig, kept: tuple[list[Any], list[dict[int, bytes]]]) -> None:
    states, servers = kept
    for core, saved in zip(r.sums, servers, strict=True):
        for bucket, cell in core.cells.items():
            cell.ops.restore(saved[bucket])
            cell.forget_results()
            cell.idle(states[0]["step"])
    for worker, state in zip(r.workers, states, strict=True):
        checkpoint.restore_worker(FakeJob(worker), state)


def go(r: kit.Rig, codec: str, event: Event, first: int, steps: range, accounts: list[Account]) -> None:
    def body(rank: int) -> None:
        worker, account = r.workers[rank], accounts[rank]
        for step in range(first + steps.start, first + steps.stop):
            n, weights = step - first, event.weights(step - first)
            scale = worker.units.scale = event.scale(n)
            worker.units.weight = weights[rank]
            mine: list[Any] = [None if t in event.unused(n, rank) else g for t, g in enumerate(gradients(rank, step))]
            if "momentum" in codec:
                worker.roll_back()  # as the next gradients would do, so that velocities are what these meet
            parts = fed(worker, mine, weights[rank] * WORLD / sum(weights))
            sent = [None if g is None else g * scale for g in mine]
            if n == event.bad and rank == WORLD - 1:
                next(g for g in sent if g is not None).view(-1)[0] = float("inf")
            if n == event.broken:
                if rank < WORLD - 1:
                    with pytest.raises(StepAbandoned):
                        kit.step(worker, sent)
                else:
                    for t in (4, 3):  # a part of the pass
                        if (gradient := sent[t]) is not None:
                            worker.ready(t, gradient)
                    worker.abort(20.0)
                continue
            averages = kit.step(worker, sent)
            for t in range(len(SHAPES)):
                used = any(t not in event.unused(n, other) for other in range(WORLD))
                assert (averages[t] is not None) == used
                if used and t not in event.cleared(n) and n != event.bad:
                    account.put[t] += parts[t].double()
                    account.applied[t] += averages[t].double() / scale
            for t in event.cleared(n):
                worker.mark_discarded(t)

    for result in kit.on_ranks(WORLD, body):
        if isinstance(result, BaseException):
            raise result


def residual_sums(r: kit.Rig) -> list[torch.Tensor]:
    """Residuals of workers and servers, after everything that was not applied has been rolled back."""
    words = [worker.roll_back() for worker in r.workers]
    assert all(word == words[0] for word in words), "ranks must agree on what was not applied"
    rest = [part for worker in r.workers for part in slices_of(worker)]
    for core in r.sums:
        for bucket, cell in core.cells.items():
            cell.ops.undo(words[0].get(bucket, 0))
            rest += cell.ops.residuals()
    return by_tensor(rest, SHAPES)


@pytest.mark.commit(10)
@pytest.mark.parametrize("codec", CODECS)
def test_applied_plus_residual_equals_input(codec: str) -> None:
    wrapped: Codec = wrap(parse(codec))
    assert wrapped.needs_undo or codec == "identity()", "a lossy codec needs error feedback"
    with rig(codec) as r:
        check_law(r, codec)


def most_put(accounts: list[Account]) -> float:
    """The largest input of all ranks."""
    sums = (torch.stack([account.put[t] for account in accounts]).sum(0) for t in range(len(SHAPES)))
    return max(float(each.abs().max()) for each in sums)


PLAN_WIDE = ["topk(0.05)", "topk(0.1, 'fp32')", "block_threshold(0.2)"]


@pytest.mark.commit(1)
@pytest.mark.parametrize("codec", PLAN_WIDE)
def test_law_holds_for_plan_wide_ratios_during_warmup(codec: str) -> None:
    with rig(codec, ratio_over="plan", warmup=3 * STEPS) as r:
        check_law(r, codec)


def check_law(r: kit.Rig, codec: str) -> None:
    """All events in sequence; the account is checked after each."""
    wrong = []
    accounts = [Account() for _ in range(WORLD)]
    for number, (name, event) in enumerate(EVENTS.items()):
        happen(r, codec, event, number * STEPS, accounts)
        rest = residual_sums(r)
        put = [torch.stack([account.put[t] for account in accounts]).sum(0) for t in range(len(SHAPES))]
        most = most_put(accounts)
        for t in range(len(SHAPES)):
            error = float((WORLD * accounts[0].applied[t] + rest[t] - put[t]).abs().max())
            if error > 1e-5 * most:
                wrong.append(f"{name}: tensor {t} is off by {error / most:.1e} of what was put in")
    assert not wrong, "\n".join(wrong)


def test_learning_rate_changes_conserve_the_update() -> None:
    """With lr_correction residuals are in units of the update, so the law holds for rate times average."""
    rates = [0.5] * 4 + [0.05] * 4
    with rig("error_feedback(topk(0.1), lr_correction=True)") as r:
        def body(rank: int) -> list[torch.Tensor]:
            applied = [torch.zeros(shape) for shape in SHAPES]
            for step, rate in enumerate(rates):
                r.workers[rank].units.rate = rate
                for total, average in zip(applied, kit.step(r.workers[rank], list(gradients(rank, step))), strict=True):
                    total += rate * average
            return applied

        applied = kit.on_ranks(WORLD, body)[0]
        residuals = residual_sums(r)
    for t, shape in enumerate(SHAPES):
        put = torch.zeros(shape)
        for step, rate in enumerate(rates):
            put += rate * torch.stack([gradients(rank, step)[t] for rank in range(WORLD)]).sum(0)
        torch.testing.assert_close((WORLD * applied[t] + residuals[t]).float(), put, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codec", ["identity()", "int4()", "topk(0.3)"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_late_result_is_inherited_once_by_the_present_workers(codec: str, world: int) -> None:
    """The job began with three workers, which define the unit of residuals. `world`: those present when the plan changes."""
    def averages(r: kit.Rig, steps: int) -> list[Any]:
        def body(rank: int) -> Any:
            averages = [kit.step(r.workers[rank], list(gradients(rank, step))) for step in range(steps)]
            r.workers[rank].drain()
            return averages[-1]

        return kit.on_ranks(WORLD, body)

    with rig(codec, late=True) as r:
        written = averages(r, STEPS)[0]
    with rig(codec, late=True) as r, rig(codec) as later:
        averages(r, STEPS - 1)
        own = [by_tensor(slices_of(worker), SHAPES) for worker in r.workers]
        for before, after in zip(r.workers, later.workers, strict=True):
            hand_over(before, after, world=world)
        inherited = [by_tensor(slices_of(worker), SHAPES) for worker in later.workers]
    for t, average in enumerate(written):
        for mine, all_mine in zip(own, inherited, strict=True):
            torch.testing.assert_close(world * (all_mine[t] - mine[t]), WORLD * average.double(), rtol=1e-5, atol=1e-5)


def test_learning_rate_is_taken_from_the_first_nonzero_group() -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.25)
    assert learning_rate(optimizer, 1.0) == 0.25
    optimizer.param_groups[0]["lr"] = torch.tensor(0.125)
    assert learning_rate(optimizer, 1.0) == 0.125
    optimizer.param_groups[0]["lr"] = 0.0
    assert learning_rate(optimizer, 0.5) == 0.5
    assert learning_rate(None, 1.0) == 1.0


SLICES = (Slice(0, 0, 40), Slice(1, 0, 25), Slice(2, 5, 35))
NUMEL = 95
EDGES = (0, 40, 65, 95)


def elements(mask: int) -> torch.Tensor:
    return torch.cat([torch.full((stop - start,), float(mask >> i & 1))
                      for i, (start, stop) in enumerate(pairwise(EDGES))])


def find_residual(ledger: Ledger) -> torch.Tensor:
    total, start = torch.zeros(NUMEL), {0: 0, 1: 40, 2: 65 - 5}
    for part in ledger.residuals():
        at = start[part.tensor] + part.start
        total[at : at + len(part.values)] += torch.as_tensor(part.values)
    return total


@pytest.mark.parametrize("text", ["topk(0.1)", "int4()", "onebit(64)", "identity()"])
@pytest.mark.parametrize("twice", [False, True])
def test_applied_plus_residuals_equal_input_after_rollbacks(text: str, twice: bool) -> None:
    """`twice`: one rollback happens between two steps, and more is discarded after it."""
    codec, ledger, chance = wrap(parse(text)), Ledger(SLICES), random.Random(3)
    state = codec.init(Spec((NUMEL,)))
    ledger.encoders = [((0, NUMEL), state)]
    ledger.inherit([ResidualSlice(0, 10, np.ones(20, np.float32)), ResidualSlice(2, 0, np.ones(10, np.float32))], 0.5)
    put, applied = find_residual(ledger), torch.zeros(NUMEL)
    assert put.sum() == 12.5, "the elements of other buckets are left out"
    generator, memory = torch.Generator().manual_seed(0), [memoryview(bytearray(codec.bound(Spec((NUMEL,))))) for _ in range(2)]
    for step in range(30):
        ledger.roll_back()
        gradient = torch.randn(NUMEL, generator=generator)
        x, y, out = gradient.clone(), torch.empty(NUMEL), memory[step % 2]
        ledger.open(x, 1.0)
        nbytes = codec.start(x.numpy(), state, out)
        ledger.record(lambda cut, x=x: codec.undo(state, x.numpy(), cut))
        assert codec.decode(out[:nbytes], state, y.numpy())
        used, cleared = chance.randrange(8), chance.choice([0, 0, 1, 6, 7])
        ledger.discarded = ledger.all_slices & ~used
        ledger.applied(used, 1.0)
        if twice:
            ledger.roll_back()
        ledger.discard(cleared & used)
        kept = elements(used & ~cleared)
        put += gradient * kept
        applied += y * kept
        assert step % 7 or ledger.report() >= 0
    ledger.roll_back()
    torch.testing.assert_close(applied + find_residual(ledger), put, rtol=1e-4, atol=1e-4)


def test_partly_applied_inherited_residual_is_sent_again() -> None:
    ledger, x = Ledger(SLICES), torch.zeros(NUMEL)
    ledger.inherit([ResidualSlice(0, 0, np.ones(40, np.float32)), ResidualSlice(1, 0, np.ones(25, np.float32))], 1.0)
    ledger.open(x, 2.0)
    assert torch.equal(x, 2.0 * elements(0b011))
    ledger.discarded = 0b110
    ledger.applied(0b001, 0.75)
    ledger.roll_back()
    assert ledger.report() == 0b110
    assert ledger.report() == 0
    torch.testing.assert_close(find_residual(ledger), elements(0b001) * 0.25 + elements(0b010))


def test_replaced_states_have_no_pending_rollbacks() -> None:
    ledger = Ledger(SLICES)
    ledger.open(torch.zeros(NUMEL), 1.0)
    ledger.record(lambda cut: pytest.fail("codec states were replaced"))
    ledger.discard(0b111)
    ledger.forget()
    assert ledger.roll_back() == 0
    assert ledger.report() == 0

"""Local steps, overlapped exchanges, fragments and outer optimizers, compared with references in numpy and torch.

Real ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from support import rank_pool
from support.attached import assert_refused, data, outcome, plan_or_codec, same, sync_of
from support.jobs import distributed_job
from support.rank_pool import Servers, pool
from support.residuals import by_tensor, slices_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.epochs.plan_switch import switch
from commlayer.engine.model.model_tensors import describe_model
from commlayer.optim import OuterSGD
from commlayer.planner import default_plan
from commlayer.planner.buckets import divide_into_fragments
from commlayer.records import Bucket, Plan, Slice

WORLD, H, ROUNDS, TENSORS, SIZE = 2, 4, 3, 4, 600
NESTEROV = OuterSGD(lr=0.7, momentum=0.9)
RATE, SLOPE = 0.05, 2.0


class Wells(nn.Module):
    """Each rank is attracted to its own moving point: gradients depend on weights, and are easy in numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.full((SIZE,), float(t))) for t in range(TENSORS)])

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return sum((0.5 * SLOPE * (p - point) ** 2).sum() for p, point in zip(self.parts, points, strict=True))


def points(rank: int, step: int) -> npt.NDArray[np.float64]:
    return np.random.default_rng([rank, step]).normal(size=(TENSORS, SIZE))


def cut_at(ends: Sequence[int]) -> list[tuple[Slice, ...]]:
    """Buckets that end after these numbers of elements, the last tensor first. A tensor may be in two buckets."""
    parts = []
    for start, stop in pairwise((0, *ends)):
        each = [(TENSORS - 1 - t, max(start - t * SIZE, 0), min(stop - t * SIZE, SIZE)) for t in range(TENSORS)]
        parts.append(tuple(Slice(*part) for part in each if part[1] < part[2]))
    return parts


class Training:
    """One rank's."""

    def __init__(self, rank: int, address: str, *, codec: str = "identity()", path: str = "service", per_node: int = 1,
                 outer: OuterSGD | None = None, config: dict[str, Any] | None = None, ends: Sequence[int] = (),
                 scaler: Any = None, **how: Any) -> None:
        self.rank, self.model = rank, Wells()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        plan = default_plan(describe_model(self.model), codec=codec, path="service", servers=1, ranks_per_node=per_node,
                            fuse_nbytes=2048, cut_nbytes=4096)
        cut = enumerate(cut_at(ends)) if ends else ((b.id, b.slices) for b in plan.buckets)
        buckets = tuple(Bucket(n, slices, path, codec, owner=n % per_node, down="identity()" if path == "service" else "")
                        for n, slices in cut)
        self.session = commlayer.attach(
            self.model, self.optimizer, config=rank_pool.quick(join=address, ranks_per_node=per_node) | (config or {}),
            plan=Plan(plan.job, buckets, plan.servers, per_node), grad_scaler=self.scaler,
            sync=sync_of(outer=outer, **{"every": H} | how))

    @property
    def local(self) -> Any:
        return distributed_job(self.session).local

    def step(self, step: int, *, infinite: str = "") -> npt.NDArray[np.float32]:
        """`infinite`: "gradients" or "weights" of the first tensor."""
        self.optimizer.zero_grad()
        loss = self.model(torch.tensor(points(self.rank, step), dtype=torch.float32))
        if infinite == "gradients":
            loss = loss + float("inf") * self.model.parts[0].sum()
        self.scaler.scale(loss).backward()
        if infinite == "weights":
            with torch.no_grad():
                self.model.parts[0].fill_(torch.inf)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.weights()

    def weights(self) -> npt.NDArray[np.float32]:
        return np.stack([p.detach().numpy().copy() for p in self.model.parts])

    def starts(self) -> npt.NDArray[np.float32]:
        return np.stack([s.numpy().copy() for s in self.local.starts])


def reference(steps: int, fragments: Sequence[Any], outer: OuterSGD, *, overlap: bool, every: int = H,
              shares: Sequence[float] = (0.5, 0.5)) -> Any:
    """All workers' weights after each step, and their common weights. `fragments`: tensors, or which elements of all."""
    common = np.stack([np.full(SIZE, float(t)) for t in range(TENSORS)])
    workers, velocity = [common.copy() for _ in range(WORLD)], np.zeros_like(common)
    sent: Any = None
    turn, states = 0, []

    def merge(part: list[int], changes: Any, ends: Any) -> None:
        change = np.tensordot(shares, changes, 1)
        velocity[part] = outer.momentum * velocity[part] + change
        common[part] -= outer.lr * (change + outer.momentum * velocity[part])
        for w, end in zip(workers, ends, strict=True):
            w[part] = common[part] + (w[part] - end)

    for step in range(steps):
        for rank, w in enumerate(workers):
            w -= RATE * SLOPE * (w - points(rank, step))
        if (step + 1) % (every // len(fragments)) == 0:
            if sent is not None:
                merge(*sent)
            part, turn = fragments[turn], (turn + 1) % len(fragments)
            sent = part, [common[part] - w[part] for w in workers], [w[part].copy() for w in workers]
            if not overlap:
                merge(*sent)
                sent = None
        states.append((np.stack(workers), common.copy()))
    return states


def follow(rank: int, address: str, steps: int, how: dict[str, Any]) -> dict[str, Any]:
    uneven = how.pop("uneven", False)
    training = Training(rank, address, **{"every": H} | how)
    if uneven:
        training.session.weight(1 + 2 * rank)
    rows = [(training.step(step), training.starts()) for step in range(steps)]
    under_way = training.local.under_way
    training.session.close()  # exchanges the last steps
    return {"rows": rows, "end": training.weights(), "under way": under_way, "stats": training.session.metrics()}


STAGED = "encode@cpu all.allgather decode@cpu"
ENDS = (250, 700, 1100, 1900, TENSORS * SIZE)


def of_fragments(cuts: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
    """The elements of all tensors in these fragments, the last tensor first."""
    place = np.stack([np.arange(SIZE) + SIZE * (TENSORS - 1 - t) for t in range(TENSORS)])
    return [(start <= place) & (place < stop) for start, stop in pairwise((0, *cuts, TENSORS * SIZE))]


@pytest.mark.commit(4)
@pytest.mark.parametrize(("how", "parts"), [
    ({"overlap": "round"}, [[0, 1, 2, 3]]),
    ({"overlap": "round", "fragments": 2, "outer": NESTEROV}, [[2, 3], [0, 1]]),
    ({"overlap": "round", "fragments": 4, "path": "allreduce"}, [[3], [2], [1], [0]]),
    ({"overlap": "round", "fragments": 2, "per_node": 2}, [[2, 3], [0, 1]]),
    ({"overlap": "round", "fragments": 2, "path": STAGED}, [[2, 3], [0, 1]]),
    ({"fragments": 4, "outer": NESTEROV}, [[3], [2], [1], [0]]),
    ({"overlap": "round", "fragments": 2, "ends": ENDS, "outer": NESTEROV}, of_fragments([1100])),
    ({"overlap": "round", "fragments": 4, "ends": ENDS, "per_node": 2}, of_fragments([700, 1100, 1900])),
    ({"overlap": "round", "fragments": 2, "ends": ENDS, "path": "allreduce"}, of_fragments([1100])),
    ({"overlap": "round", "fragments": 2, "ends": ENDS, "path": STAGED}, of_fragments([1100])),
    ({"fragments": 4, "ends": ENDS}, of_fragments([700, 1100, 1900])),
    ({"outer": NESTEROV, "uneven": True}, [[0, 1, 2, 3]]),
    ({"overlap": "round", "path": "allreduce", "outer": OuterSGD(0.5, 0.5), "uneven": True}, [[0, 1, 2, 3]]),
    ({"every": 1, "codes": "updates", "overlap": "round"}, [[0, 1, 2, 3]]),
    ({"every": 1, "codes": "updates", "overlap": "round", "outer": NESTEROV, "per_node": 2}, [[0, 1, 2, 3]]),
], ids=["whole", "halves, nesterov", "allreduce", "two ranks to a node", "staged", "one after the other",
        "cut tensors, nesterov", "cut tensors, two ranks to a node", "cut tensors, allreduce", "cut tensors, staged",
        "cut tensors, waited for", "uneven, nesterov", "uneven, allreduce", "each step", "each step, two ranks to a node"])
def test_weights_equal_the_reference(how: dict[str, Any], parts: Sequence[Any]) -> None:
    steps = 4 * H + 1
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(follow, servers.address, steps, how)
    every = how.get("every", H)
    wanted = reference(steps, parts, how.get("outer", OuterSGD()), overlap="overlap" in how, every=every,
                       shares=(0.25, 0.75) if "uneven" in how else (0.5, 0.5))
    for step, (workers, common) in enumerate(wanted):
        for rank, result in enumerate(results):
            weights, starts = result["rows"][step]
            np.testing.assert_allclose(weights, workers[rank], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(starts, common, rtol=1e-4, atol=1e-5)
            assert (starts == results[0]["rows"][step][1]).all(), "what ranks have in common is the same to the bit"
    turns = steps // (every // len(parts))
    assert all(result["under way"] == ("overlap" in how or turns % len(parts) > 0) for result in results)
    assert (results[0]["end"] == results[1]["end"]).all(), "drained, weights are the same"
    assert {result["stats"]["exchanges"] for result in results} == {-(-turns // len(parts)) + 1}


def one_fragment_not_finite(rank: int, address: str, codec: str) -> tuple[Any, Any, Any]:
    """One fragment of the second round is not finite: only its own changes are lost."""
    training = Training(rank, address, every=H, fragments=4, ends=ENDS, codec=codec)
    parameters, masks = list(training.model.parts), of_fragments([700, 1100, 1900])
    put, since, first = np.zeros((TENSORS, SIZE)), np.zeros((TENSORS, SIZE)), training.weights().astype(float)
    for step in range(3 * H):
        turn, spoilt = step % len(masks), step == H + 1
        for t, (p, g) in enumerate(zip(parameters, points(rank, step), strict=True)):
            p.grad = torch.tensor(g, dtype=torch.float32)
            if spoilt and rank == 1:
                p.data[torch.tensor(masks[turn][t]).nonzero()[:1]] = np.nan
        since += RATE * points(rank, step)
        training.session.synchronize()
        training.optimizer.step()
        put[masks[turn]] += 0 if spoilt else since[masks[turn]]
        since[masks[turn]] = 0
    training.session.flush()
    residuals = np.stack(by_tensor(slices_of(distributed_job(training.session).worker), [SIZE] * TENSORS))
    applied = first - training.weights()
    training.session.close()
    return put + since, applied, residuals


@pytest.mark.parametrize("codec", ["topk(ratio=0.05)", "int4(block=64)"])
def test_non_finite_fragment_does_not_affect_the_others(codec: str) -> None:
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(one_fragment_not_finite, servers.address, codec)
    put, applied, residuals = (np.stack(each) for each in zip(*results, strict=True))
    assert (applied[0] == applied[1]).all()
    assert np.isfinite(applied).all()
    np.testing.assert_allclose(applied.sum(0) + residuals.sum(0), put.sum(0), rtol=1e-3, atol=1e-4)


SWITCHES = {1: (2, 1), 4: (4, 2), 6: (3, 3), 7: (1, 1), 9: (2, 2), 15: (4, 2)}
"""The next numbers of local steps and fragments, by the step before. Most switches come inside an outer step."""


REFUSED = 12
"""After this step, inside an outer step, one rank refuses a plan, and the old one continues."""


def refuse(_: Plan) -> None:
    raise ValueError("refused")


def switched_inside(rank: int, address: str, codec: str) -> tuple[Any, Any, Any, list[int]]:
    """All changes of one rank, how its weights have moved, its residuals, and the steps before each switch that were not
    exchanged."""
    model = Wells()
    job = describe_model(model)
    buckets = tuple(Bucket(n, slices, "service", codec, down="identity()") for n, slices in enumerate(cut_at(ENDS)))

    def plan(every: int, fragments: int) -> Plan:
        return Plan(job.digest(), buckets, 1, 1, every, "updates", "round", fragments)

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    session = commlayer.attach(model, optimizer, config=rank_pool.quick(join=address), plan=plan(4, 4))
    context, put, left = distributed_job(session), np.zeros((TENSORS, SIZE)), []
    first = np.stack([p.detach().numpy().copy() for p in model.parts])
    for step in range(18):
        for p, g in zip(model.parts, points(rank, step), strict=True):
            p.grad = torch.tensor(g, dtype=torch.float32)
        put += RATE * points(rank, step)
        session.synchronize()
        optimizer.step()
        if step == REFUSED:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(context, "check_plan", refuse if rank else context.check_plan)
                with pytest.raises(ValueError):
                    switch(context, plan(2, 1) if rank == 0 else None, by_itself=True)
        if step in SWITCHES:
            switch(context, plan(*SWITCHES[step]) if rank == 0 else None, by_itself=True)
            left.append(context.local.unshared_steps)
    session.flush()
    residuals = np.stack(by_tensor(slices_of(context.worker), [SIZE] * TENSORS))
    moved = first - np.stack([p.detach().numpy() for p in model.parts])
    session.close()
    return put, moved, residuals, left


@pytest.mark.parametrize("codec", ["identity()", "topk(ratio=0.05)"])
def test_a_switch_inside_an_outer_step_loses_no_step(codec: str) -> None:
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(switched_inside, servers.address, codec)
    put, moved, residuals = (np.stack(each) for each in list(zip(*results, strict=True))[:3])
    assert (moved[0] == moved[1]).all()
    np.testing.assert_allclose(moved.sum(0) + residuals.sum(0), put.sum(0), rtol=1e-3, atol=1e-4)
    assert results[0][3] == results[1][3]
    assert results[0][3][0] == 2, "no fragment of the first outer step has sent both steps of all elements"


def ahead(rank: int, address: str) -> int:
    training, far = Training(rank, address, every=H, overlap="round"), H - 1 if rank else 2 * H - 1
    for step in range(2 * H):
        if step == far:
            dist.barrier()  # rank 0 is one step before the end of a round whose exchange rank 1 has not begun
        training.step(step)
    training.session.close()  # merges the running exchange, and exchanges the steps taken since
    return distributed_job(training.session).exchanges


def test_steps_do_not_wait_for_a_running_exchange() -> None:
    with Servers(WORLD, 1) as servers:
        assert pool(WORLD).call(ahead, servers.address) == [3, 3]


def mishaps(rank: int, address: str) -> tuple[list[str], Any]:
    """Unequal starts on rank 1 are reported, equal ones are not. Then rank 1 has weights that are not finite."""
    training = Training(rank, address, every=2, overlap="round", config={"drift_steps": 2})
    for step in range(12):
        training.step(step)
    decisions = training.session.inspect.decisions()
    assert decisions == []
    if rank:
        training.local.starts[2][5] += 1.0
    for step in range(12, 24):
        training.step(step)
    decisions = training.session.inspect.decisions()
    for step in range(24, 32):
        training.step(step, infinite="weights" if step == 26 and rank == 1 else "")
    training.session.flush()
    training.session.close()
    return decisions, training.weights()


def test_different_initial_weights_are_reported_and_non_finite_deltas_dropped() -> None:
    with Servers(WORLD, 1) as servers:
        (lines, first), (_, second) = pool(WORLD).call(mishaps, servers.address)
    assert any("differ in parts.2" in line for line in lines)
    assert np.isfinite(first).all()
    assert (first == second).all()


def infinite(rank: int, address: str, at: int, what: str) -> tuple[list[Any], float]:
    """Rank 1 has an infinite weight or gradient in that step. Weights after each step and at the end; exchanges."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if what == "gradients" else None
    training = Training(rank, address, every=H, codec="topk(ratio=0.1)", scaler=scaler)
    rows = [training.step(step, infinite=what if rank and step == at else "") for step in range(2 * H + 1)]
    training.session.flush()
    exchanges = training.session.metrics()["exchanges"]
    training.session.close()
    return [*rows, training.weights()], exchanges


@pytest.mark.commit(2)
@pytest.mark.parametrize(("what", "at"), [("weights", H + 1), ("gradients", 1), ("gradients", H - 1)])
def test_outer_step_with_infinite_weights_is_dropped_and_skipped_steps_align(what: str, at: int) -> None:
    """A skipped step may be the last of an outer step: then the exchange precedes the next forward pass."""
    with Servers(WORLD, 1) as servers:
        (first, exchanges), (second, also) = pool(WORLD).call(infinite, servers.address, at, what)
    assert exchanges == also == 3
    for end in (2 * H - 1, -1):
        assert (first[end] == second[end]).all()
        assert np.isfinite(first[end]).all()
    assert what == "gradients" or (first[H - 1] == first[2 * H - 1]).all(), "back at the weights of the last exchange"


def few(rank: int, address: str) -> tuple[int, list[str], Any]:
    training = Training(rank, address, every=6, fragments=6)
    for step in range(12):
        training.step(step)
    training.session.flush()
    fragments, lines = training.session.inspect.context.plan.fragments, training.session.inspect.decisions()
    training.session.close()
    return fragments, lines, training.weights()


def test_small_model_has_as_many_fragments_as_its_plan_allows() -> None:
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(few, servers.address)
    (fragments, lines, first), (also, others, second) = results
    assert fragments == also == 3, "the largest divisor of 6 for 4 buckets"
    assert [line for line in lines if "fragments=6 becomes fragments=3" in line] == lines
    assert others == []
    assert (first == second).all()


def test_fragments_are_consecutive_buckets_of_the_plan() -> None:
    """A fragment may end inside a bucket's tensor, but not inside a bucket."""
    parts = ([(3, 0, 100)], [(2, 0, 100)], [(2, 100, 150), (4, 0, 10)], [(1, 0, 60)], [(0, 0, 60), (1, 60, 90)])
    buckets = [Bucket(n, tuple(Slice(*part) for part in each), "service") for n, each in enumerate(parts)]
    for count, wanted in ((1, [[0, 1, 2, 3, 4]]), (2, [[0, 1], [2, 3, 4]]), (3, [[0], [1, 2], [3, 4]]),
                          (5, [[0], [1], [2], [3], [4]])):
        assert divide_into_fragments(buckets, count) == wanted
    assert_refused(outcome(lambda: divide_into_fragments(buckets[:2], 3)), "E-SYNC-FRAGMENTS", "fragments=3: ", " 2,")


class Net(nn.Module):
    """With running statistics, two learning rates, and a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.Tanh())
        self.head, self.unused = nn.Linear(40, 3), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [*self.body.parameters(), *self.unused.parameters()], "lr": 0.01},
                {"params": [*self.head.parameters()], "lr": 0.003}]


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = data(rank, step)
    return nn.functional.mse_loss(model(x), y)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, rank: int, step: int, how: str,
            no_sync: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """One step of the script, the same by hand and attached."""
    optimizer.zero_grad()
    if "gathered" in how:
        with no_sync():
            scaler.scale(loss_of(model, rank, 1000 + step)).backward()
    scaler.scale(loss_of(model, rank, step)).backward()
    scaler.step(optimizer)
    scaler.update()


def scaler_of(how: str) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=64.0, enabled="scaled" in how)


def squares(tensors: Sequence[torch.Tensor]) -> float:
    return sum(float(t.square().sum()) for t in tensors)


def by_hand(how: str, every: int, shares: Sequence[Sequence[float]]) -> list[list[torch.Tensor]]:
    """All workers in one process; the norm of the mean change is matched. `shares`: by round and rank. After each exchange."""
    models = [Net() for _ in range(WORLD)]
    optimizers = [torch.optim.AdamW(m.groups()) for m in models]
    scalers, states = [scaler_of(how) for _ in models], []
    starts = [p.detach().clone() for p in models[0].parameters()]
    for step in range(every * len(shares)):
        for rank, model in enumerate(models):
            stepped(model, optimizers[rank], scalers[rank], rank, step, how, contextlib.nullcontext)
        if step % every == every - 1:
            with torch.no_grad():
                share = shares[step // every]
                changes = [[p.double() - s for p, s in zip(m.parameters(), starts, strict=True)] for m in models]
                means = [sum(s * c for s, c in zip(share, row, strict=True)) for row in zip(*changes, strict=True)]
                own = sum(s * squares(each) for s, each in zip(share, changes, strict=True))
                ratio = min((own / squares(means)) ** 0.5, sum(s * s for s in share) ** -0.5)
                for start, mean, *row in zip(starts, means, *(m.parameters() for m in models), strict=True):
                    start.add_(ratio * mean)
                    for p in row:
                        p.copy_(start)
                for row in zip(*([b for b in m.buffers() if b.is_floating_point()] for m in models), strict=True):
                    average = sum(s * b.double() for s, b in zip(share, row, strict=True))
                    for b in row:
                        b.copy_(average)
            states.append(tensors(models[0]))
    return states


def run(rank: int, address: str, how: str, every: int, codec: str) -> dict[str, Any]:
    model = Net()
    optimizer, scaler = torch.optim.AdamW(model.groups()), scaler_of(how)
    wrapped: Any = model
    if "ddp" in how:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.002, find_unused_parameters="unused" in how,
                                          static_graph="static" in how, gradient_as_bucket_view="view" in how)
    session = commlayer.attach(wrapped, optimizer, **plan_or_codec(codec), grad_scaler=scaler,
                               sync=commlayer.LocalSteps(every, overlap=False), config=rank_pool.quick(join=address))
    no_sync = wrapped.no_sync if "own no_sync" in how else session.no_sync
    rows, grads = [], []
    for step in range(ROUNDS * every):
        if "weighed" in how:
            session.weight(weights(step)[rank])
        stepped(wrapped, optimizer, scaler, rank, step, how, no_sync)
        rows.append(tensors(model))
        grads.append(model.head.weight.grad.clone())
    report = {"rows": rows, "grads": grads, "stats": session.metrics(), "plan": session.inspect.plan}
    session.close()
    if "ddp" in how:  # it reduces again
        optimizer.zero_grad()
        loss_of(wrapped, rank, 0).backward()
        report["after"] = model.head.weight.grad.clone()
    return report


def weights(step: int) -> list[float]:
    return [4.0, 2.0 + step % 3]


def shares(how: str, every: int) -> list[list[float]]:
    """Each rank's part of the weights of a round."""
    if "weighed" not in how:
        return [[1 / WORLD] * WORLD] * ROUNDS
    steps = [range(every * r, every * r + every) for r in range(ROUNDS)]
    return [[sum(weights(s)[rank] for s in mine) / sum(sum(weights(s)) for s in mine) for rank in range(WORLD)]
            for mine in steps]


@pytest.mark.commit(5)
@pytest.mark.parametrize("how", [
    "module", "module, gathered, scaled, weighed", "ddp, unused, gathered, own no_sync", "ddp, static, scaled",
    "ddp, unused, view, gathered, weighed",
])
@pytest.mark.parametrize("every", [1, H])
def test_training_equals_explicit_weight_averaging(how: str, every: int) -> None:
    with Servers(WORLD, 2) as servers:
        first, second = pool(WORLD).call(run, servers.address, how, every, "identity()")
    assert (first["stats"]["steps"], first["stats"]["exchanges"]) == (ROUNDS * every, ROUNDS)
    assert first["plan"].local_steps == every
    wanted = by_hand(how, every, shares(how, every))
    for step, (mine, theirs) in enumerate(zip(first["rows"], second["rows"], strict=True)):
        assert not torch.equal(first["grads"][step], second["grads"][step]), "gradients are not averaged"
        exchanged = step % every == every - 1
        assert same(mine, theirs) == exchanged
        for a, b in zip(mine, wanted[step // every], strict=True) if exchanged else ():
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert "ddp" not in how or torch.equal(first["after"], second["after"]), "DDP averages again after the session"


@pytest.mark.parametrize("plan", ["int4()", "auto"])
def test_every_codec_and_auto_support_local_steps(plan: str) -> None:
    with Servers(WORLD, 1) as servers:
        reports = pool(WORLD).call(run, servers.address, "ddp, unused", 2, plan)
    assert {b.codec for b in reports[0]["plan"].buckets} == {"error_feedback(int4(block=64))", "identity()"}
    assert same(reports[0]["rows"][-1], reports[1]["rows"][-1])

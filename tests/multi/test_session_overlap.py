"""attach(overlap="round", fragments=): exchanges that run while steps are taken, beside a reference in numpy. Real ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from support import rank_pool
from support.attached import refusals, said_in_lines
from support.rank_pool import Servers, pool
from torch import nn

import commlayer
from commlayer.engine.optimizers import job_of
from commlayer.optim import Outer
from commlayer.planner import default_plan
from commlayer.planner.buckets import fragments_of, ranges_of
from commlayer.records import Bucket, Plan, Slice

WORLD, H, TENSORS, SIZE = 2, 4, 4, 600
NESTEROV = Outer(lr=0.7, momentum=0.9)
RATE, SLOPE = 0.05, 2.0


class Wells(nn.Module):
    """Each rank is drawn to a point of its own, which moves: gradients depend on weights, and are easy in numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.full((SIZE,), float(t))) for t in range(TENSORS)])

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return sum((0.5 * SLOPE * (p - point) ** 2).sum() for p, point in zip(self.parts, points, strict=True))


def points(rank: int, step: int) -> npt.NDArray[np.float64]:
    return np.random.default_rng([rank, step]).normal(size=(TENSORS, SIZE))


def cut_at(ends: Sequence[int]) -> list[tuple[Slice, ...]]:
    """Buckets that end behind so many elements of all tensors, the last tensor first; they need not hold whole ones."""
    found = []
    for start, stop in pairwise((0, *ends)):
        each = [(TENSORS - 1 - t, max(start - t * SIZE, 0), min(stop - t * SIZE, SIZE)) for t in range(TENSORS)]
        found.append(tuple(Slice(*part) for part in each if part[1] < part[2]))
    return found


class Training:
    """One rank's."""

    def __init__(self, rank: int, address: str, *, codec: str = "identity()", path: str = "service", per_node: int = 1,
                 outer: Outer | None = None, config: dict[str, Any] | None = None, ends: Sequence[int] = (),
                 **how: Any) -> None:
        self.rank, self.model = rank, Wells()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        plan = default_plan(job_of(self.model), codec=codec, path="service", servers=1, ranks_per_node=per_node,
                            fuse_nbytes=2048, cut_nbytes=4096)
        cut = enumerate(cut_at(ends)) if ends else ((b.id, b.slices) for b in plan.buckets)
        buckets = tuple(Bucket(n, slices, path, codec, owner=n % per_node, down="identity()" if path == "service" else "")
                        for n, slices in cut)
        self.session = commlayer.attach(
            self.model, self.optimizer, config=rank_pool.quick(join=address, ranks_per_node=per_node) | (config or {}),
            plan=Plan(plan.job, buckets, plan.servers, per_node), sync=outer or "step", **how)

    @property
    def local(self) -> Any:
        return self.session.inspect.connection.local

    def step(self, step: int, *, spoilt: bool = False) -> npt.NDArray[np.float32]:
        self.optimizer.zero_grad()
        self.model(torch.tensor(points(self.rank, step), dtype=torch.float32)).backward()
        if spoilt:
            with torch.no_grad():
                next(iter(self.model.parts)).fill_(torch.inf)
        self.optimizer.step()
        return self.weights()

    def weights(self) -> npt.NDArray[np.float32]:
        return np.stack([p.detach().numpy().copy() for p in self.model.parts])

    def starts(self) -> npt.NDArray[np.float32]:
        return np.stack([s.numpy().copy() for s in self.local.starts])


def reference(steps: int, fragments: Sequence[Any], outer: Outer, *, overlap: bool, every: int = H) -> Any:
    """All workers' weights behind each step, and what they have in common. `fragments`: tensors, or which elements of all."""
    common = np.stack([np.full(SIZE, float(t)) for t in range(TENSORS)])
    workers, velocity = [common.copy() for _ in range(WORLD)], np.zeros_like(common)
    sent: Any = None
    turn, found = 0, []

    def merge(part: list[int], changes: Any, ends: Any) -> None:
        change = np.mean(changes, axis=0)
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
        found.append((np.stack(workers), common.copy()))
    return found


def follow(rank: int, address: str, steps: int, how: dict[str, Any]) -> dict[str, Any]:
    training = Training(rank, address, **{"every": H} | how)
    rows = [(training.step(step), training.starts()) for step in range(steps)]
    under_way = training.local.under_way
    if under_way:
        with pytest.raises(ValueError, match="local steps.*E-CHECKPOINT"):
            training.session.state_dict()
    training.session.drain()
    found = {"rows": rows, "end": training.weights(), "under way": under_way, "stats": training.session.stats()}
    training.session.close()
    return found


STAGED = "encode@cpu all.allgather decode@cpu"
ENDS = (250, 700, 1100, 1900, TENSORS * SIZE)


def turned(cuts: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
    """The elements of all tensors whose turn is between these, of the last tensor first."""
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
    ({"overlap": "round", "fragments": 2, "ends": ENDS, "outer": NESTEROV}, turned([1100])),
    ({"overlap": "round", "fragments": 4, "ends": ENDS, "per_node": 2}, turned([700, 1100, 1900])),
    ({"overlap": "round", "fragments": 2, "ends": ENDS, "path": "allreduce"}, turned([1100])),
    ({"overlap": "round", "fragments": 2, "ends": ENDS, "path": STAGED}, turned([1100])),
    ({"fragments": 4, "ends": ENDS}, turned([700, 1100, 1900])),
    ({"every": 1, "codes": "updates", "overlap": "round"}, [[0, 1, 2, 3]]),
    ({"every": 1, "codes": "updates", "overlap": "round", "outer": NESTEROV, "per_node": 2}, [[0, 1, 2, 3]]),
], ids=["whole", "halves, nesterov", "allreduce", "two ranks to a node", "staged", "one after the other",
        "cut tensors, nesterov", "cut tensors, two ranks to a node", "cut tensors, allreduce", "cut tensors, staged",
        "cut tensors, waited for", "each step", "each step, two ranks to a node"])
def test_it_is_what_the_reference_says(how: dict[str, Any], parts: Sequence[Any]) -> None:
    steps = 4 * H + 1
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(follow, servers.address, steps, how)
    every = how.get("every", H)
    wanted = reference(steps, parts, how.get("outer", Outer()), overlap="overlap" in how, every=every)
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


def ended(training: Training, first: Any) -> tuple[Any, Any]:
    """Drained: how far weights have come from those, and what is owed."""
    training.session.drain()
    owed = np.zeros((TENSORS, SIZE))
    for bucket in training.session.inspect.connection.worker.buckets:
        for debt in bucket.debts():
            owed[debt.tensor, debt.start : debt.stop] += debt.values.numpy()
    applied = first - training.weights()
    training.session.close()
    return applied, owed


def known(rank: int, address: str, how: dict[str, Any]) -> tuple[Any, Any, Any]:
    training = Training(rank, address, **how)
    parameters, put = list(training.model.parts), np.zeros((TENSORS, SIZE))
    first = training.weights().astype(float)
    for step in range(3 * H + 1):
        for p, g in zip(parameters, points(rank, step), strict=True):
            p.grad = torch.tensor(g, dtype=torch.float32)
        put += RATE * points(rank, step)
        training.session.synchronize()
        training.optimizer.step()
    return put, *ended(training, first)


@pytest.mark.parametrize("codec", ["topk(ratio=0.05)", "int4(block=64)"])
@pytest.mark.parametrize("how", [
    {"every": H, "overlap": "round", "fragments": 2}, {"every": H, "overlap": "round", "fragments": 4, "ends": ENDS},
    {"codes": "updates"},
], ids=["overlap", "cut tensors", "updates"])
def test_applied_and_owed_is_what_was_put_in(codec: str, how: dict[str, Any]) -> None:
    with Servers(WORLD, 1) as servers:
        (put, applied, owed), (put_2, applied_2, owed_2) = pool(WORLD).call(known, servers.address, how | {"codec": codec})
    assert (applied == applied_2).all()
    assert abs(owed).max() > 0.01 * RATE
    np.testing.assert_allclose(WORLD * applied + owed + owed_2, put + put_2, rtol=1e-3, atol=1e-4)


def known_but_for_a_turn(rank: int, address: str, codec: str) -> tuple[Any, Any, Any]:
    """One turn of the second round is not finite: what it was to bring in is gone, and nothing else."""
    training = Training(rank, address, every=H, fragments=4, ends=ENDS, codec=codec)
    parameters, masks = list(training.model.parts), turned([700, 1100, 1900])
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
    return put + since, *ended(training, first)


@pytest.mark.parametrize("codec", ["topk(ratio=0.05)", "int4(block=64)"])
def test_a_turn_that_is_not_finite_leaves_the_others_of_its_round_as_they_are(codec: str) -> None:
    with Servers(WORLD, 1) as servers:
        (put, applied, owed), (put_2, applied_2, owed_2) = pool(WORLD).call(known_but_for_a_turn, servers.address, codec)
    assert (applied == applied_2).all()
    assert np.isfinite(applied).all()
    np.testing.assert_allclose(WORLD * applied + owed + owed_2, put + put_2, rtol=1e-3, atol=1e-4)


def ahead(rank: int, address: str) -> int:
    training, far = Training(rank, address, every=H, overlap="round"), H - 1 if rank else 2 * H - 1
    for step in range(2 * H):
        if step == far:
            dist.barrier()  # rank 0 has taken all but one of the steps of a round whose exchange rank 1 has not begun
        training.step(step)
    training.session.close()  # brings in what is under way
    return training.session.inspect.connection.exchanges


def test_nobody_waits_for_an_exchange_under_way() -> None:
    with Servers(WORLD, 1) as servers:
        assert pool(WORLD).call(ahead, servers.address) == [2, 2]


MIDDLE = {"every": H, "overlap": "round", "fragments": 2, "outer": NESTEROV, "codec": "topk(ratio=0.05, values='int8')",
          "ends": ENDS}


def save_and_go_on(rank: int, address: str, folder: str) -> tuple[Any, Any]:
    training = Training(rank, address, **MIDDLE)
    for step in range(H + 3):  # a fragment of the second round is under way
        training.session.weight(1.0 + rank + step % 2)
        training.step(step)
    training.session.save_residuals(folder)
    state = training.model.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    rows = [training.step(step) for step in range(H + 3, 3 * H)]
    training.session.close()
    return kept, rows


def take_up(rank: int, address: str, folder: str, states: list[Any]) -> Any:
    training = Training(rank, address, **MIDDLE)
    training.model.load_state_dict(states[rank])
    training.session.load_residuals(folder)
    training.session.weight(1.0 + rank + (H + 2) % 2)
    rows = [training.step(step) for step in range(H + 3, 3 * H)]
    training.session.close()
    return rows


def test_a_save_in_the_middle_of_a_round_goes_on_bit_for_bit(tmp_path: Path) -> None:
    with Servers(WORLD, 1) as servers:
        saved = pool(WORLD).call(save_and_go_on, servers.address, str(tmp_path))
    with Servers(WORLD, 1) as servers:
        again = pool(WORLD).call(take_up, servers.address, str(tmp_path), [state for state, _ in saved])
    for mine, (_, theirs) in zip(again, saved, strict=True):
        assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))


def mishaps(rank: int, address: str) -> tuple[list[str], Any]:
    """Digests at merges: of equal starts nothing is said, of others it is. Then weights that are not finite."""
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
        training.step(step, spoilt=step == 26 and rank == 1)
    training.session.drain()
    training.session.close()
    return decisions, training.weights()


def test_digests_are_of_what_ranks_have_in_common_and_all_go_back_from_what_is_not_finite() -> None:
    with Servers(WORLD, 1) as servers:
        (said, first), (_, second) = pool(WORLD).call(mishaps, servers.address)
    assert any("drifted apart in parts.2" in line for line in said)
    assert np.isfinite(first).all()
    assert (first == second).all()


def refused(rank: int, address: str) -> dict[str, str]:
    tries: dict[str, dict[str, Any]] = {
        "word": {"every": 4, "overlap": "always"}, "one": {"every": 1, "overlap": "round"}, "open": {"overlap": "round"},
        "more": {"every": 2, "fragments": 4}, "uneven": {"every": 4, "fragments": 3}, "none": {"every": 4, "fragments": 0},
    }
    return refusals({name: partial(Training, rank, address, **how) for name, how in tries.items()})


def test_what_cannot_be_is_one_line() -> None:
    with Servers(WORLD, 1) as servers:
        said_in_lines(pool(WORLD).call(refused, servers.address), {
            "word": "overlap: got 'always', allowed: 'round'", "one": "every=1: a step on averaged gradients waits for them",
            "open": "every=2 or more", "more": "fragments: got 4 with every=2, allowed: a divisor",
            "uneven": "fragments: got 3", "none": "fragments: got 0",
        })


def few(rank: int, address: str) -> tuple[int, list[str], Any]:
    training = Training(rank, address, every=6, fragments=6)
    for step in range(12):
        training.step(step)
    training.session.drain()
    fragments, said = training.session.inspect.connection.plan.fragments, training.session.inspect.decisions()
    training.session.close()
    return fragments, said, training.weights()


def test_a_small_model_has_as_many_fragments_as_its_plan_allows() -> None:
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(few, servers.address)
    (fragments, said, first), (also, silent, second) = results
    assert fragments == also == 3, "the largest divisor of 6 for 4 buckets"
    assert [line for line in said if "fragments=6 becomes fragments=3" in line] == said
    assert silent == []
    assert (first == second).all()


def bucket(number: int, *slices: tuple[int, int, int]) -> Bucket:
    return Bucket(number, tuple(Slice(*s) for s in slices), "service")


@pytest.mark.parametrize(("count", "wanted"), [
    (1, [[0, 1, 2, 3, 4]]), (2, [[0, 1], [2, 3, 4]]), (3, [[0], [1, 2], [3, 4]]), (5, [[0], [1], [2], [3], [4]]),
])
def test_fragments_are_stretches_of_the_plan(count: int, wanted: list[list[int]]) -> None:
    buckets = [bucket(0, (3, 0, 100)), bucket(1, (2, 0, 100)), bucket(2, (2, 100, 150), (4, 0, 10)), bucket(3, (1, 0, 60)),
               bucket(4, (0, 0, 60), (1, 60, 90))]
    assert fragments_of(buckets, count) == wanted


def test_a_plan_of_too_few_buckets_has_too_few_fragments() -> None:
    with pytest.raises(ValueError, match=r"fragments=3: .* 2 .*E-SYNC-FRAGMENTS"):
        fragments_of([bucket(0, (0, 0, 10), (1, 0, 5)), bucket(1, (1, 5, 10))], 3)


def test_neighbouring_elements_of_a_tensor_are_one_range() -> None:
    buckets = [bucket(0, (3, 50, 100), (1, 0, 5)), bucket(1, (3, 0, 50), (1, 8, 9)), bucket(2, (1, 5, 7), (0, 0, 4))]
    assert ranges_of(buckets) == {0: [(0, 4)], 1: [(0, 7), (8, 9)], 3: [(0, 100)]}
    assert ranges_of([]) == {}

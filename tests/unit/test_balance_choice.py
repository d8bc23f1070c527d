"""Who takes part, and who computes in micro-batches: against brute force over all sets, and what is proven beyond."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.balancing import PAPER

from commlayer.balance import Communication, Line, Solution, shares, solve
from commlayer.balance.share_solver import Accumulate
from commlayer.balance.time_models import Accumulated, TimeModel

Seconds = Callable[[tuple[int, ...]], float]


def best_of_all_sets(models: Sequence[TimeModel], most: Sequence[int], minimum: int, total: int, comm: Communication) -> float:
    """Every set with every time at which one of its workers may end; knows nothing of how solve() goes about it."""
    tables = [np.array([model.time_s(batch) for batch in range(1, total + 1)]) for model in models]
    moments = np.unique(np.concatenate(tables))
    done = np.array([np.searchsorted(table, moments * (1 + 1e-12), side="right") for table in tables])
    done = np.minimum(done, np.array(most)[:, None])
    best = float("inf")
    for size in range(1, len(models) + 1):
        if size * minimum > total:
            break
        for active in itertools.combinations(range(len(models)), size):
            rows = done[list(active)]
            enough = (rows.sum(axis=0) >= total) & (rows.min(axis=0) >= minimum)
            if enough.any():
                makespan = float(moments[int(enough.argmax())])
                best = min(best, makespan + comm.exposed_s(active, makespan))
    return best


def links(kind: str, draw: random.Random, workers: int) -> Seconds:
    """Prices of a set that rise with it, as real ones do."""
    slow = draw.sample(range(workers), draw.choice([1, 2, 2, 3]))
    link = [draw.uniform(5, 60) * (draw.choice([4, 30]) if worker in slow else 0.2) for worker in range(workers)]
    site = [draw.randrange(3) for _ in range(workers)]
    match kind:
        case "slowest link":
            return lambda active: max(link[worker] for worker in active)
        case "sum of links":
            return lambda active: sum(link[worker] for worker in active) / 3
        case "nothing alone":
            return lambda active: max(link[worker] for worker in active) if len(active) > 1 else 0.0
        case "a ring":
            return lambda active: 2 * (len(active) - 1) * (4 + max(link[worker] for worker in active) / len(active))
        case "between sites":
            return lambda active: 70.0 * (len({site[worker] for worker in active}) - 1) + 2 * len(active)
        case "a server's fan-in":
            return lambda active: max(max(link[worker] for worker in active), 12.0 * len(active))
    raise AssertionError(kind)


KINDS = ("slowest link", "sum of links", "nothing alone", "a ring", "between sites", "a server's fan-in")


def a_line(draw: random.Random) -> Line:
    return Line(draw.choice([0.5, 1, 1, 4]) * draw.uniform(0.9, 1.1), draw.choice([0, 3, 10, 40]))


def a_case(seed: int, few: int, many: int) -> tuple[list[Line], list[int | None], int, int]:
    draw = random.Random(seed)
    workers = draw.randint(few, many)
    models = [a_line(draw) for _ in range(workers)]
    caps = [draw.choice([None, None, 2, 3, 5, 9]) for _ in models]
    return models, caps, draw.randint(max(workers * 2, 14), 48), draw.choice([1, 1, 2])


def check(found: Solution, models: Sequence[Line], caps: Sequence[int | None], total: int, minimum: int) -> None:
    assert sum(found.shares) == total
    assert all(share == 0 or share >= minimum for share in found.shares)
    for share, cap, pieces in zip(found.shares, caps, found.micro_batches, strict=True):
        assert pieces == (-(-share // min(cap or total, total)) if share else 0)


def test_the_papers_gpus_with_little_memory_use_micro_batches() -> None:
    """Their caps reach the batch, and by far the fastest way uses them twice all the same."""
    caps = [512, 96, 96, 16]
    found = solve(PAPER, 512, caps)
    assert found.makespan_s == pytest.approx(0.1102856)
    assert found.micro_batches == (1, 2, 2, 1)
    assert found.makespan_s == solve(PAPER, 512, caps, accumulate="always").makespan_s
    assert solve(PAPER, 512, caps, accumulate="never").makespan_s == pytest.approx(0.1862024)
    assert shares(PAPER, 512, caps) == [304, 96, 96, 16], "a list of shares alone says nothing of micro-batches: it needs none"


def test_two_slow_links_of_eight_are_left_out() -> None:
    link = [0.1] * 6 + [10.0] * 2
    comm = Communication(lambda active: max(link[worker] for worker in active))
    found = solve([Line(1e-3, 5e-3)] * 8, 512, communication=comm)
    assert found.active == (0, 1, 2, 3, 4, 5)
    assert found.iteration_s == pytest.approx(0.191)


@pytest.mark.parametrize("accumulate", ["needed", "always", "never"])
@pytest.mark.parametrize("seed", range(40))
def test_micro_batches_against_brute_force(seed: int, accumulate: Accumulate) -> None:
    models, caps, total, minimum = a_case(seed, 2, 7)
    room = [min(cap or total, total) for cap in caps]
    caps = [None if accumulate == "never" and sum(room) < total else cap for cap in caps]
    room = [min(cap or total, total) for cap in caps]
    found = solve(models, total, caps, minimum=minimum, accumulate=accumulate)
    check(found, models, caps, total, minimum)
    made: list[TimeModel] = [Accumulated(model, cap) for model, cap in zip(models, room, strict=True)]
    most = [(cap if accumulate == "never" else total) if cap >= minimum else 0 for cap in room]
    best = best_of_all_sets(made, most, minimum, total, Communication(lambda _: 0.0))
    assert found.iteration_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_sets_with_communication_against_brute_force(seed: int, kind: str) -> None:
    models, caps, total, minimum = a_case(seed, 7, 10)
    draw = random.Random(seed + 1000)
    comm = Communication(links(kind, draw, len(models)), draw.choice([0.0, 0.0, 0.5, 0.9]))
    room = [min(cap or total, total) for cap in caps]
    made: list[TimeModel] = [Accumulated(model, cap) for model, cap in zip(models, room, strict=True)]
    most = [total if cap >= minimum else 0 for cap in room]
    best = best_of_all_sets(made, most, minimum, total, comm)
    for accumulate in ("needed", "always"):
        found = solve(models, total, caps, minimum=minimum, accumulate=accumulate, communication=comm)  # type: ignore[arg-type]
        check(found, models, caps, total, minimum)
        assert found.iteration_s == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [14, 22])
def test_more_sets_than_can_be_priced(workers: int, kind: str) -> None:
    """The heuristic keeps the total and is never slower than all workers together."""
    for seed in range(2):
        draw = random.Random(100 * workers + seed)
        models = [a_line(draw) for _ in range(workers)]
        caps = [draw.choice([None, None, 20, 50]) for _ in models]
        comm, total = Communication(links(kind, draw, workers), draw.choice([0.0, 0.5])), 40 * workers
        found = solve(models, total, caps, communication=comm)
        check(found, models, caps, total, 1)
        assert found.iteration_s <= solve(models, total, caps, communication=comm, exclude=False).iteration_s


@pytest.mark.parametrize("workers", [30, 200])
def test_many_workers_of_which_some_have_slow_links(workers: int) -> None:
    """Where the slowest link counts, the best set is all whose links are no slower than some link, by whom computes in time."""
    for seed in range(3):
        draw = random.Random(seed)
        models = [Line(draw.uniform(0.3, 9), draw.uniform(1, 50)) for _ in range(workers)]
        link = [draw.uniform(0, 40) * (100 if draw.random() < 0.1 else 1) for _ in range(workers)]
        comm = Communication(lambda active, link=link: max(link[worker] for worker in active))  # type: ignore[misc]
        best = min(solve(models, 64 * workers, [0 if own > slowest else None for own in link]).makespan_s + slowest
                   for slowest in link)
        assert best <= solve(models, 64 * workers, communication=comm).iteration_s <= 1.02 * best


@pytest.mark.parametrize("accumulate", ["needed", "always"])
def test_equally_fast_shares_have_fewer_micro_batches_where_only_needed_ones_are_asked_for(accumulate: Accumulate) -> None:
    """A worker whose time does not depend on its share can take what another would have computed in a second piece."""
    found = solve([Line(0.0, 30.0), Line(1.0, 0.0), Line(1.0, 2.0)], 60, [None, 10, 10], accumulate=accumulate)
    assert found.makespan_s == 30
    assert (found.micro_batches == (1, 1, 1)) == (accumulate == "needed")

"""Espresso's passes: on timelines drawn by hand, against brute force, and the direction of its experiments."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
from oracle.espresso import KEEP, cpu_pass, gpu_pass
from oracle.espresso_cases import CASES, COMPRESSORS, TESTBEDS, Case, Model, cluster_of, profile, published, run
from oracle.fifo import Played, TimedTask, play

from commlayer.planner.buckets import ELEMENT_NBYTES
from commlayer.planner.model import Policy
from commlayer.planner.search.plan_search import plan
from commlayer.planner.tree import path_problems
from commlayer.records import MAX_BUCKET_NBYTES


def send(seconds: float) -> list[TimedTask]:
    return [TimedTask((("up:a", seconds),))]


def coded(encode: float, seconds: float, lane: str = "compute:a") -> list[TimedTask]:
    return [TimedTask(((lane, encode),)), TimedTask((("up:a", seconds),), (0,))]


def test_sending_overlaps_backward_and_queues_on_the_link() -> None:
    assert play([1, 1, 1], [send(2), send(2), send(2)]) == Played(7, frozenset())
    assert play([5, 1], [send(1), send(1)]).done_s == 7
    assert play([], []) == Played(0, frozenset())


def test_encoding_on_the_gpu_delays_later_gradients() -> None:
    assert play([1, 1], [coded(3, 1), send(1)]).done_s == 6, "second gradient at 1 + 3 + 1"
    assert play([1, 1], [coded(3, 1, "cpu:a"), send(1)]).done_s == 5, "on the CPU only the first is late"


def test_task_ends_with_its_longest_lane_and_latency_occupies_none() -> None:
    tasks = [[TimedTask((("up:a", 1.0), ("down:b", 3.0)), latency_s=10.0)], [TimedTask((("up:a", 1.0),))]]
    assert play([0, 0], tasks).done_s == 13


def test_tensors_before_a_gap_are_identified() -> None:
    assert play([1, 5, 1], [send(2), send(2), send(1)]).before_bubbles == {0}
    assert play([1, 2, 1], [send(2), send(2), send(1)]).before_bubbles == frozenset()


class Toy:
    """Random tensors with options shaped like compression: fewer bytes, some time to encode on a lane."""

    def __init__(self, seed: int, count: int, sizes: int) -> None:
        draw = random.Random(seed)
        kinds = [draw.uniform(0.2, 5) for _ in range(sizes)]
        self.sizes = [draw.randrange(sizes) for _ in range(count)]
        self.work = [draw.uniform(0.1, 2) for _ in range(count)]
        gpu, cpu = draw.uniform(0.02, 0.4), draw.uniform(0.1, 1.5)
        self.ways = [[send(t), coded(gpu * t, 0.2 * t), coded(cpu * t, 0.2 * t, "cpu:a")] for t in kinds]

    def played(self, strategy: Sequence[int]) -> Played:
        return play(self.work, [self.ways[size][way] for size, way in zip(self.sizes, strategy, strict=True)])

    def price(self, strategy: Sequence[int]) -> float:
        return self.played(strategy).done_s

    def passes(self) -> tuple[list[int], list[int]]:
        count = len(self.sizes)
        first = gpu_pass(self.sizes, [2] * count, self.price, lambda s: self.played(s).before_bubbles)
        return first, cpu_pass(self.sizes, first, lambda _, o: 2 if o == 1 else None, self.price)


@pytest.mark.parametrize("seed", range(40))
def test_offloading_by_counts_is_as_good_as_any_offloading(seed: int) -> None:
    """The lemma: of equal tensors the earliest go to the CPU, so trying all counts is exhaustive."""
    toy = Toy(seed, count=8, sizes=2)
    first, final = toy.passes()
    ways = [(o,) if o == KEEP else (1, 2) for o in first]
    assert toy.price(final) <= toy.price(first)
    assert toy.price(final) == pytest.approx(min(toy.price(s) for s in product(*ways)))


def test_tensors_before_a_bubble_are_unchanged() -> None:
    ways = [[send(2), coded(0.1, 0.1)], [send(3), coded(0.1, 0.1)]]

    def played(strategy: Sequence[int]) -> Played:
        return play([1, 9], [w[o] for w, o in zip(ways, strategy, strict=True)])

    strategy = gpu_pass([9, 3], [2, 2], lambda s: played(s).done_s, lambda s: played(s).before_bubbles)
    assert strategy == [KEEP, 1]


@pytest.mark.parametrize("name", TESTBEDS)
@pytest.mark.parametrize("codec", COMPRESSORS)
def test_every_option_is_a_path_of_the_tree(name: str, codec: str) -> None:
    cluster = cluster_of(name)
    model = Model(published("lstm"), cluster, profile(codec), codec)
    for i, size in enumerate(model.sizes):
        ways = model.ways[size]
        assert [way for way in ways if path_problems(way, cluster)] == []
        for option in range(1, model.options()[i]):
            other = model.cpu_of(i, option)
            assert other is not None
            assert [op.name for op in ways[option]] == [op.name for op in ways[other]]


QUICK = ("lstm", "vgg16")


@pytest.mark.parametrize("case", [case for case in CASES if case.model in QUICK], ids=lambda c: c.model)
def test_direction_of_the_experiments(case: Case) -> None:
    steps = run(case)
    assert steps.espresso_s <= steps.gpu_s < steps.dense_s
    assert steps.free_s < steps.espresso_s
    assert 0 < steps.compressed < len(published(case.model).tensors), "most tensors stay dense"


@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.model, marks=[] if case.model in QUICK else [pytest.mark.nightly]) for case in CASES])
def test_plan_is_no_longer_than_that_of_espresso(case: Case) -> None:
    """Espresso's plan for vgg16 sends 411 MB at once. Workers cannot; both plan parts."""
    best = plan(published(case.model), cluster_of(case.testbed), profile(case.codec), Policy(objective="step", whole_tree=True))
    most = MAX_BUCKET_NBYTES // ELEMENT_NBYTES if case.model == "vgg16" else 0
    assert best.step_s <= run(case, most=most).espresso_s

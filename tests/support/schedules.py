"""Hand-made and random problems for the planner's tests. Knows no plans."""

from __future__ import annotations

import random

from commlayer.planner.model import Task
from commlayer.planner.problem import Pace, Problem, flatten, load_of, way

ALONE = ("compute:a", "cpu:a", "compute:b", "cpu:b", "server:0")
SHARED = ("up:a", "down:a", "up:b", "down:b", "intra:a")


def chain(*steps: tuple[str, float]) -> tuple[Task, ...]:
    """One task after the other, each on one lane."""
    return tuple(Task(((lane, seconds),), after=(i - 1,) if i else ()) for i, (lane, seconds) in enumerate(steps))


def one_node(ready_s: tuple[float, ...], work_s: float) -> tuple[Pace, ...]:
    return (Pace("a", ready_s, work_s),)


def random_tasks(rng: random.Random) -> tuple[Task, ...]:
    tasks = []
    for place in range(rng.randint(0, 5)):
        lanes = rng.sample(ALONE, 1) if rng.random() < 0.4 else rng.sample(SHARED, rng.choice((0, 1, 1, 2, 2, 4)))
        after = tuple(sorted(rng.sample(range(place), rng.randint(0, min(place, 2)))))
        seconds = [rng.choice((0.0, 0.5, 1.0, rng.random())) for _ in lanes]
        tasks.append(Task(tuple(zip(lanes, seconds, strict=True)), after, rng.choice((0.0, 0.0, 0.1, rng.random())),
                          rng.choice(("", "push", "pull"))))
    return tuple(tasks)


def random_problem(seed: int, buckets: int = 0) -> Problem:
    rng = random.Random(seed)
    buckets = buckets or rng.randint(1, 8)
    loads = [
        load_of(tuple(way(random_tasks(rng)) for _ in range(rng.randint(1, 4))), rng.choice((0.0, rng.random())),
             rng.random() < 0.2)
        for _ in range(buckets)
    ]
    paces = []
    for node in ("a", "b")[: rng.randint(1, 2)]:
        ready = tuple(rng.choice((0.0, 1.0, 3 * rng.random())) for _ in range(buckets))
        paces.append(Pace(node, ready, max(ready) + rng.choice((0.0, rng.random()))))
    return flatten(loads, paces, tail_s=rng.choice((0.0, 0.25)), priority=rng.random() < 0.5)

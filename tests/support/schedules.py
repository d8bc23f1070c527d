"""Hand-made and random problems for the planner's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from oracle.fifo import TimedTask

from commlayer.planner import problem as planner
from commlayer.planner.model import LinearCost
from commlayer.planner.problem import Network, Problem, Template, join_templates

ALONE = ("compute:a", "cpu:a", "compute:b", "cpu:b", "server:0")
SHARED = ("up:a", "down:a", "up:b", "down:b", "intra:a")


class Pace(NamedTuple):
    """When one node has the gradient of each bucket, and when it has finished computing."""

    node: str
    ready_s: tuple[float, ...]
    work_s: float


class Load(NamedTuple):
    """The options of one bucket."""

    options: Sequence[Sequence[TimedTask]]
    urgency: float = 0.0
    stale: bool = False


def template(network: Network, options: Sequence[Sequence[TimedTask]]) -> Template:
    return join_templates([network.template([
        planner.Task(tuple((lane, LinearCost(seconds)) for lane, seconds in task.lanes), task.after, LinearCost(task.latency_s),
                     task.op)
        for task in tasks]) for tasks in options])


def flatten(loads: Sequence[Load], paces: Sequence[Pace], *, tail_s: float = 0.0, priority: bool = True) -> Problem:
    network = Network([pace.node for pace in paces])
    each = [template(network, load.options).load(0, load.urgency, stale=load.stale) for load in loads]
    return network.problem(each, np.array([[*pace.ready_s, pace.work_s] for pace in paces]), tail_s=tail_s, priority=priority)


def chain(*steps: tuple[str, float]) -> tuple[TimedTask, ...]:
    """Tasks in sequence, each on one lane."""
    return tuple(TimedTask(((lane, seconds),), after=(i - 1,) if i else ()) for i, (lane, seconds) in enumerate(steps))


def one_node(ready_s: tuple[float, ...], work_s: float) -> tuple[Pace, ...]:
    return (Pace("a", ready_s, work_s),)


def random_tasks(rng: random.Random) -> tuple[TimedTask, ...]:
    tasks = []
    for place in range(rng.randint(0, 5)):
        lanes = rng.sample(ALONE, 1) if rng.random() < 0.4 else rng.sample(SHARED, rng.choice((0, 1, 1, 2, 2, 4)))
        after = tuple(sorted(rng.sample(range(place), rng.randint(0, min(place, 2)))))
        seconds = [rng.choice((0.0, 0.5, 1.0, rng.random())) for _ in lanes]
        tasks.append(TimedTask(tuple(zip(lanes, seconds, strict=True)), after, rng.choice((0.0, 0.0, 0.1, rng.random())),
                               rng.choice(("", "push", "pull"))))
    return tuple(tasks)


def random_problem(seed: int, buckets: int = 0) -> Problem:
    rng = random.Random(seed)
    buckets = buckets or rng.randint(1, 8)
    loads = [Load([random_tasks(rng) for _ in range(rng.randint(1, 4))], rng.choice((0.0, rng.random())), rng.random() < 0.2)
             for _ in range(buckets)]
    paces = []
    for node in ("a", "b")[: rng.randint(1, 2)]:
        ready = tuple(rng.choice((0.0, 1.0, 3 * rng.random())) for _ in range(buckets))
        paces.append(Pace(node, ready, max(ready) + rng.choice((0.0, rng.random()))))
    return flatten(loads, paces, tail_s=rng.choice((0.0, 0.25)), priority=rng.random() < 0.5)

"""Clusters and profiles of round numbers for the planner's tests."""

from __future__ import annotations

import random

from msgspec import structs

from commlayer.planner.model import Cluster, CodecCost, LinearCost, Link, Node, Profile
from commlayer.planner.problem import Problem
from commlayer.planner.search.choices import ChoiceSpace
from commlayer.planner.simulation import native_schedule
from commlayer.records import Plan
from support.plans import cluster
from support.schedules import Load, Pace, chain, flatten

DENSE, SPARSE, SHARED = "identity()", "topk(ratio=0.01)", "randomk(ratio=0.01)"


def codec(
    name: str, device: str, encode: float, decode: float, nbytes: float, *, sums: bool = False, rounds: int = 1,
) -> CodecCost:
    """Nanoseconds an element; bytes an element; floors of 1 and 2 us, and 16 bytes."""
    return CodecCost(name, device, LinearCost(1e-6, encode * 1e-9), LinearCost(2e-6, decode * 1e-9), LinearCost(16, nbytes),
                     sums=sums,
                     rounds=rounds)


PROFILE = Profile(
    codecs=(
        codec(DENSE, "cpu", 0.5, 0.75, 4, sums=True),
        codec(SPARSE, "cpu", 2, 1, 0.02),
        codec(SPARSE, "gpu", 0.25, 0.125, 0.02),
        codec(SHARED, "cpu", 1, 0.5, 0.04, sums=True),
        codec(SHARED, "gpu", 0.125, 0.0625, 0.04, sums=True),
    ),
    server=LinearCost(0, 0.1e-9),
)


def home(up_bps: float = 20e6, down_bps: float = 100e6, alpha_s: float = 0.01) -> Link:
    return Link(up_bps, down_bps, alpha_s)


def flat(nodes: int, link: Link | None = None, device: str = "v100") -> Cluster:
    """Nodes of one rank."""
    return Cluster(tuple(Node(f"n{i}", 1, device, link or Link(1e9, 1e9, 1e-4)) for i in range(nodes)))


def tall(nodes: int, ranks: int, *, net_bps: float = 1e9, intra_bps: float = 100e9) -> Cluster:
    """Nodes of several ranks."""
    return Cluster(tuple(Node(f"n{i}", ranks, "v100", Link(net_bps, net_bps, 1e-4), intra_bps, 1e-5) for i in range(nodes)))


def random_space(seed: int, *, budget: bool) -> tuple[ChoiceSpace, Problem, list[int]]:
    """Up to four buckets with up to six options: dense and fast ones with a loss, on one node's lanes."""
    rng = random.Random(seed)
    n = rng.randint(1, 4)
    choices, loss = [], []
    for _ in range(n):
        sent = rng.uniform(0.2, 2.0)
        ways = [chain(("up:a", sent), ("down:a", sent))]
        losses = [0.0]
        for _ in range(rng.randint(0, 5)):
            lane = rng.choice(("compute:a", "cpu:a"))
            ratio, code = rng.uniform(0.05, 0.8), rng.uniform(0.05, 0.8)
            ways.append(chain((lane, code), ("up:a", sent * ratio), ("down:a", sent * ratio), (lane, code / 2)))
            losses.append(rng.uniform(0.1, 1.0))
        choices.append(ways)
        loss.append(losses)
    ready = tuple(sorted(rng.uniform(0, 3) for _ in range(n)))
    problem = flatten([Load(ways) for ways in choices], (Pace("a", ready, 3.0),))
    result = native_schedule(problem)
    burden = [[sum(task.lanes[0][1] for task in way) for way in ways] for ways in choices]
    excess = [[0.0] * len(ways) for ways in choices]
    space = ChoiceSpace(result, loss, excess, burden, [[b] for b in range(n)], 1.0 if budget else 1e9)
    return space, problem, [len(each) for each in loss]


def at(bps: float, nodes: int = 4) -> Cluster:
    link = Link(bps, bps, 1e-3)
    return Cluster(tuple(structs.replace(n, link=link, speed=1.0) for n in cluster(nodes, "1g").nodes))


def price(result: Plan) -> float:
    return result.step_s * result.steps_high

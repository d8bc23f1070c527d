"""A table of problems, and what was found for them before: no search, however quick, finds plans that come later at a loss."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from commlayer.planner.model.cluster import Cluster, Link, Node, Policy
from commlayer.planner.search.layout_candidate import FINEST
from commlayer.planner.search.plan import plan
from commlayer.records import Job, TensorInfo, Timing

FREE = Policy(exact=False, optimizer="adam", forward=True, fragments=True, staleness=False)
KNOWN = {
    ((4.0,) * 4, True): (0.70313616, 2.74511), ((4.0,) * 4, False): (0.22264357, 1.43085),
    ((10.0,) * 4, True): (0.57197455, 2.24971), ((10.0,) * 4, False): (0.21414371, 1.38822),
    ((30.0,) * 4, True): (0.37455462, 1.39911), ((30.0,) * 4, False): (0.20143800, 1.32525),
    ((100.0,) * 4, True): (0.26550496, 1.02157), ((100.0,) * 4, False): (0.19004560, 1.25030),
    ((5.0, 9.0, 14.0, 40.0), True): (0.66067893, 2.62051), ((5.0, 9.0, 14.0, 40.0), False): (0.21748920, 1.43085),
}
"""Seconds to a loss for each step that dense training needs, and how many times as many steps; by Mb/s of four homes, and
whether steps are exact."""


def job(tensors: int = 24) -> Job:
    rng = random.Random(tensors)
    infos = tuple(TensorInfo(f"t{i}", (int(10 ** rng.uniform(3, 5.5)),)) for i in range(tensors))
    ready, needed = (tuple(whole_s * i / tensors for i in range(tensors)) for whole_s in (0.1, 0.05))
    return Job(infos, 32, Timing(tuple(reversed(ready)), needed, 0.1, 0.05, 0.002), "random")


def homes(rates: tuple[float, ...]) -> Cluster:
    links = [Link(rate * 1e6, rate * 1e6, 0.02) for rate in rates]
    return Cluster(tuple(Node(f"n{i}", 1, "cpu", link, server=True) for i, link in enumerate(links)))


@pytest.mark.commit(3)
@pytest.mark.parametrize(("rates", "exact"), KNOWN)
def test_no_plan_comes_later_at_a_loss_than_what_was_found_before(rates: tuple[float, ...], exact: bool) -> None:
    """Of those that are there nearly as soon the finest is taken, so one that is finer than it was may be as much later."""
    made = plan(job(), homes(rates), None, structs.replace(FREE, exact=exact))
    seconds, steps = KNOWN[rates, exact]
    finer = made.steps_high < steps * (1 - 1e-3)
    assert made.step_s * made.steps_high <= seconds * (1 + (FINEST if finer else 1e-5))

"""How much dearer work on processors is, from what a step took."""

from __future__ import annotations

import pytest

from commlayer.autotune.search import MOST_FACTOR, dearer, factor
from commlayer.planner import default_plan, simulate
from commlayer.planner.model import Cluster, Policy
from commlayer.planner.tables import builtin, node, profile_from_tables

CLUSTER = Cluster(tuple(node(f"n{i}", "cpu", "10g") for i in range(4)))
PROFILE = profile_from_tables(CLUSTER)


@pytest.mark.parametrize(("compute_s", "work_s", "measured_s", "expected"), [
    (1.0, 0.5, 1.0, 1.0),  # no longer than priced
    (1.0, 0.5, 1.5, 1.0),
    (1.0, 0.5, 2.0, 2.0),
    (1.0, 0.5, 3.5, 5.0),
    (1.0, 0.5, 1.0 + 0.5 * MOST_FACTOR + 0.1, 1.0),  # more than processors can be blamed for
])
def test_the_factor_makes_the_price_what_was_measured(
    compute_s: float, work_s: float, measured_s: float, expected: float,
) -> None:
    assert factor(measured_s, lambda f: compute_s + work_s * f) == pytest.approx(expected, rel=0.05)


def test_only_work_on_processors_gets_dearer() -> None:
    twice = dearer(PROFILE, 2.0)
    assert (twice.across, twice.inside, twice.copy) == (PROFILE.across, PROFILE.inside, PROFILE.copy)
    assert twice.bucket_s == 2 * PROFILE.bucket_s
    assert twice.server(1000) == 2 * PROFILE.server(1000)
    for before, after in zip(PROFILE.codecs, twice.codecs, strict=True):
        assert (after.encode(1000), after.decode(1000)) == (2 * before.encode(1000), 2 * before.decode(1000))
        assert after.nbytes == before.nbytes
    assert dearer(PROFILE, 1.0) == PROFILE


def test_a_crowd_is_found_by_simulation() -> None:
    job, policy = builtin("lstm"), Policy(devices=("cpu",))
    plan = default_plan(job, codec="int8()", path="service", servers=4, ranks_per_node=1, fuse_nbytes=1 << 20,
                        cut_nbytes=1 << 21)

    def step_s(crowd: float) -> float:
        return simulate(plan, job, CLUSTER, dearer(PROFILE, crowd), policy).step_s

    assert factor(step_s(3.0), step_s) == pytest.approx(3.0, rel=0.05)

"""Homes with several cards: the workers of a home add their gradients on their own machine. They enter and leave a job
together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from support.site_job import COARSE, DEADLINE_S, EXACT, FINE, STEPS, Event, Script, expected, run
from support.sites import KILLED, Ended, Process, Sites, all_ended

pytestmark = pytest.mark.timeout(300)
ODD = 4
"""The step in which a worker dies."""


def start(sites: Sites, script: Script, sizes: Sequence[int], least: int = 1) -> list[Process]:
    """One home for each of the `sizes`, its number of workers. Workers are numbered through all homes."""
    sites.serve(sum(sizes), "--min-workers", str(least))
    return [run(sites, script, last - size, rank=home, options=["--nproc-per-node", str(size)])
            for home, (size, last) in enumerate(zip(sizes, accumulate(sizes), strict=True))]


def homes(sizes: Sequence[int]) -> list[range]:
    """The workers of each home."""
    return [range(last - size, last) for size, last in zip(sizes, accumulate(sizes), strict=True)]


def reports_of(ends: Sequence[Ended]) -> list[dict[str, Any]]:
    """The reports of all workers, whose weights are equal."""
    reports = sorted((row for end in ends for row in end.rows), key=lambda row: row["rank"])
    assert [row["rank"] for row in reports] == list(range(len(reports)))
    for row in reports:
        assert (row["weights"], row["step"], row["plan"]) == (reports[0]["weights"], reports[0]["step"], reports[0]["plan"])
    return reports


@pytest.mark.parametrize(("sizes", "codec", "shard"), [
    ((2, 2), EXACT, ""), ((4, 2, 1), EXACT, ""), ((4, 2, 1), COARSE, ""), ((2, 1), FINE, ""),
    ((2, 2), EXACT, "mesh"), ((2, 2), COARSE, "mesh"), ((2, 1), EXACT, "group"), ((1, 3), COARSE, "group"),
], ids=str)
def test_sum_over_homes_is_that_over_their_workers(sites: Sites, sizes: tuple[int, ...], codec: str, shard: str) -> None:
    reports = reports_of(all_ended(start(sites, Script(codec, shard=shard), sizes)))
    assert len(reports) == sum(sizes)
    weights = torch.tensor(reports[0]["weights"], dtype=torch.float64)
    if codec == EXACT:
        by_hand = expected([homes(sizes)] * STEPS)[0]
        assert max(sizes) > 2 or reports[0]["weights"] == by_hand, "gloo adds more than two numbers in an order of its own"
        torch.testing.assert_close(weights, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    else:
        put, residuals = (torch.tensor([row[what] for row in reports]).double().sum(0) for what in ("put", "residuals"))
        assert residuals.abs().max() > 0.1
        torch.testing.assert_close(residuals - weights, put, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("attach", "victim", "shard"), [
    *((attach, victim, "") for victim in (2, 3) for attach in (
        {}, {"overlap": "forward"}, {"every": 2, "fragments": 1}, {"every": 2, "overlap": "round"},
        {"every": 2, "fragments": 2})),
    ({}, 3, "mesh"), ({"every": 2, "overlap": "round"}, 2, "mesh"), ({"every": 2, "fragments": 2}, 3, "mesh"),
], ids=str)
def test_dead_worker_takes_its_home_along(sites: Sites, attach: dict[str, Any], victim: int, shard: str) -> None:
    script = Script(events=(Event(victim, ODD, after_s=0.004),), attach=attach, shard=shard)
    survivors, home = all_ended(start(sites, script, (2, 2)), 0, KILLED)
    assert not home.rows
    assert shard or re.search(rf"commlayer: (?!.*Traceback).*worker {victim}\b", home.errors), home.errors
    reports = reports_of([survivors])
    assert [row["site"] for row in reports] == [0, 1]
    assert any(re.search("worker 2.*, worker 3.* left, .*; continuing with 2 workers", line)
               for line in reports[0]["decisions"]), reports[0]["decisions"]
    if not attach:
        # Each bucket's sum closes by itself, so the home's last step may be in some of them.
        runs = [expected([homes((2, 2))] * steps + [[(0, 1)]] * (STEPS - steps))[0] for steps in (ODD, ODD + 1)]
        assert all(weight in either for weight, *either in zip(reports[0]["weights"], *runs, strict=True))


@pytest.mark.parametrize(("event", "why"), [
    (Event(3, ODD, "raise"), r"declared this worker 2 dead: its home \(.*\) has lost worker 3: left the job: .*RuntimeError"),
    (Event(3, ODD, "hang", at="backward"), f"declared this worker 2 dead: was dropped: sent nothing for {DEADLINE_S} s"),
    (Event(3, ODD, "leave"), rf"worker 3.*: left after {ODD} exchanges, .*\[E-UNEQUAL-PASSES\]$"),
], ids=["raises", "hangs", "leaves"])
def test_others_of_the_home_end_with_one_line(sites: Sites, event: Event, why: str) -> None:
    sites.set(COMMLAYER_DEADLINE_S=DEADLINE_S)
    survivors, home = all_ended(start(sites, Script(events=(event,)), (2, 2)), 0, 1)
    assert re.search(rf"^commlayer: .*{why}", home.errors, re.MULTILINE), home.errors
    reports = reports_of([survivors])
    assert reports[0]["counts"] == [4] * ODD + [2] * (STEPS - ODD)


@pytest.mark.parametrize(("sizes", "joins", "more"), [
    ((2, 1), [1], {}), ((1, 1), [2], {}), ((2, 2), [4], {}),
    ((2, 2), [2, 2], {"shard": "mesh"}), ((2, 1), [2], {"shard": "group"}), ((2, 1), [3, 1], {"shard": "group"}),
    ((2,), [1, 3], {"shard": "group"}),
    ((2, 2), [2], {"shard": "mesh", "attach": {"every": 2, "overlap": "round"}}),
], ids=str)
def test_homes_of_other_sizes_join(sites: Sites, sizes: tuple[int, ...], joins: list[int], more: dict[str, Any]) -> None:
    script = Script(COARSE, workers=sum(sizes), joiners=sum(joins), **more)
    sites.set(COMMLAYER_LAST_CALL_S="0")
    sites.serve(0, "--min-workers", str(sum(sizes)))
    first = [run(sites, script, home.start, rank=number, options=["--nproc-per-node", str(len(home))])
             for number, home in enumerate(homes(sizes))]
    assert first[0].stderr is not None
    assert any("begins with plan" in line for line in iter(first[0].stderr.readline, ""))
    late = [run(sites, script, home.start, options=["--nproc-per-node", str(len(home))])
            for home in homes((*sizes, *joins))[len(sizes) :]]
    reports = reports_of(all_ended([*first, *late]))
    assert len({tuple(row["members"]) for row in reports}) == 1, "all know the members in the same order"
    assert sorted(reports[0]["members"]) == [*range(sum(sizes) + sum(joins))]
    assert all(row["first"] for row in reports[sum(sizes) :])
    if "attach" not in more:
        buckets = reports[0]["buckets"]
        assert (buckets[-1] > buckets[0]) == (3 in joins), "the plan is cut for homes of other sizes"
        put, residuals, weights = (torch.tensor([row[what] for row in reports]).double().sum(0)
                                   for what in ("put", "residuals", "weights"))
        torch.testing.assert_close(residuals - weights / len(reports), put, atol=1e-2, rtol=1e-3)

"""Plan "auto" while links change: all ranks notice it in the same step, plan without measuring anew, and go on alike.

The counters are made up, for one machine has no links; steps, probes, plans and the change-over are real.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from attach_kit import Run, Setting, coordinators, data, mlp, play
from pool_kit import pool
from torch import nn

from commlayer.job.autoplan import link_probes
from commlayer.job.step_reports import StepReports
from commlayer.observe import link_watch
from commlayer.observe.link_watch import PAYLOAD
from commlayer.transport.members import Members
from commlayer.transport.rank_rows import spacing

WORLD, SERVERS = 2, 2
HIGH_BPS, LOW_BPS = 8e7, 5e6
CONFIRMED_S = 0.3
"""A shorter time than in earnest."""


class Line:
    """A network interface that carries a steady rate, as far as its counters tell."""

    def __init__(self, bps: float) -> None:
        self._lock = threading.Lock()
        self._bps, self._since, self._nbytes = bps, time.monotonic(), 0.0

    def counters(self) -> tuple[int, int]:
        with self._lock:
            self._move()
            return int(self._nbytes), int(self._nbytes)

    def _move(self) -> None:
        now = time.monotonic()
        self._nbytes += self._bps * (now - self._since) / 8
        self._since = now

    def change(self, bps: float) -> None:
        with self._lock:
            self._move()
            self._bps = bps


def train(run: Run, steps: int, slow_from: int, again: int) -> dict[str, Any]:
    """Steps of 30 ms; from one on they take long on a slow line, as long as that plan lasts; later it is quick again."""
    line = Line(HIGH_BPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_probes, "counters_towards", lambda _peers: line.counters)
        patch.setattr(link_watch, "CONFIRMED_S", CONFIRMED_S)
        model = mlp()
        wrapped = run.wrap(model)
        session, optimizer = run.sessions[0], torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(steps):
            if step == slow_from:
                line.change(LOW_BPS)
            if step == again:
                line.change(HIGH_BPS)
            x, y = data(run.rank, step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), y)
            time.sleep(1.1 * CONFIRMED_S if step >= slow_from and not changed(session.decisions()) else 0.03)
            loss.backward()
            optimizer.step()
        return {"decisions": session.decisions(), "weights": torch.cat([p.detach().view(-1) for p in model.parameters()])}


def changed(decisions: list[str]) -> bool:
    return any("links have changed" in line for line in decisions)


def test_all_ranks_plan_again_when_links_become_slow_and_when_they_recover() -> None:
    slow_from, again = 40, 54
    with coordinators(1, WORLD, SERVERS) as made:
        setting = Setting("module", (made[0].address,), servers=SERVERS, plan="auto")
        results = pool(WORLD).call(play, WORLD, train, setting, 115, slow_from, again)
    assert all(torch.equal(r["weights"], results[0]["weights"]) for r in results)
    lines = [[one for one in r["decisions"] if "links have changed" in one] for r in results]
    assert lines[0] == lines[1], "all ranks come to it by themselves, in one step, for one reason"
    assert len(lines[0]) == 1
    number = int(lines[0][0].split()[1].rstrip(":"))
    assert slow_from < number < again, lines[0]
    said = lines[0][0].split(" to ")[1].split(" Mb/s")[0]
    found = [float(rate) for node in said.split(", ") for rate in node.split("/")]
    assert found == pytest.approx([PAYLOAD * LOW_BPS / 1e6] * len(found), rel=0.25), "part was read as it changed"
    answers = [one for one in results[0]["decisions"] if "found a plan" in one]
    assert len(answers) >= 3, "one plan at first, one for slow links, one for links that were found to be quick again"
    assert any("probed the links" in one and "instead of" in one for one in results[0]["decisions"])


# ---- who hears what, when

def tell_in_turn(rank: int, world: int, slow: list[list[bool]]) -> list[list[float]]:
    """Of each step, the words that are acted upon after it: (step of the row, step of the act)."""
    looks, acted = StepReports(Members(), 20.0), list[list[float]]()
    try:
        for step, flags in enumerate(slow):
            looks.step(10.0)
            if rows := looks.heard():
                acted.append([rows[0].word, step])
            if looks.due and (rows := looks.tell(step, 0.0, lambda _s, flag=flags[rank]: flag)):  # type: ignore[misc]
                acted.append([rows[0].word, step])
        looks.heard()
        return acted
    finally:
        looks.close()


def test_rows_are_acted_upon_at_once_only_where_all_wait_for_them() -> None:
    slow = [[False, False], [True, True], [True, False], [False, True], [True, True], [False, False]]
    told = pool(WORLD).call(tell_in_turn, WORLD, slow)
    assert told[0] == told[1] == [[0, 1], [1, 1], [2, 3], [3, 4], [4, 4]]


def test_rows_cost_a_hundredth_of_the_time() -> None:
    assert [spacing(cost, step) for cost, step in ((0.0, 1.0), (0.001, 0.1), (0.001, 0.03), (0.001, 0.0001))] == [1, 1, 4, 64]

"""Plan "auto" while links change: all ranks notice it in the same step, plan without measuring anew, and go on alike.

The counters are made up, for one machine has no links, and so is what collectives cost, for workers count what they push to
servers; steps, probes, plans and the change-over are real.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, data, mlp, play
from support.autotuning import any_step_time
from support.rank_pool import pool
from torch import nn

from commlayer.autotune import measuring
from commlayer.autotune.measure import calibration
from commlayer.autotune.measure.calibration import CollectiveCosts
from commlayer.autotune.report import Reports
from commlayer.cluster.collectives import RowChannel
from commlayer.cluster.process_groups import Members
from commlayer.observe.link_monitor import PAYLOAD, SETTLED
from commlayer.planner.model import Line
from commlayer.records import digest

WORLD, SERVERS = 2, 2
HIGH_BPS, LOW_BPS = 8e7, 5e6
SLOW_S = 0.3
"""Of a step on the slow line."""
DEAR = Line(1.0)
"""A second for a message: no plan has collectives."""
MOST = 2000
"""Steps, if no plan is found."""


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


def train(run: Run) -> dict[str, Any]:
    """Steps of 30 ms; once a plan is in force they take long on a slow line, until another is; then they are quick again."""
    line, sent, decided, digests = Line(HIGH_BPS), list[float](), list[int](), list[str]()
    with pytest.MonkeyPatch.context() as patch, any_step_time():
        patch.setattr(measuring, "counters_of", lambda _interface: line.counters)
        patch.setattr(calibration, "measure_collectives", lambda _groups, _budget_s: CollectiveCosts(DEAR, DEAR))
        model = mlp()
        wrapped = run.wrap(model)
        session, optimizer = run.sessions[0], torch.optim.SGD(model.parameters(), lr=0.05)

        def step(sleep_s: float) -> None:
            x, y = data(run.rank, len(digests))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), y)
            time.sleep(sleep_s)
            if sleep_s == SLOW_S:  # on a slow line all wait
                session.inspect.connection.worker.counters.exposed_s += sleep_s
            before = session.stats()["sent_nbytes"]
            loss.backward()
            optimizer.step()
            sent.append(session.stats()["sent_nbytes"] - before)
            digests.append(digest(session.inspect.plan))

        step(0.03)
        for bps, sleep_s in ((HIGH_BPS, 0.03), (LOW_BPS, SLOW_S), (HIGH_BPS, 0.03)):
            line.change(bps)
            left = digests[-1]
            # What comes in tells of a faster way down at once; of the way up a probe does, later.
            while (digests[-1] == left or (len(decided) == 2 and sent[-1] <= sent[decided[1]])) and len(digests) < MOST:
                step(sleep_s)
            decided.append(len(digests))
            line.change(HIGH_BPS)  # and steps show how long they take on it
            for _ in range(SETTLED + 1):
                step(0.03)
        return {"decisions": session.inspect.decisions(), "digests": digests, "decided": decided, "sent": sent,
                "weights": torch.cat([p.detach().view(-1) for p in model.parameters()])}


def test_all_ranks_go_over_to_another_plan_when_links_become_slow_and_when_they_recover() -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        setting = Setting("module", (made[0].address,), servers=SERVERS, plan="auto")
        results = pool(WORLD).call(play, WORLD, train, setting)
    assert all(torch.equal(r["weights"], results[0]["weights"]) for r in results)
    assert all(r["digests"] == results[0]["digests"] for r in results), "each plan is taken up by all at one step"
    first, slow, quick = results[0]["decided"]
    for r in results:
        assert len([one for one in r["decisions"] if "switched to plan" in one]) >= 3
        at_first, before, behind, after = (r["sent"][step] for step in (0, first, slow, quick))
        assert 0 < behind < 4 * 40 * 40, "on slow links payloads are compressed"
        assert at_first != before
        assert min(before, after) > behind, "on quick links they are larger"
    lines = [[one for one in r["decisions"] if "links have changed" in one] for r in results]
    assert lines[0] == lines[1], "all ranks come to it by themselves, in one step, for one reason"
    assert len(lines[0]) == 1
    number = int(lines[0][0].split()[1].rstrip(":"))
    assert first < number <= slow, lines[0]
    said = lines[0][0].split(" to ")[1].split(" Mb/s")[0]
    found = [float(rate) for node in said.split(", ") for rate in node.split("/")]
    assert found == pytest.approx([PAYLOAD * LOW_BPS / 1e6] * len(found), rel=0.25), "part was read as it changed"
    assert any("as seen in steps, and not" in one for one in results[0]["decisions"]), "what comes in tells of the recovery"


# ---- who hears what, when

def tell_in_turn(rank: int, world: int, slow: list[list[bool]]) -> list[list[float]]:
    """Of each step, the words that are acted upon after it: (step of the row, step of the act)."""
    channel = RowChannel(Members(), 20.0)
    looks, acted = Reports(channel.rows()), list[list[float]]()
    try:
        for step, flags in enumerate(slow):
            looks.step(10.0, 1.0)
            if rows := looks.read():
                acted.append([rows[0].request, step])
            if looks.due and (rows := looks.send(step, 5.0 if flags[rank] else 20.0)):
                acted.append([rows[0].request, step])
        looks.read()
        return acted
    finally:
        channel.close()


def test_rows_are_acted_upon_at_once_only_where_all_wait_for_them() -> None:
    slow = [[False, False], [True, True], [True, False], [False, True], [True, True], [False, False]]
    told = pool(WORLD).call(tell_in_turn, WORLD, slow)
    assert told[0] == told[1] == [[0, 1], [1, 1], [2, 3], [3, 4], [4, 4]]

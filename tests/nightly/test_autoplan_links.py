"""Plan "auto" on changing links: all ranks detect the change in the same step, plan again without measuring, and switch
together. Interface counters and collective costs are fabricated, because one machine has no links. Steps, probes, plans and
switches are real.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, data, mlp, play
from support.autotuning import any_step_time
from support.rank_pool import pool
from torch import nn

from commlayer.autotune import job_actions
from commlayer.autotune.measure import calibration, probes
from commlayer.autotune.measure.calibration import CollectiveCosts
from commlayer.observe.link_monitor import DOWN, PAYLOAD, SETTLED, UP
from commlayer.planner.model import LinearCost
from commlayer.records import digest

WORLD, SERVERS = 2, 2
HIGH_BPS, LOW_BPS = 8e7, 5e6
SLOW_S = 0.3
"""Of a step on the slow link."""
MOST = 2000
"""Steps, if no plan is found."""


class Interface:
    """A network interface whose counters show a steady rate."""

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
    """Steps of 30 ms. Under the first plan they become slow until another plan is active; then they are fast again."""
    line, sent, decided, digests = Interface(HIGH_BPS), list[float](), list[int](), list[str]()
    with pytest.MonkeyPatch.context() as patch, any_step_time():
        patch.setattr(probes, "counter_reader", lambda _interface: line.counters)
        patch.setattr(job_actions, "is_loopback", lambda _host: False)  # as between machines
        # A second each, so no plan uses them.
        patch.setattr(calibration, "measure_collectives", lambda _groups,
                      _budget_s: CollectiveCosts(LinearCost(1.0), LinearCost(1.0)))
        model = mlp()
        wrapped = run.wrap(model)
        session, optimizer = run.sessions[0], torch.optim.SGD(model.parameters(), lr=0.05)

        def step(sleep_s: float) -> None:
            x, y = data(run.rank, len(digests))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), y)
            time.sleep(sleep_s)
            if sleep_s == SLOW_S:  # on a slow line all wait
                session.inspect.context.worker.counters.exposed_s += sleep_s
            before = session.metrics()["sent_nbytes"]
            loss.backward()
            optimizer.step()
            sent.append(session.metrics()["sent_nbytes"] - before)
            digests.append(digest(session.inspect.plan))

        step(0.03)
        for bps, sleep_s in ((HIGH_BPS, 0.03), (LOW_BPS, SLOW_S), (HIGH_BPS, 0.03)):
            line.change(bps)
            left = digests[-1]
            # Faster uploads are known only after a probe.
            while (digests[-1] == left or (len(decided) == 2 and sent[-1] <= sent[decided[1]])) and len(digests) < MOST:
                step(sleep_s)
            decided.append(len(digests))
            line.change(HIGH_BPS)  # steps show how long they take on it
            for _ in range(SETTLED + 1):
                step(0.03)
        return {"decisions": session.inspect.decisions(), "digests": digests, "decided": decided, "sent": sent,
                "weights": torch.cat([p.detach().view(-1) for p in model.parameters()])}


def rates_in(text: str) -> list[float]:
    """The rates of all nodes in a decision's text, each node's upload before its download."""
    pairs = re.findall(r"([\d.]+)/([\d.]+)", text.split(" Mb/s")[0])
    nodes = pairs if len(pairs) > 1 else WORLD * pairs  # nodes with equal rates are written once
    return [float(rate) for pair in nodes for rate in pair]


@pytest.mark.parametrize("how", ["module", "ddp"])
def test_all_ranks_switch_together_when_links_become_slow_and_when_they_recover(how: str) -> None:
    with coordinators(1, WORLD, SERVERS) as servers:
        setting = Setting(how, (servers[0].address,), servers=SERVERS, plan="auto")
        results = pool(WORLD).call(play, WORLD, train, setting)
    assert all(torch.equal(r["weights"], results[0]["weights"]) for r in results)
    assert all(r["digests"] == results[0]["digests"] for r in results), "all ranks switch at one step"
    first, slow, fast = results[0]["decided"]
    for r in results:
        switches = [line for line in r["decisions"] if "switched to plan" in line]
        assert len(switches) >= 3
        assert switches[0].startswith(f"step {first}: switched to plan {r['digests'][first]}: "), (switches[0], first)
        at_first, before, after, recovered = (r["sent"][step] for step in (0, first, slow, fast))
        assert 0 < after < 4 * 40 * 40, "on slow links payloads are compressed"
        assert at_first != before
        assert min(before, recovered) > after, "on fast links they are larger"
    lines = [[line for line in r["decisions"] if "links have changed" in line] for r in results]
    assert lines[0] == lines[1], "all ranks decide it in one step, for one reason"
    (line,) = lines[0]
    assert first < int(line.split()[1].rstrip(":")) <= slow, line
    before, changed = (rates_in(part) for part in line.split(" from ")[1].split(" to "))
    uploads = changed[UP::2]
    assert uploads == pytest.approx([PAYLOAD * LOW_BPS / 1e6] * len(uploads), rel=0.25), "a part was read while it changed"
    # Data arrive as fast as the nodes send them, so they show nothing about the download links.
    assert changed[DOWN::2] == before[DOWN::2], "only uploads are known to be slower"
    recovery = [line for line in results[0]["decisions"] if "probed the links" in line]
    assert any("instead of" in line for line in recovery), "a probe shows the recovery"

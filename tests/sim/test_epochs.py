"""Epochs under simulated faults: no contribution is lost or doubled, all members get equal results, and no wait is endless."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from commlayer.cluster.servers.bucket_sum import BucketSum
from commlayer.cluster.servers.summation import Summation
from commlayer.engine.epochs import schedule
from commlayer.engine.epochs.schedule import Change, Proposal, decide
from tests.sim import simulated_epochs
from tests.sim.simulated_epochs import Member, Server, World

SCHEDULES = 250


def test_epochs_hold_under_faults() -> None:
    counts = Counter[str]()
    for seed in range(SCHEDULES):
        world = World(seed)
        assert world.run() == [], seed
        counts += world.counts
    for what in ("joins", "plans", "servers killed", "dies", "hangs", "is dropped by mistake", "leaves", "connections broken"):
        assert counts[what] > SCHEDULES / 20, f"hardly any: {what}"


def forgets(self: Server) -> None:
    self.changes.clear()
    START(self)


def unknown(self: Summation, member: int, buckets: Any, first: int) -> list[Any]:
    return []


def hasty(self: Member) -> None:
    self.acks = {generation: set(range(self.world.servers)) for generation in self.acks}
    GO(self)


def at_once(generation: int, step: int, proposals: Any) -> Change | None:
    change = decide(generation, step, proposals)
    return change and change._replace(first=step)


def closes_early(self: BucketSum) -> bool:
    return self.sum.open and len(self.contributors()) >= max(1, len(self.members) - 1)


GO, START = Member.go, Server.start


@pytest.mark.parametrize(("where", "name", "wrong", "line"), [
    (BucketSum, "remove", lambda self, gone: None, "further"),
    (Summation, "add", unknown, "breach"),
    (Member, "_observe", lambda self, header, body: self.totals.__setitem__(header.bucket, header.weight), "otherwise"),
    (Member, "go", hasty, ""),
    (schedule, "decide", at_once, ""),
    (Server, "start", forgets, ""),
    (BucketSum, "complete", property(closes_early), ""),
    (simulated_epochs.World, "_break", lambda self, key: None, "further"),
], ids=["waits for the dead", "a joiner is unknown", "a joiner misses a decision", "no acknowledgements", "a change at once",
        "a server forgets changes", "closes early", "requests are not repeated"])
def test_broken_protocols_are_found(where: Any, name: str, wrong: Callable[..., Any], line: str,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, wrong)
    monkeypatch.setattr(simulated_epochs, "MOST_EVENTS", 8000)
    assert any(line in problem for seed in range(300) for problem in run(seed))


def run(seed: int) -> list[str]:
    try:
        return World(seed).run()
    except Exception as error:  # any exception of the state machines is a finding
        return [repr(error)]


def test_rows_decide_on_the_first_valid_proposal() -> None:
    joins, plan = Proposal(3, joins=7), Proposal(3, plan=2)
    assert decide(2, 10, [None, joins, plan, None]) == Change(3, -1, 2, 12)
    assert decide(2, 10, [None, joins]) == Change(3, 7, 0, 12)
    assert decide(3, 10, [joins, plan]) is None, "proposals for a generation that was decided meanwhile are made again"
    assert decide(2, 10, []) is None

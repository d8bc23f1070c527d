"""Epochs under simulated faults: no contribution is lost or doubled, all members get equal results, and no wait is endless."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from commlayer.cluster.membership.rendezvous_service import RendezvousService
from commlayer.cluster.servers.bucket_sum import BucketSum
from commlayer.cluster.servers.summation import Summation
from commlayer.engine.epochs.schedule import Joining, Proposal, decide
from tests.sim import simulated_epochs
from tests.sim.simulated_epochs import Member, Server, State, World

SCHEDULES = 150
TWO_LOSSES = 524
"""Seed of a schedule in which a member calls a barrier and is then lost, while another loss has ended that barrier for some."""


EARLY_ROW = 1120
"""Seed of a schedule in which a joining worker could send its first row while the row before it is still in flight."""
LATE_NEWS = 3018837
"""Seed of a schedule in which a worker joins that knows a former member from an older epoch, and not that it has left."""
LATE_WRITE = 3002197
"""Seed of a schedule in which a joining worker ends its transfer after a giver was lost, and has not heard of that."""
SELECTED = TWO_LOSSES, EARLY_ROW, LATE_NEWS, LATE_WRITE


def test_epochs_hold_under_faults() -> None:
    counts = Counter[str]()
    for seed in (*range(SCHEDULES), *SELECTED):
        world = World(seed)
        assert world.run() == [], seed
        counts += world.counts
    for what in ("joins", "joins at once", "plans", "servers killed", "dies", "hangs", "is dropped by mistake", "leaves",
                 "connections broken"):
        assert counts[what] > SCHEDULES / 20, f"hardly any: {what}"


def unknown(self: Summation, number: int, member: int) -> None:
    self.joined[number - 1 :] = [member]


def forgets(self: Server) -> None:
    self.journal = self.journal._replace(joined=())
    START(self)


def begins_early(self: Member, joining: Joining) -> bool:
    return self.is_known()


def closes_early(self: BucketSum) -> bool:
    return self.sum.open and len(self.contributors()) >= max(1, len(self.members) - 1)


def of_wrong_step(self: Member, new: tuple[int, ...]) -> State:
    return STATE(self, new)._replace(step=self.step + 1)


def of_wrong_totals(self: Member, new: tuple[int, ...]) -> State:
    return STATE(self, new)._replace(totals=tuple(self.world.totals_of(self.plan).items()))


def of_all_members(self: Member, new: tuple[int, ...]) -> State:
    return STATE(self, new)._replace(members=(*self.members, *new))


def row_with_new_count(self: Member) -> int:
    return self.joining[-1].number if self.joining else self.joined


def once(self: Member) -> None:
    for transfer in self.transfers:
        transfer.over = transfer.over or bool(transfer.among)
    RELAY(self)


def of_absent_values(self: RendezvousService, request: Any, absent: Any) -> list[tuple[int, str]]:
    lost = LOST(self, request, absent)
    return [(rank, why) for rank, why in lost if rank in {rank for _, rank in absent}]


LOST = RendezvousService.never_written
START, STATE, RELAY = Server.start, Member.state_for, Member.relay
BROKEN: list[tuple[str, Any, str, Any, str]] = [
    ("a server waits for the dead", BucketSum, "remove", lambda self, gone: None, "further"),
    ("a joining worker is unknown", Summation, "add", unknown, "breach"),
    ("a server forgets joins", Server, "start", forgets, "breach"),
    ("a server does not register again", Server, "registered", lambda self: 1, "breach"),
    ("a sum closes early", BucketSum, "complete", property(closes_early), ""),
    ("requests are not repeated", World, "_break", lambda self, key: None, "further"),
    ("no acknowledgements", Member, "is_known", lambda self: True, "breach"),
    ("a worker begins with the acknowledgements", Member, "is_due", begins_early, ""),
    ("two workers are let in at once", Member, "is_occupied", False, "differ"),
    ("a row counts the joining worker too early", Member, "row_joined", property(row_with_new_count), "breach"),
    ("the state does not wait for the row", Member, "can_give", lambda self: True, "breach"),
    ("the state has members that have left", Member, "state_for", of_all_members, "differ"),
    ("the state is of another step", Member, "state_for", of_wrong_step, ""),
    ("the state has other totals", Member, "state_for", of_wrong_totals, "breach"),
    ("the state is given once", Member, "relay", once, "further"),
    ("a barrier needs only those that have not called it", RendezvousService, "never_written", of_absent_values, "further"),
    ("no barrier before a plan", World, "meet", lambda self, what, member: True, "breach"),
]


@pytest.mark.parametrize(("where", "name", "wrong", "line"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_broken_protocols_are_found(where: Any, name: str, wrong: Callable[..., Any], line: str,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, wrong)
    monkeypatch.setattr(simulated_epochs, "MOST_EVENTS", 8000)
    assert any(line in problem for seed in (*SELECTED, *range(300)) for problem in run(seed))


def run(seed: int) -> list[str]:
    try:
        return World(seed).run()
    except Exception as error:  # any exception of the state machines is a finding
        return [repr(error)]


def test_rows_decide_on_the_lowest_valid_proposal() -> None:
    first, second = Proposal(3, 7, 5), Proposal(3, 8, 6)
    assert decide(2, 12, [second, first, Proposal(0, 0, 0)]) == [Joining(3, 7, 5, 12, 7)]
    assert decide(3, 12, [first, second]) == [], "a proposal for a number that was decided meanwhile is made again"
    assert decide(2, 12, []) == []

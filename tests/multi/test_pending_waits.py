"""Who does not come to where homes meet: who counts as waiting, whom the coordinator blames, and how long collectives wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from support.coordinators import WAIT_S, all_opened, quick, until  # noqa: F401  (a fixture)
from support.membership import PATIENCE_S, several
from support.site_groups import joined, met

from commlayer.cluster import epoch_change, membership, sites
from commlayer.cluster.membership import State
from commlayer.cluster.messages import Overdue
from commlayer.cluster.sites import PendingWait, WaitTracker
from commlayer.errors import CommError, PeerLost

LIMIT_S = 300.0


# ---- whom the coordinator blames


def blamed(state: State, *rows: tuple[int, dict[int, float]], limit_s: float = LIMIT_S, ago_s: dict[int, float] | None = None
           ) -> list[int]:
    meetings = [PendingWait(rank, waited_s, limit_s) for rank, waited_s in rows]
    return sorted(epoch_change.hung_in_store(state, meetings, LIMIT_S, ago_s or {}, PATIENCE_S))


ALL = {0: 400.0, 1: 390.0, 3: 380.0}
SAID = [
    ("no rank waits", [], []),
    ("all others", [(2, ALL)], [2]),
    ("half of all who are here", [(2, {0: 400.0, 1: 390.0})], [2]),
    ("in several places", [(2, {0: 400.0, 3: 390.0}), (2, ALL)], [2]),
    ("two at once", [(1, {0: 400.0, 3: 390.0}), (2, {0: 400.0, 3: 390.0})], [1, 2]),
    ("one alone", [(2, {0: 900.0})], []),
    ("not half for so long", [(2, {0: 900.0, 1: 290.0, 3: 280.0})], []),
    ("who waits itself", [(2, ALL), (0, {2: 10.0})], []),
    ("who waits where nobody says for whom", [(0, {2: 400.0, 3: 390.0}), (1, {2: 400.0, 3: 390.0}), (-1, {0: 400.0})], [1]),
    ("who waits for another that hangs", [(2, {0: 400.0, 1: 390.0}), (3, {0: 400.0, 1: 390.0}), (2, {3: 10.0})], [2]),
    ("too few would be left", [(rank, {0: 400.0, 9: 400.0, 8: 400.0}) for rank in (1, 2, 3)], []),
    ("strangers' waiting", [(2, {0: 400.0, 8: 400.0, 9: 400.0})], []),
    ("a stranger", [(9, ALL)], []),
]


@pytest.mark.parametrize(("rows", "results"), [row[1:] for row in SAID], ids=[row[0] for row in SAID])
def test_blamed_is_for_whom_half_have_waited_and_who_waits_for_nobody(
        rows: list[tuple[int, dict[int, float]]], results: list[int]) -> None:
    assert blamed(several(), *rows) == results


def test_as_many_must_be_left_as_go_on_also_without_those_whose_time_is_not_over() -> None:
    rows = [(2, {0: 400.0, 1: 390.0}), (3, {0: 100.0, 1: 90.0})]
    assert blamed(several(least=2), *rows) == [2]
    assert blamed(several(least=3), *rows) == []


@pytest.mark.parametrize(("ago_s", "limit_s", "results"), [
    (0.5, LIMIT_S, []), (59.0, LIMIT_S, []), (60.0, LIMIT_S, [2]), (500.0, LIMIT_S, [2])])
def test_who_waited_for_another_has_time_to_come_behind_that(ago_s: float, limit_s: float, results: list[int]) -> None:
    """As a rank that waited for a third rank, which has left."""
    assert blamed(several(), (2, ALL), limit_s=limit_s, ago_s={2: ago_s, 0: 0.0}) == results


def test_where_a_group_may_take_longer_it_may() -> None:
    assert blamed(several(), (2, ALL), limit_s=500.0) == []
    assert blamed(several(), (2, ALL), limit_s=1.0) == [2]
    assert blamed(several(), (2, {0: 200.0, 1: 200.0, 3: 200.0}), limit_s=1.0) == [], "the coordinator's own holds"


@pytest.mark.parametrize("state", [several(least=0), several(unable=3), several(least=4)], ids=["all", "unable", "least"])
def test_where_all_must_stay_nobody_is_blamed(state: State) -> None:
    assert blamed(state, (2, ALL)) == []


def summing(state: State) -> State:
    place = msgspec.structs.replace(state.registrations["s0"], overdue=Overdue(7))
    return msgspec.structs.replace(state, registrations={**state.registrations, "s0": place})


def test_while_a_sum_waits_that_counts_alone() -> None:
    """While a rank may still wait in it."""
    assert blamed(summing(several()), (2, {0: 400.0, 1: 390.0})) == []
    assert blamed(several(), (2, {0: 400.0, 1: 390.0})) == [2]


def test_in_a_sum_nobody_waits_where_all_others_wait_elsewhere() -> None:
    """There are contributions of ranks that are in a collective, or dead."""
    assert blamed(summing(several()), (2, ALL)) == [2]
    assert blamed(summing(several()), (2, {0: 400.0, 1: 390.0}), (-1, {3: 5.0})) == [2]
    assert blamed(summing(several()), (2, {0: 400.0, 3: 390.0}), (1, {0: 400.0, 3: 390.0})) == [1, 2]
    state = membership.evict(summing(several(least=1)), ["w0", "w3"], "killed")
    assert blamed(state, (2, {1: 400.0})) == [2]


def test_the_dead_neither_wait_nor_hang() -> None:
    state = membership.evict(several(), ["w0"], "killed")
    assert blamed(state, (2, {0: 400.0, 1: 390.0})) == []
    assert blamed(state, (2, {1: 400.0, 3: 390.0}), (0, {1: 400.0, 3: 390.0})) == [2]


# ---- who waits


def rows(meetings: WaitTracker, now: float) -> list[PendingWait]:
    return sorted(meetings.pending(now), key=lambda one: one.rank)


def test_a_wait_goes_on_from_call_to_call_until_its_name_is_there_or_nobody_asks() -> None:
    meetings = WaitTracker()
    meetings.add(0, [("a/2", 2), ("a/3", 3)], 5.0, 10.0)
    meetings.add(1, [("a/2", 2)], 7.0, 12.0)
    meetings.add(0, [("a/2", 2), ("a/3", 3)], 5.0, 13.0)
    assert rows(meetings, 14.0) == [PendingWait(2, {0: 4.0, 1: 2.0}, 7.0), PendingWait(3, {0: 4.0}, 5.0)]
    meetings.written(["a/2"])
    assert rows(meetings, 14.0) == [PendingWait(3, {0: 4.0}, 5.0)]
    assert rows(meetings, 13.0 + sites.WAIT_EXPIRES_S) == []
    meetings.add(0, [("a/3", 3)], 5.0, 50.0)
    assert rows(meetings, 51.0) == [PendingWait(3, {0: 1.0}, 5.0)], "it starts again"


def test_who_has_been_told_that_somebody_is_gone_waits_for_nobody_there() -> None:
    meetings = WaitTracker()
    for rank in (0, 1):
        meetings.add(rank, [("a/2", 2), ("a/3", 3)], 5.0, 10.0)
    meetings.remove(0, ["a/2", "a/3", "a/4"])
    assert rows(meetings, 11.0) == [PendingWait(2, {1: 1.0}, 5.0), PendingWait(3, {1: 1.0}, 5.0)]
    meetings.remove(1, ["a/2"])
    assert rows(meetings, 11.0) == [PendingWait(3, {1: 1.0}, 5.0)]


def test_who_says_that_a_name_is_anothers_keeps_nobody_from_saying_whose_it_is() -> None:
    meetings = WaitTracker()
    meetings.add(3, [("a/2", 0)], 5.0, 10.0)
    meetings.add(0, [("a/2", 2)], 5.0, 11.0)
    assert rows(meetings, 12.0) == [PendingWait(0, {3: 2.0}, 5.0), PendingWait(2, {0: 1.0}, 5.0)]


def test_one_that_waits_for_very_much_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "MAX_KEYS", 4)
    meetings = WaitTracker()
    for first in (0, 6, 12):
        meetings.add(3, [(f"{n}", 2) for n in range(first, first + 6)], 5.0, 10.0)
    assert len(rows(meetings, 11.0)) <= 8
    meetings.add(0, [("a/2", 2)], 5.0, 10.0)
    assert PendingWait(2, {0: 1.0}, 5.0) in rows(meetings, 11.0)


# ---- at a coordinator


def waiting(desks: Iterable[tuple[Any, int]], name: str, rank: int) -> tuple[list[threading.Thread], list[CommError]]:
    """At these desks, as those ranks, for a part of that rank's."""
    errors = list[CommError]()

    def one(desk: Any, mine: int) -> None:
        try:
            desk.request(time.monotonic() + WAIT_S, want=[(name, rank)], rank=mine, limit_s=0.1)
        except CommError as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=each) for each in desks]
    for thread in threads:
        thread.start()
    return threads, errors


def test_who_wait_hear_that_the_one_who_hangs_is_done_without(opened: list[Any]) -> None:
    # A late heartbeat of a busy machine is no death.
    coordinator, desks = met(opened, 3, min_workers=2, deadline_s=0.2, reconnect_s=0.1, dead_after_s=WAIT_S)
    members = joined(opened, coordinator, 3)
    threads, errors = waiting([(desks[0], 0), (desks[1], 1)], "group/0/2", 2)
    for thread in threads:
        thread.join(WAIT_S)
    assert [type(error) for error in errors] == [PeerLost] * 2
    assert (errors[0].code, errors[0].peer) == ("E-PEER-LOST", "worker 2")
    assert "2 others waited 0.2 s for it" in errors[0].what
    until(lambda: members[0].newest.generation > 1, "a newer view")
    assert [m.rank for m in members[0].newest.members] == [0, 1]


def test_where_all_must_stay_nobodys_waiting_counts(opened: list[Any]) -> None:
    coordinator, desks = met(opened, 2)
    assert desks[0].request(time.monotonic() + WAIT_S, want=[("a/1", 1)], wait=False, rank=0, limit_s=0.1).values == (None,)
    assert coordinator._rendezvous.pending_waits() == []


def test_a_home_waits_in_nobody_elses_name(opened: list[Any]) -> None:
    coordinator, desks = met(opened, 3, min_workers=1, deadline_s=0.2, reconnect_s=0.1)
    joined(opened, coordinator, 3)
    waiting([(desks[0], 0), (desks[0], 1)], "group/0/2", 2)
    until(lambda: bool(coordinator._rendezvous.pending_waits()), "a rank waits")
    assert {rank for one in coordinator._rendezvous.pending_waits() for rank in one.waited_s} == {0}


def test_what_comes_while_it_is_looked_at_twice_is_in_time(opened: list[Any]) -> None:
    coordinator, desks = met(opened, 3, min_workers=2, deadline_s=0.2, reconnect_s=0.1)
    joined(opened, coordinator, 3)
    coordinator._heartbeat_s = WAIT_S
    threads, errors = waiting([(desks[0], 0), (desks[1], 1)], "group/0/2", 2)
    until(lambda: bool(coordinator._late), "a rank seems to hang")
    assert list(coordinator._late) == [2]
    desks[2].request(time.monotonic() + WAIT_S, put=[("group/0/2", b"part")])
    for thread in threads:
        thread.join(WAIT_S)
    assert (errors, coordinator._rendezvous.pending_waits()) == ([], [])


# ---- how long collectives wait for that

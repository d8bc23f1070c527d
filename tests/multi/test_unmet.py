"""Who does not come to where homes meet: who counts as waiting, whom the coordinator blames, and how long collectives wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.coordinators import WAIT_S, all_opened, quick, until  # noqa: F401  (a fixture)
from support.membership import PATIENCE_S, several
from support.site_groups import joined, met

from commlayer import config
from commlayer.cluster import epoch_change, membership, site_process_group, sites
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.membership import State
from commlayer.cluster.messages import Overdue
from commlayer.cluster.site_process_group import RelayedGroup, WorldStore
from commlayer.cluster.sites import PendingWait, WaitTracker
from commlayer.engine import regroup, start
from commlayer.engine.agreement import Vote
from commlayer.engine.connection import WaitsFor
from commlayer.engine.regroup import EpochMessages, MembershipChange, NewerEpoch, StateRelay
from commlayer.engine.step import EpochChanged
from commlayer.errors import CommError, PeerLost
from commlayer.records import Member, Plan, View

LIMIT_S = 300.0


# ---- whom the coordinator blames


def blamed(state: State, *rows: tuple[int, dict[int, float]], limit_s: float = LIMIT_S, ago_s: dict[int, float] | None = None
           ) -> list[int]:
    meetings = [PendingWait(rank, waited_s, limit_s) for rank, waited_s in rows]
    return sorted(epoch_change.hung_in_store(state, meetings, LIMIT_S, ago_s or {}, PATIENCE_S))


ALL = {0: 400.0, 1: 390.0, 3: 380.0}
SAID = [
    ("nobody waits", [], []),
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


@pytest.mark.parametrize(("rows", "found"), [row[1:] for row in SAID], ids=[row[0] for row in SAID])
def test_blamed_is_for_whom_half_have_waited_and_who_waits_for_nobody(
        rows: list[tuple[int, dict[int, float]]], found: list[int]) -> None:
    assert blamed(several(), *rows) == found


def test_as_many_must_be_left_as_go_on_also_without_those_whose_time_is_not_over() -> None:
    rows = [(2, {0: 400.0, 1: 390.0}), (3, {0: 100.0, 1: 90.0})]
    assert blamed(several(least=2), *rows) == [2]
    assert blamed(several(least=3), *rows) == []


@pytest.mark.parametrize(("ago_s", "limit_s", "found"), [
    (0.5, LIMIT_S, []), (59.0, LIMIT_S, []), (60.0, LIMIT_S, [2]), (500.0, LIMIT_S, [2])])
def test_who_waited_for_another_has_time_to_come_behind_that(ago_s: float, limit_s: float, found: list[int]) -> None:
    """As one that was held up by a third, who is gone now."""
    assert blamed(several(), (2, ALL), limit_s=limit_s, ago_s={2: ago_s, 0: 0.0}) == found


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
    """As long as somebody may be the one that waits in it."""
    assert blamed(summing(several()), (2, {0: 400.0, 1: 390.0})) == []
    assert blamed(several(), (2, {0: 400.0, 1: 390.0})) == [2]


def test_in_a_sum_nobody_waits_where_all_others_wait_elsewhere() -> None:
    """Contributions lie there of who has gone on to a collective, or is dead."""
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
    assert rows(meetings, 51.0) == [PendingWait(3, {0: 1.0}, 5.0)], "it begins anew"


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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def dead(coordinator: Coordinator) -> list[int]:
    return sorted(p.rank for p in coordinator._state.registrations.values() if p.dead)


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
    # Nobody is dead for a heartbeat that a busy machine makes late.
    coordinator, desks = met(opened, 3, min_workers=2, deadline_s=0.2, reconnect_s=0.1, dead_after_s=WAIT_S)
    members = joined(opened, coordinator, 3)
    threads, errors = waiting([(desks[0], 0), (desks[1], 1)], "group/0/2", 2)
    for thread in threads:
        thread.join(WAIT_S)
    assert [type(error) for error in errors] == [PeerLost] * 2
    assert (errors[0].code, errors[0].peer) == ("E-PEER-LOST", "worker 2")
    assert "0.2 s to where 2 others waited" in errors[0].what
    until(lambda: members[0].newest.generation > 1, "a newer view")
    assert [m.rank for m in members[0].newest.members] == [0, 1]


def test_where_all_must_stay_nobodys_waiting_counts(opened: list[Any]) -> None:
    coordinator, desks = met(opened, 2)
    assert desks[0].request(time.monotonic() + WAIT_S, want=[("a/1", 1)], wait=False, rank=0, limit_s=0.1).values == (None,)
    assert coordinator._rendezvous.pending_waits() == []


def test_what_is_said_in_a_view_that_is_over_has_not_come(opened: list[Any]) -> None:
    coordinator, desks = met(opened, 3, min_workers=1)
    members = joined(opened, coordinator, 3)
    members[2].leave("it breaks off")
    coordinator._rendezvous._waits.add(0, [("a/1", 1)], 30.0, time.monotonic())
    desks[1].request(time.monotonic() + WAIT_S, put=[("a/1", b"late")], view=1)
    assert [one.rank for one in coordinator._rendezvous.pending_waits()] == [1]
    desks[1].request(time.monotonic() + WAIT_S, put=[("a/1", b"in time")], view=2)
    assert coordinator._rendezvous.pending_waits() == []


def test_who_was_held_up_by_one_that_hangs_is_not_sent_away_behind_it(opened: list[Any]) -> None:
    """0 waits for 1, and 2 and 3 wait for both. When 1 is gone, 0 is on its way."""
    coordinator, _ = met(opened, 4, min_workers=1, deadline_s=30.0, reconnect_s=20.0)
    joined(opened, coordinator, 4)
    clock = Clock()
    coordinator._clock = coordinator._rendezvous._clock = clock
    meetings = coordinator._rendezvous._waits
    with coordinator._lock:
        for _ in range(5):
            meetings.add(0, [("pair/1", 1)], 30.0, clock.now)
            for rank in (2, 3):
                meetings.add(rank, [("world/0", 0), ("world/1", 1)], 30.0, clock.now)
            clock.now += 9.0
            coordinator._drop_awaited()
        assert dead(coordinator) == [1]
        meetings.remove(0, ["pair/1"])
        for now, found in ((54.0, [1]), (63.0, [1]), (65.0, [1]), (66.0, [0, 1])):
            clock.now = now
            for rank in (2, 3):
                meetings.add(rank, [("world/0", 0)], 30.0, now)
            coordinator._drop_awaited()
            assert dead(coordinator) == found


def test_a_home_waits_in_nobody_elses_name(opened: list[Any]) -> None:
    coordinator, desks = met(opened, 3, min_workers=1, deadline_s=0.2, reconnect_s=0.1)
    joined(opened, coordinator, 3)
    waiting([(desks[0], 0), (desks[0], 1)], "group/0/2", 2)
    until(lambda: bool(coordinator._rendezvous.pending_waits()), "somebody waits")
    assert {rank for one in coordinator._rendezvous.pending_waits() for rank in one.waited_s} == {0}


def test_what_comes_while_it_is_looked_at_twice_is_in_time(opened: list[Any]) -> None:
    coordinator, desks = met(opened, 3, min_workers=2, deadline_s=0.2, reconnect_s=0.1)
    joined(opened, coordinator, 3)
    coordinator._heartbeat_s = WAIT_S
    threads, errors = waiting([(desks[0], 0), (desks[1], 1)], "group/0/2", 2)
    until(lambda: bool(coordinator._late), "somebody seems to hang")
    assert list(coordinator._late) == [2]
    desks[2].request(time.monotonic() + WAIT_S, put=[("group/0/2", b"part")])
    for thread in threads:
        thread.join(WAIT_S)
    assert (errors, coordinator._rendezvous.pending_waits()) == ([], [])


# ---- how long collectives wait for that


def test_a_collective_says_its_limit_and_waits_longer() -> None:
    said = dict[str, Any]()

    class Desk:
        def request(self, deadline: float, **asked: Any) -> Any:
            said.update(asked, left_s=deadline - time.monotonic())
            raise CommError("it is over")

    group = RelayedGroup(Desk(), "test", [4, 7], 1, 20.0)  # type: ignore[arg-type]
    group.patience_s = 1000.0
    with pytest.raises(RuntimeError, match="it is over.*E-COMM"):
        group.barrier().wait()
    group.shutdown()
    assert (said["rank"], said["limit_s"], said["want"]) == (7, 20.0, [("test/0/0", 4)])
    assert 1000.0 < said["left_s"] <= 1020.0


@pytest.mark.parametrize("act", ["agree", "go over", "send away"])
def test_under_local_steps_others_may_be_longer_to_the_step_and_no_longer_behind_it(
        monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    """Each waits for every word longer than the limit that it tells: for the verdict."""
    said = dict[str, tuple[float, float]]()
    view = View(2, (Member(0, 0, "a", 1), Member(1, 1, "b", 2)), ())

    class Words:
        newest = view

        def tell(self, view: View, what: str, mine: int, word: Vote, until: float, **how: Any) -> list[Vote]:
            said[what] = how["limit_s"], until - time.monotonic()
            if what == "ready" and act == "go over":
                raise NewerEpoch
            return [word, word]

    plan = SimpleNamespace(local_steps=8)
    made = SimpleNamespace(id=0, waits=WaitsFor(3.0, 13.0), plan=plan, lets_in=True, uplink=SimpleNamespace(
        view=view, subscribe_epochs=lambda _: None, finished=lambda _: -1))
    worker = SimpleNamespace(step=7, weight=1.0, plan=plan, intact=True, unheard=lambda: ())
    one = MembershipChange(made, quick(reconnect_s=60.0, deadline_s=600.0), "home")  # type: ignore[arg-type]
    one._words = Words()  # type: ignore[assignment]
    if act == "agree":
        with pytest.raises(EpochChanged):
            one._agree(worker)  # type: ignore[arg-type]
    elif act == "go over":
        one._agreed = view, [Vote(7, 1.0)] * 2
        monkeypatch.setattr(regroup, "plan_of", lambda *_: Plan("job", (), local_steps=8))
        with pytest.raises(NewerEpoch):
            one._go_over(worker, plan)  # type: ignore[arg-type]
    else:
        one._send_away(view)
    limits = {what.rstrip("0"): round(limit_s) for what, (limit_s, _) in said.items()}
    assert limits == {"agree": {"step": 4800, "sure": 4800}, "go over": {"ready": 600},
                      "send away": {"ready": 600, "left": 600}}[act]
    assert all(limit_s + 60.0 < wait_s for limit_s, wait_s in said.values())


def test_who_waits_in_torchs_store_says_so() -> None:
    said = dict[str, Any]()

    class Desk:
        def request(self, deadline: float, **asked: Any) -> Any:
            said.update(asked)
            raise CommError("it is over")

    store = WorldStore(Desk(), 20.0, 7)  # type: ignore[arg-type]
    for wait, limit_s in ((lambda: store.get("a"), 20.0), (lambda: store.wait(["a"], timedelta(seconds=3.0)), 3.0)):
        with pytest.raises(RuntimeError, match="it is over.*E-COMM"):
            wait()
        assert said == {"want": [("a", -1)], "rank": 7, "limit_s": limit_s}


def test_who_gives_or_takes_what_a_new_home_must_know_says_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[tuple[int, float]]()

    class Desk:
        def request(self, deadline: float, **asked: Any) -> Any:
            said.append((asked.get("rank", -1), asked.get("limit_s", 0.0)))
            rows = {"state": msgspec.msgpack.encode(4), "part0": b"data"}
            word = msgspec.msgpack.encode((1, 1.0))
            return SimpleNamespace(values=[rows.get(name.split("/")[1], word) for name, _ in asked.get("want", ())])

    monkeypatch.setattr(site_process_group, "kv_client", Desk)
    view = View(2, (Member(0, 0, "a", 1), Member(7, 1, "b", 2)), ())
    relay = StateRelay(EpochMessages(view, 0.0), view, 7, Vote(1, 1.0), 20.0, 5.0)
    assert relay.take(bytes) == b"data"
    assert said == [(7, 20.0)] * 4


@pytest.mark.parametrize(("least", "patience_s"), [(0, 0.0), (2, 60.0 + 10.0 + 3.0)])
def test_homes_that_others_may_leave_wait_for_the_verdict(
        monkeypatch: pytest.MonkeyPatch, least: int, patience_s: float) -> None:
    given = dict[str, Any]()
    monkeypatch.setattr(site_process_group, "init_world", lambda *_, **how: given.update(how))
    settings = config.read_config({"min_workers": least, "join": "127.0.0.1:1"}, environ={}, cwd="/nonexistent")
    monkeypatch.setattr(start, "read_config", lambda: settings)
    launch = config.read_launch({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    start.begin_world(launch, "gloo")
    assert (given["skip_lost"], given["patience_s"]) == (least > 0, patience_s)

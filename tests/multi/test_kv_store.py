"""What homes leave at a coordinator: each has its part of the room, and what was left in a view goes when that is over."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.coordinators import WAIT_S, Failures, all_opened, quick  # noqa: F401  (a fixture)
from support.site_groups import joined, met

from commlayer.cluster import kv_store, messages
from commlayer.cluster.audit import Audit
from commlayer.cluster.client import CoordinatorChannel
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.rendezvous_service import RendezvousService
from commlayer.cluster.site_client import KvClient
from commlayer.cluster.site_process_group import PART_NBYTES
from commlayer.errors import CommError, PeerLost

PART = bytes(PART_NBYTES)


def told(coordinator: Coordinator) -> messages.StatusReply:
    """As the doctor reads it."""
    link = CoordinatorChannel(coordinator.address, quick().token, None)
    try:
        return link.call("Status", messages.StatusRequest(), messages.StatusReply, WAIT_S)
    finally:
        link.close()


def until(what: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_S
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return what()


def there(desk: KvClient, *names: str) -> list[bool]:
    results = desk.request(time.monotonic() + WAIT_S, want=[(name, messages.ANY) for name in names], wait=False).values
    return [value is not None for value in results]


# ---- views


def test_who_is_gone_is_named_to_whoever_waits_for_it_and_not_the_coordinator_that_tells(opened: list[Any]) -> None:
    coordinator, desks = met(opened, 3, min_workers=2)
    members = joined(opened, coordinator, 3)
    members[2].leave("it breaks off")
    with pytest.raises(PeerLost, match="it breaks off.*E-PEER-LOST") as one:
        desks[0].request(time.monotonic() + WAIT_S, want=[("regroup2/ready/2", 2)])
    assert one.value.peer == "worker 2"
    with pytest.raises(CommError, match="worker 2: .*it breaks off.*E-PEER-LOST") as one:
        desks[2].request(time.monotonic() + WAIT_S, want=[("regroup2/ready/0", 0)])
    assert one.value.peer == f"coordinator {coordinator.address}", "its own row is there"


def test_of_who_has_finished_it_is_said_that_it_has(opened: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """At a job's end one is always the first: that is no loss."""
    coordinator, _ = met(opened, 3, min_workers=1)
    with caplog.at_level(logging.INFO, "commlayer"):
        members = joined(opened, coordinator, 3)
        members[1].leave()
        members[2].leave("it breaks off")
    assert [line for r in caplog.records if (line := r.getMessage()).startswith("continuing")] == [
        "continuing with 2 workers; left: worker 1 (finished)", "continuing with 1 workers; left: worker 2"]


def test_what_was_left_in_a_view_is_there_until_all_who_stay_have_gone_over_to_the_next(opened: list[Any]) -> None:
    coordinator, desks = met(opened, 3, min_workers=2)
    members = joined(opened, coordinator, 3)
    soon = time.monotonic() + WAIT_S
    for rank, desk in enumerate(desks):
        desk.request(soon, put=[(f"world0/group/0/{rank}", PART)], add=("world0/count", 1))
    desks[2].request(soon, put=[("regroup1/part0/2", PART)], view=1)
    members[2].leave("it breaks off")
    stay, names = members[:2], ["world0/group/0/0", "world0/group/0/2", "world0/count", "regroup1/part0/2"]
    assert until(lambda: all(member.newest.generation == 2 for member in stay))
    desks[0].request(soon, put=[("view2/group/0/0", PART)])

    def beaten() -> None:
        """Each has sent its state again."""
        for place in [place for place in coordinator._state.registrations.values() if place.present]:
            for _ in range(2):
                before = coordinator._state.registrations[place.join.token].seen_s
                assert until(functools.partial(heard, place.join.token, before))

    def heard(token: str, since_s: float) -> bool:
        return coordinator._state.registrations[token].seen_s > since_s

    stay[0].view = stay[0].newest
    beaten()
    assert there(desks[0], *names) == [True] * 4, "one has not switched, and may ask for them"
    stay[1].view = stay[1].newest
    assert until(lambda: there(desks[0], *names) == [False] * 4)
    assert there(desks[1], "view2/group/0/0") == [True]
    assert coordinator._rendezvous._store.nbytes < 2 * PART_NBYTES


def test_who_asks_whether_a_running_job_has_a_free_place_is_told_so(opened: list[Any]) -> None:
    coordinator, _ = met(opened, 3, min_workers=1)
    assert (told(coordinator).free_seats, told(coordinator).closed_reason) == (0, ""), "it has not begun"
    members = joined(opened, coordinator, 3)
    lines = told(coordinator)
    assert (lines.free_seats, lines.full) == (0, True)
    assert lines.closed_reason.startswith("the job is running with all its 3 workers")
    members[2].leave("it breaks off")
    lines = told(coordinator)
    assert (lines.free_seats, lines.full, lines.closed_reason) == (1, False, "")
    for member in members[:2]:
        member.leave()
    assert (told(coordinator).free_seats, told(coordinator).closed_reason) == (0, "the job is over")


def test_a_running_job_without_homes_has_none(opened: list[Any]) -> None:
    opened.append(coordinator := Coordinator(quick(min_workers=1), workers=2))
    joined(opened, coordinator, 2, elastic=False)
    assert "admits no new members: worker 0, worker 1 cannot" in told(coordinator).closed_reason
    assert not told(coordinator).full
    opened.append(coordinator := Coordinator(quick(), workers=1))
    joined(opened, coordinator, 1)
    assert "no new members" in told(coordinator).closed_reason


# ---- how much


def test_homes_that_store_too_much_are_named(opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MAX_KEPT_NBYTES", 4 * PART_NBYTES)
    monkeypatch.setattr(kv_store, "EACH_NBYTES", 0)
    _, desks = met(opened, 2)
    soon = time.monotonic() + WAIT_S
    desks[1].request(soon, put=[("mine", PART)])
    for number in range(2):
        desks[0].request(soon, put=[(f"{number}", PART)])
    with pytest.raises(CommError, match=r"home [ab] \(pid \d+\) stores most \(328.*E-QUOTA"):
        desks[1].request(soon, put=[("one more", PART)])


def test_a_pause_of_the_server_is_no_silence_of_homes() -> None:
    now = [0.0]
    service = RendezvousService(2, 10.0, dict, Audit(""), clock=lambda: now[0], noticed_s=3.0)
    anna, ben = (msgspec.structs.replace(messages.site_request(1, name=name), certificate=name) for name in ("anna", "ben"))
    again = msgspec.structs.replace(messages.site_request(1, name="anna"), certificate="anna")
    for one in (anna, ben):
        service.register(one)
    now[0] = 30.0
    assert service.supersede(again, {}, 30.0) == (frozenset(), "")
    service.tick(still_s=30.0)
    assert service.supersede(again, {}) == (frozenset(), "")
    now[0] = 60.0
    assert service.supersede(again, {})[1]

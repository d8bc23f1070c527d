"""Sites that meet at a coordinator, and process groups between them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from commlayer.cluster.calls import messages
from commlayer.cluster.calls.site_client import KvClient, SiteLease
from commlayer.cluster.membership import client
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.processes.relayed_group import RelayedGroup
from support.coordinators import WAIT_S, Failures, Opened, quick

HOMES = 3


def asked(name: str, workers: int = 1, place: int = messages.ANY) -> messages.Join:
    return messages.site_request(workers, place, name=name)


class _Leaving:
    def __init__(self, attendance: SiteLease, desk: KvClient) -> None:
        self._attendance, self.desk = attendance, desk

    def close(self, why: str = "the test is over") -> None:
        self._attendance.close(why)


def leave(opened: Opened, desk: KvClient, why: str = "the test is over") -> None:
    """That site leaves the job."""
    next(thing for thing in opened if isinstance(thing, _Leaving) and thing.desk is desk).close(why)


def met(opened: Opened, workers: int = HOMES, **settings: Any) -> tuple[Coordinator, list[KvClient]]:
    """A coordinator, and a store client of each site, by rank."""
    coordinator = opened.add(Coordinator(quick(**settings), workers=workers))

    def one(name: str) -> tuple[int, KvClient]:
        attendance = SiteLease(coordinator.address, quick(), asked(name), lambda _: None)
        seat, desk = attendance.register_and_wait(WAIT_S), KvClient(coordinator.address, quick(), attendance.request.token)
        opened.extend((_Leaving(attendance, desk), desk))
        return seat.rank, desk

    with ThreadPoolExecutor(workers) as pool:
        desks = dict(pool.map(one, "abcdefgh"[:workers]))
    return coordinator, [desks[rank] for rank in range(workers)]


def joined(opened: Opened, coordinator: Coordinator, workers: int, *, elastic: bool = True) -> list[client.Membership]:
    def one(rank: int) -> client.Membership:
        request = messages.worker_request("job", rank, workers, plan=b"a plan", elastic=elastic)
        return client.join(coordinator.address, request, quick(), Failures())

    with ThreadPoolExecutor(workers) as pool:
        members = list(pool.map(one, range(workers)))
    opened.extend(members)
    return members


def together(desks: list[KvClient], act: Callable[[RelayedGroup, int], Any], timeout_s: float = 20.0) -> list[Any]:
    """The result of each site in a group of all."""
    groups = [RelayedGroup(desk, "test", range(len(desks)), rank, timeout_s) for rank, desk in enumerate(desks)]
    try:
        with ThreadPoolExecutor(len(desks)) as pool:
            return list(pool.map(act, groups, range(len(desks))))
    finally:
        for group in groups:
            group.shutdown()


def options(**fields: Any) -> Any:
    return type("Options", (), fields)()

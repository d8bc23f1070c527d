"""Requests of sites while their coordinator is killed and restarted with its journal, and members that join afterwards."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.coordinators import Failures, quick, until
from support.keys import Folders
from support.sites import WAIT_S

from commlayer.cluster.calls import messages
from commlayer.cluster.calls.coordinator_channel import CoordinatorChannel
from commlayer.cluster.calls.site_client import KvClient, SiteLease
from commlayer.cluster.membership import client
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.membership.coordinator_journal import NAME, CoordinatorJournal


class Restarted:
    """A coordinator in this process. A process holds its journal's folder to its end, so each start has a copy of the last."""

    def __init__(self, folder: Path, opened: list[Any], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self._folder, self._settings, self._number = folder, settings, 0
        self._answered: dict[CoordinatorChannel, float] = {}
        call = CoordinatorChannel.call

        def timed(channel: CoordinatorChannel, method: str, *args: Any) -> Any:
            reply = call(channel, method, *args)
            if method == "Heartbeat":
                self._answered[channel] = time.monotonic()
            return reply

        monkeypatch.setattr(CoordinatorChannel, "call", timed)
        self.coordinator = self._new(0)
        opened.append(self)

    def _new(self, port: int) -> Coordinator:
        journal = CoordinatorJournal(str(self._folder / f"{self._number}"))
        coordinator = Coordinator(quick(port=port, reconnect_s=WAIT_S, **self._settings), workers=3, journal=journal)
        self._began_s = time.monotonic()
        return coordinator

    def kill(self) -> None:
        """As nearly as possible: requests get no answer, and the journal does not learn of it."""
        shutil.copytree(self._folder / f"{self._number}", self._folder / f"{self._number + 1}")
        self.coordinator.close()

    def start(self) -> None:
        self._number += 1
        self.coordinator = self._new(int(self.coordinator.address.rpartition(":")[2]))

    def wait_for_heartbeats(self, members: int) -> None:
        """Of that many members, since this start."""
        until(lambda: sum(at_s > self._began_s for at_s in self._answered.values()) >= members, "heartbeats")

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in (self._folder / f"{self._number}").iterdir())

    def close(self) -> None:
        self.coordinator.close()


COUNT = "count", messages.ANY


class Site:
    """A site of one worker."""

    def __init__(self, address: str, opened: list[Any], config: Any, name: str) -> None:
        self._lease = SiteLease(address, config, messages.site_request(1, name=name), lambda _: None)
        self.seat = self._lease.register_and_wait(WAIT_S)
        self._kv = KvClient(address, config, self._lease.request.token)
        self._address, self._config, self._opened = address, config, opened
        opened.append(self)

    def join(self) -> client.Membership:
        request = messages.worker_request("job", self.seat.rank, self.seat.world, plan=b"a plan", elastic=True)
        member = client.join(self._address, request, self._config, Failures())
        self._opened.append(member)
        return member

    def request(self, **fields: Any) -> messages.KvReply:
        return self._kv.request(time.monotonic() + WAIT_S, **fields)

    @property
    def end_reason(self) -> str:
        return self._lease.why

    def close(self) -> None:
        self._kv.close()
        self._lease.close("the test is over")


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "TLS"])
def test_requests_in_flight_are_answered_after_the_restart_and_a_new_site_joins(
    keys: bool, folders: Folders, opened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, worker = ({"keys": str(folder), "token": "secret-of-this-test"} if keys else {}
                      for folder in (folders.server, folders.worker))
    config = quick(reconnect_s=WAIT_S, **worker)
    served = Restarted(tmp_path, opened, monkeypatch, min_workers=2, **server)
    address = served.coordinator.address
    with ThreadPoolExecutor(3) as pool:
        sites = sorted(pool.map(lambda name: Site(address, opened, config, name), "abc"), key=lambda site: site.seat.rank)
        members = list(pool.map(Site.join, sites))
        assert served.files[0] == NAME
        sites[0].request(put=[(("group/0", 0), bytes(160 << 10))], add=(COUNT, 1))
        waits = [pool.submit(site.request, want=[("group/1", 2)], add=(COUNT, 1)) for site in sites[:2]]
        until(lambda: sites[2].request(want=[COUNT]).values == (b"3",), "both have added")
        served.kill()
        late = pool.submit(sites[2].request, put=[(("group/1", 2), b"at last")], add=(COUNT, 1))
        served.start()
        assert late.result(WAIT_S).sum == 4
        assert [wait.result(WAIT_S).values for wait in waits] == [(b"at last",)] * 2
    served.wait_for_heartbeats(3)
    assert sites[1].request(want=[("group/0", 0), COUNT]).values == (bytes(160 << 10), b"4")
    members[2].leave("an error")
    sites[2].close()
    newcomer = Site(address, opened, config, "d")
    assert (newcomer.seat.rank, newcomer.seat.world, newcomer.seat.joins) == (3, 3, True)
    served.kill()
    served.start()
    members.append(newcomer.join())
    assert [member.rank for member in members[-1].epoch.members] == [0, 1, 3]
    assert newcomer.request(want=[COUNT]).values == (b"4",)
    assert [site.end_reason for site in (*sites[:2], newcomer)] == [""] * 3
    served.wait_for_heartbeats(3)
    for member in (*members[:2], members[3]):
        member.leave()
    for site in (*sites[:2], newcomer):
        site.close()
    assert served.coordinator.over.wait(WAIT_S)
    served.close()
    assert served.files == [], "the job is over"

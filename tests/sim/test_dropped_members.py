"""A member that a server drops: which one is blamed, who receives the reason, and that no frame can evict another member."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.coordinators import WAIT_S, Failures, Opened, all_opened, quick  # noqa: F401  (a fixture)
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)
from support.mailbox import InboxTransport
from support.membership import beat, elastic, members, running, server, ticked, worker
from support.meshes import soon
from support.serving import JOB, PLAN, Pair, epoch_of
from support.summation import Doubles, ask, hub_of_a_test, next_stalled, push, served, service  # noqa: F401  (a fixture)

from commlayer import records
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.messages import FINISHED, Heartbeat, PeerExit
from commlayer.cluster.membership import client, epoch_change, membership
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.servers.data_server import DataServer
from commlayer.cluster.servers.gather import ROW_BUCKET
from commlayer.cluster.servers.summation_server import Joins, Stalled
from commlayer.config import host_port
from commlayer.errors import PeerLost, Refused
from commlayer.records import Member
from commlayer.transport.endpoint import Settings
from commlayer.transport.handshake import Hello
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, key

DATA = records.encode(PLAN)
WRONG_CODEC = ("got codec 99, weight 1.0 and total weight 0.0; the codec must be 1, and weights finite and not negative "
               "[E-FRAME]")


def test_slow_member_is_not_blamed_for_a_dropped_one(hub: Any) -> None:
    ends = served(hub, Doubles(), stall_s=0.0)
    bad = push(1, 1.0, codec=99)
    ends[0].send(SERVER_BASE, push(0, 1.0).header, push(0, 1.0).body)
    ends[1].send(SERVER_BASE, bad.header, bad.body)
    while not (stalled := next_stalled(ends[0])).dropped:
        pass
    wrong = WRONG_CODEC.replace("weight 1.0", "weight 2.0").replace("be 1,", "be 7,")
    assert (stalled.missing, dict(stalled.dropped)) == ((1, 2), {1: wrong})


@pytest.mark.parametrize(("regroups", "dropped", "errors"), [
    (False, {0: "noise"}, [("worker 0", 3, 0, "E-PEER-LOST")]),
    (False, {}, []),
    (True, {0: "noise"}, []),
])
def test_worker_names_the_dropped_member_unless_the_job_is_elastic(
        regroups: bool, dropped: dict[int, str], errors: list[tuple[Any, ...]], opened: Opened) -> None:
    job = Pair(opened)
    job.ups[1]._elastic = regroups
    job.report_stall(Stalled(0, 3, (0, 1), dropped))
    assert job.stalled.wait(WAIT_S)
    assert [(error.peer, error.step, error.bucket, error.code) for error in job.failures.errors] == errors
    assert all("by server 0" in error.what and dropped[0] in error.what for error in job.failures.errors)


class Served:
    """A server of three, and the transports of some. The coordinator's newest epoch has worker 3, but not worker 1."""

    def __init__(self, things: list[Any]) -> None:
        self.serving = DataServer("127.0.0.1", 0, quick(heartbeat_s=0.05))
        things.append(self.serving)
        self.epoch, self._things = epoch_of(DATA, self.serving, 3), things
        first, _, last = self.epoch.members
        self.newest = msgspec.structs.replace(self.epoch, generation=3, members=(first, last, Member(3, 3, "host")))
        self.serving.start(self.epoch, DATA, 0, await_epoch=lambda *_: self.newest)

    def end(self, rank: int) -> InboxTransport:
        end = InboxTransport(Hello(JOB.digest(), rank, messages.hash_plan_bytes(DATA)))
        self._things.append(end)
        end.dial(SERVER_BASE, host_port(self.serving.address), soon())
        return end

    def report(self, end: InboxTransport, joins: Joins) -> str:
        """Reports a joining worker, and returns the server's answer."""
        header = Header(Kind.PLAN, 1, step=joins.number, flags=Flag.ABANDON, sender=end.rank)
        answer = end.recv(SERVER_BASE, key(header._replace(kind=Kind.PLAN_OK)))
        end.send(SERVER_BASE, header, msgspec.msgpack.encode(joins))
        return bytes(end.wait(answer, soon()).body).decode()

    def ended(self, end: InboxTransport) -> PeerLost:
        with pytest.raises(PeerLost) as error:
            end.wait(end.recv(SERVER_BASE), soon())
        return error.value

    def dropped(self) -> list[tuple[str, str]]:
        return [(gone.peer, gone.reason) for gone in self.serving.report()["dropped"]]


def test_dropped_member_is_reported_and_logged_immediately(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    job = Served(opened)
    end = job.end(1)
    end.send(SERVER_BASE, Header(Kind.PUSH, 1, 0, 0, codec=99, sender=1, weight=1.0), b"")
    job.ended(end)
    assert job.dropped() == [("worker 1", WRONG_CODEC)]
    assert [r.getMessage() for r in caplog.records if "dropped worker 1: " in r.getMessage()]


def test_removed_member_is_disconnected_and_not_reported(opened: Opened) -> None:
    job = Served(opened)
    end = job.end(1)
    job.serving.change(job.newest)
    job.ended(end)
    assert job.dropped() == []
    with pytest.raises(Refused, match="E-EPOCH-ENDED"):
        job.end(1)


def test_reported_worker_joins_and_the_report_can_be_repeated(opened: Opened) -> None:
    job = Served(opened)
    for reporter in (0, 2):
        assert job.report(job.end(reporter), Joins(1, 3, 3)) == ""
    assert job.serving.sums is not None
    cell = job.serving.sums.cells[0]
    assert (cell.members, cell.joining) == ((0, 2), {3: 1})
    job.end(3)


def test_workers_that_come_and_go_need_no_further_room(opened: Opened) -> None:
    job = Served(opened)
    end, first, bounds = job.end(0), job.newest.members[0], set()
    for number in range(1, 9):
        new = 2 + number
        job.newest = msgspec.structs.replace(job.epoch, generation=1 + 2 * number, members=(first, Member(new, new, "host")))
        assert job.report(end, Joins(number, new, job.newest.generation)) == ""
        assert job.serving.sums is not None
        bounds.add(job.serving.sums.cells[ROW_BUCKET].ops.bound)
    assert len(bounds) == 1


@pytest.mark.parametrize(("joins", "problem"), [
    (Joins(2, 3, 3), "0 workers have joined"),
    (Joins(1, 1, 3), "0 workers have joined"),
    (Joins(1, 3, 4), "the coordinator's newest epoch is 3, not 4"),
    (Joins(1, 4, 3), "the coordinator has not admitted it"),
    (Joins(0, 3, 3), "0 workers have joined"),
])
def test_member_that_reports_a_false_join_is_dropped(joins: Joins, problem: str, opened: Opened) -> None:
    job = Served(opened)
    with pytest.raises(PeerLost):
        job.report(job.end(0), joins)
    line = f"reports that worker {joins.member} joins as number {joins.number}, but {problem} [E-FRAME]"
    assert job.dropped() == [("worker 0", line)]


def says(teller: str, peer: str, state: Any) -> Any:
    return membership.heartbeat(state, teller, 1.0, Heartbeat(teller, dropped=(PeerExit(peer, "noise"),)))[0]


def test_report_of_a_server_ends_a_registration_and_the_others_continue() -> None:
    state = epoch_change.next_epoch(says("s0", "worker 1", elastic()))
    assert state.registrations["w1"].dead == "was dropped (by server 0): noise"
    assert members(state) == (2, [0, 2, 3])
    assert epoch_change.next_epoch(says("s0", "worker 1", state)) == state, "said again it changes nothing"


def test_dropped_member_is_a_failure_for_all_with_fixed_members() -> None:
    _, pulse = membership.heartbeat(says("s0", "worker 1", running(3)), "w0", 2.0)
    assert pulse.failed == (PeerExit("worker 1", "was dropped (by server 0): noise"),)


@pytest.mark.parametrize(("teller", "peer"), [
    ("w2", "worker 1"), ("s0", "server 0"), ("s0", "server 1"), ("stranger", "worker 1")])
def test_only_servers_can_report_a_dropped_worker(teller: str, peer: str) -> None:
    state = says(teller, peer, running(3, servers=2))
    assert not any(place.dead for place in state.registrations.values())


def test_reports_of_a_departed_server_are_ignored() -> None:
    dead = ticked(beat(ticked(running(2), 0.0, 9.0), "w0", "w1", now=9.0), 10.0, 10.0)
    left = membership.leave(running(2), "s0", FINISHED)
    for state in (dead, left):
        assert not says("s0", "worker 1", state).registrations["w1"].dead


def test_quoted_reason_is_one_line() -> None:
    state, _ = membership.heartbeat(running(2), "s0", 1.0, Heartbeat("s0", dropped=(PeerExit("worker 1", "a\nb"),)))
    assert state.registrations["w1"].dead == "was dropped (by server 0): a\\nb"


def test_client_certificate_cannot_register_as_a_server() -> None:
    state = membership.State(2, 1)
    refused = membership.join(state, server(0, certificate="anna", dials_only=True), 0.0)[1]
    assert re.search(r"anna\b.*E-CERTIFICATE-USE", refused.error)
    assert membership.join(state, server(0, certificate="ben"), 0.0)[1].error == ""
    assert membership.join(state, worker(1, certificate="anna", dials_only=True), 0.0)[1].error == ""


def test_data_connection_under_the_rank_of_another_node_is_refused(
        folders: Folders, opened: Opened, tmp_path: Path) -> None:
    serving = opened.add(DataServer("127.0.0.1", 0, quick(token="of-this-job", keys=str(folders.server))))
    (mine, *rest), names = (epoch_of(DATA, serving).members), [Keys(str(f)).own.name for f in (folders.worker, folders.second)]
    mine = msgspec.structs.replace(mine, certificate=names[0])
    epoch = msgspec.structs.replace(epoch_of(DATA, serving), members=(mine, *rest))
    serving.start(epoch, DATA, 0)
    other, own = (InboxTransport(Hello(JOB.digest(), 0, messages.hash_plan_bytes(DATA)), settings=Settings(
        secret="of-this-job", keys=Keys(str(f)))) for f in (folders.second, folders.worker))
    opened.extend((other, own))
    with pytest.raises(Refused, match=rf"{names[1]}\b.*worker 0 .*{names[0]}\b.*E-RANK\]"):
        other.dial(SERVER_BASE, host_port(serving.address), soon())
    own.dial(SERVER_BASE, host_port(serving.address), soon())


def test_coordinator_checks_the_certificate_itself(folders: Folders) -> None:
    """Whatever the request says."""
    coordinator = Coordinator(quick(token="of-this-job", keys=str(folders.server)), workers=1, servers=1)
    request = messages.server_request("127.0.0.1:1")
    try:
        with pytest.raises(Refused, match="E-CERTIFICATE-USE"):
            client.join(coordinator.address, request, quick(token="of-this-job", keys=str(folders.dials)), Failures())
    finally:
        coordinator.close()

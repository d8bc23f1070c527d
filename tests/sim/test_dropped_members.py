"""A member that a server drops: which one is blamed, who receives the reason, and that no frame can evict another member."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from support.coordinators import WAIT_S, Failures, Opened, all_opened, quick  # noqa: F401  (a fixture)
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)
from support.mailbox import InboxTransport
from support.membership import beat, elastic, members, running, server, ticked, worker
from support.meshes import soon
from support.serving import JOB, PLAN, Pair, epoch_of
from support.summation import Doubles, hub_of_a_test, next_stalled, push, served  # noqa: F401  (a fixture)

from commlayer import records
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.messages import FINISHED, Heartbeat, PeerExit
from commlayer.cluster.membership import client, epoch_change, membership
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.servers.data_server import DataServer
from commlayer.cluster.servers.summation_server import Stalled
from commlayer.config import host_port
from commlayer.errors import Refused, find_error_code
from commlayer.transport.endpoint import Settings
from commlayer.transport.handshake import Hello
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE

DATA = records.encode(PLAN)


def test_slow_member_is_not_blamed_for_a_dropped_one(hub: Any) -> None:
    ends = served(hub, Doubles(), stall_s=0.0)
    bad = push(1, 1.0, codec=99)
    ends[0].send(SERVER_BASE, push(0, 1.0).header, push(0, 1.0).body)
    ends[1].send(SERVER_BASE, bad.header, bad.body)
    while not (stalled := next_stalled(ends[0])).dropped:
        pass
    assert (stalled.missing, [*stalled.dropped], find_error_code(stalled.dropped[1])) == ((1, 2), [1], "E-FRAME")


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
        folders: Folders, opened: Opened) -> None:
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

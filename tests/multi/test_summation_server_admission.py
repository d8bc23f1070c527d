"""A summation server between its coordinator and its workers: whom it admits, plans that it cannot serve, what it tells."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from support.attached import assert_refused, outcome
from support.coordinators import WAIT_S, Failures, all_opened, quick, until  # noqa: F401  (a fixture)
from support.meshes import FAR
from support.serving import JOB, PLAN, Pair, changed, plan_of, view_of

from commlayer import records
from commlayer.cluster import client, messages, uplink
from commlayer.cluster.child_processes import EmbeddedServer
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.summation_server import DataServer, Stalled
from commlayer.config import host_port
from commlayer.errors import InvalidInput, RecordError, Refused
from commlayer.planner import default_plan
from commlayer.records import Job, Slice, TensorInfo
from commlayer.transport.endpoint import StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Header, Kind

UNFIT = [
    (b"\x00", "E-PLAN-REFUSED", "plan of worker 0: JSON is malformed"),
    (records.encode(plan_of(ranks_per_node=0)), "E-PLAN-REFUSED", "plan of worker 0: ranks_per_node is 0"),
    (records.encode(plan_of(ranks_per_node=3)), "E-PLAN-REFUSED", "plan of worker 0: ranks_per_node is 3"),
    (records.encode(changed(owner=7)), "E-PLAN-REFUSED", "plan of worker 0: bucket 0: owner 7"),
    (records.encode(changed(slices=(Slice(0, 0, 1 << 62),))), "E-PLAN-REFUSED",
     f"plan of worker 0: bucket 0: {1 << 62} elements"),
    (records.encode(plan_of(servers=2)), "E-PLAN-REFUSED", "plan of worker 0: it is for 2 servers, but the job has 1"),
    (records.encode(changed(codec="zip()")), "E-CODEC-NAME", "codec 'zip()'"),
]


@pytest.mark.parametrize(("plan", "code", "line"), UNFIT)
def test_a_plan_that_cannot_be_served_is_one_line_for_the_server_and_its_workers(plan: bytes, code: str,
                                                                                line: str, opened: list[Any]) -> None:
    serving = DataServer("127.0.0.1", 0, quick())
    opened.append(serving)
    with pytest.raises(InvalidInput) as caught:
        serving.start(view_of(plan, serving), plan, 0)
    assert caught.value.what.startswith(line)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    opened.append(StreamTransport(Hello(JOB.digest(), 0, messages.digest_of(plan))))
    with pytest.raises(Refused) as refused:
        opened[-1].dial(SERVER_BASE, host_port(serving.address), time.monotonic() + WAIT_S)
    assert str(refused.value) == f"server 0: {caught.value}"
    assert (refused.value.peer, refused.value.code) == ("server 0", code)


def test_only_members_of_the_view_are_admitted(opened: list[Any]) -> None:
    serving = DataServer("127.0.0.1", 0, quick())
    opened.append(serving)
    plan = records.encode(PLAN)
    serving.start(view_of(plan, serving), plan, 0)
    for rank in (0, 2, SERVER_BASE + 1):
        opened.append(StreamTransport(Hello(JOB.digest(), rank, messages.digest_of(plan))))
        where, deadline = host_port(serving.address), time.monotonic() + WAIT_S
        if rank == 0:
            opened[-1].dial(SERVER_BASE, where, deadline)
        else:
            line = outcome(lambda where=where, deadline=deadline: opened[-1].dial(SERVER_BASE, where, deadline))
            assert_refused(line, "E-RANK", "server 0: ", "2 workers")


def test_a_peer_may_send_ahead_only_as_much_as_is_allowed(opened: list[Any]) -> None:
    local, present = StreamTransport(Hello("job", 0)), StreamTransport(Hello("job", 1))
    opened.extend((local, present))
    local.limit_kept(1500)
    present.dial(0, local.listen(), time.monotonic() + WAIT_S)
    for step in range(2):
        present.send(0, Header(Kind.DATA, step=step, sender=1), bytes(900))
    line = outcome(lambda: present.wait(present.recv(0), time.monotonic() + WAIT_S))
    assert_refused(line, "E-PEER-LOST", "PeerLost: ", "worker 0: connection")


@pytest.mark.parametrize(("address", "code"), [("10.1.2.3:7000", "E-PLAIN-TEXT"), ("nowhere", "E-ADDRESS")])
def test_workers_dial_no_server_where_plain_text_must_not_go(address: str, code: str, opened: list[Any]) -> None:
    coordinator = Coordinator(quick(), servers=1)
    opened.append(coordinator)
    request = messages.worker_request("job", 0, 1, plan=records.encode(PLAN))
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(client.join, coordinator.address, messages.server_request(address), quick(), Failures())
        with pytest.raises(RecordError) as caught:
            uplink.connect(coordinator.address, request, quick())
        opened.append(SimpleNamespace(close=serving.result(WAIT_S).leave))
    assert caught.value.what.startswith("address of server 0: ")
    assert address.partition(":")[0] in caught.value.what
    assert caught.value.code == code
    assert coordinator._state.registrations[request.token].left == f"could not reach a server: {caught.value}"


@pytest.mark.parametrize("exchanges", [0, 1])
def test_who_waits_hears_how_many_exchanges_one_has_made_that_ended_in_order(
        exchanges: int, opened: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's word that it waits for somebody may be older than what that one sent last, so it alone says nothing."""
    monkeypatch.setattr("commlayer.cluster.summation_server.REPEAT_S", 0.05)
    job = Pair(opened)
    payload = Header(Kind.PUSH, 1, 0, 0, codec=1, sender=1, weight=1.0, used=1)
    job.ups[1].transport.send(SERVER_BASE, payload, b"looked at after worker 0's")
    assert job.stalled.wait(WAIT_S), "the server has named the missing worker once"
    job.ups[0].close(exchanges=exchanges)
    assert job.left.get(timeout=WAIT_S) == ("worker 0", exchanges)
    job.stalled.clear()
    assert job.stalled.wait(WAIT_S), "it is sent again"
    assert job.failures.errors == []
    job.ups[1].subscribe(job.failures, lambda *_: None, lambda *report: job.left.put(report), 1)
    assert job.left.get(timeout=WAIT_S) == ("worker 0", exchanges), "so does a worker that switches to another plan"


def test_what_the_coordinator_judges_reaches_who_follows_later_too(opened: list[Any]) -> None:
    """It says so once. The worker that heard it may be on its way to another view, and has no use for it any more."""
    job = Pair(opened)
    assert job.ups[1]._membership is not None
    job.ups[1]._membership._on_reply(messages.HeartbeatReply(failed=(messages.PeerExit("worker 0", "no heartbeat for 4.0 s"),)))
    assert job.failure().peer == "worker 0"
    after = Failures()
    job.ups[1].subscribe(after, lambda *_: None, lambda *_: None, 65537)
    assert [error.peer for error in after.errors] == ["worker 0"]


def test_a_state_may_be_larger_than_all_payloads(opened: list[Any]) -> None:
    complete = Job((TensorInfo("weight", (6 << 20,)),))
    plan = default_plan(complete, codec="topk(ratio=0.01)", path="service", servers=1, ranks_per_node=1, fuse_nbytes=4096,
                        cut_nbytes=32 << 20)
    up = Pair(opened, plan, WAIT_S, FAR).ups[0]
    state = up.fetch_state(0, 0, 0)
    assert len(state) > 24 << 20
    up.put_state(0, 0, 0, state)


def test_a_servers_own_failure_reaches_its_workers_with_its_reason(opened: list[Any]) -> None:
    job = Pair(opened)
    server: Any = job.serving._server
    server._send_stalled(1, Stalled(0, 3, (), failed="failed: MemoryError: no room"))
    failure = job.failure()
    assert (failure.peer, failure.step, failure.bucket) == ("server 0", 3, 0)
    assert "MemoryError: no room" in failure.what


def test_a_server_that_training_starts_for_another_coordinator_takes_any_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The set port is the coordinator's, which may be on the same machine."""
    environments: list[dict[str, str]] = []

    def look(*_: Any, env: dict[str, str], **__: Any) -> Callable[[], None]:
        environments.append(env)
        raise OSError

    monkeypatch.setattr(subprocess, "Popen", look)
    for join in ("", "127.0.0.1:7000"):
        with pytest.raises(OSError, match="^$"):
            EmbeddedServer.start(quick(port=7000), join=join)
    assert [env["COMMLAYER_PORT"] for env in environments] == ["7000", "0"]

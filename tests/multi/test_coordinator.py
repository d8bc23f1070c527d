"""The control plane over real sockets: joins, heartbeats, leaves; killed and stopped processes and a held GIL; embedded
servers.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import select
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.attached import assert_refused, outcome
from support.coordinators import (
    PATIENT_S,
    WAIT_S,
    Failures,
    Opened,
    Process,
    quick,
    until,
)
from support.internals import leave_silently, process_of, sidecar_of, watches_of
from support.keys import (
    Folders,
)

from commlayer.cluster.calls import coordinator_channel, messages
from commlayer.cluster.calls.site_client import SiteLease
from commlayer.cluster.membership import client, membership
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.membership.coordinator_journal import CoordinatorJournal
from commlayer.cluster.processes.child_processes import EmbeddedServer
from commlayer.cluster.servers import worker_client
from commlayer.errors import CommError, DeadlineExceeded, PeerLost, Refused, exit_reason
from commlayer.records import Epoch, ServerInfo
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE

PLAN = b"a plan"


def join_all(address: str, world: int, failures: list[Failures] | None = None, *, elastic: bool = False, **fields: Any
             ) -> list[client.Membership]:
    config = quick(**fields)

    def one(rank: int) -> client.Membership:
        request = messages.worker_request("job", rank, world, plan=PLAN if rank == 0 else b"", elastic=elastic)
        return client.join(address, request, config, failures[rank] if failures else Failures())

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def test_many_workers_join_the_same_epoch(opened: Opened) -> None:
    world = 64
    coordinator = opened.add(Coordinator(quick(dead_after_s=60.0)))
    # Slow heartbeats: 64 clients in one process share one interpreter.
    members = join_all(coordinator.address, world, heartbeat_s=2.0, dead_after_s=60.0)
    opened.extend(members)
    assert len({messages.pack(m.epoch) for m in members}) == 1
    assert [m.rank for m in members] == list(range(world))
    assert {m.plan for m in members} == {PLAN}


@pytest.mark.parametrize("who", ["worker", "home"])
def test_unresolvable_host_name_is_named(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_channel, "NAME_S", 0.3)
    address, config = "no-such-host.invalid:7000", quick(insecure=True, join_deadline_s=60.0)
    attendance = SiteLease(address, config, messages.site_request(1, messages.ANY), lambda _: None)
    meet = {"home": lambda: attendance.register_and_wait(60.0),
            "worker": lambda: client.join(address, messages.worker_request("job", 0, 1), config, Failures())}[who]
    with pytest.raises(CommError, match=r"'no-such-host\.invalid'.*E-ADDRESS") as report:
        meet()
    assert report.value.peer == f"coordinator {address}"
    assert not isinstance(report.value, DeadlineExceeded)


def test_plan_is_sent_once_even_after_its_registration_was_freed(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bytes(range(256)) * (3 * messages.PART_NBYTES // 256 + 1)
    coordinator = opened.add(Coordinator(quick()))
    polls: queue.Queue[messages.Join] = queue.Queue()
    parts: queue.Queue[messages.PlanPart] = queue.Queue()
    call = coordinator_channel.CoordinatorChannel.call

    def watched(self: Any, method: str, request: Any, *rest: Any) -> Any:
        if method in ("Join", "PlanPart"):
            (polls if method == "Join" else parts).put(request)
        return call(self, method, request, *rest)

    monkeypatch.setattr(coordinator_channel.CoordinatorChannel, "call", watched)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.join, coordinator.address, messages.worker_request("job", 0, 2, plan=plan), quick(),
                              Failures())
        sent = [polls.get(timeout=WAIT_S) for _ in range(3)]
        leave_silently(coordinator, sent[0].token)
        sent += [polls.get(timeout=WAIT_S) for _ in range(3)]
        opened.append(client.join(coordinator.address, messages.worker_request("job", 1, 2), quick(), Failures()))
        opened.append(waiting.result(WAIT_S))
    assert {p.plan for p in sent} == {b""}
    assert {p.plan_digest for p in sent} == {messages.hash_plan_bytes(plan)}
    assert sorted(p.begin for p in parts.queue) == [i * messages.PART_NBYTES for i in range(4)]
    assert [m.plan for m in opened[1:]] == [plan, plan]


def test_join_deadline_names_missing_members_and_frees_registrations(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick()))

    def late(rank: int) -> str:
        with pytest.raises(DeadlineExceeded) as caught:
            client.join(coordinator.address, messages.worker_request("job", rank, 4), quick(), Failures(), deadline_s=1.0)
        assert (caught.value.peer, caught.value.code) == (f"coordinator {coordinator.address}", "E-DEADLINE")
        return caught.value.what

    with ThreadPoolExecutor(2) as pool:
        lines = list(pool.map(late, (0, 1)))
    assert any(line.startswith("2 of 4 workers joined before the deadline of 1 s; missing: ranks 2, 3:") for line in lines)
    assert "0 of 4 workers joined" in membership.missing(coordinator.state)


def test_unreachable_address_is_reported_by_the_deadline() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        line = outcome(lambda: client.join(address, messages.worker_request("job", 0, 1), quick(), Failures(), deadline_s=0.5))
        assert_refused(line, "E-DEADLINE", "DeadlineExceeded: ", f"coordinator {address}: ", "0.5 s")


def test_worker_may_start_before_its_coordinator(opened: Opened) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(client.join, f"127.0.0.1:{port}", messages.worker_request("job", 0, 1), quick(), Failures())
        opened.append(Coordinator(quick(port=port)))
        member = joining.result(WAIT_S)
    opened.append(member)
    assert [each.rank for each in member.epoch.members] == [0]


def test_different_model_is_refused_immediately_by_name(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick(), servers=1))
    with ThreadPoolExecutor(1) as pool:
        ended = threading.Event()
        request = messages.worker_request("jobA", 0, 2)
        waiting = pool.submit(client.join, coordinator.address, request, quick(), Failures(), ended=ended)
        while "rank 1" not in membership.missing(coordinator.state):
            assert not waiting.done()
        why = r"worker 1 on .* a different model than worker 0 on \S+ \(pid \d+\).*E-RANKS-DIFFER"
        with pytest.raises(Refused, match=why):
            client.join(coordinator.address, messages.worker_request("jobB", 1, 2), quick(), Failures())
        ended.set()
        assert_refused(outcome(lambda: waiting.result(WAIT_S)), "E-COMM", f"coordinator {coordinator.address}: ")


def test_data_port_refuses_control_calls_with_a_hint(caplog: pytest.LogCaptureFixture, opened: Opened) -> None:
    """Otherwise sites would retry there four times a second until their deadline, each time with a warning at the server."""
    server = opened.add(StreamTransport(Hello("job", SERVER_BASE), settings=Settings()))
    address = "{}:{}".format(*server.listen())
    attendance = SiteLease(address, quick(), messages.site_request(1), lambda _: None)
    with caplog.at_level(logging.WARNING, "commlayer"):
        for asks in (lambda: client.join(address, messages.worker_request("job", 0, 1), quick(), Failures()),
                     lambda: attendance.register_and_wait(WAIT_S)):
            assert_refused(outcome(asks), "E-ADDRESS", f"coordinator {address}: ", "data")
    attendance.close("refused")
    assert len(caplog.records) <= 8


class NewerJoin(messages.Join, frozen=True):
    """A request of a later version with more fields."""

    more: int = 1


def test_call_of_a_newer_version_is_refused_for_its_version(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick()))
    channel = opened.add(coordinator_channel.CoordinatorChannel(coordinator.address))
    mine = msgspec.structs.asdict(messages.worker_request("job", 0, 1))
    for lines, line in (({"version": "9.9"}, "commlayer 9.9, but this process .*E-VERSION"),
                        ({}, "Join .*`more`.*E-FRAME")):
        with pytest.raises(Refused, match=line):
            channel.call("Join", NewerJoin(**mine | lines), messages.JoinReply, WAIT_S)
    assert not coordinator.state.registrations


def test_malformed_records_are_refused_without_effect(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick()))
    channel = opened.add(coordinator_channel.CoordinatorChannel(coordinator.address))
    for bad in (messages.HeartbeatReply(), messages.Leave("token")):
        line = outcome(lambda bad=bad: channel.call("Join", bad, messages.JoinReply, WAIT_S))
        assert_refused(line, "E-FRAME", "Join failed: ", " Join message ")
    assert membership.missing(coordinator.state) == "0 of ? workers joined"


def test_silent_worker_is_reported_once_to_each_peer(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick()))
    failures = [Failures() for _ in range(3)]
    members = join_all(coordinator.address, 3, failures)
    opened.extend(members)
    members[1].close()
    for other in (0, 2):
        assert failures[other].came.wait(WAIT_S)
        members[other].leave()  # joins the heartbeat thread, so that no later report can be missed
        assert [error.peer for error in failures[other].errors] == ["worker 1"]
        assert "no heartbeat for" in str(failures[other].errors[0])
    assert failures[1].errors == []


def test_only_an_orderly_leave_is_no_failure(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick(), servers=1))
    failures = Failures()
    ended = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        request = messages.server_request("127.0.0.1:1")
        serving = pool.submit(client.join, coordinator.address, request, quick(), failures, ended=ended)
        first, second = join_all(coordinator.address, 2, [failures, failures])
        server = serving.result(WAIT_S)
    opened.extend((server, second))
    assert (server.name, server.plan) == ("server 0", PLAN)
    first.leave("ValueError: out of data")
    assert not coordinator.over.is_set()
    # A second leave comes after the first on every path, so the server's last message has both.
    second.leave()
    assert ended.wait(WAIT_S)
    assert coordinator.over.wait(WAIT_S)
    assert {peer: gone.reason for peer, gone in server.left.items()} == {
        "worker 0": "ValueError: out of data", "worker 1": "finished"}
    assert {str(error) for error in failures.errors} == {"worker 0: left the job: ValueError: out of data [E-PEER-LOST]"}
    server.leave()


@pytest.mark.parametrize(("lives", "named"), [(False, "server 0"), (True, "worker 0")])
def test_first_member_to_miss_a_server_is_not_blamed_for_it(lives: bool, named: str, opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick(), servers=1))
    failures = Failures()
    with ThreadPoolExecutor(1) as pool:
        request = messages.server_request("127.0.0.1:1")
        serving = pool.submit(client.join, coordinator.address, request, quick(), Failures())
        first, second = join_all(coordinator.address, 2, [Failures(), failures])
        server = serving.result(WAIT_S)
    opened.extend((server, second))
    if not lives:
        server.close()  # without a message, so its loss is noticed much later than the other's leave
    first.leave("PeerLost: server 0: connection lost, and it could not be reached again")
    assert failures.came.wait(WAIT_S)
    assert [error.peer for error in failures.errors] == [named]


SELDOM = {"heartbeat_s": 2 * WAIT_S, "dead_after_s": 4 * WAIT_S}
"""Settings under which no second heartbeat is sent before `until` fails."""


@pytest.mark.parametrize(("min_workers", "secured"), [(0, False), (2, False), (2, True)])
def test_departure_is_reported_before_the_next_heartbeat(
        min_workers: int, secured: bool, folders: Folders, opened: Opened) -> None:
    served, mine = (SELDOM | ({"token": "correct-horse-battery", "keys": str(folder)} if secured else {})
                    for folder in (folders.server, folders.worker))
    coordinator = opened.add(Coordinator(quick(min_workers=min_workers, **served), workers=3))
    failures = [Failures() for _ in range(3)]
    members = join_all(coordinator.address, 3, failures, elastic=True, **mine)
    opened.extend(members)
    members[1].leave("it breaks off")
    for other in (0, 2):
        if min_workers:
            until(lambda other=other: members[other].newest.generation == 2, "an epoch without worker 1")  # type: ignore[misc]
            assert [m.rank for m in members[other].newest.members] == [0, 2]
            assert failures[other].errors == []
        else:
            assert failures[other].came.wait(WAIT_S)
            assert [error.peer for error in failures[other].errors] == ["worker 1"]


def test_member_that_watches_leaves_immediately(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick(**SELDOM)))
    (member,) = join_all(coordinator.address, 1, **SELDOM)
    until(lambda: len(watches_of(coordinator)) == 1, "it watches")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(member.leave).result(WAIT_S)
    assert coordinator.over.wait(WAIT_S)
    until(lambda: not watches_of(coordinator), "its call has ended")


class Watcher:
    """A client that makes Watch calls as worker 0 of 2, which sends no heartbeats after it has joined."""

    def __init__(self, opened: Opened, coordinator: Coordinator) -> None:
        self._channel = opened.add(coordinator_channel.CoordinatorChannel(coordinator.address))
        self._pool = ThreadPoolExecutor(2)
        requests = [messages.worker_request("job", rank, 2, plan=PLAN, elastic=True) for rank in range(2)]
        self._token, self._other = (request.token for request in requests)
        list(self._pool.map(lambda request: self._channel.register(lambda _: request, WAIT_S, WAIT_S, plan=PLAN), requests))

    def watch(self, revision: int, token: str = "") -> Future[messages.HeartbeatReply]:
        request = messages.WatchRequest(token or self._token, 1, revision)
        return self._pool.submit(self._channel.request, "Watch", request, messages.HeartbeatReply, time.monotonic() + WAIT_S,
                                 WAIT_S)

    def other_leaves(self) -> None:
        assert self._channel.leave(self._other, "it breaks off") is not None


def test_watch_is_answered_by_a_newer_revision(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick(min_workers=1, **SELDOM), workers=2))
    watcher = Watcher(opened, coordinator)
    reply = watcher.watch(0).result(WAIT_S)
    assert (reply.departed, reply.epoch) == ((), None)
    assert watcher.watch(reply.revision, "unknown").result(WAIT_S).unknown_token
    waiting = watcher.watch(reply.revision)
    until(lambda: len(watches_of(coordinator)) == 1, "it waits")
    latest = watcher.watch(reply.revision)
    assert waiting.result(WAIT_S) == reply, "a process has one waiting call"
    assert not latest.done()
    watcher.other_leaves()
    news = latest.result(WAIT_S)
    assert news.epoch is not None
    assert ([gone.peer for gone in news.departed], news.epoch.generation) == (["worker 1"], 2)
    assert news.revision > reply.revision
    assert not watches_of(coordinator)


def test_watch_ends_with_its_coordinator_and_continues_at_the_next(opened: Opened, tmp_path: Path) -> None:
    config = quick(min_workers=1, **SELDOM)
    first = opened.add(Coordinator(config, workers=2, journal=CoordinatorJournal(str(tmp_path / "1"))))
    watcher = Watcher(opened, first)
    reply = watcher.watch(0).result(WAIT_S)
    waiting = watcher.watch(reply.revision)
    until(lambda: len(watches_of(first)) == 1, "it waits")
    shutil.copytree(tmp_path / "1", tmp_path / "2")  # a process holds its journal's folder to its end
    first.close()
    assert waiting.result(WAIT_S) == reply
    config = msgspec.structs.replace(config, port=int(first.address.rpartition(":")[2]))
    opened.add(Coordinator(config, workers=2, journal=CoordinatorJournal(str(tmp_path / "2"))))
    renewed = watcher.watch(reply.revision).result(WAIT_S)
    assert (renewed.departed, renewed.revision != reply.revision) == ((), True)
    waiting = watcher.watch(renewed.revision)
    watcher.other_leaves()
    assert [gone.peer for gone in waiting.result(WAIT_S).departed] == ["worker 1"]


class Warnings(logging.Handler):
    """Collects the package's warnings, to be awaited."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put(record.getMessage())


@pytest.fixture
def warnings() -> Iterator[Warnings]:
    log, watch = logging.getLogger("commlayer"), Warnings()
    log.addHandler(watch)
    yield watch
    log.removeHandler(watch)


def test_training_continues_without_its_coordinator_with_one_log_line(opened: Opened, warnings: Warnings) -> None:
    coordinator = opened.add(Coordinator(quick()))
    failures = Failures()
    (member,) = join_all(coordinator.address, 1, [failures])
    opened.append(member)
    coordinator.close()
    line = warnings.lines.get(timeout=WAIT_S)
    assert f"coordinator {coordinator.address}: not reachable" in line
    assert "training continues" in line
    opened.append(Coordinator(quick(port=int(coordinator.address.rpartition(":")[2]))))
    assert "was restarted and has lost this job" in warnings.lines.get(timeout=WAIT_S), "and not the first line again"
    member.leave()
    assert warnings.lines.empty()
    assert failures.errors == []


@pytest.mark.parametrize(("dead_after_s", "timeout_s"), [(0.2, 2.0), (6.0, 2.0), (12.0, 4.0), (60.0, 5.0)])
def test_heartbeat_timeout_allows_a_new_connection_and_a_retry(dead_after_s: float, timeout_s: float) -> None:
    assert client.beat_timeout_s(quick(dead_after_s=dead_after_s)) == timeout_s


def test_heartbeat_timeout_does_not_shrink_while_the_coordinator_is_silent(
        opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 50 ms, as in an earlier version, no heartbeat would arrive over a link of 40 ms."""
    timeouts_s, silences_s = list[float](), queue.SimpleQueue[float]()

    def lost(member: client.Membership, timeout_s: float) -> messages.HeartbeatReply:
        timeouts_s.append(timeout_s)
        raise PeerLost("not reachable", peer="coordinator")

    monkeypatch.setattr(client.Membership, "_send_beat", lost)
    opened.append(coordinator := Coordinator(quick(dead_after_s=0.2), workers=1))
    request = messages.worker_request("job", 0, 1, plan=PLAN)
    opened.append(client.join(coordinator.address, request, quick(dead_after_s=0.2), Failures(), on_silence=silences_s.put))
    while silences_s.get(timeout=WAIT_S) < 1.0:
        pass
    assert set(timeouts_s) == {coordinator_channel.MIN_BEAT_S}


def test_used_port_is_one_line(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick()))
    line = outcome(lambda: Coordinator(quick(port=int(coordinator.address.rpartition(":")[2]))))
    assert_refused(line, "E-ADDRESS", f"{coordinator.address} ")
    assert_refused(outcome(lambda: Coordinator(quick(bind="203.0.113.1", insecure=True))), "E-ADDRESS", "203.0.113.1:0")


@pytest.mark.nightly
def test_forked_children_that_exit_do_not_disturb_the_heartbeats(opened: Opened) -> None:
    coordinator = opened.add(Coordinator(quick()))
    failures = [Failures(), Failures()]
    opened.extend(join_all(coordinator.address, 2, failures))
    fork = multiprocessing.get_context("fork")
    for leave in (_exit_quietly, _exit_and_collect) * 4:
        child = fork.Process(target=leave, args=(opened[1:],))
        child.start()
        child.join(WAIT_S)
        assert child.exitcode == 0, "a child must not hang in what it inherited"
    opened[1].close()
    assert failures[1].came.wait(WAIT_S), "the heartbeats of the parent still work"
    assert [error.peer for error in failures[1].errors] == ["worker 0"]
    assert failures[0].errors == []


def _exit_quietly(members: list[Any]) -> None:
    del members


def _exit_and_collect(members: list[Any]) -> None:
    import gc

    members.clear()
    gc.collect()
    raise SystemExit(0)


def test_lost_member_is_named_among_several_that_end_together() -> None:
    lost = PeerLost("no heartbeat for 2.0 s from b: it was killed, stopped or cut off", peer="worker 1")

    def because_of(error: BaseException, peer: str) -> PeerLost:
        """The leave reason of a job that ends with that error."""
        return PeerLost(f"left the job: {type(error).__name__}: {error}".splitlines()[0], peer=peer)

    named = PeerLost(lost.what, peer=lost.peer)
    named.call("worker 1 (ben)")
    assert str(named) == str(lost).replace("worker 1", "worker 1 (ben)")
    left = because_of(named, "worker 0")
    tenth = because_of(PeerLost("left the job: KeyboardInterrupt", peer="worker 0", step=3), "worker 10")
    for received, first in (([left, lost, tenth], lost), ([tenth, left], left), ([tenth, lost], tenth), ([lost], lost)):
        assert client.root_cause(received) is first


@pytest.mark.parametrize(("error", "lines"), [
    (KeyboardInterrupt(), "KeyboardInterrupt"), (ValueError("no room\nfor it"), "ValueError: no room"),
    (PeerLost("is gone", peer="worker 1"), "PeerLost: worker 1: is gone [E-PEER-LOST]"),
])
def test_reason_of_an_end_is_one_line_for_the_others(error: BaseException, lines: str) -> None:
    assert exit_reason(error) == lines


def test_journal_of_a_finished_job_is_deleted(tmp_path: Path) -> None:
    journal = CoordinatorJournal(str(tmp_path))
    coordinator = Coordinator(quick(), servers=1, journal=journal)
    with ThreadPoolExecutor(2) as pool:
        serving = pool.submit(client.join, coordinator.address, messages.server_request("127.0.0.1:1"), quick(), Failures())
        working = pool.submit(client.join, coordinator.address, messages.worker_request("job", 0, 1, plan=PLAN), quick(),
                              Failures())
        server, worker = serving.result(WAIT_S), working.result(WAIT_S)
        assert list(tmp_path.iterdir()), "the members are in the journal"
        worker.leave()
        closing = pool.submit(coordinator.close)
        while list(tmp_path.iterdir()):
            assert not closing.done()
        server.leave()
        closing.result(WAIT_S)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    hub = Coordinator(quick())
    yield hub
    hub.close()


def wait_gone(pid: int) -> None:
    """Until that process, which need not be a child, has ended; its parent or init reaps it."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], WAIT_S)[0], f"process {pid} is still there"
    finally:
        os.close(handle)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_worker_is_named_to_every_survivor(opened: Opened, sent: signal.Signals) -> None:
    coordinator = opened.add(Coordinator(quick(dead_after_s=5.0)))  # longer than others go unheard where the machine is busy
    workers = [Process(coordinator.address, rank, 3) for rank in range(3)]
    seats = [worker.report() for worker in workers]
    assert [seat["rank"] for seat in seats] == [0, 1, 2]
    victim = workers[1].process
    assert all(seat["pids"][1] == victim.pid for seat in seats), "all members know the lost one"
    victim.send_signal(sent)
    for survivor in (workers[0], workers[2]):
        line = survivor.report()["failure"]
        assert line.startswith("worker 1: no heartbeat for ")
        assert f"(pid {victim.pid}): it was killed or stopped, or its network failed" in line
    if sent is signal.SIGSTOP:
        victim.send_signal(signal.SIGCONT)
        assert f"coordinator {coordinator.address}: declared this worker 1 dead" in workers[1].report()["failure"]
    workers[1].kill()
    for survivor in (workers[0], workers[2]):
        survivor.leave()
        assert survivor.process.returncode == 0


def test_silence_of_a_stopped_coordinator_is_logged_once(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = quick()
    child = EmbeddedServer.start(quick(dead_after_s=60.0), workers=1, servers=0, number=None)
    report: queue.Queue[float] = queue.Queue()
    real, failures = worker_client.WorkerClient._on_silence, Failures()

    def silent(self: worker_client.WorkerClient, silent_s: float) -> None:
        real(self, silent_s)
        report.put(silent_s)

    def lines() -> list[str]:
        return [line for line in caplog.messages if child.control in line]

    monkeypatch.setattr(worker_client.WorkerClient, "_on_silence", silent)
    link = worker_client.connect(child.control, messages.worker_request("job", 0, 1), config)
    link.subscribe(failures, lambda *_: None, lambda *_: None)
    try:
        for outage in (1, 2):
            os.kill(child.pid, signal.SIGSTOP)
            assert report.get(timeout=WAIT_S) >= config.dead_after_s
            assert report.get(timeout=WAIT_S) > config.dead_after_s, "it keeps asking"
            os.kill(child.pid, signal.SIGCONT)
            until(lambda outage=outage: len(lines()) >= 2 * outage, "the end of the silence is logged")
            while not report.empty():
                report.get()
            assert ["answers again" in line for line in lines()] == [False, True] * outage, lines()
            assert "training continues" in lines()[-2]
        assert failures.errors == [], "training can do without it"
    finally:
        os.kill(child.pid, signal.SIGCONT)
        link.close()
        child.close()


@pytest.mark.parametrize("alive", [True, False])
def test_server_whose_data_arrive_outlives_coordinator_replies(alive: bool) -> None:
    epoch = Epoch(1, (), (ServerInfo(0, "127.0.0.1:7001", 0, colocated=True),), "")
    carrier = SimpleNamespace(heard_since=lambda since_s: ("server 0",) if alive else (), disconnected_peers=tuple)
    failures = Failures()
    link: Any = SimpleNamespace(_membership=SimpleNamespace(epoch=epoch), _carrier=carrier, _config=quick(), embedded=True,
                                _on_death=failures)
    worker_client.WorkerClient._on_silence(link, 60.0)
    assert [error.peer for error in failures.errors] == ["server 0"] * (not alive)


def test_worker_continues_after_the_end_of_its_heartbeat_sidecar(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture,
) -> None:
    member = client.join(coordinator.address, messages.worker_request("job", 0, 1), quick(), Failures(), keep=True)
    sidecar = sidecar_of(member)
    assert sidecar is not None
    os.kill(sidecar.pid, signal.SIGKILL)
    wait_gone(sidecar.pid)
    member.leave()
    sidecar.check_running()
    assert "the heartbeat process" in caplog.text


def test_heartbeat_sidecar_ends_with_its_killed_worker(coordinator: Coordinator) -> None:
    worker = Process(coordinator.address, 0, 1)
    sidecar = worker.report()["sidecar"]
    worker.kill()
    wait_gone(sidecar)


def test_held_gil_is_not_a_failure(folders: Folders) -> None:
    served, mine, theirs = ({"token": "correct-horse-battery", "keys": str(folder)}
                            for folder in (folders.server, folders.worker, folders.second))
    failures, coordinator = Failures(), Coordinator(quick(dead_after_s=PATIENT_S, **served))
    holder = Process(coordinator.address, 1, 2, how="hold_gil", **theirs)
    request = messages.worker_request("job", 0, 2, plan=b"a plan")
    member = client.join(coordinator.address, request, quick(**mine), failures)
    holder.report()
    assert holder.report() == {"held": True}
    assert failures.errors == []
    holder.leave()
    member.leave()
    assert failures.errors == []
    coordinator.close()


def test_embedded_server_serves_one_job_whatever_happens_to_copies_of_its_trainer() -> None:
    server = EmbeddedServer.start(quick(), workers=1, servers=0, number=None)
    try:
        assert os.getsid(server.pid) != os.getsid(0), "Ctrl-C of the trainer does not reach it"
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert process_of(server).poll() is None
        client.join(server.control, messages.worker_request("job", 0, 1), quick(), Failures()).leave()
        assert server.over(WAIT_S)
        assert process_of(server).returncode == 0
    finally:
        server.close()


def test_hung_embedded_server_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlayer.cluster.processes.child_processes.GRACE_S", 0.2)
    server = EmbeddedServer.start(quick(), workers=1, servers=0, number=None)
    os.kill(server.pid, signal.SIGSTOP)
    server.close()
    assert process_of(server).returncode == -signal.SIGKILL


@pytest.mark.parametrize("pipe_held", [False, True])
def test_embedded_server_ends_with_its_killed_trainer(coordinator: Coordinator, pipe_held: bool) -> None:
    how = "embed_and_fork" if pipe_held else "embed"
    trainer = Process(coordinator.address, 0, 1, how=how)
    trainer.report()
    report = trainer.report()
    trainer.process.kill()
    trainer.process.wait(WAIT_S)
    wait_gone(report["embedded"])
    if pipe_held:
        os.kill(report["forked"], signal.SIGKILL)
    trainer.kill()


def test_server_start_failure_gives_its_reason() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommError, match=f"embedded server: .*127.0.0.1:{port} .*E-ADDRESS") as caught:
            EmbeddedServer.start(quick(port=port), workers=1, servers=0, number=None)
    assert "Traceback" not in str(caught.value)


def test_server_that_hangs_at_start_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlayer.cluster.processes.child_processes.RUN", "import time; time.sleep(1000)")
    monkeypatch.setattr("commlayer.cluster.processes.child_processes.GRACE_S", 0.2)
    line = outcome(lambda: EmbeddedServer.start(quick(join_deadline_s=0.3), workers=1))
    assert_refused(line, "E-DEADLINE", "embedded server: ", "0.3 s")

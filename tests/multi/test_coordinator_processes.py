"""The control plane between real processes: kills, stops, a held GIL, and embedded servers that end with their trainer."""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.attached import assert_refused, outcome
from support.coordinators import PATIENT_S, WAIT_S, Failures, Process, all_opened, quick  # noqa: F401  (a fixture)

from commlayer.cluster import client, messages, uplink
from commlayer.cluster.child_processes import EmbeddedServer
from commlayer.cluster.coordinator import Coordinator
from commlayer.errors import CommError


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
def test_a_killed_or_stopped_worker_is_named_to_every_survivor(opened: list[Any], sent: signal.Signals) -> None:
    coordinator = Coordinator(quick(dead_after_s=5.0))  # longer than others go unheard where the machine is busy
    opened.append(coordinator)
    workers = [Process(coordinator.address, rank, 3) for rank in range(3)]
    seats = [worker.told() for worker in workers]
    assert [seat["rank"] for seat in seats] == [0, 1, 2]
    victim = workers[1].process
    assert all(seat["pids"][1] == victim.pid for seat in seats), "everyone knows who that is"
    victim.send_signal(sent)
    for survivor in (workers[0], workers[2]):
        line = survivor.told()["failure"]
        assert line.startswith("worker 1: no heartbeat for ")
        assert f"(pid {victim.pid}): it was killed or stopped, or its network failed" in line
    if sent is signal.SIGSTOP:
        victim.send_signal(signal.SIGCONT)
        assert f"coordinator {coordinator.address}: declared this worker 1 dead" in workers[1].told()["failure"]
    workers[1].kill()
    for survivor in (workers[0], workers[2]):
        survivor.go_on()
        assert survivor.process.returncode == 0


def test_a_stopped_coordinator_is_noticed_by_its_silence_and_told_once(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = quick()
    child = EmbeddedServer.start(quick(dead_after_s=60.0), workers=1, servers=0, number=None)
    report: queue.Queue[float] = queue.Queue()
    real, failures = uplink.Uplink._on_silence, Failures()

    def silent(self: uplink.Uplink, silent_s: float) -> None:
        real(self, silent_s)
        report.put(silent_s)

    monkeypatch.setattr(uplink.Uplink, "_on_silence", silent)
    link = uplink.connect(child.control, messages.worker_request("job", 0, 1), config)
    link.subscribe(failures, lambda *_: None, lambda *_: None)
    try:
        for outage in (1, 2):
            os.kill(child.pid, signal.SIGSTOP)
            assert report.get(timeout=WAIT_S) >= config.dead_after_s
            assert [report.get(timeout=WAIT_S) for _ in range(2)], "it goes on asking"
            os.kill(child.pid, signal.SIGCONT)
            until = time.monotonic() + WAIT_S
            while len(lines := [line for line in caplog.messages if child.control in line]) < 2 * outage:
                assert time.monotonic() < until, lines
                time.sleep(0.01)
            while not report.empty():
                report.get()
            assert ["answers again" in line for line in lines] == [False, True] * outage, lines
            assert "training continues" in lines[-2]
        assert failures.errors == [], "training can do without it"
    finally:
        os.kill(child.pid, signal.SIGCONT)
        link.close()
        child.close()


def test_a_worker_whose_keeper_ended_goes_on_and_says_so(coordinator: Coordinator, caplog: pytest.LogCaptureFixture) -> None:
    member = client.join(coordinator.address, messages.worker_request("job", 0, 1), quick(), Failures(), keep=True)
    keeper = member._keeper
    assert keeper is not None
    os.kill(keeper.pid, signal.SIGKILL)
    wait_gone(keeper.pid)
    member.leave()
    keeper.check_running()
    assert "the heartbeat process" in caplog.text


def test_a_keeper_ends_with_its_killed_worker(coordinator: Coordinator) -> None:
    worker = Process(coordinator.address, 0, 1)
    keeper = worker.told()["keeper"]
    worker.kill()
    wait_gone(keeper)


def test_a_held_gil_is_not_death() -> None:
    failures, coordinator = Failures(), Coordinator(quick(dead_after_s=PATIENT_S))
    holder = Process(coordinator.address, 1, 2, how="hold_gil")
    request = messages.worker_request("job", 0, 2, plan=b"a plan")
    member = client.join(coordinator.address, request, quick(), failures)
    holder.told()
    assert holder.told() == {"held": True}
    assert failures.errors == []
    holder.go_on()
    member.leave()
    assert failures.errors == []
    coordinator.close()


def test_an_embedded_coordinator_serves_and_ends_by_itself_after_the_job() -> None:
    config = quick()
    server = EmbeddedServer.start(config, workers=1, servers=0, number=None)
    member = client.join(server.control, messages.worker_request("job", 0, 1), config, Failures())
    member.leave()
    assert server.over(WAIT_S)
    assert server._process.returncode == 0
    server.close()


def test_a_hung_embedded_server_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlayer.cluster.child_processes.GRACE_S", 0.2)
    server = EmbeddedServer.start(quick(), workers=1, servers=0, number=None)
    os.kill(server.pid, signal.SIGSTOP)
    server.close()
    assert server._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("pipe_held", [False, True])
def test_an_embedded_server_ends_with_its_killed_trainer(coordinator: Coordinator, pipe_held: bool) -> None:
    how = "embed_and_fork" if pipe_held else "embed"
    trainer = Process(coordinator.address, 0, 1, how=how)
    trainer.told()
    report = trainer.told()
    trainer.process.kill()
    trainer.process.wait(WAIT_S)
    wait_gone(report["embedded"])
    if pipe_held:
        os.kill(report["forked"], signal.SIGKILL)
    trainer.kill()


def test_ctrl_c_of_the_trainer_does_not_reach_the_embedded_server() -> None:
    server = EmbeddedServer.start(quick(), workers=1, servers=0, number=None)
    try:
        assert os.getsid(server.pid) != os.getsid(0)
    finally:
        server.close()


def test_a_forked_copy_of_the_trainer_does_not_end_the_server() -> None:
    server = EmbeddedServer.start(quick(), workers=1, servers=0, number=None)
    try:
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert server._process.poll() is None
        client.join(server.control, messages.worker_request("job", 0, 1), quick(), Failures()).leave()
    finally:
        server.close()


def test_a_server_that_does_not_start_says_why() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CommError, match=f"embedded server: .*127.0.0.1:{port} .*E-ADDRESS") as caught:
            EmbeddedServer.start(quick(port=port), workers=1, servers=0, number=None)
    assert "Traceback" not in str(caught.value)


def test_a_server_that_hangs_at_its_start_meets_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("commlayer.cluster.child_processes.RUN", "import time; time.sleep(1000)")
    monkeypatch.setattr("commlayer.cluster.child_processes.GRACE_S", 0.2)
    line = outcome(lambda: EmbeddedServer.start(quick(join_deadline_s=0.3), workers=1))
    assert_refused(line, "E-DEADLINE", "embedded server: ", "0.3 s")

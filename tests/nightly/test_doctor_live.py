"""`commlayer doctor` on real ports, keys and coordinators, over a path that loses packets, and the command itself."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import ROOT
from support.coordinators import Failures, quick
from support.keys import (
    Folders,
)
from support.lab import needs_lab
from support.processes import clean_environment

from bench.lab import Lab
from commlayer import plan_file
from commlayer.cli.output import PIPE_WIDTH
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.coordinator_channel import CoordinatorChannel, connect
from commlayer.cluster.membership import client, coordinator
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.servers.data_server import DataServer
from commlayer.doctor import machine, network, server
from commlayer.doctor.findings import Finding
from commlayer.errors import find_error_code
from commlayer.records import Bucket, Plan, Slice
from commlayer.transport import own_address

SECRET = "correct-horse-battery"
LIMIT_S = 100.0


def check(config: Any) -> list[Finding]:
    return [*server.ServerCheck(config).run("")]


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {one.check: one.verdict for one in findings}


@pytest.fixture
def keyed(folders: Folders) -> Iterator[Coordinator]:
    with contextlib.closing(Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=2)) as coordinator:
        yield coordinator


def test_working_server_is_ok_and_no_worker_is_registered(keyed: Coordinator, folders: Folders) -> None:
    config = quick(token=SECRET, keys=str(folders.worker), join=keyed.address)
    good = server.ServerCheck(config)
    findings = [*good.run("")]
    assert verdicts(findings) == {"server": "ok", "clock": "ok", "latency": "ok", "packets": "ok"}, findings
    assert good.status is not None
    assert (good.status.seated, good.status.workers) == (0, 2)
    link, *_ = good.link(0.4)
    assert min(link.values["up_bps"], link.values["down_bps"]) > 1e6


ODD = [
    ("expired", "E-CERTIFICATE-DATE", "clock|--again"),
    ("revoked", "E-CERTIFICATE-REVOKED", ""),
    ("foreign", "E-CERTIFICATE-CA", ""),
]


@pytest.mark.parametrize(("kind", "code", "remedy"), ODD)
def test_wrong_keys_are_one_line(keyed: Coordinator, kind: str, code: str, remedy: str, folders: Folders) -> None:
    findings = check(quick(token=SECRET, keys=str(getattr(folders, kind)), join=keyed.address))
    assert [one.verdict for one in findings] == ["fail"]
    assert find_error_code(findings[0].seen + findings[0].remedy) == code
    assert re.search(remedy, findings[0].remedy)
    assert findings[0].remedy


def test_wrong_secret_and_unreachable_server_are_one_line(keyed: Coordinator, folders: Folders) -> None:
    findings = check(quick(token="another-secret", keys=str(folders.worker), join=keyed.address))
    assert (findings[0].verdict, len(findings)) == ("fail", 1)
    assert find_error_code(findings[0].seen + findings[0].remedy) == "E-SECRET"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    begin = time.monotonic()
    findings = check(quick(token=SECRET, join=f"127.0.0.1:{port}"))
    assert [one.verdict for one in findings] == ["fail"]
    assert time.monotonic() - begin < 10.0


@pytest.mark.parametrize(("carrier", "verdict", "seen"), [
    ("auto", "warn", "gRPC streams at .*, since TCP to"), ("grpc", "ok", "gRPC streams at"),
    ("tcp", "fail", "no process listens"),
])
def test_working_carrier_is_named(carrier: str, verdict: str, seen: str) -> None:
    """A server whose TCP port is closed to this machine is reached by streams, and a run can start."""
    config = quick(dead_after_s=LIMIT_S, carrier=carrier)
    with contextlib.closing(Coordinator(config, workers=1, servers=1)) as result, \
            contextlib.closing(DataServer("127.0.0.1", 0, quick(), result)) as serving:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            closed = f"127.0.0.1:{sock.getsockname()[1]}"
        with contextlib.closing(CoordinatorChannel(result.address, "", None)) as link:
            link.call("Join", messages.server_request(closed, colocated=True, streams=serving.streams), messages.JoinReply,
                      LIMIT_S)
        findings = check(quick(join=result.address, carrier=carrier))
        (one,) = [finding for finding in findings if finding.check == "carrier"]
    assert one.verdict == verdict
    assert re.search(seen, one.seen)


def test_each_server_is_dialled_by_its_carrier_at_its_own_ports() -> None:
    """One has the number of the coordinator's port, on another address; the others' streams use their own ports."""
    with contextlib.ExitStack() as opened:
        result = opened.enter_context(contextlib.closing(Coordinator(quick(dead_after_s=LIMIT_S), workers=1, servers=3)))
        number = int(result.address.rpartition(":")[2])
        alike, closed, alone = (opened.enter_context(contextlib.closing(DataServer(host, port, quick(carrier=carrier)))) for
                                host, port, carrier in (("127.0.0.2", number, "tcp"), ("127.0.0.3", 0, "auto"),
                                                        ("127.0.0.3", 0, "grpc")))
        with socket.create_server(("127.0.0.1", 0)) as sock:
            nowhere = f"127.0.0.1:{sock.getsockname()[1]}"
        link = opened.enter_context(contextlib.closing(CoordinatorChannel(result.address, "", None)))
        for address, streams in ((alike.address, ""), (nowhere, closed.streams), (alone.address, alone.streams)):
            link.call("Join", messages.server_request(address, streams=streams), messages.JoinReply, LIMIT_S)
        findings = {one.seen: one.verdict for one in check(quick(join=result.address)) if one.check == "carrier"}
    assert [verdict for line, verdict in findings.items() if nowhere in line and closed.streams in line] == ["warn"]
    assert findings[f"TCP to server {alike.address}"] == findings[f"gRPC streams at {alone.address}"] == "ok"
    assert len(findings) == 3


def test_running_job_is_not_measured() -> None:
    with contextlib.closing(Coordinator(quick(token=SECRET), workers=1)) as coordinator_:
        config = quick(token=SECRET, join=coordinator_.address)
        member = client.join(config.join, messages.worker_request("job", 0, 1, plan=b"a plan"), quick(token=SECRET), Failures())
        busy = server.ServerCheck(config)
        assert verdicts([*busy.run("another hash"), *busy.link(0.4)]) == {
            "server": "warn", "clock": "ok", "latency": "ok", "packets": "ok", "plan": "fail", "link": "warn"}
        with contextlib.closing(connect(config)) as channel:
            assert channel.call("Status", messages.StatusRequest(wanted=1 << 17), messages.StatusReply, LIMIT_S).data == b""
        member.leave()


def test_clock_off_by_hours_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    later = SimpleNamespace(time=lambda: time.time() + 7200.0, monotonic=time.monotonic)
    monkeypatch.setattr(coordinator, "time", later)
    with contextlib.closing(Coordinator(quick(token=SECRET), workers=1)) as late:
        (clock,) = [one for one in check(quick(token=SECRET, join=late.address)) if one.check == "clock"]
    assert clock.verdict == "warn"
    assert "2.0 hours behind" in clock.seen


class Relay:
    """Forwards a connection until one end sends more at once than a packet on this route may have; then nothing more."""

    def __init__(self, target: str, most_nbytes: int) -> None:
        self._listener, self._target, self._most = socket.create_server(("127.0.0.1", 0)), target, most_nbytes
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                local, _ = self._listener.accept()
            except OSError:
                return
            host, port = self._target.rsplit(":", 1)
            present = socket.create_connection((host, int(port)))
            for a, b in ((local, present), (present, local)):
                threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if len(data) > self._most:
                    return  # neither this nor what follows arrives
                sink.sendall(data)

    def close(self) -> None:
        self._listener.close()


def test_route_that_loses_full_size_packets_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CALL_S", 1.0)
    result = Coordinator(quick(token=SECRET), workers=1)
    relay = Relay(result.address, 1400)
    findings = check(quick(token=SECRET, join=relay.address))
    assert verdicts(findings) == {"server": "ok", "tunnel": "ok", "clock": "ok", "latency": "ok", "packets": "fail"}, findings
    relay.close()
    result.close()


def test_used_and_foreign_ports_are_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        error = network.listen_error("127.0.0.1", port)
        assert error is not None
        assert error.errno == errno.EADDRINUSE
        assert network.dial("127.0.0.1", port) == ""
    assert "no process listens" in network.dial("127.0.0.1", port)
    assert network.listen_error("127.0.0.1", port) is None
    error = network.listen_error("203.0.113.9", 0)
    assert error is not None
    assert error.errno != errno.EADDRINUSE
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        # A listener whose queue is full drops further connections, as a firewall does.
        with contextlib.ExitStack() as queued:
            for _ in range(4):
                sock = queued.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(full.getsockname())
            host, port = full.getsockname()
            assert "firewall" in network.dial(host, port, 0.5)
    assert "does not resolve" in network.dial("no-such-host.invalid", 1, 1.0)


def test_addresses_of_this_machine() -> None:
    mine = network.own_addresses("")
    assert "127.0.0.1" in {one.address for one in mine.interfaces}
    assert mine.chosen == own_address.default_address()
    assert network.address_towards("localhost") == "127.0.0.1"


@pytest.mark.parametrize(("text", "cores"), [(None, float("inf")), ("150000 100000\n", 1.5), ("max 100000\n", float("inf"))])
def test_control_group_limit(tmp_path: Path, text: str | None, cores: float) -> None:
    if text:
        (tmp_path / "cpu.max").write_text(text)
    assert machine.core_limit(tmp_path) == cores


@pytest.mark.parametrize(("kind", "serves", "days", "verdict", "seen"), [
    ("worker", True, 0, "ok", "gpu-1 in"), ("worker", True, 350, "warn", "gpu-1"), ("dials", False, 0, "ok", ""),
    ("dials", True, 0, "ok fail", "--dials-only"), ("revoked", False, 0, "fail", "revoked"),
    ("expired", False, 0, "fail", "E-CERTIFICATE-DATE"), ("ca", False, 0, "fail", "E-KEYS"),
])
def test_keys_folder(folders: Folders, kind: str, serves: bool, days: float, verdict: str, seen: str) -> None:
    findings = [*machine.check_keys(getattr(folders, kind), time.time() + days * 86400, serves=serves)]
    assert " ".join(one.verdict for one in findings) == verdict
    assert seen in findings[-1].seen + findings[-1].remedy


def test_keys_readable_by_others_are_reported(folders: Folders, tmp_path: Path) -> None:
    for path in folders.worker.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / path.name).chmod(0o644)
    (tmp_path / machine.CA_KEY).write_bytes(b"")
    findings = [*machine.check_keys(tmp_path, time.time(), serves=False)]
    assert [one.verdict for one in findings] == ["ok", "warn", "warn"]
    assert "node.key" in findings[1].remedy


def command(*words: str, **environ: str) -> subprocess.Popen[str]:
    env = clean_environment() | {"COMMLAYER_CONFIG": "", "COLUMNS": "200"} | environ
    return subprocess.Popen([sys.executable, "-m", "commlayer", "doctor", *words], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def test_command_prints_remedies_and_fails(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        begin = time.monotonic()
        done = command("--port", str(held.getsockname()[1]), "--keys", str(tmp_path), "--plan", str(tmp_path / "no.json"),
                       "--json", str(tmp_path / "out.json"))
        text, errors = done.communicate(timeout=LIMIT_S)
        took_s = time.monotonic() - begin
    assert (done.returncode, errors) == (2, "")
    assert took_s < 30.0
    lines = text.splitlines()
    assert max(map(len, lines)) <= PIPE_WIDTH
    assert "\x1b" not in text, "no colours where there is no terminal"
    assert [line for line in lines if line.startswith("fail settings")]
    assert [line for line in lines if line.startswith("fail plan")]
    assert [line for line in lines if line.startswith("fail port")]
    assert lines[-1].startswith("not usable: ")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["usable"] is False
    assert {one["verdict"] for one in report["findings"]} >= {"ok", "fail"}
    assert next(one["values"]["cores"] for one in report["findings"] if one["check"] == "cpu") >= 1
    assert all(one["remedy"] for one in report["findings"] if one["verdict"] != "ok")


@needs_lab
def test_site_checks_its_server_over_a_slow_link(folders: Folders, tmp_path: Path) -> None:
    env = clean_environment() | {"COMMLAYER_CONFIG": ""}
    line = [sys.executable, "-m", "commlayer"]
    pipes: Any = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Lab(hosts=2, up_bps=[100e6, 10e6], down_bps=[100e6, 40e6], delay_s=0.02) as lab:
        hub = lab.addresses[0]
        server = lab.popen(0, [*line, "serve", "--bind", hub, "--port", "7000", "--keys", str(folders.server)], **pipes)
        assert json.loads(server.stdout.readline())["control"] == f"{hub}:7000"
        home = lab.popen(1, [*line, "doctor", "--join", f"{hub}:7000", "--keys", str(folders.worker), "--json",
                             str(tmp_path / "out.json")], **pipes)
        text, errors = home.communicate(timeout=LIMIT_S)
        assert (home.returncode, errors) == (0, ""), text
        server.terminate()
        refused = [one for one in server.communicate(timeout=LIMIT_S)[1].splitlines() if "refused" in one]
    report = json.loads((tmp_path / "out.json").read_text())
    values = {one["check"]: one["values"] for one in report["findings"] if one["values"]}
    link = values["link"]
    assert 0.7 * 10e6 <= link["up_bps"] <= 1.1 * 10e6
    assert 0.6 * 40e6 <= link["down_bps"] <= 1.1 * 40e6
    assert 0.04 <= values["latency"]["round_trip_s"] <= 0.2
    assert values["address"]["chosen"] == lab.addresses[1]
    # What greets and goes without a word is noted on the data port alone.
    assert len(refused) <= 1, refused


@pytest.mark.commit(1)
def test_another_plan_and_another_version_are_reported_on_both(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    odd = "from commlayer.cluster.calls import messages; messages.version = lambda: '9.9.9'"
    processes = []
    for number, (program, codec) in enumerate((("", "fp16()"), (odd, "bf16()"))):
        plan = Plan("job", (Bucket(0, (Slice(0, 0, 8),), "service", codec, 0),), 1)
        (tmp_path / f"plan{number}.json").write_text(plan_file.format_plan(plan))
        program += "\nimport sys; from commlayer.cli.main import run; sys.argv = ['commlayer', *sys.argv[1:]]; run()"
        env = {"COMMLAYER_CONFIG": "", "RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        processes.append(subprocess.Popen(
            [sys.executable, "-c", program, "doctor", "--plan", str(tmp_path / f"plan{number}.json"), "--json",
             str(tmp_path / f"{number}.json")], text=True, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=clean_environment() | env))
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [errors for _, errors in outputs] == ["", ""]
    first, second = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert node_lines(first) == node_lines(second)
    for pattern in (r"^fail commlayer .* on node 0 \(\S+\), commlayer 9.9.9 .* on node 1",
                    r"^fail plan with hash \w+ on node 0 \(\S+\), plan with hash \w+ on node 1"):
        assert re.search(pattern, node_lines(first), re.MULTILINE), node_lines(first)
    assert first["links"] == second["links"]
    assert min(first["links"][0][1], first["links"][1][0]) > 1e6
    # Two nodes on one machine meet at loopback, which several machines could not.
    assert all(any(f["check"] == "address" and f["verdict"] == "fail" for f in one["findings"]) for one in (first, second))


def node_lines(report: dict[str, Any]) -> str:
    return "\n".join(f"{one['verdict']} {one['seen']}" for one in report["findings"] if one["check"] == "nodes")

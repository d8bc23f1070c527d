"""`commlayer doctor` where something is odd: real ports, keys, coordinators, ways that lose packets, and the command itself."""

from __future__ import annotations

import contextlib
import fcntl
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
from support.coordinators import Failures, quick
from support.keys import Folders, made_folders  # noqa: F401  (a fixture)
from support.lab import needs_lab
from support.processes import clean_environment

from bench.lab import Lab
from commlayer.cluster import client, coordinator, messages, server_journal
from commlayer.cluster.client import CoordinatorChannel
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.server_journal import JournalFolder
from commlayer.cluster.summation_server import DataServer
from commlayer.doctor import machine, network, security, server
from commlayer.doctor.report import Finding
from commlayer.errors import code_of
from commlayer.transport import framing, own_address

SECRET = "correct-horse-battery"
LIMIT_S = 60.0
ROOT = Path(__file__).parents[2]


def look(config: Any) -> list[Finding]:
    made = server.query_server(config, messages.version(), framing.VERSION)
    return [*server.check_server(made, keys=bool(config.keys))]


def verdicts(found: list[Finding]) -> dict[str, str]:
    return {one.check: one.verdict for one in found}


# ---- the server


@pytest.fixture
def keyed(folders: Folders) -> Iterator[Coordinator]:
    made = Coordinator(quick(token=SECRET, keys=str(folders.server)), workers=2)
    yield made
    made.close()


def test_a_good_server_is_all_ok_and_nobody_has_joined(keyed: Coordinator, folders: Folders) -> None:
    config = quick(token=SECRET, keys=str(folders.worker), join=keyed.address)
    found = look(config)
    assert verdicts(found) == {"server": "ok", "clock": "ok", "latency": "ok", "packets": "ok"}, found
    assert "0 of 2 workers" in found[0].seen
    assert not keyed._state.registrations
    measured = server.measure_link(config, 0.001, 0.4)
    assert not measured.error
    assert min(measured.up_bps, measured.down_bps) > 1e6


ODD = [
    ("expired", "E-CERTIFICATE-DATE", "clock|--again"),
    ("revoked", "E-CERTIFICATE-REVOKED", ""),
    ("foreign", "E-CERTIFICATE-CA", ""),
]


@pytest.mark.parametrize(("kind", "code", "remedy"), ODD)
def test_wrong_keys_are_one_line(keyed: Coordinator, kind: str, code: str, remedy: str, folders: Folders) -> None:
    found = look(quick(token=SECRET, keys=str(getattr(folders, kind)), join=keyed.address))
    assert [one.verdict for one in found] == ["fail"]
    assert code_of(found[0].seen + found[0].remedy) == code
    assert re.search(remedy, found[0].remedy)
    assert found[0].remedy


def test_another_secret_and_nobody_there_are_one_line(keyed: Coordinator, folders: Folders) -> None:
    found = look(quick(token="another-secret", keys=str(folders.worker), join=keyed.address))
    assert (found[0].verdict, len(found)) == ("fail", 1)
    assert code_of(found[0].seen + found[0].remedy) == "E-SECRET"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    begin = time.monotonic()
    found = look(quick(token=SECRET, join=f"127.0.0.1:{port}"))
    assert [one.verdict for one in found] == ["fail"]
    assert time.monotonic() - begin < 10.0


@pytest.mark.parametrize(("carrier", "verdict", "seen"), [
    ("auto", "warn", "gRPC streams at .*, since TCP to"), ("grpc", "ok", "gRPC streams at"), ("tcp", "fail", "nothing listens"),
])
def test_the_carrier_that_gets_through_is_named(carrier: str, verdict: str, seen: str) -> None:
    """A server whose port for TCP is closed to this machine is reached by streams, and a run can start."""
    config = quick(dead_after_s=LIMIT_S, carrier=carrier)
    with contextlib.closing(Coordinator(config, workers=1, servers=1)) as made, \
            contextlib.closing(DataServer("127.0.0.1", 0, quick(), made)) as serving:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            closed = f"127.0.0.1:{sock.getsockname()[1]}"
        with contextlib.closing(CoordinatorChannel(made.address, "", None)) as link:
            link.call("Join", messages.server_request(closed, colocated=True, streams=serving.streams), messages.JoinReply,
                      LIMIT_S)
        (one,) = [found for found in look(quick(join=made.address, carrier=carrier)) if found.check in ("carrier", "port")]
    assert one.verdict == verdict
    assert re.search(seen, one.seen)


def test_each_server_is_dialled_by_what_it_takes_at_its_own_ports() -> None:
    """One has the number of the coordinator's port, on another address; the others' streams come by ports of their own."""
    with contextlib.ExitStack() as opened:
        made = opened.enter_context(contextlib.closing(Coordinator(quick(dead_after_s=LIMIT_S), workers=1, servers=3)))
        number = int(made.address.rpartition(":")[2])
        alike, closed, alone = (opened.enter_context(contextlib.closing(DataServer(host, port, quick(carrier=carrier)))) for
                                host, port, carrier in (("127.0.0.2", number, "tcp"), ("127.0.0.3", 0, "auto"),
                                                        ("127.0.0.3", 0, "grpc")))
        with socket.create_server(("127.0.0.1", 0)) as sock:
            nowhere = f"127.0.0.1:{sock.getsockname()[1]}"
        link = opened.enter_context(contextlib.closing(CoordinatorChannel(made.address, "", None)))
        for address, streams in ((alike.address, ""), (nowhere, closed.streams), (alone.address, alone.streams)):
            link.call("Join", messages.server_request(address, streams=streams), messages.JoinReply, LIMIT_S)
        found = {one.seen: one.verdict for one in look(quick(join=made.address)) if one.check in ("carrier", "port")}
    assert [verdict for line, verdict in found.items() if nowhere in line and closed.streams in line] == ["warn"]
    assert found[f"TCP to server {alike.address}"] == found[f"gRPC streams at {alone.address}"] == "ok"
    assert len(found) == 3


def test_a_journal_that_a_server_holds_or_has_left_is_told(tmp_path: Path) -> None:
    def seen() -> machine.JournalFacts:
        return machine.read_journal(tmp_path / "job")

    first = seen()
    assert (first.held, first.left, first.folder.error) == (False, False, "")
    assert not (tmp_path / "job").exists(), "looking makes nothing"
    folder = JournalFolder(str(tmp_path / "job"))
    assert seen().held
    folder.close()
    assert not seen().held
    folder.file.write_bytes(b"")
    assert seen().left
    assert machine.read_journal(folder.file).folder.error == "it is a file"


def test_looking_at_a_journal_keeps_no_server_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    JournalFolder(str(tmp_path)).close()
    with (tmp_path / server_journal.LOCK).open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not machine.read_journal(tmp_path).held, "who looks, too, is no server"
        monkeypatch.setattr(server_journal, "time", SimpleNamespace(sleep=lambda _: looking.close()))
        folder = JournalFolder(str(tmp_path))
    with pytest.raises(ValueError, match=r"E-JOURNAL-IN-USE"):
        JournalFolder(str(tmp_path))
    folder.close()


def test_a_job_that_has_begun_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Coordinator(quick(token=SECRET), workers=1)
    member = client.join(made.address, messages.worker_request("job", 0, 1, plan=b"a plan"), quick(token=SECRET), Failures())
    found = look(quick(token=SECRET, join=made.address))
    assert verdicts(found)["server"] == "warn"
    link = server.open_channel(quick(token=SECRET, join=made.address))
    assert link.call("Status", messages.StatusRequest(wanted=1 << 17), messages.StatusReply, LIMIT_S).data == b""
    link.close()
    member.leave()
    made.close()


def test_a_clock_that_is_wrong_by_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    later = SimpleNamespace(time=lambda: time.time() + 7200.0, monotonic=time.monotonic)
    monkeypatch.setattr(coordinator, "time", later)
    made = Coordinator(quick(token=SECRET), workers=1)
    found = look(quick(token=SECRET, join=made.address))
    assert verdicts(found)["clock"] == "warn"
    assert any("2.0 hours behind the server's" in one.seen for one in found)
    made.close()


class Relay:
    """Passes a connection on, until one end sends more at once than a packet on this way may be; then nothing comes."""

    def __init__(self, target: str, most_nbytes: int) -> None:
        self._listener, self._target, self._most = socket.create_server(("127.0.0.1", 0)), target, most_nbytes
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            host, port = self._target.rsplit(":", 1)
            there = socket.create_connection((host, int(port)))
            for a, b in ((here, there), (there, here)):
                threading.Thread(target=self._pass, args=(a, b), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if len(data) > self._most:
                    return  # neither this nor what follows arrives
                sink.sendall(data)

    def close(self) -> None:
        self._listener.close()


def test_a_way_that_loses_full_size_packets_is_told_from_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CALL_S", 1.0)
    made = Coordinator(quick(token=SECRET), workers=1)
    relay = Relay(made.address, 1400)
    found = look(quick(token=SECRET, join=relay.address))
    assert verdicts(found) == {"server": "ok", "clock": "ok", "latency": "ok", "packets": "fail"}, found
    relay.close()
    made.close()


# ---- this machine


def test_ports_that_are_taken_or_not_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        taken = network.probe_port("coordinator", "127.0.0.1", port)
        assert [one.verdict for one in network.check_port(taken)] == ["fail"]
        assert taken.taken
        assert network.dial("server", "127.0.0.1", port).answer == "open"
    assert network.dial("server", "127.0.0.1", port).answer == "refused"
    assert not network.probe_port("coordinator", "127.0.0.1", port).error
    assert not network.probe_port("coordinator", "203.0.113.9", 0).taken
    assert network.probe_port("coordinator", "203.0.113.9", 0).error
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        # A listener whose queue is full drops further dialling, as a firewall does.
        queued = []
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
            queued.append(sock)
        assert network.dial("server", *full.getsockname(), 0.5).answer == "silent"
        for sock in queued:
            sock.close()
    assert "does not resolve" in network.dial("server", "no-such-host.invalid", 1, 1.0).answer


def test_interfaces_and_names_of_this_machine() -> None:
    found = network.read_interfaces()
    assert any(one.address == "127.0.0.1" and one.kind == "loopback" for one in found)
    assert network.resolve_name("", "localhost").own
    assert not network.resolve_name("", "203.0.113.9").own
    default = own_address.default_address()
    chosen = network.read_addresses("", "127.0.0.1", (), alone=True)
    assert chosen.chosen == default
    assert not default or any(one.address == default for one in found)


def test_bridges_are_told_by_what_is_part_of_them(tmp_path: Path) -> None:
    for name in ("docker0/bridge", "docker0/brif/veth1", "veth1", "vmbr0/bridge", "vmbr0/brif/eth0", "eth0/device"):
        (tmp_path / name).mkdir(parents=True)
    kinds = {name: network.kind_of(name, tmp_path) for name in ("docker0", "vmbr0", "eth0", "wg0")}
    assert kinds == {"docker0": "bridge", "vmbr0": "link", "eth0": "link", "wg0": "tunnel"}


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    from commlayer.doctor.machine import read_processor

    assert read_processor(tmp_path).quota == float("inf")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert read_processor(tmp_path).quota == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert read_processor(tmp_path).quota == float("inf")


def test_a_folder_of_keys_tells_what_it_is(folders: Folders, tmp_path: Path) -> None:
    good = security.read_keys(folders.worker, time.time())
    assert (good.error, good.name, good.revoked, good.dials_only, good.readable) == ("", "gpu-1", False, False, ())
    assert 360 < (good.until - good.now) / 86400 <= 365
    assert security.read_keys(folders.dials, 0.0).dials_only
    assert code_of(security.read_keys(folders.expired, 0.0).error) == "E-CERTIFICATE-DATE"
    revoked = security.read_keys(folders.revoked, time.time())
    (line,) = security.check_keys(revoked, serves=False)
    assert line.verdict == "fail"
    assert re.search(r"/nodes/\* \[E-KEYS\]$", security.read_keys(folders.ca, 0.0).error)
    (tmp_path / "node").mkdir()
    for path in folders.worker.iterdir():
        (tmp_path / "node" / path.name).write_bytes(path.read_bytes())
        (tmp_path / "node" / path.name).chmod(0o644)
    assert security.read_keys(tmp_path / "node", 0.0).readable == ("node.key", "token")


@needs_lab
def test_a_low_mtu_is_seen() -> None:
    """In a network of its own, whose loopback stands for any interface."""
    program = ("from commlayer.doctor import network as n; print(n.mtu_of('lo'), n.path_mtu('127.0.0.1'), "
               "n.probe_port('x', '127.0.0.1', 0).error)")
    done = subprocess.run(["unshare", "--net", "sh", "-c", 'ip link set lo up mtu 900 && exec "$0" -c "$1"', sys.executable,
                           program], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    assert done.stdout.split() == ["900", "900"], done.stderr
    (low,) = network.check_mtu("hub", network.Interface("wan0", "10.0.0.5", 900), 900)
    assert low.verdict == "warn"


# ---- the command


def command(*words: str, **environ: str) -> subprocess.Popen[str]:
    env = clean_environment() | {"COMMLAYER_CONFIG": "", "COLUMNS": "200"} | environ
    return subprocess.Popen([sys.executable, "-m", "commlayer", "doctor", *words], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)


def test_the_command_says_what_to_mend_and_fails(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        begin = time.monotonic()
        done = command("--port", str(held.getsockname()[1]), "--keys", str(tmp_path), "--plan", str(tmp_path / "no.json"),
                       "--json", str(tmp_path / "out.json"))
        said, errors = done.communicate(timeout=LIMIT_S)
        took_s = time.monotonic() - begin
    assert (done.returncode, errors) == (2, "")
    assert took_s < 20.0
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in said, "no colours where there is no terminal"
    assert [line for line in lines if line.startswith("fail settings")]
    assert [line for line in lines if line.startswith("fail plan")]
    assert [line for line in lines if line.startswith("fail port")]
    assert lines[-1].startswith("not usable: ")
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["usable"] is False
    assert {one["verdict"] for one in told["findings"]} >= {"ok", "fail"}
    assert told["facts"]["cpu"][0]["cores"] >= 1
    assert all(one["remedy"] for one in told["findings"] if one["verdict"] != "ok")


def test_nodes_that_look_at_once_measure_all_links(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    both = [command("--master", f"127.0.0.1:{port}", "--nodes", "2", "--json", str(tmp_path / f"{i}.json")) for i in range(2)]
    said = [each.communicate(timeout=LIMIT_S) for each in both]
    told = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
    assert told[0]["links"] == told[1]["links"], said
    (pair,) = told[0]["links"]
    assert pair["error"] == ""
    assert min(pair["up_bps"], pair["down_bps"]) > 1e6
    assert all("Mb/s from, to" in " ".join(out.split()) for out, _ in said)
    # Two on one machine meet at loopback, which several machines could not.
    assert all(any(f["check"] == "address" and f["verdict"] == "fail" for f in report["findings"]) for report in told)


@needs_lab
def test_a_home_looks_at_its_server_over_a_slow_link(folders: Folders, tmp_path: Path) -> None:
    env = clean_environment() | {"COMMLAYER_CONFIG": ""}
    line = [sys.executable, "-m", "commlayer"]
    pipes: Any = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with Lab(hosts=2, up_bps=[100e6, 10e6], down_bps=[100e6, 40e6], delay_s=0.02) as lab:
        hub = lab.addresses[0]
        server = lab.popen(0, [*line, "serve", "--bind", hub, "--port", "7000", "--keys", str(folders.server)], **pipes)
        assert json.loads(server.stdout.readline())["control"] == f"{hub}:7000"
        home = lab.popen(1, [*line, "doctor", "--join", f"{hub}:7000", "--keys", str(folders.worker), "--json",
                             str(tmp_path / "out.json")], **pipes)
        said, errors = home.communicate(timeout=LIMIT_S)
        assert (home.returncode, errors) == (0, ""), said
        server.terminate()
        refused = [one for one in server.communicate(timeout=LIMIT_S)[1].splitlines() if "refused" in one]
    told = json.loads((tmp_path / "out.json").read_text())
    (link,) = told["facts"]["link"]
    assert 0.7 * 10e6 <= link["up_bps"] <= 1.1 * 10e6
    assert 0.6 * 40e6 <= link["down_bps"] <= 1.1 * 40e6
    assert 0.04 <= told["facts"]["server"][0]["round_trip_s"] <= 0.2
    assert told["facts"]["address"][0]["chosen"] == lab.addresses[1]
    # What greets and goes without a word is noted on the data port alone.
    assert len(refused) <= 1, refused

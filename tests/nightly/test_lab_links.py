"""The lab and ranks on its hosts: every byte arrives at the rate and delay set, nothing is left behind, a rank that fails is
named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support import ROOT
from support.coordinators import until
from support.lab import needs_lab

from bench.lab import Lab, LabUnavailable, check
from bench.lab.namespaces import present
from bench.ranks import RankFailed, launch_hosts


@needs_lab
def test_an_exception_leaves_no_process_and_no_namespace() -> None:
    failing = Lab(hosts=2)

    def fail_inside() -> None:
        with failing:
            started.append(failing.popen(1, ["sleep", "600"]))
            assert set(failing.names) <= set(present())
            raise KeyError("the test's own")

    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(KeyError, match="the test's own"):
        fail_inside()
    [child] = started
    assert child.poll() is not None
    assert not set(failing.names) & set(present())


RUNNING = """
import time
from bench.lab import Lab
with Lab(hosts=2) as lab:
    print(*lab.names, flush=True)
    time.sleep(600)
"""


@needs_lab
def test_sigterm_cleans_up_and_sigkill_is_cleaned_up_after() -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen([sys.executable, "-c", RUNNING], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        names = process.stdout.readline().split()
        assert len(names) == 2
        assert set(names) <= set(present())
        process.send_signal(number)
        process.wait(20)
        process.stdout.close()
        if number == signal.SIGKILL:
            assert set(names) <= set(present()), "nothing cleans up at once after SIGKILL"
            with Lab(hosts=2):
                pass
        assert not set(names) & set(present())


@needs_lab
def test_one_lab_at_a_time() -> None:
    with Lab(hosts=2):
        with pytest.raises(LabUnavailable, match=f"process {os.getpid()}"):
            Lab(hosts=2, lock_s=0.1).__enter__()


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabUnavailable, match="needs root.*$"):
        Lab(hosts=2).__enter__()


ECHO = """
import json, os
print("noise")
print(json.dumps({key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MINE")}))
"""
ONE_FAILS = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('boom in rank one')\ntime.sleep(600)"


def isolated(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program]


@needs_lab
def test_ranks_on_hosts_of_a_lab() -> None:
    with Lab(hosts=2) as lab:
        answers = launch_hosts(lab, 3, isolated(ECHO), deadline_s=30, env={"MINE": "yes"})
    expected = [{"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "10.99.0.1", "MINE": "yes"} for rank in range(3)]
    assert answers == expected


def test_a_failing_rank_is_named_with_its_words_and_ends_the_others() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 of 3 ended with code 1:\nboom in rank one"):
        launch_hosts(None, 3, isolated(ONE_FAILS), deadline_s=300)
    assert time.monotonic() - begin < 300, "the sleeping ranks were not waited for"


RECEIVE = """
import hashlib, socket
listener = socket.create_server(("", 7000))
print("listening", flush=True)
connection, _ = listener.accept()
sha, nbytes = hashlib.sha256(), 0
while data := connection.recv(1 << 16):
    sha.update(data)
    nbytes += len(data)
print(nbytes, sha.hexdigest(), flush=True)
"""

SEND = """
import hashlib, random, socket, sys
data = random.Random(5).randbytes(int(sys.argv[2]))
print(hashlib.sha256(data).hexdigest(), flush=True)
with socket.create_connection((sys.argv[1], 7000), 10) as connection:
    connection.settimeout(60)
    connection.sendall(data)
"""


def python(lab: Lab, host: int, program: str, *args: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-I", "-S", "-c", program, *map(str, args)]
    return lab.popen(host, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def transfer(lab: Lab, src: int, dst: int, nbytes: int) -> tuple[str, str]:
    """Sends nbytes over TCP; what was sent and what was received, each as "nbytes digest"."""
    receiver = python(lab, dst, RECEIVE)
    assert receiver.stdout
    assert receiver.stdout.readline() == "listening\n"
    sender = python(lab, src, SEND, lab.addresses[dst], nbytes)
    sent, sender_errors = sender.communicate(timeout=60)
    got, receiver_errors = receiver.communicate(timeout=60)
    assert not sender_errors + receiver_errors
    return f"{nbytes} {sent.strip()}", got.strip()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(hosts=3, up_bps=1e9, down_bps=1e9, delay_s=0.002) as running:
        yield running


def checksum_errors(lab: Lab, host: int) -> int:
    """Packets the host's kernel rejected for a wrong checksum, IP and TCP together."""
    text = subprocess.run(
        ["ip", "netns", "exec", lab.names[host], "cat", "/proc/net/snmp"], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.split() for line in text.splitlines()]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    tables = {head[0]: dict(zip(head[1:], map(int, row[1:]), strict=True)) for head, row in pairs}
    return tables["Ip:"]["InHdrErrors"] + tables["Tcp:"]["InCsumErrors"] + tables["Tcp:"]["InErrs"]


@needs_lab
@pytest.mark.parametrize(
    ("bps", "nbytes"),
    [(1e9, 24_000_000), (100e6, 6_000_000), (20e6, 1_000_000)],
    ids=["super-packets", "small parts", "segments"],
)
def test_every_byte_arrives_and_is_charged_with_its_headers(lab: Lab, bps: float, nbytes: int) -> None:
    for host in range(lab.hosts):
        lab.set(host, up_bps=bps, down_bps=bps)
    before = lab.counters()["hosts"]
    sent, got = transfer(lab, 0, 1, nbytes)
    assert got == sent
    assert checksum_errors(lab, 1) == 0
    after = lab.counters()["hosts"]
    received = after[1]["received_nbytes"] - before[1]["received_nbytes"]
    segments = after[1]["received_packets"] - before[1]["received_packets"]
    # An MTU of 1500 leaves at most 1460 bytes of payload per segment and adds 40 bytes or more of headers.
    assert segments >= nbytes / 1460
    assert nbytes * 1500 / 1460 <= received <= 1500 * segments
    assert after[2]["received_nbytes"] == before[2]["received_nbytes"], "the third host saw traffic that was not for it"


@needs_lab
def test_the_self_check_finds_what_was_set(lab: Lab) -> None:
    # Uneven on purpose: a rate or delay that was swapped or ignored would be off by more than the tolerance.
    lab.set(0, up_bps=20e6, down_bps=60e6, delay_s=0.004)
    lab.set(1, up_bps=40e6, down_bps=30e6, delay_s=0.010)
    lab.set(2, up_bps=30e6, down_bps=80e6, delay_s=0.020)
    result = check(lab, window_s=0.2)
    rows = {row["what"]: row for row in result.rows}
    expected = {
        "round trip 0 to 1": 14, "round trip 1 to 2": 30, "round trip 2 to 0": 24,
        "up 0": 20, "up 1": 40, "up 2": 30,
        "down 0": 60, "down 1": 30, "down 2": 60,
        "all at once, 0 to 1": 20, "all at once, 1 to 2": 40, "all at once, 2 to 0": 30,
    }  # fmt: skip
    assert {what: row["set"] for what, row in rows.items()} == pytest.approx(expected)
    assert {what: row["got"] for what, row in rows.items()} == pytest.approx(expected, rel=0.25)
    assert result.device_dropped == 0


@needs_lab
def test_a_cut_link_stops_traffic_and_a_mended_one_resumes_it(lab: Lab) -> None:
    for host in range(lab.hosts):
        lab.set(host, up_bps=50e6, down_bps=50e6, delay_s=0.002)

    def count(key: str, host: int) -> int:
        return int(lab.counters()["hosts"][host][key])

    stream = python(lab, 0, "import socket, time\nbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
                    "while True:\n    box.sendto(bytes(500), ('10.99.0.2', 7002))\n    time.sleep(0.001)")  # fmt: skip
    try:
        start = count("received_packets", 1)
        until(lambda: count("received_packets", 1) > start + 20, "the stream flows")
        lab.set(0, cut=True)
        until(lambda: lab.counters()["in_flight"] == 0, "what was on its way has arrived")
        received, dropped = count("received_packets", 1), count("dropped_cut", 0)
        until(lambda: count("dropped_cut", 0) > dropped + 20, "the stream runs into the cut")
        assert count("received_packets", 1) == received
        lab.set(0, cut=False)
        until(lambda: count("received_packets", 1) > received + 20, "the stream flows again")
    finally:
        stream.kill()
        stream.communicate()

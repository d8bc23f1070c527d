"""What a link of the lab promises: every byte arrives as sent, at the rate and delay set, counted as on a wire."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from support.coordinators import until
from support.lab import needs_lab, python, transfer

from bench.lab import Lab, check

pytestmark = needs_lab


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

"""What `commlayer doctor` concludes from measurements of machines, networks, servers and nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import ROOT

from commlayer.cli.output import finding_lines
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.messages import StatusReply
from commlayer.config import Config
from commlayer.doctor import checks, machine, network, nodes, server
from commlayer.doctor.findings import Check, Finding, fail, ok, run_checks, summary, usable, warn
from commlayer.doctor.machine import Torch
from commlayer.doctor.network import Addresses
from commlayer.doctor.nodes import NodeFacts
from commlayer.records import Bucket, Plan, ServerInfo, Slice
from commlayer.transport import framing
from commlayer.transport.own_address import Interface

GIB = 1 << 30
ETH, WIFI, LO = Interface("eth0", "10.0.0.5"), Interface("wlan0", "192.168.1.7"), Interface("lo", "127.0.0.1")
DOCKER = Interface("docker0", "172.17.0.1")
GPU = Torch("2.13.0+cu126", "12.6", gpus=("NVIDIA RTX 3060 (12 GiB)",) * 2, cupy="cupy-cuda12x 14.2.0", driver=True)
STATUS = StatusReply(messages.version(), messages.PROTOCOL, framing.VERSION, 0.0, 4, 2,
                     (ServerInfo(0, "10.0.0.1:7001", streams="10.0.0.1:7002"),))
PLAN = Plan("job", (Bucket(0, (Slice(0, 0, 8),), "service", "fp16()", 0),), 1)
but: Any = msgspec.structs.replace


def addresses(*, interfaces: Any = (LO, ETH), towards: str = "10.0.0.1", chosen: str = "10.0.0.5",
              resolves: Any = ("10.0.0.5",),
              bind: str = "127.0.0.1", alone: bool = False, interface: str = "", advertise: Any = ()) -> Iterable[Finding]:
    return network.check_addresses(Addresses(interfaces, towards, chosen, "box", resolves), bind, interface, alone=alone,
                                   advertise=advertise)


def journal(free: Any, *, present: bool = False, required: bool = False) -> Iterable[Finding]:
    return machine.check_journal(Path("/j"), free, present=present, required=required)


def folder(free: Any) -> list[Finding]:
    return [machine.check_folder("checkpoints in", Path("/x"), free)]


def node(host: str = "a", **fields: Any) -> NodeFacts:
    return NodeFacts(host, f"{host}:1", **{"version": "commlayer 1", "python": "3.11.7", "torch": "2.13.0+cpu", "plan": "abc"}
                     | fields)


def at(host: str, **fields: Any) -> NodeFacts:
    return but(node(host), **{"machine": host} | fields)


def links(*rows: list[nodes.Link]) -> Iterable[Finding]:
    return nodes.check_links([node(host) for host in "abc"[:len(rows)]], rows)


def status(**fields: Any) -> list[Finding]:
    return [server.check_status("h:1", but(STATUS, **fields))]


CASES: list[tuple[Iterable[Finding], str]] = [
    # findings; then "verdict words" for each of them: the words occur in its line or remedy
    (machine.check_versions("3.11.9", "avx2"), "ok 3.11.9; ok avx2"),
    (machine.check_versions("3.13.1", ""), "warn 3.13.1 3.11; warn"),
    ([machine.check_processor(8, math.inf), machine.check_processor(8, 1.5), machine.check_processor(1, math.inf)],
     "ok 8; warn 1.5 --cpus; warn 1 2"),
    ([*folder(10 * GIB), *folder(GIB), *folder(1 << 20), *folder("it is a file")], "ok /x 10.0; warn 1.0; fail 1; fail file"),
    (journal(24 * GIB), "ok /j 24.0 1074"),
    (journal(24 << 20), "warn 1"),
    (journal(24 << 20, required=True), "fail 1 journal_required"),
    (journal(GIB, required=True), "warn 1.0 45"),
    (journal("it may not be written to"), "fail"),
    (journal(24 * GIB, present=True), "warn /j; ok"),
    ([machine.check_shared_memory(Path("/no such"))], "warn"),
    ([machine.check_file_limits(*limits) for limits in ((1 << 20, 1 << 20), (-1, -1), (512, 4096), (100, 200))],
     "ok 1048576; ok; warn 512 4096; fail 100 --ulimit"),
    (machine.check_torch(Torch("2.13.0+cpu")), "ok 2.13.0+cpu; ok"),
    (machine.check_torch(Torch("2.12.1")), "warn 2.12.1 2.13; ok"),
    (machine.check_torch(Torch("2.5.0")), "fail 2.5.0 2.6; ok"),
    (machine.check_torch(Torch(error="no module named torch")), "fail"),
    (machine.check_torch(Torch("2.13.0", "12.6", driver=True)), "ok; warn nvidia-smi"),
    (machine.check_torch(GPU), "ok; ok 2 3060; ok cupy-cuda12x 14.2.0"),
    (machine.check_torch(but(GPU, cupy="")), "ok; ok; warn commlayer[gpu12]"),
    (machine.check_torch(but(GPU, cupy="cupy-cuda13x 14.2.0")), "ok; ok; warn cupy-cuda13x 14.2.0 12.6"),
    (addresses(), "ok 10.0.0.5 eth0 10.0.0.1; ok 10.0.0.5"),
    (addresses(interfaces=(LO, DOCKER, ETH, WIFI)), "ok wlan0 192.168.1.7; ok"),
    (addresses(resolves=("127.0.1.1",)), "ok; warn 127.0.1.1 GLOO_SOCKET_IFNAME=eth0"),
    (addresses(resolves=("127.0.1.1",), interface="eth0"), "ok"),
    (addresses(resolves=()), "ok; warn /etc/hosts"),
    (addresses(resolves=("127.0.1.1", "10.0.0.5")), "ok; ok 10.0.0.5"),
    (addresses(interface="eth1"), "ok; fail GLOO_SOCKET_IFNAME=eth1 eth0"),
    (addresses(chosen=""), "fail 10.0.0.1; ok"),
    (addresses(chosen="", towards=""), "warn; ok"),
    (addresses(chosen="127.0.0.1", towards="localhost"), "fail eth0 10.0.0.5; ok"),
    (addresses(chosen="127.0.0.1", towards="box"), "ok; ok"),
    (addresses(chosen="127.0.0.1", towards="", alone=True), "ok"),
    (addresses(bind="10.0.0.9"), "ok; ok; fail 10.0.0.9 eth0 10.0.0.5"),
    (network.check_name("server", "hub", ("203.0.113.7",)), "ok 203.0.113.7"),
    (network.check_name("server", "10.0.0.1", ("10.0.0.1",)), ""),
    (network.check_name("master", "hub", ("127.0.1.1",)), "warn /etc/hosts"),
    (network.check_name("master", "localhost", ("127.0.0.1",)), "ok"),
    (network.check_name("master", "hbu", "Name or service not known"), "fail"),
    ([network.check_port("coordinator", "10.0.0.5", number, error) for number, error in
      ((7000, None), (0, None), (7000, OSError(98, "in use")), (70, OSError(13, "Permission denied")))],
     "ok 7000; ok 10.0.0.5; fail 7000; fail 1023"),
    ([network.check_reachable("server", "h:7000", "")], "ok"),
    ([network.check_reachable("server", "h:7000", network.connect_problem(error)) for error in
      (TimeoutError(), ConnectionRefusedError(), OSError(113, "No route to host"), OSError(1, "no way"))],
     "fail firewall; fail start; fail route; fail no way"),
    (machine.check_settings(Config()), ""),
    (machine.check_settings(Config(join="h:1", insecure=True, token="12345678")), "warn"),
    (machine.check_settings(Config(join="h:1", keys="k")), "fail COMMLAYER_TOKEN_FILE"),
    ([machine.check_plan(Path("p"), PLAN), machine.check_plan(Path("p"), "plan p: no such file")], "ok 1; fail"),
    ([machine.check_script(Path(__file__)), machine.check_script(Path("no.py"))], "ok test_doctor.py; fail no.py"),
    (status(), "ok 2 4 1"),
    (status(min_workers=3), "ok least 3"),
    ([server.check_tunnel("127.0.0.1:9000", but(STATUS, caller="203.0.113.9:5000"), 1e-4, 0.045)], "ok 203.0.113.9 0.1 45"),
    (status(version="0.2.0", wire=99), "fail 0.2.0"),
    (status(begun=True, closed_reason="a running job takes no new members"), "warn members"),
    (status(begun=True, seated=3, free_seats=1), "ok 1 4"),
    (status(begun=True, seated=4, closed_reason="it has all", full=True), "warn 4"),
    ([server.check_clock(0.001, 0.01, keys=True), server.check_clock(-7300.0, 0.01, keys=True),
      server.check_clock(7300.0, 0.01, keys=False), server.check_clock(8.0, 4.0, keys=False)],
     "ok 0.01; fail 2.0 behind set-ntp; warn 2.0 ahead set-ntp; ok 8"),
    (network.check_idle(19e6, restarts=True), "warn tcp_slow_start_after_idle=0"),
    ((finding for bps, restarts in ((19e6, False), (21e6, True)) for finding in network.check_idle(bps, restarts=restarts)),
     ""),
    (links([0.0, 50e6], [90e6, 0.0]), "ok 50 Mb/s 0 1"),
    (links([0.0, "does not answer"], [90e6, 0.0]), "fail 0 b:1; ok 90"),
    (links([0.0, 90e6, 9e6], [90e6, 0.0, 90e6], [90e6, 90e6, 0.0]), "warn 9.0 Mb/s 0 2 90 Mb/s"),
    (nodes.check_alike([node("a"), node("b", torch="2.13.0+cu126", python="3.11.9")]), "ok plan"),
    (nodes.check_alike([node("a"), node("b", version="commlayer 2")]), "fail 0 1 commlayer"),
    (nodes.check_alike([node("a"), node("b", torch="2.12.1", python="3.12.1")]), "fail 2.13.0 2.12.1; fail 3.11 3.12"),
    (nodes.check_alike([*map(node, "abcd"), node("e", plan="xyz"), node("f", plan="")]), "fail xyz (e) no (f) abc more"),
    (addresses(interfaces=(LO, DOCKER, ETH), bind="172.17.0.1"), "ok; fail bind 172.17.0.1 docker0 eth0 10.0.0.5; ok"),
    (addresses(interfaces=(LO, DOCKER, ETH), chosen="172.17.0.1"), "ok; fail route 172.17.0.1 docker0 10.0.0.5; ok"),
    (addresses(interfaces=(LO, DOCKER, ETH), chosen="172.17.0.1", alone=True), "ok"),
    (addresses(interfaces=(LO, DOCKER, ETH), resolves=("172.17.0.1",)), "ok; fail box docker0; ok"),
    (addresses(interfaces=(LO, DOCKER, ETH), advertise=("172.17.0.1",)), "ok; fail advertise docker0; ok"),
    (network.check_name("advertised name", "hub", ("127.0.1.1",)), "fail /etc/hosts"),
    (machine.check_system("6.1.0-18-amd64", container=False, serves=True), ""),
    (machine.check_system("5.15.153.1-microsoft-standard-WSL2", container=False, serves=True), "warn mirrored .wslconfig"),
    (machine.check_system("5.15.153.1-microsoft-standard-WSL2", container=False, serves=False), "ok WSL 2"),
    (machine.check_system("4.4.0-19041-Microsoft", container=False, serves=False), "fail --set-version"),
    (machine.check_system("6.1.0-18-amd64", container=True, serves=True), "warn --network advertise"),
    (machine.check_system("6.1.0-18-amd64", container=True, serves=False), ""),
    (nodes.check_distinct([at("a"), at("b")]), ""),
    (nodes.check_distinct([at("a", bridges=("172.17.0.1",)), at("b", bridges=("172.17.0.1", "172.18.0.1"))]), "ok 172.17.0.1"),
    (nodes.check_distinct([at("a", address="172.17.0.1:5"), at("b", address="172.17.0.1:6"), at("c")]),
     "fail 172.17.0.1 (a) (b) MASTER_ADDR"),
    (nodes.check_distinct([at("a", own_name="172.17.0.1"), at("b", own_name="172.17.0.1")]),
     "fail 172.17.0.1 GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME"),
    (nodes.check_distinct([at("a", address="10.0.0.1:5"), at("b", machine="a", address="10.0.0.1:6")]), ""),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_verdict_values_and_remedy(number: int) -> None:
    findings, expected = [*CASES[number][0]], [row.split() for row in CASES[number][1].split("; ") if row]
    assert [finding.verdict for finding in findings] == [verdict for verdict, *_ in expected], findings
    for finding, (_, *words) in zip(findings, expected, strict=True):
        assert all(word in f"{finding.seen} {finding.remedy}" for word in words), finding
        assert bool(finding.remedy) == (finding.verdict != "ok"), "a problem has a remedy"
        assert "\n" not in finding.seen + finding.remedy


@pytest.mark.parametrize(("join", "own", "caller", "forwarded"), [
    ("hub:7000", "192.168.1.7", "203.0.113.9:4000", False),  # a router translates addresses
    ("hub:7000", "192.168.1.7", "127.0.0.1:4000", True),  # the tunnel's program runs on the server
    ("localhost:9000", "127.0.0.1", "203.0.113.9:4000", True),  # it runs here
    ("localhost:9000", "127.0.0.1", "127.0.0.1:4000", True),  # at both ends
    ("localhost:7000", "127.0.0.1", "127.0.0.1:4000", False),  # unknown: this may be the server
    ("[::1]:7000", "::1", "[::1]:4000", False),
    ("hub:7000", "", "203.0.113.9:4000", False),
])
def test_tunnel_is_recognized_by_the_addresses_at_both_ends(join: str, own: str, caller: str, forwarded: bool) -> None:
    assert server.is_forwarded(join, own, but(STATUS, caller=caller, port=7000)) is forwarded


def test_tested_torch_version_is_the_pinned_one() -> None:
    assert f"torch=={machine.TESTED_TORCH}." in (ROOT / "constraints.txt").read_text()


def test_failing_or_hanging_checks_are_findings_and_delay_no_others() -> None:
    def broken(_: None) -> list[Finding]:
        raise OSError(5, "Input/output error")

    begin = time.monotonic()
    findings = [*run_checks([
        Check("hangs", lambda _: time.sleep(60) or [], 0.2, "pull the plug"), Check("breaks", broken, 5.0, ""),
        Check("works", lambda _: [ok("works", "fine")], 5.0, ""),
    ], None)]
    assert [(one.check, one.verdict) for one in findings] == [("hangs", "fail"), ("breaks", "fail"), ("works", "ok")]
    assert findings[0].remedy == "pull the plug"
    assert "Input/output error" in findings[1].seen
    assert time.monotonic() - begin < 5.0


def test_hanging_driver_query_is_killed() -> None:
    begin = time.monotonic()
    assert "0.5 s" in machine.own_torch(0.5, "import time; time.sleep(60)").error
    assert time.monotonic() - begin < 10.0
    assert "exit code 3: bad" in machine.own_torch(30.0, "import sys; print('bad', file=sys.stderr); sys.exit(3)").error


def test_lines_fit_a_terminal_of_80_columns() -> None:
    finding = fail("port", "server " + "a-long-name." * 12 + "example:7000 does not answer", "open that port in its firewall "
                   "and router, and check the address that was given to it on the line that started it")
    lines = finding_lines(finding, 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("fail port      server a-long-name")
    assert [line for line in lines if line.startswith(" " * 15 + "-> open that port")]
    assert summary([finding, warn("a", "b", "c"), ok("a", "b")]) == "not usable: 1 failed, 1 warning, 1 ok"
    assert not usable([finding, ok("a", "b")])
    assert usable([warn("a", "b", "c")])


def test_deadlines_add_up_to_the_documented_total() -> None:
    assert max(check.deadline_s for check in checks.CHECKS) + checks.LINK.deadline_s <= checks.ALONE_S
    page = (ROOT / "docs" / "how-to" / "diagnose.md").read_text("utf-8")
    assert f"over in {checks.ALONE_S:g} s" in " ".join(page.split())
    assert nodes.limit_s(4, 60.0) <= 150.0 - checks.ALONE_S, "two and a half minutes in all"

"""What `commlayer doctor` makes of facts: tables of machines, networks, keys and servers, and the one line for each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from commlayer.cluster.messages import StatusReply
from commlayer.config import Config
from commlayer.doctor import machine, network, report, security, server
from commlayer.doctor.machine import Files, Folder, JournalFacts, Processor, Shared, Software, Torch
from commlayer.doctor.network import Addresses, Interface, Name, Port, Reached
from commlayer.doctor.nodes import NodeFacts, Pair, check_links, rounds, table
from commlayer.doctor.report import Check, Finding, fail, of_error, ok, run_checks, usable, warn
from commlayer.doctor.security import KeysFolder, PlanFile
from commlayer.doctor.server import DialedServer, LinkFacts, ServerFacts
from commlayer.records import ServerInfo

GIB, DAY = 1 << 30, 86400.0
ROOT = Path(__file__).parents[2]
ETH = Interface("eth0", "10.0.0.5")
WIFI = Interface("wlan0", "192.168.1.7")
DOCKER = Interface("docker0", "172.17.0.1", kind="bridge")
WG = Interface("wg0", "10.9.0.2", 1420, "tunnel")
LO = Interface("lo", "127.0.0.1", 65536, "loopback")
HOME = Addresses("box", ("10.0.0.5",), (LO, ETH), "10.0.0.1", "10.0.0.5", alone=False)
GPU = Torch("2.13.0+cu126", "12.6", gpus=(("NVIDIA RTX 3060", 12 * GIB, "sm_86"),) * 2, archs=("sm_80", "sm_90", "compute_90"),
            nccl="2.27.3", cupy="14.2.0", cupy_from="cupy-cuda12x", driver=True)
KEYS = KeysFolder("keys", "", "gpu-1", 0.0, 300 * DAY, 3000 * DAY, list_number=2, listed=1)
STATUS = StatusReply("0.1.0", 1, 3, 0.0, 4, 2, (ServerInfo(0, "10.0.0.1:7001", streams="10.0.0.1:7002"),))
SERVER = ServerFacts("10.0.0.1:7000", "", STATUS, "0.1.0", 1, 3, 0.02, 0.001, 0.01)
SILENT = Reached("server", "h:2", "silent")
PLAN = PlanFile("plan.json", "", "abc", 12, 1)


def but(record: Any, **fields: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(record, **fields)


OK = ("ok", "")


def host_keys(f: Any) -> Iterable[Finding]:
    return security.check_keys(f, serves=True)


def journal(f: Any) -> Iterable[Finding]:
    return machine.check_journal(f, required=False)


def worker_keys(f: Any) -> Iterable[Finding]:
    return security.check_keys(f, serves=False)


def keyed(f: Any) -> Iterable[Finding]:
    return server.check_server(f, keys=True)


def plan_for_3(f: Any) -> Iterable[Finding]:
    return security.check_plan(f, nodes=3)


def mtu(f: Any) -> Iterable[Finding]:
    return network.check_mtu("h", *f)


def links(f: Any) -> Iterable[Finding]:
    return check_links(*f)


Judge = Callable[[Any], Iterable[Finding]]
CASES: list[tuple[Judge, Any, list[tuple[str, str]]]] = [
    (machine.check_software, Software("0.1.0", 1, 3, "3.11.9", "avx2"), [("ok", "3.11.9"), ("ok", "avx2")]),
    (machine.check_software, Software("0.1.0", 1, 3, "3.13.1", ""),
     [("warn", "3.13.1 3.11"), ("warn", "")]),
    (machine.check_processor, Processor(8, flags=("avx2",)), [("ok", "8 x86_64 avx2")]),
    (machine.check_processor, Processor(8, 1.5, flags=("avx2",)), [("warn", "1.5 --cpus")]),
    (machine.check_processor, Processor(1, flags=("avx2",)), [("warn", "1 2")]),
    (machine.check_processor, Processor(4), [("warn", "AVX2")]),
    (machine.check_processor, Processor(4, math.inf, "aarch64", ("asimd",)), [("ok", "4 aarch64")]),
    (machine.check_folder, Folder("checkpoints in", "/x", 10 * GIB), [("ok", "/x 10.0")]),
    (machine.check_folder, Folder("checkpoints in", "/x", GIB), [("warn", "1.0")]),
    (machine.check_folder, Folder("checkpoints in", "/x", 1 << 20), [("fail", "1")]),
    (machine.check_folder, Folder("checkpoints in", "/x", error="it is a file"), [("fail", "")]),
    (journal, JournalFacts(Folder("journal in", "/j", 24 * GIB)), [("ok", "/j 24.0 1074")]),
    (journal, JournalFacts(Folder("journal in", "/j", 24 << 20)), [("warn", "1")]),
    (lambda f: machine.check_journal(f, required=True), JournalFacts(Folder("journal in", "/j", 24 << 20)),
     [("fail", "1 journal_required")]),
    (lambda f: machine.check_journal(f, required=True), JournalFacts(Folder("journal in", "/j", GIB)),
     [("warn", "1.0 45")]),
    (journal, JournalFacts(Folder("journal in", "/j", error="it may not be written to")), [("fail", "")]),
    (journal, JournalFacts(Folder("journal in", "/j", 24 * GIB), held=True), [("fail", ""), OK]),
    (journal, JournalFacts(Folder("journal in", "/j", 24 * GIB), left=True), [("warn", "/j"), OK]),
    (machine.check_shared_memory, Shared(8 * GIB, 8 * GIB), [("ok", "8.0")]),
    (machine.check_shared_memory, Shared(64 << 20, 64 << 20), [("warn", "64 64 --shm-size")]),
    (machine.check_shared_memory, Shared(error="No such file"), [("warn", "")]),
    (machine.check_file_limits, Files(1 << 20, 1 << 20), [("ok", "1048576")]),
    (machine.check_file_limits, Files(-1, -1), [("ok", "")]),
    (machine.check_file_limits, Files(512, 4096), [("warn", "512 4096")]),
    (machine.check_file_limits, Files(100, 200), [("fail", "100")]),
    (machine.check_torch, Torch("2.13.0+cpu"), [("ok", "2.13.0+cpu"), ("ok", "")]),
    (machine.check_torch, Torch("2.12.1"), [("warn", "2.12.1 2.13"), ("ok", "")]),
    (machine.check_torch, Torch("2.5.0"), [("fail", "2.5.0 2.6"), ("ok", "")]),
    (machine.check_torch, Torch(error="no module named torch"), [("fail", "")]),
    (machine.check_torch, Torch("2.13.0+cpu", driver=True),
     [("ok", ""), ("warn", "")]),
    (machine.check_torch, Torch("2.13.0", "12.6", driver=True), [OK, ("warn", "nvidia-smi")]),
    (machine.check_torch, GPU, [OK, ("ok", "2 3060 12.6"), ("ok", "2.27.3"),
                                 ("ok", "cupy-cuda12x 14.2.0")]),
    (machine.check_torch, but(GPU, cupy="", cupy_from=""),
     [OK, OK, OK, ("warn", "commlayer[gpu12]")]),
    (machine.check_torch, but(GPU, cupy_from="cupy-cuda13x"),
     [OK, OK, OK, ("warn", "cupy-cuda13x 14.2.0 12.6")]),
    (machine.check_torch, but(GPU, archs=("sm_70",)),
     [OK, ("fail", "sm_86"), OK, OK]),
    (machine.check_torch, but(GPU, archs=("compute_80",), nccl=""),
     [OK, OK, ("warn", ""), OK]),

    (network.check_addresses, HOME, [("ok", "10.0.0.5 eth0 10.0.0.1"),
                                      ("ok", "10.0.0.5")]),
    (network.check_addresses, but(HOME, interfaces=(LO, ETH, WIFI, DOCKER)),
     [("ok", "wlan0 192.168.1.7"), OK]),
    (network.check_addresses, but(HOME, resolves=("127.0.1.1",)),
     [OK, ("warn", "127.0.1.1 GLOO_SOCKET_IFNAME=eth0")]),
    (network.check_addresses, but(HOME, resolves=("127.0.1.1",), variables=(("GLOO_SOCKET_IFNAME", "eth0"),)), [OK]),
    (network.check_addresses, but(HOME, resolves=()), [OK, ("warn", "/etc/hosts")]),
    (network.check_addresses, but(HOME, resolves=("127.0.1.1", "10.0.0.5")), [OK, ("ok", "10.0.0.5")]),
    (network.check_addresses, but(HOME, variables=(("GLOO_SOCKET_IFNAME", "eth1"),)),
     [OK, ("fail", "GLOO_SOCKET_IFNAME=eth1 eth0")]),
    (network.check_addresses, but(HOME, variables=(("NCCL_SOCKET_IFNAME", "eth"),)), [OK, OK]),
    (network.check_addresses, but(HOME, variables=(("NCCL_SOCKET_IFNAME", "=eth"),)),
     [OK, OK, ("fail", "NCCL_SOCKET_IFNAME==eth")]),
    (network.check_addresses, but(HOME, variables=(("NCCL_SOCKET_IFNAME", "^docker"),)), [OK, OK]),
    (network.check_addresses, but(HOME, interfaces=(LO, DOCKER, ETH), chosen="172.17.0.1"),
     [("warn", "172.17.0.1 docker0 COMMLAYER_BIND"), OK]),
    (network.check_addresses, but(HOME, interfaces=(LO, ETH, WG), chosen="10.9.0.2"),
     [("ok", "10.9.0.2 wg0"), OK]),
    (network.check_addresses, but(HOME, chosen="169.254.3.4"), [("warn", "link-local"), OK]),
    (network.check_addresses, but(HOME, chosen=""), [("fail", "10.0.0.1"), OK]),
    (network.check_addresses, but(HOME, chosen="", towards=""), [("warn", ""), OK]),
    (network.check_addresses, but(HOME, chosen="127.0.0.1", towards="localhost"),
     [("fail", "eth0 10.0.0.5"), OK]),
    (network.check_addresses, but(HOME, chosen="127.0.0.1", towards="box"), [("ok", ""), OK]),
    (network.check_addresses, but(HOME, chosen="127.0.0.1", towards="", alone=True), [("ok", "")]),
    (network.check_addresses, but(HOME, bind="10.0.0.9"),
     [OK, OK, ("fail", "10.0.0.9 eth0 10.0.0.5")]),
    (network.check_name, Name("server", "hub", ("203.0.113.7",), 0.01), [("ok", "203.0.113.7")]),
    (network.check_name, Name("server", "10.0.0.1", ("10.0.0.1",)), []),
    (network.check_name, Name("server", "hub", ("203.0.113.7",), 4.0), [("warn", "4.0")]),
    (network.check_name, Name("master", "hub", ("127.0.1.1",)), [("warn", "/etc/hosts")]),
    (network.check_name, Name("master", "localhost", ("127.0.0.1",)), [OK]),
    (network.check_name, Name("master", "hbu", error="Name or service not known"), [("fail", "")]),
    (network.check_port, Port("coordinator", "10.0.0.5:7000"), [("ok", "7000")]),
    (network.check_port, Port("a port of", "10.0.0.5:0"), [("ok", "10.0.0.5")]),
    (network.check_port, Port("coordinator", "10.0.0.5:7000", "in use", True), [("fail", "7000")]),
    (network.check_port, Port("coordinator", "10.0.0.5:70", "Permission denied"), [("fail", "1023")]),
    (network.check_reachable, Reached("server", "h:7000", "open"), [("ok", "")]),
    (network.check_reachable, Reached("server", "h:7000", "refused"), [("fail", "")]),
    (lambda f: network.check_reachable(f, expected=False), Reached("master", "h:7000", "refused"), [("ok", "")]),
    (network.check_reachable, Reached("server", "h:7000", "silent"), [("fail", "")]),
    (network.check_reachable, Reached("server", "h:7000", "no way"), [("fail", "")]),
    (mtu, (ETH, 1500), [("ok", "eth0 1500")]),
    (mtu, (ETH, 1400), [("ok", "1400")]),
    (mtu, (ETH, 600), [("warn", "600")]),
    (mtu, (but(ETH, mtu=576), 0), [("warn", "576")]),
    (mtu, (LO, 65536), []),

    (host_keys, KEYS, [("ok", "gpu-1 300 2 1")]),
    (host_keys, but(KEYS, until=10 * DAY), [("warn", "10 gpu-1 --again")]),
    (host_keys, but(KEYS, ca_until=9 * DAY), [("warn", "")]),
    (host_keys, but(KEYS, revoked=True), [("fail", "--again")]),
    (host_keys, but(KEYS, dials_only=True), [OK, ("fail", "--dials-only")]),
    (worker_keys, but(KEYS, dials_only=True), [OK]),
    (worker_keys, but(KEYS, readable=("node.key",), ca_key=True),
     [OK, ("warn", "600 keys/node.key"), ("warn", "nodes/NAME")]),
    (worker_keys, KeysFolder("k", "keys: k/ca.pem cannot be read: gone; make it"),
     [("fail", "k/ca.pem")]),
    (security.check_settings, Config(), []),
    (security.check_settings, Config(join="h:1", insecure=True, token="12345678"), [("warn", "")]),
    (security.check_settings, Config(join="h:1", keys="k"), [("fail", "COMMLAYER_TOKEN_FILE")]),
    (plan_for_3, PLAN, [("ok", "12 1")]),
    (plan_for_3, but(PLAN, nodes=2), [("fail", "2 3")]),
    (plan_for_3, PlanFile("p", "plan p: no such file"), [("fail", "")]),

    (keyed, SERVER,
     [("ok", "2 4 1"), ("ok", "0.01"), ("ok", "20"), OK]),
    (keyed, but(SERVER, clock_s=-7300.0),
     [OK, ("fail", "2.0 set-ntp"), OK, OK]),
    (lambda f: server.check_server(f, keys=False), but(SERVER, clock_s=7300.0),
     [OK, ("warn", "2.0 set-ntp"), OK, OK]),
    (lambda f: server.check_server(f, keys=False), but(SERVER, clock_s=8.0, clock_error_s=4.0),
     [OK, ("ok", "8"), OK, OK]),
    (keyed, but(SERVER, version="0.2.0", wire=99),
     [("fail", ""), OK, OK, OK]),
    (keyed, but(SERVER, status=but(STATUS, begun=True, closed_reason="a running job takes no new members"), full_down=""),
     [("warn", ""), OK, OK,
      ("ok", "")]),
    (keyed, but(SERVER, status=but(STATUS, begun=True, seated=3, free_seats=1), full_down=""),
     [("ok", "1 4"), OK, OK, OK]),
    (keyed, but(SERVER, status=but(STATUS, begun=True, seated=4, closed_reason="it has all", full=True), full_down=""),
     [("warn", "4"), OK, OK, OK]),
    (keyed, but(SERVER, full_up="no answer", round_trip_s=0.4),
     [OK, OK, ("warn", "400"), ("fail", "full-size 1280")]),
    (keyed, ServerFacts("h:1", "this process has another secret: set it"),
     [("fail", "h:1")]),
    (keyed, ServerFacts("h:1", "no answer within 3.0 s", silent=True), [("fail", "h:1")]),
    (keyed, but(SERVER, paths=(DialedServer("h:2", SILENT),)),
     [OK, ("fail", "h:2"), OK, OK, OK]),
    (keyed, but(SERVER, paths=(DialedServer("h:2", Reached("server", "h:2", "open"), "h:3"),)),
     [OK, ("ok", "h:2"), OK, OK, OK]),
    (keyed, but(SERVER, paths=(DialedServer("h:2", SILENT, "h:3", "open"),)),
     [OK, ("warn", "h:3 h:2"), OK, OK, OK]),
    (keyed, but(SERVER, paths=(DialedServer("h:2", SILENT, "h:3", "takes no gRPC streams there: check"),)),
     [OK, ("fail", "h:2"), OK, OK, OK]),
    (keyed, but(SERVER, paths=(DialedServer("h:3", None, "h:3", "open"),)), [OK, ("ok", "h:3"), OK, OK, OK]),
    (keyed, but(SERVER, paths=(DialedServer("h:3", None, "h:3", "takes no gRPC streams there: check the address"),)),
     [OK, ("fail", ""), OK, OK, OK]),
    (keyed, but(SERVER, carrier="tcp", paths=(DialedServer("h:3", None, "h:3"),)),
     [OK, ("fail", "h:3"), OK, OK, OK]),
    (keyed, but(SERVER, carrier="grpc", paths=(DialedServer("h:2"),)),
     [OK, ("fail", "h:2"), OK, OK, OK]),
    (keyed, but(SERVER, paths=(DialedServer("h:2", SILENT, "h:3", "open"),
                               DialedServer("i:2", Reached("server", "i:2", "silent")),
                               DialedServer("i:3", None, "i:3", "open"))),
     [OK, ("warn", "h:3 h:2"), ("fail", "i:2"),
      ("ok", "i:3"), OK, OK, OK]),
    (server.check_link, LinkFacts(94e6, 12e6), [("ok", "94 Mb/s 12 Mb/s")]),
    (server.check_link, LinkFacts(0.8e6, 12e6), [("warn", "0.8 Mb/s")]),
    (server.check_link, LinkFacts(error="gone"), [("warn", "")]),
    (lambda f: server.check_same_plan(PLAN, f), but(SERVER, status=but(STATUS, plan="xyz")), [("fail", "")]),
    (lambda f: server.check_same_plan(PLAN, f), but(SERVER, status=but(STATUS, plan="abc")), []),
    (lambda f: server.check_same_plan(None, f), SERVER, []),

    (links, ([NodeFacts("a", "a:1"), NodeFacts("b", "b:1")], [Pair(0, 1, 50e6, 90e6, 0.01)]),
     [("ok", "1 50 Mb/s 0 1")]),
    (links, ([NodeFacts("a", "a:1"), NodeFacts("b", "b:1")], [Pair(0, 1, error="silent")]),
     [("fail", "0 1 b:1")]),
    (links, ([NodeFacts(x, x) for x in "abc"],
                                       [Pair(0, 1, 90e6, 90e6), Pair(0, 2, 9e6, 90e6), Pair(1, 2, 90e6, 90e6)]),
     [("warn", "9.0 Mb/s 0 2 90 Mb/s")]),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_fact_has_its_line(number: int) -> None:
    judge, facts, expected = CASES[number]
    found = [*judge(facts)]
    assert [one.verdict for one in found] == [verdict for verdict, _ in expected], found
    for one, (_, values) in zip(found, expected, strict=True):
        assert all(value in f"{one.seen} {one.remedy}" for value in values.split()), one
        assert bool(one.remedy) == (one.verdict != "ok"), "a problem has a remedy"
        assert "\n" not in one.seen + one.remedy


def test_the_tested_torch_is_the_one_that_is_pinned() -> None:
    assert f"torch=={machine.TESTED_TORCH}." in (ROOT / "constraints.txt").read_text()


def test_every_pair_has_its_turn_and_shares_no_link() -> None:
    for nodes in range(2, 10):
        schedule = rounds(nodes)
        pairs = [pair for one in schedule for pair in one]
        assert sorted(pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
        assert all(len({node for pair in one for node in pair}) == 2 * len(one) for one in schedule)
        assert len(schedule) == nodes - 1 + nodes % 2


# ---- looking, and what a person sees


def test_what_hangs_or_breaks_is_a_finding_and_holds_nobody_up() -> None:
    def broken() -> list[Finding]:
        raise OSError(5, "Input/output error")

    begin = time.monotonic()
    found = [*run_checks([
        Check("hangs", lambda: time.sleep(60) or [], 0.2, "pull the plug"), Check("breaks", broken, 5.0, ""),
        Check("works", lambda: [ok("works", "fine")], 5.0, ""),
    ])]
    assert [(one.check, one.verdict) for one in found] == [("hangs", "fail"), ("breaks", "fail"), ("works", "ok")]
    assert (found[0].seen, found[0].remedy) == ("no answer within 0.2 s", "pull the plug")
    assert "Input/output error" in found[1].seen
    assert time.monotonic() - begin < 5.0


def test_a_driver_that_hangs_is_ended() -> None:
    begin = time.monotonic()
    assert machine.read_torch(0.5, "import time; time.sleep(60)").error == "torch and its GPUs did not answer within 0.5 s"
    assert time.monotonic() - begin < 10.0
    assert "exit code 3: bad" in machine.read_torch(30.0, "import sys; print('bad', file=sys.stderr); sys.exit(3)").error


def test_lines_fit_a_terminal_of_80_columns() -> None:
    found = fail("port", "server " + "a-long-name." * 12 + "example:7000 does not answer", "open that port in its firewall and "
                 "router, and check the address that was given to it on the line that started it")
    lines = report.finding_lines(found, 80)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("fail port      server a-long-name")
    assert [line for line in lines if line.startswith(" " * 15 + "-> open that port")]
    assert report.summary([found, warn("a", "b", "c"), ok("a", "b")]) == "not usable: 1 failed, 1 warning, 1 ok"
    assert not usable([found, ok("a", "b")])
    assert usable([warn("a", "b", "c")])


def test_links_of_nodes_are_a_table() -> None:
    nodes = [NodeFacts("alpha", "a:1"), NodeFacts("a-host-with-a-long-name", "b:1"), NodeFacts("gamma", "c:1")]
    lines = table(nodes, [Pair(0, 1, 94.2e6, 11e6, 0.03), Pair(0, 2, error="silent"), Pair(1, 2, 1.2e9, 1e9, 0.001)])
    assert lines == [
        "Mb/s from, to         0     1     2",
        " 0 alpha                 94.2     -",
        " 1 a-host-with-a-    11        1200",
        " 2 gamma              -  1000      ",
        "longest round trip: 0 and 1, 30 ms",
    ]


def test_errors_are_split_into_what_and_remedy() -> None:
    found = of_error("keys", ValueError("ca.pem cannot be read: no such file; `commlayer keys init` makes it"))
    assert (found.seen, found.remedy) == ("ca.pem cannot be read: no such file", "`commlayer keys init` makes it")
    found = of_error("settings", "join: got 'nonsense', allowed: host:port with a port, as in [::1]:7000")
    assert (found.seen, found.remedy) == ("join: got 'nonsense'", "allowed: host:port with a port, as in [::1]:7000")
    assert of_error("x", "odd").remedy

"""What `commlayer doctor` makes of facts: tables of machines, networks, keys and servers, and the one line for each."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from commlayer.cluster.messages import Told
from commlayer.config import Config
from commlayer.doctor import machine_checks, machine_facts, network_checks, node_checks, screen, security_checks, server_checks
from commlayer.doctor.examination import Look, examine
from commlayer.doctor.finding import Finding, fail, of_error, ok, usable, warn
from commlayer.doctor.machine_facts import Files, Folder, Journal, Processor, Shared, Software, Torch
from commlayer.doctor.network_facts import Addresses, Interface, Name, Port, Reached
from commlayer.doctor.node_checks import Node, Pair, turns
from commlayer.doctor.security_facts import KeysFolder, PlanFile
from commlayer.doctor.server_facts import Link, Server, Way
from commlayer.records import ServerInfo

GIB, DAY = 1 << 30, 86400.0
ROOT = Path(__file__).parents[1]
ETH = Interface("eth0", "10.0.0.5")
WIFI = Interface("wlan0", "192.168.1.7")
DOCKER = Interface("docker0", "172.17.0.1", kind="bridge")
WG = Interface("wg0", "10.9.0.2", 1420, "tunnel")
LO = Interface("lo", "127.0.0.1", 65536, "loopback")
HOME = Addresses("box", ("10.0.0.5",), (LO, ETH), "10.0.0.1", "10.0.0.5", alone=False)
GPU = Torch("2.13.0+cu126", "12.6", gpus=(("NVIDIA RTX 3060", 12 * GIB, "sm_86"),) * 2, archs=("sm_80", "sm_90", "compute_90"),
            nccl="2.27.3", cupy="14.2.0", cupy_from="cupy-cuda12x", driver=True)
KEYS = KeysFolder("keys", "", "gpu-1", 0.0, 300 * DAY, 3000 * DAY, list_number=2, listed=1)
SAID = Told("0.1.0", 1, 3, 0.0, 4, 2, (ServerInfo(0, "10.0.0.1:7001", streams="10.0.0.1:7002"),))
SERVER = Server("10.0.0.1:7000", "", SAID, "0.1.0", 1, 3, 0.02, 0.001, 0.01)
SILENT = Reached("server", "h:2", "silent")
PLAN = PlanFile("plan.json", "", "abc", 12, 1)


def but(record: Any, **fields: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(record, **fields)


OK = ("ok", "", "")


def host_keys(f: Any) -> Iterable[Finding]:
    return security_checks.keys(f, serves=True)


def journal(f: Any) -> Iterable[Finding]:
    return machine_checks.journal(f, required=False)


def worker_keys(f: Any) -> Iterable[Finding]:
    return security_checks.keys(f, serves=False)


def keyed(f: Any) -> Iterable[Finding]:
    return server_checks.server(f, keys=True)


def plan_for_3(f: Any) -> Iterable[Finding]:
    return security_checks.plan(f, nodes=3)


def mtu(f: Any) -> Iterable[Finding]:
    return network_checks.mtu("h", *f)


def links(f: Any) -> Iterable[Finding]:
    return node_checks.links(*f)


Judge = Callable[[Any], Iterable[Finding]]
CASES: list[tuple[Judge, Any, list[tuple[str, str, str]]]] = [
    (machine_checks.software, Software("0.1.0", 1, 3, "3.11.9", "avx2"), [("ok", "Python 3.11.9", ""), ("ok", "avx2", "")]),
    (machine_checks.software, Software("0.1.0", 1, 3, "3.13.1", ""),
     [("warn", "Python 3.13.1", "tested on Python 3.11"), ("warn", "no native core", "C\\+\\+ compiler")]),
    (machine_checks.processor, Processor(8, flags=("avx2",)), [("ok", "8 cores of x86_64 with avx2", "")]),
    (machine_checks.processor, Processor(8, 1.5, flags=("avx2",)), [("warn", "allows the time of 1.5", "--cpus")]),
    (machine_checks.processor, Processor(1, flags=("avx2",)), [("warn", "1 core of", "give it 2 or more")]),
    (machine_checks.processor, Processor(4), [("warn", "without AVX2", "portable code")]),
    (machine_checks.processor, Processor(4, math.inf, "aarch64", ("asimd",)), [("ok", "4 cores of aarch64 with asimd", "")]),
    (machine_checks.folder, Folder("checkpoints in", "/x", 10 * GIB), [("ok", "/x: 10.0 GiB free", "")]),
    (machine_checks.folder, Folder("checkpoints in", "/x", GIB), [("warn", "1.0 GiB free", "free some")]),
    (machine_checks.folder, Folder("checkpoints in", "/x", 1 << 20), [("fail", "1 MiB free", "free some")]),
    (machine_checks.folder, Folder("checkpoints in", "/x", error="it is a file"), [("fail", "it is a file", "name a folder")]),
    (journal, Journal(Folder("journal in", "/j", 24 * GIB)), [("ok", "/j: 24.0 GiB free, room for some 1074 M", "")]),
    (journal, Journal(Folder("journal in", "/j", 24 << 20)), [("warn", "room for some 1 M", "goes on without")]),
    (lambda f: machine_checks.journal(f, required=True), Journal(Folder("journal in", "/j", 24 << 20)),
     [("fail", "room for some 1 M", "journal_required")]),
    (lambda f: machine_checks.journal(f, required=True), Journal(Folder("journal in", "/j", GIB)),
     [("warn", "1.0 GiB free, room for some 45 M", "refuses to serve")]),
    (journal, Journal(Folder("journal in", "/j", error="it may not be written to")), [("fail", "may not be", "name a folder")]),
    (journal, Journal(Folder("journal in", "/j", 24 * GIB), held=True), [("fail", "in use by a server", "another folder"), OK]),
    (journal, Journal(Folder("journal in", "/j", 24 * GIB), left=True), [("warn", "journal of a job", "rm -r /j"), OK]),
    (machine_checks.shared, Shared(8 * GIB, 8 * GIB), [("ok", "8.0 GiB free", "")]),
    (machine_checks.shared, Shared(64 << 20, 64 << 20), [("warn", "64 MiB free of 64 MiB", "--shm-size")]),
    (machine_checks.shared, Shared(error="No such file"), [("warn", "No such file", "mount a tmpfs")]),
    (machine_checks.files, Files(1 << 20, 1 << 20), [("ok", "1048576 open files", "")]),
    (machine_checks.files, Files(-1, -1), [("ok", "any number", "")]),
    (machine_checks.files, Files(512, 4096), [("warn", "512 open files", "ulimit -n 4096")]),
    (machine_checks.files, Files(100, 200), [("fail", "100 open files", "limits.conf")]),
    (machine_checks.torch, Torch("2.13.0+cpu"), [("ok", "2.13.0\\+cpu, tested", ""), ("ok", "none: this machine trains", "")]),
    (machine_checks.torch, Torch("2.12.1"), [("warn", "2.12.1, untested", "tested with 2.13"), ("ok", "none", "")]),
    (machine_checks.torch, Torch("2.5.0"), [("fail", "2.5.0", "2.6 or later"), ("ok", "none", "")]),
    (machine_checks.torch, Torch(error="no module named torch"), [("fail", "no module named torch", "pip install torch")]),
    (machine_checks.torch, Torch("2.13.0+cpu", driver=True),
     [("ok", "tested", ""), ("warn", "built without CUDA", "install torch with CUDA")]),
    (machine_checks.torch, Torch("2.13.0", "12.6", driver=True), [OK, ("warn", "finds no GPU", "nvidia-smi")]),
    (machine_checks.torch, GPU, [OK, ("ok", "2 x NVIDIA RTX 3060 \\(12 GiB\\), CUDA 12.6", ""), ("ok", "2.27.3", ""),
                                 ("ok", "cupy-cuda12x 14.2.0", "")]),
    (machine_checks.torch, but(GPU, cupy="", cupy_from=""),
     [OK, OK, OK, ("warn", "codecs run on the CPU", "commlayer\\[gpu12\\]")]),
    (machine_checks.torch, but(GPU, cupy_from="cupy-cuda13x"),
     [OK, OK, OK, ("warn", "cupy-cuda13x 14.2.0, but torch has CUDA 12.6", "uninstall")]),
    (machine_checks.torch, but(GPU, archs=("sm_70",)),
     [OK, ("fail", "no code for sm_86", "build of torch"), OK, OK]),
    (machine_checks.torch, but(GPU, archs=("compute_80",), nccl=""),
     [OK, OK, ("warn", "without it", "Gloo"), OK]),

    (network_checks.addresses, HOME, [("ok", "10.0.0.5 of eth0, on the way to 10.0.0.1", ""),
                                      ("ok", "box leads to 10.0.0.5", "")]),
    (network_checks.addresses, but(HOME, interfaces=(LO, ETH, WIFI, DOCKER)),
     [("ok", "; also wlan0 192.168.1.7$", ""), OK]),
    (network_checks.addresses, but(HOME, resolves=("127.0.1.1",)),
     [OK, ("warn", "box, leads to 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0")]),
    (network_checks.addresses, but(HOME, resolves=("127.0.1.1",), told=(("GLOO_SOCKET_IFNAME", "eth0"),)), [OK]),
    (network_checks.addresses, but(HOME, resolves=()), [OK, ("warn", "does not resolve", "/etc/hosts")]),
    (network_checks.addresses, but(HOME, resolves=("127.0.1.1", "10.0.0.5")), [OK, ("ok", "10.0.0.5", "")]),
    (network_checks.addresses, but(HOME, told=(("GLOO_SOCKET_IFNAME", "eth1"),)),
     [OK, ("fail", "GLOO_SOCKET_IFNAME=eth1", "unset it, or name one of eth0, lo")]),
    (network_checks.addresses, but(HOME, told=(("NCCL_SOCKET_IFNAME", "eth"),)), [OK, OK]),
    (network_checks.addresses, but(HOME, told=(("NCCL_SOCKET_IFNAME", "=eth"),)),
     [OK, OK, ("fail", "NCCL_SOCKET_IFNAME==eth", "unset it")]),
    (network_checks.addresses, but(HOME, told=(("NCCL_SOCKET_IFNAME", "^docker"),)), [OK, OK]),
    (network_checks.addresses, but(HOME, interfaces=(LO, DOCKER, ETH), chosen="172.17.0.1"),
     [("warn", "172.17.0.1 of docker0, .*a bridge inside this machine", "COMMLAYER_BIND"), OK]),
    (network_checks.addresses, but(HOME, interfaces=(LO, ETH, WG), chosen="10.9.0.2"),
     [("ok", "10.9.0.2 of wg0, .*a tunnel", ""), OK]),
    (network_checks.addresses, but(HOME, chosen="169.254.3.4"), [("warn", "link-local", "DHCP"), OK]),
    (network_checks.addresses, but(HOME, chosen=""), [("fail", "no way from here to 10.0.0.1", "ip route"), OK]),
    (network_checks.addresses, but(HOME, chosen="", towards=""), [("warn", "no default route", "ip route"), OK]),
    (network_checks.addresses, but(HOME, chosen="127.0.0.1", towards="localhost"),
     [("fail", "which is this machine to each of them", "eth0 10.0.0.5"), OK]),
    (network_checks.addresses, but(HOME, chosen="127.0.0.1", towards="box"), [("ok", "box is this machine", ""), OK]),
    (network_checks.addresses, but(HOME, chosen="127.0.0.1", towards="", alone=True), [("ok", "stays on this machine", "")]),
    (network_checks.addresses, but(HOME, bind="10.0.0.9"),
     [OK, OK, ("fail", "bind names 10.0.0.9", "bind one of eth0 10.0.0.5")]),
    (network_checks.name, Name("server", "hub", ("203.0.113.7",), 0.01), [("ok", "server hub is 203.0.113.7", "")]),
    (network_checks.name, Name("server", "10.0.0.1", ("10.0.0.1",)), []),
    (network_checks.name, Name("server", "hub", ("203.0.113.7",), 4.0), [("warn", "found in 4.0 s", "resolv.conf")]),
    (network_checks.name, Name("master", "hub", ("127.0.1.1",)), [("warn", "loopback", "/etc/hosts")]),
    (network_checks.name, Name("master", "localhost", ("127.0.0.1",)), [OK]),
    (network_checks.name, Name("master", "hbu", error="Name or service not known"), [("fail", "does not resolve", "spelling")]),
    (network_checks.port, Port("coordinator", "10.0.0.5:7000"), [("ok", "7000 is free", "")]),
    (network_checks.port, Port("a port of", "10.0.0.5:0"), [("ok", "^10.0.0.5 can be listened on", "")]),
    (network_checks.port, Port("coordinator", "10.0.0.5:7000", "in use", True), [("fail", "is taken", "sport = :7000")]),
    (network_checks.port, Port("coordinator", "10.0.0.5:70", "Permission denied"), [("fail", "Permission", "above 1023")]),
    (network_checks.reached, Reached("server", "h:7000", "open"), [("ok", "answers", "")]),
    (network_checks.reached, Reached("server", "h:7000", "refused"), [("fail", "nothing listens", "start it there")]),
    (lambda f: network_checks.reached(f, expected=False), Reached("master", "h:7000", "refused"), [("ok", "yet", "")]),
    (network_checks.reached, Reached("server", "h:7000", "silent"), [("fail", "does not answer", "firewall")]),
    (network_checks.reached, Reached("server", "h:7000", "no way"), [("fail", "no route", "ip route")]),
    (mtu, (ETH, 1500), [("ok", "eth0 sends packets of 1500 bytes$", "")]),
    (mtu, (ETH, 1400), [("ok", "the way to h takes 1400", "")]),
    (mtu, (ETH, 600), [("warn", "the way to h takes 600", "raise it")]),
    (mtu, (but(ETH, mtu=576), 0), [("warn", "packets of 576", "raise it")]),
    (mtu, (LO, 65536), []),

    (host_keys, KEYS, [("ok", "gpu-1 in keys, good for 300 days; list 2, 1 revoked", "")]),
    (host_keys, but(KEYS, until=10 * DAY), [("warn", "ends in 10 days", "add gpu-1 --again")]),
    (host_keys, but(KEYS, ca_until=9 * DAY), [("warn", "the CA in", "keys init")]),
    (host_keys, but(KEYS, revoked=True), [("fail", "list of the revoked", "--again")]),
    (host_keys, but(KEYS, dials_only=True), [OK, ("fail", "--dials-only", "")]),
    (worker_keys, but(KEYS, dials_only=True), [OK]),
    (worker_keys, but(KEYS, readable=("node.key",), ca_key=True),
     [OK, ("warn", "may read node.key", "chmod 600 keys/node.key"), ("warn", "CA's own key", "nodes/NAME")]),
    (worker_keys, KeysFolder("k", "keys: k/ca.pem cannot be read: gone; make it"),
     [("fail", "k/ca.pem cannot be read: gone", "make it")]),
    (security_checks.settings, Config(), []),
    (security_checks.settings, Config(join="h:1", insecure=True, token="12345678"), [("warn", "plain text", "keys init")]),
    (security_checks.settings, Config(join="h:1", keys="k"), [("fail", "no secret", "COMMLAYER_TOKEN_FILE")]),
    (plan_for_3, PLAN, [("ok", "hash abc, 12 buckets, 1 servers", "")]),
    (plan_for_3, but(PLAN, nodes=2), [("fail", "made for 2 nodes, and there are 3", "make it")]),
    (plan_for_3, PlanFile("p", "plan p: no such file"), [("fail", "no such file", "plan make")]),

    (keyed, SERVER,
     [("ok", "2 of 4 workers and 1 server are there", ""), ("ok", "within 0.01 s", ""), ("ok", "20 ms", ""), OK]),
    (keyed, but(SERVER, clock_s=-7300.0),
     [OK, ("fail", "2.0 hours behind the server's: certificates", "set-ntp"), OK, OK]),
    (lambda f: server_checks.server(f, keys=False), but(SERVER, clock_s=7300.0),
     [OK, ("warn", "2.0 hours ahead of the server's: logs", "set-ntp"), OK, OK]),
    (lambda f: server_checks.server(f, keys=False), but(SERVER, clock_s=8.0, clock_error_s=4.0),
     [OK, ("ok", "within 8 s", ""), OK, OK]),
    (keyed, but(SERVER, version="0.2.0", wire=99),
     [("fail", "other version and wire format", "same version"), OK, OK, OK]),
    (keyed, but(SERVER, said=but(SAID, begun=True, shut="a running job takes no new members"), full_down=""),
     [("warn", "has begun", "join it now .a running job takes no new members.: start anew"), OK, OK,
      ("ok", "pass to the server", "")]),
    (keyed, but(SERVER, said=but(SAID, begun=True, seated=3, free=1), full_down=""),
     [("ok", "takes in homes in the place of 1 of its 4 workers", ""), OK, OK, OK]),
    (keyed, but(SERVER, said=but(SAID, begun=True, seated=4, shut="it has all", full=True), full_down=""),
     [("warn", "has its 4 workers", "wait until one is gone"), OK, OK, OK]),
    (keyed, but(SERVER, full_up="no answer", round_trip_s=0.4),
     [OK, OK, ("warn", "400 ms", "nearer"), ("fail", "full-size ones to the server", "mtu 1280")]),
    (keyed, Server("h:1", "this process has another secret: set it"),
     [("fail", "h:1: this process has another secret", "set it")]),
    (keyed, Server("h:1", "no answer within 3.0 s", silent=True), [("fail", "h:1 does not answer", "commlayer serve")]),
    (keyed, but(SERVER, ways=(Way("h:2", SILENT),)),
     [OK, ("fail", "h:2 does not answer", "firewall"), OK, OK, OK]),
    (keyed, but(SERVER, ways=(Way("h:2", Reached("server", "h:2", "open"), "h:3"),)),
     [OK, ("ok", "TCP to server h:2", ""), OK, OK, OK]),
    (keyed, but(SERVER, ways=(Way("h:2", SILENT, "h:3", "open"),)),
     [OK, ("warn", "gRPC streams at h:3, since TCP to server h:2", "open that port"), OK, OK, OK]),
    (keyed, but(SERVER, ways=(Way("h:2", SILENT, "h:3", "takes no gRPC streams there: check"),)),
     [OK, ("fail", "h:2 does not answer", "firewall"), OK, OK, OK]),
    (keyed, but(SERVER, ways=(Way("h:3", None, "h:3", "open"),)), [OK, ("ok", "gRPC streams at h:3$", ""), OK, OK, OK]),
    (keyed, but(SERVER, ways=(Way("h:3", None, "h:3", "takes no gRPC streams there: check the address"),)),
     [OK, ("fail", "takes no gRPC streams there", "check the address"), OK, OK, OK]),
    (keyed, but(SERVER, carrier="tcp", ways=(Way("h:3", None, "h:3"),)),
     [OK, ("fail", "h:3 takes gRPC streams alone, .*\"tcp\"", "carrier alike"), OK, OK, OK]),
    (keyed, but(SERVER, carrier="grpc", ways=(Way("h:2"),)),
     [OK, ("fail", "h:2 takes no gRPC streams, .*\"grpc\"", "carrier alike"), OK, OK, OK]),
    (keyed, but(SERVER, ways=(Way("h:2", SILENT, "h:3", "open"),
                               Way("i:2", Reached("server", "i:2", "silent")), Way("i:3", None, "i:3", "open"))),
     [OK, ("warn", "streams at h:3, since TCP to server h:2", "open that port"), ("fail", "i:2 does not answer", "firewall"),
      ("ok", "streams at i:3", ""), OK, OK, OK]),
    (server_checks.link, Link(94e6, 12e6), [("ok", "94 Mb/s up, 12 Mb/s down", "")]),
    (server_checks.link, Link(0.8e6, 12e6), [("warn", "0.8 Mb/s up", "whatif")]),
    (server_checks.link, Link(error="gone"), [("warn", "not measured: gone", "")]),
    (lambda f: server_checks.plans(PLAN, f), but(SERVER, said=but(SAID, plan="xyz")), [("fail", "abc here, xyz", "same plan")]),
    (lambda f: server_checks.plans(PLAN, f), but(SERVER, said=but(SAID, plan="abc")), []),
    (lambda f: server_checks.plans(None, f), SERVER, []),

    (links, ([Node("a", "a:1"), Node("b", "b:1")], [Pair(0, 1, 50e6, 90e6, 0.01)]),
     [("ok", "1 link, slowest 50 Mb/s between node 0 \\(a\\) and node 1 \\(b\\)", "")]),
    (links, ([Node("a", "a:1"), Node("b", "b:1")], [Pair(0, 1, error="silent")]),
     [("fail", "node 0 \\(a\\) to node 1 \\(b\\) at b:1: silent", "open ports between")]),
    (links, ([Node(x, x) for x in "abc"],
                                       [Pair(0, 1, 90e6, 90e6), Pair(0, 2, 9e6, 90e6), Pair(1, 2, 90e6, 90e6)]),
     [("warn", "slowest 9.0 Mb/s between node 0 \\(a\\) and node 2 \\(c\\), the median 90 Mb/s", "plan make")]),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_fact_has_its_line(number: int) -> None:
    judge, facts, expected = CASES[number]
    found = [*judge(facts)]
    assert [one.verdict for one in found] == [verdict for verdict, _, _ in expected], found
    for one, (_, seen, remedy) in zip(found, expected, strict=True):
        assert re.search(seen, one.seen), one
        assert re.search(remedy, one.remedy), one
        assert bool(one.remedy) == (one.verdict != "ok"), "who is told of something hears what to do"
        assert "\n" not in one.seen + one.remedy


def test_the_tested_torch_is_the_one_that_is_pinned() -> None:
    assert f"torch=={machine_checks.TESTED_TORCH}." in (ROOT / "constraints.txt").read_text()


def test_every_pair_has_its_turn_and_shares_no_link() -> None:
    for nodes in range(2, 10):
        rounds = turns(nodes)
        pairs = [pair for one in rounds for pair in one]
        assert sorted(pairs) == [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
        assert all(len({node for pair in one for node in pair}) == 2 * len(one) for one in rounds)
        assert len(rounds) == nodes - 1 + nodes % 2


# ---- looking, and what a person sees


def test_what_hangs_or_breaks_is_a_finding_and_holds_nobody_up() -> None:
    def broken() -> list[Finding]:
        raise OSError(5, "Input/output error")

    begin = time.monotonic()
    found = [*examine([
        Look("hangs", lambda: time.sleep(60) or [], 0.2, "pull the plug"), Look("breaks", broken, 5.0, ""),
        Look("works", lambda: [ok("works", "fine")], 5.0, ""),
    ])]
    assert [(one.check, one.verdict) for one in found] == [("hangs", "fail"), ("breaks", "fail"), ("works", "ok")]
    assert (found[0].seen, found[0].remedy) == ("no answer within 0.2 s", "pull the plug")
    assert "Input/output error" in found[1].seen
    assert time.monotonic() - begin < 5.0


def test_a_driver_that_hangs_is_ended() -> None:
    begin = time.monotonic()
    assert machine_facts.torch(0.5, "import time; time.sleep(60)").error == "torch and its GPUs did not answer within 0.5 s"
    assert time.monotonic() - begin < 10.0
    assert "exit code 3: bad" in machine_facts.torch(30.0, "import sys; print('bad', file=sys.stderr); sys.exit(3)").error


def test_lines_fit_a_terminal_of_80_columns() -> None:
    found = fail("port", "server " + "a-long-name." * 12 + "example:7000 does not answer", "open that port in its firewall and "
                 "router, and check the address that was given to it on the line that started it")
    lines = screen.lines(found, 80)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("fail port      server a-long-name")
    assert [line for line in lines if line.startswith(" " * 15 + "-> open that port")]
    assert screen.summary([found, warn("a", "b", "c"), ok("a", "b")]) == "not usable: 1 to mend, 1 to look at, 1 ok"
    assert not usable([found, ok("a", "b")])
    assert usable([warn("a", "b", "c")])


def test_links_of_nodes_are_a_table() -> None:
    nodes = [Node("alpha", "a:1"), Node("a-host-with-a-long-name", "b:1"), Node("gamma", "c:1")]
    lines = screen.table(nodes, [Pair(0, 1, 94.2e6, 11e6, 0.03), Pair(0, 2, error="silent"), Pair(1, 2, 1.2e9, 1e9, 0.001)])
    assert lines == [
        "Mb/s from, to         0     1     2",
        " 0 alpha                 94.2     -",
        " 1 a-host-with-a-    11        1200",
        " 2 gamma              -  1000      ",
        "farthest: 0 and 1, 30 ms there and back",
    ]


def test_errors_are_split_into_what_and_remedy() -> None:
    found = of_error("keys", ValueError("ca.pem cannot be read: no such file; `commlayer keys init` makes it"))
    assert (found.seen, found.remedy) == ("ca.pem cannot be read: no such file", "`commlayer keys init` makes it")
    found = of_error("settings", "join: got 'nonsense', allowed: host:port with a port, as in [::1]:7000")
    assert (found.seen, found.remedy) == ("join: got 'nonsense'", "allowed: host:port with a port, as in [::1]:7000")
    assert of_error("x", "odd").remedy

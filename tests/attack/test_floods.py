"""Strangers that flood a port, and members that open more calls and connections than a job needs: other members continue, and
the server stays small. Members connect from 127.0.0.1, strangers from other addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.coordinators import WAIT_S
from support.hostile import HonestMember, Stranger, Usage, Victim, joined
from support.keys import (
    Folders,
)

pytest.importorskip("cryptography", reason="cryptography is not installed")
import grpc

from commlayer.cluster.calls import coordinator_channel, messages
from commlayer.cluster.calls.grpc_port import MAX_CONNECTIONS, GrpcPort
from commlayer.cluster.calls.rpc_server import MAX_CALL_S
from commlayer.cluster.keys import enrolment_client, invitations
from commlayer.cluster.keys.home_keys import HomeLine
from commlayer.config import host_port
from commlayer.demo.links import LinkDirection, Relay
from commlayer.errors import NotYet
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.flow.fair_share import LIMIT
from commlayer.transport.grpc import stream_ends
from commlayer.transport.grpc.event_loop import event_loop, run_on_loop
from commlayer.transport.handshake import MAX_PENDING, Hello
from commlayer.transport.keys import tls
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE

BOUND_S = 4.0
"""Longest call, and longest time to join, on a busy machine; on a quiet one both stay below 1 s."""
FLOOD_S = 3.0
MANY = ",".join(f"127.0.0.{i}" for i in range(2, 52))


class Job:
    """A server with keys that also accepts invitations, and a member of its job that makes calls all the time."""

    def __init__(self, stack: contextlib.ExitStack, folders: Folders) -> None:
        self.folders = folders
        self.victim = stack.enter_context(Victim("--workers", "1", folders=folders, invited="home-1"))
        (self.honest,) = joined(stack, self.victim, HonestMember)
        self.honest.start_calls()
        self.before = self.victim.usage()

    def fresh_call(self) -> float:
        """A call over a new connection; the seconds that it took."""
        begin = time.monotonic()
        link = coordinator_channel.CoordinatorChannel(self.victim.address, self.honest.config.token, self.honest.keys, own=True)
        with contextlib.closing(link):
            link.call("Status", messages.StatusRequest(), messages.StatusReply, WAIT_S)
        return time.monotonic() - begin

    def enrol(self) -> float:
        """Fetches a new home's certificate; the seconds that it took."""
        name = f"home-{time.monotonic_ns()}"
        (token,) = invitations.invite(self.folders.ca, [name]).values()
        begin = time.monotonic()
        enrolment_client.enrol(HomeLine(name, self.victim.address, token), WAIT_S)
        return time.monotonic() - begin

    def dial(self, address: str = "") -> float:
        """A complete handshake of a data connection, at whose end the server says that the rank is connected already. Returns
        the seconds that it took."""
        begin, member = time.monotonic(), self.honest
        hello = Hello(member.plan.job, 0, member.membership.epoch.plan, messages.version())
        end = StreamTransport(hello, settings=Settings(secret=member.config.token, keys=member.keys))
        with contextlib.closing(end), pytest.raises(NotYet) as caught:
            end.dial(SERVER_BASE, host_port(address or self.victim.data_address), begin + WAIT_S)
        assert caught.value.code == "E-RANK"
        return time.monotonic() - begin

    def check(self, peak: Usage) -> None:
        assert self.honest.failed == []
        assert self.honest.longest_call_s < BOUND_S
        assert self.honest.calls > 10
        assert peak.threads - self.before.threads < MAX_PENDING + 40
        assert peak.descriptors - self.before.descriptors < 2 * MAX_PENDING + 60
        assert self.victim.alive


@pytest.fixture
def job(folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with contextlib.ExitStack() as stack:
        yield Job(stack, folders)


@pytest.mark.commit(2)
@pytest.mark.parametrize(("port", "how", "source", "rate"), [
    ("control", "hold", "127.0.0.2", 5000.0), ("data", "hold", "127.0.0.2", 5000.0), ("control", "enrol", MANY, 500.0),
    ("control", "enrol", "127.0.0.2", 500.0), ("control", "garbage", "127.0.0.2", 5000.0), ("control", "tls", MANY, 5000.0),
    ("data", "tls", MANY, 5000.0), ("control", "hold", "127.0.0.2", 300.0), ("control", "trickle", "127.0.0.2", 300.0),
])
def test_flood_of_connections_delays_no_member(job: Job, port: str, how: str, source: str, rate: float) -> None:
    address = job.victim.address if port == "control" else job.victim.data_address
    attempts = (job.fresh_call, job.enrol) if port == "control" else (job.dial,)
    usages, times_s = [job.before], list[float]()
    with Stranger(address, how, source=source, rate=rate):
        time.sleep(1.0)  # the port is full
        end = time.monotonic() + FLOOD_S
        while time.monotonic() < end or len(times_s) < 4:
            times_s += [attempt() for attempt in attempts]
            usages.append(job.victim.usage())
    assert max(times_s) < BOUND_S
    assert statistics.median(times_s) < 1.0, "the bound itself, on a machine that is busy now and then"
    job.check(Usage(*map(max, *usages)))


@pytest.mark.nightly
def test_member_on_a_slow_link_joins_during_a_flood(job: Job) -> None:
    """Its round trip is 300 ms, and bytes of its handshake arrive half a second late, as after a loss."""
    with Relay(0.15) as relay, Stranger(job.victim.data_address, "hold", source="127.0.0.2", rate=5000.0), \
            Stranger(job.victim.address, "hold", source="127.0.0.2", rate=5000.0):
        port = host_port(job.victim.data_address)[1]
        # the certificate takes half a second
        slow = relay.listen(lambda: port, [LinkDirection(1e7), LinkDirection(20_000.0)], [LinkDirection(1e7)])
        time.sleep(0.5)
        job.dial(f"127.0.0.1:{slow}")
    job.check(job.victim.usage())


def test_log_of_a_flood_is_short(job: Job) -> None:
    with Stranger(job.victim.address, "hold", source="127.0.0.2", rate=5000.0):
        time.sleep(FLOOD_S)
    dropped = [line for line in job.victim.lines if " dropped: " in line]
    assert 1 <= len(dropped) <= 2, "a line, and a further one if a minute ends meanwhile"
    assert "127.0.0.2:" in dropped[0]


async def hang(address: str, keys: Keys | None, channels: int, calls: int, timeout_s: float | None) -> Counter[grpc.StatusCode]:
    """Begins calls that send no body, over several connections, and ends them after a while. Returns how others ended."""
    codes = Counter[grpc.StatusCode]()
    opened: list[Any] = []

    async def one(channel: Any) -> None:
        call = channel.stream_unary(f"/{messages.SERVICE}/Status")(timeout=timeout_s)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            codes[error.code()] += 1

    tasks = []
    for _ in range(channels):
        options = [*coordinator_channel.channel_options(address), ("grpc.use_local_subchannel_pool", 1)]
        opened.append(stream_ends.open_channel(address, options, keys, on_loop=True))
        tasks += [asyncio.ensure_future(one(opened[-1])) for _ in range(calls)]
    await asyncio.sleep(FLOOD_S)
    for task in tasks:
        task.cancel()
    for channel in opened:
        await channel.close()
    return codes


def test_calls_that_never_end_delay_no_other_member(job: Job) -> None:
    hostile = Keys(job.folders.second)
    future = asyncio.run_coroutine_threadsafe(hang(job.victim.address, hostile, 20, 60, WAIT_S), event_loop())
    time.sleep(FLOOD_S / 2)
    assert job.fresh_call() < BOUND_S
    assert future.result(2 * WAIT_S)[grpc.StatusCode.RESOURCE_EXHAUSTED] > 0, "the limit was met"
    job.check(job.victim.usage())


async def relay_from(source: str, address: str) -> asyncio.Server:
    """Relays connections to the server, which come from `source` then."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*host_port(address), local_addr=(source, 0))
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    return await asyncio.start_server(relay, "127.0.0.1", 0)


def test_without_keys_calls_are_limited_by_address() -> None:
    with contextlib.ExitStack() as stack:
        victim = stack.enter_context(Victim("--workers", "1"))
        (honest,) = joined(stack, victim, HonestMember)
        honest.start_calls()
        relay = run_on_loop(relay_from("127.0.0.9", victim.address), WAIT_S)
        address = "{}:{}".format(*relay.sockets[0].getsockname())
        codes = run_on_loop(hang(address, None, 20, 60, WAIT_S), 2 * WAIT_S)
        relay.close()
        assert codes[grpc.StatusCode.RESOURCE_EXHAUSTED] > 0, "the limit was met"
        assert honest.failed == []
        assert honest.longest_call_s < BOUND_S


@pytest.mark.parametrize(("peer", "address", "source"), [
    ("ipv4:192.0.2.7:4433", "192.0.2.7:4433", "192.0.2.7"),
    ("ipv6:%5B2001:db8:1:2::9%5D:4433", "[2001:db8:1:2::9]:4433", "2001:db8:1:2::/64"),
])
def test_peer_names_of_grpc_are_parsed(peer: str, address: str, source: str) -> None:
    assert GrpcPort(None, "127.0.0.1", 0, lambda *_: None).caller(peer) == (address, source, None)


@pytest.mark.commit(1)
@pytest.mark.parametrize("timeout_s", [None, MAX_CALL_S + 10.0])
def test_calls_need_a_deadline(job: Job, timeout_s: float | None) -> None:
    codes = run_on_loop(hang(job.victim.address, Keys(job.folders.second), 1, 3, timeout_s), 2 * WAIT_S)
    assert codes == {grpc.StatusCode.INVALID_ARGUMENT: 3}


@pytest.mark.nightly
def test_calls_of_a_member_are_counted_until_they_end(job: Job) -> None:
    """In sequence a member may make more calls than it may have open at once."""
    keys = Keys(job.folders.second)
    for _ in range(2):
        codes = run_on_loop(hang(job.victim.address, keys, 7, 60, 0.5), 2 * WAIT_S)
        assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED: 7 * 60}
    assert LIMIT / 2 < 2 * 7 * 60


@pytest.mark.nightly
def test_excess_connections_of_a_member_close_its_oldest(job: Job) -> None:
    keys, address = Keys(job.folders.second), host_port(job.victim.address)
    with contextlib.ExitStack() as stack:
        socks = []
        for number in range(MAX_CONNECTIONS + 20):
            plain = socket.create_connection(address, WAIT_S, (f"127.0.0.{2 + number % 3}", 0))
            sock = stack.enter_context(tls.TlsSocket(plain, keys, tls.CONTROL, server=False))
            sock.handshake(time.monotonic() + WAIT_S)
            socks.append(sock)
        socks[0].settimeout(WAIT_S)
        with contextlib.suppress(ConnectionResetError):
            while socks[0].recv_into(bytearray(1000)):  # gRPC's settings
                pass
        assert job.fresh_call() < BOUND_S
        usage = job.victim.usage()
    assert usage.threads - job.before.threads < 2 * MAX_CONNECTIONS + 40
    assert usage.descriptors - job.before.descriptors < 3 * MAX_CONNECTIONS + 60
    assert job.honest.failed == []
    assert job.honest.longest_call_s < BOUND_S


def test_no_port_bypasses_tls_and_the_inner_socket_is_private(job: Job) -> None:
    fds = Path(f"/proc/{job.victim.pid}/fd").iterdir()
    inodes = {link.removeprefix("socket:[").rstrip("]") for link in (str(fd.readlink()) for fd in fds) if "socket:" in link}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    listening = {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and line[9] in inodes}
    assert listening == {host_port(where)[1] for where in (job.victim.address, job.victim.data_address)}
    inner = [Path(line.split()[-1]) for line in Path("/proc/net/unix").read_text().splitlines()
             if line.split()[6] in inodes and line.endswith("/grpc")]
    assert {path.parent.stat().st_mode & 0o777 for path in inner} == {0o700}

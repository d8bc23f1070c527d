"""How many members a summation server carries: CPU and memory for each member, bytes, idle members and join storms.

Light members, all in this process, speak the real protocol over sockets to a real `commlayer serve` process: they register as
homes and workers, send heartbeats, and contribute prepared payloads and rows. They train nothing and encode nothing. The server
is pinned to one core, the members to another. Figures are CPU seconds of the server's process, so the members' process may be
slower than the server.

Loopback does the kernel's receive work of a packet in the sender's time, in both directions, so the exchange is about fair.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from bench import Unmeasurable
from bench.report import ROOT, Result
from bench.transport import key_folders
from commlayer import records
from commlayer.callbacks import ignore
from commlayer.cluster.calls import messages, site_client
from commlayer.cluster.calls.coordinator_channel import CoordinatorChannel
from commlayer.cluster.membership import client
from commlayer.cluster.servers.gather import GATHER, ROW_BUCKET
from commlayer.config import host_port, read_config
from commlayer.errors import NotYet
from commlayer.planner import default_plan
from commlayer.records import Job, Plan, TensorInfo
from commlayer.transport import framing
from commlayer.transport.backoff import Backoff
from commlayer.transport.chunking import split_parts
from commlayer.transport.connection import close_channel
from commlayer.transport.crc import crc32c
from commlayer.transport.flow.credit import MIN_PART_NBYTES, PART_S
from commlayer.transport.flow.pacing import SO_MAX_PACING_RATE
from commlayer.transport.handshake import Hello, dial_handshake
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.keys.secret import new_nonce
from commlayer.transport.keys.tls import DATA, TlsSocket
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, channel_binding

GPT2_NUMEL = 124_439_808
"""Elements of GPT-2 small."""
LINE_BPS = 20e6
"""A member's line, in bit/s each way."""
CODEC = "int4()"
BUCKET_NBYTES = 4 << 20
"""Size of a bucket of the scaled model, as float32. Costs for each bucket then weigh as much as in a large model."""
STEPS, STEP_S = 64, 1.0
"""Local steps between two exchanges, and seconds for each, of the rhythm to which the figures refer."""
ROW_NUMBERS = 40
"""Numbers in a member's row."""
HEARTBEAT_S, WAIT_S = 1.0, 120.0
SEGMENT_NBYTES = 1448
"""Bytes of a packet on an ordinary network, so that paced members send as small pieces as real ones do."""
TICK_S = 0.005
SECRET = "secret-of-this-bench"


class Usage(NamedTuple):
    """What a process has used, from /proc."""

    cpu_s: float
    memory_nbytes: int
    peak_nbytes: int
    threads: int
    descriptors: int


def usage_of(pid: int) -> Usage:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    memory, peak = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    return Usage(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), memory, peak, int(fields["Threads"]),
                 len(os.listdir(f"/proc/{pid}/fd")))


def members_carried(core_s: float, period_s: float, idle: float) -> float:
    """Members that one core carries, if an exchange in each period costs `core_s` for each member, and a member without
    exchanges the share `idle` of a core."""
    return 1.0 / (core_s / period_s + idle)


def plan_for(numel: int, servers: int = 1) -> tuple[Job, Plan]:
    """A model of tensors of 1 M elements each, and its plan."""
    tensors = max(1, numel >> 20)
    job = Job(tuple(TensorInfo(f"weight {number}", (1024, min(numel, 1 << 20) // 1024)) for number in range(tensors)))
    plan = default_plan(job, codec=CODEC, path="service", servers=servers, ranks_per_node=1, fuse_nbytes=BUCKET_NBYTES,
                        cut_nbytes=BUCKET_NBYTES)
    return job, msgspec.structs.replace(plan, local_steps=STEPS, codes="updates")


def payloads_of(plan: Plan, server: int = 0) -> dict[int, tuple[int, bytes]]:
    """Codec number and payload of each bucket of a server, with values of a normal distribution."""
    import torch

    from commlayer.compressors import make_codec

    torch.manual_seed(0)
    payloads = {}
    for bucket in plan.buckets:
        if bucket.server == server:
            codec = make_codec(bucket, 0, plan)
            out = memoryview(bytearray(codec.bound(bucket.spec)))
            nbytes = codec.start(torch.randn(bucket.numel), codec.init(bucket.spec), out)
            payloads[bucket.id] = codec.id, bytes(out[:nbytes])
    return payloads


class LightMember:
    """A home of one worker that trains nothing: its registrations with heartbeats, and its data connection to each server."""

    def __init__(self, place: Place) -> None:
        self.place = place
        # A lease's connection may be shared, since it is used once a heartbeat interval.
        self.lease = site_client.SiteLease(place.control, place.config, messages.site_request(1), lambda _: None)
        reply = self.lease.register_and_wait(WAIT_S)
        self.rank = reply.rank
        plan = records.encode(place.plan)
        request = messages.worker_request(
            place.plan.job, self.rank, reply.world, node=reply.node, plan=plan, plan_digest=messages.hash_plan_bytes(plan),
            elastic=True, tensors=len(place.job.tensors), elements=place.model_nbytes // 4)
        # As client.join(), but each member has a connection of its own, as in a process of its own.
        link, ended = CoordinatorChannel(place.control, place.config.token, place.keys, own=True), threading.Event()
        short = msgspec.structs.replace(request, plan=b"")
        joined = link.register(lambda _: short, WAIT_S, WAIT_S, plan=plan, ended=ended)
        self.membership = client.Membership(link, request, joined, place.config, ignore, ended)
        self.connections: list[LightConnection] = []

    def dial(self) -> None:
        epoch = self.membership.epoch
        for server in epoch.servers:
            backoff = Backoff(time.monotonic() + WAIT_S)
            while True:
                try:
                    self.connections.append(LightConnection(self, server.address, server.id, epoch.plan))
                    break
                except NotYet:  # the server has not received the plan yet
                    if not backoff.wait():
                        raise

    def close(self) -> None:
        for connection in self.connections:
            close_channel(connection.sock)
        self.membership.leave()
        self.lease.close(messages.FINISHED)


class LightConnection:
    """A member's connection to one server. `send` and `receive` never block."""

    def __init__(self, member: LightMember, address: str, server: int, plan: str) -> None:
        self.rank, self.server, deadline, place = member.rank, server, time.monotonic() + WAIT_S, member.place
        self.sock = socket.socket()
        if place.rate:  # before the connection begins: small packets, and windows that do not hide the line
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_NBYTES)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            self.sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(place.rate))
        # Another address than the server's: both ends treat the connection as one between machines.
        self.sock.bind((f"127.1.{1 + self.rank // 250}.{1 + self.rank % 250}", 0))
        self.sock.settimeout(WAIT_S)
        self.sock.connect(host_port(address))
        if place.keys is not None:
            self.sock = TlsSocket(self.sock, place.keys, DATA, server=False)
            self.sock.handshake(deadline)
        self.reader = framing.Reader()
        hello = Hello(place.plan.job, self.rank, plan, messages.version(), session=new_nonce())
        dial_handshake(self.sock, self.reader, hello, place.config.token, SERVER_BASE + server, deadline,
                       channel_binding(self.sock))
        self.sock.setblocking(False)
        self.part_nbytes = max(MIN_PART_NBYTES, int(place.rate * PART_S)) if place.rate else 1 << 30
        self.scratch = memoryview(bytearray(8 << 20))
        self.reader.place = lambda _, nbytes: self.scratch[:nbytes]
        self.out: list[memoryview] = []
        self.awaited, self.received_nbytes = 0, 0
        self.results: dict[int, int] = {}
        """Checksum of the last result of each bucket."""
        self.allowed_nbytes = 0.0
        """Bytes that it may read now."""

    def begin(self, step: int, payloads: Mapping[int, tuple[int, bytes]], total: float) -> None:
        """Queues the contributions of one step, and a row on server 0."""
        self.out = []
        for order, (bucket, (codec, body)) in enumerate(payloads.items()):
            self._queue(Header(Kind.PUSH, 1, step, bucket, codec=codec, sender=self.rank, order=order, weight=1.0, used=1,
                               total=total), body)
        self.awaited = len(payloads)
        if self.server == 0:
            self._queue(Header(Kind.PUSH, 1, step, ROW_BUCKET, codec=GATHER, sender=self.rank), bytes(8 * ROW_NUMBERS))
            self.awaited += 1

    def _queue(self, header: Header, body: bytes) -> None:
        parts = parts_of(body, self.part_nbytes)
        for number, (piece, checksum) in enumerate(parts):
            head = header._replace(part=number, parts=len(parts))
            self.out += [memoryview(framing.encode(head, len(piece), checksum)), piece]

    def send(self) -> None:
        """Sends what the kernel takes."""
        with contextlib.suppress(BlockingIOError):
            while self.out:
                left = self.sock.sendmsg(self.out[:64], [], socket.MSG_NOSIGNAL)
                if isinstance(self.sock, TlsSocket) and not left:
                    return
                while self.out and left >= len(self.out[0]):
                    left -= len(self.out.pop(0))
                if left:
                    self.out[0] = self.out[0][left:]

    def receive(self) -> None:
        """Reads what has arrived, up to about `allowed_nbytes`, and counts results."""
        with contextlib.suppress(BlockingIOError):
            while self.allowed_nbytes > 0 and self.awaited:
                room = self.reader.wanted()
                if not (n := self.sock.recv_into(room[: int(min(len(room), self.allowed_nbytes)) or 1])):
                    raise ConnectionError(f"the server has ended the connection of member {self.rank}")
                self.allowed_nbytes -= n
                self.received_nbytes += n
                self.reader.filled(n)
                while (frame := self.reader.next()) is not None:
                    if (h := frame.header).kind == Kind.RESULT:
                        self.results[h.bucket] = crc32c(frame.body, self.results[h.bucket] if h.part else 0)
                        self.awaited -= h.part + 1 == h.parts


@lru_cache(maxsize=256)
def parts_of(body: bytes, part_nbytes: int) -> list[tuple[memoryview, int]]:
    """The parts of a body that all members send, each with its checksum."""
    pieces = [memoryview(body)[start:stop] for start, stop in split_parts(len(body), part_nbytes)]
    return [(piece, crc32c(piece)) for piece in pieces]


class Took(NamedTuple):
    """What some work has taken: seconds, and CPU seconds of the members' process and of the servers."""

    seconds: float
    members_s: float
    servers_s: float


class Place:
    """Servers pinned to one core, and light members in this process, which is pinned to another."""

    def __init__(self, stack: contextlib.ExitStack, *, numel: int, most: int, least: int = 0, bps: float = 0.0,
                 servers: int = 1, tls: bool = False) -> None:
        """`most`: members for which the server is started. `least`: number of members with which the job begins; 0: all."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cores = os.sched_getaffinity(0)
        stack.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, {max(cores)})
        self.rate = bps / 8
        self.job, self.plan = plan_for(numel, servers)
        self.payloads = [payloads_of(self.plan, server) for server in range(servers)]
        self.payload_nbytes = sum(len(body) for one in self.payloads for _, body in one.values())
        self.model_nbytes = 4 * sum(b.numel for b in self.plan.buckets)
        folders = key_folders(folder / "keys", "server", "member") if tls else {}
        self.keys = Keys(folders["member"]) if tls else None
        secret = {"keys": folders["member"]} if tls else {"token": SECRET}
        self.config = read_config({"heartbeat_s": HEARTBEAT_S, "dead_after_s": WAIT_S, "join_deadline_s": WAIT_S, **secret},
                                  environ={}, cwd="/nonexistent")
        settings = {"COMMLAYER_KEYS": folders["server"]} if tls else {"COMMLAYER_TOKEN": SECRET}
        settings |= {"COMMLAYER_HEARTBEAT_S": str(HEARTBEAT_S), "COMMLAYER_DEAD_AFTER_S": str(WAIT_S),
                     "COMMLAYER_LAST_CALL_S": "0.5"}
        first = _serve(stack, ["--workers", str(most), "--servers", str(servers),
                               *(["--min-workers", str(least)] if least else [])], min(cores), settings)
        self.control = _control_of(first)
        self.servers = [first, *(_serve(stack, ["--join", self.control], min(cores), settings) for _ in range(1, servers))]
        self.members: list[LightMember] = []
        self.waited_s: list[float] = []
        """How long each home that joined last has waited until it was a member with connections, in order."""
        self.step = 0
        stack.callback(self.close)

    @property
    def usage(self) -> Usage:
        used = [usage_of(server.pid) for server in self.servers]
        return Usage(*(sum(one) for one in zip(*used, strict=True)))

    @property
    def connections(self) -> list[LightConnection]:
        return [each for member in self.members for each in member.connections]

    def clear_peak(self) -> None:
        for server in self.servers:
            Path(f"/proc/{server.pid}/clear_refs").write_text("5")

    def timed(self, work: Callable[[], object]) -> Took:
        begin, members_s, servers_s = time.monotonic(), time.process_time(), self.usage.cpu_s
        work()
        return Took(time.monotonic() - begin, time.process_time() - members_s, self.usage.cpu_s - servers_s)

    def join(self, count: int, within_s: float = 0.0) -> None:
        """That many homes begin to register, evenly spread over `within_s`."""
        begin = time.monotonic()

        def begin_one(number: int) -> tuple[LightMember, float]:
            time.sleep(max(0.0, begin + within_s * number / count - time.monotonic()))
            since = time.monotonic()
            member = LightMember(self)
            member.dial()
            return member, time.monotonic() - since

        with ThreadPoolExecutor(count) as pool:
            joined = [*pool.map(begin_one, range(count))]
        self.members = sorted([*self.members, *(member for member, _ in joined)], key=lambda member: member.rank)
        self.waited_s = sorted(seconds for _, seconds in joined)

    def exchange(self, count: int, *, late: bool = False) -> None:
        """Makes that many exchanges of all members, which must receive equal results. `late`: member 0, whose contribution is
        added first, sends after all others have sent theirs."""
        connections = self.connections
        for _ in range(count):
            for each in connections:
                each.begin(self.step, self.payloads[each.server], float(len(self.members)))
            held = [(each, each.out) for each in self.members[0].connections] if late else []
            for each, _out in held:
                each.out = []
            if held:
                self._run(lambda: any(each.out for each in connections))
                time.sleep(1.0)  # the server reads what is in the kernel
            for each, out in held:
                each.out = out
            self._run(lambda: any(each.awaited for each in connections))
            self.step += 1
        if len({(each.server, *sorted(each.results.items())) for each in connections}) != len(self.servers):
            raise AssertionError("members received different results")

    def _run(self, goes_on: Callable[[], bool]) -> None:
        """Sends and receives. If the line has a rate, the kernel paces what members send, and this loop what they read."""
        now = time.monotonic()
        deadline = now + WAIT_S
        by_number = {each.sock.fileno(): each for each in self.connections}
        with contextlib.closing(select.epoll()) as poll:
            for number, each in by_number.items():
                poll.register(number, select.EPOLLIN | (select.EPOLLOUT if each.out else 0))
            while goes_on():
                before, now = now, time.monotonic()
                for number in by_number if self.rate else [number for number, _ in poll.poll(1.0)]:
                    each = by_number[number]
                    if each.out:
                        each.send()
                        if not each.out:
                            poll.modify(number, select.EPOLLIN)
                    # Without a rate it reads all: decrypted bytes would not wake this loop again.
                    due_nbytes = each.allowed_nbytes + self.rate * (now - before)
                    each.allowed_nbytes = min(due_nbytes, self.rate * 0.05) if self.rate else math.inf
                    each.receive()
                if now > deadline:
                    raise TimeoutError(f"the exchange did not end within {WAIT_S:g} s")
                if self.rate:
                    time.sleep(max(0.0, now + TICK_S - time.monotonic()))

    def close(self) -> None:
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(LightMember.close, self.members))


@contextlib.contextmanager
def place(**values: Any) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        yield Place(stack, **values)


def _serve(stack: contextlib.ExitStack, options: Sequence[str], core: int, settings: Mapping[str, str]
           ) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")}
    env = kept | {"COMMLAYER_CONFIG": "", "OMP_NUM_THREADS": "1"} | {**settings}
    process = subprocess.Popen([sys.executable, "-m", "commlayer.cli.main", "serve", "--bind", "127.0.0.1", *options], cwd=ROOT,
                               env=env, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    stack.enter_context(process)
    stack.callback(process.kill)
    os.sched_setaffinity(process.pid, {core})
    return process


def _control_of(server: subprocess.Popen[str]) -> str:
    """The address at which a server accepts members."""
    assert server.stdout
    if not (select.select([server.stdout], [], [], WAIT_S)[0] and (line := server.stdout.readline())):
        raise Unmeasurable(f"the server has ended, or gave no address within {WAIT_S:g} s")
    return str(json.loads(line)["control"])


def run(quick: bool) -> Result:
    if len(os.sched_getaffinity(0)) < 2:
        raise Unmeasurable("it needs two cores, one for the server and one for the members")
    rows = []
    for row in _rows(quick):
        print(row, file=sys.stderr, flush=True)  # so that a later failure loses no row
        rows.append(row)
    return {"rows": rows, "summary": summary_of(rows)}


def _rows(quick: bool) -> Iterator[dict[str, Any]]:
    for count in (16, 64) if quick else (16, 64, 256):
        yield idle_row("idle", count)
    yield storm_row("storm of a running job", 2)
    for members, mib in ((32, 4),) if quick else ((8, 4), (32, 4), (32, 16), (128, 4)):
        yield from exchange_rows("flat out", members, mib, late=members == 32)
    for members in (32,) if quick else (32, 128):
        yield from exchange_rows("20 Mb/s", members, 4, bps=LINE_BPS)
    yield from exchange_rows("two servers", 32, 4, servers=2)
    if not quick:
        yield storm_row("storm before the job begins", 0)
        yield idle_row("idle, TLS", 64, tls=True)
        yield from exchange_rows("20 Mb/s, TLS", 32, 4, bps=LINE_BPS, tls=True)


def summary_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figures for GPT-2 small: the payload and the cost of an exchange grow with the number of buckets."""
    cores: dict[str, float] = {}
    """Share of a core for each member without exchanges, by kind of connection."""
    for kind in ("idle", "idle, TLS"):
        if its := [row for row in rows if row["what"] == kind]:
            cores[kind] = sum(row["core"] for row in its) / sum(row["members"] for row in its)
    result = {f"{kind}_ms_per_member_s": 1e3 * core for kind, core in cores.items()}
    for row in rows:
        size = f"{row['members']}x{row['model_mb']:.0f}MB" if "model_mb" in row else ""
        if row["what"] == "memory":
            result[f"memory_x_model, {row['how']}, {size}"] = row["x_model"]
        elif "exchange_ms" in row:
            idle = cores["idle, TLS" if "TLS" in row["what"] else "idle"]
            times = 4 * GPT2_NUMEL / 1e6 / row["model_mb"]
            core_s = times * max(0.0, row["exchange_ms"] / 1e3 - idle * row["exchange_s"])  # without the heartbeats meanwhile
            line_s = 8e6 * times * row["payload_mb"] / LINE_BPS
            result[f"members_at_line, {row['what']}, {size}"] = members_carried(core_s, line_s, idle)
            result[f"members_at_rhythm, {row['what']}, {size}"] = members_carried(
                core_s, max(line_s, STEPS * STEP_S), idle)
    return result


def idle_row(what: str, count: int, seconds: float = 6.0, **values: Any) -> dict[str, Any]:
    """Members that only send heartbeats: what a core of the server and its memory have to do with each."""
    with place(numel=1 << 20, most=count, **values) as its:
        empty = its.usage
        its.join(count)
        time.sleep(2.0)
        took, after = its.timed(lambda: time.sleep(seconds)), its.usage
        return {"what": what, "members": count, "core": took.servers_s / took.seconds,
                "members_busy": took.members_s / took.seconds,
                "kb_per_member": (after.memory_nbytes - empty.memory_nbytes) / count / 1e3,
                "threads_per_member": (after.threads - empty.threads) / count,
                "descriptors_per_member": (after.descriptors - empty.descriptors) / count}


def storm_row(what: str, first: int, count: int = 100, within_s: float = 10.0) -> dict[str, Any]:
    """Homes that register within seconds, until they are members with connections to the server. The transfer of the model
    comes after that. `first`: members of the running job; 0: none is running."""
    with place(numel=1 << 20, most=count + first, least=first) as its:
        if first:
            its.join(first)
            its.exchange(1)
        took = its.timed(lambda: its.join(count, within_s))
        return {"what": what, "members": count, "median_s": median(its.waited_s), "slowest_s": its.waited_s[-1],
                "all_s": took.seconds, "server_cpu_s": took.servers_s, "members_busy": took.members_s / took.seconds}


def exchange_rows(what: str, members: int, mib: int, *, times: int = 4, late: bool = False, **values: Any
                  ) -> Iterator[dict[str, Any]]:
    """Exchanges of that many members, and a model of `mib` times 1 M elements: CPU of the server for each member, and memory.
    `late`: measures memory also if the member whose contribution is added first is the last to send."""
    with place(numel=mib << 20, most=members, **values) as its:
        its.join(members)
        idle = its.usage
        its.exchange(1)
        its.clear_peak()
        took, used = its.timed(lambda: its.exchange(times)), its.usage
        core_s = took.servers_s / times / members
        yield {"what": what, "members": members, "model_mb": its.model_nbytes / 1e6, "payload_mb": its.payload_nbytes / 1e6,
               "exchange_s": took.seconds / times, "exchange_ms": 1e3 * core_s,
               "ms_per_mb": 1e3 * core_s / (2 * its.payload_nbytes / 1e6),
               "server_busy": took.servers_s / took.seconds / len(its.servers), "members_busy": took.members_s / took.seconds}
        if len(its.servers) == 1:
            yield _memory(what, members, its, used.peak_nbytes - idle.memory_nbytes)
        if late:
            its.clear_peak()
            its.exchange(2, late=True)
            yield _memory("first late", members, its, its.usage.peak_nbytes - idle.memory_nbytes)


def _memory(how: str, members: int, its: Place, grown_nbytes: int) -> dict[str, Any]:
    """What the server's memory grew by, for each member, beyond the sums and the residuals (a model's size each) and the
    results of two exchanges."""
    beyond = grown_nbytes - 2 * its.model_nbytes - 2 * its.payload_nbytes
    return {"what": "memory", "how": how, "members": members, "model_mb": its.model_nbytes / 1e6,
            "x_model": max(0.0, beyond) / members / its.model_nbytes}

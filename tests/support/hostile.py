"""A server under attack: its process, honest and hostile members of its job, and strangers, all over real sockets.

    with contextlib.ExitStack() as stack:
        victim = stack.enter_context(Victim("--workers", "2"))            # or Victim(..., folders=folders) with keys
        honest, hostile = joined(stack, victim, HonestMember, HostileMember)
        honest.start_calls()
        with victim.watched() as growth:
            hostile.flood("KvRequest", KvRequest(hostile.home, want=...), count=100)   # at once, replies unread
            with hostile.data() as data:
                data.send(Header(Kind.STATE_GET, 1, bucket=0, sender=hostile.rank))
        assert growth.peak_nbytes < 1 << 20
        assert honest.longest_call_s < 1.0 and honest.step(hostile)
        Stranger(victim.address, "hold", source="127.0.0.2", rate=1000.0).close()
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import torch

from commlayer import records
from commlayer.cluster.calls import coordinator_channel, messages, site_client
from commlayer.cluster.membership import client
from commlayer.compressors import make_codec
from commlayer.config import host_port
from commlayer.records import Plan, Record
from commlayer.transport import framing, handshake
from commlayer.transport.connection import close_channel
from commlayer.transport.crc import crc32c
from commlayer.transport.endpoint import Settings
from commlayer.transport.handshake import Hello
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.keys.secret import bound, make_proof, new_nonce
from commlayer.transport.keys.tls import DATA, TlsSocket
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, channel_binding, key
from support import ROOT
from support.coordinators import WAIT_S, Failures, quick
from support.internals import asker_of
from support.mailbox import InboxTransport
from support.serving import PLAN
from support.strangers import Stranger

if TYPE_CHECKING:
    from support.keys import Folders

__all__ = [
    "DataConnection",
    "Growth",
    "HonestMember",
    "HostileMember",
    "Member",
    "StalledRelay",
    "Stranger",
    "Usage",
    "Victim",
    "flood",
    "joined",
    "usage_of",
]
SECRET = "secret-of-this-test"
QUICK = {"COMMLAYER_HEARTBEAT_S": "0.5", "COMMLAYER_DEAD_AFTER_S": "10", "COMMLAYER_CACHE": "", "OMP_NUM_THREADS": "1"}
CALL_EVERY_S = 0.05


class Usage(NamedTuple):
    """What a process uses, from /proc. `peak_nbytes`: largest memory since the last Victim.watched()."""

    memory_nbytes: int
    peak_nbytes: int
    cpu_s: float
    descriptors: int
    threads: int


def usage_of(pid: int) -> Usage:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return Usage(int(fields["VmRSS"].split()[0]) << 10, int(fields["VmHWM"].split()[0]) << 10,
                 sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))


class Growth:
    """What a process used more at the end of a block than at its start. `peak_nbytes`: at the worst moment in between."""

    memory_nbytes = peak_nbytes = descriptors = threads = 0
    cpu_s = seconds = 0.0


class Victim(contextlib.AbstractContextManager["Victim"]):
    """`commlayer serve` as a process: a coordinator and a summation server. Reads of its output and waits have deadlines."""

    def __init__(self, *options: str, folders: Folders | None = None, environment: dict[str, str] | None = None,
                 secret: str = SECRET, invited: str = "") -> None:
        """`folders`: keys for all, else only the secret. `options`: of `commlayer serve`, such as "--workers", "2". `invited`:
        names of homes that may enrol with the CA in `folders`, with commas."""
        self.folders, self.secret = folders, secret
        line = [sys.executable, "-m", "commlayer.cli.main", "serve", "--bind", "127.0.0.1", *options]
        given = {"COMMLAYER_CONFIG": "", "COMMLAYER_TOKEN": secret}
        if folders is not None and invited:
            line, given = [*line, "--dir", str(folders.ca), "--invite", invited], {}
        elif folders is not None:
            given = {"COMMLAYER_KEYS": str(folders.server)}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COMMLAYER_")}
        self.process = subprocess.Popen(line, cwd=ROOT, env=kept | QUICK | given | (environment or {}), text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.pid, self.lines = self.process.pid, list[str]()
        """Lines of standard error so far."""
        self._readers = [threading.Thread(target=self.lines.extend, args=(self.process.stderr,), daemon=True)]
        self._readers[0].start()
        assert self.process.stdout is not None
        told = "" if not select.select([self.process.stdout], [], [], WAIT_S)[0] else self.process.stdout.readline()
        if not told:
            self.close()
            raise AssertionError("".join(self.lines))
        self.told: dict[str, str] = json.loads(told)
        self.address, self.data_address = self.told["control"], self.told["data"]

    def config(self, folder: Path | None = None, **fields: Any) -> Any:
        """Settings of a member: with keys, those of `folder`."""
        keys = {} if self.folders is None else {"keys": str(folder or self.folders.worker)}
        return quick(heartbeat_s=0.5, dead_after_s=10.0, **({} if keys else {"token": self.secret}), **keys, **fields)

    def usage(self) -> Usage:
        return usage_of(self.pid)

    @contextlib.contextmanager
    def watched(self, settle_s: float = 0.0) -> Iterator[Growth]:
        """The growth of the server's usage in the block, filled in at its end, `settle_s` later."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # the peak is now what it uses
        before, begin, growth = self.usage(), time.monotonic(), Growth()
        yield growth
        time.sleep(settle_s)
        for name, one, other in zip(Usage._fields, before, self.usage(), strict=True):
            setattr(growth, name, other - one)
        growth.peak_nbytes = self.usage().peak_nbytes - before.memory_nbytes
        growth.seconds = time.monotonic() - begin

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        for reader in self._readers:
            reader.join(WAIT_S)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Member:
    """A home of one worker with valid credentials, registered as a site and as worker `rank`, with heartbeats. Its data
    connections are its subclass's."""

    def __init__(self, victim: Victim, rank: int, world: int, plan: Plan = PLAN, **fields: Any) -> None:
        """Waits until all `world` have joined: see `joined`. `fields`: of the worker's Join."""
        folder = None if victim.folders is None else (victim.folders.worker, victim.folders.second)[rank % 2]
        self.victim, self.rank, self.plan, self.config = victim, rank, plan, victim.config(folder)
        self.link = coordinator_channel.CoordinatorChannel(victim.address, self.config.token, self.keys, own=True)
        self.lease = site_client.SiteLease(victim.address, self.config, messages.site_request(1, rank), lambda _: None)
        self.home = self.lease.request.token
        self.lease.register_and_wait(WAIT_S)
        self.request = msgspec.structs.replace(
            messages.worker_request(plan.job, rank, world, node=rank, plan=records.encode(plan), elastic=True,
                                    tensors=1 + max(s.tensor for b in plan.buckets for s in b.slices),
                                    elements=sum(b.numel for b in plan.buckets)), **fields)
        self.failures = Failures()
        self.membership = client.join(victim.address, self.request, self.config, self.failures)
        self.token = self.request.token

    @property
    def keys(self) -> Keys | None:
        return Keys(self.config.keys) if self.config.keys else None

    def contribution(self, step: int, bucket: int = 0) -> tuple[Header, bytes]:
        """An honest PUSH of zeros, for a bucket whose codec takes one round."""
        codec = make_codec(self.plan.buckets[bucket], self.rank, self.plan)
        spec = self.plan.buckets[bucket].spec
        out = memoryview(bytearray(codec.bound(spec)))
        nbytes = codec.start(torch.zeros(spec.shape), codec.init(spec), out)
        return Header(Kind.PUSH, 1, step, bucket, codec=codec.id, sender=self.rank, weight=1.0, used=1,
                      total=float(self.request.world) if codec.needs_undo else 0.0), bytes(out[:nbytes])

    def close(self) -> None:
        self.link.close()
        self.membership.close()
        self.lease.close("the test is over")


class HonestMember(Member):
    """Calls the coordinator all the time, and can contribute to a step."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.longest_call_s, self.calls, self.failed = 0.0, 0, list[str]()
        self._over = threading.Event()
        self._caller: threading.Thread | None = None
        hello = Hello(self.plan.job, self.rank, self.membership.epoch.plan, messages.version(), session=new_nonce())
        self.transport = InboxTransport(hello, settings=Settings(secret=self.config.token, keys=self.keys))
        self.transport.dial(SERVER_BASE, host_port(self.victim.data_address), time.monotonic() + WAIT_S)
        self.steps = 0

    def start_calls(self) -> None:
        """Starts measuring: longest_call_s, calls, failed."""
        self._caller = threading.Thread(target=self._call_often, daemon=True)
        self._caller.start()

    def call(self, timeout_s: float = WAIT_S) -> float:
        """Makes one call; the seconds that it took."""
        begin = time.monotonic()
        self.link.call("Status", messages.StatusRequest(), messages.StatusReply, timeout_s)
        return time.monotonic() - begin

    def _call_often(self) -> None:
        while not self._over.wait(CALL_EVERY_S):
            begin = time.monotonic()
            try:
                self.call()
                self.calls += 1
            except Exception as error:
                if not self._over.is_set():
                    self.failed.append(str(error))
            self.longest_call_s = max(self.longest_call_s, time.monotonic() - begin)

    def step(self, *others: HostileMember, timeout_s: float = WAIT_S) -> bool:
        """Whether a step of the first bucket completes, to which hostile members contribute honestly over data()."""
        header, body = self.contribution(self.steps)
        self.steps += 1
        answer = self.transport.recv(SERVER_BASE, key(header._replace(kind=Kind.RESULT)))
        self.transport.send(SERVER_BASE, header, body)
        for other in others:
            assert other.connection is not None, "it has no data connection"
            other.connection.send(*other.contribution(header.step))
        try:
            self.transport.wait(answer, time.monotonic() + timeout_s)
            return True
        except Exception as error:
            self.failed.append(str(error))
            return False

    def close(self) -> None:
        self._over.set()
        if self._caller is not None:
            self._caller.join(WAIT_S)
        self.transport.close(0.1)
        super().close()


class HostileMember(Member):
    """Sends arbitrary messages with proofs of the job's secret."""

    connection: DataConnection | None = None
    """Its latest data connection."""

    def call(self, method: str, request: Record | bytes, timeout_s: float = WAIT_S) -> bytes:
        """Makes one call with these bytes and a valid proof. Raises grpc.RpcError or AuthenticationFailed."""
        return asker_of(self.link).ask(method, _bytes_of(request), timeout_s)

    def flood(self, method: str, request: Record | bytes | Callable[[int], Record | bytes], count: int,
              timeout_s: float = WAIT_S) -> list[Any]:
        """Starts `count` calls and waits for none. A function gets the number of the call. Returns gRPC's futures."""
        return flood(self.link, method, request, count, timeout_s)

    @contextlib.contextmanager
    def unread(self) -> Iterator[coordinator_channel.CoordinatorChannel]:
        """A further channel to the coordinator, whose replies the block's calls never read: see `flood`."""
        with StalledRelay(self.victim.address) as proxy:
            link = coordinator_channel.CoordinatorChannel(proxy.address, self.config.token, self.keys, own=True)
            try:
                link.call("Status", messages.StatusRequest(), messages.StatusReply, WAIT_S)  # the challenge
                proxy.hearing.clear()
                yield link
            finally:
                link.close()

    @contextlib.contextmanager
    def data(self, **hello: Any) -> Iterator[DataConnection]:
        """A data connection to the server after an honest handshake, or one with other fields of the HELLO."""
        fields: dict[str, Any] = {"job": self.plan.job, "rank": self.rank, "plan": self.membership.epoch.plan}
        fields |= {"session": new_nonce()} | hello
        self.connection = DataConnection(self.victim.data_address, self.config, Hello(**fields))
        try:
            yield self.connection
        finally:
            self.connection.close()


def flood(link: coordinator_channel.CoordinatorChannel, method: str, request: Record | bytes | Callable[[int], Record | bytes],
          count: int, timeout_s: float = WAIT_S) -> list[Any]:
    """Starts `count` calls with valid proofs on that channel and waits for none."""
    known = asker_of(link)._known = asker_of(link)._known or asker_of(link)._greet(timeout_s)
    caller = link._channel.unary_unary(f"/{messages.SERVICE}/{method}")
    futures = []
    for number in range(count):
        body = _bytes_of(request(number) if callable(request) else request)
        certificate = coordinator_channel.fingerprint(link.keys)
        proof = make_proof(link.secret, b"ask", method.encode(), known.challenge, body, *bound(certificate))
        futures.append(caller.future(proof + body, timeout=timeout_s))
    return futures


def _bytes_of(request: Record | bytes) -> bytes:
    return request if isinstance(request, bytes) else messages.pack(request)


class DataConnection:
    """A member's end of a data connection, on which it sends any bytes. What arrives is read only by `read`."""

    def __init__(self, address: str, config: Any, hello: Hello) -> None:
        deadline = time.monotonic() + WAIT_S
        self.sock: socket.socket = socket.create_connection(host_port(address), WAIT_S)
        if config.keys:
            secured = TlsSocket(self.sock, Keys(config.keys), DATA, server=False)
            self.sock = secured
            secured.handshake(deadline)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = framing.Reader()
        handshake.dial_handshake(self.sock, self._reader, hello, config.token, SERVER_BASE, deadline,
                                 channel_binding(self.sock))

    def send(self, header: Header, body: bytes = b"", nbytes: int | None = None, crc: int | None = None) -> None:
        """Sends a frame. `nbytes`, `crc`: the values in its header, if not the true ones. Raises OSError when the server
        has ended the connection, or takes nothing more."""
        data = framing.encode(header, len(body) if nbytes is None else nbytes, crc32c(body) if crc is None else crc)
        self.raw(data + body)

    def raw(self, data: bytes, timeout_s: float = WAIT_S) -> None:
        self.sock.settimeout(timeout_s)
        self.sock.sendall(data)

    def read(self, timeout_s: float = WAIT_S) -> framing.Frame | None:
        """The next frame; None if the server has ended the connection."""
        deadline = time.monotonic() + timeout_s
        while (frame := self._reader.next()) is None:
            self.sock.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                n = self.sock.recv_into(self._reader.wanted())
            except TimeoutError:
                raise
            except OSError:
                n = 0
            if not n:
                return None
            self._reader.filled(n)
        return frame

    def close(self) -> None:
        close_channel(self.sock)


class StalledRelay(contextlib.AbstractContextManager["StalledRelay"]):
    """A relay to the server that stops reading the server's replies when `hearing` is cleared.

    The client's bytes are forwarded.
    """

    def __init__(self, address: str) -> None:
        self._target, self.hearing, self._over = host_port(address), threading.Event(), threading.Event()
        self.hearing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socks = [self._listener]
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target, WAIT_S)
                far.settimeout(None)
                self._socks += [near, far]
                threading.Thread(target=self._pump, args=(near, far, None), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, self.hearing), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, allowed: threading.Event | None) -> None:
        with contextlib.suppress(OSError):
            while not self._over.is_set():
                if allowed is not None and not allowed.wait(0.1):
                    continue
                if select.select([source], [], [], 0.1)[0] and (allowed is None or allowed.is_set()):
                    if not (data := source.recv(1 << 16)):
                        break
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for sock in self._socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


M = TypeVar("M", bound=Member)


def joined(stack: contextlib.ExitStack, victim: Victim, *kinds: type[Member], plan: Plan = PLAN) -> list[Any]:
    """One member of each kind, which start a job together; the stack closes them. `--workers` must be their number."""
    with ThreadPoolExecutor(len(kinds)) as pool:
        waits = [pool.submit(kind, victim, rank, len(kinds), plan) for rank, kind in enumerate(kinds)]
        members = [wait.result(2 * WAIT_S) for wait in waits]
    for member in members:
        stack.callback(member.close)
    return members

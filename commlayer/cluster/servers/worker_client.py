"""A worker's client: its membership in the job, and its connections to the servers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from commlayer.callbacks import ignore
from commlayer.cluster.calls import messages
from commlayer.cluster.membership import client
from commlayer.cluster.membership.client import Membership
from commlayer.cluster.processes.child_processes import EmbeddedServer
from commlayer.cluster.servers.dialing import NOTE_AFTER_S, make_dial
from commlayer.cluster.servers.summation_server import Joins, read_stalled
from commlayer.config import Config, broken_after_s, reconnect_window_s
from commlayer.errors import CommError, CorruptFrame, InvalidInput, PeerLost
from commlayer.records import Epoch, ServerInfo, group_by_site
from commlayer.transport.connection import SizeLimits
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.framing import DEFAULT_MAX_NBYTES
from commlayer.transport.handshake import Hello
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.keys.secret import new_nonce
from commlayer.transport.protocol import KIND_NAMES, SERVER_BASE, Flag, Handle, Header, Kind, Message, peer_name
from commlayer.transport.reconnect import ReconnectingTransport

log = logging.getLogger("commlayer")
Fail = Callable[[CommError], None]
OnStalled = Callable[[int, int, tuple[int, ...]], None]
Left = Callable[[str, int], None]
"""Called with the name of a worker that left in order, and the number of its completed exchanges."""
FAILED_S = 0.5
"""Seconds allowed for sending queued data after an error. The data is useless then, and the link may be the cause."""


class WorkerClient:
    """A worker's membership in the job and its connections to the servers.

    The coordinator reports a failure only once, possibly before `subscribe` or while the worker changes its epoch. The failure
    is therefore passed to every subscriber.
    """

    def __init__(self, config: Config, address: str, request: messages.Join) -> None:
        """Registers with the coordinator at `address` and waits for all processes to join. `dial` connects to servers."""
        keys = Keys(config.keys) if config.keys else None  # invalid keys must leave no registration
        self._config, self._keys, self.address, self._elastic = config, keys, address, request.elastic
        self._rank = request.rank
        self._lock = threading.Lock()
        self._failure: CommError | None = None
        self._generation, self._probes, self._closed = 1, 0, False
        self._fail: Fail = ignore
        self._stalled: OnStalled = ignore
        self._left: Left = ignore
        self._names: dict[int, tuple[str, str]] = {}
        self._membership: Membership | None = None  # None while client.join() runs, whose thread calls the methods below
        self.membership = client.join(
            address, request, config, self._on_death, on_silence=self._on_silence, on_left=self._on_exit, keep=True)
        self.children: Sequence[EmbeddedServer] = ()
        """Servers that this process started. The heartbeat thread keeps them alive, so that they do not end with the session's
        other objects when no one refers to these any more."""
        hello = Hello(request.job, request.rank, self.epoch.plan, messages.version(), session=new_nonce())
        window_s = reconnect_window_s(config)
        self._carrier = StreamTransport(hello, settings=Settings(
            secret=config.token, user_timeout_s=broken_after_s(config), keys=keys, resume=window_s > 0))
        self._membership = self.membership
        self.recycle = self._carrier.pool.give
        self.pace = self._carrier.pace
        """Sets this machine's measured upload rate in bit/s; 0: unknown."""
        self.transport = ReconnectingTransport(self._carrier, window_s, refused_is_over=self.embedded)
        self.transport.arrived = self._on_message
        self.membership.report.fields = lambda: {"missed": self._carrier.disconnected_peers()}

    def limit_bodies(self, nbytes: int) -> None:
        """Sets the largest size of a result, and of all partly received bodies of a server together."""
        results = Kind.RESULT, Kind.FOLLOWED
        by_kind = {int(kind): nbytes if kind in results else DEFAULT_MAX_NBYTES for kind in Kind}
        self._carrier.limits = SizeLimits(by_kind, nbytes)

    def dial(self, deadline: float) -> None:
        """Connects to every server of the epoch. Leaves the job if that fails."""
        try:
            for server in self.epoch.servers:
                # The last process to join has little of the deadline left, so each connection gets at least 10 s.
                dial = make_dial(self._carrier, server, self.address, self._config, self._keys)
                self.transport.connect(SERVER_BASE + server.id, dial, max(deadline, time.monotonic() + 10.0))
        except BaseException as error:
            self.membership.leave(f"could not reach a server: {error}")
            self.transport.close()
            raise

    @property
    def epoch(self) -> Epoch:
        return self.membership.epoch

    def worker_name(self, worker: int) -> str:
        """Returns the name of a present or former worker's machine: the name in its certificate, or its host name if all
        workers use the same certificate. Returns "" if all host names are the same, too."""
        members = (*self.epoch.members, *self.membership.newest.members)
        self._names |= {member.rank: (member.certificate, member.name) for member in members}
        for names in zip(*self._names.values(), strict=True):
            if worker in self._names and len(set(names)) > 1:
                name: str = names[list(self._names).index(worker)]
                return name
        return ""

    def display_name(self, peer: str) -> str:
        """Returns the display name of a peer, for example "worker 2 (ben)" for "worker 2"."""
        kind, _, number = peer.partition(" ")
        name = self.worker_name(int(number)) if kind == "worker" and number.isdecimal() else ""
        return f"{peer} ({name})" if name else peer

    def check(self) -> None:
        """Raises the failure that the coordinator has reported, if there was one."""
        if self._failure is not None:
            raise self._failure

    def switch_epoch(self, epoch: Epoch) -> None:
        """Switches to the epoch. Departures of peers outside that epoch are ignored from now on."""
        self.membership.switch(epoch)

    def subscribe(self, fail: Fail, stalled: OnStalled, left: Left, generation: int = 1) -> None:
        """Subscribes to deaths (`fail`), orderly departures (`left`) and the servers' stall reports of that generation
        (`stalled`). Replaces the previous subscriber."""
        with self._lock:
            self._fail, self._stalled, self._left = fail, stalled, left
            self._generation = generation
        for departure in list(self.membership.left.values()):
            self._on_exit(departure)
        if self._failure is not None:
            fail(self._failure)

    def _on_message(self, message: Message) -> None:
        """Handles a message that is no answer: a server's stall report. Those of an earlier generation are about other buckets.
        Servers repeat them."""
        server = peer_name(message.peer)
        if message.header.kind != Kind.STALLED:
            raise CorruptFrame(f"sent a {KIND_NAMES[message.header.kind]} message, which a worker does not accept", peer=server)
        if message.header.generation != self._generation:
            return
        report = read_stalled(message)
        if report.failed:
            self._fail(CommError(report.failed, peer=server, step=report.step, bucket=report.bucket))
            return
        for member, why in report.dropped.items():
            # If the job can continue without the member, the coordinator, to which the server reports the drop, informs this
            # worker.
            if not (self._elastic and self.membership.reachable):
                self._fail(PeerLost(messages.dropped_by(server, why), peer=peer_name(member), step=report.step,
                                    bucket=report.bucket))
        self._stalled(report.bucket, report.step, report.missing)

    def _on_exit(self, gone: messages.PeerExit) -> None:
        membership, awaited = self._membership, True
        if membership is not None:  # the newest epoch may lack a worker of this site already
            site = next((site for site in group_by_site(membership.epoch.members) if self._rank in site), ())
            awaited = membership.is_expected(gone.peer) or gone.peer in map(peer_name, site)
        if awaited and gone.reason == messages.FINISHED and gone.exchanges >= 0:
            self._left(gone.peer, gone.exchanges)

    def _on_death(self, error: CommError) -> None:
        with self._lock:
            self._failure, fail = self._failure or error, self._fail
        fail(error)

    def _on_silence(self, silent_s: float) -> None:
        """Called while the coordinator does not answer. Training can continue without the coordinator, but not without a server
        in the coordinator's process, whose death no other process would report. Data from that server shows that it lives."""
        alive = self._carrier.heard_since(time.monotonic() - self._config.dead_after_s) if self._membership is not None else ()
        near = [] if self._membership is None else \
            [s for s in self._membership.epoch.servers if s.colocated and f"server {s.id}" not in alive]
        over = [s for s in near if f"server {s.id}" in self._carrier.disconnected_peers() and not s.restartable]
        if near and (self.embedded or over or silent_s >= reconnect_window_s(self._config)):
            self._on_death(PeerLost(f"no heartbeat for {silent_s:.1f} s from its process, which "
                                    f"also runs the coordinator ({_place(near[0])}): it was killed "
                                    "or stopped, or its network failed", peer=f"server {near[0].id}"))

    def with_address(self, error: CommError) -> CommError:
        """Returns the same error, with the address and node added if the error is about a server."""
        servers = [s for s in self.epoch.servers if error.peer == f"server {s.id}"]
        if not servers or "node " in error.what:
            return error
        return error.located(what=f"{error.what} ({_place(servers[0])})")

    @property
    def embedded(self) -> bool:
        """Whether the coordinator is a child process of rank 0."""
        return not self._config.join

    @property
    def coordinated(self) -> bool:
        """Whether the coordinator answered the last heartbeat."""
        return self.membership.reachable

    def fetch_state(self, server: int, bucket: int, undone: int) -> bytes:
        """Reads a server's codec state of a bucket; see Summation.snapshot. `undone`: slices of the last step that were not
        applied."""
        header = self._header(Kind.STATE_GET, bucket)._replace(undone=undone)
        return self._request_server(server, header, b"")

    def put_state(self, server: int, bucket: int, step: int, data: bytes) -> None:
        """Restores a server's codec state of a bucket. `step`: the next step. See Summation.restore."""
        self._request_server(server, self._header(Kind.STATE, bucket)._replace(step=step), data)

    def probe(self, server: int, up_nbytes: int, down_nbytes: int, done: Callable[[Exception | None], None]) -> None:
        """Sends `up_nbytes` to a server, which sends `down_nbytes` back. `done` is called with an error or None when they have
        arrived, in any thread."""
        self._probes += 1
        header = self._header(Kind.PROBE, 0)._replace(step=self._probes, used=down_nbytes)
        answer = self.transport.request(SERVER_BASE + server, header, bytes(up_nbytes))
        answer.on_done(lambda answer: done(answer.error()))

    def pace_servers(self, node: int, bps: float) -> None:
        """Sends the measured upload rate of node `node` (bit/s) to the servers on that node."""
        for server in self.epoch.servers:
            if server.node == node:
                self.transport.send(SERVER_BASE + server.id, self._header(Kind.PACE, 0)._replace(used=int(bps)))

    def send_plan(self, server: int, plan: bytes, generation: int, undone: Mapping[int, int]) -> None:
        """Switches the server to that plan, between steps. Raises ValueError with the server's reason if the server cannot
        switch.

        `undone`: maps a bucket of the previous plan to the slices of the last step that were not applied.
        """
        for bucket, slices in undone.items():
            self.transport.send(SERVER_BASE + server, self._header(Kind.UNDO, bucket)._replace(undone=slices))
        header = self._header(Kind.PLAN, 0)._replace(generation=generation)
        if answer := self._request_server(server, header, plan).decode(errors="replace"):
            raise InvalidInput("E-PLAN-REFUSED", f"{peer_name(SERVER_BASE + server)} cannot use the plan: {answer}")

    def report_joining(self, server: int, number: int, member: int, generation: int) -> Handle:
        """Tells a server that a worker joins; see Joins. Await the answer with `await_report`."""
        header = self._header(Kind.PLAN, 0)._replace(step=number, flags=Flag.ABANDON)
        body = msgspec.msgpack.encode(Joins(number, member, generation))
        return self.transport.request(SERVER_BASE + server, header, body)

    def await_report(self, answer: Handle) -> None:
        """Waits for a server's answer to `report_joining`. Raises CommError if the server refuses."""
        message = answer.wait(time.monotonic() + self._config.deadline_s)
        if problem := bytes(message.body).decode(errors="replace"):
            raise CommError(f"cannot continue with other members: {problem}", peer=peer_name(message.peer))

    def _header(self, kind: Kind, bucket: int) -> Header:
        return Header(kind, self._generation, bucket=bucket, sender=self.transport.rank)

    def _request_server(self, server: int, header: Header, body: bytes) -> bytes:
        answer = self.transport.request(SERVER_BASE + server, header, body)
        return bytes(answer.wait(time.monotonic() + self._config.deadline_s).body)

    def close(self, reason: str = "", flush_s: float | None = None, exchanges: int = -1) -> bool:
        """Leaves the job: without a `reason` in order, after queued data was sent within `flush_s`. Returns whether the
        coordinator was reached. `exchanges`: number of exchanges to which this worker contributed; -1: unknown."""
        if self._closed:
            return True
        self._closed = True
        if reason:
            self.transport.stop_reconnecting()  # servers end the connections of a worker that has left
            delivered = self.membership.leave(reason)
            self.transport.close(FAILED_S)
        else:
            with self._lock:
                self._fail = self.transport.abort  # a server that dies from now on must not be waited for
            self.transport.close(flush_s)  # before leaving: servers do not wait for a worker that has left
            delivered = self.membership.leave(exchanges=exchanges)
        return delivered


def _place(server: ServerInfo) -> str:
    return f"at {server.address} on node {server.node}"


def connect(address: str, request: messages.Join, config: Config) -> WorkerClient:
    """Joins the job at that coordinator and connects to the job's servers."""
    deadline = time.monotonic() + config.join_deadline_s
    uplink = WorkerClient(config, address, request)
    uplink.dial(deadline)
    return uplink


def leave_job(
    link: WorkerClient | None, children: Sequence[EmbeddedServer], reason: str, exchanges: int, *, stay_s: float,
    notice_s: float,
) -> None:
    """Leaves the job and ends the servers that this process started.

    Without a `reason` the process leaves in order: its sent data arrives, and its servers run until the last worker has left,
    at most `stay_s`. With a `reason` the servers run for `notice_s`, so other workers can receive the reason. `exchanges`:
    number of exchanges to which this process contributed.
    """
    until = time.monotonic() + (notice_s if reason else stay_s)
    delivered = link is None or link.close(reason, stay_s, exchanges)
    if not delivered:
        until = time.monotonic() + notice_s  # others might still need its servers
    try:
        if children and delivered and not reason and not children[0].over(min(NOTE_AFTER_S, stay_s)):
            names = ", ".join(link.membership.remaining) if link is not None else ""
            log.warning("this process is done, but its server may still be needed by %s: waiting until they "
                        "have ended, at most %.0f s (deadline_s)", names or "others", stay_s)
        for child in children:
            child.over(until - time.monotonic())
    finally:
        for child in children:
            child.close()

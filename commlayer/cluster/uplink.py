"""A worker's connections: to the coordinator, and to every server. Knows views and addresses; no plan's meaning, no codec."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from commlayer.cluster import carriers, client, messages
from commlayer.cluster.client import Membership, OnView
from commlayer.cluster.summation_server import Stalled, follow_stalls
from commlayer.cluster.view_change import ViewChange
from commlayer.config import Config, reconnect_window_s, unheard_s
from commlayer.errors import CommError, InvalidInput, PeerLost
from commlayer.records import ServerInfo, View
from commlayer.transport.hello import Hello
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, Message, Transport, key, peer_name
from commlayer.transport.resumed import Resumed, Waits
from commlayer.transport.secret import nonce
from commlayer.transport.shaped import shaped_by
from commlayer.transport.stream_transport import Settings, StreamTransport

Fail = Callable[[CommError], None]
OnStalled = Callable[[int, int, tuple[int, ...]], None]
Left = Callable[[str, int], None]
"""Told who has ended in order, and after how many exchanges."""


FAILED_S = 0.5
"""How long an end with an error flushes: what it had sent is of no use, and the way may be why it ends."""


class Uplink:
    """Joins, then dials. Failures that come before `follow` are kept for it, and what the coordinator judges for each: it says
    so once, perhaps while a worker is made for another view."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._early: CommError | None = None
        self._generation, self._probes = 1, 0
        self._fail: Fail | None = None
        self._stalled: OnStalled = lambda *_: None
        self._left: Left = lambda *_: None
        self._regroups = False
        self._membership: Membership | None = None
        self._missed: Callable[[], tuple[str, ...]] = tuple
        self._dial: Callable[[float], None] = lambda _: None
        self._names: dict[int, tuple[str, str]] = {}
        self.address = ""
        self.staying: tuple[str, ...] = ()
        """After close(): the workers that were still in the job."""
        self.transport: Transport
        self.resumed: Resumed | None = None
        """The same, with what it says of connections that broke."""
        self.recycle: Callable[[memoryview], None]
        self.limit_kept: Callable[[int], None]
        """So many bytes at most any server may have under way, or kept here, that nobody asked for."""
        self.pace: Callable[[float], None]
        """So much this end's link carries out; 0: nobody knows."""

    def join(self, address: str, request: messages.Join) -> None:
        """Takes a seat, and waits for everyone."""
        keys = Keys(self._config.keys) if self._config.keys else None  # what is wrong with them takes no seat
        self._membership = membership = client.join(
            address, request, self._config, self._judged, on_silence=self._silent, on_left=self._gone, keep=True)
        self.address, self._regroups = address, request.regroups
        hello = Hello(request.job, request.rank, membership.view.plan, messages.version(), session=nonce())
        window_s = reconnect_window_s(self._config)
        carrier = StreamTransport(hello, settings=Settings(
            secret=self._config.token, user_timeout_s=unheard_s(self._config), keys=keys, resume=window_s > 0))
        self.pace, self.recycle = carrier.pace, carrier.pool.give
        self.transport = transport = Resumed(
            shaped_by(self._config.shape, carrier, membership.view), carrier,
            Waits(window_s, refused_is_over=self.embedded), self.recycle)
        self.resumed = transport

        def limit_kept(nbytes: int) -> None:
            carrier.limit_kept(nbytes)
            transport.limit_kept(nbytes)

        self.limit_kept = limit_kept
        self._missed = membership.missed = carrier.missed

        def dial(deadline: float) -> None:
            for server in membership.view.servers:
                # The last one in leaves little of the deadline to dial with.
                to_it = carriers.dialler(carrier, server, address, self._config, keys)
                transport.connect(SERVER_BASE + server.id, to_it, max(deadline, time.monotonic() + 10.0))

        self._dial = dial

    def dial(self, deadline: float) -> None:
        """Every server of the view. Who cannot leaves the job."""
        try:
            self._dial(deadline)
        except BaseException as error:
            assert self._membership is not None
            self._membership.leave(f"could not reach a server: {error}")
            self.transport.close()
            raise

    @property
    def view(self) -> View:
        assert self._membership is not None
        return self._membership.view

    def name_of(self, worker: int) -> str:
        """The node of that worker, present or gone: as its certificate names it, or where all have one certificate, its host.
        "" where all have one host, too."""
        if self._membership is not None:
            members = (*self._membership.view.members, *self._membership.newest.members)
            self._names |= {member.rank: (member.certificate, member.name) for member in members}
        for names in zip(*self._names.values(), strict=True):
            if worker in self._names and len(set(names)) > 1:
                found: str = names[list(self._names).index(worker)]
                return found
        return ""

    def called(self, peer: str) -> str:
        """A peer as people know it: "worker 2" as "worker 2 (ben)"."""
        kind, _, number = peer.partition(" ")
        name = self.name_of(int(number)) if kind == "worker" and number.isdecimal() else ""
        return f"{peer} ({name})" if name else peer

    @property
    def plan(self) -> bytes:
        """With which the job began."""
        assert self._membership is not None
        return self._membership.plan

    def check(self) -> None:
        """Raises what has failed before `follow`."""
        if self._early is not None:
            raise self._early

    def heed(self, on_view: OnView) -> None:
        """From now on newer views go there."""
        membership = self._membership
        assert membership is not None
        membership.on_view = on_view
        if membership.newest is not membership.view:
            on_view(membership.newest)

    def adopt(self, view: View) -> None:
        """It is in force here. What peers who are not of it have done or not is nobody's concern any more."""
        assert self._membership is not None
        self._membership.view = view

    def finished(self, member: int) -> int:
        """In how many exchanges that worker has done its part, if it left in order; else -1."""
        gone = None if self._membership is None else self._membership.left.get(peer_name(member))
        return -1 if gone is None or gone.reason != messages.FINISHED else gone.exchanges

    def follow(self, fail: Fail, stalled: OnStalled, left: Left, generation: int = 1) -> None:
        """From now on deaths go to `fail`, orderly ends to `left`, and what servers wait for in that generation to `stalled`.

        To nobody from before.
        """
        with self._lock:
            self._fail, self._stalled, self._left = fail, stalled, left
            self._generation = generation
        for gone in [] if self._membership is None else list(self._membership.left.values()):
            self._gone(gone)
        if self._early is not None:
            fail(self._early)
        for s in self.view.servers:
            # Receives of earlier generations stay posted for ever, so they must not hold a worker.
            follow_stalls(self.transport, SERVER_BASE + s.id, generation, functools.partial(self._told, s.id))

    def _told(self, server: int, said: Stalled) -> None:
        if said.failed:
            self._failed(CommError(said.failed, peer=peer_name(SERVER_BASE + server), step=said.step, bucket=said.bucket))
            return
        for member, why in said.dropped.items():
            # Where others may go on without it the coordinator says so, who has heard of it from the server.
            if not (self._regroups and self.coordinated):
                self._failed(PeerLost(messages.dropped_by(peer_name(SERVER_BASE + server), why), peer=peer_name(member),
                                      step=said.step, bucket=said.bucket))
        self._stalled(said.bucket, said.step, said.missing)

    def _gone(self, gone: messages.Gone) -> None:
        with self._lock:
            left = self._left
        awaited = self._membership is None or self._membership.awaited(gone.peer)
        if awaited and gone.reason == messages.FINISHED and gone.exchanges >= 0:
            left(gone.peer, gone.exchanges)

    def _judged(self, error: CommError) -> None:
        with self._lock:
            self._early = self._early or error
        self._failed(error)

    def _failed(self, error: CommError) -> None:
        with self._lock:
            fail = self._fail
            if fail is None:
                self._early = self._early or error
                return
        fail(error)

    def _silent(self, silent_s: float) -> None:
        """The coordinator does not answer, as has been said. Training can do without it, but not without a server in its
        process, of which nobody else would tell."""
        near = [] if self._membership is None else [s for s in self.view.servers if s.beside]
        over = [s for s in near if f"server {s.id}" in self._missed() and not s.returns]
        if near and (self.embedded or over or silent_s >= reconnect_window_s(self._config)):
            self._failed(PeerLost(f"no heartbeat for {silent_s:.1f} s from its process, which is the coordinator, too "
                                  f"({_place(near[0])}): it was killed, stopped or cut off", peer=f"server {near[0].id}"))

    def named(self, error: CommError) -> CommError:
        """The same, which says where a server is."""
        found = [] if self._membership is None else [s for s in self.view.servers if error.peer == f"server {s.id}"]
        if not found or "node " in error.what:
            return error
        return error.located(what=f"{error.what} ({_place(found[0])})")

    @property
    def embedded(self) -> bool:
        """Whether the coordinator is a child of rank 0."""
        return not self._config.join

    @property
    def coordinated(self) -> bool:
        """Whether the coordinator still answers."""
        return self._membership is not None and self._membership.reachable

    def fetch_state(self, server: int, bucket: int, undone: int) -> bytes:
        """A server's codec state of a bucket; see Summation.snapshot."""
        header = self._header(Kind.STATE_GET, bucket)._replace(undone=undone)
        return bytes(self._ask(server, header, b"", Kind.STATE).body)

    def put_state(self, server: int, bucket: int, step: int, data: bytes) -> None:
        """Restores it; `step` comes next. See Summation.restore."""
        self._ask(server, self._header(Kind.STATE, bucket)._replace(step=step), data, Kind.STATE_OK)

    def probe(self, server: int, up_nbytes: int, down_nbytes: int, done: Callable[[Exception | None], None]) -> None:
        """Sends that many bytes to a server, which sends that many back. `done` is called when they are here, on any thread."""
        self._probes += 1
        header = self._header(Kind.PROBE, 0)._replace(step=self._probes, used=down_nbytes)
        peer = SERVER_BASE + server
        handle = self.transport.recv(peer, key(header._replace(kind=Kind.PROBE_OK)))
        handle.on_done(lambda answer: done(answer.error()))
        self.transport.send(peer, header, bytes(up_nbytes))

    def pace_servers(self, node: int, bps: float) -> None:
        """As `pace`, of the servers on that node."""
        for server in self.view.servers:
            if server.node == node:
                self.transport.send(SERVER_BASE + server.id, self._header(Kind.PACE, 0)._replace(used=int(bps)))

    def send_plan(self, server: int, plan: bytes, generation: int, undone: Mapping[int, int]) -> None:
        """The server goes over to that plan, between steps. ValueError with its reason if it cannot.

        `undone`: by bucket of the plan before, what of the last step was not applied.
        """
        for bucket, slices in undone.items():
            self.transport.send(SERVER_BASE + server, self._header(Kind.UNDO, bucket)._replace(undone=slices))
        header = self._header(Kind.PLAN, 0)._replace(generation=generation)
        answer = bytes(self._ask(server, header, plan, Kind.PLAN_OK).body).decode(errors="replace")
        if answer:
            raise InvalidInput("E-PLAN-REFUSED", f"{peer_name(SERVER_BASE + server)} cannot take the plan: {answer}")

    def send_view(self, server: int, change: ViewChange, generation: int) -> None:
        """The server goes over to that view, in the middle of a step. CommError with its reason if it cannot."""
        header = self._header(Kind.PLAN, 0)._replace(generation=generation, flags=Flag.ABANDON)
        answer = bytes(self._ask(server, header, msgspec.msgpack.encode(change), Kind.PLAN_OK).body).decode(errors="replace")
        if answer:
            raise CommError(f"cannot go on with other members: {answer}", peer=peer_name(SERVER_BASE + server))

    def _header(self, kind: Kind, bucket: int) -> Header:
        return Header(kind, self._generation, bucket=bucket, sender=self.transport.rank)

    def _ask(self, server: int, header: Header, body: bytes, answer: Kind) -> Message:
        peer = SERVER_BASE + server
        handle = self.transport.recv(peer, key(header._replace(kind=answer)))
        deadline = time.monotonic() + self._config.deadline_s
        self.transport.wait(self.transport.send(peer, header, body), deadline)
        return self.transport.wait(handle, deadline)

    def close(self, reason: str = "", flush_s: float | None = None, exchanges: int = -1) -> bool:
        """Leaves the job; in order once what was sent is out, within `flush_s`. Whether the coordinator has heard of it.

        `exchanges`: how many it has made.
        """
        membership = self._membership
        if membership is None:
            return True
        if reason:
            heard = membership.leave(reason)
            self.transport.close(FAILED_S)
        else:
            with self._lock:
                self._fail = self.transport.abort  # who dies now must not be waited for
            self.transport.close(flush_s)  # first: who is said to have left is no longer waited for
            heard = membership.leave(exchanges=exchanges)
        self.staying, self._membership = membership.staying, None
        return heard


def _place(server: ServerInfo) -> str:
    return f"at {server.address} on node {server.node}"


def connect(address: str, request: messages.Join, config: Config) -> Uplink:
    """Joins the job at that coordinator and connects to its servers."""
    deadline = time.monotonic() + config.join_deadline_s
    made = Uplink(config)
    made.join(address, request)
    made.dial(deadline)
    return made

"""The gRPC server around the membership decisions: a lock, a clock and sockets. Decides nothing itself.

Every call is answered at once; who waits, asks again. Calls are proved before they are read (sealed.py), small until then, and
wait for their bytes on no thread: one that never comes whole holds nobody up.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from commlayer import config as settings
from commlayer.config import Config
from commlayer.control import membership, messages, plan_parts
from commlayer.control.audit import Audit
from commlayer.control.call_quota import CallQuota, TooMany
from commlayer.control.proved_calls import CHALLENGE, Judge, Unproved
from commlayer.control.rpc_server import Answer, Host
from commlayer.control.tls_front import Front
from commlayer.records import Record
from commlayer.transport.key_folder import Certified, Keys
from commlayer.transport.protocol import SERVER_BASE

log = logging.getLogger("commlayer")

TICK_S = 0.25
TOLD_HEARTBEATS = 3
"""For how many of the others' heartbeats it outlives its parent, to tell of that end."""
Q = TypeVar("Q", bound=Record)


class Coordinator:
    """Listens from construction on. `over` is set when the job has begun and its last worker has left or died."""

    def __init__(self, config: Config, *, workers: int = 0, servers: int = 0,
                 ended: threading.Event | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`workers`: how many to wait for; 0 for as many as the first one says. `ended` is taken for `over` if given."""
        for what, count in (("workers", workers), ("servers", servers)):
            if not 0 <= count <= SERVER_BASE:
                raise ValueError(f"{what}: got {count}, allowed: 0 to {SERVER_BASE}")
        self.over, self._empty = ended or threading.Event(), threading.Event()
        self._state = membership.State(workers, servers)
        self._lock = threading.Lock()
        self._clock, self._heartbeat_s, self._dead_after_s = clock, config.heartbeat_s, config.dead_after_s
        self._closing = threading.Event()
        self._judge, self._plans = Judge(config.token), plan_parts.Plans()
        check_free(config.bind, config.port)
        self._keys, self._audit = Keys(config.keys) if config.keys else None, Audit(config.audit)
        self._front = Front(self._keys, config.bind, config.port, self._audit.refused) if self._keys else None
        self._certificates: dict[str, Certified] = {}  # of seats, by token
        self._quota = CallQuota()
        self._revoked: frozenset[int] = frozenset()
        self._host = Host({
            CHALLENGE: self._challenge,
            "Part": self._method("Part", messages.Part, self._part),
            "Join": self._method("Join", messages.Join, self._join, certified=self._certified),
            "Heartbeat": self._method("Heartbeat", messages.Heartbeat, self._heartbeat),
            "Leave": self._method("Leave", messages.Leave, self._leave),
            "About": self._method("About", messages.About, self._about),
        })
        if self._front is None:
            port = self._host.start(settings.join_host(config.bind, config.port))
        else:
            self._front.start(self._host.start("127.0.0.1:0"))
            port = self._front.port
        self.address = settings.join_host(config.advertise or config.bind, port)
        # What others reach need not be reachable from here: routers seldom turn a packet around.
        self.near = settings.join_host({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.bind, config.bind), port)
        self._ticker = threading.Thread(target=self._tick, name="commlayer-membership", daemon=True)
        self._ticker.start()

    def close(self) -> None:
        """Stops listening; whoever asks later finds nobody. Twice is once.

        After the end of a job it first lets the servers elsewhere hear of it, for as long as one that is silent lives.
        """
        with self._lock:
            over = membership.over(self._state)
        if over and not self._closing.is_set():
            self._empty.wait(self._dead_after_s + self._heartbeat_s)
        self._closing.set()
        self._ticker.join(timeout=5.0)
        self._host.close()
        if self._front is not None:
            self._front.close()
        self._audit.close()

    def orphaned(self, pid: int) -> None:
        """The process of this machine that started the job's embedded servers has ended: so have its seats."""
        with self._lock:
            before, self._state = self._state, membership.ended(self._state, socket.gethostname(), pid)
            self._note_deaths(before)
        self.over.wait(TOLD_HEARTBEATS * self._heartbeat_s)

    def _caller(self, peer: str) -> Certified | None:
        """Whose certificate a call came with; Unproved for one that came by another way than through TLS."""
        if self._front is None:
            return None
        caller = self._front.caller(peer)
        if caller is None:
            raise Unproved
        return caller

    def _certified(self, request: messages.Join, caller: Certified | None) -> messages.Join:
        if caller is not None:
            with self._lock:
                if caller.serial in self._revoked:
                    raise Unproved
                self._certificates[request.token] = caller
        return msgspec.structs.replace(request, certificate=caller.name if caller else "")

    def _challenge(self, _: bytes, peer: str) -> bytes:
        caller = self._caller(peer)
        self._count(caller.name if caller else peer, peer)
        if self._front is not None:
            self._front.spare(peer)
        return self._judge.challenge(peer)

    def _count(self, who: str, peer: str) -> None:
        """TooMany, and the connection ends, for who makes too many calls; named once, until it makes fewer."""
        if not (over := self._quota.over(who, self._clock())):
            return
        why = f"makes more than {self._quota.rate:g} calls a second"
        if over == 1:
            self._audit.refused(who, why)
        if self._front is not None:
            self._front.end(peer)
        raise TooMany(f"{who} {why}")

    def _part(self, request: messages.Part) -> Record:
        with self._lock:
            self._plans.take(request)
        return messages.Pulse()

    def _join(self, request: messages.Join) -> Record:
        with self._lock:
            began = self._state.view is not None
            if request.plan_digest and not request.plan:
                request = msgspec.structs.replace(request, plan=self._plans.whole(request.plan_digest))
            known = request.token in self._state.places
            self._state, reply = membership.join(self._state, request, self._clock())
            view = self._state.view
            place = None if known else self._state.places.get(request.token)
        reply = msgspec.structs.replace(reply, time_s=time.time())
        if reply.error:
            log.warning("refused: %s", reply.error)
            self._audit.note("refused", where=f"{request.name} (pid {request.pid})", why=reply.error)
        if place is not None:
            self._audit.note("joined", peer=place.peer, certificate=request.certificate, host=request.name, of=request.pid)
        if view is not None and not began:
            self._audit.note("begun", workers=len(view.members), servers=len(view.servers), plan=view.plan)
            log.info("all in: %d workers, %d servers, plan %s", len(view.members), len(view.servers), view.plan or "none")
        return reply

    def _heartbeat(self, request: messages.Heartbeat) -> Record:
        with self._lock:
            self._state, pulse = membership.heartbeat(self._state, request.token, self._clock())
        return pulse

    def _leave(self, request: messages.Leave) -> Record:
        with self._lock:
            place = self._state.places.get(request.token)
            if place is not None and place.here:
                self._audit.note("left", peer=place.peer, certificate=place.join.certificate, why=request.reason)
            self._state = membership.leave(self._state, request.token, request.reason, request.exchanges)
            self._note_end()
            # Who has finished hears who has not.
            self._state, pulse = membership.heartbeat(self._state, request.token, self._clock())
        return pulse

    def _about(self, request: messages.About) -> Record:
        with self._lock:
            state = self._state
        return membership.told(state, request, time.time())

    def _tick(self) -> None:
        while not self._closing.wait(TICK_S):
            with self._lock:
                before = self._state
                self._state = membership.tick(before, self._clock(), self._dead_after_s)
                self._note_deaths(before)
            try:
                self._drop_revoked()
            except Exception:  # without the ticker nobody who falls silent would be missed
                log.exception("revoked certificates could not be dropped; the next tick tries again")

    def _drop_revoked(self) -> None:
        revoked = self._keys.revoked() if self._keys else self._revoked
        if self._front is None or revoked == self._revoked:
            return
        self._front.drop(revoked)
        with self._lock:
            before = self._state
            for token, one in self._certificates.items():
                if one.serial in revoked:
                    self._state = membership.cut(self._state, [token], f"its certificate ({one.name}) was revoked")
            self._note_deaths(before)
            self._revoked = revoked

    def _note_deaths(self, before: membership.State) -> None:
        self._note_end()
        for token, place in self._state.places.items():
            if place.dead and not before.places[token].dead:
                log.warning("%s: %s", place.peer, place.dead)
                self._audit.note("lost", peer=place.peer, certificate=place.join.certificate, why=place.dead)

    def _note_end(self) -> None:
        if membership.over(self._state):
            self.over.set()
        if membership.empty(self._state):
            self._empty.set()

    def _method(self, name: str, kind: type[Q], act: Callable[[Q], Record],
                certified: Callable[[Q, Certified | None], Q] = lambda request, _: request) -> Answer:
        """`certified`: what a request becomes that came with that certificate."""

        def answer(data: bytes, peer: str) -> bytes:
            caller = self._caller(peer)
            self._count(caller.name if caller else peer, peer)
            try:
                body = self._judge.opened(peer, name, data, caller.fingerprint if caller else b"")
            except Unproved:
                # No warning: a member whose connection was made anew tries once, asks for a challenge, and is taken. Whose
                # certificate is known may do so unnoted; who was given a challenge here has no such excuse.
                if self._front is None or not self._front.spare(peer):
                    where = f"{caller.name} at {peer}" if caller else peer
                    self._audit.refused(where, f"its {name} does not prove the job's secret on this connection", logging.INFO)
                raise
            request = messages.unpack(body, kind, peer)
            return self._judge.sealed(data, messages.pack(act(certified(request, caller))))

        return answer


def check_free(host: str, port: int) -> None:
    """OSError with one line if nothing can listen there. gRPC's own error does not say why."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            where = settings.join_host(host, port)
            if error.errno == errno.EADDRINUSE:
                line = f"{where} is in use: stop what listens there, or choose another --port (0 for any free one)"
            else:
                line = f"cannot listen on {where}: {error.strerror}; bind an address of this machine"
            raise OSError(error.errno, line) from None

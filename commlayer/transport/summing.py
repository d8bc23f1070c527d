"""Runs a Summation over a transport: receives from every member, sends replies, says who is awaited. Knows no codec, no plan.

Contributions are taken on the carrier's receive threads, one per member, so buckets of different members are added in
parallel; a reply is only queued there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from commlayer.errors import CommError, CorruptFrame
from commlayer.records import Record
from commlayer.transport.protocol import Handle, Header, Key, Kind, Message, Transport, key, peer_name
from commlayer.transport.service import Stall, Summation

log = logging.getLogger("commlayer")

TICK_S = 0.25


class Stalled(Record, frozen=True):
    """Body of a STALLED frame: the sum of this bucket and step waits for these peers; `dropped` says that one will not come."""

    bucket: int
    step: int
    missing: tuple[int, ...]
    dropped: str = ""


def stalled_key(generation: int) -> Key:
    """STALLED frames all have this key, so that one posted receive takes them; what they are about is in the body."""
    return key(Header(Kind.STALLED, generation))


def follow_stalls(transport: Transport, server: int, generation: int, told: Callable[[Stalled], None]) -> None:
    """A member's side: calls told() with what that server says, from now on, on the carrier's thread."""

    def arrived(handle: Handle) -> None:
        if handle.error() is None:
            told(_read_stalled(handle.message()))
            follow_stalls(transport, server, generation, told)

    transport.recv(server, stalled_key(generation)).on_done(arrived)


def _read_stalled(message: Message) -> Stalled:
    try:
        return msgspec.msgpack.decode(message.body, type=Stalled)
    except msgspec.MsgspecError as error:
        raise CorruptFrame(f"STALLED is malformed: {error}", peer=peer_name(message.peer)) from None


class SumServer:
    """Serves until close()."""

    def __init__(
        self, core: Summation, transport: Transport, members: Iterable[int], *, stall_s: float,
        recycle: Callable[[memoryview], None] = lambda _: None,
    ) -> None:
        """`recycle` takes back the bodies of messages that have been added."""
        self._core, self._transport, self._stall_s, self._recycle = core, transport, stall_s, recycle
        self._members = tuple(members)
        self._numbers = {peer_name(m): m for m in self._members}
        self._dropped: dict[int, str] = {}
        self._told: dict[tuple[int, int], tuple[int, ...]] = {}
        self._closing = threading.Event()
        for member in self._members:
            self._listen(member)
        self._thread = threading.Thread(target=self._watch, name="commlayer-stalls", daemon=True)
        self._thread.start()

    def _listen(self, member: int) -> None:
        """Takes what has arrived, then leaves a receive behind."""
        while True:
            handle = self._transport.recv(member)
            if not handle.done():
                handle.on_done(self._arrived)
                return
            if handle.error() is not None:
                return  # this member is gone; heartbeats judge what that means
            self._take(handle.message())

    def _arrived(self, handle: Handle) -> None:
        if handle.error() is None:
            message = handle.message()
            self._take(message)
            self._listen(message.peer)

    def _take(self, message: Message) -> None:
        """Whatever a message brings, the next ones of its sender are still taken: who must go is dropped by name."""
        h = message.header
        try:
            if h.kind == Kind.PUSH:
                for reply in self._core.push(message, time.monotonic(), self._release):
                    self._transport.send(reply.peer, reply.header, reply.body)
            elif h.kind == Kind.STATE_GET:
                state = self._core.snapshot(h.bucket, undo=bool(h.flags))
                self._transport.send(message.peer, h._replace(kind=Kind.STATE, flags=0, sender=self._core.peer), state)
            elif h.kind == Kind.STATE:
                self._core.restore(h.bucket, h.step, message.body)
                self._transport.send(message.peer, h._replace(kind=Kind.STATE_OK, sender=self._core.peer))
            else:
                raise CorruptFrame(f"{Kind(h.kind).name} is not for a server", peer=peer_name(message.peer))
        except CorruptFrame as error:
            self._drop(error)
        except Exception as error:
            what = f"could not be served: {type(error).__name__}: {error}"
            self._drop(CorruptFrame(what, peer=peer_name(message.peer), step=h.step, bucket=h.bucket))

    def _release(self, message: Message) -> None:
        self._recycle(message.body)

    def _drop(self, error: CorruptFrame) -> None:
        """A member that breaks the protocol is out; the others hear of it with the sum that waits for it."""
        member = self._numbers[error.peer]
        log.warning("dropped %s", error)
        self._dropped[member] = error.what
        self._transport.abort(error, member)

    def _watch(self) -> None:
        while not self._closing.wait(TICK_S):
            for stall in self._core.stalled(time.monotonic() - self._stall_s):
                self._tell(stall)

    def _tell(self, stall: Stall) -> None:
        place = (stall.bucket, stall.step)
        if self._told.get(place) == stall.missing:
            return
        self._told = {p: m for p, m in self._told.items() if p[0] != stall.bucket} | {place: stall.missing}
        dropped = next((self._dropped[m] for m in stall.missing if m in self._dropped), "")
        body = msgspec.msgpack.encode(Stalled(stall.bucket, stall.step, stall.missing, dropped))
        for member in stall.waiting:
            self._transport.send(member, Header(Kind.STALLED, self._core.generation, sender=self._core.peer), body)

    def close(self, reason: CommError | None = None) -> None:
        self._closing.set()
        self._thread.join(2.0)
        if reason is not None:
            self._transport.abort(reason)
        self._transport.close()

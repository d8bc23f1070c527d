"""A transport over a transport that misbehaves as scripted, and counts its shots. Knows headers; nothing of what they carry."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from commlayer.errors import CommError, InvalidInput, PeerLost
from commlayer.transport import mailbox
from commlayer.transport.protocol import Handle, Header, Transport, Wrapper, peer_name


class Fault(NamedTuple):
    """What happens to which sends: those that match, from the `nth` on, `times` of them, each with chance `rate`."""

    action: str
    """drop, delay, corrupt, duplicate or fail: see ACTIONS."""
    peer: int | None = None
    kind: int | None = None
    step: int | None = None
    nth: int = 1
    times: int = 1
    rate: float = 1.0
    delay_s: float = 0.0

    def matches(self, peer: int, header: Header) -> bool:
        wanted = ((self.peer, peer), (self.kind, header.kind), (self.step, header.step))
        return all(want is None or want == got for want, got in wanted)


class Faulty(Wrapper):
    """A Transport; made by faulty(). `shots[i]` counts how often script[i] fired."""

    def __init__(self, inner: Transport, script: Sequence[Fault], seed: int) -> None:
        super().__init__(inner)
        self._script = tuple(script)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._seen = [0] * len(self._script)
        self.shots = [0] * len(self._script)
        self._delayed: list[tuple[threading.Timer, Handle]] = []
        self.recv, self.wait, self.abort = inner.recv, inner.wait, inner.abort

    def send(self, peer: int, header: Header, body: memoryview | bytes = b"") -> Handle:
        fault = self._shot(peer, header)
        if fault is None:
            return self._inner.send(peer, header, body)
        return ACTIONS[fault.action](self, fault, peer, header, bytes(body))

    def _shot(self, peer: int, header: Header) -> Fault | None:
        """The first fault of the script that fires; each counts all sends that match it."""
        fired = None
        with self._lock:
            for i, fault in enumerate(self._script):
                if not fault.matches(peer, header):
                    continue
                self._seen[i] += 1
                ready = self._seen[i] >= fault.nth and self.shots[i] < fault.times
                if fired is None and ready and self._random.random() < fault.rate:
                    self.shots[i] += 1
                    fired = fault
        return fired

    def _drop(self, _: Fault, peer: int, header: Header, body: bytes) -> Handle:
        operation = mailbox.sending(peer, header)
        mailbox.sent(operation, header)
        return operation

    def _delay(self, fault: Fault, peer: int, header: Header, body: bytes) -> Handle:
        operation = mailbox.sending(peer, header)
        timer = threading.Timer(
            fault.delay_s, lambda: operation.follow(self._inner.send(peer, header, body)),
        )
        timer.daemon = True
        with self._lock:
            self._delayed.append((timer, operation))
        timer.start()
        return operation

    def _corrupt(self, _: Fault, peer: int, header: Header, body: bytes) -> Handle:
        broken = bytearray(body)
        if broken:
            broken[self._random.randrange(len(broken))] ^= 1 << self._random.randrange(8)
        return self._inner.send(peer, header, bytes(broken))

    def _duplicate(self, _: Fault, peer: int, header: Header, body: bytes) -> Handle:
        self._inner.send(peer, header, body)
        return self._inner.send(peer, header, body)

    def _fail(self, _: Fault, peer: int, header: Header, body: bytes) -> Handle:
        self._inner.abort(PeerLost("failed by the script", peer=peer_name(peer)), peer)
        return self._inner.send(peer, header, body)

    def close(self, flush_s: float | None = None) -> None:
        with self._lock:
            delayed, self._delayed = self._delayed, []
        for timer, operation in delayed:
            timer.cancel()
            operation.fail(CommError("this end of the transport was closed", code="E-SESSION-CLOSED"))
        self._inner.close(flush_s)


Action = Callable[[Faulty, Fault, int, Header, bytes], Handle]
ACTIONS: dict[str, Action] = {
    "drop": Faulty._drop,  # says that it was sent
    "delay": Faulty._delay,  # sends it delay_s later; what was sent meanwhile overtakes
    "corrupt": Faulty._corrupt,  # flips one bit before the frame is made: the checksum is right, the codec must notice
    "duplicate": Faulty._duplicate,
    "fail": Faulty._fail,  # ends the peer
}


def faulty(inner: Transport, script: Sequence[Fault], seed: int = 0) -> Faulty:
    """`inner` with the faults of `script`, the same ones for the same seed and sends."""
    for fault in script:
        if fault.action not in ACTIONS:
            raise InvalidInput("E-ARGUMENT", f"fault {fault.action!r}, allowed: {', '.join(ACTIONS)}")
    return Faulty(inner, script, seed)

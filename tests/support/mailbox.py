"""Receives that wait for a message with a key: for tests in which both ends of a connection send what they like."""

from __future__ import annotations

import threading
from typing import Any

from commlayer.errors import CommError
from commlayer.transport.endpoint import StreamTransport, closed_error
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import KIND_NAMES, Handle, Header, Key, Message, answer_key, key


class Mailbox:
    """Matches received messages with receives. First in, first out: a message completes the oldest matching receive, and a
    receive returns the oldest matching message."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posted: list[tuple[int, Key | None, Handle]] = []
        self._kept: list[Message] = []
        self._failed: dict[int | None, CommError] = {}

    def failure(self, peer: int | None) -> CommError | None:
        """The error that ended this peer (None: all peers)."""
        return self._failed.get(None) or self._failed.get(peer)

    def recv(self, peer: int, match: Key | None) -> Handle:
        step, bucket = (None, None) if match is None else match[2:4]
        operation = Handle("receive" if match is None else f"receive of {KIND_NAMES[match[0]]}", peer, step, bucket)
        with self._lock:
            message = next((m for m in self._kept if m.peer == peer and match in (None, key(m.header))), None)
            error = self.failure(peer)
            if message is not None:
                self._kept = [m for m in self._kept if m is not message]
            elif error is None:
                self._posted.append((peer, match, operation))
        if message is not None:
            operation.complete(message)
        elif error is not None:
            operation.fail(error)
        return operation

    def deliver(self, message: Message) -> None:
        matches = (message.peer, None), (message.peer, key(message.header))
        with self._lock:
            if self.failure(message.peer) is not None:
                return
            place = next((number for number, (*one, _) in enumerate(self._posted) if tuple(one) in matches), None)
            if place is None:
                self._kept.append(message)
                return
            operation = self._posted.pop(place)[-1]
        operation.complete(message)

    def end(self, reason: CommError, peer: int | None) -> None:
        """Ends one peer, or all: receives fail, but messages that have arrived can still be received. The first reason is
        kept."""
        with self._lock:
            reason = self._failed.setdefault(peer, reason)
            ended = [operation for other, _, operation in self._posted if peer in (None, other)]
            self._posted = [entry for entry in self._posted if peer not in (None, entry[0])]
        for operation in ended:
            operation.fail(reason)

    def abort(self, reason: CommError, peer: int | None = None) -> None:
        """Ends one peer, or all, and drops the messages that have arrived."""
        with self._lock:
            self._kept = [m for m in self._kept if peer not in (None, m.peer)]
        self.end(reason, peer)

    def admit(self, peer: int) -> None:
        """Clears the error of a peer that has connected again."""
        with self._lock:
            self._failed.pop(peer, None)


class Receives:
    """Methods of a transport that has a mailbox."""

    mailbox: Mailbox

    def recv(self, peer: int, match: Key | None = None) -> Handle:
        """The next message from that peer with that key; None: with any key. Messages that have arrived before are kept."""
        return self.mailbox.recv(peer, match)

    def request(self: Any, peer: int, header: Header, body: memoryview | bytes = b"") -> Handle:
        """Sends a request. The handle of its answer also fails if the request cannot be sent."""
        answer: Handle = self.recv(peer, answer_key(header))

        def sent(sending: Handle) -> None:
            if (error := sending.error()) is not None:
                answer.fail(error)

        self.send(peer, header, body).on_done(sent)
        return answer

    def wait(self, handle: Handle, deadline: float) -> Message:
        return handle.wait(deadline)


class InboxTransport(Receives, StreamTransport):
    """A StreamTransport whose messages are received from a mailbox, unless its owner takes them."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.mailbox = Mailbox()
        self.arrived = self.mailbox.deliver
        self.ended = lambda peer, error: self.mailbox.end(error, peer)

    def _refusal(self, hello: Hello, name: str) -> str:
        if not (reason := super()._refusal(hello, name)):
            self.mailbox.admit(hello.rank)  # before the welcome: after it the dialer counts as connected
        return reason

    def _connect(self, sock: Any, peer: int, *arguments: Any) -> None:
        self.mailbox.admit(peer)
        super()._connect(sock, peer, *arguments)

    def abort(self, reason: CommError, peer: int | None = None) -> None:
        self.mailbox.abort(reason, peer)
        super().abort(reason, peer)

    def close(self, flush_s: float | None = None) -> None:
        self.mailbox.abort(closed_error())
        super().close(flush_s)

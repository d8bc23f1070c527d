"""Reconnecting transport: re-establishes broken connections and sends unanswered requests again.

Used by the end that dials. Callers see no error when a connection breaks. Within `window_s` the peer is dialed again, with
backoff, and unanswered requests are replayed with the same bytes. Duplicate answers are dropped. The peer's operations fail
only after that window, or if the peer refuses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from commlayer.callbacks import ignore
from commlayer.errors import CommError, Damaged, NotYet, PeerLost, Refused, without_code
from commlayer.transport.backoff import Backoff
from commlayer.transport.endpoint import StreamTransport, closed_error
from commlayer.transport.inflight import ANSWERS, InFlightRequests
from commlayer.transport.protocol import Flag, Handle, Header, Kind, Message, log, peer_name

STABLE_S = 10.0
"""Seconds after which a connection counts as stable, even if no message has arrived on it."""
CONNECT_TRIES = 8
"""Number of attempts for the first connection, whose handshake may break as well."""
ASK_NBYTES = 4 << 10
"""A contribution of at least this size is sent again only after the server has asked for it."""
DIAL_LIMIT_S = 10.0
"""Longest time of one attempt in seconds, since an unreachable host may not answer at all."""

Dial = Callable[[float], None]
"""Function that connects to one peer before the given deadline, or raises CommError."""


def is_refused(error: BaseException | None) -> bool:
    """Returns whether the peer's machine refused the connection, because no process listens on the port."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__context__
    return error is not None


class _Link:
    """State of the connection to one peer. `order` is locked while requests are sent, so that new requests do not overtake
    replayed ones."""

    def __init__(self, peer: int, dial: Dial) -> None:
        self.dial = dial
        self.order = threading.RLock()
        self.inflight = InFlightRequests(peer)
        self.state = threading.Lock()
        self.up, self.reconnecting, self.broke_again = True, False, False
        self.error: CommError | None = None
        """The error with which the peer has ended. The value is None while the peer may return."""
        self.broken_since_s: float | None = None
        """Time when the connection first broke since the last message arrived. The value is None if the connection has not
        broken since then."""
        self.restored_s = 0.0
        """Time when the connection was last re-established; 0 if never."""
        self.backoff: Backoff | None = None
        """Pauses between attempts to reconnect. The value is None if there was no attempt since the last message arrived."""


class ReconnectingTransport:
    """Sends requests over a StreamTransport, and reconnects to the peers that were connected with `connect`."""

    def __init__(self, carrier: StreamTransport, window_s: float, *, refused_is_over: bool = False) -> None:
        """`window_s`: seconds for which to try to reconnect. `refused_is_over`: True: a refused port means that the peer's
        process has ended."""
        self._carrier, self._window_s, self._refused_is_over = carrier, window_s, refused_is_over
        self._links: dict[int, _Link] = {}
        self._closing = threading.Event()
        self._count = threading.Lock()
        self.breaks = self.resent_nbytes = self.repeats = 0
        """Counters: connections re-established, bytes sent again, and dropped answers that no request waits for."""
        self.arrived: Callable[[Message], None] = ignore
        """Function that the receive threads call with messages that are no answers. Set before `connect`."""
        carrier.broken, carrier.arrived, carrier.ended = self._broken, self._on_message, self._fail_peer

    @property
    def rank(self) -> int:
        return self._carrier.rank

    @property
    def kept_nbytes(self) -> int:
        """Bytes that would be sent again if all connections broke now. The callers own the bodies, which are not copied."""
        return sum(link.inflight.nbytes for link in self._links.values())

    def connect(self, peer: int, dial: Dial, deadline: float) -> None:
        """Connects to `peer` for the first time. `dial` is also used for reconnects."""
        self._links[peer] = _Link(peer, dial)
        backoff = Backoff(deadline, self._closing)
        for attempts_left in reversed(range(CONNECT_TRIES)):
            try:
                dial(deadline)
                break
            except (PeerLost, Damaged, NotYet) as error:
                if not attempts_left or is_refused(error) or not backoff.wait():
                    raise

    def send(self, peer: int, header: Header) -> None:
        """Sends a message of a kind without answer. It is sent again after a reconnect, as requests are."""
        self.request(peer, header)

    def request(self, peer: int, header: Header, body: memoryview | bytes = b"") -> Handle:
        """Sends a request. Returns the handle of its answer, which also fails if the peer ends."""
        link = self._links[peer]
        with link.order:
            request = link.inflight.add(header, body)
            try:
                if link.up and link.error is None:
                    request.sending = self._carrier.send(peer, request.header, body)
            except ValueError:  # an invalid message is the caller's mistake, so the request is dropped
                link.inflight.forget(request)
                raise
            if (error := link.error) is not None:
                link.inflight.forget(request)
        if error is not None:
            request.fail(error)
        return request

    @property
    def unsent_nbytes(self) -> int:
        """Bytes of messages that wait to be sent."""
        return self._carrier.unsent_nbytes

    def withdraw(self, fits: Callable[[Header], bool]) -> int:
        """Withdraws the contributions whose headers fit and that are not sent completely: the peers receive an abandoned
        contribution instead. Returns their bytes."""
        nbytes = 0
        for peer, link in self._links.items():
            with link.order:
                for request in link.inflight.pending() if link.up else ():
                    abandoned = request.header._replace(flags=Flag.ABANDON, weight=0.0, used=0)
                    if fits(request.header) and request.sending is not None \
                            and self._carrier.replace(peer, request.sending, abandoned):
                        nbytes += len(request.body)
                        request.header, request.body = abandoned, b""
        return nbytes

    def _on_message(self, message: Message) -> None:
        """Handles a message that has arrived. Runs on the connection's receive thread."""
        link = self._links[message.peer]
        if link.broken_since_s is not None:
            with link.state:
                link.broken_since_s = link.backoff = None
        if message.header.kind == Kind.AGAIN:
            self._send_again(link, message)
            return
        if message.header.kind not in ANSWERS:
            self.arrived(message)
            return
        with link.order:
            request = link.inflight.answer(message.header)
        if request is None:  # the answer has arrived before
            with self._count:
                self.repeats += 1
            self._carrier.pool.give(message.body)
            return
        if (sending := request.sending) is not None and not sending.done():
            # The caller may write to the body after the answer, but the replayed send still reads it.
            sending.on_done(lambda _: request.complete(message))
        else:
            request.complete(message)

    def _fail_peer(self, peer: int, error: CommError) -> None:
        """Fails all requests of a peer that will not return."""
        link = self._links[peer]
        with link.order:
            error = link.error = link.error or error
            requests = link.inflight.clear()
        for request in requests:
            request.fail(error)

    def _broken(self, peer: int, error: CommError) -> None:
        if self._closing.is_set():
            return
        link = self._links[peer]
        with link.state:
            link.up = False
            if link.reconnecting:
                link.broke_again = True
                return
            link.reconnecting = True
        # A new thread, because the thread that detected the break may have locked the underlying transport, and other threads
        # wait for that thread.
        threading.Thread(target=self._reconnect, args=(peer, link, error), name=f"again to {peer_name(peer)}",
                         daemon=True).start()

    def _reconnect(self, peer: int, link: _Link, error: CommError) -> None:
        begin, last = time.monotonic(), error
        with link.state:
            if link.broken_since_s is None or begin - link.restored_s > STABLE_S:
                link.broken_since_s, link.backoff = begin, None
            until = link.broken_since_s + self._window_s
        self._warn("%s: reconnecting for up to %.0f s; training then continues", without_code(error), self._window_s)
        while self._is_wanted(link):
            backoff = link.backoff
            if backoff is None:
                link.backoff = Backoff(until, self._closing)
            elif not backoff.wait():
                self._give_up(peer, PeerLost(f"{error.what}, and reconnecting failed for "
                                             f"{self._window_s:g} s (reconnect_s): {last.what}", peer=peer_name(peer)))
                return
            try:
                link.dial(min(until, time.monotonic() + DIAL_LIMIT_S))
            except CommError as failure:
                last = failure
                if self._is_final(failure):
                    self._give_up(peer, failure)
                    return
            else:
                count, nbytes = self._replay(peer, link)
                if self._finish_reconnect(link):
                    self._warn("%s: reconnected after %.1f s; %d requests (%d bytes) were sent again", peer_name(peer),
                               time.monotonic() - begin, count, nbytes)
                    return

    def _is_wanted(self, link: _Link) -> bool:
        return not self._closing.is_set() and link.error is None

    def _is_final(self, error: CommError) -> bool:
        """Returns whether the error shows that a further attempt cannot succeed."""
        if isinstance(error, Refused):
            return not isinstance(error, NotYet)
        return self._refused_is_over and is_refused(error)

    def _replay(self, peer: int, link: _Link) -> tuple[int, int]:
        nbytes = 0
        with link.order:
            requests = link.inflight.pending()
            for request in requests:
                h, body, at_peer_nbytes = request.header, request.body, self._carrier.nbytes_at_peer(peer, request.header)
                if h.kind == Kind.PUSH and len(body) >= ASK_NBYTES and not at_peer_nbytes and request.sending is not None:
                    h, body = Header(Kind.AGAIN, h.generation, h.step, h.bucket, round=h.round, sender=h.sender), b""
                request.sending = self._carrier.send(peer, h, body)
                nbytes += max(0, len(body) - at_peer_nbytes)
            with link.state:
                link.up = not link.broke_again
        with self._count:
            self.breaks += 1
            self.resent_nbytes += nbytes
        return len(requests), nbytes

    def _send_again(self, link: _Link, asked: Message) -> None:
        """Sends a contribution that the server does not have."""
        with link.order:
            request = link.inflight.find_request(asked.header._replace(kind=Kind.PUSH))
            if request is not None and (request.sending is None or request.sending.done()):  # else it comes
                request.sending = self._carrier.send(asked.peer, request.header, request.body)
        if request is not None:
            with self._count:
                self.resent_nbytes += len(request.body)

    def _finish_reconnect(self, link: _Link) -> bool:
        with link.state:
            if link.broke_again:
                link.broke_again = False
                return False
            link.reconnecting, link.restored_s = False, time.monotonic()
            return True

    def _give_up(self, peer: int, error: CommError) -> None:
        if self._is_wanted(self._links[peer]):
            self.abort(error, peer)

    def _warn(self, line: str, *values: object) -> None:
        if not self._closing.is_set():
            log.warning(line, *values)

    def abort(self, reason: CommError, peer: int | None = None) -> None:
        """Fails all present and later requests to one peer (None: to all peers) with `reason`."""
        self._fail(reason, peer)
        self._carrier.abort(reason, peer)

    def _fail(self, reason: CommError, peer: int | None = None) -> None:
        for other in [*self._links] if peer is None else [peer]:
            self._fail_peer(other, reason)

    def stop_reconnecting(self) -> None:
        """Restores no connection that ends from now on."""
        self._closing.set()

    def close(self, flush_s: float | None = None) -> None:
        """Sends what is queued, within `flush_s`, and closes the connections. Idempotent."""
        self.stop_reconnecting()
        self._fail(closed_error())
        self._carrier.close(flush_s)

"""What a transport is: five methods and a mailbox of messages. Knows headers and bytes; no codecs, nor what a bucket means."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple, Protocol

from commlayer.errors import CommError

SERVER_BASE = 0x8000
"""Peers are 16-bit numbers: a worker is its rank, summation server i is SERVER_BASE + i."""


def peer_name(peer: int) -> str:
    """The name that errors use."""
    return f"server {peer - SERVER_BASE}" if peer >= SERVER_BASE else f"worker {peer}"


class Kind(enum.IntEnum):
    """What a frame is. The receiver drops a peer that sends any other number."""

    HELLO = 1  # first frame of a connection: job, versions, plan hash (msgpack body)
    WELCOME = 2  # the answer: msgpack body, empty error or the reason of a refusal
    PUSH = 3  # worker -> server: a contribution
    RESULT = 4  # server -> worker: the sum
    STALLED = 5  # server -> worker: who has not contributed yet (msgpack body)
    STATE_GET = 6  # worker -> server: send your codec state of this bucket
    STATE = 7  # server -> worker, or worker -> server to restore it
    STATE_OK = 8  # server -> worker: restored
    DATA = 9  # point to point, for tests and probes
    BYE = 10  # orderly end: what follows is not a loss
    PROBE = 11  # worker -> server: a body of any bytes; `used` says how many bytes to answer with
    PROBE_OK = 12  # server -> worker: that many zeros
    PLAN = 13  # worker -> server, between steps: the plan of the generation that the header names
    PLAN_OK = 14  # server -> worker: from now on that plan is summed, or why not (UTF-8 body)
    PACE = 15  # worker -> server on its own node: `used` bit/s go out by their link
    UNDO = 16  # worker -> server, between steps and ahead of PLAN: what a PUSH would say in `undone`
    CHALLENGE = 17  # the answer to HELLO: msgpack body
    PROOF = 18  # the dialler's answer to that, before WELCOME: msgpack body


class Flag:
    """Bits of Header.flags. Plain numbers: every frame is asked for them, and the `&` of an enum costs microseconds."""

    NONE = 0
    AGAIN = 1  # RESULT without body: code round 0 again, as a part of all workers' weight, as the header has it. PUSH: done so
    ABANDON = 2  # PUSH, RESULT: a worker broke the step off, so there is no sum; the body says who and why (UTF-8)
    MEAN = 16  # PUSH: what the body holds counts `weight` times in a mean, which is the result, rounded once
    WITHOUT_ZEROS = 32  # PUSH, RESULT: the body travels without its chunks of zeros. Carriers put it there, and take it off
    ALL = AGAIN | ABANDON | MEAN | WITHOUT_ZEROS


KIND_NAMES = {int(kind): kind.name for kind in Kind}
ANSWERED_BY: dict[int, Kind] = {
    Kind.PUSH: Kind.RESULT, Kind.STATE_GET: Kind.STATE, Kind.STATE: Kind.STATE_OK, Kind.PROBE: Kind.PROBE_OK,
    Kind.PLAN: Kind.PLAN_OK,
}
"""Of a worker's requests. Its other kinds have no answer."""
MAY_LACK_ZEROS = frozenset((Kind.PUSH, Kind.RESULT))
"""Gradients have them: of embeddings, and of experts. What is sent to measure a link must stay as large as it is."""
NUMBERED = frozenset((Kind.STATE_GET, Kind.STATE, Kind.UNDO, Kind.PLAN))
"""Requests whose `used` is their number, from 1 for each worker and server, so that a repeated one is known; 0: none."""


class Header(NamedTuple):
    """The fixed part of a frame. docs/wire.md gives the bytes; framing.py is the only reader and writer of them."""

    kind: int
    generation: int = 0
    step: int = 0
    bucket: int = 0
    part: int = 0
    parts: int = 1
    """Carriers cut bodies and put them together: a message has one part."""
    round: int = 0
    codec: int = 0
    sender: int = 0
    order: int = 0
    """Place in the order on the wire: lower goes first."""
    flags: int = 0
    weight: float = 0.0
    used: int = 0
    """One bit per slice of the bucket: the sender has a gradient for it. A server ors them."""
    total: float = 0.0
    """PUSH: the weight of all workers that the payload was coded as a part of; 0 where its codec keeps nothing back."""
    undone: int = 0
    """One bit per slice: the last result was not applied there. The server takes it back into its residual."""


Key = tuple[int, int, int, int, int, int]


def key(h: Header) -> Key:
    """What matches a receive to a message: all that names a contribution but its sender."""
    return (h.kind, h.generation, h.step, h.bucket, h.part, h.round)


class Message(NamedTuple):
    peer: int
    header: Header
    body: memoryview


class Handle(Protocol):
    """One operation under way. Callbacks run on the thread that completes it and must not block."""

    def done(self) -> bool: ...

    def error(self) -> CommError | None: ...

    def message(self) -> Message:
        """The received message (of a send: the header with an empty body). Raises the error it ended with."""
        ...

    def on_done(self, callback: Callable[[Handle], None]) -> None:
        """Calls callback(handle) once, at once if it is done already."""
        ...


class Transport(Protocol):
    """Moves messages between peers. Every wait has a deadline; every error names its peer.

    The body of a send must stay unchanged until its handle is done. Frames to one peer leave in order of
    (step, order), then of sending, so an urgent bucket overtakes those that wait, between machines also the rest of the one
    on the wire.

    A connection may break and be made again by who dialled (resumed.py), over any carrier. A carrier that is told to resume:
    - ends a connection that is lost without BYE, fails its sends with PeerLost, and then calls `broken(peer, error)`, once;
    - leaves receives of that peer posted, keeps what had arrived, and delivers nothing more of that connection;
    - lets the peer be dialled anew, with a new greeting. An acceptor ends the former connection, if it has not noticed
      its end, when the hello is of the same `session`, and refuses a session that it has aborted;
    - ends the peer for good by `abort(reason, peer)` alone, by BYE, or when a frame breaks the format.
    What was on its way is lost then, either way. Who asked asks again, and who answers drops what it has done already.
    """

    @property
    def rank(self) -> int:
        """This end's own peer number."""
        ...

    @property
    def peers(self) -> tuple[int, ...]:
        """Connected peers."""
        ...

    def send(self, peer: int, header: Header, body: memoryview | bytes = b"") -> Handle: ...

    def recv(self, peer: int | None = None, match: Key | None = None) -> Handle:
        """The next message from that peer with that key; None stands for any. Arrivals before the call are kept."""
        ...

    def wait(self, handle: Handle, deadline: float) -> Message:
        """Until time.monotonic() reaches `deadline`, then DeadlineExceeded naming the peer."""
        ...

    def abort(self, reason: CommError, peer: int | None = None) -> None:
        """Ends the peer's operations, or everyone's, with `reason`: now and for all later calls."""
        ...

    def close(self, flush_s: float | None = None) -> None:
        """Sends what is queued (within `flush_s`, else a few seconds), says BYE, releases everything. Twice is once."""
        ...


class Wrapper:
    """What a Transport over a transport has of the inner one: it is the same end, of the same peers."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def peers(self) -> tuple[int, ...]:
        return self._inner.peers

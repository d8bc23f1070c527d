"""Bodies in parts: cutting, putting together, what breaks the rules, and an urgent frame between the parts of a large one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from support.attached import assert_refused, outcome
from support.meshes import PATIENCE_S, data, far_pair, frame, raw_peer, soon

from commlayer.errors import CorruptFrame, PeerLost
from commlayer.transport import flow_control
from commlayer.transport.chunking import MAX_PARTS, OVERHEAD_NBYTES, Assembly, split_parts
from commlayer.transport.endpoint import Settings, StreamTransport
from commlayer.transport.framing import Frame, Reader, allocate_bytes
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import Header

parted = pytest.mark.skipif(not flow_control.SUPPORTED, reason="bodies are cut on Linux only")


@pytest.mark.parametrize(("nbytes", "part"), [(0, 8), (1, 8), (8, 8), (9, 8), (100, 7), (1 << 20, 1000), (70_000 * 8, 8)])
def test_parts_are_of_one_size_and_cover_the_body(nbytes: int, part: int) -> None:
    parts = split_parts(nbytes, part)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == nbytes
    sizes = [stop - start for start, stop in parts]
    assert len(set(sizes[:-1])) <= 1
    assert sizes[-1] <= sizes[0]
    assert len(parts) <= MAX_PARTS
    assert sizes[0] <= part or nbytes > part * MAX_PARTS


def in_parts(header: Header, body: bytes, size: int) -> list[bytes]:
    """Frames, as they are on the wire."""
    parts = split_parts(len(body), size)
    return [frame(header._replace(part=i, parts=len(parts)), body[start:stop]) for i, (start, stop) in enumerate(parts)]


class Receiver:
    """A Reader and an Assembly, as a connection has them."""

    def __init__(self, max_nbytes: int = 1000, kept: int = 10_000) -> None:
        self.reader, self.taken = Reader(max_nbytes), list[int]()
        self.assembly = Assembly(self._take, lambda: max_nbytes, lambda: kept)
        self.reader.place = self.assembly.place

    def _take(self, nbytes: int) -> memoryview:
        self.taken.append(nbytes)
        return allocate_bytes(nbytes)

    def feed(self, *frames: bytes) -> list[Frame]:
        read = (got for one in frames for got in self.reader.feed(one))
        return [body for got in read if (body := self.assembly.whole(got)) is not None]


BULK, URGENT, MORE = data(0, bucket=1, step=4, order=9), data(0, bucket=2, step=4, order=3), data(0, bucket=3, step=4, order=1)


def test_bodies_that_travel_between_parts_of_others_come_out_whole_and_in_that_order() -> None:
    bulk, urgent, more = (bytes([i]) * 100 for i in (1, 2, 3))
    b, u, m = in_parts(BULK, bulk, 30), in_parts(URGENT, urgent, 40), in_parts(MORE, more, 50)
    end = Receiver()
    got = end.feed(b[0], u[0], m[0], frame(data(0, bucket=7), b"small"), m[1], u[1], u[2], *b[1:])
    assert [f.header.bucket for f in got] == [7, 3, 2, 1]
    assert [bytes(f.body) for f in got[1:]] == [more, urgent, bulk]
    assert [f.header for f in got[1:]] == [MORE, URGENT, BULK]
    assert end.assembly.between


@pytest.mark.parametrize(("frames", "words"), [
    (lambda b: [b[1]], "part 1 of 4 .*next part.*E-FRAME"),
    (lambda b: [b[0], b[2]], "part 2 of 4 .*next part.*E-FRAME"),
    (lambda b: [b[0], b[0]], "part 0 of 4 .*urgent.*E-FRAME"),
    (lambda b: [b[0], frame(URGENT._replace(part=1, parts=4), bytes(25))], "part 1 of 4 .*next part.*E-FRAME"),
    (lambda b: [b[0], frame(BULK._replace(part=1, parts=5), bytes(25))], "part 1 of 5 .*next part.*E-FRAME"),
    (lambda b: [b[0], frame(BULK._replace(part=1, parts=4, flags=1), bytes(25))], "part 1 of 4 .*next part.*E-FRAME"),
    (lambda b: [b[0], frame(BULK._replace(part=1, parts=4), bytes(24))], r"part 1 of 4 .*\b24 .*\b25 .*E-FRAME"),
    (lambda b: [*b[:3], frame(BULK._replace(part=3, parts=4), bytes(26))], r"part 3 of 4 .*\b26 .*\b25 .*E-FRAME"),
    (lambda b: [*b[:3], frame(BULK._replace(part=3, parts=4))], r"part 3 of 4 .*\b0 .*\b25 .*E-FRAME"),
    (lambda b: [frame(BULK._replace(part=0, parts=4))], "part 0 of 4 of 0 bytes.*E-FRAME"),
])
def test_what_breaks_the_rules_of_parts_ends_the_connection(frames: object, words: str) -> None:
    end = Receiver()
    parts = frames(in_parts(BULK, bytes(100), 30))  # type: ignore[operator]
    assert end.feed(*parts[:-1]) == []
    before = len(end.taken)
    with pytest.raises(CorruptFrame, match=words):
        end.feed(parts[-1])
    assert len(end.taken) == before, "something was allocated for it"


def test_no_more_is_allocated_than_bodies_and_what_is_kept_may_have() -> None:
    end = Receiver(max_nbytes=1000, kept=2 * (1000 + OVERHEAD_NBYTES))
    line = outcome(lambda: end.feed(frame(BULK._replace(part=0, parts=1000), bytes(100))))
    assert_refused(line, "E-FRAME", "CorruptFrame: ", "part 0 of 1000 of 100 bytes ", "1000")
    assert end.taken == []
    end = Receiver(max_nbytes=1000, kept=2 * (1000 + OVERHEAD_NBYTES))
    begun = [frame(data(0, step=4, order=order)._replace(part=0, parts=10), bytes(100)) for order in (9, 8, 7)]
    assert end.feed(*begun[:2]) == []
    assert_refused(outcome(lambda: end.feed(begun[2])), "E-FRAME", "CorruptFrame: ", "part 0 of 10 ", "3024")
    assert end.taken == [1000, 1000]


# ---- on sockets


@pytest.fixture
def pair() -> Iterator[tuple[StreamTransport, StreamTransport]]:
    with far_pair() as ends:
        yield ends


@contextlib.contextmanager
def not_reading(a: StreamTransport, b: StreamTransport) -> Iterator[None]:
    """What a sends stays on the wire: the thread with which b reads is held at the first of it."""
    gate, entered = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        entered.set()
        gate.wait(PATIENCE_S)

    b.recv(0, (9, 0, 0, 1000, 0, 0)).on_done(hold)
    a.send(1, data(0, bucket=1000))
    assert entered.wait(PATIENCE_S)
    try:
        yield
    finally:
        gate.set()


@parted
def test_an_urgent_body_overtakes_the_one_that_is_on_the_wire(pair: tuple[StreamTransport, StreamTransport]) -> None:
    a, b = pair
    bulk, urgent = bytes(range(256)) * (1 << 16), b"now" * 100_000
    with not_reading(a, b):
        arrived = [b.recv(0) for _ in range(3)]
        a.send(1, data(0, bucket=1, order=9), bulk)
        sock, until = a._connections[1]._sock, soon()
        while not flow_control.waiting_nbytes(sock):
            assert time.monotonic() < until, "the large body does not begin"
            time.sleep(0.001)
        a.send(1, data(0, bucket=2, order=3), urgent)
        a.send(1, data(0, bucket=3, order=9), b"behind")
    got = [b.wait(handle, soon()) for handle in arrived]
    assert [m.header.bucket for m in got] == [2, 1, 3]
    assert [m.body == body for m, body in zip(got, (urgent, bulk, b"behind"), strict=True)] == [True] * 3
    assert [m.header.parts for m in got] == [1, 1, 1]


@parted
def test_the_end_of_a_connection_fails_bodies_between_two_parts(pair: tuple[StreamTransport, StreamTransport]) -> None:
    a, b = pair
    with not_reading(a, b):
        sent = [a.send(1, data(0, bucket=bucket, order=9 - bucket), bytes(16 << 20)) for bucket in (1, 2, 3)]
        a.abort(PeerLost("heartbeats stopped", peer="worker 1"), 1)
        for handle in sent:
            with pytest.raises(PeerLost):
                a.wait(handle, soon())


@pytest.mark.parametrize("broken", [False, True])
def test_of_a_body_that_does_not_come_whole_nothing_is_handed_on(broken: bool) -> None:
    end = StreamTransport(Hello("test", 0x8000), settings=Settings(max_nbytes=1 << 20))
    try:
        sock = raw_peer(end.listen(), 5)
        waiting = end.recv(5)
        first, second = in_parts(data(5), bytes(100_000), 50_000)
        if broken:
            second = second[:-1] + b"\1"
        sock.sendall(first + (second if broken else second[:1000]))
        if not broken:
            sock.close()
        error = CorruptFrame if broken else PeerLost
        with pytest.raises(error, match="E-CHECKSUM" if broken else "middle of a frame.*E-PEER-LOST"):
            end.wait(waiting, soon())
        sock.close()
    finally:
        end.close()

"""Chunked bodies and bodies without zeros: they arrive complete, damage is refused, urgent frames overtake."""

from __future__ import annotations

import contextlib
import random
import struct
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.attached import assert_refused, outcome
from support.coordinators import until
from support.internals import connections_of, socket_of
from support.mailbox import InboxTransport
from support.meshes import FAR, PATIENCE_S, data, far_pair, frame, raw_peer, soon
from support.workers import Rig, job, on_ranks, step

from commlayer.errors import CorruptFrame, PeerLost
from commlayer.planner import default_plan
from commlayer.transport import connection
from commlayer.transport.chunking import (
    MAX_PARTS,
    MIN_HELD_PART_NBYTES,
    OVERHEAD_NBYTES,
    Assembly,
    HeldBody,
    UnfinishedBodies,
    prefix_crc,
    split_parts,
)
from commlayer.transport.connection import Content, _Outgoing
from commlayer.transport.endpoint import Settings
from commlayer.transport.flow import credit
from commlayer.transport.framing import HEADER_NBYTES, Frame, Reader, allocate_bytes
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Flag, Handle, Header, Key, Kind, key
from commlayer.transport.zero_chunks import CHUNK_NBYTES, MIN_NBYTES, drop_zeros, restore_zeros
from tests.chaos.frames import frames_in

parted = pytest.mark.skipif(not credit.SUPPORTED, reason="bodies are cut on Linux only")


@pytest.mark.parametrize(("nbytes", "part"), [(0, 8), (1, 8), (8, 8), (9, 8), (100, 7), (1 << 20, 1000), (70_000 * 8, 8)])
def test_chunks_have_one_size_and_cover_the_body(nbytes: int, part: int) -> None:
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

    def __init__(self, max_nbytes: int = 1000, kept: int = 10_000, former: UnfinishedBodies | None = None) -> None:
        self.reader, self.taken = Reader(max_nbytes), list[int]()
        self.assembly = Assembly(self._take, lambda _: max_nbytes, lambda: kept, former=former)
        self.reader.place = self.assembly.place

    def _take(self, nbytes: int) -> memoryview:
        self.taken.append(nbytes)
        return allocate_bytes(nbytes)

    def feed(self, *frames: bytes) -> list[Frame]:
        read = (got for one in frames for got in frames_in(self.reader, one))
        return [body for got in read if (body := self.assembly.whole(got)) is not None]


BULK, URGENT, MORE = data(0, bucket=1, step=4, order=9), data(0, bucket=2, step=4, order=3), data(0, bucket=3, step=4, order=1)


def test_interleaved_bodies_arrive_complete_and_in_order() -> None:
    bulk, urgent, more = (bytes([i]) * 100 for i in (1, 2, 3))
    b, u, m = in_parts(BULK, bulk, 30), in_parts(URGENT, urgent, 40), in_parts(MORE, more, 50)
    end = Receiver()
    got = end.feed(b[0], u[0], m[0], frame(data(0, bucket=7), b"small"), m[1], u[1], u[2], *b[1:])
    assert [f.header.bucket for f in got] == [7, 3, 2, 1]
    assert [bytes(f.body) for f in got[1:]] == [more, urgent, bulk]
    assert [f.header for f in got[1:]] == [MORE, URGENT, BULK]
    assert end.assembly.at_message_boundary


@pytest.mark.parametrize("replaced", [1, 2, 3], ids=["bulk", "urgent", "more"])
def test_message_without_a_body_replaces_an_unfinished_one(replaced: int) -> None:
    headers = {1: BULK, 2: URGENT, 3: MORE}
    parts = {bucket: in_parts(header, bytes([bucket]) * 100, 30) for bucket, header in headers.items()}
    end, instead = Receiver(kept=3 * (100 + OVERHEAD_NBYTES)), headers[replaced]._replace(flags=Flag.ABANDON)
    got = end.feed(*(parts[bucket][0] for bucket in headers))
    order = [bucket for bucket in (3, 2, 1) if bucket != replaced]
    got += end.feed(frame(instead), *(part for bucket in order for part in parts[bucket][1:]))
    assert [(f.header, bytes(f.body)) for f in got] == [(instead, b""), *((headers[b], bytes([b]) * 100) for b in order)]
    assert end.assembly.at_message_boundary
    assert len(end.feed(*parts[replaced], *parts[1])) == 2, "its memory no longer counts"


@pytest.mark.parametrize(("frames", "words"), [
    (lambda b: [b[1]], "part 1 of 4 .*next part.*E-FRAME"),
    (lambda b: [b[0], b[2]], "part 2 of 4 .*next part.*E-FRAME"),
    (lambda b: [b[0], b[0]], "part 0 of 4 .*urgent.*E-FRAME"),
    (lambda b: [b[0], frame(URGENT._replace(part=1, parts=4), bytes(25))], "part 1 of 4 .*next part.*E-FRAME"),
    (lambda b: [b[0], frame(BULK._replace(part=1, parts=5), bytes(25))], "part 1 of 5 .*next part.*E-FRAME"),
    (lambda b: [b[0], frame(BULK._replace(part=1, parts=4, flags=2), bytes(25))], "part 1 of 4 .*next part.*E-FRAME"),
    (lambda b: [b[0], frame(BULK._replace(part=1, parts=4), bytes(24))], r"part 1 of 4 .*\b24 .*\b25 .*E-FRAME"),
    (lambda b: [*b[:3], frame(BULK._replace(part=3, parts=4), bytes(26))], r"part 3 of 4 .*\b26 .*\b25 .*E-FRAME"),
    (lambda b: [*b[:3], frame(BULK._replace(part=3, parts=4))], r"part 3 of 4 .*\b0 .*\b25 .*E-FRAME"),
    (lambda b: [frame(BULK._replace(part=0, parts=4))], "part 0 of 4 of 0 bytes.*E-FRAME"),
])
def test_violations_of_the_chunk_rules_end_the_connection(frames: object, words: str) -> None:
    end = Receiver()
    parts = frames(in_parts(BULK, bytes(100), 30))  # type: ignore[operator]
    assert end.feed(*parts[:-1]) == []
    before = len(end.taken)
    with pytest.raises(CorruptFrame, match=words):
        end.feed(parts[-1])
    assert len(end.taken) == before, "something was allocated for it"


def test_allocation_is_bounded_by_bodies_and_retained_memory() -> None:
    end = Receiver(max_nbytes=1000, kept=2 * (1000 + OVERHEAD_NBYTES))
    line = outcome(lambda: end.feed(frame(BULK._replace(part=0, parts=1000), bytes(100))))
    assert_refused(line, "E-FRAME", "CorruptFrame: ", "part 0 of 1000 of 100 bytes ", "1000")
    assert end.taken == []
    end = Receiver(max_nbytes=1000, kept=2 * (1000 + OVERHEAD_NBYTES))
    begun = [frame(data(0, step=4, order=order)._replace(part=0, parts=10), bytes(100)) for order in (9, 8, 7)]
    assert end.feed(*begun[:2]) == []
    assert_refused(outcome(lambda: end.feed(begun[2])), "E-FRAME", "CorruptFrame: ", "part 0 of 10 ", "3024")
    assert end.taken == [1000, 1000]


class Sink:
    """A channel that takes a frame in pieces."""

    def __init__(self) -> None:
        self.data = b""

    def sendmsg(self, buffers: list[memoryview], *_: object) -> int:
        piece = b"".join(buffers)[:3000]
        self.data += piece
        return len(piece)


def as_sent(chance: random.Random, messages: dict[Header, bytes], held: dict[Key, HeldBody], part_nbytes: int) -> list[bytes]:
    """The frames of messages that a sender is given one after the other, in a random order, while it sends."""
    waiting = [_Outgoing(Handle("send", 1), Content(header, body)) for header, body in messages.items()]
    chance.shuffle(waiting)
    queue: list[_Outgoing] = []
    frames = []
    while waiting or queue:
        if waiting and (not queue or chance.random() < 0.3):
            queue.append(waiting.pop())
            continue
        first = min(queue, key=lambda one: (one.header.step, one.header.order))
        first.begin(held.pop(key(first.header), None))
        first.cut(part_nbytes)
        sink = Sink()
        while not first.write(sink):  # type: ignore[arg-type]
            pass
        frames.append(sink.data)
        if first.all_sent:
            queue.remove(first)
    return frames


@given(st.integers(0, 1 << 32), st.lists(st.integers(1, 60_000), min_size=1, max_size=6), st.integers(0, 4),
       st.integers(MIN_HELD_PART_NBYTES // 2, 3 * MIN_HELD_PART_NBYTES))
@settings(max_examples=100, deadline=None)
def test_bodies_continue_after_any_cuts(seed: int, sizes: list[int], cuts: int, part_nbytes: int) -> None:
    """Each message arrives once, with its bytes; of what has arrived in parts of some size nothing is sent again."""
    chance = random.Random(seed)
    bodies = [mostly_zero(size) if chance.random() < 0.3 else chance.randbytes(size) for size in sizes]
    messages = {Header(Kind.PUSH, 1, chance.randrange(2), bucket, order=bucket % 4, weight=0.25): body
                for bucket, body in enumerate(bodies)}
    left, former, most = messages.copy(), UnfinishedBodies(), sum(len(body) + MIN_HELD_PART_NBYTES for body in bodies)
    for number in range(cuts + 1):
        end = Receiver(max(sizes), most, former)
        held = {k: body.held() for k, body in former.items()}
        have_nbytes = sum(body.filled for body in former.values())
        frames = as_sent(chance, left, held, part_nbytes)
        assert sum(map(len, frames)) <= sum(map(len, left.values())) - have_nbytes + HEADER_NBYTES * len(frames)
        count = chance.randrange(len(frames) + 1) if number < cuts else len(frames)
        for got in end.feed(*frames[:count], *(one[:-1] for one in frames[count : count + 1])):
            assert got.body == left.pop(got.header)
        former = end.assembly.unfinished()
        assert {*former} <= {key(header) for header in left}
    assert not left
    assert not former


def cut_body(kept: int = 2 * (20_000 + OVERHEAD_NBYTES)) -> tuple[Receiver, list[bytes]]:
    """A receiver that has the first two parts of a body from a former connection, and the frames of all four."""
    frames, before = in_parts(BULK._replace(kind=Kind.PUSH), bytes(range(250)) * 80, 5000), Receiver(20_000, 1 << 20)
    before.feed(*frames[:2], frames[2][:-1])
    return Receiver(20_000, kept, before.assembly.unfinished()), frames


def test_body_of_a_former_connection_may_be_begun_again_or_not_at_all() -> None:
    end, frames = cut_body()
    assert [bytes(got.body) for got in end.feed(*frames[2:])] == [bytes(range(250)) * 80]
    assert end.taken == []
    end, frames = cut_body(20_000 + OVERHEAD_NBYTES)
    assert [bytes(got.body) for got in end.feed(*frames)] == [bytes(range(250)) * 80]
    assert end.taken == [20_000]
    end, frames = cut_body(20_000 + OVERHEAD_NBYTES)
    assert len(end.feed(frame(BULK._replace(kind=Kind.PUSH), b"whole"), *in_parts(URGENT, bytes(20_000), 5000))) == 2
    end, frames = cut_body(20_000 + OVERHEAD_NBYTES)
    assert len(end.feed(*in_parts(URGENT, bytes(20_000), 5000))) == 1, "what is not continued makes room"
    assert_refused(outcome(lambda: end.feed(frames[2])), "E-FRAME", "part 2 of 4 ")


@pytest.mark.parametrize("change", [{"part": 1}, {"part": 3}, {"flags": Flag.MEAN}, {"parts": 5}, {"weight": 2.0}, {"step": 5}],
                         ids=str)
def test_continuation_that_does_not_fit_ends_the_connection(change: dict[str, int]) -> None:
    end, frames = cut_body()
    ((header, body),) = frames_in(Reader(), frames[2])
    assert_refused(outcome(lambda: end.feed(frame(header._replace(**change), bytes(body)))), "E-FRAME", "next part")


def test_continuation_is_as_urgent_as_a_beginning() -> None:
    end, frames = cut_body()
    assert_refused(outcome(lambda: end.feed(in_parts(URGENT, bytes(20_000), 5000)[0], frames[2])), "E-FRAME", "more urgent")


@pytest.mark.parametrize(("change", "first"), [({}, 2), ({"crc": 1}, 0), ({"part": 4}, 0), ({"part": 3}, 0),
                                               ({"part_nbytes": 8000}, 0)], ids=str)
def test_sender_continues_only_the_same_body(change: dict[str, int], first: int) -> None:
    header, body = BULK._replace(kind=Kind.PUSH), random.Random(1).randbytes(20_000)
    held = HeldBody(key(header), 2, 5000, prefix_crc(header._replace(parts=4), memoryview(body)[:10_000]))
    frames = as_sent(random.Random(), {header: body}, {held.key: msgspec.structs.replace(held, **change)}, 5000)
    assert len(frames) == 4 - first


@pytest.fixture
def pair() -> Iterator[tuple[InboxTransport, InboxTransport]]:
    with far_pair() as ends:
        yield ends


@contextlib.contextmanager
def not_reading(a: InboxTransport, b: InboxTransport) -> Iterator[None]:
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
def test_urgent_body_overtakes_the_one_in_transmission(pair: tuple[InboxTransport, InboxTransport]) -> None:
    a, b = pair
    bulk, urgent = bytes(range(256)) * (1 << 16), b"now" * 100_000
    with not_reading(a, b):
        arrived = [b.recv(0) for _ in range(3)]
        a.send(1, data(0, bucket=1, order=9), bulk)
        sock = socket_of(connections_of(a)[1])
        until(lambda: credit.waiting_nbytes(sock) > 0, "the large body has begun")
        a.send(1, data(0, bucket=2, order=3), urgent)
        a.send(1, data(0, bucket=3, order=9), b"behind")
    got = [b.wait(handle, soon()) for handle in arrived]
    assert [m.header.bucket for m in got] == [2, 1, 3]
    assert [m.body == body for m, body in zip(got, (urgent, bulk, b"behind"), strict=True)] == [True] * 3
    assert [m.header.parts for m in got] == [1, 1, 1]


@parted
def test_message_in_transmission_is_replaced(pair: tuple[InboxTransport, InboxTransport]) -> None:
    a, b = pair
    with not_reading(a, b):
        arrived = [b.recv(0) for _ in range(3)]
        sent = [a.send(1, data(0, bucket=bucket, order=bucket), bytes(16 << 20)) for bucket in (1, 2)]
        sock = socket_of(connections_of(a)[1])
        until(lambda: credit.waiting_nbytes(sock) > 0, "the first body has begun")
        a.send(1, data(0, bucket=3, order=9), b"behind")
        until(lambda: a.unsent_nbytes > 16 << 20, "a part of the first body is written")
        for bucket, operation in enumerate(sent, 1):
            instead = data(0, bucket=bucket, order=bucket)._replace(flags=Flag.ABANDON)
            until(lambda o=operation, h=instead: a.replace(1, o, h), "it is replaced")  # type: ignore[misc]
        assert a.unsent_nbytes < 1 << 20
    got = [b.wait(handle, soon()) for handle in arrived]
    assert [(m.header.bucket, bytes(m.body)) for m in got] == [(1, b""), (2, b""), (3, b"behind")]
    for operation in sent:
        a.wait(operation, soon())
    assert not a.replace(1, sent[0], data(0, bucket=1)), "it is sent"


@parted
def test_connection_loss_fails_bodies_between_chunks(pair: tuple[InboxTransport, InboxTransport]) -> None:
    a, b = pair
    with not_reading(a, b):
        sent = [a.send(1, data(0, bucket=bucket, order=9 - bucket), bytes(16 << 20)) for bucket in (1, 2, 3)]
        a.abort(PeerLost("heartbeats stopped", peer="worker 1"), 1)
        for handle in sent:
            with pytest.raises(PeerLost):
                a.wait(handle, soon())


@pytest.mark.parametrize("broken", [False, True])
def test_incomplete_body_is_not_delivered(broken: bool) -> None:
    end = InboxTransport(Hello("test", 0x8000), settings=Settings(max_nbytes=1 << 20))
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


CAP_NBYTES = 1 << 20


def used_before(nbytes: int) -> memoryview:
    """As memory from a pool is."""
    return memoryview(bytearray(b"\xa5" * nbytes))


def round_trip(body: bytes) -> bytes | None:
    """The shorter form, if it exists."""
    short = drop_zeros(memoryview(body))
    if short is not None:
        assert 4 * len(short) <= 3 * len(body)
        assert restore_zeros(memoryview(short), len(body), used_before) == body
    return short


SIZES = [MIN_NBYTES + n for n in (0, 1, 31, 32, 33, 255, 256, 257, 8 * 32 - 1, 5 * 256 + 8)] + [100_003]


@pytest.mark.parametrize("nbytes", SIZES)
def test_all_zero_body_is_a_size_and_a_bitmap(nbytes: int) -> None:
    chunks = -(-nbytes // CHUNK_NBYTES)
    assert round_trip(bytes(nbytes)) == struct.pack("<I", nbytes) + bytes(-(-chunks // 8))


@given(
    st.integers(0, 40_000), st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 2000)), max_size=12), st.integers(0, 9),
)
@example(MIN_NBYTES - 1, [], 0)
@settings(max_examples=150, deadline=None)
def test_any_body_round_trips(nbytes: int, stretches: list[tuple[int, int]], seed: int) -> None:
    body, rng = bytearray(nbytes), random.Random(seed)
    for start, length in stretches:
        stop = min(nbytes, start + length)
        body[start:stop] = rng.randbytes(max(0, stop - start))
    short = round_trip(bytes(body))
    if nbytes < MIN_NBYTES:
        assert short is None
    elif not stretches:
        assert short is not None


@pytest.mark.parametrize("body", [
    bytes(MIN_NBYTES - 1),
    random.Random(1).randbytes(MIN_NBYTES),
    random.Random(1).randbytes(1 << 20),
    (b"\x01" + bytes(31)) * 1000,
    bytes(40_000) + random.Random(1).randbytes(120_001),
], ids=["small", "dense", "large", "a byte in each chunk", "zeros of a quarter"])
def test_body_that_shrinks_little_is_sent_unchanged(body: bytes) -> None:
    assert drop_zeros(memoryview(body)) is None


def test_misleading_samples_lose_no_data() -> None:
    """Zeros at all sampled places, and nowhere else; then the opposite."""
    chunks, stride = 64 * 64, 64 | 1
    body = bytearray(random.Random(2).randbytes(chunks * CHUNK_NBYTES))
    for chunk in range(0, chunks, stride):
        body[chunk * CHUNK_NBYTES : (chunk + 1) * CHUNK_NBYTES] = bytes(CHUNK_NBYTES)
    assert round_trip(bytes(body)) is None
    body = bytearray(chunks * CHUNK_NBYTES)
    for chunk in range(0, chunks, stride):
        body[chunk * CHUNK_NBYTES] = 1
    assert round_trip(bytes(body)) is None


SHORT = struct.pack("<I", 5000) + b"\x01" + bytes(18) + b"\x10" + bytes(range(1, 41))
"""157 chunks, the last of 8 bytes; the first and the last are there."""


def with_bytes(at: int, new: bytes) -> bytes:
    return SHORT[:at] + new + SHORT[at + len(new) :]


def test_short_last_chunk_and_zero_chunks_anywhere() -> None:
    body = bytes(range(1, 33)) + bytes(5000 - 40) + bytes(range(33, 41))
    memory = memoryview(bytearray(5001))
    assert restore_zeros(memoryview(b"..." + SHORT)[3:], 5000, lambda nbytes: memory[1 : 1 + nbytes]) == body
    assert drop_zeros(memory[1:]) == SHORT
    assert restore_zeros(memoryview(SHORT[:24] + bytes(40)), 5000, used_before) == bytes(5000)


@pytest.mark.parametrize(("body", "got", "wanted"), [
    (b"", "0 bytes", "4"), (SHORT[:3], "3 bytes", "4"),
    (with_bytes(0, bytes(4)), "0 bytes", "1 to 1048576"),
    (with_bytes(0, struct.pack("<I", CAP_NBYTES + 1)), "1048577 bytes", "1 to 1048576"),
    (with_bytes(0, b"\xff" * 4), "4294967295 bytes", "1 to 1048576"),
    (SHORT[:4], "4 bytes", "157 chunks"), (SHORT[:23], "23 bytes", "157 chunks"),
    (with_bytes(0, struct.pack("<I", CAP_NBYTES)), "64 bytes", "32768 chunks"),
    (with_bytes(23, b"\x30"), "after the last", "157 chunks"), (with_bytes(23, b"\x90"), "after the last", "157 chunks"),
    (SHORT[:-1], "63 bytes", "64"), (SHORT + b"\0", "65 bytes", "64"), (SHORT[:24], "24 bytes", "64"),
    (with_bytes(4, b"\x03"), "64 bytes", "96"), (with_bytes(4, b"\x00"), "64 bytes", "32"),
    (with_bytes(23, b"\x00"), "64 bytes", "56"), (with_bytes(0, struct.pack("<I", 4999)), "64 bytes", "63"),
])
def test_damage_is_refused_before_allocation(body: bytes, got: str, wanted: str) -> None:
    def allocate(_: int) -> memoryview:
        raise AssertionError("allocated")

    line = outcome(lambda: restore_zeros(memoryview(body), CAP_NBYTES, allocate))
    assert_refused(line, "E-FRAME", "CorruptFrame", got, wanted)


def test_connection_refuses_damage_with_its_step_and_the_body_cap() -> None:
    taken: list[int] = []

    def take(nbytes: int) -> memoryview:
        taken.append(nbytes)
        return allocate_bytes(nbytes)

    def feed(cap: int) -> Frame | None:
        reader = Reader(cap)
        assembly = Assembly(take, lambda _: cap, lambda: CAP_NBYTES)
        reader.place = assembly.place
        (one,) = frames_in(reader, frame(Header(Kind.PUSH, step=8, bucket=3, flags=Flag.MEAN | Flag.WITHOUT_ZEROS), SHORT))
        return assembly.whole(one)

    assert_refused(outcome(lambda: feed(4999)), "E-FRAME", "5000 bytes", "1 to 4999 (step 8, bucket 3)")
    assert taken == [len(SHORT)]
    complete = feed(5000)
    assert complete is not None
    assert complete.header == Header(Kind.PUSH, step=8, bucket=3, flags=Flag.MEAN)
    assert len(complete.body) == 5000


def mostly_zero(nbytes: int, every: int = 4) -> bytes:
    """Of `every` rows of 256 bytes one is there."""
    row = random.Random(3).randbytes(256)
    return ((row + bytes((every - 1) * 256)) * (nbytes // (every * 256) + 1))[:nbytes]


@pytest.mark.parametrize("nbytes", [5000, 20_000_003])
def test_receiver_gets_the_original_bytes_without_the_flag(pair: tuple[InboxTransport, InboxTransport], nbytes: int) -> None:
    body = mostly_zero(nbytes)
    for a, b in (pair, pair[::-1]):
        for kind in (Kind.PUSH, Kind.RESULT):
            header = Header(kind, 1, 4, 2, sender=a.rank, flags=Flag.MEAN, weight=2.0)
            sent = a.send(b.rank, header, memoryview(body))
            got = b.wait(b.recv(a.rank, key(header)), soon())
            assert got.header == header
            assert got.body == body
            assert a.wait(sent, soon()).header == header


@pytest.mark.skipif(not credit.SUPPORTED, reason="bodies are cut on Linux only")
@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.RESULT, Kind.DATA, Kind.STATE, Kind.PROBE])
def test_only_payloads_are_shortened_on_the_socket(kind: Kind) -> None:
    body = mostly_zero(20_000_000)
    end = InboxTransport(Hello("test", SERVER_BASE))
    try:
        sock = raw_peer(end.listen(FAR), 5)
        sock.sendall(frame(Header(Kind.DATA, 1)))
        end.wait(end.recv(5), soon())  # a peer that has been welcomed is known a moment later
        sent = end.send(5, Header(kind, step=3, order=2), body)
        reader, frames, counted = Reader(), list[Frame](), 0
        assembly = Assembly(allocate_bytes, lambda _: len(body), lambda: 2 * len(body))
        reader.place = assembly.place
        complete: Frame | None = None
        while complete is None:
            n = sock.recv_into(room := reader.wanted(), len(room))
            assert n
            reader.filled(n)
            counted += n
            while (one := reader.next()) is not None:
                frames.append(one)
                complete = assembly.whole(one)
        end.wait(sent, soon())
        sock.close()
    finally:
        end.close()
    assert sent.error() is None
    assert complete.body == body
    assert len(frames) > 1
    shorter = kind in (Kind.PUSH, Kind.RESULT)
    assert [bool(one.header.flags & Flag.WITHOUT_ZEROS) for one in frames] == [shorter] * len(frames)
    assert counted < 0.26 * len(body) if shorter else counted > len(body)


class Sockets:
    """What Rig needs of a Hub, over TCP: servers listen, and workers dial them all."""

    def __init__(self) -> None:
        self._servers: list[InboxTransport] = []

    def transport(self, peer: int) -> InboxTransport:
        transport = InboxTransport(Hello("test", peer))
        if peer >= SERVER_BASE:
            self._servers.append(transport)
        else:
            for server in self._servers:
                transport.dial(server.rank, server.listen(), soon())
        return transport


def gradients_of_embedding(rank: int, number: int) -> list[torch.Tensor | None]:
    """Whole numbers, exact in half precision, so that sums by hand are exact; and the gradient of a dense layer."""
    table, dense = torch.nn.Embedding(2000, 24), torch.nn.Linear(24, 5)
    rng = torch.Generator().manual_seed(100 * number + rank)
    words = torch.randint(2000, (40,), generator=rng)
    weights = torch.randint(-8, 9, (40, 24), generator=rng).float()
    (table(words) * weights).sum().backward()
    return [table.weight.grad, torch.randint(-8, 9, dense.weight.shape, generator=rng).float()]


@pytest.mark.parametrize("codec", ["fp16()", "identity()"])
def test_embedding_trains_bit_equal_with_fewer_bytes_sent(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shortened: list[int] = []
    of = job([(2000, 24), (5, 24)])
    plan = default_plan(of, codec=codec, path="service", servers=2, ranks_per_node=1, fuse_nbytes=1 << 20, cut_nbytes=1 << 16)

    def counted(body: memoryview) -> bytes | None:
        short = drop_zeros(body)
        shortened.append(len(body) if short is None else -len(short))
        return short

    monkeypatch.setattr(connection, "drop_zeros", counted)

    def trained(hub: Callable[[], Sockets] | None) -> list[list[list[torch.Tensor | None]]]:
        with Rig(2, codec, hub=hub and hub(), of=of, plan=plan) as rig:
            return on_ranks(2, lambda rank: [step(rig.workers[rank], gradients_of_embedding(rank, n)) for n in range(3)])

    over_sockets = trained(Sockets)
    assert sum(nbytes < 0 for nbytes in shortened) >= 6
    in_process = trained(None)
    for number in range(3):
        pairs = zip(gradients_of_embedding(0, number), gradients_of_embedding(1, number), strict=True)
        for tensor, (one, other) in enumerate(pairs):
            assert one is not None
            assert other is not None
            for rank in (0, 1):
                got = over_sockets[rank][number][tensor]
                assert got is not None
                assert torch.equal(got, (one + other) / 2)
                assert torch.equal(got, in_process[rank][number][tensor])

"""Bodies without their zeros: any body comes back, damage is refused, and sockets carry fewer bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.attached import assert_refused, outcome
from support.meshes import FAR, far_pair, frame, raw_peer, soon
from support.workers import Rig, job, on_ranks, step

from commlayer.planner import default_plan
from commlayer.transport import connection, flow_control
from commlayer.transport.chunking import CHUNK_NBYTES, MIN_NBYTES, Assembly, drop_zeros, restore_zeros
from commlayer.transport.endpoint import StreamTransport
from commlayer.transport.framing import Frame, Reader, allocate_bytes
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, key

CAP_NBYTES = 1 << 20


def used_before(nbytes: int) -> memoryview:
    """As memory from a pool is."""
    return memoryview(bytearray(b"\xa5" * nbytes))


def round_trip(body: bytes) -> bytes | None:
    """The shorter form, if there is one."""
    short = drop_zeros(memoryview(body))
    if short is not None:
        assert 4 * len(short) <= 3 * len(body)
        assert restore_zeros(memoryview(short), len(body), used_before) == body
    return short


# ---- there and back


SIZES = [MIN_NBYTES + n for n in (0, 1, 31, 32, 33, 255, 256, 257, 8 * 32 - 1, 5 * 256 + 8)] + [100_003]


@pytest.mark.parametrize("nbytes", SIZES)
def test_zeros_alone_are_a_size_and_a_bitmap(nbytes: int) -> None:
    chunks = -(-nbytes // CHUNK_NBYTES)
    assert round_trip(bytes(nbytes)) == struct.pack("<I", nbytes) + bytes(-(-chunks // 8))


@given(
    st.integers(0, 40_000), st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 2000)), max_size=12), st.integers(0, 9),
)
@example(MIN_NBYTES - 1, [], 0)
@settings(max_examples=150, deadline=None)
def test_any_body_comes_back(nbytes: int, stretches: list[tuple[int, int]], seed: int) -> None:
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
def test_what_would_hardly_be_shorter_stays_as_it_is(body: bytes) -> None:
    assert drop_zeros(memoryview(body)) is None


def test_where_the_first_look_misleads_nothing_is_lost() -> None:
    """Zeros at all the places that are looked at, and nowhere else; then the other way round."""
    chunks, stride = 64 * 64, 64 | 1
    body = bytearray(random.Random(2).randbytes(chunks * CHUNK_NBYTES))
    for chunk in range(0, chunks, stride):
        body[chunk * CHUNK_NBYTES : (chunk + 1) * CHUNK_NBYTES] = bytes(CHUNK_NBYTES)
    assert round_trip(bytes(body)) is None
    body = bytearray(chunks * CHUNK_NBYTES)
    for chunk in range(0, chunks, stride):
        body[chunk * CHUNK_NBYTES] = 1
    assert round_trip(bytes(body)) is None


# ---- what is refused


SHORT = struct.pack("<I", 5000) + b"\x01" + bytes(18) + b"\x10" + bytes(range(1, 41))
"""157 chunks, the last of 8 bytes; the first and the last are there."""


def with_bytes(at: int, new: bytes) -> bytes:
    return SHORT[:at] + new + SHORT[at + len(new) :]


def test_the_last_chunk_may_be_shorter_and_a_chunk_may_be_zero_anywhere_in_memory() -> None:
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
def test_damage_is_refused_before_anything_is_allocated(body: bytes, got: str, wanted: str) -> None:
    def allocate(_: int) -> memoryview:
        raise AssertionError("allocated")

    line = outcome(lambda: restore_zeros(memoryview(body), CAP_NBYTES, allocate))
    assert_refused(line, "E-FRAME", "CorruptFrame", got, wanted)


def test_a_connection_has_it_refused_with_its_step_and_the_cap_of_any_body() -> None:
    taken: list[int] = []

    def take(nbytes: int) -> memoryview:
        taken.append(nbytes)
        return allocate_bytes(nbytes)

    def feed(cap: int) -> Frame | None:
        reader = Reader(cap)
        assembly = Assembly(take, lambda: cap, lambda: CAP_NBYTES)
        reader.place = assembly.place
        (one,) = reader.feed(frame(Header(Kind.PUSH, step=8, bucket=3, flags=Flag.MEAN | Flag.WITHOUT_ZEROS), SHORT))
        return assembly.whole(one)

    assert_refused(outcome(lambda: feed(4999)), "E-FRAME", "5000 bytes", "1 to 4999 (step 8, bucket 3)")
    assert taken == [len(SHORT)]
    complete = feed(5000)
    assert complete is not None
    assert complete.header == Header(Kind.PUSH, step=8, bucket=3, flags=Flag.MEAN)
    assert len(complete.body) == 5000


# ---- on sockets


def mostly_zero(nbytes: int, every: int = 4) -> bytes:
    """Of `every` rows of 256 bytes one is there."""
    row = random.Random(3).randbytes(256)
    return ((row + bytes((every - 1) * 256)) * (nbytes // (every * 256) + 1))[:nbytes]


@pytest.fixture
def pair() -> Iterator[tuple[StreamTransport, StreamTransport]]:
    with far_pair() as ends:
        yield ends


@pytest.mark.parametrize("nbytes", [5000, 20_000_003])
def test_the_very_bytes_arrive_and_no_flag(pair: tuple[StreamTransport, StreamTransport], nbytes: int) -> None:
    body = mostly_zero(nbytes)
    for a, b in (pair, pair[::-1]):
        for kind in (Kind.PUSH, Kind.RESULT):
            header = Header(kind, 1, 4, 2, sender=a.rank, flags=Flag.MEAN, weight=2.0)
            sent = a.send(b.rank, header, memoryview(body))
            got = b.wait(b.recv(a.rank, key(header)), soon())
            assert got.header == header
            assert got.body == body
            assert a.wait(sent, soon()).header == header


@pytest.mark.skipif(not flow_control.SUPPORTED, reason="bodies are cut on Linux only")
@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.RESULT, Kind.DATA, Kind.STATE, Kind.PROBE])
def test_fewer_bytes_are_on_the_socket_of_payloads_alone_and_parts_say_so(kind: Kind) -> None:
    body = mostly_zero(20_000_000)
    end = StreamTransport(Hello("test", SERVER_BASE))
    try:
        sock = raw_peer(end.listen(FAR), 5)
        sock.sendall(frame(Header(Kind.DATA, 1)))
        end.wait(end.recv(5), soon())  # a peer that has been welcomed is known a moment later
        sent = end.send(5, Header(kind, step=3, order=2), body)
        reader, frames, counted = Reader(), list[Frame](), 0
        assembly = Assembly(allocate_bytes, lambda: len(body), lambda: 2 * len(body))
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


# ---- in training


class Sockets:
    """What Rig needs of a Hub, over TCP: servers listen, and workers dial them all."""

    def __init__(self) -> None:
        self._servers: list[StreamTransport] = []

    def transport(self, peer: int) -> StreamTransport:
        transport = StreamTransport(Hello("test", peer))
        if peer >= SERVER_BASE:
            self._servers.append(transport)
        else:
            for server in self._servers:
                transport.dial(server.rank, server.listen(), soon())
        return transport


def gradients_of_embedding(rank: int, number: int) -> list[torch.Tensor | None]:
    """Whole numbers, which halves hold, so that sums by hand are exact; and those of a dense layer beside it."""
    table, dense = torch.nn.Embedding(2000, 24), torch.nn.Linear(24, 5)
    rng = torch.Generator().manual_seed(100 * number + rank)
    words = torch.randint(2000, (40,), generator=rng)
    weights = torch.randint(-8, 9, (40, 24), generator=rng).float()
    (table(words) * weights).sum().backward()
    return [table.weight.grad, torch.randint(-8, 9, dense.weight.shape, generator=rng).float()]


@pytest.mark.parametrize("codec", ["fp16()", "identity()"])
def test_an_embedding_trains_to_the_same_bits_with_less_on_the_socket(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
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

"""The conformance suite of every carrier and wrapper."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from support.meshes import MESHES, PATIENCE_S, End, Mesh, data, exchange_pair, in_threads, soon

from commlayer.errors import CommError, DeadlineExceeded, PeerLost
from commlayer.transport.protocol import Message, key


def exchange(transport: End, nbytes: int, step: int) -> int:
    """Sends rank + 1 in every byte to all others; the sum of what comes, checked to be the same in every byte."""
    body = bytes([transport.rank + 1]) * nbytes
    for peer in transport.peers:
        transport.send(peer, data(transport.rank, step=step), body)
    total = np.zeros(max(1, nbytes), np.int64)
    for peer in transport.peers:
        message = transport.wait(transport.recv(peer, key(data(peer, step=step))), soon())
        assert (message.peer, message.header.sender, len(message.body)) == (peer, peer, nbytes)
        total += np.frombuffer(message.body, np.uint8) if nbytes else peer + 1
    assert total.min() == total.max()
    return int(total[0])


def sums(mesh: Mesh, n: int) -> None:
    sizes = [0, 1, 100, 10_000, 1 << 20]
    with mesh(n) as transports:
        assert [t.peers for t in transports] == [tuple(p for p in range(n) if p != r) for r in range(n)]
        got = in_threads(transports, lambda t: [exchange(t, nbytes, step) for step, nbytes in enumerate(sizes)])
    for rank, totals in enumerate(got):
        assert totals == [n * (n + 1) // 2 - (rank + 1)] * len(sizes)


def large(mesh: Mesh) -> None:
    """Bodies larger than all buffers pass in both directions at once, complete and in order, with odd sizes between them."""
    block = os.urandom((1 << 20) + 1)
    bodies = [block * 40, block[:77777], block * 24, b""]  # 64 MiB and a little

    def swap(transport: End) -> bool:
        peer = 1 - transport.rank
        for body in bodies:
            transport.send(peer, data(transport.rank), body)
        return all(transport.wait(transport.recv(peer), soon()).body == body for body in bodies)

    with mesh(2) as transports:
        assert in_threads(transports, swap) == [True, True]


def any_key(mesh: Mesh) -> None:
    """A receive of a peer with any key gets what no receive with a key has matched."""
    with mesh(3) as transports:
        first, *others = transports
        with_key = [first.recv(other.rank, key(data(0, bucket=9))) for other in others]
        for other in others:
            for bucket in (9, 5):
                other.send(0, data(other.rank, bucket), bytes([other.rank]))
        got = [first.wait(handle, soon()) for handle in with_key]
        assert [(m.peer, m.header.bucket) for m in got] == [(1, 9), (2, 9)]
        message = first.wait(first.recv(2), soon())
        assert (message.peer, message.header.bucket, bytes(message.body)) == (2, 5, b"\2")


def early_arrivals(mesh: Mesh) -> None:
    """Messages that arrive before their receive are kept, in order of sending per key."""
    with mesh(2) as (a, b):
        for bucket in (1, 2, 1):
            a.send(1, data(0, bucket), f"{bucket}".encode())
        a.send(1, data(0, 3, step=1), b"marker")
        b.wait(b.recv(0, key(data(0, 3, step=1))), soon())
        assert bytes(b.wait(b.recv(0, key(data(0, 2))), soon()).body) == b"2"
        handles = [b.recv(0, key(data(0, 1))) for _ in range(2)]
        assert all(handle.done() for handle in handles)


def priority(mesh: Mesh) -> None:
    """While the wire is busy the queue is sorted: an urgent frame overtakes, and one step precedes the next."""
    backlog = 16  # MiB, more than sockets buffer
    with mesh(2) as (a, b):
        entered, gate = threading.Event(), threading.Event()

        def hold(_: object) -> None:  # blocks the carrier, as no callback should
            entered.set()
            gate.wait(PATIENCE_S)

        b.recv(0, key(data(0, bucket=1000))).on_done(hold)
        first = threading.Thread(target=lambda: a.send(1, data(0, bucket=1000)), daemon=True)
        first.start()
        assert entered.wait(PATIENCE_S)
        body = bytes(1 << 20)
        handles = [b.recv(0) for _ in range(backlog + 2)]
        for bucket in range(backlog):
            a.send(1, data(0, bucket, step=1, order=7), body)
        later = a.send(1, data(0, bucket=2001, step=2, order=0), b"next step")
        a.send(1, data(0, bucket=2000, step=1, order=3), b"urgent")
        gate.set()
        arrived = [b.wait(handle, soon()).header.bucket for handle in handles]
        a.wait(later, soon())
    assert [bucket for bucket in arrived if bucket < backlog] == list(range(backlog))
    assert arrived[-1] == 2001
    assert arrived.index(2000) < backlog


def deadline(mesh: Mesh) -> None:
    """Names the peer; the operation continues and may be awaited again."""
    with mesh(3) as (a, _, c):
        handle, anyone = a.recv(1, key(data(1, bucket=8, step=4))), a.recv(2)
        for late, name in ((handle, "worker 1"), (anyone, "worker 2")):
            begin = time.monotonic()
            with pytest.raises(DeadlineExceeded) as caught:
                a.wait(late, begin + 0.1)
            assert 0.1 <= time.monotonic() - begin < PATIENCE_S
            assert caught.value.peer == name
        with pytest.raises(DeadlineExceeded, match=r"worker 1: .*\(step 4, bucket 8\).*E-DEADLINE"):
            a.wait(handle, time.monotonic())
        c.send(0, data(2), b"late but here")
        assert bytes(a.wait(anyone, soon()).body) == b"late but here"


def abort_one(mesh: Mesh) -> None:
    """That peer's operations end with the reason, permanently; others continue."""
    reason = PeerLost("heartbeats stopped", peer="worker 1")
    with mesh(3) as (a, b, c):
        waiting = [a.recv(1), a.recv(1, key(data(1, bucket=5)))]
        anyone = a.recv(2)
        a.abort(reason, 1)
        for handle in (*waiting, a.recv(1), a.send(1, data(0))):
            with pytest.raises(PeerLost) as caught:
                a.wait(handle, soon())
            assert caught.value is reason
        c.send(0, data(2), b"go on")
        assert a.wait(anyone, soon()).peer == 2
        with pytest.raises(PeerLost, match="worker 0: .*E-PEER-LOST"):
            b.wait(b.recv(0), soon())
        assert exchange_pair(b, c)


def abort_all(mesh: Mesh) -> None:
    reason = CommError("the step is given up", peer="worker 9")
    with mesh(3) as (a, *_):
        handles = [a.recv(2), a.recv(1), a.recv(2, key(data(2)))]
        errors: list[BaseException] = []

        def waiter(handle: object) -> None:
            try:
                a.wait(handle, soon())  # type: ignore[arg-type]
            except CommError as error:
                errors.append(error)

        threads = [threading.Thread(target=waiter, args=(h,), daemon=True) for h in handles]
        for thread in threads:
            thread.start()
        a.abort(reason)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert errors == [reason] * 3
        assert a.recv(2).error() is reason
        assert a.send(1, data(0)).error() is reason
        a.abort(CommError("a later reason"))
        assert a.recv(1).error() is reason


def orderly_end(mesh: Mesh) -> None:
    """Messages sent before close() are delivered whenever requested; missing ones are a failure; close is idempotent."""
    with mesh(3) as (a, b, c):
        for bucket in range(3):
            a.send(1, data(0, bucket), bytes(100_000))
        waiting, own = b.recv(0, key(data(0, bucket=50))), a.recv(1)
        a.close()
        a.close()
        with pytest.raises(PeerLost, match="worker 0: .*E-PEER-ENDED"):
            b.wait(waiting, soon())
        for bucket in range(3):
            assert len(b.wait(b.recv(0, key(data(0, bucket))), soon()).body) == 100_000
        for handle in (b.recv(0), b.send(0, data(1))):
            with pytest.raises(PeerLost, match="worker 0: .*E-PEER-ENDED"):
                b.wait(handle, soon())
        for handle in (own, a.recv(2), a.send(1, data(0))):
            with pytest.raises(CommError, match="E-SESSION-CLOSED"):
                a.wait(handle, soon())
        assert exchange_pair(b, c)


def callbacks(mesh: Mesh) -> None:
    """Each runs once, also when added late or when another one fails; a send's message is its header."""
    with mesh(2) as (a, b):
        calls: list[Message] = []
        handle = b.recv(0)
        called = threading.Event()
        handle.on_done(lambda _: 1 // 0)
        handle.on_done(lambda h: (calls.append(h.message()), called.set()))
        with pytest.raises(ValueError, match="receive with worker 0 .*E-TRANSPORT-USE"):
            handle.message()
        sending = a.send(1, data(0), b"once")
        assert called.wait(PATIENCE_S)
        handle.on_done(lambda h: calls.append(h.message()))
        assert [bytes(m.body) for m in calls] == [b"once"] * 2
        message = a.wait(sending, soon())
        assert (message.peer, message.header, bytes(message.body)) == (1, data(0), b"")


def our_bugs(mesh: Mesh) -> None:
    with mesh(2) as (a, _):
        with pytest.raises(ValueError, match=r"bucket=-1\b.*E-TRANSPORT-USE"):
            a.send(1, data(0, bucket=-1))
        with pytest.raises(PeerLost, match="worker 5: .*E-PEER-LOST"):
            a.wait(a.send(5, data(0)), soon())


def storm(mesh: Mesh) -> None:
    """Many small frames from several threads of each of three ranks in all directions: none lost, duplicated or changed."""
    threads, count = 3, 60

    def work(transport: End) -> int:
        def pour(lane: int) -> None:
            for i in range(count):
                body = bytes([transport.rank, lane]) + i.to_bytes(2, "little")
                for peer in transport.peers:
                    transport.send(peer, data(transport.rank, bucket=lane), body)

        lanes = [threading.Thread(target=pour, args=(lane,), daemon=True) for lane in range(threads)]
        for lane in lanes:
            lane.start()
        for peer in transport.peers:
            for lane in range(threads):
                for i in range(count):
                    message = transport.wait(transport.recv(peer, key(data(peer, bucket=lane))), soon())
                    assert bytes(message.body) == bytes([peer, lane]) + i.to_bytes(2, "little")
        for lane in lanes:
            lane.join(PATIENCE_S)
        return len(transport.peers)

    with mesh(3) as transports:
        assert in_threads(transports, work) == [2, 2, 2]


CASES: dict[str, Callable[[Mesh], None]] = {
    case.__name__: case
    for case in (any_key, early_arrivals, priority, deadline, abort_one, abort_all, orderly_end, callbacks,
                 our_bugs, storm)
}


MANY = ["loopback", "tcp", "far"]
"""Of any number of ranks; on the others connections are dear."""
SIZES = [(name, n) for name in MESHES for n in ([1, 2, 3, 5, 9] if name in MANY else [3])]


@pytest.mark.parametrize(("carrier", "n"), SIZES)
def test_sums(carrier: str, n: int) -> None:
    sums(MESHES[carrier], n)


@pytest.mark.parametrize("carrier", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_case(carrier: str, case: str) -> None:
    CASES[case](MESHES[carrier])


@pytest.mark.parametrize("carrier", ["tcp", "tls", "grpc", "grpc+tls"])
def test_bodies_larger_than_all_buffers(carrier: str) -> None:
    large(MESHES[carrier])

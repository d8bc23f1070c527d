"""Handles of messages in progress, and the buffer pool."""

from __future__ import annotations

import os
import signal
import threading
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.meshes import PATIENCE_S, data, soon

from commlayer.errors import CorruptFrame, PeerLost
from commlayer.transport.buffer_pool import MIN_NBYTES, BufferPool, size_class
from commlayer.transport.endpoint import StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import Handle, Message


def message(peer: int, nbytes: int) -> Message:
    return Message(peer, data(peer), memoryview(bytes(nbytes)))


def test_operation_completes_once_and_wakes_every_waiter() -> None:
    operation = Handle("receive", 3)
    got: list[Message] = []
    threads = [threading.Thread(target=lambda: got.append(operation.wait(soon())), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    operation.complete(message(3, 7))
    operation.fail(PeerLost("too late", peer="worker 3"))
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [len(m.body) for m in got] == [7] * 4
    assert operation.error() is None


def test_signal_interrupts_a_wait_on_the_main_thread() -> None:
    """Ctrl-C must end a training script that waits for a peer."""

    class Interrupted(Exception):
        pass

    def handler(*_: object) -> None:
        raise Interrupted

    former = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(Interrupted):
            Handle("receive", 3).wait(soon())
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, former)


@given(st.integers(MIN_NBYTES, 1 << 32))
def test_size_classes_waste_at_most_an_eighth_and_are_idempotent(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size <= nbytes + nbytes // 8 + 1
    assert size_class(size) == size


def test_returned_buffer_is_reused_and_the_old_view_is_released() -> None:
    pool = BufferPool()
    first = pool.take(1_000_000)
    buffer = first.obj
    pool.give(first)
    with pytest.raises(ValueError, match="released"):
        bytes(first)
    second = pool.take(990_000)
    assert second.obj is buffer
    assert len(second) == 990_000
    assert pool.take(1_000_000).obj is not buffer


def test_pool_is_bounded_and_keeps_only_its_own_buffers() -> None:
    pool = BufferPool(cap_nbytes=1 << 20)
    foreign = [memoryview(bytes(1 << 20)), memoryview(bytearray(100_001))]
    own = [pool.take(1 << 20), pool.take(1 << 20)]
    kept, dropped = (body.obj for body in own)
    for body in [*own, *foreign, pool.take(5)]:
        pool.give(body)
    taken = [pool.take(1 << 20).obj for _ in range(2)]
    assert taken[0] is kept
    assert taken[1] is not dropped


def test_error_of_a_peer_holds_no_reference_to_its_data() -> None:
    """A regression: each evicted member left its connection and the body that violated the protocol in memory."""

    class Body:
        pass

    end, kept = StreamTransport(Hello("test", 0)), list[weakref.ref[Body]]()

    def judge() -> None:
        body = Body()
        kept.append(weakref.ref(body))
        try:
            raise ValueError("a payload that does not fit")
        except ValueError as error:
            raise CorruptFrame(str(error), peer="worker 1") from None

    try:
        judge()
    except CorruptFrame as error:
        end.abort(error, 1)
    assert kept[0]() is None
    error = end.send(1, data(0)).error()
    assert error is not None
    assert (error.code, error.peer, error.what) == ("E-FRAME", "worker 1", "a payload that does not fit")
    end.close()

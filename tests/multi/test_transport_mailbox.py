"""Matching of arrivals and receives against a plain model, its caps, and the buffer pool."""

from __future__ import annotations

import os
import signal
import threading
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attached import assert_refused, outcome
from support.mailbox import KEPT_OVERHEAD_NBYTES, Mailbox
from support.meshes import PATIENCE_S, data, soon

from commlayer.errors import CommError, CorruptFrame, PeerLost
from commlayer.transport.buffer_pool import MIN_NBYTES, BufferPool, size_class
from commlayer.transport.protocol import Handle, Key, Message, key

PEERS, KEYS = (0, 1, 2), tuple(key(data(0, bucket=b)) for b in range(3))


class Model:
    """Two lists, searched from the front."""

    def __init__(self) -> None:
        self.posted: list[tuple[int, Key | None, int]] = []
        self.kept: list[tuple[int, Key, int]] = []
        self.matched: dict[int, int] = {}  # receive -> arrival

    def recv(self, peer: int, match: Key | None, name: int) -> None:
        for entry in self.kept:
            if peer == entry[0] and match in (None, entry[1]):
                self.kept.remove(entry)
                self.matched[name] = entry[2]
                return
        self.posted.append((peer, match, name))

    def deliver(self, peer: int, k: Key, name: int) -> None:
        for entry in self.posted:
            if entry[0] == peer and entry[1] in (None, k):
                self.posted.remove(entry)
                self.matched[entry[2]] = name
                return
        self.kept.append((peer, k, name))


acts = st.one_of(
    st.tuples(st.just("recv"), st.sampled_from(PEERS), st.sampled_from((None, *KEYS))),
    st.tuples(st.just("deliver"), st.sampled_from(PEERS), st.sampled_from(KEYS)),
)


@given(st.lists(acts, max_size=40))
@settings(max_examples=300, deadline=None)
def test_matching_equals_a_model_of_two_lists(script: list[tuple[str, int, Key | None]]) -> None:
    box, model, handles = Mailbox(), Model(), {}
    for name, (act, peer, k) in enumerate(script):
        if act == "recv":
            handles[name] = box.recv(peer, k)
            model.recv(peer, k, name)
        else:
            assert k is not None
            box.deliver(Message(peer, data(peer, bucket=k[3]), memoryview(name.to_bytes(2, "little"))))
            model.deliver(peer, k, name)
    got = {name: int.from_bytes(h.message().body, "little") for name, h in handles.items() if h.done()}
    assert got == model.matched


def message(peer: int, nbytes: int) -> Message:
    return Message(peer, data(peer), memoryview(bytes(nbytes)))


def test_unrequested_data_of_a_peer_are_bounded() -> None:
    box = Mailbox(max_kept_nbytes=3 * (100 + KEPT_OVERHEAD_NBYTES))
    for _ in range(3):
        box.deliver(message(1, 100))
    assert_refused(outcome(lambda: box.deliver(message(1, 0))), "E-FRAME", "CorruptFrame: ", "worker 1: ")
    box.deliver(message(2, 100))  # others are not the poorer
    box.recv(1, None).message()
    box.deliver(message(1, 100))


def test_arrivals_survive_an_orderly_end_but_not_an_abort_or_a_new_connection() -> None:
    box = Mailbox()
    lost, given_up = PeerLost("gone", peer="worker 1"), CommError("given up", peer="worker 2")
    for peer in (1, 2):
        box.deliver(message(peer, 1))
    other = box.recv(3, KEYS[2])
    box.end(lost, 1)
    box.end(PeerLost("later", peer="worker 1"), 1)
    box.abort(given_up, 2)
    assert len(box.recv(1, None).message().body) == 1
    assert box.recv(1, None).error() is lost
    assert box.recv(2, None).error() is given_up
    assert not other.done()
    box.deliver(message(1, 1))
    assert box.recv(1, None).error() is lost
    box.admit(1)
    again = box.recv(1, None)
    box.deliver(message(1, 5))
    assert len(again.message().body) == 5


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


@pytest.mark.parametrize("how", ["end", "abort"])
def test_error_of_a_peer_holds_no_reference_to_its_data(how: str) -> None:
    """A regression: each evicted member left its connection and the body that violated the protocol in memory."""

    class Body:
        pass

    box, kept = Mailbox(), []

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
        getattr(box, how)(error, 1)
    assert kept[0]() is None
    error = box.recv(1, None).error()
    assert error is not None
    assert (error.code, error.peer, error.what) == ("E-FRAME", "worker 1", "a payload that does not fit")

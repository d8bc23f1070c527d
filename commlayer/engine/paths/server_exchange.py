"""A bucket's exchange with the server that sums it. The encode lane encodes and sends; the transport's thread that receives the
answer decodes it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

from commlayer.engine.buckets.bucket import EncodedBucket, WorkerBucket
from commlayer.engine.buckets.current_step import BROKEN, Step
from commlayer.engine.paths.lanes import Lane
from commlayer.engine.paths.staging import Staging
from commlayer.errors import CorruptFrame, DeadlineExceeded
from commlayer.observe.step_trace import EXCHANGE
from commlayer.transport.protocol import (
    SERVER_BASE,
    Flag,
    Handle,
    Header,
    Kind,
    Message,
    peer_name,
)
from commlayer.transport.reconnect import ReconnectingTransport

Fill = Callable[[EncodedBucket], float]
"""Function that fills a bucket's send buffer on the encode lane, and sets weight and used slices. It returns the
time.perf_counter() when it began to fill."""
Done = Callable[[EncodedBucket], None]
"""Function that is called when a bucket's sum is in the receive buffer."""


class ServerExchange:
    """Exchanges one worker's buckets with all servers.

    A bucket passes from the training thread to the encode lane, and from the thread that receives the answer back to the
    training thread. A large payload also passes to the connection's send thread.
    """

    def __init__(
        self, step: Step, transport: ReconnectingTransport, recycle: Callable[[memoryview], None], staging: Staging
    ) -> None:
        """`recycle` receives the buffers of decoded results for reuse."""
        self._step, self._transport, self._recycle, self._staging = step, transport, recycle, staging
        self._encode = Lane("encode", step.latch)
        self._decoding = threading.Lock()
        """Held while an answer is decoded, one at a time: connections to several servers have a receive thread each."""
        self._closed = False
        self._choice = threading.Lock()
        self._queued, self._withdrawn = set[int](), set[int]()
        """Buckets whose payloads are not sent yet, and those of them whose contributions are withdrawn. Held: `_choice`."""

    def put(
        self, bucket: EncodedBucket, fill: Fill, done: Done, *, in_order: bool = False,
    ) -> None:
        """Queues a bucket for its exchange. Buckets that the next forward pass needs first are encoded first. `done` is called
        on the thread that receives the server's answer, and must not block.

        `in_order`: encodes in the order of the calls of `put`. All ranks of a node then use the same order, because `fill`
        calls collectives of the node.
        """
        bucket.exchange.joined = self._step.joined
        with self._choice:
            self._queued.add(bucket.id)
        self._encode.put(lambda: self._push(bucket, fill, done), () if in_order else (self._step.number, bucket.order))

    def _push(self, bucket: EncodedBucket, fill: Fill, done: Done) -> None:
        """Fills and encodes a bucket and sends its payload. Runs on the encode lane."""
        step = self._step
        if step.error is not None:
            self._leave_queue(bucket)
            return
        with self._staging.lane(bucket):
            begin = fill(bucket)
            broken = math.isnan(bucket.exchange.weight)
            if bucket.means and not broken:
                bucket.to_mean()
            self._staging.to_host(bucket)
            nbytes = bucket.encode()
        withdrawn = self._leave_queue(bucket)
        if broken:
            self._give_up(bucket, done)
            return
        if withdrawn:
            self._send(bucket, done, 0, b"", Flag.ABANDON)
            return
        step.counters.count_codec_times(encode_s=time.perf_counter() - begin)
        if step.recorder.on:
            step.recorder.add(f"encode@{bucket.coder.place}", bucket.id, begin, nbytes)
        self._send(bucket, done, 0, bucket.coder.payload[:nbytes], Flag.MEAN if bucket.means else Flag.NONE)

    def _leave_queue(self, bucket: EncodedBucket) -> bool:
        """Takes a bucket from the queue. Returns whether its contribution is withdrawn."""
        with self._choice:
            withdrawn = bucket.id in self._withdrawn
            self._queued.discard(bucket.id)
            self._withdrawn.discard(bucket.id)
        return withdrawn

    def _give_up(self, bucket: EncodedBucket, done: Done) -> None:
        """Sends an abort instead of the payload, because a rank of this node has aborted the step. The bucket is encoded and
        rolled back nevertheless, as on ranks that do not know of the abort. Counters and shared random numbers of codecs
        therefore stay equal on all ranks."""
        bucket.exchange.weight = 0.0
        self._send(bucket, done, 0, f"{peer_name(self._step.rank)}: {BROKEN}".encode(), Flag.ABANDON)

    def _send(self, bucket: EncodedBucket, done: Done, r: int, body: memoryview | bytes, flags: int = Flag.NONE) -> None:
        step, exchange = self._step, bucket.exchange
        server = SERVER_BASE + bucket.planned.server
        undone = bucket.ledger.report()
        header = Header(
            Kind.PUSH, step.generation, exchange.step, bucket.id, round=r, codec=bucket.codec.id, sender=step.rank,
            order=bucket.order, flags=flags, weight=exchange.weight, used=exchange.used,
            total=step.units.divisor(bucket), undone=undone, joined=exchange.joined,
        )
        step.counters.count_bytes(len(body), 0)  # counted before sending, because the step can end right after it
        begin = time.perf_counter()
        answer = self._transport.request(server, header, body)
        answer.on_done(partial(self._answered, bucket, done, r, begin))

    def _answered(self, bucket: EncodedBucket, done: Done, r: int, begin: float, handle: Handle) -> None:
        """Decodes a server's answer. Runs on a receive thread."""
        if (error := handle.error()) is not None:
            self._step.latch(error)
            return
        self._step.recorder.add(EXCHANGE, bucket.id, begin)
        try:
            self._take(bucket, done, r, handle.message())
        except BaseException as failure:
            self._step.latch(failure)

    def _take(self, bucket: EncodedBucket, done: Done, r: int, message: Message) -> None:
        """Decodes a server's answer, and sends the codec's next round if there is one."""
        exchange = bucket.exchange
        with self._decoding:
            if self._closed or self._step.error is not None:
                return
            self._step.counters.count_bytes(0, len(message.body))
            if message.header.flags & Flag.ABANDON and not message.body:
                with self._staging.way_back(bucket):
                    bucket.receive_nothing(self._step.units.total)
                self._staging.to_device(bucket)
                next_nbytes = None
            elif message.header.flags & Flag.ABANDON:
                exchange.abandoned, exchange.weight, exchange.finite = str(message.body, "utf-8", "replace"), math.nan, False
                next_nbytes = None
            else:
                next_nbytes = self._decode(bucket, r, message)
        if next_nbytes is not None:
            self._send(bucket, done, r + 1, bucket.coder.payload[:next_nbytes])
            return
        exchange.answered = True
        done(bucket)

    def _decode(self, bucket: EncodedBucket, r: int, message: Message) -> int | None:
        """Decodes the answer of round `r`. Returns the size of the next round's payload; None after the last round."""
        step, exchange = self._step, bucket.exchange
        begin, nbytes = time.perf_counter(), len(message.body)
        kept, next_nbytes = False, None
        try:
            if r + 1 < len(bucket.codec.rounds):
                next_nbytes = bucket.coder.next(r, message.body)
            else:
                with self._staging.way_back(bucket):
                    kept = bucket.decode(message.body)
                    bucket.finish(message.header.weight, message.header.used)
        except CorruptFrame as error:
            raise error.located(peer=peer_name(message.peer), step=exchange.step, bucket=bucket.id) from None
        if not kept:
            self._recycle(message.body)
        step.counters.count_codec_times(decode_s=time.perf_counter() - begin)
        if step.recorder.on:
            step.recorder.add(f"decode@{bucket.coder.place}", bucket.id, begin, nbytes)
        if next_nbytes is None:
            self._staging.to_device(bucket)
        return next_nbytes

    @property
    def unsent_nbytes(self) -> int:
        return self._transport.unsent_nbytes

    def withdraw(self, buckets: Collection[int]) -> int:
        """Withdraws those of this worker's contributions to these buckets that are not sent completely. Returns the bytes of
        those that are encoded."""
        generation = self._step.generation
        with self._choice:
            self._withdrawn |= self._queued & set(buckets)
        return self._transport.withdraw(lambda h: h.kind == Kind.PUSH and h.generation == generation and h.bucket in buckets
                                        and not h.round and not h.flags)

    def deadline_error(self, bucket: WorkerBucket) -> DeadlineExceeded:
        """Creates the deadline error of a bucket. The error names the peer that caused the delay."""
        begun = bucket.exchange.started
        error = partial(DeadlineExceeded, step=bucket.exchange.step if begun else self._step.number, bucket=bucket.id)
        server = peer_name(SERVER_BASE + bucket.planned.server)
        if not begun:
            return error("the bucket was not summed inside the node before the deadline", peer="a rank of this node")
        if (names := self.awaited(bucket)) != (server,):
            return error(f"sent no contribution to the bucket before the deadline ({server} waits "
                         "for it)", peer=", ".join(names))
        return error("sent no result of the bucket before the deadline", peer=server)

    def awaited(self, bucket: WorkerBucket) -> tuple[str, ...]:
        """Returns the names of the workers that have not contributed to a bucket, if the bucket's server has reported any; else
        the server's name."""
        stalled_step, missing = self._step.stalled.get(bucket.id, (bucket.exchange.step, ()))
        if stalled_step == bucket.exchange.step and missing:
            return tuple(map(peer_name, missing))
        return (peer_name(SERVER_BASE + bucket.planned.server),)

    def drain(self, timeout_s: float) -> bool:
        """Returns True if all encoding and decoding has finished, each within `timeout_s` seconds."""
        return self._encode.drain(timeout_s) and self._await_decoding(timeout_s)

    def _await_decoding(self, timeout_s: float) -> bool:
        if idle := self._decoding.acquire(timeout=timeout_s):
            self._decoding.release()
        return idle

    def close(self, timeout_s: float) -> None:
        self._closed = True
        self._encode.close(timeout_s)
        self._await_decoding(timeout_s)

"""Path for buckets that a worker, the only one on its node, exchanges with servers. Each result belongs to its own step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from commlayer.engine.buckets import WorkerBucket
from commlayer.engine.lanes import Lane, Staging, Urgency
from commlayer.engine.paths.path import BucketPath, take_back
from commlayer.engine.step import BROKEN, Step
from commlayer.errors import CorruptFrame, DeadlineExceeded
from commlayer.observe.step_trace import EXCHANGE
from commlayer.transport.protocol import SERVER_BASE, Flag, Handle, Header, Kind, Transport, key, peer_name


class ServerPath(BucketPath):
    def __init__(self, buckets: Sequence[WorkerBucket], step: Step, staging: Staging, exchange: ServerExchange) -> None:
        self._buckets, self._step, self._staging, self._exchange = buckets, step, staging, exchange
        self._arrivals = step.arrivals()

    def begin(self, bucket: WorkerBucket) -> None:
        take_back(self, bucket, self._staging)
        bucket.step = self._step.number
        self._exchange.put(bucket, self._gather, self._arrived)

    def _gather(self, bucket: WorkerBucket) -> float:
        """Copies a bucket's gradients into its send buffer. Runs on the encode lane; returns the start time."""
        begin = time.perf_counter()
        self._step.units.gather(bucket)
        return begin

    def _arrived(self, _bucket: WorkerBucket) -> None:
        """Counts a bucket whose result has been decoded. Runs on the decode lane."""
        self._arrivals.arrived()

    def finish(self, deadline: float) -> None:
        if not self._arrivals.wait(deadline):
            raise self._exchange.overdue(next((b for b in self._buckets if not b.done), self._buckets[0]))
        self._staging.join()

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        if deadline is not None and not self._arrivals.wait_for(lambda: bucket.done, deadline):
            raise self._exchange.overdue(bucket)
        if bucket.done:
            self._staging.join()
        return bucket.done

    def reset(self) -> None:
        self._arrivals.expect(len(self._buckets))
        for bucket in self._buckets:
            bucket.rewind()


# ---- A bucket's exchange with the server that sums it: encode, send, receive, decode, on two lanes
#
# Routes pass a bucket, a function that fills x with the values to code, and one that is called when the sum is in y.

log = logging.getLogger("commlayer")

AGAIN = 1 << 30
"""Added to a bucket's position when it is encoded again, so that it follows all buckets that have not been encoded yet."""
FOREVER_S = 86400.0
"""Limit in seconds for waits that another thread ends: when the training thread's deadline passes, it sets an error that ends
them."""

Fill = Callable[[WorkerBucket], float]
"""Function that fills a bucket's send buffer on the encode lane, and sets weight and used slices. It returns the
time.perf_counter() when its own work began."""


class _Way(NamedTuple):
    """A bucket whose exchange is running, and the function to call when its sum is in the receive buffer."""

    bucket: WorkerBucket
    done: Callable[[WorkerBucket], None]
    urgency: Urgency
    """Priority on both lanes and on the network; smaller tuples come first."""


class ServerExchange:
    """Exchanges of one worker's buckets with all servers: encode, send, receive, decode, on two lanes."""

    def __init__(
        self, step: Step, transport: Transport | None, recycle: Callable[[memoryview], None], staging: Staging
    ) -> None:
        """`recycle` receives the buffers of decoded results for reuse."""
        self._step, self._transport, self._recycle, self._staging = step, transport, recycle, staging
        self._encode = Lane("encode", step.latch)
        self._decode = Lane("decode", step.latch)
        self._stalled: dict[int, tuple[int, tuple[int, ...]]] = {}

    def put(
        self, bucket: WorkerBucket, fill: Fill, done: Callable[[WorkerBucket], None], *, in_turn: bool = False,
    ) -> None:
        """Queues a bucket for its exchange. Buckets that the next forward pass needs first are encoded first. `done` is called
        on the decode lane.

        `in_turn`: encodes in the order of the calls of `put`. This order is the same on all ranks of a node, because `fill`
        calls collectives of the node.
        """
        way = _Way(bucket, done, () if in_turn else (self._step.number, bucket.order))
        self._encode.put(lambda: self._push(way, fill), way.urgency)

    def _push(self, way: _Way, fill: Fill) -> None:
        """Fills and encodes a bucket and sends its payload. Runs on the encode lane."""
        step, bucket = self._step, way.bucket
        if step.error is not None:
            return
        with self._staging.lane(bucket):
            begin = fill(bucket)
            broken = math.isnan(bucket.weight)
            if not broken:
                bucket.to_mean()
            self._staging.to_host(bucket)
            nbytes = bucket.encode()
        if broken:
            self._give_up(way)
            return
        step.counters.coded(encode_s=time.perf_counter() - begin)
        step.recorder.add(bucket.op("encode"), bucket.id, begin, nbytes)
        self._send(way, 0, bucket.payload[:nbytes], Flag.MEAN if bucket.means else Flag.NONE)

    def _give_up(self, way: _Way) -> None:
        """Sends an abort instead of the payload, because a rank of this node has aborted the step. The bucket is encoded and
        rolled back all the same, as on ranks that do not know of the abort. So counters and shared random numbers of codecs
        stay equal on all ranks."""
        way.bucket.weight = 0.0
        self._send(way, 0, f"{peer_name(self._step.rank)}: {BROKEN}".encode(), Flag.ABANDON)

    def _send(self, way: _Way, r: int, body: memoryview | bytes, flags: int = Flag.NONE) -> None:
        step, bucket = self._step, way.bucket
        assert self._transport is not None
        server = SERVER_BASE + bucket.server
        undone, bucket.undone = bucket.undone, 0
        bucket.reported |= undone
        header = Header(
            Kind.PUSH, step.generation, bucket.step, bucket.id, round=r, codec=bucket.codec.id, sender=step.rank,
            order=bucket.order, flags=flags, weight=bucket.weight, used=bucket.used,
            total=bucket.total if bucket.in_means else 0.0, undone=undone,
        )
        begin = time.perf_counter()
        answer = self._transport.recv(server, key(header._replace(kind=Kind.RESULT)))
        answer.on_done(lambda handle: self._answered(way, r, handle, begin))
        step.counters.carried(len(body), 0)  # counted before sending: the step may end right after it
        self._transport.send(server, header, body).on_done(self._sent)

    def _sent(self, handle: Handle) -> None:
        if (error := handle.error()) is not None:
            self._step.latch(error)

    def _answered(self, way: _Way, r: int, handle: Handle, begin: float) -> None:
        """Queues the decoding of a server's answer, or another encoding. Runs on a receiver thread, so it does no other work.
        """
        if (error := handle.error()) is not None:
            self._step.latch(error)
            return
        self._step.recorder.add(EXCHANGE, way.bucket.id, begin)
        if handle.message().header.flags & Flag.AGAIN:
            # After all buckets that are not coded yet. Otherwise network timing would decide which of them get the new weight
            # in time.
            urgency = way.urgency and (way.urgency[0], AGAIN + way.urgency[1])
            self._encode.put(lambda: self._code_again(way, handle.message().header.weight), urgency)
        else:
            self._decode.put(lambda: self._take(way, r, handle), way.urgency)

    def _code_again(self, way: _Way, total: float) -> None:
        """Encodes a bucket again, because the total weight of all workers differs from this worker's assumption. Runs on the
        encode lane."""
        if self._step.error is not None:
            return
        self._step.units.hear(total)
        with self._staging.lane(way.bucket):
            nbytes = way.bucket.restart(total)
        self._send(way, 0, way.bucket.payload[:nbytes], Flag.AGAIN)

    def _take(self, way: _Way, r: int, handle: Handle) -> None:
        """Decodes a server's answer, and sends the codec's next round if there is one. Runs on the decode lane."""
        step, bucket = self._step, way.bucket
        if step.error is not None:
            return
        begin = time.perf_counter()
        message = handle.message()
        nbytes = len(message.body)
        step.counters.carried(0, nbytes)
        last = r + 1 == len(bucket.codec.rounds)
        if message.header.flags & Flag.ABANDON:
            bucket.abandoned, bucket.weight, bucket.finite = str(message.body, "utf-8", "replace"), math.nan, False
            self._finished(way)
            return
        try:
            if last:
                with self._staging.way_back(bucket):
                    bucket.decode(message.body)
                bucket.weight, bucket.used = message.header.weight, message.header.used
            else:
                next_nbytes = bucket.encode_next(r, message.body)
        except CorruptFrame as error:
            peer = peer_name(message.peer)
            raise error.located(peer=peer, step=bucket.step, bucket=bucket.id) from None
        if not (last and bucket.keeps_body):
            self._recycle(message.body)
        step.counters.coded(decode_s=time.perf_counter() - begin)
        step.recorder.add(bucket.op("decode"), bucket.id, begin, nbytes)
        if last:
            self._staging.to_device(bucket)
            self._finished(way)
        else:
            self._send(way, r + 1, bucket.payload[:next_nbytes])

    def _finished(self, way: _Way) -> None:
        way.bucket.done = True
        way.done(way.bucket)

    def stalled(self, bucket: int, step: int, missing: tuple[int, ...]) -> None:
        """Stores a server's report of the workers for which it waits, for one bucket and step."""
        self._stalled[bucket] = step, missing

    def overdue(self, bucket: WorkerBucket) -> DeadlineExceeded:
        """Creates the deadline error of a bucket. It names the peer that caused the delay."""
        step = bucket.step if bucket.started else self._step.number
        error = partial(DeadlineExceeded, step=step, bucket=bucket.id)
        server = peer_name(SERVER_BASE + bucket.server)
        if not bucket.started:
            return error("the bucket was not summed inside the node before the deadline", peer="a rank of this node")
        if (names := self.awaited(bucket)) != (server,):
            return error(f"sent no contribution to the bucket before the deadline ({server} waits "
                         "for it)", peer=", ".join(names))
        return error("sent no result of the bucket before the deadline", peer=server)

    def awaited(self, bucket: WorkerBucket) -> tuple[str, ...]:
        """Names of the workers that have not contributed to a bucket, if its server has reported any; else the server's name.
        """
        stalled_step, missing = self._stalled.get(bucket.id, (bucket.step, ()))
        if stalled_step == bucket.step and missing:
            return tuple(map(peer_name, missing))
        return (peer_name(SERVER_BASE + bucket.server),)

    def drain(self, timeout_s: float) -> bool:
        """Whether both lanes finished their work within `timeout_s` seconds each."""
        return self._encode.drain(timeout_s) and self._decode.drain(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._encode.close(timeout_s)
        self._decode.close(timeout_s)

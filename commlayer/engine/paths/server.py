"""Route for buckets that a worker, alone in its node, exchanges with servers; each result belongs to its own step."""

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
from commlayer.observe import EXCHANGE
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
        """Runs on the encode lane."""
        begin = time.perf_counter()
        self._step.units.gather(bucket)
        return begin

    def _arrived(self, _bucket: WorkerBucket) -> None:
        """Runs on the decode lane."""
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
"""Larger than any place in the forward pass."""
FOREVER_S = 86400.0
"""For waits that end from outside: when the training thread's deadline passes, it latches an error that ends them."""

Fill = Callable[[WorkerBucket], float]
"""Runs on the encode lane: fills x, sets weight and used slices. Returns the time.perf_counter() when its own work began."""


class _Way(NamedTuple):
    """A bucket in flight, and the function that is called when its sum is in y."""

    bucket: WorkerBucket
    done: Callable[[WorkerBucket], None]
    urgency: Urgency
    """Priority on both lanes and on the wire."""


class ServerExchange:
    """Exchanges of one worker with all servers."""

    def __init__(
        self, step: Step, transport: Transport | None, recycle: Callable[[memoryview], None], staging: Staging
    ) -> None:
        """`recycle` takes back the bodies of decoded results."""
        self._step, self._transport, self._recycle, self._staging = step, transport, recycle, staging
        self._encode = Lane("encode", step.latch)
        self._decode = Lane("decode", step.latch)
        self._stalled: dict[int, tuple[int, tuple[int, ...]]] = {}

    def put(
        self, bucket: WorkerBucket, fill: Fill, done: Callable[[WorkerBucket], None], *, in_turn: bool = False,
    ) -> None:
        """Queues the bucket. Buckets that the next forward pass needs first are coded first. `done` runs on the decode lane.

        `in_turn`: in the order of `put`, which is the same on all ranks of a node, because `fill` calls collectives of the
        node."""
        way = _Way(bucket, done, () if in_turn else (self._step.number, bucket.order))
        self._encode.put(lambda: self._push(way, fill), way.urgency)

    def _push(self, way: _Way, fill: Fill) -> None:
        """Runs on the encode lane."""
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
        """A rank of this node has broken the step off. The bucket is coded and taken back all the same, as on ranks that cannot
        know. So counters and shared random numbers of codecs stay equal on all ranks."""
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
        """Runs on a receiver thread, so it only queues the next step."""
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
        """Runs on the encode lane. The total weight of the workers differs from the one that this worker assumed."""
        if self._step.error is not None:
            return
        self._step.units.hear(total)
        with self._staging.lane(way.bucket):
            nbytes = way.bucket.restart(total)
        self._send(way, 0, way.bucket.payload[:nbytes], Flag.AGAIN)

    def _take(self, way: _Way, r: int, handle: Handle) -> None:
        """Runs on the decode lane."""
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
        """A server reports the workers for which it waits."""
        self._stalled[bucket] = step, missing

    def overdue(self, bucket: WorkerBucket) -> DeadlineExceeded:
        """An error that names the peer because of which this bucket is not done."""
        step = bucket.step if bucket.started else self._step.number
        error = partial(DeadlineExceeded, step=step, bucket=bucket.id)
        server = peer_name(SERVER_BASE + bucket.server)
        if not bucket.started:
            return error("not summed inside the node before the deadline", peer="a rank of this node")
        if (names := self.awaited(bucket)) != (server,):
            return error(f"did not contribute before the deadline ({server} waits for it)", peer=", ".join(names))
        return error("no result before the deadline", peer=server)

    def awaited(self, bucket: WorkerBucket) -> tuple[str, ...]:
        """The members that have not contributed, if the server has reported any; else the server."""
        stalled_step, missing = self._stalled.get(bucket.id, (bucket.step, ()))
        if stalled_step == bucket.step and missing:
            return tuple(map(peer_name, missing))
        return (peer_name(SERVER_BASE + bucket.server),)

    def drain(self, timeout_s: float) -> bool:
        """Whether both lanes finished their work."""
        return self._encode.drain(timeout_s) and self._decode.drain(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._encode.close(timeout_s)
        self._decode.close(timeout_s)

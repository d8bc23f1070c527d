"""A worker's way to the summation servers: encode, push, take the result, decode. Knows flows and a transport; no autograd."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from commlayer.errors import CorruptFrame, DeadlineExceeded
from commlayer.observe import EXCHANGE, Recorder
from commlayer.runtime.counters import Counters
from commlayer.runtime.flow import Flow
from commlayer.runtime.lanes import Lane
from commlayer.runtime.staging import Staging
from commlayer.transport.groups import Pending
from commlayer.transport.protocol import SERVER_BASE, Flag, Handle, Header, Kind, Transport, key, peer_name

FOREVER_S = 86400.0
"""For a wait that others bound: the training thread's deadline latches an error, which ends it."""


BROKEN = "its backward pass broke off"


class Step(Protocol):
    """What it asks of the worker whose step it is."""

    rank: int
    generation: int
    step: int
    error: BaseException | None
    counters: Counters
    recorder: Recorder

    def gather(self, flow: Flow) -> None: ...

    def hear(self, total: float) -> None: ...

    def gathered(self, flow: Flow) -> None: ...

    def latch(self, error: BaseException) -> None: ...

    def finished(self, flow: Flow) -> None: ...


class Service:
    """The flows of one worker that servers sum."""

    def __init__(
        self, worker: Step, transport: Transport | None, recycle: Callable[[memoryview], None], staging: Staging
    ) -> None:
        self._worker, self._transport, self._recycle, self._staging = worker, transport, recycle, staging
        self._encode = Lane("encode", worker.latch)
        self._decode = Lane("decode", worker.latch)
        self._stalled: dict[int, tuple[int, tuple[int, ...]]] = {}

    def push(self, flow: Flow, after: Pending | None = None) -> None:
        """Queues the flow: its gradients are final, or their sum inside the node is in when `after` is over."""
        issued = time.perf_counter()
        if flow.held is None:
            self._encode.put(lambda: self._push(flow, after, issued))
        else:
            flow.held.push(lambda: self._encode.put(lambda: self._push(flow, after, issued)))

    def _push(self, flow: Flow, after: Pending | None, issued: float) -> None:
        """Encode lane."""
        worker = self._worker
        if worker.error is not None:
            return
        with self._staging.lane(flow):
            if flow.held is not None:
                flow.held.take()
                flow.rewind()
            flow.step = worker.step
            if after is None:
                begin = time.perf_counter()
                worker.gather(flow)
            else:
                after.wait(time.monotonic() + FOREVER_S, lambda: worker.error)
                worker.recorder.add("node.reduce", flow.bucket.id, issued)
                begin = time.perf_counter()
                flow.weight = float(flow.tail[-1])
                flow.used = sum(1 << i for i, flag in enumerate(flow.tail[:-1].tolist()) if flag > 0)
            self._staging.to_host(flow)
            if flow.held is not None:
                self._staging.settle()
                worker.gathered(flow)
            if math.isnan(flow.weight):
                self._give_up(flow)
                return
            nbytes = flow.encode()
        worker.counters.encode_s += time.perf_counter() - begin
        worker.recorder.add(flow.op("encode"), flow.bucket.id, begin, nbytes)
        self._send(flow, 0, flow.payload[:nbytes])

    def _give_up(self, flow: Flow) -> None:
        """A rank of this node has broken the step off."""
        flow.weight, flow.codes = 0.0, False
        self._send(flow, 0, f"{peer_name(self._worker.rank)}: {BROKEN}".encode(), Flag.ABANDON)

    def _send(self, flow: Flow, r: int, body: memoryview | bytes, flags: Flag = Flag.NONE) -> None:
        worker = self._worker
        assert self._transport is not None
        server = SERVER_BASE + flow.bucket.server
        undone, flow.undone = flow.undone, 0
        header = Header(
            Kind.PUSH, worker.generation, flow.step, flow.bucket.id, round=r, codec=flow.codec.id, sender=worker.rank,
            order=flow.order, flags=flags, weight=flow.weight, used=flow.used, total=flow.total if flow.in_means else 0.0,
            undone=undone,
        )
        begin = time.perf_counter()
        answer = self._transport.recv(server, key(header._replace(kind=Kind.RESULT)))
        answer.on_done(lambda handle: self._arrived(flow, r, handle, begin))
        self._transport.send(server, header, body).on_done(self._sent)
        worker.counters.sent_nbytes += len(body)

    def _sent(self, handle: Handle) -> None:
        if (error := handle.error()) is not None:
            self._worker.latch(error)

    def _arrived(self, flow: Flow, r: int, handle: Handle, begin: float) -> None:
        """A receiver thread: hands over and returns."""
        if (error := handle.error()) is not None:
            self._worker.latch(error)
            return
        self._worker.recorder.add(EXCHANGE, flow.bucket.id, begin)
        if handle.message().header.flags & Flag.AGAIN:
            self._encode.put(lambda: self._code_again(flow, handle.message().header.weight))
        else:
            self._decode.put(lambda: self._take(flow, r, handle))

    def _code_again(self, flow: Flow, total: float) -> None:
        """Encode lane. The workers together weigh something else than this one had taken for granted."""
        worker = self._worker
        if worker.error is not None:
            return
        worker.hear(total)
        with self._staging.lane(flow):
            nbytes = flow.restart(total)
        self._send(flow, 0, flow.payload[:nbytes])

    def _take(self, flow: Flow, r: int, handle: Handle) -> None:
        """Decode lane."""
        worker = self._worker
        if worker.error is not None:
            return
        begin = time.perf_counter()
        message = handle.message()
        nbytes = len(message.body)
        worker.counters.received_nbytes += nbytes
        last = r + 1 == len(flow.codec.rounds)
        if message.header.flags & Flag.ABANDON:
            flow.abandoned, flow.weight, flow.finite = str(message.body, "utf-8", "replace"), math.nan, False
            worker.finished(flow)
            return
        try:
            if last:
                with self._staging.way_back():
                    flow.decode(message.body)
                flow.weight, flow.used = message.header.weight, message.header.used
            else:
                again_nbytes = flow.encode_next(r, message.body)
        except CorruptFrame as error:
            who = peer_name(message.peer)
            raise CorruptFrame(error.what, peer=who, step=flow.step, bucket=flow.bucket.id) from None
        self._recycle(message.body)
        worker.counters.decode_s += time.perf_counter() - begin
        worker.recorder.add(flow.op("decode"), flow.bucket.id, begin, nbytes)
        if last:
            self._staging.to_device(flow)
            worker.finished(flow)
        else:
            self._send(flow, r + 1, flow.payload[:again_nbytes])

    def stalled(self, bucket: int, step: int, missing: tuple[int, ...]) -> None:
        """A server says whom it waits for."""
        self._stalled[bucket] = step, missing

    def overdue(self, flow: Flow) -> DeadlineExceeded:
        """Who is to blame that this flow is not done."""
        step = flow.step if flow.started else self._worker.step
        place = {"step": step, "bucket": flow.bucket.id}
        server = peer_name(SERVER_BASE + flow.bucket.server)
        if not flow.started:
            return DeadlineExceeded("not summed inside the node before the deadline", peer="a rank of this node", **place)
        said, missing = self._stalled.get(flow.bucket.id, (step, ()))
        if said == step and missing:
            names = ", ".join(peer_name(m) for m in missing)
            return DeadlineExceeded(f"did not contribute before the deadline ({server} waits for it)", peer=names, **place)
        return DeadlineExceeded("no result before the deadline", peer=server, **place)

    def drain(self, timeout_s: float) -> bool:
        """Whether both lanes came to an end of what they were given."""
        return self._encode.drain(timeout_s) and self._decode.drain(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._encode.close(timeout_s)
        self._decode.close(timeout_s)

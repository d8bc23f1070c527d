"""Runs one bucket's path: a sequence of collectives with encodes and decodes between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from commlayer.callbacks import ignore
from commlayer.cluster.processes.bounded_calls import PendingCollective
from commlayer.cluster.processes.channels import Channel, Channels
from commlayer.compressors import place, runs_on, seed
from commlayer.compressors.codec import Codec, Ranges, State, accumulator
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer, Out
from commlayer.compressors.plan_codecs import ReducedAccumulator
from commlayer.engine.buckets.bucket import CollectiveBucket
from commlayer.engine.buckets.current_step import Counters, Step
from commlayer.engine.paths.compiled_path import DecodeStage, EncodeStage, ExchangeStage, ProgramSegment, Range
from commlayer.engine.paths.lanes import NEVER
from commlayer.errors import CorruptFrame
from commlayer.gpu import launch
from commlayer.records import Spec

LENGTH_NBYTES = 16
"""Number of bytes before each payload in its slot, which contain the payload's length. These bytes also align the payload."""


def collective_nbytes(e: ExchangeStage, own: int, total: int) -> tuple[int, int]:
    """Returns the bytes that this rank sends and receives in a collective over `total` bytes, of which `own` are this rank's
    part.

    An all-reduce counts as a ring, other collectives as direct sends.
    """
    others = e.size - 1
    if e.name == "allreduce":
        return 2 * others * total // e.size, 2 * others * total // e.size
    if e.name in ("alltoall", "reduce_scatter"):
        return total - own, others * own
    if e.name == "allgather":
        return others * own, others * own
    if e.name == "broadcast":
        return (others * own, 0) if e.place == e.root else (0, own)
    return (0, others * own) if e.place == e.root else (own, 0)  # gather and reduce


class _Coder(NamedTuple):
    """State of one encode of one payload: the range of elements, the codec's state and, for sums of payloads, an accumulator.
    """

    span: Range
    spec: Spec
    state: State
    acc: dict[str, Any] | None
    given: torch.Tensor
    """A copy of the codec's input, because the send buffer is overwritten with sums. Empty if the codec keeps no residuals."""


class _Under(NamedTuple):
    """The running collectives of an exchange, and the function that handles their result."""

    pending: Sequence[PendingCollective]
    then: Callable[[], object]


class BucketProgram:
    def __init__(
        self, bucket: CollectiveBucket, segments: Sequence[ProgramSegment], codec: Codec, channels: Channels, *, job: str,
    ) -> None:
        self.bucket, self.segments, self._codec, self._channels = bucket, segments, codec, channels
        x = bucket.x
        adds_payloads = any(s.exchange is not None and s.exchange.coded and s.exchange.name == "allreduce" for s in segments)
        self._kernels = launch.has_kernels_for(x.device) and not adds_payloads and runs_on(codec, x.device)
        """True: the codec can run on the GPU of the send buffer, as well as on the host."""
        self._host = x if x.device.type == "cpu" else torch.empty(bucket.numel, pin_memory=x.is_cuda)
        """Host memory for encoding on the CPU: a copy of a bucket on a GPU, otherwise the send buffer itself."""
        self._coders: dict[int, list[_Coder]] = {}
        self._slots: dict[int, torch.Tensor] = {}
        self._payloads = torch.empty(0, dtype=torch.uint8)
        """The current payloads in slots of equal size, as a tensor with the dimensions [unit, piece, byte]."""
        self._started: list[EncodeStage] = []
        self._round = 0
        self._result = memoryview(b"")
        """The last round's result, on a path whose payloads are summed by all-reduce; otherwise empty."""
        self._under: _Under | None = None
        self._issued = "", 0, 0.0
        """Operation, bucket id and start time of the collective that is running."""
        for segment in segments:
            for step in segment.local:
                if isinstance(step, EncodeStage):
                    self._prepare(step, job)
        paid = {step.number for s in segments for step in s.local if isinstance(step, EncodeStage) and step.pays}
        bucket.ledger.encoders = [(c.span, c.state) for e, coders in self._coders.items() if e in paid for c in coders]
        # Checkpoints save the states of `bucket.ledger.state`.
        bucket.ledger.state = {f"{e}-{u}": c.state for e, coders in self._coders.items() for u, c in enumerate(coders)}

    def _on_device(self, step: EncodeStage | DecodeStage) -> bool:
        """Returns True if the codec runs on the GPU for this operation: the plan requests it and the codec supports it."""
        return step.device == "gpu" and self._kernels

    def _prepare(self, step: EncodeStage, job: str) -> None:
        coders = []
        on_device = self._on_device(step)
        where = self.bucket.x.device if on_device else torch.device("cpu")
        for span in step.units:
            numel = span[1] - span[0]
            spec = self.bucket.planned.spec if numel == self.bucket.numel else Spec((numel,))
            state = self._codec.init(spec) if step.first else self._codec.init_server(spec)
            seed(state, f"{job} {step.number} {span[0]}", self.bucket.id, step.sender)
            if on_device:
                place(state, where)
            sums: Array = torch.zeros(spec.numel, device=where)
            acc = None if step.first else accumulator(sums if on_device else sums.numpy())
            given = torch.zeros(numel if step.first and self._codec.needs_undo else 0, device=where)
            coders.append(_Coder(span, spec, state, acc, given))
        self._coders[step.number] = coders
        shape = (len(coders), 1, self._slot_nbytes(step.widest))
        self._slots[step.number] = torch.zeros(shape, dtype=torch.uint8, device=where)

    def _slot_nbytes(self, widest: int) -> int:
        spec = self.bucket.planned.spec if widest == self.bucket.numel else Spec((widest,))
        return LENGTH_NBYTES * (1 + -(-self._codec.bound(spec) // LENGTH_NBYTES))

    def advance(self, stage: int, now: Step) -> None:
        """Runs one stage: waits for the previous exchange, runs the local operations, and begins the exchange of this stage."""
        bucket, recorder = self.bucket.id, now.recorder
        if stage == 0:
            self._started.clear()
            self.bucket.ledger.record(self._undo)
        if self._under is not None:
            for pending in self._under.pending:
                pending.over(NEVER, now.failed)
            self._under.then()
            self._under = None
            recorder.add(*self._issued)
        for step in self.segments[stage].local:
            begin = time.perf_counter()
            if isinstance(step, EncodeStage):
                self._encode(step)
                now.counters.count_codec_times(encode_s=time.perf_counter() - begin)
            else:
                self._decode(step)
                now.counters.count_codec_times(decode_s=time.perf_counter() - begin)
            recorder.add(f"{'encode' if isinstance(step, EncodeStage) else 'decode'}@{step.device}", bucket, begin)
        exchange = self.segments[stage].exchange
        if exchange is not None:
            self._issued = f"{exchange.scope}.{exchange.name}", bucket, time.perf_counter()
            self._under = self._begin(exchange, self._channels[stage, exchange.scope], now.counters)

    def reset(self) -> None:
        """Discards the rest of the last step, before a new one."""
        self._round = 0
        self._under = None

    def _undo(self, cut: Ranges) -> None:
        """Rolls back the last step's encodes for the elements `cut`. Called before the next step."""
        for step in self._started:
            for coder in self._coders[step.number]:
                mine = within(cut, coder.span)
                if step.first:
                    self._codec.undo(coder.state, coder.given, mine)
                else:
                    self._codec.undo_server(coder.state, mine)

    def _encode(self, step: EncodeStage) -> None:
        slots, on_device = self._slots[step.number], self._on_device(step)
        self._started.append(step)
        for coder, slot in zip(self._coders[step.number], slots[:, 0], strict=True):
            room: Out = slot[LENGTH_NBYTES:] if on_device else slot.numpy().data[LENGTH_NBYTES:]
            source = self._x(coder.span, on_device=on_device)
            x = source if on_device else source.numpy()
            if coder.acc is None:
                if coder.given.numel():
                    coder.given.copy_(source)
                nbytes = self._codec.start(x, coder.state, room)
            else:
                coder.acc["sum"][:] = x
                coder.acc["flagged"][0] = not bool(torch.isfinite(source).all())
                nbytes = self._codec.emit(0, coder.acc, coder.state, room)
            slot[:8].view(torch.int64)[0] = nbytes
        self._payloads = slots

    def _decode(self, step: DecodeStage) -> None:
        if self._round:
            coder, _ = self._reduced()
            self.bucket.exchange.finite = self._codec.decode(self._result, coder.state, self._x(coder.span))
            return
        on_device = self._on_device(step)
        for span, pieces in zip(step.units, self._payloads.to(self.bucket.x.device if on_device else "cpu"), strict=True):
            sums = (self.bucket.x if on_device else self._host)[span[0] : span[1]]
            acc = accumulator(sums if on_device else sums.numpy())
            for number, piece in enumerate(pieces):
                self._codec.add(0, _payload(piece, as_tensor=on_device), acc, first=number == 0)
            if acc["flagged"][0]:
                sums.fill_(float("nan"))
                self.bucket.exchange.finite = False
            if not on_device and self._host is not self.bucket.x:
                self.bucket.x[span[0] : span[1]] = sums

    def _begin(self, e: ExchangeStage, channel: Channel, counters: Counters) -> _Under:
        def count(own: int, total: int) -> None:
            if e.scope != "node":  # no network traffic
                counters.count_bytes(*collective_nbytes(e, own, total))

        if e.coded:
            return self._reduce_coded(channel, count) if e.name == "allreduce" else self._move_payloads(e, channel, count)
        return self._move_floats(e, channel, count)

    def _move_floats(self, e: ExchangeStage, channel: Channel, count: Callable[[int, int], None]) -> _Under:
        x = self.bucket.x
        span_x = x[e.span[0] : e.span[1]]
        if e.name in ("allreduce", "reduce", "broadcast"):
            count(span_x.nbytes, span_x.nbytes)
        if e.name == "allreduce":
            return _Under([channel.allreduce(span_x)], ignore)
        if e.name == "reduce":
            return _Under([channel.reduce(span_x, e.root)], ignore)
        if e.name == "broadcast":
            return _Under([channel.broadcast(span_x, e.root)], ignore)
        sizes = [high - low for low, high in e.parts]
        mine = x[e.parts[e.place][0] : e.parts[e.place][1]]
        if e.name == "reduce_scatter":
            # An all-to-all moves the same number of bytes as a reduce-scatter, allows parts of any size, and adds in member
            # order.
            rows = x.new_empty(e.size * mine.numel())
            count(mine.nbytes, span_x.nbytes)
            pending = channel.alltoall(rows, span_x, [mine.numel()] * e.size, sizes)
            return _Under([pending], lambda: mine.copy_(torch.sum(rows.view(e.size, -1), 0)))
        most = max(sizes)
        padded, rows = x.new_zeros(most), x.new_empty(e.size * most)
        padded[: mine.numel()] = mine
        count(padded.nbytes, rows.nbytes)
        pending = channel.allgather(rows, padded)

        def split_by_tensor() -> None:
            for row, (low, high) in zip(rows.view(e.size, most), e.parts, strict=True):
                x[low:high] = row[: high - low]

        return _Under([pending], split_by_tensor)

    def _move_payloads(self, e: ExchangeStage, channel: Channel, count: Callable[[int, int], None]) -> _Under:
        # The tensor is on x's device, because the groups also exchange the elements there.
        payloads, slot = self._payloads.to(self.bucket.x.device), self._slot_nbytes(e.widest)
        if e.name == "broadcast":
            if e.place != e.root:
                payloads = payloads.new_empty((e.units, e.pieces, slot))
            count(payloads.nbytes, payloads.nbytes)
            return _Under([channel.broadcast(payloads, e.root)], lambda: self._keep(payloads))
        if e.name == "alltoall":
            incoming = torch.empty_like(payloads)
            count(payloads.nbytes // e.size, payloads.nbytes)
            pending = channel.alltoall(incoming, payloads.contiguous(), None, None)
            # [member, unit, piece, byte], the members' payloads of one unit side by side
            shape = (e.size, e.units // e.size, e.pieces, slot)
            return _Under([pending], lambda: self._keep(incoming.view(shape).transpose(0, 1).reshape(shape[1], -1, slot)))
        rows = payloads.new_empty((e.size, e.units, e.pieces, slot))
        count(payloads.nbytes, rows.nbytes)
        if e.name == "gather":
            pending = channel.gather(payloads.contiguous(), list(rows) if e.place == e.root else None, e.root)
        else:
            pending = channel.allgather(rows.view(e.size * e.units, e.pieces, slot), payloads.contiguous())
        if e.merges:
            return _Under([pending], lambda: self._keep(rows.view(-1, e.pieces, slot)))
        return _Under([pending], lambda: self._keep(rows.transpose(0, 1).reshape(e.units, -1, slot)))

    def _reduce_coded(self, channel: Channel, count: Callable[[int, int], None]) -> _Under:
        """Sums one round of a codec's payloads by all-reduce, without decoding them. Only codecs with SUM rounds can do this.
        """
        r, codec = self._round, self._codec
        coder, slot = self._reduced()
        acc = codec.new_accumulator(coder.spec, r)
        codec.add(r, _payload(slot), acc, first=True)
        reduced = ReducedAccumulator(acc)
        count(reduced.values.nbytes, reduced.values.nbytes)
        works = [channel.allreduce(reduced.values)] if reduced.values.numel() else []
        works.append(channel.allreduce(reduced.facts, largest=True))

        def merge() -> None:
            reduced.merge()
            # The sum is not written into the slot: to abandon a step, the codec needs this rank's own payload in the slot.
            result = memoryview(bytearray(codec.bound(coder.spec)))
            self._result = result[: codec.emit(r, acc, codec.init_server(coder.spec), result)]
            self._round = r + 1
            if self._round < len(codec.rounds):
                room = slot.numpy().data[LENGTH_NBYTES:]
                slot[:8].view(torch.int64)[0] = codec.next(r, self._result, coder.state, room)

        return _Under(works, merge)

    def _reduced(self) -> tuple[_Coder, torch.Tensor]:
        """Returns the only encoder of a path whose payloads are summed by all-reduce, and its payload slot."""
        (coders,), (slots,) = self._coders.values(), self._slots.values()
        return coders[0], slots[0, 0]

    def _x(self, span: Range, *, on_device: bool = False) -> torch.Tensor:
        """Returns the elements of `span`, on the device where they are encoded. Copies them to the host if necessary."""
        source = self.bucket.x[span[0] : span[1]]
        if on_device or self._host is self.bucket.x:
            return source
        copy = self._host[span[0] : span[1]]
        copy.copy_(source)
        return copy

    def _keep(self, payloads: torch.Tensor) -> None:
        self._payloads = payloads


def within(cut: Ranges, span: Range) -> Ranges:
    """Returns the part of `cut` (element ranges of a bucket) inside `span`, counted from the start of `span`. None means all
    elements."""
    low, high = span
    if cut is None:
        return None
    return [(max(a, low) - low, min(b, high) - low) for a, b in cut if max(a, low) < min(b, high)]


def _payload(slot: torch.Tensor, *, as_tensor: bool = False) -> Buffer:
    nbytes = int(slot[:8].view(torch.int64)[0])
    if not 0 <= nbytes <= slot.numel() - LENGTH_NBYTES:
        raise CorruptFrame(f"the payload's length is {nbytes} bytes, but its slot has only {slot.numel() - LENGTH_NBYTES}")
    slot = slot.contiguous()
    return (slot if as_tensor else slot.numpy().data)[LENGTH_NBYTES : LENGTH_NBYTES + nbytes]

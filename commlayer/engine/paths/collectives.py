"""Defines the path for buckets that are summed by a sequence of collectives, with encoding and decoding between them.

Stage j of a path consists of its j-th exchange and the local operations before this exchange. Stage j runs on lane j and in its
own process groups, with the buckets in plan order. So every rank calls a group's collectives in the same order. The second
exchange of one bucket overlaps the first exchange of the next bucket.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from commlayer.cluster.collectives import Channel, Channels, Groups
from commlayer.cluster.process_groups import ANY_PEER, PendingCollective
from commlayer.compressors import place, runs_on, seed
from commlayer.compressors.codec import Codec, Ranges, State, accumulator
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer, Out
from commlayer.compressors.plan_codecs import ReducedAccumulator
from commlayer.engine.buckets import CollectiveBucket, WorkerBucket
from commlayer.engine.lanes import Lane, Staging
from commlayer.engine.paths.path import Path
from commlayer.engine.step import Counters, Step
from commlayer.errors import CorruptFrame
from commlayer.gpu import launch
from commlayer.planner import tree
from commlayer.planner.tree import CODING, Op
from commlayer.records import Plan, Spec

TINY = 1e-30
"""Smallest total weight by which sums are divided. A total weight of 0 ends the step with an error elsewhere."""


class CollectivesPath(Path[CollectiveBucket]):
    """Exchanges buckets by sequences of collectives. If `groups` is None, this worker is the only one, and its gradients are
    the sum."""

    ordered = True

    def __init__(
        self, buckets: Sequence[CollectiveBucket], step: Step, staging: Staging, codecs: Mapping[int, Codec], plan: Plan,
        groups: Groups | None,
    ) -> None:
        super().__init__(buckets, step, staging)
        self._groups = groups
        self._programs: dict[int, BucketProgram] = {}
        self._channels: Channels | None = None
        if groups is not None:
            self._channels, self._programs = _compiled(buckets, codecs, plan, groups)
        longest = max((len(program.segments) for program in self._programs.values()), default=0)
        self._lanes = [Lane(f"stage-{j}", step.latch) for j in range(longest)]
        self._begun = 0
        self._in_means = any(bucket.in_means for bucket in buckets)
        self._weights: tuple[int, torch.Tensor, PendingCollective] | None = None
        """Number of workers, the sum of all workers' weights, and the collective that computes this sum; for codecs that encode
        parts of the mean."""
        self._tails: tuple[torch.Tensor, PendingCollective] | None = None
        """The weights and used slices of all buckets, and the all-reduce that sums them; None before it begins and after its
        result was read."""

    def begin(self, bucket: CollectiveBucket) -> None:
        self._fill(bucket)
        if self._groups is None:
            self._arrived(bucket)
            return
        if not self._begun and self._in_means:
            total = torch.tensor([self._step.units.weight], device=self._groups.device)
            self._weights = self._groups.world, total, self._groups.allreduce(total)
        bucket.exchange.started = True
        bucket.marks.append(self._staging.mark())
        self._put(self._programs[bucket.id], 0)
        self._begun += 1
        if self._begun == len(self.buckets):
            tails = torch.cat([bucket.memory.tail for bucket in self.buckets])
            self._tails = tails, self._groups.allreduce(tails)

    def _put(self, program: BucketProgram, stage: int) -> None:
        self._lanes[stage].put(lambda: self._run(program, stage))

    def _run(self, program: BucketProgram, stage: int) -> None:
        """Runs one stage of a bucket, on the lane of this stage."""
        if self._step.error is not None:
            return
        bucket = program.bucket
        last = stage + 1 == len(program.segments)
        try:
            with self._staging.lane(bucket):
                if stage == 0 and bucket.in_means and self._weights is not None:
                    self._to_means(bucket, *self._weights)
                program.advance(stage, self._step)
                if last:
                    self._staging.settle()
        except CorruptFrame as error:
            raise error.located(peer=ANY_PEER, bucket=bucket.id) from None
        if last:
            self._arrived(bucket)
        else:
            self._put(program, stage + 1)

    def _to_means(self, bucket: CollectiveBucket, world: int, total: torch.Tensor, pending: PendingCollective) -> None:
        """Scales a bucket's send buffer from a part of the sum to a part of the mean, when the total weight has arrived."""
        pending.wait(FOREVER_S, self._step.failed)
        if (part := world / max(float(total), TINY)) != 1.0:
            bucket.x.mul_(part)

    def finish(self, deadline: float) -> None:
        super().finish(deadline)
        if self._step.error is not None or self._tails is None:
            return
        (tails, pending), self._tails = self._tails, None
        pending.wait(deadline, self._step.failed)
        # All exchanges have ended, so this read does not wait, even on a GPU.
        weight, at = None if self.buckets[-1].read_here else float(tails[-1]), 0
        for bucket in self.buckets:
            tail = bucket.memory.tail
            tail.copy_(tails[at : at + tail.numel()])
            at += tail.numel()
            bucket.exchange.received_weight = weight
            bucket.read_used()

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        """Returns True if the result of `bucket` can be written. That is possible for all buckets together, when their weights
        have arrived."""
        if self._tails is not None and deadline is not None:
            self.finish(deadline)
        return self._tails is None and super().take(bucket, deadline)

    def reset(self) -> None:
        super().reset()
        self._begun, self._weights, self._tails = 0, None, None
        for program in self._programs.values():
            program.reset()

    def drain(self, timeout_s: float) -> bool:
        return all(lane.drain(timeout_s) for lane in self._lanes)

    def close(self, timeout_s: float) -> None:
        for lane in self._lanes:
            lane.close(timeout_s)
        if self._channels is not None:
            self._channels.close()


def _compiled(
    buckets: Sequence[CollectiveBucket], codecs: Mapping[int, Codec], plan: Plan, groups: Groups,
) -> tuple[Channels, dict[int, BucketProgram]]:
    """Compiles every bucket's path for this rank. Returns the process groups for all paths, and the buckets by id."""
    place = ProgramPlace(groups.world // groups.ranks_per_node, groups.ranks_per_node, groups.node, groups.local)
    segments = {}
    wanted = set()
    for bucket in buckets:
        path, rounds = tree.parse(bucket.planned.path), len(codecs[bucket.id].rounds)
        segments[bucket.id] = compile_path(path, bucket.numel, place, owner=bucket.planned.owner, rounds=rounds,
                                           bucket=bucket.id)
        # Exchanges without this rank are included, because all ranks must create all groups.
        wanted |= set(enumerate(stages_of(path, rounds)))
    channels = Channels(wanted, groups.members, place.per_node, groups.timeout_s)
    return channels, {b.id: BucketProgram(b, segments[b.id], codecs[b.id], channels, job=plan.job) for b in buckets}


# ---- runs one bucket's path: a sequence of collectives with encodes and decodes between them

LENGTH_NBYTES = 16
"""Number of bytes before each payload in its slot, which contain the payload's length. They also align the payload."""
FOREVER_S = 1e9
"""Seconds that stand for no limit, in waits on a lane. Such a wait ends early when the training thread's deadline passes,
because the training thread then sets an error."""

Error = Callable[[], BaseException | None]


def carried(e: ExchangeStage, own: int, total: int) -> tuple[int, int]:
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
    """A running collective, and the function that handles its result."""

    pending: PendingCollective
    then: Callable[[], None]


class BucketProgram:
    def __init__(
        self, bucket: CollectiveBucket, segments: Sequence[ProgramSegment], codec: Codec, channels: Channels, *, job: str,
    ) -> None:
        self.bucket, self.segments, self._codec, self._channels = bucket, segments, codec, channels
        x = bucket.x
        adds_payloads = any(s.exchange is not None and s.exchange.coded and s.exchange.name == "allreduce" for s in segments)
        self._kernels = launch.serves(x.device) and not adds_payloads and runs_on(codec, x.device)
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
            given = torch.zeros(numel if step.first and self._codec.keeps else 0, device=where)
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
            self._under.pending.over(FOREVER_S, now.failed)
            self._under.then()
            self._under = None
            recorder.add(*self._issued)
        for step in self.segments[stage].local:
            begin = time.perf_counter()
            if isinstance(step, EncodeStage):
                self._encode(step)
                now.counters.coded(encode_s=time.perf_counter() - begin)
            else:
                self._decode(step)
                now.counters.coded(decode_s=time.perf_counter() - begin)
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

    # ---- local steps

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

    # ---- exchanges

    def _begin(self, e: ExchangeStage, channel: Channel, counters: Counters) -> _Under:
        def count(own: int, total: int) -> None:
            if e.scope != "node":  # no network traffic
                counters.carried(*carried(e, own, total))

        if e.coded:
            return self._reduce_coded(e, channel, count) if e.name == "allreduce" else self._move_payloads(e, channel, count)
        return self._move_floats(e, channel, count)

    def _move_floats(self, e: ExchangeStage, channel: Channel, count: Callable[[int, int], None]) -> _Under:
        x = self.bucket.x
        span_x = x[e.span[0] : e.span[1]]
        if e.name in ("allreduce", "reduce", "broadcast"):
            count(span_x.nbytes, span_x.nbytes)
        if e.name == "allreduce":
            return _Under(channel.allreduce(span_x), _nothing)
        if e.name == "reduce":
            return _Under(channel.reduce(span_x, e.root), _nothing)
        if e.name == "broadcast":
            return _Under(channel.broadcast(span_x, e.root), _nothing)
        sizes = [high - low for low, high in e.parts]
        mine = x[e.parts[e.place][0] : e.parts[e.place][1]]
        if e.name == "reduce_scatter":
            # An all-to-all moves the same number of bytes as a reduce-scatter, allows parts of any size, and adds in member
            # order.
            rows = x.new_empty(e.size * mine.numel())
            count(mine.nbytes, span_x.nbytes)
            pending = channel.alltoall(rows, span_x, [mine.numel()] * e.size, sizes)
            return _Under(pending, lambda: _copy(torch.sum(rows.view(e.size, -1), 0), mine))
        most = max(sizes)
        padded, rows = x.new_zeros(most), x.new_empty(e.size * most)
        padded[: mine.numel()] = mine
        count(padded.nbytes, rows.nbytes)
        pending = channel.allgather(rows, padded)

        def split_by_tensor() -> None:
            for row, (low, high) in zip(rows.view(e.size, most), e.parts, strict=True):
                x[low:high] = row[: high - low]

        return _Under(pending, split_by_tensor)

    def _move_payloads(self, e: ExchangeStage, channel: Channel, count: Callable[[int, int], None]) -> _Under:
        # The tensor is on x's device, because the groups also exchange the elements there.
        payloads, slot = self._payloads.to(self.bucket.x.device), self._slot_nbytes(e.widest)
        if e.name == "broadcast":
            if e.place != e.root:
                payloads = payloads.new_empty((e.units, e.pieces, slot))
            count(payloads.nbytes, payloads.nbytes)
            return _Under(channel.broadcast(payloads, e.root), lambda: self._keep(payloads))
        if e.name == "alltoall":
            incoming = torch.empty_like(payloads)
            count(payloads.nbytes // e.size, payloads.nbytes)
            pending = channel.alltoall(incoming, payloads.contiguous(), None, None)
            # [member, unit, piece, byte], the members' payloads of one unit side by side
            shape = (e.size, e.units // e.size, e.pieces, slot)
            return _Under(pending, lambda: self._keep(incoming.view(shape).transpose(0, 1).reshape(shape[1], -1, slot)))
        rows = payloads.new_empty((e.size, e.units, e.pieces, slot))
        count(payloads.nbytes, rows.nbytes)
        if e.name == "gather":
            pending = channel.gather(payloads.contiguous(), list(rows) if e.place == e.root else None, e.root)
        else:
            pending = channel.allgather(rows.view(e.size * e.units, e.pieces, slot), payloads.contiguous())
        if e.merges:
            return _Under(pending, lambda: self._keep(rows.view(-1, e.pieces, slot)))
        return _Under(pending, lambda: self._keep(rows.transpose(0, 1).reshape(e.units, -1, slot)))

    def _reduce_coded(self, e: ExchangeStage, channel: Channel, count: Callable[[int, int], None]) -> _Under:
        """Sums one round of a codec's payloads by all-reduce, without decoding them. Only codecs with SUM rounds can do this.
        """
        r, codec = self._round, self._codec
        coder, slot = self._reduced()
        acc = codec.zeros(coder.spec, r)
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

        return _Under(_All(works), merge)

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


class _All(PendingCollective):
    def __init__(self, works: Sequence[PendingCollective]) -> None:
        self._works = works

    def over(self, deadline: float, failed: Error = lambda: None) -> None:
        for work in self._works:
            work.over(deadline, failed)


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


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def _nothing() -> None:
    """Does nothing: the default of `then`, for results that need no handling."""


# ---- compiles a path for one rank: which elements the rank holds at every op, and with which ranks it exchanges them
#
# The bucket is divided into atoms, one for each part that the path's splits (reduce_scatter, alltoall) create. A rank always
# has consecutive atoms. A unit is a range of consecutive atoms that no split divides before the unit is decoded; payloads are
# made per unit. All ranks compile the same path with their own index, so they agree on sizes without communication.

Range = tuple[int, int]
SPLITS = ("reduce_scatter", "alltoall")
ROOTED = ("reduce", "gather")


class ProgramPlace(NamedTuple):
    """Position of a rank among nodes of equal size: number of nodes, ranks per node, index of its node, index inside the node.
    """

    nodes: int
    per_node: int
    node: int
    local: int

    def group(self, scope: str) -> Range:
        """Returns (size, this rank's index) of the process group that runs operations of `scope`: "node", "net" or "all"."""
        if scope == "node":
            return self.per_node, self.local
        if scope == "net":
            return self.nodes, self.node
        return self.nodes * self.per_node, self.node * self.per_node + self.local


class EncodeStage(NamedTuple):
    """Operation that encodes the ranges `units` of the send buffer. `first`: True if these are gradients or uncompressed sums
    of gradients, False if they are sums of decoded payloads.

    Ranks with the same `sender` encode the same values, and must produce the same bytes. Exactly one of them, the rank with
    `pays` set, keeps the residual.
    """

    number: int
    """Index of this encode among the encodes of the path."""
    units: tuple[Range, ...]
    widest: int
    """Number of elements of the largest unit (range that is encoded together) on any rank. It determines the size of all
    payload slots."""
    first: bool
    device: str
    sender: int
    pays: bool


class DecodeStage(NamedTuple):
    """Operation that decodes `pieces` payloads of each unit (range that is encoded together), and writes their sum into the
    send buffer."""

    units: tuple[Range, ...]
    pieces: int
    device: str


class ExchangeStage(NamedTuple):
    """One collective of a path. `parts`: element range of each member's part, in member order (only for uncompressed splits and
    the gathers that undo them)."""

    name: str
    scope: str
    coded: bool
    size: int
    place: int
    """Index of this rank among the members of the collective."""
    root: int
    span: Range
    """The range of elements that the collective covers, before a split or after a gather."""
    parts: tuple[Range, ...]
    units: int
    """Number of units (element ranges that are encoded together) whose payloads this rank contributes."""
    pieces: int
    """Number of payloads per unit (range that is encoded together) that this rank contributes."""
    widest: int
    merges: bool
    """True: an allgather joins parts with different elements. False: it collects payloads of the same elements."""


class ProgramSegment(NamedTuple):
    """Local operations, and the exchange after them. `exchange` is None at the end of the path, and where this rank takes no
    part."""

    local: tuple[EncodeStage | DecodeStage, ...]
    exchange: ExchangeStage | None


def compile_path(
    path: tree.Path, numel: int, place: ProgramPlace, *, owner: int = 0, rounds: int = 1, bucket: int = 0
) -> tuple[ProgramSegment, ...]:
    """Compiles a path into the segments that this rank executes. `owner`: the local rank that is root inside a node. Between
    nodes, the root depends on the bucket's id.

    An allreduce of payloads, which only SUM and MAX codecs support, takes one exchange per round of the codec.
    """
    walk = _Walk(path, numel, place, owner, bucket)
    segments: list[ProgramSegment] = []
    local: list[EncodeStage | DecodeStage] = []
    step: EncodeStage | DecodeStage | None
    for at, op in enumerate(path):
        if op.name == "encode":
            step = walk.encode(at, op)
        elif op.name == "decode":
            step = walk.decode(op)
        else:
            again = rounds if walk.coded and op.name == "allreduce" else 1
            exchange = walk.exchange(op)
            segments += [ProgramSegment(tuple(local), exchange), *(ProgramSegment((), exchange) for _ in range(again - 1))]
            local, step = [], None
        if step is not None:
            local.append(step)
    return (*segments, ProgramSegment(tuple(local), None))


class _Walk:
    """State of one rank at the current position of the path, while the path is compiled. Ranks that are not root of a group
    follow the root's state; `active` is True if this rank takes part itself."""

    def __init__(self, path: tree.Path, numel: int, place: ProgramPlace, owner: int, bucket: int) -> None:
        self.path, self.place, self.owner, self.bucket = path, place, owner, bucket
        sizes = {op.where: place.group(op.where)[0] for op in path if op.name in SPLITS}
        self.atoms = math.prod(sizes.values())
        self.edges = [numel * i // self.atoms for i in range(self.atoms + 1)]
        self.low, self.high = 0, self.atoms
        self.units: list[Range] = []
        self.pieces, self.coded, self.encodes, self.decoded, self.widest = 1, False, 0, False, 0
        self.active = True
        self.summed: set[str] = set()
        """Scopes ("node", "net" or "all") over whose ranks this rank's values are summed, or will be when its payloads are
        decoded."""
        self.copied: set[str] = set()
        """Scopes ("node", "net" or "all") whose ranks all have the same values as this rank."""
        self.parents: dict[str, Range] = {}
        self.waiting: dict[str, bool] = {}

    def encode(self, at: int, op: Op) -> EncodeStage | None:
        cuts = 1
        for later in self.path[at + 1 :]:
            if later.name == "decode":
                break
            cuts *= self.place.group(later.where)[0] if later.name in SPLITS else 1
        self.units = _cut(self.low, self.high, cuts)
        self.pieces, self.coded = 1, True
        run = (self.high - self.low) // cuts
        self.widest = max(self.edges[i + run] - self.edges[i] for i in range(0, self.atoms, run))
        pays = all(self.place.group(scope)[1] == 0 for scope in self.copied)
        step = EncodeStage(
            self.encodes, self._ranges(self.units), self.widest, not self.decoded, op.where, self._sender(), pays
        )
        self.encodes += 1
        return step if self.active else None

    def _sender(self) -> int:
        """Returns a number that is equal on ranks whose values are sums over the same ranks, and different otherwise."""
        nodes, per_node, node, local = self.place
        one_node = not self.summed & {"net", "all"}
        one_local = not self.summed & {"node", "all"}
        return (node if one_node else nodes) * (per_node + 1) + (local if one_local else per_node)

    def decode(self, op: Op) -> DecodeStage | None:
        step = DecodeStage(self._ranges(self.units), self.pieces, op.where)
        self.low, self.high = self.units[0][0], self.units[-1][1]
        self.coded, self.decoded = False, True
        return step if self.active else None

    def exchange(self, op: Op) -> ExchangeStage | None:
        size, place = self.place.group(op.where)
        root = self.owner if op.where == "node" else self.bucket % size
        if op.where == "all":
            root = self.bucket % self.place.nodes * self.place.per_node + self.owner
        takes_part = self.active
        units, pieces, span = len(self.units), self.pieces, (self.low, self.high)
        merges = False
        parts: list[Range] = []
        if op.name in SPLITS:
            parts = _cut(self.low, self.high, size)
            self.parents[op.where] = (self.low, self.high)
            self.low, self.high = parts[place]
            if self.coded:
                share = units // size
                self.units = self.units[place * share : (place + 1) * share]
                self.pieces *= size
        elif op.name == "allgather" and op.where in self.parents:
            merges = True
            span = self.low, self.high = self.parents.pop(op.where)
            parts = _cut(self.low, self.high, size)
            if self.coded:
                self.units = _cut(self.low, self.high, units * size)
        elif op.name in ROOTED:
            self.waiting[op.where] = self.active
            self.active = self.active and place == root
            self.pieces *= size if self.coded else 1
        elif op.name == "allgather":
            self.pieces *= size
        elif op.name == "broadcast":
            takes_part = self.active = self.waiting.pop(op.where)
        if not (merges or op.name == "broadcast"):
            self.summed.add(op.where)
        if op.name in ("allreduce", "allgather", "broadcast"):
            self.copied.add(op.where)
        if not takes_part:
            return None
        return ExchangeStage(
            op.name, op.where, self.coded, size, place, root, self._range(span), self._ranges(parts), units, pieces,
            self.widest, merges,
        )

    def _range(self, run: Range) -> Range:
        return self.edges[run[0]], self.edges[run[1]]

    def _ranges(self, runs: list[Range]) -> tuple[Range, ...]:
        return tuple(self._range(run) for run in runs)


def _cut(low: int, high: int, parts: int) -> list[Range]:
    each = (high - low) // parts
    return [(low + i * each, low + (i + 1) * each) for i in range(parts)]


def stages_of(path: tree.Path, rounds: int = 1) -> list[str]:
    """Returns the scope ("node", "net" or "all") of every exchange of a path in order, also of exchanges without this rank."""
    scopes: list[str] = []
    coded = False
    for op in path:
        if op.name in CODING:
            coded = op.name == "encode"
        else:
            scopes += [op.where] * (rounds if coded and op.name == "allreduce" else 1)
    return scopes

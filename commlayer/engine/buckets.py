"""One bucket on one worker: its memory, and the copies between gradients, payload and result."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch

from commlayer.compressors import kernels, payload, place, seed
from commlayer.compressors.codec import NAN, Codec, OneRound, State
from commlayer.compressors.dense import of_means
from commlayer.compressors.feedback import ResidualSlice, add_ranges, in_updates, ranges_of, residual_of, split_by_tensor
from commlayer.compressors.payload import Buffer
from commlayer.compressors.plan_codecs import Reads, reader_of, result_codec
from commlayer.compressors.tensors import fresh_zeros, give_back
from commlayer.errors import CorruptFrame
from commlayer.gpu import launch
from commlayer.records import Bucket, Job, Slice

# ---- checks whether tensors are finite, if possible in one pass over their memory

def all_finite(tensor: torch.Tensor) -> bool:
    """Any dtype and device; on a device the caller waits for the result."""
    plain = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
    return kernels.all_finite(tensor.detach().view(-1)) if plain else bool(tensor.isfinite().all())


# ---- memory layout of buckets: slices as views in the shapes of their tensors, parts of tensors, alignment for codecs

ALIGN = 64


class BucketLayout:
    """The layout of one bucket. It fits any memory that holds the bucket's elements in order."""

    def __init__(self, bucket: Bucket, job: Job) -> None:
        self.slices = bucket.slices
        self.shapes = [_shape(job, s.tensor, s.start, s.stop) for s in bucket.slices]

    def views(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The slices of x, each in the shape of its tensor. A part of a tensor is flat."""
        views, at = [], 0
        for s, shape in zip(self.slices, self.shapes, strict=True):
            views.append(x[at : at + s.numel].view(shape))
            at += s.numel
        return views

    def pairs(
        self, tensors: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor],
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (view, the same elements of the tensor) of the slices that have a tensor.

        A complete tensor is paired in its own shape, so any strides work. A split one must be contiguous (see `contiguous`).
        """
        pairs = []
        for view, tensor, s in zip(views, tensors, self.slices, strict=True):
            if tensor is not None:
                pairs.append((view, tensor if view.shape == tensor.shape else tensor.view(-1)[s.start : s.stop]))
        return pairs


def _shape(job: Job, tensor: int, start: int, stop: int) -> tuple[int, ...]:
    info = job.tensors[tensor]
    return info.shape if (start, stop) == (0, info.numel) else (stop - start,)


def aligned(lead: int, nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Memory for `lead` bytes followed by `nbytes` on a 64-byte boundary. It does not come from the allocator's heap, where
    memory of earlier plans would leave holes."""
    room = ALIGN + lead + nbytes + ALIGN
    raw = torch.empty(room, dtype=torch.uint8, pin_memory=True) if pinned else fresh_zeros(-(-room // 4)).view(torch.uint8)
    skip = -(raw.data_ptr() + lead) % ALIGN
    return raw[skip : skip + lead + nbytes]


@contextlib.contextmanager
def contiguous(targets: Sequence[torch.Tensor | None], cut: Callable[[int], bool]) -> Iterator[list[torch.Tensor | None]]:
    """Yields the targets, with contiguous zeros for split targets that are not contiguous; they are copied back at the end."""
    copies = {t: torch.zeros_like(target, memory_format=torch.contiguous_format) for t, target in enumerate(targets)
              if target is not None and cut(t) and not target.is_contiguous()}
    yield [copies.get(t, target) for t, target in enumerate(targets)]
    for t, copy in copies.items():
        target = targets[t]
        assert target is not None
        target.detach().copy_(copy)


# ---- A bucket's result as sparse entries, without dense memory

MOST_NUMEL = 2**31 - 1
"""Of a bucket: torch compares positions as signed numbers."""


class SparseResult:
    def __init__(self, layout: BucketLayout, idx: torch.Tensor, values: torch.Tensor) -> None:
        self._layout, self._idx, self._values = layout, idx, values
        self._starts = [0, *accumulate(s.numel for s in layout.slices)]
        self._cuts: list[int] = torch.searchsorted(idx, torch.tensor(self._starts, dtype=torch.int32)).tolist()

    def entries(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in the slice's tensor, and values."""
        low, high = self._cuts[number], self._cuts[number + 1]
        return self._idx[low:high] + (self._layout.slices[number].start - self._starts[number]), self._values[low:high]

    def write(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Sets targets to elements times factor, by slice; None skips one."""
        for number, (s, shape, target) in enumerate(zip(self._layout.slices, self._layout.shapes, targets, strict=True)):
            if target is None:
                continue
            to = target.detach() if target.shape == shape else target.detach().view(-1)[s.start : s.stop]
            idx, values = self._slice(number)
            if to.is_contiguous() and to.dtype == torch.float32:
                kernels.scatter_add(to.zero_().view(-1), idx, values * factor)
            else:
                torch.mul(_spread(idx, values, s.numel).view(shape), factor, out=to)

    def _slice(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = self._cuts[number], self._cuts[number + 1]
        return self._idx[low:high] - self._starts[number], self._values[low:high]

    def to_dense(self) -> torch.Tensor:
        return _spread(self._idx, self._values, self._starts[-1])


def _spread(idx: torch.Tensor, values: torch.Tensor, numel: int) -> torch.Tensor:
    dense = torch.zeros(numel)
    kernels.scatter_add(dense, idx, values)
    return dense


# ---- keeps a bucket's result encoded and decodes it where it is written, without a float32 copy in between

def codec_of_results(codec: Any) -> OneRound | None:
    """The codec whose results can be checked on arrival and decoded later; None if that is impossible."""
    inner = result_codec(codec)
    return inner if isinstance(inner, OneRound) and type(inner).decode is OneRound.decode else None


class CodedResult:
    """One result, kept until the bucket's next exchange."""

    def __init__(self, codec: OneRound, layout: BucketLayout, body: memoryview, numel: int) -> None:
        """Checks the body in full; raises CorruptFrame as `decode` would. Decoding it later cannot fail."""
        self._codec, self._layout, self._numel = codec, layout, numel
        self.body = body
        head = payload.read(body, codec.id, numel)
        self._parts = None if head.flagged else codec.check(head, numel)

    @property
    def finite(self) -> bool:
        return self._parts is not None

    def write(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Sets targets = elements times factor, by slice. None skips a slice."""
        s, target = self._layout.slices[0], targets[0]
        if len(targets) == 1 and target is not None:
            to = target.detach()
            to = to if to.shape == self._layout.shapes[0] else to.view(-1)[s.start : s.stop]
            if to.is_contiguous() and to.dtype == torch.float32:
                self._decode(to.view(-1))
                to.mul_(factor)
                return
        if all(each is None for each in targets):
            return
        elements = self.to_dense().mul_(factor)
        pairs = self._layout.pairs(targets, self._layout.views(elements))
        torch._foreach_copy_([target.detach() for _, target in pairs], [view for view, _ in pairs])

    def to_dense(self) -> torch.Tensor:
        elements = torch.empty(self._numel)
        self._decode(elements)
        return elements

    def _decode(self, out: torch.Tensor) -> None:
        if self._parts is None:
            out.fill_(NAN)
        else:
            self._codec.apply(self._parts, out, assign=True)


# ---- keeps the values of a bucket's buffers (running statistics) that all ranks had after the last exchange
#
# A mean of equal values differs from that value in the last bit, because weights round. So an unchanged buffer would drift. A
# buffer's `used` flag means that this rank has changed it. It is sent on every path, and a buffer without any flag keeps its
# value. Equal changes on all ranks give the same bits again in narrower types, because all-reduces and servers compute means
# in float64.

class SharedBuffers:
    """Of one bucket. `values` are in the bucket's own order, and the same on all ranks."""

    def __init__(self, like: torch.Tensor, layout: BucketLayout) -> None:
        """`like`: memory of the bucket's elements, whose type and device the values get."""
        self.values, self._own = torch.zeros_like(like), torch.zeros_like(like)
        self.layout, self._own_views = layout, layout.views(self._own)
        self._sizes = [s.numel for s in layout.slices]
        self._repeats = torch.tensor(self._sizes, device=like.device)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        """By slice, whether this rank's values have changed. Stays on the device, so the host does not wait."""
        return torch.stack([part.any() for part in torch.ne(x, self.values).split(self._sizes)])

    def commit(
        self, y: torch.Tensor, views_y: Sequence[torch.Tensor], flags: torch.Tensor, factor: float | torch.Tensor,
        targets: Sequence[torch.Tensor | None],
    ) -> None:
        """Writes the means, y times factor, into the targets. Where `flags` show no change, writes the agreed values.

        If some rank's values are not finite, each rank keeps its own."""
        finite = torch.isfinite(y).all()
        into = [target.detach() for _, target in self.layout.pairs(targets, views_y)]
        torch._foreach_copy_([own for own, _ in self.layout.pairs(targets, self._own_views)], into)
        changed = torch.repeat_interleave(flags > 0, self._repeats, output_size=y.numel())
        mean = torch.where(changed, y.double() * factor, self.values)
        y.copy_(torch.where(finite, mean, self._own))  # rounded once
        views = [view for view, _ in self.layout.pairs(targets, views_y)]
        torch._foreach_copy_(into, views)
        torch._foreach_copy_(views, into)  # rounded to the buffers' own dtype
        self.values.copy_(torch.where(finite, y, self.values))


ByBucket = Mapping[int, SharedBuffers]
"""By bucket number."""


def agree(shared: ByBucket, tensors: Sequence[torch.Tensor | None]) -> None:
    """Records the buffers, which are now the same on all ranks. `tensors` by number; None entries are skipped."""
    for its in shared.values():
        mine = [tensors[s.tensor] for s in its.layout.slices]
        for view, tensor in its.layout.pairs(mine, its.layout.views(its.values)):
            view.copy_(tensor.detach())


def agreed(shared: ByBucket, tensors: Sequence[torch.Tensor | None]) -> None:
    """The reverse: writes the values after the last exchange into the tensors, by number."""
    for its in shared.values():
        mine = [tensors[s.tensor] for s in its.layout.slices]
        for view, tensor in its.layout.pairs(mine, its.layout.views(its.values)):
            tensor.copy_(view)


def pass_on(before: ByBucket, after: ByBucket) -> None:
    known = [part for its in before.values() for part in split_by_tensor(its.layout.slices, 0, its.values)]
    for its in after.values():
        at = 0
        for s in its.layout.slices:
            for part in known:
                low, high = max(s.start, part.start), min(s.stop, part.stop)
                if part.tensor == s.tensor and low < high:
                    place = at - s.start
                    its.values[place + low : place + high] = part.values[low - part.start : high - part.start]
            at += s.numel


def snapshot(shared: ByBucket) -> dict[str, torch.Tensor]:
    """For a checkpoint: between two exchanges of local steps, no model file holds these values."""
    return {f"agreed.{number}": its.values.cpu().clone() for number, its in shared.items()}


def restore(shared: ByBucket, tensors: Mapping[str, torch.Tensor]) -> None:
    """The reverse. Missing values stay unchanged."""
    for number, its in shared.items():
        if (saved := tensors.get(f"agreed.{number}")) is not None:
            its.values.copy_(saved)


# ---- what one bucket still has to send: residuals, residuals of earlier plans, and averages that were not applied
#
# A residual is the part of a codec's input that was not sent; the codec keeps it in its state. A `ResidualSlice` is a
# residual by element range, in the form in which it moves between plans. `carry` is the inherited residual, from an earlier
# plan. `carry` is sent with the next gradients; `carried` is the part that was sent with the last ones.

TINY = 1e-30
"""Replaces a total weight of 0, which ends the step with an error."""


class EntryResult(Protocol):
    """Sets how much codecs send: entries_sent.py."""

    def begin(self, step: int) -> None:
        """Called before each encode of that step."""
        ...

    def forget(self) -> None:
        """Codec states were replaced, and the step may be repeated."""
        ...


class ResidualLedger:
    """The residuals of a WorkerBucket."""

    codec: Codec
    state: State
    slices: tuple[Slice, ...]
    coders: list[tuple[tuple[int, int], State]]
    carry: torch.Tensor | None
    carried: torch.Tensor | None
    entries: EntryResult | None
    tail_y: torch.Tensor
    numel: int
    nslices: int
    used: int
    unapplied: int
    undone: int
    weight: float
    total: float
    buffer: bool
    codes: bool
    finite: bool
    served: bool
    sound: bool

    @property
    def coded_x(self) -> torch.Tensor:
        """The codec's input."""
        raise NotImplementedError

    @property
    def result(self) -> torch.Tensor:
        """The received sum, in the memory where reading it costs least."""
        raise NotImplementedError

    def debts(self) -> list[ResidualSlice]:
        """This worker's residuals on the bucket's elements, in the unit of residuals (Units.worth)."""
        debts = [] if self.carry is None else list(split_by_tensor(self.slices, 0, self.carry))
        for (low, high), state in self.coders:
            if (values := residual_of(state, high - low)) is not None:
                debts += split_by_tensor(self.slices, low, values)
        return debts

    def judge(self, *, finite: bool) -> None:
        """Finalizes a step. A slice that no rank used is not applied; neither is anything of a step that is not finite."""
        if self.buffer:
            return
        self.sound = self.finite
        self.unapplied = self.all_slices & ~self.used if finite else self.all_slices
        if finite:
            self.carry_on(self.used)

    def carry_on(self, slices: int) -> None:
        """These slices' average was applied. The part of the inherited residual that did not reach the mean goes with the next
        step."""
        if self.carried is not None and (unsent := 1.0 - self._paid()):
            remainder = torch.zeros_like(self.carried)
            add_ranges(remainder, self.carried * unsent, ranges_of(self.slices, slices))
            self.carried = self.carried - remainder  # so that `take_back` undoes only the part that was sent
            self.carry = remainder if self.carry is None else self.carry + remainder

    def _paid(self) -> float:
        """The fraction of `carried` that reached the mean. It is 1 if all workers weighed what this worker had assumed, or if
        this worker encoded again. Other ranks of its node keep their assumption."""
        return self.total / max(self.weight if self.served else float(self.tail_y[-1]), TINY)

    @property
    def all_slices(self) -> int:
        return (1 << self.nslices) - 1

    def forget(self) -> None:
        """The codec state was replaced, so the last exchange cannot be undone any more."""
        self.codes, self.unapplied, self.undone, self.carried = False, 0, 0, None
        if self.entries is not None:
            self.entries.forget()

    def take_back(self) -> int:
        """Undoes the part of the last exchange that was not applied, before the next exchange. Returns the slices that were
        undone."""
        slices, self.unapplied = self.unapplied, 0
        if slices:
            cut = ranges_of(self.slices, slices)
            if self.codes:
                self.codec.undo(self.state, self.coded_x, cut)
            if self.carried is not None:
                self.carry = torch.zeros_like(self.carried) if self.carry is None else self.carry
                add_ranges(self.carry, self.carried, cut)
            self.undone |= slices
        return slices


PAYLOAD_HEADER = 16
"""Bytes before x, so that an in-place codec's payload is its header followed by x itself."""
SMALL_NUMEL = 1 << 14
"""Mean elements per slice up to which one call per slice costs more than a second pass over the whole bucket."""


class WorkerBucket(ResidualLedger):
    """Memory of a bucket: `x` (float32), followed by a tail of one `used` flag per slice and the weight.

    Collectives sum the tail with x; between nodes the frame header carries the same facts. With a CUDA model `x` is on the
    device and codecs read `host`, its pinned copy; on CPU both are the same memory. If the codec runs on the device there is no
    copy, and only payloads pass through pinned memory, one buffer for each direction.

    The sum arrives in `y`. Without error feedback `y` is `x` again. With error feedback the codec's input stays in x, so that a
    step whose average was not applied can be undone without a copy of the residual. On a CPU the only rank of a node then has
    no y: results stay encoded and are decoded when they are written (`coded_result`). If results are wanted as the entries of a
    sparse codec, they stay entries (`sparse`). Reading y decodes either form.

    An all-reduce of doubles or of buffers uses float64 for both, so only the result is rounded. So do buffers that a server
    averages: the server receives this node's mean in float32 and averages the means of all nodes.
    """

    def __init__(
        self, planned: Bucket, job: Job, codec: Codec, device: torch.device, order: int, *, local: int = 0, rank: int = 0,
        on_device: bool = False,
    ) -> None:
        """`local`: this worker's index in its node. `on_device`: the codec runs on the gradients' device (lanes.py)."""
        self.planned, self.codec, self.order = planned, codec, order
        self.id, self.slices, self.owner, self.server = planned.id, planned.slices, planned.owner, planned.server
        self.late = planned.stale
        """Whether its result is used one step late (late_results.py)."""
        self.served = planned.path == "service"
        """Whether a server sums it. Then weight and used slices are in the frame header, otherwise in the tail."""
        self.dense = planned.path == "allreduce"
        """Whether one all-reduce sums it uncompressed."""
        self.staged = not (self.served or self.dense)
        """Whether its path is a sequence of collectives with encodes and decodes between them."""
        self.coded = coded = self.served and planned.owner == local
        """Whether this worker encodes and decodes it. Other workers of the node only take part in collectives and have no codec
        state."""
        self.buffer = job.tensors[planned.slices[0].tensor].buffer
        self.in_updates = not self.dense and in_updates(codec)
        self.in_means = not self.dense and codec.keeps
        """Whether gradients are coded as parts of the mean, so that residuals keep their value when weights change."""
        self.means = self.served and self.buffer and of_means(codec)
        """Whether the server averages what workers hold, instead of summing their parts (Flag.MEAN)."""
        self.spec = planned.spec
        self.layout = BucketLayout(planned, job)
        self.numel, self.nslices = planned.numel, len(planned.slices)
        doubles = any(job.tensors[s.tensor].dtype == "float64" for s in planned.slices)
        dtype = torch.float64 if (self.dense and (doubles or self.buffer)) or self.means else torch.float32
        coding = torch.float32 if self.means else dtype
        floats = self.numel + self.nslices + 1
        on_host, self.on_device = device.type == "cpu", on_device and coded and not self.means
        staged = coded and not self.on_device
        block = aligned(PAYLOAD_HEADER, floats * coding.itemsize if on_host or staged else 0, pinned=not on_host and staged)
        host = block[PAYLOAD_HEADER:].view(coding)
        self.host = host[: self.numel]
        block_x = host if on_host and not self.means else torch.empty(floats, dtype=dtype, device=device)
        self.host_y, block_y = self.host, block_x
        if coded and self.in_means:
            y_block = aligned(0, 4 * floats, pinned=not on_host and staged) if on_host or staged else torch.empty(0)
            self.host_y = y_block.view(torch.float32)[: self.numel]
            if on_host or self.on_device:
                block_y = y_block.view(torch.float32) if on_host else torch.empty(floats, device=device)
        self._reader: Reads | None = None
        self.sparse: SparseResult | None = None
        """The last result, if kept as entries."""
        self._decoder: OneRound | None = None
        self.coded_result: CodedResult | None = None
        """The last result, if kept encoded."""
        self.lie_in(block_x, block_y)
        self.agreed = SharedBuffers(self.x, self.layout) if self.buffer else None
        if coded:
            self.state = codec.init(self.spec)
            seed(self.state, job.digest(), planned.id, rank)
            self.bound = codec.bound(self.spec)
            header_and_x = block[: PAYLOAD_HEADER + 4 * self.numel]
            if self.on_device:
                place(self.state, device)
                self._pinned = [torch.empty(self.bound, dtype=torch.uint8, pin_memory=not on_host) for _ in range(2)]
                self._there = [launch.words(self.bound, device) for _ in range(2)]
                self.payload = self._pinned[0].numpy().data
            else:
                self.payload = (header_and_x if codec.in_place else aligned(0, self.bound, pinned=False)).numpy().data
        else:
            self.state, self.bound, self.payload = {}, 0, memoryview(b"")
        self.coders: list[tuple[tuple[int, int], State]] = [((0, self.numel), self.state)] if coded else []
        """Element range and codec state of each encoder whose residuals this worker owns."""
        self.carry: torch.Tensor | None = None
        self.carried: torch.Tensor | None = None
        self.entries: EntryResult | None = None
        """Set if the sent ratio differs between steps."""
        self.codes = False
        """Whether the last exchange encoded something on this worker."""
        self.sound = True
        """Whether the last average was finite."""
        self.unapplied = 0
        """One bit per slice: the average of the last exchange was not applied."""
        self.undone = 0
        """One bit per slice: undone on this worker, not reported to the server yet."""
        self.rewind()
        self.reset()

    def lie_in(self, every: torch.Tensor, every_y: torch.Tensor) -> None:
        """Sets the memory of x and y, with their tails. Buckets without a codec may share one memory block with others."""
        self.all, self.all_y = every, every_y
        self.x, self.tail = every[: self.numel], every[self.numel :]
        self._y, self.tail_y = every_y[: self.numel], every_y[self.numel :]
        on_host = every.device.type == "cpu"
        self._facts = self.tail.numpy() if on_host else None
        self._facts_y = self.tail_y.numpy() if on_host else None
        """The same memory as arrays of the host: a small tensor operation costs as much time as thousands of elements."""
        self.views, self.views_y = self.layout.views(self.x), self.layout.views(self._y)

    @property
    def y(self) -> torch.Tensor:
        if self.coded_result is not None:
            return self.coded_result.to_dense()
        if self.sparse is not None and not self._y.numel():
            self._y = self.sparse.to_dense()
        return self._y

    def keep_coded(self, recycle: Callable[[memoryview], None]) -> None:
        """Keeps results encoded from now on if they can be decoded later. For the only rank of a node, before its first step.
        `recycle` takes back the bodies of results."""
        if self.coded and self.in_means and not self.late and not self.buffer and self.x.device.type == "cpu":
            self._decoder = codec_of_results(self.codec)
        if self._decoder is not None:
            self._recycle = recycle
            self._no_y()

    def _no_y(self) -> None:
        self._y = self.host_y = self.all_y = self.tail_y = torch.empty(0)
        self._facts_y, self.views_y = None, []

    def keep_entries(self) -> None:
        """Keeps results that arrive as entries in that form. For the only rank of a node, before its first step."""
        if self.coded and not self.late and not self.buffer and self.x.device.type == "cpu" and self.numel <= MOST_NUMEL:
            self._reader = reader_of(self.codec)
        if self._reader is not None:
            self._decoder = None
            self._no_y()

    def reset(self) -> None:
        self.sources: list[torch.Tensor | None] = [None] * self.nslices
        self.marks: list[object] = []
        """Points in the callers' streams after which the sources are final."""
        self.waiting = self.nslices

    def rewind(self) -> None:
        self.step = 0
        self.started = self.done = False
        self.finite = True
        self.weight, self.used = 0.0, 0
        self.scaled: float | torch.Tensor = 1.0
        """The factor applied to y since it arrived."""
        self.spent = 0
        """One bit per slice: an optimizer has applied this exchange's average before the end of the step."""
        self.reported = 0  # slices whose last average was not applied, as this exchange reported to the server
        self.abandoned = ""
        """Who aborted the step, and why; there is no sum then."""
        self.total = 0.0
        """The total weight of all workers on which the scaling of this exchange's gradients is based."""
        self.received_weight: float | None = None
        """The total weight of all workers, once the host has received it separately from a sum on the device."""

    def gather(self, factor: float, weight: float, worth: float = 1.0) -> None:
        """Sets x = gradients times factor, with zeros for missing gradients. With weight 0 all of x is zero: a mean over no
        samples is NaN, and NaN times 0 stays NaN. `worth` is the value in x of a residual of 1."""
        used = 0
        for i, (view, tensor) in enumerate(zip(self.views, self.sources, strict=True)):
            if tensor is not None:
                used |= 1 << i
            if tensor is None or weight == 0.0:
                view.zero_()
        pairs = self.layout.pairs(self.sources, self.views) if weight != 0.0 else []
        if pairs:
            torch._foreach_copy_([v for v, _ in pairs], [g.detach() for _, g in pairs])
        if self.agreed is not None:
            used = self._mark_changed(used if weight else 0)
        if factor != 1.0:
            self.x.mul_(factor)
        self.carried, self.carry = self.carry, None
        if self.carried is not None:
            self.x += self.carried.to(self.x.device) * worth
        self.used, self.weight = used, weight
        if self.late:  # the sources have changed when the result is used; on a GPU nothing waits for these sums
            self._put_in = torch.stack([view.sum() for view in self.views])

    def _mark_changed(self, there: int) -> int:
        """Buffers: marks the slices in the mask `there` that this rank has changed, on the device. Returns them as a mask if a
        frame header needs it, otherwise `there`."""
        assert self.agreed is not None
        mask = torch.tensor([there >> i & 1 for i in range(self.nslices)], device=self.x.device)
        self.changed = self.agreed.changed(self.x) * mask
        return sum(1 << i for i, flag in enumerate(self.changed.tolist()) if flag) if self.served else there

    def flags(self) -> torch.Tensor:
        """By slice, above 0 if some rank used it. On the device of x, where the exchange left it."""
        if not self.served:
            return self.tail_y[:-1]
        return torch.tensor([self.used >> i & 1 for i in range(self.nslices)], device=self.x.device)

    def write_tail(self, tail: torch.Tensor) -> None:
        """Writes `used` and weight for a collective to sum or share."""
        if self.agreed is not None and not self.served:
            tail[:-1] = self.changed
            tail[-1] = self.weight
            return
        facts = [*(self.used >> i & 1 for i in range(self.nslices)), self.weight]
        if self._facts is not None and tail is self.tail:
            self._facts[:] = facts
        else:
            tail.copy_(torch.tensor(facts, dtype=tail.dtype))

    def read_used(self) -> None:
        """Reads `used` from the summed tail. Skipped if this rank used every slice, since the result is known."""
        if self.used != self.all_slices or (self.agreed is not None and self.served):
            self.used = sum(1 << i for i, flag in enumerate(self.tail_y[:-1].tolist()) if flag > 0)

    def read_result(self) -> None:
        """Reads weight and `used` of the result that the owner shared with this worker. NaN marks a result that is not
        finite."""
        self.weight = float(self.tail_y[-1])
        self.used = sum(1 << i for i, flag in enumerate(self.tail_y[:-1].tolist()) if flag > 0)
        self.finite = not math.isnan(self.weight) and bool(torch.isfinite(self.y[:1]).all())

    @property
    def read_here(self) -> bool:
        """Whether the host can read the result of a collective without a device synchronization."""
        return self._facts_y is not None

    def over_weight(self, scale: float) -> float | torch.Tensor:
        """scale / summed weight of a collective. On a device it is a tensor, so that the host does not wait."""
        if self.received_weight == 0.0:
            raise ZeroDivisionError
        return scale / (self.tail_y[-1] if self._facts_y is None else float(self._facts_y[-1]))

    def summed_weight(self) -> float:
        """The summed weight of all workers in the exchange whose result is in y; 0 if only a device knows it."""
        if self.served:
            return self.weight
        return self.received_weight or 0.0 if self._facts_y is None else float(self._facts_y[-1])

    def op(self, coding: str) -> str:
        """"encode" or "decode", with the device, as paths spell it."""
        return f"{coding}@{'gpu' if self.on_device else 'cpu'}"

    def to_mean(self) -> None:
        """Divides x, the weighted sum over this node's ranks, by their weight if the server averages means."""
        if self.means:
            self.x.div_(self.weight or 1.0)
            if self.x.device.type == "cpu":
                self.host.copy_(self.x)

    def encode(self) -> int:
        """Round 0: encodes x into the payload."""
        self.started = self.codes = True
        self._drop_result()
        if self.entries is not None:
            self.entries.begin(self.step)
        if not self.on_device:
            return self.codec.start(self.host, self.state, self.payload)
        nbytes = self.codec.start(self.x, self.state, self._there[0])
        self._pinned[0][:nbytes].copy_(self._there[0][:nbytes], non_blocking=True)
        if self.x.is_cuda:
            torch.cuda.current_stream(self.x.device).synchronize()
        return nbytes

    def restart(self, total: float) -> int:
        """Repeats round 0 because the total weight differs from the assumed one.

        Residuals of other ranks of this node are in x and are scaled, too; each of those ranks keeps the missing part
        (`carry_on`).
        """
        x = self.coded_x
        self.codec.undo(self.state, x)
        carried = 0.0 if self.carried is None else self.carried.to(x.device)
        x.sub_(carried).mul_(self.total / total).add_(carried)
        self.total = total
        return self.encode()

    @property
    def coded_x(self) -> torch.Tensor:
        """The codec's input."""
        return self.x if self.on_device else self.host

    @property
    def result(self) -> torch.Tensor:
        """The received sum, in the memory where reading it costs least."""
        return self.host_y if self._reader is None and self._decoder is None and not self.on_device else self.y

    def slice_of_result(self, number: int) -> torch.Tensor:
        """The received values of a slice; without zeros if the result arrived as entries."""
        return self.layout.views(self.y)[number] if self.sparse is None else self.sparse.entries(number)[1]

    def encode_next(self, r: int, result: Buffer) -> int:
        return self.codec.next(r, result, self.state, self.payload)

    def decode(self, result: memoryview) -> None:
        """Decodes the last round's result."""
        if self._reader is not None:
            self._read(self._reader, result)
            return
        if self._decoder is not None:
            self._drop_result()
            self.coded_result = CodedResult(self._decoder, self.layout, result, self.numel)
            self.finite = self.coded_result.finite
            return
        if not self.on_device:
            self.finite = self.codec.decode(result, self.state, self.host_y)
            if self.means and self.y.device.type == "cpu":
                self.y.copy_(self.host_y)
            return
        nbytes = result.nbytes
        if nbytes > self.bound:
            raise CorruptFrame(f"result of {nbytes} bytes, at most {self.bound} are possible")
        self._pinned[1][:nbytes].numpy().data[:] = result
        self._there[1][:nbytes].copy_(self._pinned[1][:nbytes], non_blocking=True)
        self.finite = self.codec.decode(self._there[1][:nbytes], self.state, self.y)

    @property
    def keeps_body(self) -> bool:
        """Whether `decode` has kept the result's body, which the bucket then recycles itself."""
        return self.coded_result is not None

    def let_go(self) -> None:
        """Between two exchanges: returns memory to the system if nothing of the last exchange can be undone."""
        if self.started or self.unapplied or self.late or not self.coded or self.on_device:
            return
        self.codes = False
        self._drop_result()
        give_back(self.x)
        if not self.codec.in_place:
            give_back(torch.from_numpy(np.asarray(self.payload)))

    def _drop_result(self) -> None:
        if self.coded_result is not None:
            body, self.coded_result = self.coded_result.body, None
            self._recycle(body)

    def _read(self, reader: Reads, result: memoryview) -> None:
        entries = reader.read(result, self.numel)
        self.finite = entries is not None
        self.sparse = None if entries is None else SparseResult(self.layout, *entries)
        self._y = torch.empty(0) if entries is not None else torch.full((self.numel,), math.nan)
        self.views_y = [] if entries is not None else self.layout.views(self._y)

    def look(self) -> None:
        """Sets `finite` if no decoder has reported it."""
        self.finite = all_finite(self.y)

    def late_not_finite(self) -> int:
        """As `own_not_finite`, for the exchange whose result has arrived one step late."""
        bad = [s.tensor for s, is_finite in zip(self.slices, self._put_in.isfinite().tolist(), strict=True) if not is_finite]
        return bad[0] if bad else -1

    def own_not_finite(self) -> int:
        """The first tensor for which this worker's own input is not finite; -1 if there is none. Call it before `commit`, which
        may overwrite the input."""
        for s, source in zip(self.slices, self.sources, strict=True):
            if source is not None:
                values = source.detach()
                if (s.start, s.stop) != (0, values.numel()):
                    values = values.reshape(-1)[s.start : s.stop]
                if not all_finite(values):
                    return s.tensor
        return -1

    def commit(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Sets targets = y times factor, skipping targets that are None. Buffers stay unchanged if y is not finite. Call it
        once."""
        if self.agreed is not None:
            self.agreed.commit(self.y, self.views_y, self.flags(), factor, targets)
            return
        if (compact := self.coded_result or self.sparse) is not None:
            compact.write(factor, targets)
            return
        pairs = self.layout.pairs(targets, self.views_y)
        if self.numel <= SMALL_NUMEL * len(pairs):
            self.y.mul_(factor)
            self.scaled = factor
            torch._foreach_copy_([target.detach() for _, target in pairs], [view for view, _ in pairs])
            return
        for view, target in pairs:
            torch.mul(view, factor, out=target.detach())


# ---- returns freed memory from the allocator to the system

def trim() -> None:
    """Takes a few milliseconds; called after a change of plan."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc has it, musl does not
        libc.malloc_trim(ctypes.c_size_t(0))

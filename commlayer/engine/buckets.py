"""One bucket on one worker: its memory, and the copies between gradients, encoded payload and result."""

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
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer
from commlayer.compressors.plan_codecs import reader_of, result_codec
from commlayer.compressors.randomk import RandomK
from commlayer.compressors.topk import TopK
from commlayer.errors import CorruptFrame
from commlayer.gpu import launch
from commlayer.records import Bucket, Job, Slice

# ---- checks whether tensors are finite, if possible in one pass over their memory

def all_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite, for any dtype and device. For a tensor on a GPU the host waits for the result."""
    plain = tensor.device.type == "cpu" and tensor.dtype == torch.float32 and tensor.is_contiguous()
    return bool(kernels.host().all_finite(tensor.detach().view(-1))) if plain else bool(tensor.isfinite().all())


# ---- memory layout of buckets: slices as views in the shapes of their tensors, parts of tensors, alignment for codecs

ALIGN = 64


class BucketLayout:
    """Layout of one bucket's elements: which slices of which tensors it contains, and their shapes. It applies to any memory
    that contains the elements in order."""

    def __init__(self, bucket: Bucket, job: Job) -> None:
        self.slices = bucket.slices
        self.shapes = [_shape(job, s.tensor, s.start, s.stop) for s in bucket.slices]

    def views(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Splits x, the elements of a bucket, into views, one for each slice. A complete tensor has its own shape; a slice of a
        split tensor is flat."""
        views, at = [], 0
        for s, shape in zip(self.slices, self.shapes, strict=True):
            views.append(x[at : at + s.numel].view(shape))
            at += s.numel
        return views

    def pairs(
        self, tensors: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor],
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns pairs (view, the same elements of the tensor) for all slices whose tensor is not None.

        A complete tensor is paired in its own shape, so it can have any strides. A split tensor must be contiguous; see
        `contiguous`.
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
    """Allocates `lead` bytes followed by `nbytes` bytes, the latter on a 64-byte boundary. The memory is not from the
    allocator's heap, where memory of earlier plans would leave holes."""
    room = ALIGN + lead + nbytes + ALIGN
    raw = torch.empty(room, dtype=torch.uint8, pin_memory=True) if pinned \
        else torch.from_numpy(kernels.fresh_zeros(-(-room // 4))).view(torch.uint8)
    skip = -(raw.data_ptr() + lead) % ALIGN
    return raw[skip : skip + lead + nbytes]


@contextlib.contextmanager
def contiguous(targets: Sequence[torch.Tensor | None], cut: Callable[[int], bool]) -> Iterator[list[torch.Tensor | None]]:
    """Yields the targets, where zeros replace targets that are split between buckets and not contiguous. At the end their
    contents are copied into these targets. `cut` tells whether a tensor is split."""
    copies = {t: torch.zeros_like(target, memory_format=torch.contiguous_format) for t, target in enumerate(targets)
              if target is not None and cut(t) and not target.is_contiguous()}
    yield [copies.get(t, target) for t, target in enumerate(targets)]
    for t, copy in copies.items():
        target = targets[t]
        assert target is not None
        target.detach().copy_(copy)


# ---- A bucket's result as sparse entries, without dense memory

MOST_NUMEL = 2**31 - 1
"""Largest number of elements of a bucket whose result can stay sparse: torch compares positions as signed 32-bit numbers."""


class SparseResult:
    def __init__(self, layout: BucketLayout, idx: torch.Tensor, values: torch.Tensor) -> None:
        self._layout, self._idx, self._values = layout, idx, values
        self._starts = [0, *accumulate(s.numel for s in layout.slices)]
        self._cuts: list[int] = torch.searchsorted(idx, torch.tensor(self._starts, dtype=torch.int32)).tolist()

    def entries(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sparse entries of slice `number`: positions in the slice's tensor, and values."""
        low, high = self._cuts[number], self._cuts[number + 1]
        return self._idx[low:high] + (self._layout.slices[number].start - self._starts[number]), self._values[low:high]

    def write(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes each slice times `factor` into its target; None skips a slice. Elements without an entry become 0."""
        for number, (s, shape, target) in enumerate(zip(self._layout.slices, self._layout.shapes, targets, strict=True)):
            if target is None:
                continue
            to = target.detach() if target.shape == shape else target.detach().view(-1)[s.start : s.stop]
            idx, values = self._slice(number)
            if to.is_contiguous() and to.dtype == torch.float32:
                kernels.host().scatter_add(to.zero_().view(-1), idx, values * factor)
            else:
                torch.mul(_spread(idx, values, s.numel).view(shape), factor, out=to)

    def _slice(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = self._cuts[number], self._cuts[number + 1]
        return self._idx[low:high] - self._starts[number], self._values[low:high]

    def to_dense(self) -> torch.Tensor:
        return _spread(self._idx, self._values, self._starts[-1])


def _spread(idx: torch.Tensor, values: torch.Tensor, numel: int) -> torch.Tensor:
    dense = torch.zeros(numel)
    kernels.host().scatter_add(dense, idx, values)
    return dense


# ---- keeps a bucket's result encoded and decodes it where it is written, without a float32 copy in between

def codec_of_results(codec: Any) -> OneRound | None:
    """The codec that can check a result on arrival and decode it later; None if that is impossible for `codec`."""
    inner = result_codec(codec)
    return inner if isinstance(inner, OneRound) and type(inner).decode is OneRound.decode else None


class CodedResult:
    """One bucket's result in encoded form, kept until the bucket's next exchange."""

    def __init__(self, codec: OneRound, layout: BucketLayout, body: memoryview, numel: int) -> None:
        """Checks the received bytes `body` completely, and raises CorruptFrame as `decode` would. So decoding them later cannot
        fail."""
        self._codec, self._layout, self._numel = codec, layout, numel
        self.body = body
        head = payload.read(body, codec.id, numel)
        self._parts = None if head.flagged else codec.check(head, numel)

    @property
    def finite(self) -> bool:
        return self._parts is not None

    def write(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Decodes each slice, times `factor`, into its target. None skips a slice."""
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
    """For a bucket of a module's buffers: the values that all ranks had after the last exchange, and the values before it.
    `values` contains the elements in the bucket's order."""

    def __init__(self, like: torch.Tensor, layout: BucketLayout) -> None:
        """Allocates the values with the type and device of `like`, memory for the bucket's elements."""
        self.values, self._own = torch.zeros_like(like), torch.zeros_like(like)
        self.layout, self._own_views = layout, layout.views(self._own)
        self._sizes = [s.numel for s in layout.slices]
        self._repeats = torch.tensor(self._sizes, device=like.device)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        """One flag per slice: whether this rank has changed the buffer since the last exchange. The result stays on the device,
        so the host does not wait."""
        return torch.stack([part.any() for part in torch.ne(x, self.values).split(self._sizes)])

    def commit(
        self, y: torch.Tensor, views_y: Sequence[torch.Tensor], flags: torch.Tensor, factor: float | torch.Tensor,
        targets: Sequence[torch.Tensor | None],
    ) -> None:
        """Writes the means, y times factor, into the targets. A buffer whose entry in `flags` shows no change on any rank gets
        the value of the last exchange.

        If the value of some rank is not finite, each rank keeps its own.
        """
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
"""Maps the id of a bucket to the shared values of its buffers."""


def agree(shared: ByBucket, tensors: Sequence[torch.Tensor | None]) -> None:
    """Stores the buffers' current values, which are now the same on all ranks. `tensors` by tensor number; None entries are
    skipped."""
    for its in shared.values():
        mine = [tensors[s.tensor] for s in its.layout.slices]
        for view, tensor in its.layout.pairs(mine, its.layout.views(its.values)):
            view.copy_(tensor.detach())


def agreed(shared: ByBucket, tensors: Sequence[torch.Tensor | None]) -> None:
    """Writes the values after the last exchange into `tensors`, by tensor number. It is the inverse of `agree`."""
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
    """Copies the shared values for a checkpoint: between two exchanges of local steps, no model file contains these values."""
    return {f"agreed.{number}": its.values.cpu().clone() for number, its in shared.items()}


def restore(shared: ByBucket, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restores what `snapshot` has saved. Buckets that are missing in `tensors` keep their values."""
    for number, its in shared.items():
        if (saved := tensors.get(f"agreed.{number}")) is not None:
            its.values.copy_(saved)


# ---- what one bucket still has to send: residuals, residuals of earlier plans, and averages that were not applied
#
# A residual is the part of a codec's input that was not sent; the codec keeps it in its state. A `ResidualSlice` is a
# residual by element range, in the form in which it moves between plans. `carry` is the inherited residual, from an earlier
# plan. `carry` is sent with the next gradients; `carried` is the part that was sent with the last ones.

TINY = 1e-30
"""Smallest total weight by which values are divided. A total weight of 0 ends the step with an error elsewhere."""


class EntryResult(Protocol):
    """Controls how many entries sparse codecs send; implemented in entries_sent.py."""

    def begin(self, step: int) -> None:
        """Sets the number of entries of all buckets for a step. Called before each encode of the step."""
        ...

    def forget(self) -> None:
        """Forgets the current step, because codec states were replaced and the step might be repeated."""
        ...


class ResidualLedger:
    """Base class of WorkerBucket: its residuals, and the rollback of averages that were not applied."""

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
    on_device: bool

    @property
    def coded_x(self) -> torch.Tensor:
        """The codec's input, in the memory from which the codec reads: host or device."""
        raise NotImplementedError

    @property
    def codec_input(self) -> Array:
        """The codec's input as an array for the codec."""
        return self.coded_x if self.on_device else self.coded_x.numpy()

    @property
    def result(self) -> torch.Tensor:
        """The received sum, in the memory where reading it costs least: host or device."""
        raise NotImplementedError

    def debts(self) -> list[ResidualSlice]:
        """This worker's unsent residuals of the bucket's elements, as slices of tensors. Units.worth defines their unit."""
        debts = [] if self.carry is None else list(split_by_tensor(self.slices, 0, self.carry))
        for (low, _), state in self.coders:
            if (values := residual_of(state)) is not None:
                debts += split_by_tensor(self.slices, low, values)
        return debts

    def judge(self, *, finite: bool) -> None:
        """Finalizes a step: records which slices were not applied. These are slices that no rank used, and all slices if
        `finite` is False."""
        if self.buffer:
            return
        self.sound = self.finite
        self.unapplied = self.all_slices & ~self.used if finite else self.all_slices
        if finite:
            self.carry_on(self.used)

    def carry_on(self, slices: int) -> None:
        """Finalizes slices whose average was applied. The part of the inherited residual that did not reach the mean is kept
        for the next step."""
        if self.carried is not None and (unsent := 1.0 - self._paid()):
            remainder = torch.zeros_like(self.carried)
            add_ranges(remainder, self.carried * unsent, ranges_of(self.slices, slices))
            self.carried = self.carried - remainder  # so that `take_back` undoes only the part that was sent
            self.carry = remainder if self.carry is None else self.carry + remainder

    def _paid(self) -> float:
        """The fraction of the sent inherited residual that reached the mean. It is 1 if the workers' total weight was as
        assumed, or if this worker encoded again. Other ranks of its node keep their assumption."""
        return self.total / max(self.weight if self.served else float(self.tail_y[-1]), TINY)

    @property
    def all_slices(self) -> int:
        return (1 << self.nslices) - 1

    def forget(self) -> None:
        """Drops all records of the last exchange, because codec states were replaced: it can no longer be rolled back."""
        self.codes, self.unapplied, self.undone, self.carried = False, 0, 0, None
        if self.entries is not None:
            self.entries.forget()

    def take_back(self) -> int:
        """Rolls back the slices of the last exchange that were not applied, before the next exchange. Returns them as a bit
        mask."""
        slices, self.unapplied = self.unapplied, 0
        if slices:
            cut = ranges_of(self.slices, slices)
            if self.codes:
                self.codec.undo(self.state, self.codec_input, cut)
            if self.carried is not None:
                self.carry = torch.zeros_like(self.carried) if self.carry is None else self.carry
                add_ranges(self.carry, self.carried, cut)
            self.undone |= slices
        return slices


PAYLOAD_HEADER = 16
"""Bytes before the send buffer, so that the payload of an in-place codec is its header followed by the send buffer itself."""
SMALL_NUMEL = 1 << 14
"""Mean elements per slice up to which one call per slice costs more than a second pass over the complete bucket."""


class WorkerBucket(ResidualLedger):
    """Memory and state of one bucket: the send buffer `x` (float32), and after it one `used` flag per slice and the weight.

    Collectives sum the flags and the weight together with x; between nodes the frame header contains them. With a CUDA model, x
    is on the device and codecs read `host`, its pinned copy; on CPU both are the same memory. If the codec runs on the device
    there is no such copy. Only payloads then pass through pinned memory, one buffer for each direction.

    The sum arrives in the receive buffer `y`. Without error feedback, y is the same memory as x. With error feedback the
    codec's input stays in x. So a step whose average was not applied can be rolled back without a copy of the residual. On a
    CPU the only rank of a node then has no y: results stay encoded, and are decoded when they are written (`coded_result`). If
    results are wanted as the entries of a sparse codec, they stay sparse (`sparse`). Reading y decodes either form.

    An all-reduce of float64 gradients or of module buffers uses float64 for both, so only the result is rounded. The same holds
    for module buffers that a server averages: the server receives this node's mean in float32 and averages the means of all
    nodes.
    """

    def __init__(
        self, planned: Bucket, job: Job, codec: Codec, device: torch.device, order: int, *, local: int = 0, rank: int = 0,
        on_device: bool = False,
    ) -> None:
        """Allocates the bucket's memory and codec state. `order`: position among all sends. `local`: this worker's index in its
        node. `on_device`: the codec runs on the gradients' device (lanes.py)."""
        self.planned, self.codec, self.order = planned, codec, order
        self.id, self.slices, self.owner, self.server = planned.id, planned.slices, planned.owner, planned.server
        self.late = planned.stale
        """Whether the result is applied one step late (late_results.py)."""
        self.served = planned.path == "service"
        """Whether a server sums the bucket. Weight and used slices are then in the frame header, otherwise after the send
        buffer."""
        self.dense = planned.path == "allreduce"
        """Whether the bucket is summed by one all-reduce, without compression."""
        self.staged = not (self.served or self.dense)
        """Whether the bucket's path is a sequence of collectives, with encoding and decoding between them."""
        self.coded = coded = self.served and planned.owner == local
        """Whether this worker encodes and decodes the bucket. Other workers of the node only take part in collectives, and have
        no codec state."""
        self.buffer = job.tensors[planned.slices[0].tensor].buffer
        self.in_updates = not self.dense and in_updates(codec)
        self.in_means = not self.dense and codec.keeps
        """Whether gradients are encoded as parts of the mean, so that residuals keep their value when weights change."""
        self.means = self.served and self.buffer and of_means(codec)
        """Whether the server averages the values that workers send, instead of summing their parts (Flag.MEAN)."""
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
        self._reader: TopK | RandomK | None = None
        self.sparse: SparseResult | None = None
        """The last result as sparse entries; None if it has another form."""
        self._decoder: OneRound | None = None
        self.coded_result: CodedResult | None = None
        """The last result in encoded form; None if it has another form."""
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
        """Element range and codec state of each encoder whose residuals belong to this worker."""
        self.carry: torch.Tensor | None = None
        self.carried: torch.Tensor | None = None
        self.entries: EntryResult | None = None
        """Sets the number of sent entries before each encode; None if the codec's ratio does not change between steps."""
        self.codes = False
        """Whether this worker has encoded something in the last exchange."""
        self.sound = True
        """Whether the last average was finite."""
        self.unapplied = 0
        """Bit mask of the slices whose average in the last exchange was not applied."""
        self.undone = 0
        """Bit mask of the slices that were rolled back on this worker, but not yet reported to the server."""
        self.rewind()
        self.reset()

    def lie_in(self, every: torch.Tensor, every_y: torch.Tensor) -> None:
        """Sets the memory of the send buffer and the receive buffer, each with flags and weight after it. Buckets without a
        codec can share one memory block."""
        self.all, self.all_y = every, every_y
        self.x, self.tail = every[: self.numel], every[self.numel :]
        self._y, self.tail_y = every_y[: self.numel], every_y[self.numel :]
        on_host = every.device.type == "cpu"
        self._facts = self.tail.numpy() if on_host else None
        self._facts_y = self.tail_y.numpy() if on_host else None
        """The flags and weights in both buffers as numpy arrays, if they are in host memory; else None. (A tensor operation on
        them would cost as much time as thousands of elements.)"""
        self.views, self.views_y = self.layout.views(self.x), self.layout.views(self._y)

    @property
    def y(self) -> torch.Tensor:
        if self.coded_result is not None:
            return self.coded_result.to_dense()
        if self.sparse is not None and not self._y.numel():
            self._y = self.sparse.to_dense()
        return self._y

    def keep_coded(self, recycle: Callable[[memoryview], None]) -> None:
        """Keeps results encoded from now on, if they can be decoded later. Called only on the single rank of a node, before its
        first step. `recycle` receives the buffers of results for reuse."""
        if self.coded and self.in_means and not self.late and not self.buffer and self.x.device.type == "cpu":
            self._decoder = codec_of_results(self.codec)
        if self._decoder is not None:
            self._recycle = recycle
            self._no_y()

    def _no_y(self) -> None:
        self._y = self.host_y = self.all_y = self.tail_y = torch.empty(0)
        self._facts_y, self.views_y = None, []

    def keep_entries(self) -> None:
        """Keeps results that arrive as sparse entries in that form. Called only on the single rank of a node, before its first
        step."""
        if self.coded and not self.late and not self.buffer and self.x.device.type == "cpu" and self.numel <= MOST_NUMEL:
            self._reader = reader_of(self.codec)
        if self._reader is not None:
            self._decoder = None
            self._no_y()

    def reset(self) -> None:
        self.sources: list[torch.Tensor | None] = [None] * self.nslices
        self.marks: list[object] = []
        """Events in the callers' streams after which the source gradients are final."""
        self.waiting = self.nslices

    def rewind(self) -> None:
        self.step = 0
        self.started = self.done = False
        self.finite = True
        self.weight, self.used = 0.0, 0
        self.scaled: float | torch.Tensor = 1.0
        """The factor by which the received sum has been multiplied in place since it arrived."""
        self.spent = 0
        """Bit mask of the slices whose average an optimizer has applied before the end of the step."""
        self.reported = 0  # slices whose last average was not applied, as this exchange reported to the server
        self.abandoned = ""
        """Which worker aborted the step, and why; there is no sum then. Empty: no worker did."""
        self.total = 0.0
        """The assumed total weight of all workers, by which the gradients of this exchange were scaled."""
        self.received_weight: float | None = None
        """The total weight of all workers, if the host received it separately from a sum that is on the device; else None."""

    def gather(self, factor: float, weight: float, worth: float = 1.0) -> None:
        """Copies the gradients, times `factor`, into the send buffer, with zeros for missing gradients. With weight 0 the
        buffer is zero: a mean over no samples is NaN, and NaN times 0 stays NaN. `worth`: the value that an inherited residual
        of 1 adds."""
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

    def _mark_changed(self, slices: int) -> int:
        """For a bucket of module buffers: flags the slices in the bit mask `slices` that this rank has changed. Returns the
        flags as a bit mask if a frame header needs it, otherwise `slices`."""
        assert self.agreed is not None
        mask = torch.tensor([slices >> i & 1 for i in range(self.nslices)], device=self.x.device)
        self.changed = self.agreed.changed(self.x) * mask
        return sum(1 << i for i, flag in enumerate(self.changed.tolist()) if flag) if self.served else slices

    def flags(self) -> torch.Tensor:
        """One number per slice, above 0 if some rank used the slice. The tensor is on the device of the send buffer."""
        if not self.served:
            return self.tail_y[:-1]
        return torch.tensor([self.used >> i & 1 for i in range(self.nslices)], device=self.x.device)

    def write_tail(self, tail: torch.Tensor) -> None:
        """Writes the used flags and the weight into `tail`, which a collective will sum or distribute."""
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
        """Reads which slices any rank used from the summed flags. Does nothing if this rank used every slice: the answer is
        then known."""
        if self.used != self.all_slices or (self.agreed is not None and self.served):
            self.used = sum(1 << i for i, flag in enumerate(self.tail_y[:-1].tolist()) if flag > 0)

    def read_result(self) -> None:
        """Reads weight and used slices of the result that the bucket's owner has distributed to this worker. A weight of NaN
        marks a result that is not finite."""
        self.weight = float(self.tail_y[-1])
        self.used = sum(1 << i for i, flag in enumerate(self.tail_y[:-1].tolist()) if flag > 0)
        self.finite = not math.isnan(self.weight) and bool(torch.isfinite(self.y[:1]).all())

    @property
    def read_here(self) -> bool:
        """Whether the host can read a collective's summed weight without waiting for the GPU."""
        return self._facts_y is not None

    def over_weight(self, scale: float) -> float | torch.Tensor:
        """Returns scale / (summed weight of a collective). On a GPU it is a tensor, so that the host does not wait."""
        if self.received_weight == 0.0:
            raise ZeroDivisionError
        return scale / (self.tail_y[-1] if self._facts_y is None else float(self._facts_y[-1]))

    def summed_weight(self) -> float:
        """The total weight of all workers in the exchange of the last received sum; 0 if it is known only to the GPU."""
        if self.served:
            return self.weight
        return self.received_weight or 0.0 if self._facts_y is None else float(self._facts_y[-1])

    def op(self, coding: str) -> str:
        """Name of an operation in paths: "encode" or "decode" followed by the device, such as "encode@cpu"."""
        return f"{coding}@{'gpu' if self.on_device else 'cpu'}"

    def to_mean(self) -> None:
        """Divides the send buffer, a weighted sum over this node's ranks, by their weight. Does nothing unless the server
        averages means."""
        if self.means:
            self.x.div_(self.weight or 1.0)
            if self.x.device.type == "cpu":
                self.host.copy_(self.x)

    def encode(self) -> int:
        """Encodes the send buffer into the payload of the codec's first round. Returns the payload's bytes."""
        self.started = self.codes = True
        self._drop_result()
        if self.entries is not None:
            self.entries.begin(self.step)
        if not self.on_device:
            return self.codec.start(self.host.numpy(), self.state, self.payload)
        nbytes = self.codec.start(self.x, self.state, self._there[0])
        self._pinned[0][:nbytes].copy_(self._there[0][:nbytes], non_blocking=True)
        if self.x.is_cuda:
            torch.cuda.current_stream(self.x.device).synchronize()
        return nbytes

    def restart(self, total: float) -> int:
        """Encodes the first round again, because the total weight of all workers differs from the assumed one. Returns the
        payload's bytes.

        The send buffer also contains residuals of other ranks of this node, which are scaled, too. Each of those ranks keeps
        the part that did not reach the mean (`carry_on`).
        """
        x = self.coded_x
        self.codec.undo(self.state, self.codec_input)
        carried = 0.0 if self.carried is None else self.carried.to(x.device)
        x.sub_(carried).mul_(self.total / total).add_(carried)
        self.total = total
        return self.encode()

    @property
    def coded_x(self) -> torch.Tensor:
        """The codec's input, in the memory from which the codec reads: host or device."""
        return self.x if self.on_device else self.host

    @property
    def result(self) -> torch.Tensor:
        """The received sum, in the memory where reading it costs least: host or device."""
        return self.host_y if self._reader is None and self._decoder is None and not self.on_device else self.y

    def slice_of_result(self, number: int) -> torch.Tensor:
        """The received values of a slice; only the nonzero ones if the result arrived as sparse entries."""
        return self.layout.views(self.y)[number] if self.sparse is None else self.sparse.entries(number)[1]

    def encode_next(self, r: int, result: Buffer) -> int:
        return self.codec.next(r, result, self.state, self.payload)

    def decode(self, result: memoryview) -> None:
        """Decodes the result of the codec's last round into the receive buffer, or keeps it in encoded or sparse form."""
        if self._reader is not None:
            self._read(self._reader, result)
            return
        if self._decoder is not None:
            self._drop_result()
            self.coded_result = CodedResult(self._decoder, self.layout, result, self.numel)
            self.finite = self.coded_result.finite
            return
        if not self.on_device:
            self.finite = self.codec.decode(result, self.state, self.host_y.numpy())
            if self.means and self.y.device.type == "cpu":
                self.y.copy_(self.host_y)
            return
        nbytes = result.nbytes
        if nbytes > self.bound:
            raise CorruptFrame(f"a result of {nbytes} bytes was received, but at most {self.bound} bytes are possible for "
                               "this codec and bucket")
        self._pinned[1][:nbytes].numpy().data[:] = result
        self._there[1][:nbytes].copy_(self._pinned[1][:nbytes], non_blocking=True)
        self.finite = self.codec.decode(self._there[1][:nbytes], self.state, self.y)

    @property
    def keeps_body(self) -> bool:
        """Whether `decode` has kept the received bytes, which the bucket itself then recycles."""
        return self.coded_result is not None

    def let_go(self) -> None:
        """Returns memory to the system between two exchanges, unless the last exchange might still be rolled back."""
        if self.started or self.unapplied or self.late or not self.coded or self.on_device:
            return
        self.codes = False
        self._drop_result()
        release(self.x)
        if not self.codec.in_place:
            kernels.give_back(np.asarray(self.payload))

    def _drop_result(self) -> None:
        if self.coded_result is not None:
            body, self.coded_result = self.coded_result.body, None
            self._recycle(body)

    def _read(self, reader: TopK | RandomK, result: memoryview) -> None:
        entries = reader.read(result, self.numel)
        self.finite = entries is not None
        self.sparse = None if entries is None else SparseResult(self.layout, *map(torch.from_numpy, entries))
        self._y = torch.empty(0) if entries is not None else torch.full((self.numel,), math.nan)
        self.views_y = [] if entries is not None else self.layout.views(self._y)

    def look(self) -> None:
        """Checks whether the received sum is finite and sets `finite`, for paths without a decoder that reports it."""
        self.finite = all_finite(self.y)

    def late_not_finite(self) -> int:
        """Same as `own_not_finite`, for the exchange whose result has arrived one step late."""
        bad = [s.tensor for s, is_finite in zip(self.slices, self._put_in.isfinite().tolist(), strict=True) if not is_finite]
        return bad[0] if bad else -1

    def own_not_finite(self) -> int:
        """Number of the first tensor for which this worker's own gradient is not finite; -1 if there is none. Call it before
        `commit`, which can overwrite the gradient."""
        for s, source in zip(self.slices, self.sources, strict=True):
            if source is not None:
                values = source.detach()
                if (s.start, s.stop) != (0, values.numel()):
                    values = values.reshape(-1)[s.start : s.stop]
                if not all_finite(values):
                    return s.tensor
        return -1

    def commit(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes the received sum times `factor` into the targets; None skips a slice. Module buffers stay unchanged if the sum
        is not finite. Call it once per exchange."""
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

def release(x: torch.Tensor) -> None:
    """Returns a buffer's memory to the system. Its contents are lost. Does nothing for pinned memory and on a GPU."""
    if x.device.type == "cpu" and not x.is_pinned():
        kernels.give_back(x.detach().numpy())


def trim() -> None:
    """Returns freed heap memory to the system after a change of plan. Takes a few milliseconds."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc has it, musl does not
        libc.malloc_trim(ctypes.c_size_t(0))

"""One bucket on one worker: its memory, and the copies between gradients, payload and result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from commlayer.compressors import place, seed
from commlayer.compressors.codec import Codec, OneRound, State
from commlayer.compressors.dense import of_means
from commlayer.compressors.feedback import in_updates
from commlayer.compressors.payload import Buffer
from commlayer.compressors.plan_codecs import Reads, reader_of
from commlayer.compressors.tensors import give_back
from commlayer.engine.bucket_debts import BucketDebts, Entries
from commlayer.engine.coded_result import CodedResult, codec_of_results
from commlayer.engine.finite import all_finite
from commlayer.engine.layout import Layout, aligned
from commlayer.engine.shared_buffers import SharedBuffers
from commlayer.engine.sparse_result import MOST_NUMEL, SparseResult
from commlayer.errors import CorruptFrame
from commlayer.gpu import launch
from commlayer.records import Bucket, Job

PAYLOAD_HEADER = 16
"""Bytes before x, so that an in-place codec's payload is its header followed by x itself."""
SMALL_NUMEL = 1 << 14
"""Mean elements per slice up to which one call per slice costs more than a second pass over the whole bucket."""


class WorkerBucket(BucketDebts):
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
        """`local`: this worker's index in its node. `on_device`: the codec runs on the gradients' device (device_codecs.py)."""
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
        self.layout = Layout(planned, job)
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
        self.entries: Entries | None = None
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
            return self.coded_result.whole()
        if self.sparse is not None and not self._y.numel():
            self._y = self.sparse.whole()
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
        self.said = 0  # slices whose last average was not applied, as this exchange reported to the server
        self.abandoned = ""
        """Who aborted the step, and why; there is no sum then."""
        self.total = 0.0
        """The total weight of all workers on which the scaling of this exchange's gradients is based."""
        self.told: float | None = None
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
        if self.told == 0.0:
            raise ZeroDivisionError
        return scale / (self.tail_y[-1] if self._facts_y is None else float(self._facts_y[-1]))

    def summed_weight(self) -> float:
        """The summed weight of all workers in the exchange whose result is in y; 0 if only a device knows it."""
        if self.served:
            return self.weight
        return self.told or 0.0 if self._facts_y is None else float(self._facts_y[-1])

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

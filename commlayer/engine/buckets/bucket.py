"""A bucket: its position in the plan, memory, ledger, and the record of its current exchange."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from commlayer.callbacks import ignore
from commlayer.cluster.servers.bucket_sum import divided_afterwards
from commlayer.compressors import kernels, seed
from commlayer.compressors.codec import NAN, Codec, OneRound
from commlayer.compressors.dense import averages_buffers
from commlayer.compressors.feedback import encodes_updates
from commlayer.compressors.plan_codecs import sparse_result_codec
from commlayer.compressors.randomk import RandomK
from commlayer.compressors.topk import TopK
from commlayer.engine.buckets.bucket_layout import (
    BucketLayout,
    BucketMemory,
    aligned,
    all_finite,
    buffer_on,
    release,
    scale,
)
from commlayer.engine.buckets.coder import PAYLOAD_HEADER, Coder
from commlayer.engine.buckets.ledger import Ledger
from commlayer.engine.buckets.results import EncodedResult, SparseResult, codec_of_results
from commlayer.engine.buckets.shared_buffers import SharedBuffers
from commlayer.records import Bucket, Job

MOST_NUMEL = 2**31 - 1
"""Largest number of elements of a bucket whose result can stay sparse: torch compares positions as signed 32-bit numbers."""
TINY = 1e-30
"""Smallest total weight by which values are divided. A total weight of 0 ends the step with an error elsewhere."""
SMALL_NUMEL = 1 << 14
"""Mean number of elements per slice of a bucket, below which a second pass over the complete bucket is faster than one call per
slice."""


@dataclasses.dataclass(slots=True)
class BucketExchange:
    """Record of one exchange of a bucket, from the first gradient to the end of the step."""

    step: int = 0
    started: bool = False
    """True: encoding has begun."""
    answered: bool = False
    """True: the server's result has arrived."""
    done: bool = False
    """True: the result can be written into the gradients."""
    finite: bool = True
    weight: float = 0.0
    """This worker's weight. After the result has arrived: the total weight of all workers."""
    used: int = 0
    """Bit mask of the slices for which this worker had a gradient. After the result has arrived: for which any worker had one.
    """
    total: float = 0.0
    """The assumed total weight of all workers, by which the gradients of this exchange were scaled. If the result has another
    total weight, the residual is corrected (`EncodedBucket.reweigh`)."""
    scaled: float | torch.Tensor = 1.0
    """The factor by which the received sum has been multiplied in place since it arrived."""
    applied: int = 0
    """Bit mask of the slices whose average an optimizer has applied before the end of the step."""
    joined: int = 0
    """See Header.joined."""
    worth: float = 1.0
    """The factor by which inherited residuals were multiplied when they were added to the gradients."""
    kept: torch.Tensor | None = None
    """What this worker has encoded, if there is no result because some worker has withdrawn its contribution."""
    abandoned: str = ""
    """Text that says which worker aborted the step, and why; there is no sum then. Empty: no worker did."""


class WorkerBucket:
    """Base class of one bucket on one worker. Gradients are copied into its send buffer; its path fills the receive buffer."""

    served = False
    """True: a server sums the bucket. Weight and used slices are then in the frame header, otherwise after the elements."""
    means = False
    """True: workers send means, and the server averages these means. False: the server sums the workers' parts of the mean."""
    ranks = 1
    """Number of ranks over which the gradients are a mean already: those of a site, if the model is sharded over them. No other
    rank of the site has the bucket then."""
    memory: BucketMemory
    compact: EncodedResult | SparseResult | None = None
    """The last result, if it stays encoded or sparse; None: the last result is in the receive buffer."""

    def __init__(self, planned: Bucket, job: Job, codec: Codec, order: int) -> None:
        """`order`: position of the bucket in the order in which buckets are sent."""
        self.planned, self.codec, self.order = planned, codec, order
        self.id, self.slices, self.numel = planned.id, planned.slices, planned.numel
        self.late = planned.stale
        """True: the average is applied one step after its gradients (LateExchange)."""
        self.buffer = job.tensors[planned.slices[0].tensor].buffer
        dense = planned.path == "allreduce"
        self.encodes_updates = not dense and encodes_updates(codec)
        self.needs_undo = not dense and codec.needs_undo
        """True: a payload affects later steps, so the codec's input must stay unchanged until the next exchange."""
        self.in_means = not dense and (codec.has_residual or codec.has_server_residual)
        """True: what is encoded and summed are parts of the mean. The value of a residual therefore stays correct when weights
        change."""
        self.assumes_total = self.served and codec.has_residual
        """True: gradients are divided by an assumed total weight before they are encoded. The residual is corrected when the
        result shows the true one."""
        self.assumed: float | None = None
        """Total weight of the last result, by which the next gradients are divided if `assumes_total`. None: no result of this
        plan and these members has arrived, so the weight is assumed to be the number of workers."""
        self.layout, self.ledger, self.exchange = BucketLayout(planned, job), Ledger(planned.slices), BucketExchange()
        self.shared: SharedBuffers | None = None

    def use(self, every: torch.Tensor, every_y: torch.Tensor) -> None:
        self.memory = BucketMemory(self.layout, every, every_y)
        if self.buffer:
            self.shared = SharedBuffers(self.memory.x, self.layout)
        self.reset()

    @property
    def x(self) -> torch.Tensor:
        return self.memory.x

    @property
    def y(self) -> torch.Tensor:
        """Returns the received sum as dense elements. Decodes the sum if it is kept in encoded or sparse form."""
        return self.memory.y if self.compact is None else self.compact.to_dense()

    def reset(self) -> None:
        """Prepares the bucket for the gradients of the next step."""
        self.sources: list[torch.Tensor | None] = [None] * len(self.slices)
        self.marks: list[object] = []
        """CUDA events after which the source gradients are final; None on CPU."""
        self.waiting = len(self.slices)

    def gather(self, factor: float, weight: float, worth: float = 1.0) -> None:
        """Copies the gradients, times `factor`, into the send buffer, with zeros for missing gradients. With weight 0 the
        buffer is zero: a mean over no samples is NaN, and NaN times 0 stays NaN. `worth`: factor by which the residuals of an
        earlier plan are multiplied when they are added."""
        used, memory = 0, self.memory
        for i, (view, tensor) in enumerate(zip(memory.views, self.sources, strict=True)):
            if tensor is not None:
                used |= 1 << i
            if tensor is None or weight == 0.0:
                view.zero_()
        if used and weight != 0.0:
            pairs = self.layout.pairs(self.sources, memory.views)
            torch._foreach_copy_([v for v, _ in pairs], [g.detach() for _, g in pairs])
        if self.shared is not None:
            used = self._mark_changed(self.shared, used if weight else 0)
        if factor != 1.0:
            memory.x.mul_(factor)
        self.ledger.open(memory.x, worth)
        self.exchange.used, self.exchange.weight, self.exchange.worth = used, weight, worth

    def _mark_changed(self, shared: SharedBuffers, slices: int) -> int:
        """For a bucket of module buffers: flags those of the slices in the bit mask `slices` that this rank has changed.
        Returns the flags as a bit mask if a frame header needs them, otherwise `slices`."""
        mask = torch.tensor([slices >> i & 1 for i in range(len(self.slices))], device=self.x.device)
        shared.changed = shared.changes(self.x) * mask
        return _mask(shared.changed) if self.served else slices

    def flags(self) -> torch.Tensor:
        """Returns one number per slice, above 0 if some rank used the slice. The tensor is on the device of the send buffer."""
        return self.memory.tail_y[:-1]

    def write_tail(self, tail: torch.Tensor) -> None:
        """Writes the used flags and the weight into `tail`, which a collective will sum or distribute."""
        exchange = self.exchange
        if self.shared is not None and not self.served:
            tail[:-1] = self.shared.changed
            tail[-1] = exchange.weight
            return
        facts = [*(exchange.used >> i & 1 for i in range(len(self.slices))), exchange.weight]
        if self.memory.facts is not None and tail is self.memory.tail:
            self.memory.facts[:] = facts
        else:
            tail.copy_(torch.tensor(facts, dtype=tail.dtype))

    def over_weight(self, scale: float, weight: float) -> float | torch.Tensor:
        """Returns scale / `weight`. `weight`: the total weight of all workers."""
        return scale / weight

    def finalize(self, slices: int) -> None:
        """Ends the last exchange: the ledger records the slices in the bit mask `slices` as applied, and the other slices as
        discarded."""
        self.ledger.discarded = self.ledger.all_slices & ~slices
        if self.exchange.kept is not None:
            self.ledger.keep_for_later(self.exchange.kept, self.exchange.worth)
            self.exchange.kept = None
        elif slices and self.ledger.sent is not None:
            self.ledger.applied(slices, self._share_of_inherited())

    def _share_of_inherited(self) -> float:
        """Returns the fraction of the inherited residual that reached the mean. It is not 1 if the total weight differs from
        the assumed one."""
        return self.exchange.total / max(self.exchange.weight, TINY)

    def learn(self, weight: float) -> None:
        """Records the total weight of a result, as the assumption for the next exchange."""
        if weight > 0.0:
            self.assumed = weight

    def look(self) -> None:
        """Checks whether the received sum is finite, for paths without a decoder that reports it."""
        self.exchange.finite = all_finite(self.y)

    def own_not_finite(self) -> int:
        """Returns the number of the first tensor for which this worker's own gradient is not finite; -1 if there is none. Call
        it before `commit`, which can overwrite the gradient."""
        for s, source in zip(self.slices, self.sources, strict=True):
            if source is not None:
                values = source.detach()
                if (s.start, s.stop) != (0, values.numel()):
                    values = values.reshape(-1)[s.start : s.stop]
                if not all_finite(values):
                    return s.tensor
        return -1

    def commit(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes the received sum times `factor` into the targets; a target of None skips its slice. Module buffers stay
        unchanged if the sum is not finite. Call it once per exchange."""
        memory = self.memory
        if self.shared is not None:
            self.shared.commit(memory.y, memory.views_y, self.flags(), factor, targets)
            return
        if self.compact is not None:
            self.compact.write(factor, targets)
            return
        pairs = self.layout.pairs(targets, memory.views_y)
        if len(pairs) > 1 and self.numel <= SMALL_NUMEL * len(pairs):
            memory.y.mul_(factor)
            self.exchange.scaled = factor
            torch._foreach_copy_([target.detach() for _, target in pairs], [view for view, _ in pairs])
            return
        for view, target in pairs:
            torch.mul(view, factor, out=target.detach())

    def commit_finite(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> bool:
        """Does as `commit`, and checks whether the received sum is finite, in the same pass if slices are large. Returns False
        if it is not; what the targets have is then not the average, and `commit` is to be called."""
        pairs = self.layout.pairs(targets, self.memory.views_y)
        if len(pairs) < len(self.slices) or (len(pairs) > 1 and self.numel <= SMALL_NUMEL * len(pairs)):
            self.look()
            if self.exchange.finite:
                self.commit(factor, targets)
        else:
            self.exchange.finite = all(scale(view, factor, to.detach()) for view, to in pairs)
        return self.exchange.finite

    def slice_of_result(self, number: int) -> torch.Tensor:
        """Returns the received values of a slice; only the nonzero values if the result arrived as sparse entries."""
        sparse = self.compact if isinstance(self.compact, SparseResult) else None
        return self.layout.views(self.y)[number] if sparse is None else sparse.entries(number)[1]

    def forget(self) -> None:
        """Drops all records of the last exchange, which can then no longer be rolled back, because codec states were replaced.
        """
        self.ledger.forget()
        self.assumed = None

    def release_memory(self) -> None:
        """Returns memory to the system between two exchanges, unless the last exchange might still be rolled back."""


def _mask(flags: torch.Tensor) -> int:
    return sum(1 << i for i, flag in enumerate(flags.tolist()) if flag > 0)


class CollectiveBucket(WorkerBucket):
    """A bucket that collectives sum, together with its flags and weight. With a CUDA model, the buffers are on the GPU.

    An all-reduce of float64 gradients or of module buffers uses float64, so only the result is rounded.
    """

    def __init__(self, planned: Bucket, job: Job, codec: Codec, device: torch.device, order: int) -> None:
        super().__init__(planned, job, codec, order)
        self.dense = planned.path == "allreduce"
        """True: one all-reduce sums the bucket, without compression."""
        doubles = self.buffer or any(job.tensors[s.tensor].dtype == "float64" for s in self.slices)
        dtype = torch.float64 if doubles and self.dense else torch.float32
        every = buffer_on(device, self.numel + len(self.slices) + 1, dtype)
        self.use(every, every)

    def read_tail(self, weight: float | None = None) -> None:
        """Reads the total weight from the received sum, and from the summed flags which slices any rank used, unless this rank
        used every slice. `weight`: the total weight, if the host has received it separately from a sum that is on the GPU."""
        facts = self.memory.facts_y
        self.exchange.weight = float(facts[-1]) if facts is not None else weight or 0.0
        if self.exchange.used != self.ledger.all_slices:
            self.exchange.used = _mask(self.memory.tail_y[:-1])

    @property
    def read_here(self) -> bool:
        """Returns True if the host can read a collective's summed weight without waiting for the GPU."""
        return self.memory.facts_y is not None

    def over_weight(self, scale: float, weight: float) -> float | torch.Tensor:
        """Returns scale / `weight`. On a GPU the result is a tensor with the weight that belongs to the sum."""
        return scale / (weight if self.read_here or not weight else self.memory.tail_y[-1])


class ServedBucket(WorkerBucket):
    """A bucket that a server sums. A rank uses this class for the buckets that other ranks of its node encode: the rank only
    takes part in collectives inside the node.

    For module buffers that a server averages (`means`), the server receives this node's mean in float32 and averages the means
    of all nodes. The node's own buffers are float64.
    """

    served = True

    def __init__(self, planned: Bucket, job: Job, codec: Codec, device: torch.device, order: int) -> None:
        super().__init__(planned, job, codec, order)
        self.means = self.buffer and averages_buffers(codec)
        self._allocate(job, device)

    def _allocate(self, job: Job, device: torch.device) -> None:
        every = buffer_on(device, self.numel + len(self.slices) + 1, torch.float64 if self.means else torch.float32)
        self.use(every, every)

    def flags(self) -> torch.Tensor:
        used = self.exchange.used
        return torch.tensor([used >> i & 1 for i in range(len(self.slices))], device=self.x.device)

    def read_result(self) -> None:
        """Reads weight and used slices of the result that this worker has received from the rank that encodes the bucket. A
        weight of NaN marks a result that is not finite."""
        exchange, tail = self.exchange, self.memory.tail_y
        exchange.weight, exchange.used = float(tail[-1]), _mask(tail[:-1])
        exchange.finite = not math.isnan(exchange.weight) and bool(torch.isfinite(self.y[:1]).all())
        self.learn(exchange.weight)


class EncodedBucket(ServedBucket):
    """A bucket that this worker encodes and exchanges with a server.

    With error feedback the codec's input stays in the send buffer. A step whose average was not applied can therefore be rolled
    back without a copy of the residual. On a CPU, the only rank of a node has no receive buffer then: results stay encoded or
    sparse, and are decoded when they are written.
    """

    def __init__(
        self, planned: Bucket, job: Job, codec: Codec, device: torch.device, order: int, *, rank: int = 0,
        on_device: bool = False,
    ) -> None:
        """`on_device`: True if the codec runs on the gradients' device (lanes.py)."""
        self._rank, self._on_device = rank, on_device
        self._decoder: OneRound | None = None
        """Codec that decodes encoded results when they are written. None: results are decoded when they arrive."""
        self._reader: TopK | RandomK | None = None
        """Codec that reads results as sparse entries; None: results are dense."""
        self._recycle: Callable[[memoryview], None] = ignore
        super().__init__(planned, job, codec, device, order)

    def _allocate(self, job: Job, device: torch.device) -> None:
        on_host, floats = device.type == "cpu", self.numel + len(self.slices) + 1
        on_device = self._on_device and not self.means
        host_nbytes = 4 * floats if on_host or not on_device else 0
        block = aligned(PAYLOAD_HEADER, host_nbytes, pinned=not on_host)
        host = block[PAYLOAD_HEADER:].view(torch.float32)
        dtype = torch.float64 if self.means else torch.float32
        every = host if on_host and not self.means else buffer_on(device, floats, dtype)
        host_y, every_y = host, every
        if self.needs_undo:
            host_y = aligned(0, host_nbytes, pinned=not on_host).view(torch.float32)
            if on_host or on_device:
                every_y = host_y if on_host else buffer_on(device, floats, dtype)
        self.use(every, every_y)
        state = self.codec.init(self.planned.spec)
        seed(state, job.digest(), self.id, self._rank)
        self.coder = Coder(self.codec, self.planned.spec, state, self.memory, block, host, host_y,
                           device if on_device else None)
        self.ledger.state, self.ledger.encoders = state, [((0, self.numel), state)]

    def keep_encoded(self, recycle: Callable[[memoryview], None]) -> None:
        """Keeps results encoded from now on, if the codec can decode them later. Called only on the single rank of a node,
        before its first step. `recycle` receives the buffers of results for reuse."""
        if self._keeps_form and self.needs_undo and (codec := codec_of_results(self.codec)) is not None:
            self._decoder, self._recycle = codec, recycle
            self._drop_y()

    def keep_entries(self) -> None:
        """Keeps results that arrive as sparse entries in sparse form. Called only on the single rank of a node, before its
        first step."""
        if self._keeps_form and self.numel <= MOST_NUMEL and (reader := sparse_result_codec(self.codec)) is not None:
            self._reader = reader
            self._drop_y()

    @property
    def _keeps_form(self) -> bool:
        return not self.late and not self.buffer and self.x.device.type == "cpu"

    def _drop_y(self) -> None:
        self.memory.drop_y()
        self.coder.drop_y()

    def read_sum(self) -> None:
        """Reads weight and used slices from the sum over this node's ranks."""
        self.exchange.weight, self.exchange.used = float(self.memory.tail[-1]), _mask(self.memory.tail[:-1])

    def to_mean(self) -> None:
        """Divides the send buffer, a weighted sum over this node's ranks, by the weight of these ranks, for a server that
        averages means."""
        self.x.div_(self.exchange.weight or 1.0)
        if self.x.device.type == "cpu":
            self.coder.host.copy_(self.x)

    def encode(self) -> int:
        """Encodes the send buffer into the payload of the codec's first round. Returns the payload's size in bytes."""
        self.exchange.started = True
        self._drop_result()
        self.ledger.record(self.coder.undo)
        return self.coder.encode(self.exchange.step)

    def finish(self, weight: float, used: int) -> None:
        """Records the total weight and the used slices of a decoded result, and corrects the residual if another total weight
        was assumed."""
        exchange = self.exchange
        exchange.weight, exchange.used = weight, used
        if self.assumes_total and exchange.finite:
            share, ratio = divided_afterwards(exchange.total, weight)
            if ratio != 1.0:
                x, sent = self.coder.input, self.ledger.sent
                self.coder.reweigh(share, (x if sent is None else x - sent.to(x.device)) * (ratio - 1.0))
        self.learn(weight)

    def _share_of_inherited(self) -> float:
        # `finish` has corrected the whole payload for the total weight, together with all inherited residuals of this node.
        return 1.0 if self.assumes_total else super()._share_of_inherited()

    def receive_nothing(self, weight: float) -> None:
        """Records that there is no result, because a worker has withdrawn its contribution: no slice has an average, and all
        workers send their gradients again with the next ones. `weight`: the total weight of all workers."""
        self._drop_result()
        self.exchange.kept = self.x.nan_to_num(0.0, 0.0, 0.0)  # a new tensor
        if self.memory.y.numel():
            self.y.zero_()
            self.coder.host_y.zero_()
        else:
            self.memory.y = torch.zeros(self.numel)
            self.memory.views_y = self.layout.views(self.memory.y)
        self.exchange.weight, self.exchange.used = weight, 0

    def decode(self, body: memoryview) -> bool:
        """Decodes the result of the codec's last round into the receive buffer, or keeps it in encoded or sparse form. Returns
        True if the bucket keeps the memory of `body`."""
        self._drop_result()
        if self._reader is not None:
            self._read(self._reader, body)
        elif self._decoder is not None:
            self.compact = result = EncodedResult(self._decoder, self.layout, body)
            self.exchange.finite = result.finite
        else:
            self.exchange.finite = self.coder.decode(body)
            if self.means and self.x.device.type == "cpu":
                self.y.copy_(self.coder.host_y)
        return isinstance(self.compact, EncodedResult)

    def _read(self, reader: TopK | RandomK, body: memoryview) -> None:
        entries = reader.read(body, self.numel)
        self.exchange.finite = entries is not None
        if entries is not None:
            self.compact = SparseResult(self.layout, *map(torch.from_numpy, entries))
            self.memory.drop_y()
        else:
            self.memory.y = torch.full((self.numel,), NAN)
            self.memory.views_y = self.layout.views(self.memory.y)

    def _drop_result(self) -> None:
        result, self.compact = self.compact, None
        if isinstance(result, EncodedResult):
            self._recycle(result.body)

    def forget(self) -> None:
        super().forget()
        if self.coder.entries is not None:
            self.coder.entries.forget()

    def release_memory(self) -> None:
        if self.coder.on_device or self.exchange.started or self.ledger.discarded or self.late:
            return
        self.ledger.keep()
        self._drop_result()
        release(self.x)
        if not self.codec.in_place:
            kernels.give_back(np.asarray(self.coder.payload))


def make_bucket(
    planned: Bucket, job: Job, codec: Codec, device: torch.device, order: int, *, owned: bool = True, rank: int = 0,
    on_device: bool = False,
) -> WorkerBucket:
    """Creates the bucket of the class that its path in the plan needs. `owned`: True if this rank exchanges the bucket with its
    server."""
    if planned.path != "service":
        return CollectiveBucket(planned, job, codec, device, order)
    if not owned:
        return ServedBucket(planned, job, codec, device, order)
    return EncodedBucket(planned, job, codec, device, order, rank=rank, on_device=on_device)

"""One bucket on one worker: its memory, and the moves between gradients, payload and result. Knows no threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from commlayer.compressors import device as devices
from commlayer.compressors import place, seed
from commlayer.compressors.codec import Buffer, Codec, State
from commlayer.compressors.dense import of_means
from commlayer.compressors.feedback import in_updates
from commlayer.compressors.one_round import OneRound
from commlayer.compressors.sparse_results import Reads, reader_of
from commlayer.compressors.tensors import give_back
from commlayer.engine.bucket_debts import BucketDebts, Entries
from commlayer.engine.coded_result import CodedResult, codec_of_results
from commlayer.engine.finite import all_finite
from commlayer.engine.layout import Layout, aligned
from commlayer.engine.shared_buffers import SharedBuffers
from commlayer.engine.sparse_result import MOST_NUMEL, SparseResult
from commlayer.errors import CorruptFrame
from commlayer.records import Bucket, Job

PAYLOAD_HEADER = 16
"""Bytes before x, so that an in-place codec's payload is its header and x itself."""
SMALL_NUMEL = 1 << 14
"""Elements of a slice, on average, up to which a call for each costs more than a second pass over all."""


class WorkerBucket(BucketDebts):
    """Memory of a bucket: `x` (float32) followed by a tail of one `used` flag per slice and the weight.

    The tail rides along with collectives; between nodes the frame header carries the same facts. With a CUDA model `x` lies on
    the device and `host` is its pinned twin that codecs read; on CPU they are one. Where the codec runs on the device
    there is no twin, and only payloads cross, those that go and those that come each through pinned memory.

    The sum comes back into `y`. That is `x` again, unless the codec keeps something back: then what it was given stays, so
    that a step whose average was not applied can be taken back without a copy of the residual. On a CPU the only rank of a node
    has no y then: results stay as they came and are decoded where they are written (`coded_result`). Where somebody wants
    results as the entries that a sparse codec sends, they stay that (`sparse`). y is made of either if it is asked for.

    An all-reduce of doubles or of buffers has float64 for both: nothing is rounded there but the result. So have buffers on
    the way over a server, which is sent their own mean over this node in float32, and makes the mean of all of these.
    """

    def __init__(
        self, planned: Bucket, job: Job, codec: Codec, device: torch.device, order: int, *, local: int = 0, rank: int = 0,
        on_device: bool = False,
    ) -> None:
        """`local`: this worker's place in its node. `on_device`: its codec runs where the gradients are: device_codecs.py."""
        self.planned, self.codec, self.order = planned, codec, order
        self.id, self.slices, self.owner, self.server = planned.id, planned.slices, planned.owner, planned.server
        self.late = planned.stale
        """Whether its result is used a step late: see late_results.py."""
        self.served = planned.path == "service"
        """Whether a server sums it. Then weight and used slices come in the header of its frame, else in the tail."""
        self.dense = planned.path == "allreduce"
        """Whether it goes through one all-reduce as it is."""
        self.staged = not (self.served or self.dense)
        """Whether its path is a sequence of collectives with encodes and decodes between them."""
        self.coded = coded = self.served and planned.owner == local
        """Whether this worker encodes and decodes it. Another only takes part in collectives and needs no codec state."""
        self.buffer = job.tensors[planned.slices[0].tensor].buffer
        self.in_updates = not self.dense and in_updates(codec)
        self.in_means = not self.dense and codec.keeps
        """Whether gradients are coded as parts of the mean, so that what is owed is worth the same when weights change."""
        self.means = self.served and self.buffer and of_means(codec)
        """Whether a server makes the mean of what workers have, in place of a sum of parts (Flag.MEAN)."""
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
        every = host if on_host and not self.means else torch.empty(floats, dtype=dtype, device=device)
        self.host_y, every_y = self.host, every
        if coded and self.in_means:
            back = aligned(0, 4 * floats, pinned=not on_host and staged) if on_host or staged else torch.empty(0)
            self.host_y = back.view(torch.float32)[: self.numel]
            if on_host or self.on_device:
                every_y = back.view(torch.float32) if on_host else torch.empty(floats, device=device)
        self._reader: Reads | None = None
        self.sparse: SparseResult | None = None
        """The last result, where it is kept as entries."""
        self._decoder: OneRound | None = None
        self.coded_result: CodedResult | None = None
        """The last result, where it is kept as it came."""
        self.lie_in(every, every_y)
        self.agreed = SharedBuffers(self.x, self.layout) if self.buffer else None
        if coded:
            self.state = codec.init(self.spec)
            seed(self.state, job.digest(), planned.id, rank)
            self.bound = codec.bound(self.spec)
            whole = block[: PAYLOAD_HEADER + 4 * self.numel]
            if self.on_device:
                place(self.state, device)
                self._pinned = [torch.empty(self.bound, dtype=torch.uint8, pin_memory=not on_host) for _ in range(2)]
                self._there = [devices.words(self.bound, device) for _ in range(2)]
                self.payload = self._pinned[0].numpy().data
            else:
                self.payload = (whole if codec.in_place else aligned(0, self.bound, pinned=False)).numpy().data
        else:
            self.state, self.bound, self.payload = {}, 0, memoryview(b"")
        self.coders: list[tuple[tuple[int, int], State]] = [((0, self.numel), self.state)] if coded else []
        """The elements and the state of each encode whose debts are this worker's to pay."""
        self.carry: torch.Tensor | None = None
        self.carried: torch.Tensor | None = None
        self.entries: Entries | None = None
        """Where it does not send the same ratio in every step."""
        self.codes = False
        """Whether the last exchange has coded something here."""
        self.sound = True
        """Whether the last average was finite."""
        self.unapplied = 0
        """One bit per slice: the average of the last exchange was not applied there."""
        self.undone = 0
        """The same, taken back here; the server still has to hear of it."""
        self.rewind()
        self.reset()

    def lie_in(self, every: torch.Tensor, every_y: torch.Tensor) -> None:
        """From now on its elements and their tail are there, and come back there. What does not code may lie beside others."""
        self.all, self.all_y = every, every_y
        self.x, self.tail = every[: self.numel], every[self.numel :]
        self._y, self.tail_y = every_y[: self.numel], every_y[self.numel :]
        on_host = every.device.type == "cpu"
        self._facts = self.tail.numpy() if on_host else None
        self._facts_y = self.tail_y.numpy() if on_host else None
        """The same memory where the host can reach it: a small tensor costs as much time as thousands of elements."""
        self.views, self.views_y = self.layout.views(self.x), self.layout.views(self._y)

    @property
    def y(self) -> torch.Tensor:
        """The sum that came back."""
        if self.coded_result is not None:
            return self.coded_result.whole()
        if self.sparse is not None and not self._y.numel():
            self._y = self.sparse.whole()
        return self._y

    def keep_coded(self, recycle: Callable[[memoryview], None]) -> None:
        """From now on results stay as they came, where they can be decoded later. For the only rank of a node, before its first
        step. `recycle` takes back their bodies."""
        if self.coded and self.in_means and not self.late and not self.buffer and self.x.device.type == "cpu":
            self._decoder = codec_of_results(self.codec)
        if self._decoder is not None:
            self._recycle = recycle
            self._no_y()

    def _no_y(self) -> None:
        self._y = self.host_y = self.all_y = self.tail_y = torch.empty(0)
        self._facts_y, self.views_y = None, []

    def keep_entries(self) -> None:
        """From now on results stay entries, where they come as that. For the only rank of a node, ahead of its first step."""
        if self.coded and not self.late and not self.buffer and self.x.device.type == "cpu" and self.numel <= MOST_NUMEL:
            self._reader = reader_of(self.codec)
        if self._reader is not None:
            self._decoder = None
            self._no_y()

    def reset(self) -> None:
        """Before a step's gradients. What its exchange needs stays: a late bucket's goes on behind the step."""
        self.sources: list[torch.Tensor | None] = [None] * self.nslices
        self.marks: list[object] = []
        """Points in the callers' streams behind which the sources are final."""
        self.waiting = self.nslices

    def rewind(self) -> None:
        """Before an exchange."""
        self.step = 0
        self.started = self.done = False
        self.finite = True
        self.weight, self.used = 0.0, 0
        self.scaled: float | torch.Tensor = 1.0
        """What y has been multiplied by since it came back."""
        self.spent = 0
        """One bit per slice: an optimizer has stepped with this exchange's average, ahead of the end of its step."""
        self.said = 0  # the slices of which the server was told in it that the exchange before was not applied there
        self.abandoned = ""
        """Who broke the step off, and why: then there is no sum."""
        self.total = 0.0
        """The weight of all workers that this exchange's gradients were taken as a part of."""
        self.told: float | None = None
        """What all workers weigh, where only a device knows it from the exchange and somebody has said so to the host."""

    def gather(self, factor: float, weight: float, worth: float = 1.0) -> None:
        """x = gradients times factor; zeros where there is none, and everywhere if they weigh nothing (a mean over no samples
        is NaN, and NaN times 0 would stay it). `worth` is what a debt of 1 is in x."""
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
        if self.late:  # its gradients are others when the result is used; on a GPU nobody waits for these
            self._put_in = torch.stack([view.sum() for view in self.views])

    def _mark_changed(self, there: int) -> int:
        """Buffers: which slices this rank has changed, of those that are there. Only a frame's header needs it on the host."""
        assert self.agreed is not None
        mask = torch.tensor([there >> i & 1 for i in range(self.nslices)], device=self.x.device)
        self.changed = self.agreed.changed(self.x) * mask
        return sum(1 << i for i, flag in enumerate(self.changed.tolist()) if flag) if self.served else there

    def flags(self) -> torch.Tensor:
        """By slice, above 0 where some rank used it: where the exchange has left that, on the device of x."""
        if not self.served:
            return self.tail_y[:-1]
        return torch.tensor([self.used >> i & 1 for i in range(self.nslices)], device=self.x.device)

    def write_tail(self, tail: torch.Tensor) -> None:
        """Puts used and weight where a collective will sum them, or share them."""
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
        """Takes `used` from the tail, after a collective has summed it. Needless, and skipped, where every slice was used."""
        if self.used != self.all_slices or (self.agreed is not None and self.served):
            self.used = sum(1 << i for i, flag in enumerate(self.tail_y[:-1].tolist()) if flag > 0)

    def read_result(self) -> None:
        """The owner's result has been handed on to this worker: takes its facts. What the owner found not finite is NaN."""
        self.weight = float(self.tail_y[-1])
        self.used = sum(1 << i for i, flag in enumerate(self.tail_y[:-1].tolist()) if flag > 0)
        self.finite = not math.isnan(self.weight) and bool(torch.isfinite(self.y[:1]).all())

    @property
    def read_here(self) -> bool:
        """Whether the host reads what a collective brings at no cost."""
        return self._facts_y is not None

    def over_weight(self, scale: float) -> float | torch.Tensor:
        """scale / summed weight of a collective; on a device as a tensor, so that nothing waits for it."""
        if self.told == 0.0:
            raise ZeroDivisionError
        return scale / (self.tail_y[-1] if self._facts_y is None else float(self._facts_y[-1]))

    def summed_weight(self) -> float:
        """What all workers weighed in the exchange whose result is in y; 0 where only a device knows."""
        if self.served:
            return self.weight
        return self.told or 0.0 if self._facts_y is None else float(self._facts_y[-1])

    def op(self, coding: str) -> str:
        """"encode" or "decode" as paths spell it."""
        return f"{coding}@{'gpu' if self.on_device else 'cpu'}"

    def to_mean(self) -> None:
        """x, what this node's ranks weighed together, becomes the mean of theirs, where a server weighs it."""
        if self.means:
            self.x.div_(self.weight or 1.0)
            if self.x.device.type == "cpu":
                self.host.copy_(self.x)

    def encode(self) -> int:
        """Round 0: x to payload."""
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
        """Round 0 anew, as parts of another total weight than that first taken. So are debts of other ranks of this node, which
        x holds, too; each of them carries on what is missing (`carry_on`)."""
        x = self.coded_x
        self.codec.undo(self.state, x)
        carried = 0.0 if self.carried is None else self.carried.to(x.device)
        x.sub_(carried).mul_(self.total / total).add_(carried)
        self.total = total
        return self.encode()

    @property
    def coded_x(self) -> torch.Tensor:
        """What the codec is given."""
        return self.x if self.on_device else self.host

    @property
    def result(self) -> torch.Tensor:
        """What came back, where it is read at least cost."""
        return self.host_y if self._reader is None and self._decoder is None and not self.on_device else self.y

    def slice_of_result(self, number: int) -> torch.Tensor:
        """The values of a slice that came back, without those that are zeros where it came as entries."""
        return self.layout.views(self.y)[number] if self.sparse is None else self.sparse.entries(number)[1]

    def encode_next(self, r: int, result: Buffer) -> int:
        return self.codec.next(r, result, self.state, self.payload)

    def decode(self, result: memoryview) -> None:
        """The last round's result to x."""
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
        """Whether `decode` has kept the result's body: the bucket recycles that itself."""
        return self.coded_result is not None

    def let_go(self) -> None:
        """Between two exchanges: where nothing of the last one can be taken back, its memory goes back to the system."""
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
        read = reader.read(result, self.numel)
        self.finite = read is not None
        self.sparse = None if read is None else SparseResult(self.layout, *read)
        self._y = torch.empty(0) if read is not None else torch.full((self.numel,), math.nan)
        self.views_y = [] if read is not None else self.layout.views(self._y)

    def look(self) -> None:
        """Whether the sum is finite, where nobody has decoded anything that says so."""
        self.finite = all_finite(self.y)

    def late_not_finite(self) -> int:
        """The same as `own_not_finite`, of the exchange whose result has come a step late."""
        bad = [s.tensor for s, there in zip(self.slices, self._put_in.isfinite().tolist(), strict=True) if not there]
        return bad[0] if bad else -1

    def own_not_finite(self) -> int:
        """The first tensor of which what this worker put in is not finite; -1 if there is none. Ahead of `commit`, which may
        overwrite it."""
        for s, source in zip(self.slices, self.sources, strict=True):
            if source is not None:
                values = source.detach()
                if (s.start, s.stop) != (0, values.numel()):
                    values = values.reshape(-1)[s.start : s.stop]
                if not all_finite(values):
                    return s.tensor
        return -1

    def commit(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> None:
        """targets = y times factor; None leaves out a slice. Buffers stay what they are if y is not finite. To be called
        once."""
        if self.agreed is not None:
            self.agreed.commit(self.y, self.views_y, self.flags(), factor, targets)
            return
        if (kept := self.coded_result or self.sparse) is not None:
            kept.write(factor, targets)
            return
        pairs = self.layout.pairs(targets, self.views_y)
        if self.numel <= SMALL_NUMEL * len(pairs):
            self.y.mul_(factor)
            self.scaled = factor
            torch._foreach_copy_([target.detach() for _, target in pairs], [view for view, _ in pairs])
            return
        for view, target in pairs:
            torch.mul(view, factor, out=target.detach())

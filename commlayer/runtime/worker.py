"""Executes a plan, step after step: gradients in, averages out. Knows flows, lanes and a transport; no autograd, no model.

    ready(tensor, gradient)      from the hooks, as gradients become final
    finish(leftovers, deadline)  when backward is over: waits for every bucket, then the caller commits or is raised at

The first error of a step latches: what still runs ends, no gradient is overwritten, residuals get back what was sent, and every
later call raises the same error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence

import torch

from commlayer.compressors import runs_on
from commlayer.compressors.codec import Codec
from commlayer.errors import CommError, CorruptFrame, DeadlineExceeded
from commlayer.records import Bucket, Job, Plan, Spec
from commlayer.runtime.conductor import Conductor
from commlayer.runtime.counters import Counters
from commlayer.runtime.flow import Flow
from commlayer.runtime.lanes import Lane
from commlayer.runtime.staging import Staging
from commlayer.transport.groups import Groups, Pending
from commlayer.transport.protocol import SERVER_BASE, Flag, Handle, Header, Kind, Transport, key, peer_name

FOREVER_S = 86400.0
"""For a wait that others bound: the training thread's deadline latches an error, which ends it."""
DRAIN_S = 5.0
"""How long a failed step waits for a lane to end the call it is in, before residuals are put right."""


class Worker:
    """One rank's execution of one plan in one view."""

    def __init__(
        self, job: Job, plan: Plan, codecs: Mapping[int, Codec], device: torch.device,
        *, rank: int = 0, generation: int = 1, transport: Transport | None = None, groups: Groups | None = None,
        on_device: Container[int] = (), recycle: Callable[[memoryview], None] = lambda _: None,
        explain: Callable[[BaseException], BaseException] = lambda e: e,
    ) -> None:
        """`on_device`: buckets whose codec runs where the gradients are, if it can. `recycle` takes back the bodies of
        results that have been decoded; `explain` may know a better error for one.
        """
        self.job, self.plan, self.rank, self.generation = job, plan, rank, generation
        self._transport, self._groups, self._recycle = transport, groups, recycle
        self._explain = explain
        self._local = rank % plan.ranks_per_node
        self._shared = plan.ranks_per_node > 1
        self.counters = Counters()
        self.flows = [
            Flow(b, job, codecs[b.id], device, len(plan.buckets) - 1 - i, coded=b.path == "service" and b.owner == self._local,
                 rank=rank, on_device=b.id in on_device and runs_on(codecs[b.id], device))
            for i, b in enumerate(plan.buckets)
        ]
        # Whether a step that turns out non-finite must be given back: some codec keeps residuals. The same on all ranks.
        self._tracked = any(codecs[b.id].init(Spec((0,))) for b in plan.buckets if b.path == "service")
        self._by_tensor: list[list[tuple[Flow, int]]] = [[] for _ in job.tensors]
        for flow in self.flows:
            for i, s in enumerate(flow.bucket.slices):
                self._by_tensor[s.tensor].append((flow, i))
        self._service = [f for f in self.flows if f.bucket.path == "service"]
        self._mine = [f for f in self.flows if f.coded]
        self._staging = Staging(device)
        self._conductor = Conductor([f for f in self.flows if self._collective(f)], self._issue)
        self._pending: dict[int, Pending] = {}
        self._encode = Lane("encode", self._latch)
        self._decode = Lane("decode", self._latch)
        self._lock = threading.Lock()
        self._all_in = threading.Event()
        self._seen = [False] * len(job.tensors)
        self.error: BaseException | None = None
        self._abandoned = False
        self.step = 0
        self.weight = 1.0
        self.scale = 1.0
        self._undone = False
        self._stalled: dict[int, tuple[int, ...]] = {}
        self._reset()

    # ---- a step, from the side of the gradients

    def ready(self, tensor: int, gradient: torch.Tensor) -> None:
        """The gradient of that tensor is final for this step. It is read until `finish` returns."""
        self.check()
        if self._seen[tensor]:
            raise RuntimeError(
                f"gradient of {self.job.tensors[tensor].name} became final twice in one backward pass: activation "
                "checkpointing with use_reentrant=True does this; pass use_reentrant=False"
            )
        self._seen[tensor] = True
        self._feed(tensor, gradient)

    def _feed(self, tensor: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and gradient.layout is not torch.strided:
            raise ValueError(f"gradient of {self.job.tensors[tensor].name} is {gradient.layout}, allowed: dense ones; make its "
                             "module with sparse=False")
        if gradient is not None and not gradient.is_contiguous() and len(self._by_tensor[tensor]) > 1:
            gradient = gradient.contiguous()  # a cut tensor is read by element ranges
        mark = self._staging.mark()
        for flow, i in self._by_tensor[tensor]:
            flow.sources[i] = gradient
            flow.marks.append(mark)
            flow.waiting -= 1
            if flow.waiting == 0:
                self._dispatch(flow)

    def finish(self, leftovers: Sequence[torch.Tensor | None], deadline_s: float) -> None:
        """Backward is over. `leftovers[t]` is the gradient of a tensor that was not announced, or None.

        Returns when every bucket's sum is here; raises CommError naming who is missing when the deadline passes.
        """
        begin = time.monotonic()
        self.check()
        for tensor, seen in enumerate(self._seen):
            if not seen:
                self._feed(tensor, leftovers[tensor])
        deadline = begin + deadline_s
        try:
            self._wait(deadline)
        except BaseException as error:
            self._latch(error)
        self.check()
        self.counters.exposed_s += time.monotonic() - begin

    def commit(self, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes the averages into `targets` (None: leave out) and ends the step."""
        finite = True
        # A cut tensor is written by element ranges, which only a contiguous one has.
        cut = {t: torch.empty_like(target, memory_format=torch.contiguous_format) for t, target in enumerate(targets)
               if target is not None and len(self._by_tensor[t]) > 1 and not target.is_contiguous()}
        into = [cut.get(t, target) for t, target in enumerate(targets)]
        for flow in self.flows:
            if self._tracked and not flow.coded:
                # All-reduced here, or decoded by another rank of this node, whose flagged result is NaN throughout.
                flow.finite = bool(torch.isfinite(flow.x if flow.bucket.path == "allreduce" else flow.x[0]).all())
            if flow.buffer and not flow.finite:
                continue  # a buffer that some rank has as NaN stays what it is on each; the optimizer does not read it
            finite = finite and flow.finite
            flow.commit(self._factor(flow), [into[s.tensor] for s in flow.bucket.slices])
        for t, whole in cut.items():
            target = targets[t]
            assert target is not None
            target.detach().copy_(whole)
        # What the optimizer will skip is given back. The servers learn it with the next step's frames.
        self._undone = self._tracked and not finite
        if self._undone:
            for flow in self._mine:
                flow.undo()
        self.step += 1
        self.counters.steps += 1
        self._reset()

    def _factor(self, flow: Flow) -> float | torch.Tensor:
        """From the weighted sum to the average."""
        scale = self._scale_of(flow)
        with contextlib.suppress(ZeroDivisionError):
            return flow.over_weight(scale) if flow.bucket.path == "allreduce" else scale / flow.weight
        error = ValueError(f"step {self.step}: every worker has weight 0, so there is no average: skip the step on all, or "
                           "give one a weight")
        self._latch(error)
        raise error

    def used(self) -> list[bool]:
        """After `finish`: which tensors any worker had a gradient for."""
        used = [False] * len(self.job.tensors)
        for flow in self.flows:
            for i, s in enumerate(flow.bucket.slices):
                used[s.tensor] |= bool(flow.used >> i & 1)
        return used

    def _reset(self) -> None:
        for flow in self.flows:
            flow.reset()
        self._seen = [False] * len(self.job.tensors)
        self._conductor.reset()
        self._pending.clear()
        self._stalled.clear()
        self._left = len(self._mine)
        self._all_in.clear()
        if not self._left:
            self._all_in.set()

    # ---- the way of a bucket

    def _collective(self, flow: Flow) -> bool:
        """Whether it begins with a collective: an all-reduce, or the sum inside the node."""
        return flow.bucket.path == "allreduce" or self._shared

    def _scale_of(self, flow: Flow) -> float:
        """Gradients are coded without the loss scale, or a change of scale would falsify every residual."""
        return 1.0 if flow.buffer else self.scale

    def _dispatch(self, flow: Flow) -> None:
        if not self._collective(flow):
            self._encode.put(lambda: self._push(flow, gather=True))
            return
        try:
            self._conductor.ready(flow)
        except BaseException as error:
            self._latch(error)
            raise

    def _issue(self, flow: Flow) -> None:
        """Called in plan order, on the thread that ran the last hook."""
        self._staging.catch_up(flow)
        flow.gather(self.weight / self._scale_of(flow), self.weight)
        flow.write_tail()
        if self._groups is None:
            return  # alone: the sum is what it is
        if flow.bucket.path == "allreduce":
            self._pending[flow.bucket.id] = self._groups.allreduce(flow.all)
            return
        pending = self._groups.reduce(flow.all, flow.bucket.owner)
        if flow.bucket.owner == self._local:
            self._encode.put(lambda: self._push(flow, gather=False, after=pending))
        else:
            self._pending[flow.bucket.id] = pending

    def _push(self, flow: Flow, *, gather: bool, after: Pending | None = None) -> None:
        """Encode lane."""
        if self.error is not None:
            return
        begin, begin_s = time.perf_counter(), time.monotonic()
        with self._staging.lane(flow):
            if after is not None:
                after.wait(begin_s + FOREVER_S, lambda: self.error)
                flow.weight = float(flow.tail[-1])
                flow.used = sum(1 << i for i, flag in enumerate(flow.tail[:-1].tolist()) if flag > 0)
            if gather:
                flow.gather(self.weight / self._scale_of(flow), self.weight)
            self._staging.to_host(flow)
            nbytes = flow.encode()
        self.counters.encode_s += time.perf_counter() - begin
        self._send(flow, 0, nbytes)

    def _send(self, flow: Flow, r: int, nbytes: int) -> None:
        assert self._transport is not None
        server = SERVER_BASE + flow.bucket.server
        flags = Flag.UNDO if self._undone else Flag.NONE
        header = Header(
            Kind.PUSH, self.generation, self.step, flow.bucket.id, round=r, codec=flow.codec.id,
            sender=self.rank, order=flow.order, flags=flags, weight=flow.weight, used=flow.used,
        )
        answer = self._transport.recv(server, key(header._replace(kind=Kind.RESULT)))
        answer.on_done(lambda handle: self._arrived(flow, r, handle))
        self._transport.send(server, header, flow.payload[:nbytes]).on_done(self._sent)
        self.counters.sent_nbytes += nbytes

    def _sent(self, handle: Handle) -> None:
        if (error := handle.error()) is not None:
            self._latch(error)

    def _arrived(self, flow: Flow, r: int, handle: Handle) -> None:
        """A receiver thread: hands over and returns."""
        if (error := handle.error()) is not None:
            self._latch(error)
        else:
            self._decode.put(lambda: self._take(flow, r, handle))

    def _take(self, flow: Flow, r: int, handle: Handle) -> None:
        """Decode lane."""
        if self.error is not None:
            return
        begin = time.perf_counter()
        message = handle.message()
        self.counters.received_nbytes += len(message.body)
        try:
            if r + 1 < len(flow.codec.rounds):
                nbytes = flow.encode_next(r, message.body)
            else:
                with self._staging.way_back():
                    flow.decode(message.body)
                flow.weight, flow.used = message.header.weight, message.header.used
        except CorruptFrame as error:
            who = peer_name(message.peer)
            raise CorruptFrame(error.what, peer=who, step=self.step, bucket=flow.bucket.id) from None
        self._recycle(message.body)
        self.counters.decode_s += time.perf_counter() - begin
        if r + 1 < len(flow.codec.rounds):
            self._send(flow, r + 1, nbytes)
            return
        self._staging.to_device(flow)
        flow.done = True
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._all_in.set()

    def _wait(self, deadline: float) -> None:
        """Waits for all buckets, then shares the results inside the node, in plan order on every rank."""
        if not self._all_in.wait(max(0.0, deadline - time.monotonic())):
            raise self._overdue()
        if self.error is not None:
            return
        for flow in self.flows:
            if (pending := self._pending.get(flow.bucket.id)) is not None:
                pending.wait(deadline, lambda: self.error)
                flow.read_used()
        self._staging.join()
        if self._shared:
            assert self._groups is not None
            shares = []
            for flow in self._service:
                if flow.bucket.owner == self._local:
                    flow.write_tail()
                shares.append((flow, self._groups.broadcast(flow.all, flow.bucket.owner)))
            for flow, share in shares:
                share.wait(deadline, lambda: self.error)
                flow.weight = float(flow.tail[-1])
                flow.read_used()

    # ---- what the session and checkpoints ask

    def begins(self) -> bool:
        """Whether the next gradient is the first of its step."""
        return not any(self._seen)

    def reorder(self, places: Mapping[int, int]) -> None:
        """Order on the wire by place in the forward pass; buckets that it did not see keep reversed ready order behind."""
        far = len(places)
        first = [min((places.get(s.tensor, far) for s in f.bucket.slices), default=far) for f in self.flows]
        ranked = sorted(range(len(self.flows)), key=lambda i: (first[i], self.flows[i].order))
        for order, i in enumerate(ranked):
            self.flows[i].order = order

    @property
    def coded(self) -> list[Flow]:
        """The flows that this worker encodes."""
        return self._mine

    @property
    def undone(self) -> bool:
        """Whether the servers still have to hear that the last step was abandoned."""
        return self._undone

    def settle(self) -> None:
        """The servers have heard it by another way than the next step's frames."""
        self._undone = False

    def buckets_of(self, server: int) -> list[Bucket]:
        """The buckets that a server sums."""
        return [f.bucket for f in self._service if f.bucket.server == server]

    # ---- failure

    def _overdue(self) -> DeadlineExceeded:
        flow = next((f for f in self._mine if not f.done), self._mine[0])
        place = {"step": self.step, "bucket": flow.bucket.id}
        server = peer_name(SERVER_BASE + flow.bucket.server)
        if not flow.started:
            return DeadlineExceeded("not summed inside the node before the deadline", peer="a rank of this node", **place)
        if missing := self._stalled.get(flow.bucket.id, ()):
            names = ", ".join(peer_name(m) for m in missing)
            return DeadlineExceeded(f"did not contribute before the deadline ({server} waits for it)", peer=names, **place)
        return DeadlineExceeded("no result before the deadline", peer=server, **place)

    def stalled(self, bucket: int, step: int, missing: tuple[int, ...]) -> None:
        """A server says whom it waits for."""
        if step == self.step:
            self._stalled[bucket] = missing

    def _latch(self, error: BaseException) -> None:
        with self._lock:
            if self.error is None:
                self.error = error
            self._all_in.set()

    def fail(self, error: BaseException) -> None:
        """From outside: a peer is known to be gone, or the script broke off in the middle of a step."""
        self._latch(error)

    def check(self) -> None:
        """Raises the error that has latched. The first time, residuals get back what the broken step sent."""
        if self.error is None:
            return
        if not self._abandoned:
            self._abandoned = True
            self.error = self._explain(self.error)
            # A lane that is stuck may be inside a codec: then its residual cannot be put right.
            if self._encode.drain(DRAIN_S) and self._decode.drain(DRAIN_S):
                for flow in self._mine:
                    flow.undo()
        raise self.error

    def close(self) -> None:
        self._latch(CommError("the session is closed"))
        self._encode.close(1.0)
        self._decode.close(1.0)

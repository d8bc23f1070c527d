"""Executes a plan, step after step: gradients in, averages out. Knows flows, lanes and a transport; no autograd, no model.

    ready(tensor, gradient)      from the hooks, as gradients become final
    finish(leftovers, deadline)  when backward is over: waits for every bucket, then the caller commits or is raised at

The first error of a step latches: what still runs ends, no gradient is overwritten, residuals get back what was sent, and every
later call raises the same error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from commlayer.compressors.codec import Codec
from commlayer.errors import CommError, DeadlineExceeded, StepAbandoned
from commlayer.observe import Recorder
from commlayer.records import Job, Plan
from commlayer.runtime.abandoned_step import broken_off
from commlayer.runtime.collective_order import CollectiveOrder
from commlayer.runtime.counters import Counters
from commlayer.runtime.device_codecs import device_buckets
from commlayer.runtime.ended import Ended
from commlayer.runtime.flow import Flow
from commlayer.runtime.forward_order import reorder
from commlayer.runtime.late_buckets import LateBuckets
from commlayer.runtime.model_job import check_dense
from commlayer.runtime.routes.service import Service
from commlayer.runtime.routes.staged import Staged
from commlayer.runtime.staging import Staging
from commlayer.runtime.stopwatch import Stopwatch
from commlayer.runtime.strided import whole
from commlayer.runtime.unapplied import Unapplied
from commlayer.runtime.units import Units
from commlayer.transport.groups import GROUP, Groups, Pending
from commlayer.transport.protocol import Transport

DRAIN_S = 5.0
"""How long a failed step waits for a lane to end the call it is in, before residuals are put right."""


def _nothing() -> None:
    """Nobody watches."""


class Worker(Units, Unapplied):
    """One rank's execution of one plan in one view."""

    def __init__(
        self, job: Job, plan: Plan, codecs: Mapping[int, Codec], device: torch.device,
        *, rank: int = 0, members: int = 0, generation: int = 1, transport: Transport | None = None,
        groups: Groups | None = None, recycle: Callable[[memoryview], None] = lambda _: None,
        explain: Callable[[BaseException], BaseException] = lambda e: e,
    ) -> None:
        """`members` workers are in the view (0: those of the groups). `recycle` takes back the bodies of results that have been
        decoded; `explain` may know a better error for one."""
        self.job, self.plan, self.device, self.rank, self.generation = job, plan, device, rank, generation
        super().__init__(members or (groups.world if groups is not None else 1), shared=plan.ranks_per_node > 1)
        self._groups = groups
        self._explain = explain
        self._local = rank % plan.ranks_per_node
        self.counters = Counters()
        on_device = device_buckets(plan, codecs, device)
        self.flows = [
            Flow(b, job, codecs[b.id], device, len(plan.buckets) - 1 - i, coded=b.path == "service" and b.owner == self._local,
                 rank=rank, on_device=b.id in on_device)
            for i, b in enumerate(plan.buckets)
        ]
        self.tracked = any(flow.in_means for flow in self.flows)
        """Whether a step whose averages are not applied must be taken back. The same on all ranks."""
        self._by_tensor: list[list[tuple[Flow, int]]] = [[] for _ in job.tensors]
        for flow in self.flows:
            for i, s in enumerate(flow.bucket.slices):
                self._by_tensor[s.tensor].append((flow, i))
        self._service = [f for f in self.flows if f.bucket.path == "service"]
        self._mine = [f for f in self.flows if f.coded]
        self.late = LateBuckets(self.flows)
        self._by_stages = [f for f in self.flows if f.bucket.path not in ("service", "allreduce")]
        self._staging = Staging(device)
        self._conductor = CollectiveOrder([f for f in self.flows if self._collective(f)], self._issue)
        self._pending: dict[int, Pending] = {}
        self._issued: dict[int, float] = {}
        self._last = next((f for f in reversed(self.flows) if f.held is None), None)
        self._lock = threading.Lock()
        self._all_in = threading.Event()
        self._seen = [False] * len(job.tensors)
        self.error: BaseException | None = None
        self.places: Mapping[int, int] = {}
        """Where the forward pass needs each tensor, as far as it was seen."""
        self._abandoned = False
        self.step = 0
        self.ended = Ended()
        self._begun = self._ending = self.tentative = False
        self.settle: Callable[[], None] = _nothing
        """Who watches what becomes of averages tells it of those that were cleared: see `cleared`."""
        self._deadline_s = 0.0
        self.recorder = Recorder()
        self.stopwatch = Stopwatch(device)
        self._to_servers = Service(self, transport, recycle, self._staging)
        self.stalled = self._to_servers.stalled
        self._staged = Staged.of(self._by_stages, codecs, plan, groups, self.latch, lambda: self.error, self.recorder)
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
        self.recorder.tensor(tensor)
        self._feed(tensor, gradient)

    def _feed(self, tensor: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            check_dense(self.job.tensors[tensor].name, gradient)
            if not gradient.is_contiguous() and len(self._by_tensor[tensor]) > 1:
                gradient = gradient.contiguous()  # a cut tensor is read by element ranges
        if not self._begun:
            self._begun = True
            if (missed := self.ended.begin(self.step)) is not None:
                self.latch(missed)
                self.check()
            self._staged.weigh(self.weight)
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
        self.stopwatch.stop(self.counters.steps)
        self.recorder.mark("backward")
        self.check()
        ready, self._ending = self._last is not None and self._last.waiting == 0, True
        for tensor, seen in enumerate(self._seen):
            if not seen:
                self._feed(tensor, leftovers[tensor])
        if ready and self._last is not None:
            self._dispatch(self._last)
        self._staged.share_tails()
        deadline = begin + deadline_s
        self._deadline_s = deadline_s
        try:
            self._wait(deadline)
        except BaseException as error:
            self.latch(error)
        self.check()
        if reason := broken_off(self.flows, here=self.broken):
            self._drop(reason)
        self.counters.exposed_s += time.monotonic() - begin
        self.recorder.mark("summed")

    def commit(self, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes the averages into `targets` (None: leave out) and ends the step."""
        finite = True
        keeps = self.keeps
        with whole(targets, lambda tensor: len(self._by_tensor[tensor]) > 1) as into:
            for flow in self.flows:
                if flow.held is not None:
                    continue
                if keeps and not flow.coded:
                    # All-reduced here, or decoded by another rank of this node, whose flagged result is NaN throughout.
                    flow.finite = bool(torch.isfinite(flow.y[0] if flow.bucket.path == "service" else flow.y).all())
                if flow.buffer and not flow.finite:
                    continue  # a buffer that some rank has as NaN stays what it is on each; the optimizer does not read it
                finite = finite and flow.finite
                flow.commit(self._factor(flow, flow.weight), [into[s.tensor] for s in flow.bucket.slices])
            finite = self.late.commit(self._factor, into) and finite
        try:
            self.learn(next((w for f in self.flows if f.held is None and (w := f.summed_weight())), 0.0))
        except ValueError as error:
            self.latch(error)
            raise
        self.tentative = not finite
        for flow in self.flows:  # it is taken back ahead of the next exchange, and servers learn it with that
            flow.judge(finite=finite)
        self.late.settle(applied=finite)
        self.counters.steps += 1
        self._next()

    def _drop(self, reason: str) -> None:
        """The step is none, on any rank."""
        for flow in self.flows:
            flow.judge(finite=False)
        self.late.settle(applied=False)
        self._next()
        raise StepAbandoned(f"{reason}; the step is dropped on all workers", step=self.step - 1)

    def _next(self) -> None:
        self.step += 1
        self._reset()
        self.recorder.next()
        self.stopwatch.start()

    def _factor(self, flow: Flow, weight: float) -> float | torch.Tensor:
        if (average := self.average(flow, weight)) is not None:
            return average
        error = ValueError(f"step {self.step}: every worker has weight 0, so there is no average: skip the step on all, or "
                           "give one a weight")
        self.latch(error)
        raise error

    def used(self) -> list[bool]:
        """After `finish`: which tensors any worker had a gradient for."""
        there = {id(flow): flow.used if flow.held is None else flow.held.used for flow in self.flows}
        return [any(there[id(flow)] >> i & 1 for flow, i in places) for places in self._by_tensor]

    def drain(self) -> None:
        """Waits until no exchange is under way; late results are held then. All ranks call it behind the same step."""
        self.check()
        if (flow := self.late.wait(time.monotonic() + self._deadline_s, lambda: self.error)) is not None:
            self.latch(self._to_servers.overdue(flow))
        self.check()
        self._staging.join()
        self.late.take()

    def hand_out(self, targets: Sequence[torch.Tensor | None]) -> None:
        """After `drain`: writes what is held into `targets`, which are zeros."""
        with whole(targets, lambda tensor: len(self._by_tensor[tensor]) > 1) as into:
            self.late.settle(applied=self.late.commit(self._factor, into))

    def _reset(self) -> None:
        for flow in self.flows:
            flow.reset()
        self._begun = self._ending = False
        self.ended.over()
        self._seen = [False] * len(self.job.tensors)
        self._conductor.reset()
        self._pending.clear()
        self._staged.reset()
        self._left = len(self._mine) + len(self._by_stages)
        self._all_in.clear()
        if not self._left:
            self._all_in.set()

    # ---- the way of a bucket

    def _collective(self, flow: Flow) -> bool:
        """Whether it begins with a collective: an all-reduce, or the sum inside the node."""
        return flow.bucket.path != "service" or self._shared

    def _dispatch(self, flow: Flow) -> None:
        if flow is self._last and not self._ending:
            return  # until backward is over: should it break off, there is something left to say so with
        if flow.held is None and self._take_back(flow):
            flow.marks.append(self._staging.mark())
        if not self._collective(flow):
            self._to_servers.push(flow)
            return
        try:
            self._conductor.ready(flow)
        except BaseException as error:
            self.latch(error)
            raise

    def _issue(self, flow: Flow) -> None:
        """Called in plan order, on the thread that ran the last hook."""
        self._staging.catch_up(flow)
        self.gather(flow)
        flow.write_tail(flow.tail)
        staged = flow.bucket.path not in ("service", "allreduce")
        if self._groups is None:  # alone: the sum is what it is
            if staged:
                self.finished(flow)
            return
        if staged:
            self._staged.begin(flow, lambda: self.finished(flow))
            return
        if flow.bucket.path == "allreduce":
            self._pending[flow.bucket.id] = self._groups.allreduce(flow.all)
            self._issued[flow.bucket.id] = time.perf_counter()
            return
        pending = self._groups.reduce(flow.all, flow.bucket.owner)
        if flow.bucket.owner == self._local:
            self._to_servers.push(flow, pending)
        else:
            self._pending[flow.bucket.id] = pending
            flow.undone = 0  # its owner says it with this step's frame

    def finished(self, flow: Flow) -> None:
        """Its sum is in x."""
        flow.done = True
        if flow.held is None:
            self.gathered(flow)
        else:
            flow.held.arrived()

    def gathered(self, flow: Flow) -> None:
        """It needs nothing more for the step to end."""
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
                if flow.bucket.path == "allreduce":
                    self.recorder.add("all.allreduce", flow.bucket.id, self._issued[flow.bucket.id])
                flow.read_used()
        self._staged.read_tails(deadline)
        self._staging.join()
        if self._shared:
            assert self._groups is not None
            shares = []
            for flow in self._service:
                if flow.bucket.owner == self._local:
                    flow.write_tail(flow.tail_y)
                shares.append((flow, time.perf_counter(), self._groups.broadcast(flow.all_y, flow.bucket.owner)))
            for flow, issued, share in shares:
                share.wait(deadline, lambda: self.error)
                self.recorder.add("node.broadcast", flow.bucket.id, issued)
                flow.weight = float(flow.tail_y[-1])
                flow.read_used()

    # ---- what the session and checkpoints ask

    @property
    def keeps(self) -> bool:
        """Whether something of the last step's averages could be taken back, should they not be applied."""
        return self.tracked or bool(self.late) or any(flow.carried is not None for flow in self.flows)

    def begins(self) -> bool:
        """Whether the next gradient is the first of its step."""
        return not any(self._seen)

    def reorder(self, places: Mapping[int, int]) -> None:
        """Order on the wire by place in the forward pass; buckets that it did not see keep reversed ready order behind."""
        self.places = places
        reorder(self.flows, places)

    @property
    def coded(self) -> list[Flow]:
        """The flows that this worker encodes."""
        return self._mine + self._by_stages

    def record(self, recorder: Recorder) -> None:
        """Goes on recording there."""
        self.recorder = self._staged.recorder = recorder

    # ---- failure

    def _overdue(self) -> DeadlineExceeded:
        missing = [f for f in self._mine + self._by_stages if not f.done]
        flow = next((f for f in missing if f.held is None or f.held.blocked), missing[0])
        if flow.bucket.path == "service":
            return self._to_servers.overdue(flow)
        return DeadlineExceeded("not exchanged before the deadline", peer=GROUP, step=self.step, bucket=flow.bucket.id)

    def latch(self, error: BaseException) -> None:
        """The first stays. From outside: a peer is known to be gone, or the script broke off in the middle of a step."""
        with self._lock:
            if self.error is None:
                self.error = error
            self._all_in.set()

    def check(self) -> None:
        """Raises the error that has latched. The first time, residuals get back what the broken step sent."""
        if self.error is None:
            return
        if not self._abandoned:
            self._abandoned = True
            self.error = self._explain(self.error)
            # A lane that is stuck may be inside a codec: then its residual cannot be put right.
            if self._to_servers.drain(DRAIN_S) and self._staged.drain(DRAIN_S):
                for flow in self.flows:
                    flow.unapplied |= flow.all_slices if flow.started else 0
                    self._take_back(flow)
        raise self.error

    def close(self) -> None:
        self.latch(CommError("the session is closed"))
        for way in (self._to_servers, self._staged):
            way.close(1.0)

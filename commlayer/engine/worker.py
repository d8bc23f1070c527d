"""Executes a plan on one rank, step after step: receives gradients, exchanges buckets, writes averages.

    ready(tensor, gradient)      called by gradient hooks, as gradients become final
    finish(leftovers, deadline)  called after the backward pass: waits for every bucket; then the caller commits, or it raises

`finish` consists of `complete` and `wait`; `commit` consists of `write` and `end`. Callers that send a step in fragments call
these parts. Callers that apply buckets one by one call `take` and `write_bucket` between `complete` and `end`.

paths/table.py assigns a path to each bucket. The first error of a step is kept: running exchanges end, no gradient is
overwritten, residuals get back what was sent, and every later call raises the same error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from commlayer.cluster.collectives import Groups
from commlayer.compressors.codec import Codec
from commlayer.compressors.feedback import ResidualSlice
from commlayer.engine.bucket_assembler import BucketAssembler
from commlayer.engine.buckets import WorkerBucket, contiguous, release
from commlayer.engine.entries_sent import allot_entries
from commlayer.engine.lanes import Staging, device_buckets
from commlayer.engine.late_results import LateResults
from commlayer.engine.paths.path import BucketPath
from commlayer.engine.paths.table import Paths, routes_of
from commlayer.engine.step import Counters, Step, Stopwatch, Units, broken_off
from commlayer.errors import CommError, InvalidInput, PeerLost, StepAbandoned
from commlayer.observe.step_trace import Recorder
from commlayer.planner.buckets import fragments_of
from commlayer.records import Job, Plan
from commlayer.transport.protocol import Transport

# ---- A descriptor for attributes that are stored in a component of their object

T = TypeVar("T")


class Forwarded(Generic[T]):
    """Descriptor for an attribute that is stored in a component: after `x: Forwarded[int] = Forwarded("part", "y")` in a class,
    `object.x` reads and writes `object.part.y`."""

    def __init__(self, part: str, name: str) -> None:
        self._part, self._name = attrgetter(part), name

    def __get__(self, instance: Any, owner: type) -> T:
        return getattr(self._part(instance), self._name)  # type: ignore[no-any-return]

    def __set__(self, instance: Any, value: T) -> None:
        setattr(self._part(instance), self._name, value)


# ---- detects that a worker waits for a peer that has finished
#
# A finished peer has sent its part of every exchange that it counted. So only workers in a later exchange wait in vain.
# Without this check, ranks with unequal numbers of backward passes would wait for each other until the deadline.

UNEQUAL = ("ranks have made unequal numbers of backward passes (a loader that is a batch shorter, a pass that raised, an "
           "optimizer such as LBFGS that goes by its rank's own loss): give all the same number")


class FinishedPeers:
    """Peers that have closed their sessions in order, and the exchange that this worker is in. It detects that this worker
    waits for a peer that will not take part. The training thread stores its exchange, the heartbeat thread stores finished
    peers. Each thread writes before it reads, so at least one of them finds a missed exchange."""

    def __init__(self) -> None:
        self._first: tuple[int, str] | None = None
        self._at: int | None = None

    def hear(self, peer: str, exchanges: int) -> PeerLost | None:
        """Records that a peer has finished after `exchanges` exchanges. Returns an error if this worker is in a later exchange.
        """
        self._first = min(self._first or (exchanges, peer), (exchanges, peer))
        return self._missed()

    def begin(self, exchange: int) -> PeerLost | None:
        """Records that this worker begins an exchange, counted from 0. Returns an error if a finished peer will not take part
        in it."""
        self._at = exchange
        return self._missed()

    def over(self) -> None:
        """Records that this worker's current exchange has ended."""
        self._at = None

    def _missed(self) -> PeerLost | None:
        at, first = self._at, self._first
        if at is None or first is None or at < first[0]:
            return None
        exchanges, peer = first
        return PeerLost(f"left after {exchanges} exchanges, but this worker is in exchange {at + 1}: {UNEQUAL}",
                        code="E-UNEQUAL-PASSES", peer=peer)


# ---- records the order in which the first forward pass needs parameters

def by_place(spans: Sequence[Sequence[int]], orders: Sequence[int], places: Mapping[int, int]) -> list[int]:
    """Returns the indices of buckets in the order of sending. Buckets are sorted by the first use of their tensors in the
    forward pass, then by their previous order. `spans`: each bucket's tensors. `orders`: its previous order. `places`: each
    tensor's position in the forward pass."""
    end = len(places)
    first = [min((places.get(tensor, end) for tensor in span), default=end) for span in spans]
    return sorted(range(len(spans)), key=lambda i: (first[i], orders[i]))


def reorder(buckets: Sequence[WorkerBucket], places: Mapping[int, int], first: WorkerBucket | None = None) -> None:
    """Sets the order in which buckets are sent, by the position of their tensors in the forward pass. Tensors without a known
    position follow in their previous order. `first`, if given, precedes all others."""
    spans = [[s.tensor for s in f.slices] for f in buckets]
    for order, i in enumerate(by_place(spans, [f.order for f in buckets], places), int(first is not None)):
        buckets[i].order = 0 if buckets[i] is first else order


class ForwardOrder:
    """Records the order in which one forward pass uses the parameters; `take` returns a map from tensor number to position.

    Module hooks see a parameter only if the module that contains it directly is called. Other parameters (functional use,
    compiled graphs) are missing from the result; callers then use the reverse of the order in which gradients become final.
    """

    def __init__(self, model: nn.Module, index: dict[int, int]) -> None:
        """Adds hooks to the model's modules. `index` maps id(parameter), and id(buffer) if the order of buffers matters, to the
        tensor's number."""
        self._places: dict[int, int] = {}
        self._handles = []
        for module in model.modules():
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            numbers = [index[id(tensor)] for tensor in tensors if id(tensor) in index]
            if numbers:
                self._handles.append(module.register_forward_pre_hook(self._hook(numbers)))

    def _hook(self, numbers: list[int]) -> Callable[[nn.Module, object], None]:
        def seen(_module: nn.Module, _args: object) -> None:
            if torch.compiler.is_compiling():
                return  # in a graph, modules are not called one by one
            for number in numbers:
                self._places.setdefault(number, len(self._places))

        return seen

    def take(self) -> dict[int, int]:
        """Returns the recorded positions by tensor number, and removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        return self._places


# ---- takes back what a step coded but no optimizer applied, after its averages are written
#
# Each bucket has one bit per slice for an average that was not applied. The rollback happens before the bucket's next
# exchange, and that exchange reports it to the server. `undone` does it between two steps.

DRAIN_S = 5.0
"""Seconds that a failed step waits for a lane to end its current call, before residuals are corrected."""


def _no_watch() -> None:
    """Does nothing: the default of `settle` if the script's use of averages is not observed."""


class Unapplied:
    """Base class of Worker: rolls back averages of the last step that no optimizer applied."""

    buckets: list[WorkerBucket]
    turns: list[list[WorkerBucket]]
    _by_tensor: list[list[tuple[WorkerBucket, int]]]
    _in_time: list[WorkerBucket]
    _routes: Paths
    settle: Callable[[], None] = staticmethod(_no_watch)
    """Makes the observer of averages report those that the script has cleared; see `cleared`."""
    intact = True
    """Whether residuals were restored to their values before the failed step. False: an encoder was stuck, so they are unknown.
    """
    tentative = False
    """Whether some average of the last step was not finite. Such a step is skipped, unless an optimizer steps all the same."""

    def cleared(self, tensor: int) -> None:
        """Marks the last step's average of a tensor as not applied, because the script discarded it."""
        for bucket, i in self._by_tensor[tensor]:
            bucket.unapplied |= 1 << i

    def applied(self, tensors: Collection[int], turn: int | None = None) -> None:
        """Marks the averages of these tensors as applied by an optimizer, although other averages of the step were not finite.
        `turn`: only buckets of this fragment; None: all."""
        if not self.tentative:
            return
        for bucket in self.buckets if turn is None else self.turns[turn]:
            for i, s in enumerate(bucket.slices if bucket.sound else ()):
                if s.tensor in tensors:
                    bucket.unapplied &= ~(1 << i)

    def anything(self, tensor: int) -> bool:
        """Whether the last step's average of a tensor has nonzero values. Results that arrive one step late count as nonzero.
        """
        return any(bucket.late or bool(bucket.slice_of_result(i).any()) for bucket, i in self._by_tensor[tensor])

    def spent(self, tensors: Collection[int]) -> None:
        """Marks averages of an unfinished step as applied by an optimizer already, so that a failure of the step does not roll
        them back."""
        for tensor in tensors:
            for bucket, i in self._by_tensor[tensor]:
                bucket.spent |= 1 << i

    def undone(self) -> dict[int, int]:
        """Rolls back the last step's averages that were not applied. Returns, for each bucket id, a bit mask of slices whose
        rollback the servers do not know yet. Equal on all ranks."""
        self.settle()
        for bucket in self._in_time:
            self._routes.of[bucket.id].undo(bucket)
        return {bucket.id: bucket.undone for bucket in self.buckets if bucket.undone and bucket.served}

    def unapplied(self) -> tuple[int, int]:
        """Which of the last averages were not applied: a bit mask over the slices of all buckets in order, and the number of
        slices."""
        self.settle()
        bits = slices = 0
        for bucket in self.buckets:
            bits, slices = bits | bucket.unapplied << slices, slices + bucket.nslices
        return bits, slices

    def take_over(self, bits: int) -> None:
        """Sets which of the last averages were not applied, from the bit mask that another rank's `unapplied` returned."""
        for bucket in self.buckets:
            bucket.unapplied, bits = bits & bucket.all_slices, bits >> bucket.nslices

    def _undo_step(self) -> None:
        """Returns what the failed step has sent to the residuals. If a lane does not end its call, perhaps inside a codec,
        residuals cannot be corrected and `intact` becomes False."""
        self.intact = self._routes.drain(DRAIN_S)
        if self.intact:
            for bucket in self.buckets:
                bucket.unapplied |= bucket.all_slices & ~bucket.spent if bucket.started else 0
                self._routes.of[bucket.id].undo(bucket)

    def unheard(self) -> dict[int, int]:
        """After a failed step: for each bucket id, a bit mask of slices whose rollback in the previous step the servers might
        not have received."""
        slices = {b.id: b.reported if b.started else b.undone for b in self.buckets if b.served}
        return {number: bits for number, bits in slices.items() if bits}

    def heard(self) -> None:
        """Records that the servers have received all reported rollbacks."""
        for bucket in self.buckets:
            bucket.undone = 0


log = logging.getLogger("commlayer")


LARGE_NBYTES = 256 << 20
"""Total size of the buckets' buffers from which a worker returns their memory to the system between steps. For smaller buffers
the page faults would cost more."""


def _nothing() -> None:
    """Does nothing: the default of `bring_in`, when every step ends right after its backward pass."""


def _at_once() -> float:
    """Returns 0: the default of `patience`, when waits end at their deadline."""
    return 0.0


class Worker(Unapplied):
    """Executes one plan on one rank, during one epoch."""

    step: Forwarded[int] = Forwarded("now", "number")
    error: Forwarded[BaseException | None] = Forwarded("now", "error")
    counters: Forwarded[Counters] = Forwarded("now", "counters")
    recorder: Forwarded[Recorder] = Forwarded("now", "recorder")
    weight: Forwarded[float] = Forwarded("units", "weight")
    scale: Forwarded[float] = Forwarded("units", "scale")
    rate: Forwarded[float] = Forwarded("units", "rate")
    total: Forwarded[float] = Forwarded("units", "total")
    eager: Forwarded[bool] = Forwarded("now", "eager")

    def __init__(
        self, job: Job, plan: Plan, codecs: Mapping[int, Codec], device: torch.device,
        *, rank: int = 0, members: int = 0, generation: int = 1, transport: Transport | None = None,
        groups: Groups | None = None, recycle: Callable[[memoryview], None] = lambda _: None,
        explain: Callable[[BaseException], BaseException] = lambda e: e,
    ) -> None:
        """Allocates the buckets and starts the lanes.

        `members`: number of workers in this epoch; 0: the size of `groups`. `recycle` receives the buffers of decoded results
        for reuse. `explain` replaces an error by a more precise one, or returns it unchanged.
        """
        self.job, self.plan, self.device, self.rank, self.generation = job, plan, device, rank, generation
        self._explain = explain
        self.units = Units(members or (groups.world if groups is not None else 1), shared=plan.ranks_per_node > 1)
        self.now = Step(rank, generation, self.units)
        on_device, last = device_buckets(plan, codecs, device), len(plan.buckets) - 1
        self.buckets = [
            WorkerBucket(b, job, codecs[b.id], device, last - i, local=rank % plan.ranks_per_node, rank=rank,
                         on_device=b.id in on_device)
            for i, b in enumerate(plan.buckets)
        ]
        if plan.ranks_per_node == 1:
            for bucket in self.buckets:
                bucket.keep_coded(recycle)
        self._nbytes = sum(bucket.all.nbytes for bucket in self.buckets)
        self.tracked = any(bucket.in_means for bucket in self.buckets)
        """Whether averages of a step that are not applied must be rolled back in the residuals. The same on all ranks."""
        allot_entries(self.buckets)
        self.shared_buffers = {b.id: b.agreed for b in self.buckets if b.agreed is not None}
        self._in_time = [bucket for bucket in self.buckets if not bucket.late]
        self.turns = [[self.buckets[place] for place in places] for places in fragments_of(plan.buckets, plan.fragments)]
        """Lists of buckets that are exchanged together: a single list with all buckets, except for local steps in fragments."""
        self.late = LateResults(self.buckets)
        self._looks = self.tracked or bool(self.late) or plan.steps_locally
        """Whether sums of all-reduces are checked for finite values on a GPU as well. The check makes the host wait for the
        GPU, so uncompressed gradients are not checked."""
        staging = Staging(device)
        self._routes = routes_of(
            self.turns, plan, codecs, self.now, staging, self.late.of, transport, groups, recycle)
        self.stalled = self._routes.stalled
        self._intake = BucketAssembler(job, self.buckets, self._routes, staging, self.now, self._open)
        self._by_tensor = self._intake.by_tensor
        self.places: Mapping[int, int] = {}
        """For each tensor number, its position in the forward pass; tensors without an observed position are missing."""
        self.ended = FinishedPeers()
        self.patience: Callable[[], float] = _at_once
        """Returns the seconds to wait beyond a step's deadline because the coordinator has yet to decide which worker is lost.
        """
        self.waiting_since = 0.0
        """Value of time.monotonic() when the training thread began to wait for results; 0 while it does not wait."""
        self._abandoned = False
        self.not_finite = -1
        """Number of the first tensor for which this worker's own contribution to the last step was not finite; -1 if there is
        none."""
        self.bring_in: Callable[[], object] = _nothing
        """Waits for results of the last step that are still missing. Does nothing unless results are applied bucket by bucket.
        """
        self.unpaid: list[ResidualSlice] = []
        """Residuals of an earlier plan that have not been sent and whose unit differs from this plan's; see plan_handover.py.
        """
        self._finished: list[BucketPath] = []
        self._deadline_s = 0.0
        self.stopwatch = Stopwatch(device)
        self._reset()

    # ---- a step

    def ready(self, tensor: int, gradient: torch.Tensor) -> None:
        """Receives a tensor's gradient, which is final for this step. The worker reads the gradient until `finish` returns."""
        if self.now.error is not None:
            self.check()
        self._intake.ready(tensor, gradient)

    def send(self, changes: Mapping[int, torch.Tensor], turn: int = 0) -> None:
        """Sends the buckets of one fragment at once. `changes`: contiguous tensors of weight changes, by tensor number; buckets
        read them until `wait` for this fragment returns."""
        if self.now.error is not None:
            self.check()
        self._intake.send(self.turns[turn], changes)

    def _open(self) -> None:
        if (missed := self.ended.begin(self.step)) is not None:
            self.latch(missed)
            self.check()
        self.not_finite = -1
        for route in self._routes.all:
            route.open()

    def finish(self, leftovers: Sequence[torch.Tensor | None], deadline_s: float) -> None:
        """Completes the step after the backward pass. `leftovers[t]` is the gradient of a tensor for which `ready` was not
        called, or None.

        Returns when every bucket's sum has arrived. Raises a CommError that names the missing peers when the deadline passes.
        """
        self.complete(leftovers)
        self.wait_all(deadline_s)

    def complete(self, leftovers: Sequence[torch.Tensor | None]) -> None:
        """Sends the buckets that have not been started, after the backward pass has ended. `leftovers`: as in `finish`."""
        begin = time.monotonic()
        self.stopwatch.stop(self.counters.exchanges)
        self.recorder.mark("backward")
        self.check()
        self._intake.take_leftovers(leftovers)
        self.counters.exposed_s += time.monotonic() - begin

    def wait(self, deadline_s: float, turn: int = 0) -> None:
        """Waits until the sums of one fragment's buckets have arrived. All of these buckets must have been sent."""
        self.waiting_since = begin = time.monotonic()
        self._deadline_s = deadline_s
        try:
            for route in self._routes.turns[turn]:
                if self.now.error is None and route not in self._finished:
                    route.finish(begin + deadline_s + self.patience())
        except BaseException as error:
            self.latch(error)
        self.waiting_since = 0.0
        self.check()
        if reason := broken_off([b for b in self.turns[turn] if not b.late], by_this_worker=self.units.broken):
            self._drop(reason)
        self.counters.exposed_s += time.monotonic() - begin
        self.recorder.mark("summed")

    def check_interrupts(self) -> None:
        """Handles pending interrupts, such as a change of members, before this step sends anything."""
        try:
            self.now.check_interrupts(lambda: False)
        except BaseException as error:
            self.latch(error)
        self.check()

    def commit(self, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes the averages into `targets`, one for each tensor (None: not written), and ends the step."""
        finite = [self.write(targets, turn) for turn in range(len(self.turns))]
        self.end(finite=all(finite))

    def write(self, targets: Sequence[torch.Tensor | None], turn: int = 0) -> bool:
        """Writes the averages of one fragment's buckets into `targets`. Returns whether all averages are finite."""
        finite = True
        with contiguous(targets, self._intake.cut) as into:
            for bucket in self.turns[turn]:
                if not bucket.late:
                    finite = self.write_bucket(bucket, [into[s.tensor] for s in bucket.slices]) and finite
            if not self.late.commit(self._factor, into):
                finite = False
                self.not_finite = self.late.not_finite if self.not_finite < 0 else self.not_finite
            return finite

    def write_bucket(self, bucket: WorkerBucket, targets: Sequence[torch.Tensor | None]) -> bool:
        """Writes one bucket's averages into `targets`, one for each slice. Returns whether the values that the optimizer reads
        are finite.

        The result must be the same on all ranks, because False leads to communication. So the plan decides whether to check,
        and not the property `keeps`.
        """
        if not bucket.served and (self._looks or (bucket.read_here and not bucket.buffer)):
            bucket.look()
        if bucket.buffer and not bucket.finite:
            return True  # if a buffer is NaN on some rank, each rank keeps its own value
        if not bucket.finite and self.not_finite < 0 and self.weight:
            self.not_finite = bucket.own_not_finite()
        if not bucket.keeps_body:
            bucket.commit(self._factor(bucket, bucket.weight), targets)
            return bucket.finite
        begin = time.perf_counter()
        bucket.commit(self._factor(bucket, bucket.weight), targets)
        self.counters.coded(decode_s=time.perf_counter() - begin)  # such a bucket decodes during the commit
        return bucket.finite

    def end(self, *, finite: bool, computes: bool = True) -> None:
        """Ends the step after its averages are written. `computes`: the stopwatch starts to time the next step's computation.
        """
        try:
            source = next((bucket for bucket in self._in_time if bucket.summed_weight()), None)
            if source is not None:
                self.units.learn(source.summed_weight())
        except ValueError as error:
            self.latch(error)
            raise
        self.tentative = not finite
        self._judge(finite=finite)
        # Recorded steps keep their memory: measurements read the last step's results.
        if self._nbytes >= LARGE_NBYTES and not self.keeps and not self.recorder.on:
            self._give_back()
        self.counters.exchanges += 1
        self._next(computes=computes)

    def abandon(self, deadline_s: float) -> None:
        """Drops the step on all workers, after an exception in this worker's backward pass. Called when its next backward pass
        begins.

        Until then the other workers wait for this worker, up to their deadline. step.py describes how they learn that the step
        was aborted.
        """
        self.units.broken = True
        try:
            self.finish([None] * len(self.job.tensors), deadline_s)
        except StepAbandoned as error:
            log.warning("%s", error)
        finally:
            self.units.broken = False

    def _drop(self, reason: str) -> None:
        """Drops the current step, as all other ranks do, and raises StepAbandoned."""
        self._judge(finite=False)
        self._next()
        raise StepAbandoned(f"{reason}; the step is dropped on all workers", step=self.step - 1)

    def _judge(self, *, finite: bool) -> None:
        """Marks averages that were not applied. The next exchange first rolls them back, and reports the rollback to the
        servers."""
        for bucket in self._in_time:
            bucket.judge(finite=finite)
        self.late.judge(finite=finite)

    def _next(self, *, computes: bool = True) -> None:
        self.step += 1
        self._reset()
        self.recorder.next()
        if computes:
            self.stopwatch.start()

    def _reset(self) -> None:
        self._finished.clear()
        for route in self._routes.all:
            route.reset()
        self._intake.reset()
        self.ended.over()

    def _factor(self, bucket: WorkerBucket, weight: float) -> float | torch.Tensor:
        if (average := self.units.average(bucket, weight)) is not None:
            return average
        error = InvalidInput("E-WEIGHT",
                             f"step {self.step}: all workers have weight 0, so there is no average: skip the step on all "
                             "workers, or give one of them a weight above 0")
        self.latch(error)
        raise error

    # ---- a step bucket by bucket: complete(), take() and write_bucket() each, end()

    def agreed(self, deadline: float | None, deadline_s: float) -> bool:
        """Whether all workers have ended their backward pass; before that, no average may be applied.

        Waits for the answer until `deadline`; None: does not wait. If a worker has aborted the step, raises StepAbandoned after
        all buckets have arrived.
        """
        self._deadline_s = deadline_s
        last = self._intake.last
        if last is None or not self.take(last, deadline):
            return last is None
        if broken_off([last], by_this_worker=False):
            self.wait_all(deadline_s)
        return True

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        """Whether this bucket's average can be written. Waits until `deadline`; None: does not wait. Raises the same CommErrors
        as `finish`."""
        route = self._routes.of[bucket.id]
        ready: bool | None = True
        begin = time.monotonic()
        self.waiting_since = 0.0 if deadline is None else begin
        try:
            if route not in self._finished and (ready := route.take(bucket, deadline)) is None and deadline is not None:
                route.finish(deadline)
                self._finished.append(route)
                ready = True
        except BaseException as error:
            self.latch(error)
        self.waiting_since = 0.0
        self.check()
        if deadline is not None:
            waited_s = time.monotonic() - begin
            self.counters.exposed_s += waited_s
            self.stopwatch.skip(waited_s)
        return bool(ready)

    def wait_all(self, deadline_s: float) -> None:
        """Waits for the sums of all buckets. Call it even when all have arrived, because paths complete their bookkeeping in
        it."""
        for turn in range(len(self.turns)):
            self.wait(deadline_s, turn)

    @property
    def waits_s(self) -> float:
        """Upper limit in seconds for the training thread's current or last wait."""
        return self._deadline_s + self.patience()

    def missing(self) -> tuple[str, ...]:
        """Names of the peers whose results are known to be missing. Any thread can call it. Collectives name no peer."""
        late = [bucket for bucket in self.buckets if bucket.served and not bucket.done]
        names = {name: None for bucket in late for name in self._routes.awaited(bucket)}
        return tuple(names)

    def holding(self, tensor: int) -> list[WorkerBucket]:
        return [bucket for bucket, _ in self._by_tensor[tensor]]

    # ---- for the session and checkpoints

    def used(self) -> list[bool]:
        """For each tensor, whether any worker had a gradient. Call it after `finish`."""
        used = {bucket.id: bucket.used for bucket in self._in_time}
        used |= {number: result.used for number, result in self.late.of.items()}
        return [any(used[bucket.id] >> i & 1 for bucket, i in places) for places in self._by_tensor]

    def entries(self, tensor: int) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """A tensor's average as sparse entries: pairs of positions and values, in order. None if a bucket of the tensor has not
        kept its result in this form. Call it after `finish`."""
        parts = []
        for bucket, i in sorted(self._by_tensor[tensor], key=lambda place: place[0].slices[place[1]].start):
            if bucket.sparse is None:
                return None
            idx, values = bucket.sparse.entries(i)
            parts.append((idx, values * self._factor(bucket, bucket.weight)))
        return parts

    def drain(self) -> None:
        """Waits until no exchange is running. Results that are one step late are kept for the caller. All ranks call it after
        the same step."""
        self.check()
        self.bring_in()
        try:
            if self._routes.late is not None:
                self._routes.late.quiet(time.monotonic() + self._deadline_s)
        except BaseException as error:
            self.latch(error)
        self.check()
        self.late.take()

    def rest(self) -> None:
        """Before closing, waits for late exchanges in which other ranks of this node or the servers still need this rank."""
        needed = self.plan.ranks_per_node > 1 or any(b.late and b.coded and len(b.codec.rounds) > 1 for b in self.buckets)
        if self._routes.late is not None and needed and self.error is None:
            try:
                self._routes.late.quiet(time.monotonic() + self._deadline_s)
            except Exception as error:  # a rank that misses a result reports it itself
                log.info("an exchange was still running when the session closed: %s", error)

    def hand_out(self, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes the late results that `drain` has kept into `targets`, which must be zeros."""
        with contiguous(targets, self._intake.cut) as into:
            self.late.settle(applied=self.late.commit(self._factor, into))

    @property
    def spoilt(self) -> set[int]:
        """Numbers of the tensors in buckets whose averages in the last step were not finite. The same on all ranks."""
        return {s.tensor for bucket in self._in_time if not bucket.sound for s in bucket.slices}

    @property
    def keeps(self) -> bool:
        """Whether some of the last step's averages can be rolled back if they are not applied. Ranks can differ."""
        return self.tracked or bool(self.late) or any(bucket.carried is not None for bucket in self.buckets)

    def let_go(self) -> None:
        """Returns buffer memory to the system during a long time between two exchanges; see WorkerBucket.let_go."""
        for bucket in self.buckets:
            bucket.let_go()

    def forget_states(self) -> None:
        """Frees residuals and buffers at once. Called after close(), and after another worker object has received the
        residuals. Worker and paths refer to each other, so the garbage collector would free their memory late."""
        for bucket in self.buckets:
            for _, state in bucket.coders:
                state.clear()
        self._give_back()

    def _give_back(self) -> None:
        """Returns the memory of the buckets' buffers to the system. Their contents are lost."""
        for bucket in self.buckets:
            for buffer in (bucket.all, bucket.all_y):
                release(buffer)

    @property
    def coded(self) -> list[WorkerBucket]:
        return [bucket for bucket in self.buckets if bucket.coded or bucket.staged]

    def begins(self) -> bool:
        """Whether the next gradient will be the first of its step."""
        return not self._intake.begun

    def weigh(self, weight: float, total: float | None) -> None:
        """Sets this worker's weight from now on. `total`: the sum of all workers' weights; None if the script does not provide
        it."""
        self.units.weigh(weight, total)

    def reorder(self, places: Mapping[int, int]) -> None:
        """Sets the order of sending from positions in the forward pass. Buckets without a position follow, in reverse of the
        order in which their gradients become final."""
        self.places = places
        # When results are taken one by one, all of them wait for the bucket that `agreed` reads: it is sent first.
        reorder(self.buckets, places, self._intake.last if self.eager else None)

    def record(self, recorder: Recorder) -> None:
        self.recorder = recorder

    # ---- failure

    def latch(self, error: BaseException) -> None:
        """Keeps the first error of this worker; later ones are ignored. Callers report lost peers, or a script that aborts in
        the middle of a step."""
        self.now.latch(error)

    def check(self) -> None:
        """Raises the kept error, if there is one. The first time, residuals get back what the failed step sent."""
        if self.now.error is None:
            return
        if not self._abandoned:
            self._abandoned = True
            self.now.error = self._explain(self.now.error)
            self._undo_step()
        raise self.now.error

    def close(self) -> None:
        self.latch(CommError("the session is closed", code="E-SESSION-CLOSED"))
        self._routes.close(1.0)

"""Executes a plan, step after step: gradients in, averages out.

    ready(tensor, gradient)      from the hooks, as gradients become final
    finish(leftovers, deadline)  after the backward pass: waits for every bucket, then the caller commits, or it raises

`finish` is `complete` and `wait`; `commit` is `write` and `end`. Callers that send a step in fragments use the parts. Callers
that take buckets one by one call `take` and `write_bucket` between `complete` and `end`.

paths/table.py assigns a route to each bucket. The first error of a step latches: running exchanges end, no gradient is
overwritten, residuals get back what was sent, and every later call raises the same error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from commlayer.cluster.collectives import Groups
from commlayer.compressors.codec import Codec
from commlayer.compressors.feedback import ResidualSlice
from commlayer.compressors.tensors import give_back
from commlayer.engine.broken_step import broken_off
from commlayer.engine.bucket import WorkerBucket
from commlayer.engine.device_codecs import device_buckets
from commlayer.engine.ended_peers import Ended
from commlayer.engine.entries_sent import allot_entries
from commlayer.engine.forward_order import reorder
from commlayer.engine.forwarded_attribute import Forwarded
from commlayer.engine.intake import Intake
from commlayer.engine.late_results import LateResults
from commlayer.engine.layout import whole
from commlayer.engine.paths.route import Route
from commlayer.engine.paths.table import routes_of
from commlayer.engine.staging import Staging
from commlayer.engine.step import Counters, Step
from commlayer.engine.stopwatch import Stopwatch
from commlayer.engine.unapplied import Unapplied
from commlayer.engine.units import Units
from commlayer.errors import CommError, InvalidInput, StepAbandoned
from commlayer.observe import Recorder
from commlayer.planner.model.fragments import fragments_of
from commlayer.records import Job, Plan
from commlayer.transport.protocol import Transport

log = logging.getLogger("commlayer")


LARGE_NBYTES = 256 << 20
"""Total buffer size of a worker from which memory is returned to the system between steps. Below, the page faults cost more."""


def _nothing() -> None:
    """Default of `bring_in`: every step ends right after its backward pass."""


def _at_once() -> float:
    """Default of `patience`: no verdict on silent workers is pending, so waits end at their deadline."""
    return 0.0


class Worker(Unapplied):
    """One rank's execution of one plan in one epoch."""

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
        """`members`: number of workers in the view (0: the size of the groups). `recycle` takes back the bodies of decoded
        results. `explain` may replace an error by a more precise one."""
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
        """Whether a step whose averages are not applied must be taken back. The same on all ranks."""
        allot_entries(self.buckets)
        self.shared_buffers = {b.id: b.agreed for b in self.buckets if b.agreed is not None}
        self._in_time = [bucket for bucket in self.buckets if not bucket.late]
        self.turns = [[self.buckets[place] for place in places] for places in fragments_of(plan.buckets, plan.fragments)]
        """The buckets of each turn of a step: one turn with all buckets, except for local steps in fragments."""
        self.late = LateResults(self.buckets)
        self._looks = self.tracked or bool(self.late) or plan.steps_locally
        """Whether sums of all-reduces are checked for finite values on a GPU, too. The check makes the host wait for the GPU,
        so uncompressed gradients are not checked."""
        staging = Staging(device)
        self._routes = routes_of(
            self.turns, plan, codecs, self.now, staging, self.late.of, transport, groups, recycle)
        self.stalled = self._routes.stalled
        self._intake = Intake(job, self.buckets, self._routes, staging, self.now, self._open)
        self._by_tensor = self._intake.by_tensor
        self.places: Mapping[int, int] = {}
        """By tensor, its place in the forward pass, where one was observed."""
        self.ended = Ended()
        self.patience: Callable[[], float] = _at_once
        """Seconds to wait beyond the deadline of a step, while the coordinator may still decide which worker is lost."""
        self.waiting_since = 0.0
        """time.monotonic() when the training thread began to wait for results; 0 while it does not wait."""
        self._abandoned = False
        self.not_finite = -1
        """The first tensor in which this worker's own contribution was not finite, in a step that is not finite; -1 if none."""
        self.bring_in: Callable[[], object] = _nothing
        """Waits for what the last step still lacks. Set where steps are taken bucket by bucket."""
        self.unpaid: list[ResidualSlice] = []
        """Residuals of an earlier plan in a unit other than this plan's: see plan_handover.py."""
        self._finished: list[Route] = []
        self._deadline_s = 0.0
        self.stopwatch = Stopwatch(device)
        self._reset()

    # ---- a step

    def ready(self, tensor: int, gradient: torch.Tensor) -> None:
        """The gradient of that tensor is final for this step. The worker reads it until `finish` returns."""
        if self.now.error is not None:
            self.check()
        self._intake.ready(tensor, gradient)

    def send(self, changes: Mapping[int, torch.Tensor], turn: int = 0) -> None:
        """Sends a turn's buckets at once. `changes`: contiguous tensors, by number. Buckets read their own elements until
        `wait` for the turn returns."""
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
        """Ends the backward pass: `leftovers[t]` is the gradient of a tensor that was not announced, or None.

        Returns when every bucket's sum has arrived. Raises a CommError that names the missing peers when the deadline passes.
        """
        self.complete(leftovers)
        self.wait_all(deadline_s)

    def complete(self, leftovers: Sequence[torch.Tensor | None]) -> None:
        """The backward pass has ended: sends the buckets that were not yet started."""
        begin = time.monotonic()
        self.stopwatch.stop(self.counters.exchanges)
        self.recorder.mark("backward")
        self.check()
        self._intake.take_leftovers(leftovers)
        self.counters.exposed_s += time.monotonic() - begin

    def wait(self, deadline_s: float, turn: int = 0) -> None:
        """Waits until the sums of that turn's buckets have arrived. All of them must have been sent."""
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
        if reason := broken_off([b for b in self.turns[turn] if not b.late], here=self.units.broken):
            self._drop(reason)
        self.counters.exposed_s += time.monotonic() - begin
        self.recorder.mark("summed")

    def heed(self) -> None:
        """Handles pending interrupts, such as a change of members, before anything of this step is sent."""
        try:
            self.now.heed(lambda: False)
        except BaseException as error:
            self.latch(error)
        self.check()

    def commit(self, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes the averages into `targets` (None: skip) and ends the step."""
        finite = [self.write(targets, turn) for turn in range(len(self.turns))]
        self.end(finite=all(finite))

    def write(self, targets: Sequence[torch.Tensor | None], turn: int = 0) -> bool:
        """Writes the averages of that turn's buckets. Returns whether they are finite."""
        finite = True
        with whole(targets, self._intake.cut) as into:
            for bucket in self.turns[turn]:
                if not bucket.late:
                    finite = self.write_bucket(bucket, [into[s.tensor] for s in bucket.slices]) and finite
            if not self.late.commit(self._factor, into):
                finite = False
                self.not_finite = self.late.not_finite if self.not_finite < 0 else self.not_finite
            return finite

    def write_bucket(self, bucket: WorkerBucket, targets: Sequence[torch.Tensor | None]) -> bool:
        """Writes one bucket's averages, slice by slice. Returns whether the values that the optimizer reads are finite.

        The result must be the same on all ranks, because False leads to communication. So the plan decides whether to check,
        not `keeps`."""
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
        """Ends the step after its averages are written. `computes`: the stopwatch then times the computation of the next step.
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
        """Drops the step on all workers, after an exception in this worker's backward pass. Runs when its next pass begins.

        Until then the others wait for this worker, up to their deadline. How they learn of it: see broken_step.py."""
        self.units.broken = True
        try:
            self.finish([None] * len(self.job.tensors), deadline_s)
        except StepAbandoned as error:
            log.warning("%s", error)
        finally:
            self.units.broken = False

    def _drop(self, reason: str) -> None:
        """Drops the step, as all other ranks do."""
        self._judge(finite=False)
        self._next()
        raise StepAbandoned(f"{reason}; the step is dropped on all workers", step=self.step - 1)

    def _judge(self, *, finite: bool) -> None:
        """Marks what was not applied. The next exchange takes it back first, and reports it to the servers."""
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
                             f"step {self.step}: every worker has weight 0, so there is no average: skip the step on all, or "
                             "give one a weight")
        self.latch(error)
        raise error

    # ---- a step bucket by bucket: complete(), take() and write_bucket() each, end()

    def agreed(self, deadline: float | None, deadline_s: float) -> bool:
        """Whether all workers have ended their backward pass. Before that, nothing may be applied.

        Waits for the answer, if there is a deadline. Raises StepAbandoned, after all buckets have arrived, if a worker broke
        the step off."""
        self._deadline_s = deadline_s
        last = self._intake.last
        if last is None or not self.take(last, deadline):
            return last is None
        if broken_off([last], here=False):
            self.wait_all(deadline_s)
        return True

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        """Whether this bucket can be written; waits for it, if there is a deadline. Raises the same CommError as `finish`."""
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
        """Waits for all buckets. Must also run when all have arrived: routes do their bookkeeping in it."""
        for turn in range(len(self.turns)):
            self.wait(deadline_s, turn)

    @property
    def waits_s(self) -> float:
        """The most seconds that the last wait could take."""
        return self._deadline_s + self.patience()

    def missing(self) -> tuple[str, ...]:
        """From any thread: the peers whose results are known to be missing. For collectives, none."""
        late = [bucket for bucket in self.buckets if bucket.served and not bucket.done]
        names = {name: None for bucket in late for name in self._routes.awaited(bucket)}
        return tuple(names)

    def holding(self, tensor: int) -> list[WorkerBucket]:
        return [bucket for bucket, _ in self._by_tensor[tensor]]

    # ---- for the session and checkpoints

    def used(self) -> list[bool]:
        """After `finish`: for each tensor, whether any worker had a gradient."""
        used = {bucket.id: bucket.used for bucket in self._in_time}
        used |= {number: result.used for number, result in self.late.of.items()}
        return [any(used[bucket.id] >> i & 1 for bucket, i in places) for places in self._by_tensor]

    def entries(self, tensor: int) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """After `finish`: the tensor's average as positions and values, in order. None if some bucket has not kept it in this
        form."""
        parts = []
        for bucket, i in sorted(self._by_tensor[tensor], key=lambda place: place[0].slices[place[1]].start):
            if bucket.sparse is None:
                return None
            idx, values = bucket.sparse.entries(i)
            parts.append((idx, values * self._factor(bucket, bucket.weight)))
        return parts

    def drain(self) -> None:
        """Waits until no exchange is in flight; late results are kept. All ranks call it after the same step."""
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
        """Before an orderly end: waits for late exchanges in which this rank's node, or its servers, still need this rank."""
        needed = self.plan.ranks_per_node > 1 or any(b.late and b.coded and len(b.codec.rounds) > 1 for b in self.buckets)
        if self._routes.late is not None and needed and self.error is None:
            try:
                self._routes.late.quiet(time.monotonic() + self._deadline_s)
            except Exception as error:  # a rank that misses a result reports it itself
                log.info("an exchange was under way at the end: %s", error)

    def hand_out(self, targets: Sequence[torch.Tensor | None]) -> None:
        """After `drain`: writes the kept late results into `targets`, which are zeros."""
        with whole(targets, self._intake.cut) as into:
            self.late.settle(applied=self.late.commit(self._factor, into))

    @property
    def spoilt(self) -> set[int]:
        """After a step: the tensors of buckets whose averages were not finite. The same on all ranks."""
        return {s.tensor for bucket in self._in_time if not bucket.sound for s in bucket.slices}

    @property
    def keeps(self) -> bool:
        """Whether some of the last step's averages can be taken back if they are not applied. Ranks may differ."""
        return self.tracked or bool(self.late) or any(bucket.carried is not None for bucket in self.buckets)

    def let_go(self) -> None:
        """Between two exchanges that lie far apart: see WorkerBucket.let_go."""
        for bucket in self.buckets:
            bucket.let_go()

    def forget_states(self) -> None:
        """Frees residuals and buffers at once, after close() and after another worker has taken over the residuals. Worker and
        routes refer to each other, so the garbage collector would free them late."""
        for bucket in self.buckets:
            for _, state in bucket.coders:
                state.clear()
        self._give_back()

    def _give_back(self) -> None:
        """Returns the memory of the buckets' buffers to the system. Their contents are no longer read."""
        for bucket in self.buckets:
            for buffer in (bucket.all, bucket.all_y):
                give_back(buffer)

    @property
    def coded(self) -> list[WorkerBucket]:
        return [bucket for bucket in self.buckets if bucket.coded or bucket.staged]

    def begins(self) -> bool:
        """Whether the next gradient is the first of its step."""
        return not self._intake.begun

    def weigh(self, weight: float, total: float | None) -> None:
        """Sets the weight of the batches from now on. `total`: the weight of all workers together, None if the script does not
        give it."""
        self.units.weigh(weight, total)

    def reorder(self, places: Mapping[int, int]) -> None:
        """Orders sends by place in the forward pass. Buckets without one follow in reverse ready order."""
        self.places = places
        # When results are taken one by one, all of them wait for the bucket that `agreed` reads: it is sent first.
        reorder(self.buckets, places, self._intake.last if self.eager else None)

    def record(self, recorder: Recorder) -> None:
        self.recorder = recorder

    # ---- failure

    def latch(self, error: BaseException) -> None:
        """Keeps the first error only. Callers report a lost peer, or a script that broke off in the middle of a step."""
        self.now.latch(error)

    def check(self) -> None:
        """Raises the latched error. The first time, residuals get back what the broken step sent."""
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

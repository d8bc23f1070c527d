"""Executes a plan on one rank, step after step: receives gradients, exchanges buckets, writes averages.

    ready(tensor, gradient)      called by gradient hooks, as gradients become final
    finish(leftovers, deadline)  called after the backward pass: waits for every bucket, or raises
    commit(targets)              writes the averages and ends the step; `abort` drops it on all workers instead

`finish` consists of `complete` and `wait`; `commit` consists of `write` and `end`. Callers that send a step in fragments call
these parts. Callers that apply buckets one by one call `take` and `write_bucket` between `complete` and `end`.

paths/table.py assigns a path to each bucket. After the first error of a step, running exchanges end, no gradient is
overwritten, what was sent returns to the residuals, and every later call raises the same error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from commlayer.callbacks import ignore
from commlayer.cluster.processes.collectives import Groups
from commlayer.compressors.codec import Codec
from commlayer.compressors.residual_slices import ResidualSlice
from commlayer.engine.buckets.bucket import EncodedBucket, WorkerBucket, make_bucket
from commlayer.engine.buckets.bucket_layout import contiguous, release
from commlayer.engine.buckets.current_step import Counters, Step, aborted_by, is_withdrawn
from commlayer.engine.buckets.entries_sent import allot_entries
from commlayer.engine.buckets.results import EncodedResult, SparseResult
from commlayer.engine.buckets.shared_buffers import SharedBuffers
from commlayer.engine.buckets.units import Units
from commlayer.engine.components import Components, Pending
from commlayer.engine.paths.staging import Staging, device_buckets
from commlayer.engine.paths.table import make_paths
from commlayer.engine.worker.bucket_assembler import BucketAssembler
from commlayer.engine.worker.exchange import Exchange, LateExchange
from commlayer.engine.worker.finished_peers import FinishedPeers
from commlayer.engine.worker.site import LocalSite, SiteOutcome
from commlayer.engine.worker.stopwatch import Stopwatch
from commlayer.errors import CommError, InvalidInput, StepAbandoned, exit_reason
from commlayer.observe.events import WaitKind
from commlayer.observe.step_trace import Recorder
from commlayer.planner.buckets import divide_into_fragments
from commlayer.records import Job, Plan
from commlayer.transport.reconnect import ReconnectingTransport

log = logging.getLogger("commlayer")
DRAIN_S = 5.0
"""Seconds that a failed step waits for a lane to end its current call, before residuals are corrected."""
LARGE_NBYTES = 256 << 20
"""Total size of the buckets' buffers above which a worker returns their memory to the system between steps. For smaller buffers
the page faults would take longer than the memory is worth."""


class Worker:
    """Executes one plan on one rank."""

    wait_kind: WaitKind = "step"

    def __init__(
        self, job: Job, plan: Plan, codecs: Mapping[int, Codec], device: torch.device,
        *, rank: int = 0, members: int = 0, generation: int = 1, transport: ReconnectingTransport | None = None,
        groups: Groups | None = None, recycle: Callable[[memoryview], None] = ignore,
        components: Components | None = None, site: LocalSite | None = None,
    ) -> None:
        """Allocates the buckets and starts the lanes.

        `members`: number of workers with which the job began; 0: the size of `groups`. `recycle` receives the buffers of
        decoded results for reuse. `components`: those of the session. None: the worker has no session. `site`: the ranks over
        which the model is sharded. None: the model is not sharded.
        """
        self.job, self.plan, self.device = job, plan, device
        self._components = Components() if components is None else components
        self.units = Units(members or (groups.world if groups is not None else 1))
        self.now = Step(rank, generation, self.units, eager=plan.overlap == "forward")
        self._site = site or LocalSite()
        self._outcome = SiteOutcome()
        """The outcome of the last exchange in the site of a sharded model."""
        self.withdrawn = False
        """True: a worker has withdrawn a contribution to the sums for which this worker has waited last. The value is the same
        on all workers, because sites of several ranks withdraw nothing."""
        self.may_withdraw = True
        """False: the running exchange ends the session, or precedes a checkpoint or evaluation, so it must be complete."""
        self._partly_empty, self._used_in_site = self._site.shards.partly_empty(job), set[int]()
        """Two sets of tensors: those of which some ranks of a site have no elements, and which of them some worker has used in
        the last exchange."""
        shards, on_device, last = self._site.shards, device_buckets(plan, codecs, device), len(plan.buckets) - 1
        node, local = (range(1), 0) if groups is None else (range(len(groups.site)), groups.local)
        of_place = {
            i: make_bucket(b, job, codecs[b.id], device, last - i, owned=b.owner_in(node) == local, rank=rank,
                           on_device=b.id in on_device)
            for i, bucket in enumerate(plan.buckets) if (b := shards.own_bucket(bucket, job)) is not None
        }
        self.buckets = [*of_place.values()]
        for own in self.buckets:
            own.ranks = shards.ranks if own.slices[0].tensor in shards.tensors else 1
        self.alone = len(node) == 1
        """True: this rank is the only one of its node."""
        for own in self.buckets if self.alone else ():
            if isinstance(own, EncodedBucket):
                own.keep_encoded(recycle)
        allot_entries(self.buckets)
        self.fragments = [[of_place[place] for place in places if place in of_place and not of_place[place].late]
                          for places in divide_into_fragments(plan.buckets, plan.fragments)]
        """Lists of buckets that are exchanged together: a single list, except for local steps in fragments. The buckets of
        `late` are not in it."""
        late = [bucket for bucket in self.buckets if bucket.late]
        self.tracked = any(bucket.needs_undo for bucket in self.buckets)
        """True: averages of a step that are not applied must be rolled back in the residuals. The value is the same on all
        ranks."""
        self._looks = self.tracked or bool(late) or plan.steps_locally
        """True: sums of collectives are checked for finite values on a GPU as well. The check makes the host wait for the GPU,
        so uncompressed gradients are not checked."""
        staging = Staging(device)
        self._paths = make_paths([*self.fragments, late], plan, codecs, self.now, staging, transport, groups, recycle)
        self._exchanges = [Exchange(*of, self.now) for of in zip(self.fragments, self._paths.groups, strict=False)]
        self.late = LateExchange(late, self._paths.groups[-1], self.now)
        self._assembler = BucketAssembler(job, self.buckets, self._paths.of, staging, self.now, self._open,
                                          next(reversed(self.fragments[-1]), None))
        self.places: Mapping[int, int] = {}
        """Maps a tensor number to the tensor's position in the forward pass; tensors without an observed position are missing.
        """
        self.finished_peers = FinishedPeers()
        self.not_finite = -1
        """Number of the first tensor for which this worker's own contribution to the last step was not finite; -1 if there is
        none."""
        self.tentative = False
        """True: some average of the last step was not finite. Such a step is skipped, unless an optimizer steps nevertheless.
        """
        self.intact: bool | None = None
        """True: residuals were restored to their values before the failed step. False: an encoder was stuck, so the residuals
        are unknown. The value is None if no step has failed."""
        self.pending_residuals: Sequence[ResidualSlice] = ()
        """Residuals of an earlier plan that are gradients, if this plan has local steps; see residual_slices.py."""
        self.stopwatch = Stopwatch(device)
        self._nbytes = sum(bucket.memory.all.nbytes for bucket in self.buckets)
        """Size of the buckets' send buffers."""
        self._reset()

    @property
    def step(self) -> int:
        return self.now.number

    @property
    def error(self) -> BaseException | None:
        return self.now.error

    @property
    def counters(self) -> Counters:
        return self.now.counters

    @property
    def recorder(self) -> Recorder:
        return self.now.recorder

    @property
    def begun(self) -> bool:
        return self._assembler.begun

    def ready(self, tensor: int, gradient: torch.Tensor) -> None:
        """Receives a tensor's gradient, which is final for this step. The worker reads the gradient until `finish` returns."""
        if self.now.error is not None:
            self.check()
        self._assembler.ready(tensor, gradient)

    def finish(self, leftovers: Sequence[torch.Tensor | None], deadline_s: float) -> None:
        """Completes the step after the backward pass. `leftovers[t]` is the gradient of a tensor for which `ready` was not
        called, or None.

        Returns when every bucket's sum has arrived. Raises a CommError that names the missing peers when the deadline passes.
        """
        self.complete(leftovers)
        self.wait_all(deadline_s)

    def commit(self, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes the averages into `targets`, one for each tensor (None: not written), and ends the step."""
        finite = [self.write(targets, fragment) for fragment in range(len(self.fragments))]
        self.end([all(finite)] * len(finite))

    def abort(self, deadline_s: float) -> None:
        """Drops the step on all workers, after an exception in this worker's backward pass. Called when its next backward pass
        begins.

        Until its next backward pass begins, the other workers wait for this worker, up to their deadline. current_step.py
        describes how this worker reports the abort.
        """
        self.units.broken = True
        try:
            self.finish([None] * len(self.job.tensors), deadline_s)
        except StepAbandoned as error:
            log.warning("%s", error)
        finally:
            self.units.broken = False

    def send(self, changes: Mapping[int, torch.Tensor], fragment: int = 0) -> None:
        """Sends the buckets of one fragment at once. `changes`: contiguous tensors of weight changes, by tensor number; buckets
        read them until `wait` for this fragment returns."""
        if self.now.error is not None:
            self.check()
        self.withdrawn = False
        self._assembler.send(self.fragments[fragment], changes)

    def open(self) -> None:
        """Begins a step, before its first gradient."""
        self._assembler.open()

    def _open(self) -> None:
        if (missed := self.finished_peers.begin(self.step)) is not None:
            self.latch(missed)
            self.check()
        self.not_finite = -1
        self._components.begin_exchange()

    def complete(self, leftovers: Sequence[torch.Tensor | None]) -> None:
        """Sends the buckets that have not been started, after the backward pass has ended. `leftovers`: as in `finish`."""
        begin = time.monotonic()
        self.recorder.mark("backward")
        self.check()
        self._assembler.take_leftovers(leftovers)
        self.counters.exposed_s += time.monotonic() - begin

    def wait(self, deadline_s: float, fragment: int = 0) -> None:
        """Waits until the sums of one fragment's buckets have arrived. All of these buckets must have been sent."""
        self.now.deadline_s = deadline_s
        begin = time.monotonic()
        self._await(lambda: self._wait_for(fragment, begin + deadline_s + self._components.patience()), begin)
        if self.now.sent_at:
            self.counters.exchange_s += max(0.0, self._exchanges[fragment].arrived_at - self.now.sent_at)
        self.now.sent_at = 0.0
        reason = aborted_by(self.fragments[fragment], by_this_worker=self.units.broken)
        if reason or self._outcome.aborted:
            self._finalize([False] * len(self._exchanges))
            self._next()
            raise StepAbandoned(f"{reason or 'a worker has aborted it'}; the step is dropped on all workers",
                                step=self.step - 1)
        self.withdrawn = is_withdrawn(self.fragments[fragment])
        self.counters.exposed_s += time.monotonic() - begin
        self.recorder.mark("summed")

    def _wait_for(self, fragment: int, deadline: float) -> None:
        """Waits for the sums of one fragment's buckets. If the model is sharded, the ranks of the site then agree on the
        outcome of the exchange, because each rank has other buckets."""
        try:
            self._exchanges[fragment].wait(deadline)
            self.late.launch(deadline)
        except Exception as error:
            self.latch(error)
        if self._site.shards:
            buckets, now = self.fragments[fragment], self.now
            aborted = bool(aborted_by(buckets, by_this_worker=self.units.broken))
            has_weight = self._exchanges[fragment].has_weight and not aborted
            used = {s.tensor for bucket in buckets for i, s in enumerate(bucket.slices) if bucket.exchange.used >> i & 1}
            self._outcome, self._used_in_site = self._site.agree(
                SiteOutcome(now.error is not None, aborted, not all(b.exchange.finite or b.buffer for b in buckets), has_weight,
                            self.units.weight, -self.units.weight), self._partly_empty, used, deadline, now.failed)

    def sum_in_site(self, value: float, deadline_s: float) -> float:
        """Returns the sum of a number over the ranks of the site, if the model is sharded over them: they call it together."""
        return self._site.sum(value, time.monotonic() + deadline_s, self.now.failed)

    def wait_all(self, deadline_s: float) -> None:
        """Waits for the sums of all buckets. Call it even when all sums have arrived, because paths then complete their
        bookkeeping."""
        for fragment in range(len(self.fragments)):
            self.wait(deadline_s, fragment)

    def _await(self, wait: Callable[[], bool | None], since: float) -> bool:
        """Calls `wait`, stores errors as the error of this worker, and raises the first error of the step. An interrupt
        (Ctrl-C) ends this rank's part in the job."""
        result = False
        self.now.waiting_since = since
        try:
            result = bool(wait())
        except Exception as error:
            self.latch(error)
        except BaseException as error:  # Ctrl-C, for example: raised once, since the script may catch it and go on
            cause = exit_reason(error)
            self.latch(CommError(f"{cause} has ended the wait for the step's results, so this rank has left the job: attach "
                                 "again on all ranks, or resume from a checkpoint", code="E-SESSION-CLOSED", step=self.step))
            self._components.interrupted(cause)
            raise
        finally:
            self.now.waiting_since = 0.0
        self.check()
        return result

    def write(self, targets: Sequence[torch.Tensor | None], fragment: int = 0) -> bool:
        """Writes the averages of one fragment's buckets into `targets`. Returns True if all averages are finite."""
        finite = True
        with contiguous(targets, self._assembler.split) as into:
            for bucket in self.fragments[fragment]:
                finite = self.write_bucket(bucket, [into[s.tensor] for s in bucket.slices]) and finite
                bucket.sources = [None] * len(bucket.slices)  # frees the changes of a fragment before the outer step ends
            if not self.late.write(self._factor, into):
                finite = False
                self.not_finite = self.late.not_finite if self.not_finite < 0 else self.not_finite
            return finite and not self._outcome.spoilt

    def write_bucket(self, bucket: WorkerBucket, targets: Sequence[torch.Tensor | None]) -> bool:
        """Writes one bucket's averages into `targets`, one for each slice. Returns True if the values that the optimizer reads
        are finite.

        The result must be the same on all ranks, because False leads to communication. The plan therefore decides whether
        values are checked, and not the property `can_roll_back`.
        """
        exchange = bucket.exchange
        if not bucket.served and bucket.memory.facts_y is not None and not bucket.buffer:
            if bucket.commit_finite(self._factor(bucket, exchange.weight), targets):
                return True
        elif not bucket.served and self._looks:
            bucket.look()
        if bucket.buffer and not exchange.finite:
            return True  # if a buffer is NaN on some rank, each rank keeps its own value
        if not exchange.finite and self.not_finite < 0 and self.units.weight:
            self.not_finite = bucket.own_not_finite()
        begin = time.perf_counter()
        bucket.commit(self._factor(bucket, exchange.weight), targets)
        if isinstance(bucket.compact, EncodedResult):
            self.counters.count_codec_times(decode_s=time.perf_counter() - begin)  # decodes encoded results
        return exchange.finite

    def has_weight(self, fragment: int) -> bool:
        """Returns True unless all workers have contributed to the sums of a fragment with weight 0."""
        return bool(self._outcome.has_weight) if self._site.shards else self._exchanges[fragment].has_weight

    def end(self, applied: Sequence[bool], *, computes: bool = True) -> None:
        """Ends the step after its averages are written. `applied`: one flag for each fragment that was exchanged; False if its
        averages are not finite, so that they are not applied. `computes`: True if the stopwatch starts to time the next step's
        computation."""
        self.units.learn(next((w for b in self.buckets if not b.late and (w := b.exchange.weight)), 0.0))
        self.tentative = not all(applied)
        self._finalize(applied)
        # Recorded steps keep their memory: measurements read the last step's results.
        if self._nbytes >= LARGE_NBYTES and not self.can_roll_back and not self.recorder.on:
            self._give_back()
        self.counters.exchanges += 1
        self._next(computes=computes)

    def _finalize(self, applied: Sequence[bool]) -> None:
        for exchange, is_applied in zip(self._exchanges, applied, strict=False):  # an outer step may end early
            exchange.finalize(applied=is_applied)
        self.late.finalize(applied=all(applied))

    def _next(self, *, computes: bool = True) -> None:
        self.now.number += 1
        self._reset()
        self.recorder.next()
        if computes:
            self.stopwatch.start()

    def _reset(self) -> None:
        for exchange in self._exchanges:
            exchange.reset()
        self._assembler.reset()
        self.finished_peers.end()

    def _factor(self, bucket: WorkerBucket, weight: float) -> float | torch.Tensor:
        if (average := self.units.average(bucket, weight)) is not None:
            return average
        error = InvalidInput("E-WEIGHT",
                             f"step {self.step}: all workers have weight 0, so there is no average: skip the step on all "
                             "workers, or give one of them a weight above 0")
        self.latch(error)
        raise error

    def all_complete(self, deadline: float | None, deadline_s: float) -> bool:
        """Returns True if all workers have ended their backward pass; before that, no average may be applied.

        Waits until `deadline`. None: the call does not wait. If a worker has aborted the step, raises StepAbandoned after all
        buckets have arrived.
        """
        self.now.deadline_s = deadline_s
        last = self._assembler.last
        if last is None or not self.take(last, deadline):
            return last is None
        if aborted_by([last], by_this_worker=False):
            self.wait_all(deadline_s)
        return True

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        """Returns True if this bucket's average can be written. Waits until `deadline`. None: the call does not wait. Raises
        the same CommErrors as `finish`."""
        if self.now.error is not None:
            self.check()
        begin = time.monotonic()
        ready = self._await(lambda: self._paths.of[bucket.id].take(bucket, deadline), 0.0 if deadline is None else begin)
        if deadline is not None:
            waited_s = time.monotonic() - begin
            self.counters.exposed_s += waited_s
            self.stopwatch.skip(waited_s)
        return ready

    def mark_discarded(self, tensor: int) -> None:
        """Marks the last step's average of a tensor as not applied, because the script discarded it: sets its bits in the
        rollback masks. The bucket's next exchange first rolls back, and reports the rollback to the server."""
        for bucket, i in self._assembler.by_tensor[tensor]:
            bucket.ledger.discarded |= 1 << i

    def mark_applied(self, tensors: Collection[int]) -> None:
        """Marks the averages of these tensors as applied by an optimizer, although other averages of the step were not finite.
        """
        if not self.tentative:
            return
        for bucket in self.buckets:
            for i, s in enumerate(bucket.slices if bucket.ledger.finite else ()):
                if s.tensor in tensors:
                    bucket.ledger.discarded &= ~(1 << i)

    def mark_applied_early(self, tensors: Collection[int]) -> None:
        """Marks averages of an unfinished step as applied by an optimizer already, so that a failure of the step does not roll
        them back."""
        for tensor in tensors:
            for bucket, i in self._assembler.by_tensor[tensor]:
                bucket.exchange.applied |= 1 << i

    def any_nonzero(self, tensor: int) -> bool:
        """Returns True if the last step's average of a tensor has nonzero values. Results that arrive one step late count as
        nonzero."""
        return any(bucket.late or bool(bucket.slice_of_result(i).any()) for bucket, i in self._assembler.by_tensor[tensor])

    def roll_back(self) -> dict[int, int]:
        """Rolls back the last step's averages that were not applied. Returns, for each bucket id, a bit mask of slices whose
        rollback the servers do not know yet. The result is the same on all ranks."""
        self._components.complete(Pending.STEP)
        for bucket in self.buckets:
            if not bucket.late:
                bucket.ledger.roll_back()
        return {bucket.id: bucket.ledger.unreported for bucket in self.buckets if bucket.ledger.unreported and bucket.served}

    def discarded(self) -> tuple[int, int]:
        """Returns which of the last averages were not applied: a bit mask over the slices of all buckets in order, and the
        number of slices."""
        self._components.complete(Pending.STEP)
        bits = slices = 0
        for bucket in self.buckets:
            bits, slices = bits | bucket.ledger.discarded << slices, slices + len(bucket.slices)
        return bits, slices

    def set_discarded(self, bits: int) -> None:
        """Sets which of the last averages were not applied, from the bit mask that another rank's `discarded` returned."""
        for bucket in self.buckets:
            bucket.ledger.discarded, bits = bits & bucket.ledger.all_slices, bits >> len(bucket.slices)

    def acknowledge_rollbacks(self) -> None:
        """Records that the servers have received all reported rollbacks."""
        for bucket in self.buckets:
            bucket.ledger.report()

    @property
    def waiting_since(self) -> float:
        return self.now.waiting_since

    @property
    def waits_s(self) -> float:
        """Upper limit in seconds for the training thread's current or last wait."""
        return self.now.deadline_s + self._components.patience()

    def stalled(self, bucket: int, step: int, missing: tuple[int, ...]) -> None:
        """Stores a server's report that the server waits for the workers `missing`, for one bucket and step."""
        self.now.stalled[bucket] = step, missing

    def missing(self) -> tuple[str, ...]:
        """Returns the names of the peers whose results are known to be missing. Any thread can call it. Collectives name no
        peer."""
        waiting = [bucket for bucket in self.buckets if bucket.served and not bucket.exchange.answered]
        return tuple({name: None for bucket in waiting for name in self._paths.awaited(bucket)})

    def withdraw(self) -> int:
        """Withdraws what the running exchange has not sent completely, because the link has become much slower. No rank then
        has an average of these buckets, and all ranks send their gradients again with the next ones. Any thread can call it.
        Returns the withdrawn bytes."""
        if (exchange := self._paths.exchange) is None:
            return 0
        return exchange.withdraw({bucket.id for bucket in self.buckets if not bucket.buffer})

    @property
    def unsent_nbytes(self) -> int:
        return 0 if self._paths.exchange is None else self._paths.exchange.unsent_nbytes

    def holding(self, tensor: int) -> list[WorkerBucket]:
        return [bucket for bucket, _ in self._assembler.by_tensor[tensor]]

    def used(self) -> list[bool]:
        """Returns one flag for each tensor: True if any worker had a gradient. Call it after `finish`."""
        late = self.late.used
        flags = [tensor in self._used_in_site for tensor in range(len(self.job.tensors))]
        for bucket in self.buckets:
            used = late.get(bucket.id, bucket.exchange.used)
            for i, s in enumerate(bucket.slices):
                if used >> i & 1:
                    flags[s.tensor] = True
        return flags

    def entries(self, tensor: int) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Returns a tensor's average as sparse entries: pairs of positions and values, in order. None if a bucket of the tensor
        has a dense or encoded result. Call it after `finish`."""
        parts = []
        for bucket, i in sorted(self._assembler.by_tensor[tensor], key=lambda place: place[0].slices[place[1]].start):
            if not isinstance(bucket.compact, SparseResult):
                return None
            idx, values = bucket.compact.entries(i)
            parts.append((idx, values * self._factor(bucket, bucket.exchange.weight)))
        return parts

    def drain(self) -> None:
        """Waits until no exchange is running. Averages that are applied one step after their gradients are kept for `hand_out`.
        All ranks call it after the same step."""
        self.check()
        self._components.complete(Pending.STEP)
        self._await(lambda: self.late.wait(time.monotonic() + self.now.deadline_s), 0.0)
        self.late.hold()

    def finish_exchanges(self) -> None:
        """Waits, before the worker closes, for running exchanges in which other ranks of this node or the servers still need
        this rank."""
        several_rounds = any(len(bucket.codec.rounds) > 1 for bucket in self.late.buckets)
        if self.error is None and (not self.alone or several_rounds):
            try:
                self.late.wait(time.monotonic() + self.now.deadline_s)
            except Exception as error:  # a rank that misses a result reports it itself
                log.info("an exchange was still running when the session closed: %s", error)

    def hand_out(self, targets: Sequence[torch.Tensor | None]) -> None:
        """Writes the late results that `drain` has kept into `targets`, which must be zeros."""
        with contiguous(targets, self._assembler.split) as into:
            self.late.settle(applied=self.late.write(self._factor, into))

    @property
    def spoilt(self) -> set[int]:
        """Numbers of the tensors in buckets whose averages in the last step were not finite. The set is the same on all ranks.
        """
        return {s.tensor for bucket in self.buckets if not bucket.late and not bucket.ledger.finite for s in bucket.slices}

    @property
    def can_roll_back(self) -> bool:
        """True: some of the last step's averages can be rolled back if they are not applied. Ranks can differ."""
        return self.tracked or bool(self.late) or any(bucket.ledger.sent is not None for bucket in self.buckets)

    @property
    def shared_buffers(self) -> dict[int, SharedBuffers]:
        return {bucket.id: bucket.shared for bucket in self.buckets if bucket.shared is not None}

    def release_memory(self) -> None:
        """Returns buffer memory to the system during a long time between two exchanges; see EncodedBucket.release_memory."""
        for bucket in self.buckets:
            bucket.release_memory()

    def forget_states(self) -> None:
        """Frees residuals and buffers at once. Called after close(), when another worker object has received the residuals.
        Worker and paths refer to each other, so the garbage collector would free their memory late."""
        for bucket in self.buckets:
            for _, state in bucket.ledger.encoders:
                state.clear()
        self._give_back()

    def _give_back(self) -> None:
        """Returns the memory of the buckets' buffers to the system. Their contents are lost."""
        for bucket in self.buckets:
            for buffer in (bucket.memory.all, bucket.memory.all_y):
                release(buffer)

    def reorder(self, places: Mapping[int, int]) -> None:
        """Sets the order in which buckets are sent, from tensors' positions in the forward pass. Buckets without a position
        follow, in reverse of the order in which their gradients become final."""
        self.places, end = places, len(places)
        # If averages are applied one by one, all of them wait for the bucket that `all_complete` reads, so it is sent first.
        ahead = self._assembler.last if self.now.eager else None
        first_use = {b.id: min((places.get(s.tensor, end) for s in b.slices), default=end) for b in self.buckets}
        for order, bucket in enumerate(sorted(self.buckets, key=lambda b: (b is not ahead, first_use[b.id], b.order))):
            bucket.order = order

    def latch(self, error: BaseException) -> None:
        """Stores the first error of this worker; later errors are ignored. Callers report lost peers, or a script that aborts
        in the middle of a step."""
        self.now.latch(error)

    def check(self) -> None:
        """Raises the stored error, if there is one. The first time, what the failed step sent returns to the residuals. If a
        lane does not end its call, perhaps inside a codec, residuals cannot be corrected."""
        if self.now.error is None:
            return
        if self.intact is None:
            self.now.error = self._components.explain(self.now.error)
            self.intact = self._paths.drain(DRAIN_S)
            for bucket in self.buckets if self.intact else ():
                if bucket.exchange.started:
                    bucket.ledger.discard(bucket.ledger.all_slices & ~bucket.exchange.applied)
                bucket.ledger.roll_back()
        raise self.now.error

    def forked(self, error: BaseException) -> None:
        """Makes every later call raise `error`, in a forked child process, which has none of this worker's threads."""
        self.now.error, self.intact = error, False

    def close(self) -> None:
        self.latch(CommError("the session is closed", code="E-SESSION-CLOSED"))
        self._paths.close(1.0)

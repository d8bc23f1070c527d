"""Follows the exchanges of a running job's local steps on a worker that has yet to join, and advances a snapshot by them.

The worker requests each result from the servers, without a contribution. The worker keeps the results encoded until it has
received the members' state as it was before one of these exchanges. Afterwards the worker applies the later results to that
state with the outer optimizer, in their order, as the members have done. The worker therefore has the same weights, bit for
bit.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from commlayer.callbacks import ignore
from commlayer.cluster.processes.bounded_calls import CHECK_S
from commlayer.cluster.processes.rows import section_values
from commlayer.cluster.servers.gather import ROW_BUCKET
from commlayer.cluster.servers.served_rows import rows_in
from commlayer.cluster.servers.worker_client import WorkerClient
from commlayer.compressors import make_codec
from commlayer.engine.buckets.bucket import EncodedBucket, make_bucket
from commlayer.engine.buckets.units import Units
from commlayer.engine.epochs.replica import GivenState
from commlayer.engine.step.update_norms import LENGTHS
from commlayer.engine.sync.local_steps import Fragment
from commlayer.errors import CommError, DeadlineExceeded
from commlayer.optim import OuterSGD
from commlayer.planner.buckets import divide_into_fragments, tensor_ranges
from commlayer.records import Bucket, Job, Plan
from commlayer.transport.protocol import SERVER_BASE, Flag, Handle, Header, Kind, Message, peer_name

AHEAD, ROWS_AHEAD = 2, 8
"""Number of results of a bucket, and of rows, that are requested before they are complete. A result that is not requested in
time is lost, since servers keep the last two only."""


class _Stream:
    """The results of one bucket, step after step."""

    def __init__(self, link: WorkerClient, bucket: int, server: int, given: GivenState, first: int, ahead: int) -> None:
        self._link, self._server, self._ahead = link, server, ahead
        self._needed = first
        """The first step whose result is needed."""
        self._header = Header(Kind.FOLLOW, given.generation, bucket=bucket, sender=link.transport.rank)
        self._arrived = threading.Condition()
        self._answers: dict[int, Handle] = {}
        """The server's answers that have arrived and were not taken, by step."""
        self._stopped = False
        for step in range(first, first + ahead):
            self._request(step)

    def _request(self, step: int) -> None:
        answer = self._link.transport.request(SERVER_BASE + self._server, self._header._replace(step=step))
        answer.on_done(partial(self._answered, step))

    def _answered(self, step: int, answer: Handle) -> None:
        with self._arrived:
            if self._stopped:
                return
            self._answers[step] = answer
            self._arrived.notify_all()
        if answer.error() is None and answer.message().header.flags & (Flag.ABANDON | Flag.LOST) != Flag.ABANDON:
            self._request(step + self._ahead)

    def set_first_needed(self, first: int) -> None:
        """Sets the first step whose result is needed: earlier ones may be lost."""
        with self._arrived:
            self._needed = first

    def stop(self) -> None:
        with self._arrived:
            self._stopped = True
            self._answers.clear()

    def check(self) -> None:
        """Raises an error if a result will never arrive."""
        with self._arrived:
            for step, answer in self._answers.items():
                message = answer.message()
                flags = message.header.flags
                if flags & Flag.ABANDON and not (flags & Flag.LOST and step < self._needed):
                    reason = str(message.body, "utf-8", "replace") or "a worker has withdrawn a contribution"
                    raise CommError(f"this home cannot follow the job's exchanges: {reason}; join again",
                                    peer=peer_name(message.peer), code="E-JOIN-MISSED")

    def has(self, step: int) -> bool:
        with self._arrived:
            return step in self._answers

    def take(self, step: int, deadline: float) -> Message:
        """Waits for the result of a step, and returns it. Earlier ones are dropped."""
        with self._arrived:
            while step not in self._answers:
                self.check()
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise DeadlineExceeded("sent no result of the bucket before the deadline", peer=peer_name(
                        SERVER_BASE + self._server), step=step, bucket=self._header.bucket)
                self._arrived.wait(min(left_s, CHECK_S))
            self._answers = {number: answer for number, answer in self._answers.items() if number >= step}
            return self._answers.pop(step).message()


class ResultFollower:
    """The results of all exchanges of a running job from one step on, and the state that they lead to."""

    def __init__(self, link: WorkerClient, job: Job, plan: Plan, given: GivenState, outer: OuterSGD, device: torch.device,
                 deadline_s: float) -> None:
        """Requests results from step `given.step` on, and rows from `given.row` on, under plan `plan`."""
        self._job, self._plan, self._outer, self._device, self._deadline_s = job, plan, outer, device, deadline_s
        buffers = {number for number, tensor in enumerate(job.tensors) if tensor.buffer}
        self._fragments = [[plan.buckets[place] for place in places if plan.buckets[place].slices[0].tensor not in buffers]
                           for places in divide_into_fragments(plan.buckets, plan.fragments)]
        self._streams = {b.id: _Stream(link, b.id, b.server, given, given.step, AHEAD)
                         for fragment in self._fragments for b in fragment}
        self._rows = _Stream(link, ROW_BUCKET, 0, given, given.row, ROWS_AHEAD) if given.matched else None
        if self._rows is not None:
            self._rows.set_first_needed(sys.maxsize)  # all earlier rows may be lost until begin() knows which one is needed
        self._units = Units(given.first_world)
        self._step, self._row = given.step, given.row
        """The exchange, and the first row, of which nothing is applied to the state yet."""
        self._starts: list[torch.Tensor] = []
        self._velocity: list[torch.Tensor | None] = []

    def begin(self, step: int, row: int, starts: Sequence[torch.Tensor], velocity: Sequence[torch.Tensor | None]) -> None:
        """Receives the state before exchange `step`, in which the next row was number `row`: the common weights and the outer
        optimizer's momentum."""
        if self._starts:
            return  # begins again
        self._step, self._row = step, row
        if self._rows is not None:
            self._rows.set_first_needed(row)
        self._starts = [start.to(self._device) for start in starts]
        self._velocity = [None if each is None else each.to(self._device) for each in velocity]

    def check(self) -> None:
        """Raises an error if this worker can no longer follow, for example after a change of plan."""
        for stream in self._all:
            stream.check()

    def catch_up(self) -> None:
        """Applies all exchanges whose results have arrived."""
        while all(stream.has(self._step) for stream in self._streams.values()):
            self.advance(self._step + 1)

    def advance(self, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Returns the weights and momentum before exchange `step`."""
        while self._step < step:
            for number, buckets in enumerate(self._fragments):
                self._apply(number, buckets)
            self._step += 1
        return self._starts, self._velocity

    def stop(self) -> None:
        """Requests no further results."""
        for stream in self._all:
            stream.stop()

    @property
    def _all(self) -> list[_Stream]:
        return [*self._streams.values(), *([] if self._rows is None else [self._rows])]

    def _apply(self, number: int, buckets: Sequence[Bucket]) -> None:
        """Applies the result of one fragment; see OuterSteps."""
        deadline = time.monotonic() + self._deadline_s * self._plan.local_steps
        norms = self._norms(deadline)
        fragment = Fragment(number, tensor_ranges(buckets), self._starts, self._velocity)
        changes = {n: torch.zeros_like(self._starts[n], device="cpu") for b in buckets for n in {s.tensor for s in b.slices}}
        weights = [self._decode(bucket, changes, deadline) for bucket in buckets]
        fragment.changes = {n: change.to(self._device) for n, change in changes.items()}
        finite, _ = fragment.scale_to_norms(norms, has_weight=any(weights))
        fragment.apply(self._starts, self._outer, finite=finite)

    def _decode(self, planned: Bucket, changes: Mapping[int, torch.Tensor], deadline: float) -> float:
        """Writes the mean of a bucket into `changes`. Returns its total weight."""
        message = self._streams[planned.id].take(self._step, deadline)
        bucket = make_bucket(planned, self._job, make_codec(planned, plan=self._plan), torch.device("cpu"), 0)
        assert isinstance(bucket, EncodedBucket)
        bucket.keep_encoded(ignore)  # the memory of a result is not used again
        weight = bucket.exchange.total = message.header.weight
        bucket.decode(message.body)
        bucket.finish(weight, message.header.used)
        average = self._units.average(bucket, weight)
        if average is not None:
            bucket.commit(average, [changes[s.tensor] for s in bucket.slices])
        return weight

    def _norms(self, deadline: float) -> list[list[float]]:
        """Returns the norms of the members' changes in the next exchange: the next row that has any."""
        while self._rows is not None:
            message = self._rows.take(self._row, deadline)
            self._row += 1
            if norms := section_values(rows_in(message).values(), LENGTHS):
                return norms
        return []

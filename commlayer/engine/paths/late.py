"""Path for buckets with late results: their exchange with a server continues after its step, and the next step uses the result.

A step waits only until its gradients are copied. The copy waits for the bucket's result of the previous step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

from commlayer.cluster.collectives import Groups
from commlayer.engine.buckets import WorkerBucket
from commlayer.engine.lanes import Lane, Staging
from commlayer.engine.late_results import LateResult
from commlayer.engine.paths.node import InNode, NodePath
from commlayer.engine.paths.path import BucketPath
from commlayer.engine.paths.server import ServerExchange
from commlayer.engine.step import Step


class LatePath(BucketPath):
    def __init__(
        self, results: Mapping[int, LateResult], buckets: Sequence[WorkerBucket], step: Step, staging: Staging,
        exchange: ServerExchange,
    ) -> None:
        """`results` maps a bucket's id to its late result."""
        self._results, self._buckets, self._step, self._staging, self._exchange = results, buckets, step, staging, exchange
        self._arrivals = step.arrivals()

    def begin(self, bucket: WorkerBucket) -> None:
        self._results[bucket.id].push(lambda: self._exchange.put(bucket, self._copy, self._arrived))

    def _copy(self, bucket: WorkerBucket) -> float:
        """Copies a bucket's gradients into its send buffer, on the encode lane, after the previous result has arrived. Returns
        the start time."""
        self._results[bucket.id].take()
        bucket.rewind()
        bucket.step = self._step.number
        begin = time.perf_counter()
        self._step.units.gather(bucket)
        self._staging.settle()
        self._arrivals.arrived()
        return begin

    def _arrived(self, bucket: WorkerBucket) -> None:
        """Marks the bucket's late result as arrived. Called on the decode lane."""
        self._results[bucket.id].arrived()

    def finish(self, deadline: float) -> None:
        if not self._arrivals.wait(deadline):
            missing = [bucket for bucket in self._buckets if not bucket.done] or self._buckets
            blocked = (bucket for bucket in missing if self._results[bucket.id].blocked)
            raise self._exchange.overdue(next(blocked, missing[0]))
        self._staging.join()

    def quiet(self, deadline: float) -> None:
        """Waits until no exchange is running. All results can then be read."""
        for bucket in self._buckets:
            if not self._results[bucket.id].wait(deadline, self._step.failed):
                raise self._exchange.overdue(bucket)
        self._staging.join()

    def reset(self) -> None:
        """Starts to count copied buckets for the next step. Running exchanges continue."""
        self._arrivals.expect(len(self._buckets))


# ---- route for late buckets if nodes have several ranks: summed in the node, exchanged by their owners, distributed after
# their step
#
# One lane does all work inside the node, in one order on all ranks: a step's gradients of all these buckets, then its
# results. So a bucket's gradients are copied after its previous result has been distributed, as `late_results.py` requires.

class LateNodePath(NodePath):
    def __init__(
        self, results: Mapping[int, LateResult], buckets: Sequence[WorkerBucket], step: Step, staging: Staging,
        exchange: ServerExchange, groups: Groups,
    ) -> None:
        """`results` maps a bucket's id to its late result."""
        late = groups.inside.late
        super().__init__(buckets, step, staging, exchange, groups, Lane("late", step.latch), late, late,
                         groups.inside.late_ready)
        self._results = results
        self._arrivals = step.arrivals()
        self._begun = 0
        self._waits: InNode | None = None
        """The exchange for whose result the lane waits; None if it waits for none."""

    def begin(self, bucket: WorkerBucket) -> None:
        self._results[bucket.id].begun()
        self._lane.put(partial(self._copy, bucket))
        self._begun += 1
        if self._begun == len(self._buckets):
            for one in self._ones:
                self._lane.put(partial(self._hand_on, one))

    def _copy(self, bucket: WorkerBucket) -> None:
        """Copies a bucket's gradients into its send buffer, on the lane, after the previous result has been distributed."""
        if self._step.error is not None:
            return
        with self._staging.lane(bucket):
            self._results[bucket.id].take()
            bucket.rewind()
            self._step.units.gather(bucket)
            bucket.write_tail(bucket.tail)
            one = self._one_of[bucket.id]
            if bucket is one.buckets[-1]:
                self._send(one)
            self._staging.settle()
        self._arrivals.arrived()

    def _hand_on(self, one: InNode) -> None:
        """Distributes the results of one exchange inside the node and marks them as arrived. Runs on the lane."""
        self._waits = one
        if self._bring(one):
            self._waits = None
            for bucket in one.buckets:
                self._results[bucket.id].arrived()

    def finish(self, deadline: float) -> None:
        if not self._arrivals.wait(deadline):
            raise self._missing([self._waits] if self._waits is not None else self._ones)
        self._staging.join()

    def quiet(self, deadline: float) -> None:
        """Waits until no exchange is running. All results can then be read."""
        for one in self._ones:
            for bucket in one.buckets:
                if not self._results[bucket.id].wait(deadline, self._step.failed):
                    raise self._missing([one])
        self._staging.join()

    def reset(self) -> None:
        """Starts to count copied buckets for the next step. Running exchanges continue."""
        self._begun = 0
        self._arrivals.expect(len(self._buckets))

    def drain(self, timeout_s: float) -> bool:
        return self._lane.drain(timeout_s)

    def close(self, timeout_s: float) -> None:
        self._lane.close(timeout_s)

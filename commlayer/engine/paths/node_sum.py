"""Route for buckets that use servers, from nodes with several ranks: summed in the node, exchanged by owners, distributed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from commlayer.cluster.collectives import Groups
from commlayer.engine.bucket import WorkerBucket
from commlayer.engine.lanes import Lane
from commlayer.engine.paths.in_node import InNode
from commlayer.engine.paths.node_route import NodeRoute
from commlayer.engine.paths.route import fill, take_back
from commlayer.engine.paths.server_exchange import ServerExchange
from commlayer.engine.staging import Staging
from commlayer.engine.step import Step


class NodeSum(NodeRoute):
    def __init__(
        self, buckets: Sequence[WorkerBucket], step: Step, staging: Staging, exchange: ServerExchange, groups: Groups,
        lane: Lane,
    ) -> None:
        inside = groups.inside
        super().__init__(buckets, step, staging, exchange, groups, lane, inside.out, inside.back, inside.ready)
        self._arrivals = step.arrivals()
        self._begun: list[InNode] = []
        self._here: set[int] = set()

    def begin(self, bucket: WorkerBucket) -> None:
        take_back(self, bucket, self._staging)
        fill(bucket, self._step, self._staging)
        one = self._one_of[bucket.id]
        if bucket is not one.buckets[-1]:
            return
        self._send(one)
        self._begun.append(one)
        if len(self._begun) == len(self._ones):
            # The next forward pass needs the last bucket first. After the backward pass, no computation overlaps the wait.
            for each in reversed(self._begun) if self._step.eager else self._begun:
                self._lane.put(partial(self._hand_on, each))

    def _hand_on(self, one: InNode) -> None:
        """Runs on the lane."""
        if self._bring(one):
            self._here.update(bucket.id for bucket in one.buckets)
            for _ in one.buckets:
                self._arrivals.arrived()

    def finish(self, deadline: float) -> None:
        if not self._arrivals.wait(deadline):
            raise self._overdue()
        self._staging.join()

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        if deadline is not None and not self._arrivals.wait_for(lambda: bucket.id in self._here, deadline):
            raise self._overdue()
        if ready := bucket.id in self._here:
            self._staging.join()
        return ready

    def _overdue(self) -> BaseException:
        return self._missing([one for one in self._ones if one.buckets[0].id not in self._here])

    def reset(self) -> None:
        self._begun.clear()
        self._here.clear()
        self._arrivals.expect(len(self._buckets))
        for bucket in self._buckets:
            bucket.rewind()

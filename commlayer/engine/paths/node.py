"""Paths over a server for nodes with several ranks: sum in the node, exchange by owners, distribution in the node."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from commlayer.cluster.processes.collectives import Groups
from commlayer.engine.buckets.bucket import EncodedBucket, ServedBucket, WorkerBucket
from commlayer.engine.buckets.current_step import Step
from commlayer.engine.paths.lanes import NEVER, Lane
from commlayer.engine.paths.node_sums import NodeSum, node_sums
from commlayer.engine.paths.path import Path
from commlayer.engine.paths.server_exchange import ServerExchange
from commlayer.engine.paths.staging import Staging
from commlayer.errors import CommError, DeadlineExceeded
from commlayer.transport.protocol import peer_name


class NodeReduce(Path[ServedBucket]):
    """Wraps the exchange with servers for nodes with several ranks. Every rank of a node has all of the path's buckets, and
    encodes those that it owns. A lane distributes results in the same order on all ranks of the node. The training threads of
    these ranks therefore need not wait at the same time."""

    ordered = True

    def __init__(
        self, buckets: Sequence[ServedBucket], step: Step, staging: Staging, exchange: ServerExchange, groups: Groups,
        lane: Lane,
    ) -> None:
        """`lane` distributes results, after a message to all ranks of the node. Paths whose buckets have equal delays share a
        lane and collectives."""
        super().__init__(buckets, step, staging)
        inside = groups.inside
        self._out, self._back, self._ready = ((inside.late, inside.late, inside.late_ready) if buckets[0].late else
                                              (inside.out, inside.back, inside.ready))
        self._exchange, self._lane = exchange, lane
        self._numbers = range(step.rank - groups.local, step.rank - groups.local + len(groups.site))
        """The numbers of the node's ranks in messages."""
        self._sums = node_sums(buckets, len(groups.site), groups.local)
        self._sum_of = {bucket.id: each for each in self._sums for bucket in each.buckets}
        self._answers = step.arrivals()
        self._begun: list[NodeSum] = []

    def begin(self, bucket: ServedBucket) -> None:
        self._fill(bucket)
        node_sum = self._sum_of[bucket.id]
        if bucket is not node_sum.buckets[-1]:
            return
        self._send(node_sum)
        self._begun.append(node_sum)
        if len(self._begun) == len(self._sums):
            # The next forward pass needs the last bucket first. No computation overlaps the wait after the backward pass.
            for each in reversed(self._begun) if self._step.eager else self._begun:
                self._lane.put(partial(self._hand_on, each))

    def _send(self, node_sum: NodeSum) -> None:
        """Sums filled buckets over the ranks of the node, and starts the exchange of this rank's own bucket with its server."""
        issued = time.perf_counter()
        node_sum.reduce(self._out)
        for bucket in node_sum.buckets:
            bucket.exchange.step = self._step.number
            if bucket is not node_sum.mine:
                bucket.ledger.report()  # the bucket's owner reports the rollback with this step's frame
        if node_sum.mine is not None:
            self._exchange.put(node_sum.mine, partial(self._reduced, node_sum, issued), lambda _: self._answers.arrived(),
                               in_order=True)

    def _reduced(self, node_sum: NodeSum, issued: float, bucket: EncodedBucket) -> float:
        """Waits for the sum inside the node, and reads its weight and used slices. Runs on the encode lane. Returns the
        time.perf_counter() at which it began to read."""
        node_sum.reduced(NEVER, self._step.failed)
        self._step.recorder.add("node.reduce", bucket.id, issued)
        begin = time.perf_counter()
        bucket.read_sum()
        return begin

    def _hand_on(self, node_sum: NodeSum) -> None:
        """Waits for the servers' results and distributes them inside the node. Runs on the lane."""
        mine, failed = node_sum.mine, self._step.failed
        if failed() is not None:
            return
        with self._staging.way_back(node_sum.buckets[0]):
            if mine is None:
                node_sum.reduced(NEVER, failed)
            else:
                self._answers.wait_for(lambda: mine.exchange.answered, NEVER)
                if failed() is not None:
                    return
                mine.write_tail(mine.memory.tail_y)
            if self._ready is not None:  # a message between hosts, without the GPUs
                self._ready.allreduce(torch.zeros(1)).wait(NEVER, failed)
            begin = time.perf_counter()
            node_sum.distribute(self._back).wait(NEVER, failed)
            for bucket in node_sum.buckets:
                if bucket is not mine:
                    bucket.read_result()
                self._step.recorder.add("node.broadcast", bucket.id, begin)
        for bucket in node_sum.buckets:
            self._arrived(bucket)

    def deadline_error(self, bucket: WorkerBucket) -> CommError:
        """Creates the deadline error for the first missing result. The error names the peer that caused the delay."""
        sums = [node_sum for node_sum in self._sums if not node_sum.buckets[0].exchange.done] or self._sums
        mine = next((each.mine for each in sums if each.mine is not None and not each.mine.exchange.answered), None)
        if mine is not None:
            return self._exchange.deadline_error(mine)
        others = [bucket for each in sums for bucket in each.buckets if bucket is not each.mine]
        bucket, peer = sums[0].buckets[0], "a rank of this node"
        if others:
            bucket, peer = others[0], peer_name(others[0].planned.owner_in(self._numbers))
        return DeadlineExceeded("the result was not distributed inside the node before the deadline", peer=peer,
                                step=bucket.exchange.step, bucket=bucket.id)

    def reset(self) -> None:
        super().reset()
        self._begun.clear()

"""Sums buckets among the ranks of a node, and distributes the results to them.

A single bucket is reduced onto its owner (the rank that encodes it), which broadcasts the result. Shards are buckets of which
each rank owns one; they are summed by one exchange: every rank sends the other ranks their shards of its gradients, and sums
the shards that it receives. One all-gather distributes all results.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch

from commlayer.cluster.collectives import Channel, Groups
from commlayer.cluster.process_groups import PendingCollective
from commlayer.engine.buckets import EncodedBucket, ServedBucket, WorkerBucket
from commlayer.engine.lanes import Lane, Staging
from commlayer.engine.paths.path import OneStepLate, Path
from commlayer.engine.paths.server import FOREVER_S, ServerExchange
from commlayer.engine.step import Step
from commlayer.errors import CommError, DeadlineExceeded
from commlayer.planner.plan_rules import together
from commlayer.transport.protocol import peer_name

Error = Callable[[], BaseException | None]


class NodeSum(ABC):
    """Sums some buckets inside a node and distributes their results, on one rank. Every step calls `reduce`, `reduced`,
    `distribute`, in this order."""

    def __init__(self, buckets: Sequence[ServedBucket]) -> None:
        self.buckets = tuple(buckets)
        self.mine = next((bucket for bucket in buckets if isinstance(bucket, EncodedBucket)), None)
        """The bucket that this rank encodes; None if this rank encodes none of the buckets."""

    @abstractmethod
    def reduce(self, channel: Channel) -> None:
        """Starts to sum send buffers, flags and weights of all buckets over the node's ranks."""

    @abstractmethod
    def reduced(self, deadline: float, failed: Error) -> None:
        """Waits for the sums; each owner then has the sum of its bucket. After that, buffers of other owners' buckets can be
        overwritten."""

    @abstractmethod
    def distribute(self, channel: Channel) -> PendingCollective:
        """Starts to distribute each owner's result, with flags and weight, to the receive buffers of all ranks of the node."""


class OwnedSum(NodeSum):
    def __init__(self, bucket: ServedBucket) -> None:
        super().__init__([bucket])
        self._memory, self._owner = bucket.memory, bucket.planned.owner

    def reduce(self, channel: Channel) -> None:
        self._pending = channel.reduce(self._memory.all, self._owner)

    def reduced(self, deadline: float, failed: Error) -> None:
        self._pending.wait(deadline, failed)

    def distribute(self, channel: Channel) -> PendingCollective:
        return channel.broadcast(self._memory.all_y, self._owner)


class ShardedSum(NodeSum):
    """Sums and distributes one bucket for each rank of a node (its shard), in the order of these ranks."""

    def __init__(self, buckets: Sequence[ServedBucket], local: int) -> None:
        super().__init__(buckets)
        self._own, self._local = buckets[local].memory, local
        self._sizes = [bucket.memory.all.numel() for bucket in buckets]
        most, own_size = max(self._sizes), self._sizes[local]
        self._parts = self._own.all.new_zeros(sum(self._sizes) - own_size)
        """This rank's gradients of the buckets (shards) that other ranks of the node encode, one bucket after the other."""
        self._rows = self._own.all.new_zeros(len(buckets), most)
        """One row for each rank. During the sum: the other ranks' gradients in this rank's shard. After it: all results, as the
        receive buffers."""
        self._row = self._own.all.new_zeros(most)
        at = 0
        for number, (bucket, size) in enumerate(zip(buckets, self._sizes, strict=True)):
            if number != local:
                bucket.memory.place(self._parts[at : at + size], self._rows[number, :size])
                at += size

    def reduce(self, channel: Channel) -> None:
        size = self._sizes[self._local]
        sent = [0 if number == self._local else n for number, n in enumerate(self._sizes)]
        received = [0 if number == self._local else size for number in range(len(self._sizes))]
        self._received = self._rows.view(-1)[: sum(received)]
        self._pending = channel.alltoall(self._received, self._parts, received, sent)

    def reduced(self, deadline: float, failed: Error) -> None:
        self._pending.wait(deadline, failed)
        for row in self._received.view(len(self._sizes) - 1, -1):
            self._own.all += row

    def distribute(self, channel: Channel) -> PendingCollective:
        self._row[: self._sizes[self._local]] = self._own.all_y
        return channel.allgather(self._rows.view(-1), self._row)


def node_sums(buckets: Sequence[ServedBucket], ranks_per_node: int, local: int) -> list[NodeSum]:
    """Returns the sums inside a node that these buckets of a plan need, in order."""
    return [
        ShardedSum(buckets[run.start : run.stop], local) if len(run) > 1 else OwnedSum(buckets[run.start])
        for run in together([bucket.planned for bucket in buckets], ranks_per_node)
    ]


# ---- paths over a server for nodes with several ranks: sum in the node, exchange by owners, distribution in the node

class NodeReduce(Path[ServedBucket]):
    """Wraps the exchange with servers for nodes with several ranks. Every rank of a node has all of the path's buckets, and
    encodes those that it owns. A lane distributes results in an order that is the same on all ranks of the node, so the
    training threads of these ranks need not wait at the same time."""

    ordered = True

    def __init__(
        self, buckets: Sequence[ServedBucket], step: Step, staging: Staging, exchange: ServerExchange, groups: Groups,
        lane: Lane, *, late: bool = False,
    ) -> None:
        """`lane` distributes results, after a message to all ranks of the node. Paths with equal `late` share a lane."""
        super().__init__(buckets, step, staging)
        inside = groups.inside
        self._out, self._back, self._ready = ((inside.late, inside.late, inside.late_ready) if late else
                                              (inside.out, inside.back, inside.ready))
        self._exchange, self._lane, self._first_rank = exchange, lane, groups.rank - groups.local
        self._sums = node_sums(buckets, groups.ranks_per_node, groups.local)
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
        node_sum.reduced(time.monotonic() + FOREVER_S, self._step.failed)
        self._step.recorder.add("node.reduce", bucket.id, issued)
        begin = time.perf_counter()
        bucket.read_sum()
        return begin

    def _hand_on(self, node_sum: NodeSum) -> None:
        """Waits for the servers' results and distributes them inside the node. Runs on the lane."""
        mine, failed, forever = node_sum.mine, self._step.failed, time.monotonic() + FOREVER_S
        if failed() is not None:
            return
        with self._staging.way_back(node_sum.buckets[0]):
            if mine is None:
                node_sum.reduced(forever, failed)
            else:
                self._answers.wait_for(lambda: mine.exchange.answered, forever)
                if failed() is not None:
                    return
                mine.write_tail(mine.memory.tail_y)
            if self._ready is not None:  # a message between hosts, without the GPUs
                self._ready.allreduce(torch.zeros(1)).wait(forever, failed)
            begin = time.perf_counter()
            node_sum.distribute(self._back).wait(forever, failed)
            for bucket in node_sum.buckets:
                if bucket is not mine:
                    bucket.read_result()
                self._step.recorder.add("node.broadcast", bucket.id, begin)
        for bucket in node_sum.buckets:
            self._arrived(bucket)

    def overdue(self, bucket: WorkerBucket) -> CommError:
        """Creates the deadline error for the first missing result. It names the peer that caused the delay."""
        sums = [node_sum for node_sum in self._sums if not node_sum.buckets[0].exchange.done] or self._sums
        mine = next((each.mine for each in sums if each.mine is not None and not each.mine.exchange.answered), None)
        if mine is not None:
            return self._exchange.overdue(mine)
        others = [bucket for each in sums for bucket in each.buckets if bucket is not each.mine]
        bucket, peer = sums[0].buckets[0], "a rank of this node"
        if others:
            bucket, peer = others[0], peer_name(self._first_rank + others[0].planned.owner)
        return DeadlineExceeded("the result was not distributed inside the node before the deadline", peer=peer,
                                step=bucket.exchange.step, bucket=bucket.id)

    def reset(self) -> None:
        super().reset()
        self._begun.clear()


class LateNodeReduce(OneStepLate[ServedBucket], NodeReduce):
    """Like NodeReduce, for buckets whose averages are applied one step after their gradients. It sums a step's gradients after
    all results of the previous step have been distributed, so all ranks of the node call collectives in the same order."""

    def start(self, bucket: ServedBucket) -> None:
        NodeReduce.begin(self, bucket)

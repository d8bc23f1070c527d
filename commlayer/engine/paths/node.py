"""Sums buckets among the ranks of a node, and distributes the results to them.

A single bucket is reduced onto its owner, which broadcasts the result. Shards, one for each rank, share one exchange: every
rank sends the other ranks their shards of its gradients, and sums the shards that it receives. One all-gather distributes all
results.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch

from commlayer.cluster.collectives import Channel, Groups
from commlayer.cluster.process_groups import PendingCollective
from commlayer.engine.buckets import WorkerBucket
from commlayer.engine.lanes import Lane, Staging
from commlayer.engine.paths.path import BucketPath, fill, take_back
from commlayer.engine.paths.server import FOREVER_S, ServerExchange
from commlayer.engine.step import Step
from commlayer.errors import CommError, DeadlineExceeded
from commlayer.planner.plan_rules import together
from commlayer.transport.protocol import peer_name

Error = Callable[[], BaseException | None]


class InNode(ABC):
    """One rank's part in the sum and distribution of some buckets inside a node. Every step calls `add_up`, `added`, `hand_on`,
    `handed`, in this order."""

    def __init__(self, buckets: Sequence[WorkerBucket]) -> None:
        self.buckets = tuple(buckets)
        self.mine = next((bucket for bucket in buckets if bucket.coded), None)
        """The bucket that this rank encodes; None if it encodes none of them."""

    @abstractmethod
    def add_up(self, channel: Channel) -> None:
        """Starts to sum send buffers, flags and weights of all buckets over the node's ranks."""

    @abstractmethod
    def added(self, deadline: float, failed: Error) -> None:
        """Waits for the sums: each owner then has the sum of its bucket. After that, buffers of other owners' buckets can be
        overwritten."""

    @abstractmethod
    def hand_on(self, channel: Channel) -> PendingCollective:
        """Starts to distribute each owner's result, with flags and weight, to all ranks of the node."""

    @abstractmethod
    def handed(self) -> None:
        """Moves the distributed results into the buckets' receive buffers, after the wait for them."""

    def tell(self, channel: Channel) -> PendingCollective:
        """Starts a collective that completes when every owner has its result. It runs on the hosts, without the GPUs."""
        return channel.allreduce(torch.zeros(1))


class OwnedInNode(InNode):
    def __init__(self, bucket: WorkerBucket) -> None:
        super().__init__([bucket])
        self._bucket = bucket

    def add_up(self, channel: Channel) -> None:
        self._pending = channel.reduce(self._bucket.all, self._bucket.owner)

    def added(self, deadline: float, failed: Error) -> None:
        self._pending.wait(deadline, failed)

    def hand_on(self, channel: Channel) -> PendingCollective:
        return channel.broadcast(self._bucket.all_y, self._bucket.owner)

    def handed(self) -> None:
        """Does nothing: the broadcast has written the result into the receive buffer."""


class ShardedInNode(InNode):
    """Sums and distributes one bucket for each local rank (its shard), in the order of local ranks."""

    def __init__(self, buckets: Sequence[WorkerBucket], local: int) -> None:
        super().__init__(buckets)
        mine, others = buckets[local], [bucket for bucket in buckets if bucket is not buckets[local]]
        self._own, self._sizes = mine, [bucket.all.numel() for bucket in buckets]
        most = max(self._sizes)
        self._parts = mine.all.new_zeros(sum(bucket.all.numel() for bucket in others))
        """This rank's gradients in the shards of other ranks, one shard after the other."""
        self._rows = mine.all.new_zeros(len(buckets), most)
        """First the other ranks' gradients in this rank's shard, later all results; one row for each rank."""
        self._row = mine.all.new_zeros(most)
        self._local = local
        at = 0
        for number, bucket in enumerate(buckets):
            if bucket is not mine:
                size = self._sizes[number]
                bucket.lie_in(self._parts[at : at + size], self._rows[number, :size])
                at += size

    def add_up(self, channel: Channel) -> None:
        size = self._sizes[self._local]
        sent = [0 if number == self._local else n for number, n in enumerate(self._sizes)]
        received = [0 if number == self._local else size for number in range(len(self._sizes))]
        self._got = self._rows.view(-1)[: sum(received)]
        self._pending = channel.alltoall(self._got, self._parts, received, sent)

    def added(self, deadline: float, failed: Error) -> None:
        self._pending.wait(deadline, failed)
        for row in self._got.view(len(self._sizes) - 1, -1):
            self._own.all += row

    def hand_on(self, channel: Channel) -> PendingCollective:
        self._row[: self._sizes[self._local]] = self._own.all_y
        return channel.allgather(self._rows.view(-1), self._row)

    def handed(self) -> None:
        """Does nothing: each row is the receive buffer of a bucket."""


def in_node(buckets: Sequence[WorkerBucket], ranks_per_node: int, local: int) -> list[InNode]:
    """The sums inside a node that these buckets of a plan need, in order."""
    return [
        ShardedInNode(buckets[run.start : run.stop], local) if len(run) > 1 else OwnedInNode(buckets[run.start])
        for run in together([bucket.planned for bucket in buckets], ranks_per_node)
    ]


# ---- base of routes for nodes with several ranks: owners exchange buckets with servers, and results return to all ranks
#
# A lane distributes results in an order that is the same on all ranks of the node. So ranks need not wait for a result at the
# same time.

class NodePath(BucketPath):
    """Base class of paths for nodes with several ranks. Every rank of a node has all of the path's buckets, and encodes those
    that it owns."""

    ordered = True

    def __init__(
        self, buckets: Sequence[WorkerBucket], step: Step, staging: Staging, exchange: ServerExchange, groups: Groups,
        lane: Lane, out: Channel, back: Channel, ready: Channel | None,
    ) -> None:
        """`lane` distributes results over the channel `back`, after a notice over `ready`. Paths that share one of these three
        must share all of them."""
        self._buckets, self._step, self._staging, self._exchange = buckets, step, staging, exchange
        self._ready, self._lane, self._out, self._back = ready, lane, out, back
        self._first_rank = groups.rank - groups.local
        self._ones = in_node(buckets, groups.ranks_per_node, groups.local)
        self._one_of = {bucket.id: one for one in self._ones for bucket in one.buckets}
        self._answers = step.arrivals()

    def _send(self, one: InNode) -> None:
        """Sums filled buckets over the ranks of the node, and starts the exchange of this rank's own bucket with its server."""
        issued = time.perf_counter()
        one.add_up(self._out)
        for bucket in one.buckets:
            bucket.step = self._step.number
            if bucket is not one.mine:
                bucket.undone = 0  # its owner reports it with this step's frame
        if one.mine is not None:
            self._exchange.put(one.mine, self._added(one, issued), self._answered, in_turn=True)

    def _added(self, one: InNode, issued: float) -> Callable[[WorkerBucket], float]:
        def added(bucket: WorkerBucket) -> float:
            """Waits for the sum inside the node, and reads its weight and used slices. Runs on the encode lane; returns the
            start time."""
            one.added(time.monotonic() + FOREVER_S, self._step.failed)
            self._step.recorder.add("node.reduce", bucket.id, issued)
            begin = time.perf_counter()
            bucket.weight = float(bucket.tail[-1])
            bucket.used = sum(1 << i for i, flag in enumerate(bucket.tail[:-1].tolist()) if flag > 0)
            return begin

        return added

    def _answered(self, _bucket: WorkerBucket) -> None:
        """Counts an answer of the server. Runs on the decode lane."""
        self._answers.arrived()

    def _bring(self, one: InNode) -> bool:
        """Waits for the servers' answers and distributes the results inside the node. Runs on the path's lane. Returns False if
        the step failed before."""
        mine, failed, forever = one.mine, self._step.failed, time.monotonic() + FOREVER_S
        if self._step.error is not None:
            return False
        with self._staging.way_back(one.buckets[0]):
            if mine is None:
                one.added(forever, failed)
            else:
                self._answers.wait_for(lambda: mine.done, forever)
                if failed() is not None:
                    return False
                mine.write_tail(mine.tail_y)
            if self._ready is not None:
                one.tell(self._ready).wait(forever, failed)
            begin = time.perf_counter()
            one.hand_on(self._back).wait(forever, failed)
            one.handed()
            for bucket in one.buckets:
                if bucket is not mine:
                    bucket.read_result()
                self._step.recorder.add("node.broadcast", bucket.id, begin)
        return True

    def _missing(self, ones: Sequence[InNode]) -> CommError:
        """Creates the deadline error for the first missing result. It names the peer that caused the delay."""
        if (mine := next((one.mine for one in ones if one.mine is not None and not one.mine.done), None)) is not None:
            return self._exchange.overdue(mine)
        others = [bucket for one in ones for bucket in one.buckets if bucket is not one.mine]
        bucket, peer = ones[0].buckets[0], "a rank of this node"
        if others:
            bucket, peer = others[0], peer_name(self._first_rank + others[0].owner)
        return DeadlineExceeded("the result was not distributed inside the node before the deadline", peer=peer,
                                step=bucket.step, bucket=bucket.id)


# ---- route for buckets that use servers, from nodes with several ranks: summed in the node, exchanged by owners, distributed

class NodeReduce(NodePath):
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
        """Distributes the results of one exchange inside the node. Runs on the lane."""
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

"""Sums buckets among the ranks of a node, and distributes the results to them.

A single bucket is reduced onto its owner, which broadcasts the result. Shards, one per rank, share one exchange: every rank
sends the others their shards of its gradients, and sums those that it receives. One all-gather distributes all results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from commlayer.cluster.collectives import Channel
from commlayer.cluster.process_groups import PendingCollective
from commlayer.engine.bucket import WorkerBucket
from commlayer.planner.model.shards import together

Error = Callable[[], BaseException | None]


class InNode(ABC):
    """One rank's part. The calls are `add_up`, `added`, `hand_on`, `handed`, in this order, in every step."""

    def __init__(self, buckets: Sequence[WorkerBucket]) -> None:
        self.buckets = tuple(buckets)
        self.mine = next((bucket for bucket in buckets if bucket.coded), None)
        """The bucket that this rank codes."""

    @abstractmethod
    def add_up(self, channel: Channel) -> None:
        """Begins to sum x and tail of all buckets."""

    @abstractmethod
    def added(self, deadline: float, failed: Error) -> None:
        """Waits for the sums: each owner has that of its bucket. After that, buffers of other owners' buckets may be
        overwritten."""

    @abstractmethod
    def hand_on(self, channel: Channel) -> PendingCollective:
        """Begins to distribute y and its tail from each owner to all."""

    @abstractmethod
    def handed(self) -> None:
        """Puts the results in place, after the wait for them."""

    def tell(self, channel: Channel) -> PendingCollective:
        """Completes when every owner has its result. Runs on the host."""
        return channel.allreduce(torch.zeros(1))


class Owned(InNode):
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
        """Results are already in place."""


class Shards(InNode):
    """One bucket of each local rank, in their order."""

    def __init__(self, buckets: Sequence[WorkerBucket], local: int) -> None:
        super().__init__(buckets)
        mine, others = buckets[local], [bucket for bucket in buckets if bucket is not buckets[local]]
        self._own, self._sizes = mine, [bucket.all.numel() for bucket in buckets]
        most = max(self._sizes)
        self._parts = mine.all.new_zeros(sum(bucket.all.numel() for bucket in others))
        """This rank's gradients in the others' shards, side by side."""
        self._rows = mine.all.new_zeros(len(buckets), most)
        """The others' gradients in this rank's shard, and later all results."""
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
        """Results are already in place, in the rows of their buckets."""


def in_node(buckets: Sequence[WorkerBucket], ranks_per_node: int, local: int) -> list[InNode]:
    """The exchanges that these buckets of a plan need, in order."""
    return [
        Shards(buckets[run.start : run.stop], local) if len(run) > 1 else Owned(buckets[run.start])
        for run in together([bucket.planned for bucket in buckets], ranks_per_node)
    ]

"""Buckets that go through a node as one: added up among its ranks, and handed on to them. Knows memory, and no servers.

A bucket alone is reduced onto its owner, which broadcasts the result. Shards, one of each rank's, go in one exchange: every
rank sends the others their shards of its gradients and adds up what it gets of its own; one all-gather brings all results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from commlayer.cluster.stage_groups import Channel
from commlayer.engine.bucket import WorkerBucket
from commlayer.planner.model.shards import together
from commlayer.transport.pending import Pending

Error = Callable[[], BaseException | None]


class InNode(ABC):
    """Of one rank. `add_up`, its wait, `back` and its wait follow one another, and then it begins anew."""

    def __init__(self, buckets: Sequence[WorkerBucket]) -> None:
        self.buckets = tuple(buckets)
        self.mine = next((bucket for bucket in buckets if bucket.coded), None)
        """The bucket that this rank codes."""

    @abstractmethod
    def add_up(self, channel: Channel) -> None:
        """Begins to add up x and tail of all buckets."""

    @abstractmethod
    def added(self, deadline: float, failed: Error) -> None:
        """Waits for that: then the sum of its bucket is with each owner, and what others own may be overwritten."""

    @abstractmethod
    def hand_on(self, channel: Channel) -> Pending:
        """Begins to bring y and its tail from each owner to all."""

    @abstractmethod
    def handed(self) -> None:
        """Behind the wait for that: puts them in place."""

    def tell(self, channel: Channel) -> Pending:
        """Over when every owner has its result. On the host."""
        return channel.allreduce(torch.zeros(1))


class Owned(InNode):
    """One bucket."""

    def __init__(self, bucket: WorkerBucket) -> None:
        super().__init__([bucket])
        self._bucket = bucket

    def add_up(self, channel: Channel) -> None:
        self._pending = channel.reduce(self._bucket.all, self._bucket.owner)

    def added(self, deadline: float, failed: Error) -> None:
        self._pending.wait(deadline, failed)

    def hand_on(self, channel: Channel) -> Pending:
        return channel.broadcast(self._bucket.all_y, self._bucket.owner)

    def handed(self) -> None:
        """They are in place."""


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
        """What the others have of this rank's shard, and then all results."""
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
        got = [0 if number == self._local else size for number in range(len(self._sizes))]
        self._got = self._rows.view(-1)[: sum(got)]
        self._pending = channel.alltoall(self._got, self._parts, got, sent)

    def added(self, deadline: float, failed: Error) -> None:
        self._pending.wait(deadline, failed)
        for row in self._got.view(len(self._sizes) - 1, -1):
            self._own.all += row

    def hand_on(self, channel: Channel) -> Pending:
        self._row[: self._sizes[self._local]] = self._own.all_y
        return channel.allgather(self._rows.view(-1), self._row)

    def handed(self) -> None:
        """They are in place: the others' lie in their rows."""


def in_node(buckets: Sequence[WorkerBucket], ranks_per_node: int, local: int) -> list[InNode]:
    """Those that these buckets of a plan make, in order."""
    return [
        Shards(buckets[run.start : run.stop], local) if len(run) > 1 else Owned(buckets[run.start])
        for run in together([bucket.planned for bucket in buckets], ranks_per_node)
    ]

"""Sums inside a node, before and after the exchange with servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commlayer.cluster.processes.bounded_calls import PendingCollective
from commlayer.cluster.processes.channels import Channel
from commlayer.engine.buckets.bucket import EncodedBucket, ServedBucket
from commlayer.planner.plan_rules import shard_groups

Error = Callable[[], BaseException | None]


class NodeSum:
    """Sums buckets inside a node and distributes their results, on one rank: in this class one bucket. Every step calls
    `reduce`, `reduced`, `distribute`, in this order."""

    def __init__(self, buckets: Sequence[ServedBucket], owner: int) -> None:
        """`owner`: the node's rank that encodes the bucket."""
        self.buckets, self._owner = tuple(buckets), owner
        self.mine = next((bucket for bucket in buckets if isinstance(bucket, EncodedBucket)), None)
        """The bucket that this rank encodes. The value is None if this rank encodes none of the buckets."""

    def reduce(self, channel: Channel) -> None:
        """Starts to sum send buffers, flags and weights of all buckets over the node's ranks."""
        self._pending = channel.reduce(self.buckets[0].memory.all, self._owner)

    def reduced(self, deadline: float, failed: Error) -> None:
        """Waits for the sums; each owner then has the sum of its bucket. After that, buffers of other owners' buckets can be
        overwritten."""
        self._pending.wait(deadline, failed)

    def distribute(self, channel: Channel) -> PendingCollective:
        """Starts to distribute each owner's result, with flags and weight, to the receive buffers of all ranks of the node."""
        return channel.broadcast(self.buckets[0].memory.all_y, self._owner)


class ShardedSum(NodeSum):
    """Sums and distributes one bucket for each rank of a node (its shard), in the order of these ranks."""

    def __init__(self, buckets: Sequence[ServedBucket], local: int) -> None:
        super().__init__(buckets, local)
        self._own, self._local = buckets[local].memory, local
        self._sizes = [bucket.memory.all.numel() for bucket in buckets]
        most, own_size = max(self._sizes), self._sizes[local]
        self._parts = self._own.all.new_zeros(sum(self._sizes) - own_size)
        """This rank's gradients of the buckets (shards) that other ranks of the node encode, one bucket after the other."""
        self._rows = self._own.all.new_zeros(len(buckets), most)
        """The tensor has one row for each rank. During the sum: the other ranks' gradients in this rank's shard. After it: all
        results, as the receive buffers."""
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
        super().reduced(deadline, failed)
        for row in self._received.view(len(self._sizes) - 1, -1):
            self._own.all += row

    def distribute(self, channel: Channel) -> PendingCollective:
        self._row[: self._sizes[self._local]] = self._own.all_y
        return channel.allgather(self._rows.view(-1), self._row)


def node_sums(buckets: Sequence[ServedBucket], ranks: int, local: int) -> list[NodeSum]:
    """Returns the sums that these buckets of a plan need inside a node of `ranks` ranks, in order."""
    return [
        ShardedSum(buckets[run.start : run.stop], local) if len(run) > 1 else
        NodeSum(buckets[run.start : run.stop], buckets[run.start].planned.owner_in(range(ranks)))
        for run in shard_groups([bucket.planned for bucket in buckets], ranks)
    ]

"""Base of routes for nodes with several ranks: owners exchange buckets with servers, and results return to all ranks.

A lane distributes results in an order that is the same on all ranks of the node. So ranks need not wait for a result at the
same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from commlayer.cluster.collectives import Channel, Groups
from commlayer.engine.bucket import WorkerBucket
from commlayer.engine.lanes import Lane
from commlayer.engine.paths.in_node import InNode, in_node
from commlayer.engine.paths.route import Route
from commlayer.engine.paths.server_exchange import FOREVER_S, ServerExchange
from commlayer.engine.staging import Staging
from commlayer.engine.step import Step
from commlayer.errors import CommError, DeadlineExceeded
from commlayer.transport.protocol import peer_name


class NodeRoute(Route):
    """Every rank of a node has all these buckets, and codes those that it owns."""

    ordered = True

    def __init__(
        self, buckets: Sequence[WorkerBucket], step: Step, staging: Staging, exchange: ServerExchange, groups: Groups,
        lane: Lane, out: Channel, back: Channel, ready: Channel | None,
    ) -> None:
        """`lane` distributes results over `back`, after a notice over `ready`. Routes that share one of the three share all of
        them."""
        self._buckets, self._step, self._staging, self._exchange = buckets, step, staging, exchange
        self._ready, self._lane, self._out, self._back = ready, lane, out, back
        self._first_rank = groups.rank - groups.local
        self._ones = in_node(buckets, groups.ranks_per_node, groups.local)
        self._one_of = {bucket.id: one for one in self._ones for bucket in one.buckets}
        self._answers = step.arrivals()

    def _send(self, one: InNode) -> None:
        """Its buckets are filled: sums them, and exchanges the sum of this rank's own bucket."""
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
            """Runs on the encode lane."""
            one.added(time.monotonic() + FOREVER_S, self._step.failed)
            self._step.recorder.add("node.reduce", bucket.id, issued)
            begin = time.perf_counter()
            bucket.weight = float(bucket.tail[-1])
            bucket.used = sum(1 << i for i, flag in enumerate(bucket.tail[:-1].tolist()) if flag > 0)
            return begin

        return added

    def _answered(self, _bucket: WorkerBucket) -> None:
        """Runs on the decode lane."""
        self._answers.arrived()

    def _bring(self, one: InNode) -> bool:
        """Runs on the route's lane, until all ranks have the results. Returns whether they have them."""
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
        """An error that names the peer because of which the first of these has not arrived."""
        if (mine := next((one.mine for one in ones if one.mine is not None and not one.mine.done), None)) is not None:
            return self._exchange.overdue(mine)
        others = [bucket for one in ones for bucket in one.buckets if bucket is not one.mine]
        bucket, peer = ones[0].buckets[0], "a rank of this node"
        if others:
            bucket, peer = others[0], peer_name(self._first_rank + others[0].owner)
        return DeadlineExceeded("its result was not handed on inside the node before the deadline", peer=peer,
                                step=bucket.step, bucket=bucket.id)

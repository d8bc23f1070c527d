"""Workers of one job in one thread: a plan's codecs, buckets and server without a network. Knows gradients; no model, no clock.

Everything that decides what is learnt is the runtime's own: buckets gather, codecs code with residuals, the summation service
adds in member order and codes the sum again. Only what carries bytes is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commlayer.compressors import codec_of
from commlayer.control.server_codecs import ops_of, senders_of
from commlayer.records import Job, Plan
from commlayer.runtime.bucket import WorkerBucket
from commlayer.runtime.entries_sent import allot_entries
from commlayer.transport.protocol import Header, Kind, Message
from commlayer.transport.summation import Reply, Summation


class VirtualWorkers:
    """`world` workers and a server, under a plan of which one server sums every bucket in one round."""

    def __init__(self, job: Job, plan: Plan, world: int) -> None:
        self.world, self._step = world, 0
        self._server = Summation(0, 1, dict(ops_of(plan, 0)), senders_of(plan, world))
        self._buckets = [
            [WorkerBucket(bucket, job, codec_of(bucket, plan=plan), torch.device("cpu"), order, rank=rank)
             for rank in range(world)]
            for order, bucket in enumerate(plan.buckets)
        ]
        for of_worker in zip(*self._buckets, strict=True):
            allot_entries(of_worker)
        self.received = 0
        """Bytes of the last step's results."""

    def average(self, gradients: Sequence[Sequence[torch.Tensor]]) -> tuple[list[torch.Tensor], int]:
        """The mean over all workers' gradients, which every worker gets; what the busiest direction of a worker carries for it.

        `gradients`: by worker, in the order of the job's tensors.
        """
        mean = [torch.empty_like(tensor) for tensor in gradients[0]]
        sent, received = [0] * self.world, 0
        for bucket in self._buckets:
            replies: list[Reply] = []
            for rank, (worker, own) in enumerate(zip(bucket, gradients, strict=True)):
                worker.rewind()
                worker.step = self._step
                worker.sources = [own[s.tensor].contiguous() for s in worker.slices]
                worker.gather(1.0, 1.0)
                body = self.code(rank, worker)
                sent[rank] += len(body)
                header = Header(Kind.PUSH, 1, self._step, worker.id, codec=worker.codec.id, sender=rank, weight=1.0,
                                used=worker.all_slices, total=float(self.world) if worker.in_means else 0.0)
                replies += self._server.push(Message(rank, header, body), now=0.0)
            for reply in replies:
                bucket[reply.peer].decode(memoryview(reply.body))
            received += len(replies[0].body)
            bucket[0].commit(1.0 / self.world, [mean[s.tensor] for s in bucket[0].slices])
        self._step += 1
        self.received = received
        return mean, max(received, *sent)

    def code(self, rank: int, worker: WorkerBucket) -> memoryview:
        """One bucket's payload. For who measures what is sent, too."""
        return worker.payload[: worker.encode()]

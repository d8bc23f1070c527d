"""Virtual workers: all workers of a job in one thread, with a plan's codecs, buckets and server but without a network.

Everything that affects learning is the runtime's own code: buckets gather, codecs encode with residuals, and the summation
service adds in member order and encodes the sum. Only the transport is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from commlayer.cluster.server_codecs import ops_of, senders_of
from commlayer.cluster.summation import Summation
from commlayer.cluster.summation_cell import Reply
from commlayer.compressors import codec_of
from commlayer.engine.bucket import WorkerBucket
from commlayer.engine.entries_sent import allot_entries
from commlayer.records import Job, Plan
from commlayer.transport.protocol import Header, Kind, Message


class VirtualWorkers:
    """`world` workers and a server, under a plan whose buckets are all summed by one server."""

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
        """Returns the mean of all workers' gradients, as each worker gets it, and the bytes in the busiest direction of a
        worker.

        `gradients`: by worker, in the order of the job's tensors.
        """
        mean = [torch.empty_like(tensor) for tensor in gradients[0]]
        sent, received = [0] * self.world, 0
        for place in range(len(self._buckets)):
            up, down = self.exchange(place, gradients, mean)
            sent, received = [a + b for a, b in zip(sent, up, strict=True)], received + down
        self.end()
        self.received = received
        return mean, max(received, *sent)

    def exchange(self, place: int, gradients: Sequence[Any], mean: Any) -> tuple[list[int], int]:
        """One bucket's part of a step: writes its slices of `mean`. Returns the bytes that each worker sends, and that each
        receives.

        Gradients and mean are indexed by tensor number; only the bucket's own tensors are needed.
        """
        bucket = self._buckets[place]
        sent, received, answers = [0] * self.world, 0, [memoryview(b"")] * self.world
        for worker, own in zip(bucket, gradients, strict=True):
            worker.rewind()
            worker.step = self._step
            worker.sources = [own[s.tensor].contiguous() for s in worker.slices]
            worker.gather(1.0, 1.0)
        rounds = len(bucket[0].codec.rounds)
        for r in range(rounds):
            replies: list[Reply] = []
            for rank, worker in enumerate(bucket):
                body = worker.payload[: worker.encode_next(r - 1, answers[rank])] if r else self.code(rank, worker)
                sent[rank] += len(body)
                header = Header(Kind.PUSH, 1, self._step, worker.id, round=r, codec=worker.codec.id, sender=rank, weight=1.0,
                                used=worker.all_slices, total=float(self.world) if worker.in_means else 0.0)
                replies += self._server.push(Message(rank, header, body), now=0.0)
            for reply in replies:
                answers[reply.peer] = memoryview(reply.body)
            received += len(answers[0])
        for worker, answer in zip(bucket, answers, strict=True):
            worker.decode(answer)
        bucket[0].commit(1.0 / self.world, [mean[s.tensor] for s in bucket[0].slices])
        return sent, received

    def end(self) -> None:
        self._step += 1

    def code(self, rank: int, worker: WorkerBucket) -> memoryview:
        """Returns one bucket's payload; a hook for subclasses that measure payloads."""
        return worker.payload[: worker.encode()]

"""Assembles gradients into buckets as they become final, and starts the exchange of each complete bucket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from commlayer.engine.buckets.bucket import WorkerBucket
from commlayer.engine.buckets.current_step import Step
from commlayer.engine.model.model_tensors import check_dense
from commlayer.engine.paths.staging import Staging
from commlayer.engine.paths.table import AnyPath
from commlayer.errors import InvalidState
from commlayer.records import Job


class BucketAssembler:
    """Assembles the gradients of one worker's current step into buckets."""

    def __init__(
        self, job: Job, buckets: Sequence[WorkerBucket], paths: Mapping[int, AnyPath], staging: Staging, step: Step,
        opens: Callable[[], None], last: WorkerBucket | None,
    ) -> None:
        """`paths` maps bucket id to path. `opens` is called before the first gradient of each step. `last`: the last bucket in
        sending order; None if another rank of the site has the last fragment of a sharded model."""
        self._job, self._buckets, self._paths = job, buckets, paths
        self._staging, self._step, self._opens = staging, step, opens
        self.by_tensor: list[list[tuple[WorkerBucket, int]]] = [[] for _ in job.tensors]
        """For each tensor number: the buckets that contain elements of the tensor, each with the index of the tensor's slice in
        the bucket."""
        for bucket in buckets:
            for i, s in enumerate(bucket.slices):
                self.by_tensor[s.tensor].append((bucket, i))
        ordered = [bucket for bucket in buckets if paths[bucket.id].ordered and not bucket.late]
        self._order = CollectiveOrder(ordered, lambda bucket: paths[bucket.id].begin(bucket))
        self.last = last
        """The last bucket, which is not sent before backward has ended. Its sum proves that all workers reached the end of
        their backward pass."""
        self.split = {tensor for tensor, places in enumerate(self.by_tensor) if len(places) > 1}
        """Numbers of the tensors that are split over several buckets."""
        self.reset()

    def reset(self) -> None:
        for bucket in self._buckets:
            bucket.reset()
        self._order.reset()
        self._seen = [False] * len(self._job.tensors)
        self._ending = self.begun = False
        """`begun`: the current step has begun; see `open`."""

    def ready(self, tensor: int, gradient: torch.Tensor) -> None:
        if self._seen[tensor]:
            raise InvalidState("E-GRADIENT-TWICE",
                               f"gradient of {self._job.tensors[tensor].name} became final twice in one backward pass, because "
                               "the parameter is used both inside and outside a reentrant checkpoint; pass use_reentrant=False "
                               "to torch.utils.checkpoint.checkpoint")
        self._seen[tensor] = True
        if self._step.recorder.on:
            self._step.recorder.tensor(tensor)
        self._feed(tensor, gradient)

    def send(self, buckets: Sequence[WorkerBucket], changes: Mapping[int, torch.Tensor]) -> None:
        """Puts weight changes into the given buckets and starts the exchange of these buckets. `changes` maps tensor number to
        weight change."""
        self.open()
        mark = self._staging.mark()
        for bucket in buckets:
            for i, s in enumerate(bucket.slices):
                if not self._seen[s.tensor] and self._step.recorder.on:
                    self._step.recorder.tensor(s.tensor)
                self._seen[s.tensor] = True
                bucket.sources[i] = changes[s.tensor]
            bucket.marks.append(mark)
            bucket.waiting = 0
            self._complete(bucket)

    def take_leftovers(self, leftovers: Sequence[torch.Tensor | None]) -> None:
        """Completes all buckets after backward has ended. `leftovers` contains, by tensor number, the gradients of tensors for
        which no hook was called."""
        held_back = self.last if self.last is not None and self.last.waiting == 0 else None
        self._ending = True
        for tensor, seen in enumerate(self._seen):
            if not seen:
                self._feed(tensor, leftovers[tensor])
        if held_back is not None:
            self._complete(held_back)

    def _feed(self, tensor: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            if gradient.layout is not torch.strided:
                check_dense(self._job.tensors[tensor].name, gradient)
            if tensor in self.split and not gradient.is_contiguous():
                gradient = gradient.contiguous()
        if not self.begun:
            self.open()
        mark = self._staging.mark()  # after it the gradient is final
        for bucket, i in self.by_tensor[tensor]:
            bucket.sources[i] = gradient
            bucket.marks.append(mark)
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self._complete(bucket)

    def open(self) -> None:
        """Starts the step, unless it has started."""
        if not self.begun:
            self.begun = True
            self._opens()

    def _complete(self, bucket: WorkerBucket) -> None:
        if bucket.late:
            return  # LateExchange launches it, after the results of the previous step have arrived
        if bucket is self.last and not self._ending:
            return  # wait until backward has ended: if it fails, this bucket is missing and the others notice
        path = self._paths[bucket.id]
        self._step.sent_at = self._step.sent_at or time.monotonic()
        if not path.ordered:
            path.begin(bucket)
            return
        try:
            self._order.ready(bucket)
        except BaseException as error:
            self._step.latch(error)
            raise


class CollectiveOrder:
    """Calls `begin` on buckets strictly in the given order.

    All ranks must call collectives in the same order. The order in which buckets become ready differs between ranks, for
    example if a rank does not use a parameter. A bucket therefore waits until all buckets before it in the plan are ready. The
    thread that makes a bucket ready also starts the buckets that waited for it.
    """

    def __init__(self, buckets: Sequence[WorkerBucket], begin: Callable[[WorkerBucket], None]) -> None:
        self._buckets, self._begin = buckets, begin
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self._next = 0
        self._ready: set[int] = set()

    def ready(self, bucket: WorkerBucket) -> None:
        with self._lock:
            self._ready.add(bucket.id)
            while self._next < len(self._buckets) and self._buckets[self._next].id in self._ready:
                following = self._buckets[self._next]
                self._next += 1
                self._begin(following)

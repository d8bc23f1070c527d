"""A step whose averages are applied as they arrive, during the next forward pass (step/forward_overlap.py).

Nothing is written before all workers have ended their backward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch

from commlayer.engine.buckets.bucket import WorkerBucket
from commlayer.engine.worker.worker import Worker
from commlayer.optim.pieces import Group


class PartialStep:
    """A step of a worker whose averages are applied one by one: from `Worker.complete` to `Worker.end`. Methods that return
    tensor numbers return those of the tensors that have become complete."""

    def __init__(
        self, worker: Worker, tensors: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor], deadline_s: float,
    ) -> None:
        """`tensors`: gradients (None where this rank has none), then buffers; averages are written into them. If only other
        ranks have a gradient, the average is written into a new tensor with the shape of the parameter in `like`."""
        self.worker, self._like, self.buffers, self._deadline_s = worker, like, buffers, deadline_s
        self.step = worker.step
        self.averages = list(tensors)
        """Average of each tensor, by tensor number. The value is None if no worker has a gradient. Valid only for complete
        tensors."""
        self._left = {bucket.id: bucket for bucket in worker.buckets}
        self._missing = [len(worker.holding(tensor)) for tensor in range(len(tensors))]
        self._new = [tensor for tensor, missing in enumerate(self._missing) if not missing]
        for tensor in self._new:
            self.averages[tensor] = None  # the average has no elements, so it is not sent
        self._copies: dict[int, torch.Tensor] = {}
        self.not_finite: set[int] = set()
        """Numbers of the tensors whose averages are not finite. These averages must not be applied."""
        self._deadline: float | None = None
        self.deferred: dict[int, Group] = {}
        """Maps the number of each parameter that is not updated yet to the hyperparameters of the optimizer step that will
        update it."""
        self.withheld: list[int] = []
        """Numbers of the parameters that the running optimizer step must skip, because their averages have not arrived."""
        self.applied: set[int] = set()
        self.discarded: set[int] = set()
        """Numbers of the parameters whose averages the script cleared before an optimizer step, or which are not finite."""
        self.dropped = False
        """True: some averages were not applied because they are not finite."""
        self.on_end: list[Callable[[], None]] = []
        """Functions to call at the end of the step, because `call_at_end` was called during it."""

    @property
    def over(self) -> bool:
        return not self._left

    def complete(self, tensor: int) -> bool:
        return self._missing[tensor] == 0

    def arrived(self) -> list[int]:
        if self._left and self.worker.all_complete(None, self._deadline_s):
            for bucket in [*self._left.values()]:
                if self.worker.take(bucket, None):
                    self._write(bucket)
        new, self._new = self._new, []
        return new

    def wait(self, tensors: Iterable[int]) -> list[int]:
        """Waits until the averages of the given tensors are complete, then writes all other buckets that have arrived. Returns
        the numbers of all newly complete tensors."""
        wanted = {bucket.id: bucket for tensor in tensors for bucket in self.worker.holding(tensor) if bucket.id in self._left}
        if wanted:
            self._deadline = self._deadline or time.monotonic() + self._deadline_s
            self.worker.all_complete(self._deadline, self._deadline_s)
            for bucket in sorted(wanted.values(), key=attrgetter("order")):
                self.worker.take(bucket, self._deadline)
                self._write(bucket)
        return self.arrived()

    def wait_all(self) -> list[int]:
        return self.wait(range(len(self.averages)))

    def end(self) -> None:
        self.worker.wait_all(self._deadline_s)
        self.worker.end([not self.not_finite], computes=False)

    def _write(self, bucket: WorkerBucket) -> None:
        targets = [self._target(s.tensor, used=bool(bucket.exchange.used >> i & 1)) for i, s in enumerate(bucket.slices)]
        if not self.worker.write_bucket(bucket, targets):
            self.not_finite.update(s.tensor for s in bucket.slices)
        del self._left[bucket.id]
        for s in bucket.slices:
            self._missing[s.tensor] -= 1
            if not self._missing[s.tensor]:
                self._new.append(s.tensor)
                copy, into = self._copies.pop(s.tensor, None), self.averages[s.tensor]
                if copy is not None and into is not None:
                    into.detach().copy_(copy)

    def _target(self, tensor: int, *, used: bool) -> torch.Tensor | None:
        into = self.averages[tensor]
        if into is None and used:
            with torch._C.DisableTorchFunctionSubclass():  # reads only the shape, which a guard should not count as a use
                into = self.averages[tensor] = torch.zeros_like(self._like[tensor]).detach()
        if into is None or into.is_contiguous() or len(self.worker.holding(tensor)) == 1:
            return into
        if tensor not in self._copies:  # its slices are flat ranges of elements
            self._copies[tensor] = torch.zeros_like(into, memory_format=torch.contiguous_format)
        return self._copies[tensor]

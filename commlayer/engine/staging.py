"""Moves a bucket between its device and the host memory on which codecs work. On CPU, and with codecs on the GPU, nothing
moves.

Rules for CUDA: the lane's stream waits on the event of the hook's stream, so it reads finished gradients. Every tensor of the
caller that the lane reads is recorded on the lane's stream. Host copies are pinned. Only lane threads wait for the device.
Buckets own their buffers for the life of the plan, so these need no record: `join` and the next hook's event order their reuse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from commlayer.engine.bucket import WorkerBucket


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        # Late results have their own stream. Each lane that distributes results to a node's ranks does so in its own order.
        # With one stream for both orders, ranks would wait for each other in a cycle.
        self._backs = [torch.cuda.Stream(device) for _ in range(2)] if self._cuda else []

    def mark(self) -> object:
        """An event after everything that the caller's stream has queued so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._cuda else None

    def catch_up(self, bucket: WorkerBucket) -> None:
        """Makes the current stream wait for the marks of the bucket's sources, on whichever streams they were made."""
        for mark in bucket.marks:
            if isinstance(mark, torch.cuda.Event):
                torch.cuda.current_stream(self._device).wait_event(mark)

    @contextlib.contextmanager
    def lane(self, bucket: WorkerBucket) -> Iterator[None]:
        """Runs the body on the lane's stream, after the marks of the bucket's sources."""
        if self._stream is None:
            yield
            return
        for source in bucket.sources:
            if source is not None:
                source.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            self.catch_up(bucket)
            if bucket.late:
                self._stream.wait_stream(self._backs[True])  # its last result has not been read yet
            yield

    def to_host(self, bucket: WorkerBucket) -> None:
        """On return, x is readable on the host. Called inside `lane`."""
        if self._stream is not None and not bucket.on_device:
            bucket.host.copy_(bucket.x, non_blocking=True)
            self._stream.synchronize()

    def settle(self) -> None:
        """Waits for all work queued inside `lane`."""
        if self._stream is not None:
            self._stream.synchronize()

    def to_device(self, bucket: WorkerBucket) -> None:
        """Queues the copy to the device; `join` makes the training stream wait for it."""
        if self._backs and not bucket.on_device:
            with self.way_back(bucket):
                bucket.y.copy_(bucket.host_y, non_blocking=True)

    def way_back(self, bucket: WorkerBucket) -> contextlib.AbstractContextManager[object]:
        """The stream that copies the bucket's results to the device: one for late buckets, one for all others."""
        return torch.cuda.stream(self._backs[bucket.late]) if self._backs else contextlib.nullcontext()

    def join(self) -> None:
        """Makes the current stream wait until all results are on the device."""
        for back in self._backs:
            torch.cuda.current_stream(self._device).wait_stream(back)

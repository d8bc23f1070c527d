"""Moves a bucket between its device and the host memory that codecs work on. Nothing moves on CPU, nor for codecs on the GPU.

Rules for CUDA: the lane's stream waits on the event of the hook's stream, so it reads finished gradients; every tensor of the
caller that the lane reads is recorded on the lane's stream; host copies are pinned; only lane threads wait for the device.
Buckets own their buffers for the life of the plan, so those need no record: `join` and the next hook's event order their reuse.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from commlayer.engine.bucket import WorkerBucket


class Staging:
    """One per worker."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        # Late results have their own: each lane that hands results on to a node's ranks does so in its own order, and one
        # stream of both orders would make ranks wait for each other crosswise.
        self._backs = [torch.cuda.Stream(device) for _ in range(2)] if self._cuda else []

    def mark(self) -> object:
        """A point in the caller's stream: all it has queued so far."""
        return torch.cuda.current_stream(self._device).record_event() if self._cuda else None

    def catch_up(self, bucket: WorkerBucket) -> None:
        """The current stream goes on behind the marks of the bucket's sources, whichever streams they were made on."""
        for mark in bucket.marks:
            if isinstance(mark, torch.cuda.Event):
                torch.cuda.current_stream(self._device).wait_event(mark)

    @contextlib.contextmanager
    def lane(self, bucket: WorkerBucket) -> Iterator[None]:
        """The lane's stream, behind the marks of the bucket's sources."""
        if self._stream is None:
            yield
            return
        for source in bucket.sources:
            if source is not None:
                source.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            self.catch_up(bucket)
            if bucket.late:
                self._stream.wait_stream(self._backs[True])  # its last result is still to be read
            yield

    def to_host(self, bucket: WorkerBucket) -> None:
        """x is readable on the host when this returns. Called inside `lane`."""
        if self._stream is not None and not bucket.on_device:
            bucket.host.copy_(bucket.x, non_blocking=True)
            self._stream.synchronize()

    def settle(self) -> None:
        """All that was queued inside `lane` is done."""
        if self._stream is not None:
            self._stream.synchronize()

    def to_device(self, bucket: WorkerBucket) -> None:
        """Queues the way back; `join` orders the training stream behind it."""
        if self._backs and not bucket.on_device:
            with self.way_back(bucket):
                bucket.y.copy_(bucket.host_y, non_blocking=True)

    def way_back(self, bucket: WorkerBucket) -> contextlib.AbstractContextManager[object]:
        """The stream on which its results, and those of all that are late, or in time, as it is, come to the device."""
        return torch.cuda.stream(self._backs[bucket.late]) if self._backs else contextlib.nullcontext()

    def join(self) -> None:
        """The current stream goes on only when all results are on the device."""
        for back in self._backs:
            torch.cuda.current_stream(self._device).wait_stream(back)

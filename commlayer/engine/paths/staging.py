"""Moves a bucket between its device and the host memory on which codecs work."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

import torch

from commlayer.compressors import runs_on
from commlayer.compressors.codec import Codec
from commlayer.engine.buckets.bucket import EncodedBucket, WorkerBucket
from commlayer.gpu import launch
from commlayer.records import Plan

log = logging.getLogger("commlayer")
ON_HOST = contextlib.nullcontext()
"""Context of work that uses no CUDA stream."""


class Staging:
    """Copies the buckets of a CUDA model between GPU and host. On CPU, and for codecs on the GPU, nothing is copied.

    The lane's stream waits for the event of the hook's stream, so the lane reads final gradients. Every tensor of the caller
    that the lane reads is recorded on the lane's stream. Host copies are pinned. Only lane threads wait for the GPU. Buckets
    keep their buffers as long as the plan, so these are not recorded: `join` and the next event order their reuse.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        # Results that are applied one step late have their own CUDA stream. Each lane that distributes results to a node's
        # ranks does so in its own order. With one stream for both lanes, ranks would wait for each other in a cycle.
        self._backs = [torch.cuda.Stream(device) for _ in range(2)] if self._cuda else []

    def mark(self) -> object:
        """Records an event after everything that the caller's CUDA stream has queued so far. Returns None on CPU."""
        return torch.cuda.current_stream(self._device).record_event() if self._cuda else None

    def catch_up(self, bucket: WorkerBucket) -> None:
        """Makes the current CUDA stream wait until the bucket's source gradients are final."""
        for mark in bucket.marks:
            if isinstance(mark, torch.cuda.Event):
                torch.cuda.current_stream(self._device).wait_event(mark)

    def lane(self, bucket: WorkerBucket) -> contextlib.AbstractContextManager[object]:
        """Context manager whose body runs on the lane's CUDA stream, after the bucket's source gradients are final."""
        return ON_HOST if self._stream is None else self._on_stream(self._stream, bucket)

    @contextlib.contextmanager
    def _on_stream(self, stream: torch.cuda.Stream, bucket: WorkerBucket) -> Iterator[None]:
        for source in bucket.sources:
            if source is not None:
                source.record_stream(stream)
        with torch.cuda.stream(stream):
            self.catch_up(bucket)
            yield

    def to_host(self, bucket: EncodedBucket) -> None:
        """Copies the bucket's send buffer to host memory and waits for the copy. Called inside `lane`."""
        if self._stream is not None and not bucket.coder.on_device:
            bucket.coder.host.copy_(bucket.x, non_blocking=True)
            self._stream.synchronize()

    def settle(self) -> None:
        """Waits for all work that was queued on the lane's CUDA stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def to_device(self, bucket: EncodedBucket) -> None:
        """Starts to copy a received sum from the host to the GPU. After `join`, the training stream waits for the copy."""
        if self._backs and not bucket.coder.on_device:
            with self.way_back(bucket):
                bucket.y.copy_(bucket.coder.host_y, non_blocking=True)

    def way_back(self, bucket: WorkerBucket) -> contextlib.AbstractContextManager[object]:
        """Context manager for the CUDA stream that copies the bucket's results to the GPU: one stream for buckets whose
        averages are applied one step late, one for all others."""
        return torch.cuda.stream(self._backs[bucket.late]) if self._backs else ON_HOST

    def join(self) -> None:
        """Makes the current CUDA stream wait until all results are on the GPU."""
        for back in self._backs:
            torch.cuda.current_stream(self._device).wait_stream(back)


def device_buckets(plan: Plan, codecs: Mapping[int, Codec], device: torch.device) -> set[int]:
    """Returns the ids of the server buckets that are encoded on the GPU, because the plan requests it (`coder`) and their codec
    supports it. The host encodes all others.

    Returns an empty set if the model is on the CPU.
    """
    if not launch.has_kernels_for(device):
        return set()
    wanted = {b.id for b in plan.buckets if b.served and b.coder == "gpu"}
    supported = {number for number in wanted if runs_on(codecs[number], device)}
    if unsupported := wanted - supported:
        names = ", ".join(sorted({str(codecs[number]) for number in unsupported}))
        log.warning("the plan encodes %d buckets on the GPU, but their codecs need the CPU in "
                    "this job, so they are encoded on the CPU: %s", len(unsupported), names)
    return supported

"""Runs a bucket's codec, with its state, for this worker."""

from __future__ import annotations

from typing import Protocol

import torch

from commlayer.compressors import place
from commlayer.compressors.codec import Codec, Ranges, State
from commlayer.compressors.payload import Buffer
from commlayer.engine.buckets.bucket_layout import BucketMemory, aligned
from commlayer.errors import CorruptFrame
from commlayer.gpu import launch
from commlayer.records import Spec

PAYLOAD_HEADER = 16
"""Number of bytes for the payload's header before the send buffer. The payload of an in-place codec consists of this header and
the send buffer."""


class EntryCounts(Protocol):
    """Sets how many entries sparse codecs send; implemented in entries_sent.py."""

    def begin(self, step: int) -> None:
        """Sets how many entries each bucket's sparse codec sends in a step. Called before each encode of the step."""
        ...

    def forget(self) -> None:
        """Makes the next call of `begin` set the numbers again, because codec states were replaced and the step might be
        repeated."""
        ...


class Coder:
    """A codec with its state and the memory that it reads and writes. On a CPU this is the bucket's own memory. With a CUDA
    model it is a pinned copy of the bucket's memory (`host`), or GPU memory. In GPU memory, only payloads pass through pinned
    memory, in one buffer per direction."""

    def __init__(
        self, codec: Codec, spec: Spec, state: State, memory: BucketMemory, block: torch.Tensor, host: torch.Tensor,
        host_y: torch.Tensor, device: torch.device | None,
    ) -> None:
        """`block` begins with the payload header, which `host` follows. `device`: where the codec runs; None: on the host."""
        self.codec, self.state, self._memory = codec, state, memory
        numel = memory.x.numel()
        self.host, self.host_y = host[:numel], host_y[:numel]
        self.bound, self.on_device = codec.bound(spec), device is not None
        self.entries: EntryCounts | None = None
        """Object that sets the number of sent entries before each encode. The value is None if the codec's ratio does not
        change between steps."""
        if device is not None:
            place(state, device)
            pinned = device.type != "cpu"
            self._pinned = [torch.empty(self.bound, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
            self._there = [launch.words(self.bound, device) for _ in range(2)]
            self.payload = self._pinned[0].numpy().data
        else:
            in_place = block[: PAYLOAD_HEADER + 4 * numel]
            self.payload = (in_place if codec.in_place else aligned(0, self.bound, pinned=False)).numpy().data
        self._x, self._y = self.host.numpy(), self.host_y.numpy()
        """`host` and `host_y` as arrays."""

    def drop_y(self) -> None:
        """Frees the receive buffer, because results stay encoded or sparse."""
        self.host_y = torch.empty(0)
        self._y = self.host_y.numpy()

    @property
    def place(self) -> str:
        """Returns where the codec runs: "gpu" or "cpu". Traces use it in names of operations."""
        return "gpu" if self.on_device else "cpu"

    @property
    def input(self) -> torch.Tensor:
        return self._memory.x if self.on_device else self.host

    def undo(self, cut: Ranges) -> None:
        self.codec.undo(self.state, self.input if self.on_device else self.input.numpy(), cut)

    def reweigh(self, share: float, more: torch.Tensor) -> None:
        self.codec.reweigh(self.state, share, more if self.on_device else more.numpy())

    def encode(self, step: int) -> int:
        if self.entries is not None:
            self.entries.begin(step)
        if not self.on_device:
            return self.codec.start(self._x, self.state, self.payload)
        x = self._memory.x
        nbytes = self.codec.start(x, self.state, self._there[0])
        self._pinned[0][:nbytes].copy_(self._there[0][:nbytes], non_blocking=True)
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        return nbytes

    def next(self, r: int, result: Buffer) -> int:
        return self.codec.next(r, result, self.state, self.payload)

    def decode(self, body: memoryview) -> bool:
        """Decodes a result into the receive buffer. Returns True if the result is finite."""
        if not self.on_device:
            return self.codec.decode(body, self.state, self._y)
        nbytes = body.nbytes
        if nbytes > self.bound:
            raise CorruptFrame(f"a result of {nbytes} bytes was received, but at most {self.bound} bytes are possible for "
                               "this codec and bucket")
        self._pinned[1][:nbytes].numpy().data[:] = body
        self._there[1][:nbytes].copy_(self._pinned[1][:nbytes], non_blocking=True)
        return self.codec.decode(self._there[1][:nbytes], self.state, self._memory.y)

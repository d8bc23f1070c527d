"""Overhead of buckets and payloads beyond their codec: measured with a worker and a server in this process, over sockets.

Costs are the CPU time of each side's own threads, so they exclude other threads such as training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch

from commlayer.autotune.measure.codec_costs import fit
from commlayer.cluster.summation import Summation
from commlayer.cluster.summation_server import SumServer
from commlayer.compressors import identity
from commlayer.compressors.payload import HEADER_NBYTES
from commlayer.engine.worker import Worker
from commlayer.planner.model.cluster import Line
from commlayer.records import Bucket, Job, Plan, Slice, Spec, TensorInfo
from commlayer.transport.hello import Hello
from commlayer.transport.protocol import SERVER_BASE, peer_name
from commlayer.transport.stream_transport import StreamTransport

SIZES = (16, 1 << 12, 1 << 16, 1 << 18)
"""Elements of a bucket, up to 1 MiB."""
STEP_NBYTES, MOST_BUCKETS = 4 << 20, 32
"""Bytes sent per step, and the largest number of buckets."""
WARM_STEPS, STEPS = 2, 5
DEADLINE_S = 20.0
LOCALHOST = "127.0.0.1"


class Overheads(NamedTuple):
    server: Line
    """Server time per payload bytes, for receiving it and sending a result of the same size."""
    bucket: Line
    """Worker time per bucket elements, including the identity codec."""


def measure(sizes: Sequence[int] = SIZES, steps: int = STEPS) -> Overheads:
    rows = [_costs(numel, steps) for numel in sizes]
    return Overheads(fit([4 * numel for numel in sizes], [row[0] for row in rows]), fit(sizes, [row[1] for row in rows]))


class _Idle:
    """A server codec that does nothing, which leaves receiving and sending. Results are ones, because zeros are not sent."""

    rounds = 1
    in_means = means = False

    def __init__(self, spec: Spec) -> None:
        codec = identity()
        self.codec, self.bound = codec.id, codec.bound(spec)
        self._ones = memoryview(bytearray(self.bound))
        codec.start(torch.ones(spec.numel), codec.init(spec), self._ones)

    def zeros(self, r: int) -> None:
        """There is no accumulator."""

    def add(self, r: int, payload: memoryview, acc: None, first: bool) -> None:
        """Nothing is summed."""

    def emit(self, r: int, acc: None, out: memoryview) -> int:
        """Copies a result, except into a buffer that holds it already: the server reuses a few buffers."""
        if out[:HEADER_NBYTES] != self._ones[:HEADER_NBYTES]:
            out[: self.bound] = self._ones
        return self.bound

    def undo(self, slices: int) -> None:
        """Nothing is kept back."""

    def skip(self) -> None:
        """As `undo`."""

    def norm(self, r: int, payload: memoryview) -> float:
        return 0.0

    def snapshot(self) -> bytes:
        return b""

    def restore(self, data: bytes | memoryview) -> None:
        """There is no state."""


def _costs(numel: int, steps: int) -> tuple[float, float]:
    """Seconds of the server and of the worker per bucket of that size."""
    count = max(1, min(MOST_BUCKETS, STEP_NBYTES // (4 * numel)))
    job = Job(tuple(TensorInfo(f"t{i}", (numel,)) for i in range(count)))
    plan = Plan(job.digest(), tuple(Bucket(i, (Slice(i, 0, numel),), "service") for i in range(count)), servers=1)
    before = set(threading.enumerate())
    ours, theirs = (StreamTransport(Hello(plan.job, rank)) for rank in (SERVER_BASE, 0))
    core = Summation(0, 1, {b.id: _Idle(b.spec) for b in plan.buckets}, {b.id: (0,) for b in plan.buckets})
    server = SumServer(core, ours, (0,), stall_s=DEADLINE_S, recycle=ours.pool.give)
    worker = None
    try:
        theirs.dial(SERVER_BASE, ours.listen(LOCALHOST), time.monotonic() + DEADLINE_S)
        worker = Worker(job, plan, {b.id: identity() for b in plan.buckets}, torch.device("cpu"), transport=theirs,
                        recycle=theirs.pool.give)
        gradients: list[torch.Tensor | None] = [torch.randn(numel) for _ in range(count)]
        for _ in range(WARM_STEPS):
            _step(worker, gradients)
        started = [thread for thread in threading.enumerate() if thread not in before]
        serving = [thread for thread in started if thread.name.endswith(peer_name(0))]
        clocks = _clock(serving), _clock([t for t in started if t not in serving] + [threading.current_thread()])
        rows = []
        for _ in range(steps):
            begin = [clock() for clock in clocks]
            _step(worker, gradients)
            rows.append([(clock() - start) / count for clock, start in zip(clocks, begin, strict=True)])
        return median(row[0] for row in rows), median(row[1] for row in rows)
    finally:
        if worker is not None:
            worker.close()
        theirs.close()
        server.close()


def _clock(threads: Sequence[threading.Thread]) -> Callable[[], float]:
    """Returns a clock of the CPU time of these threads."""
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident is not None]
    return lambda: sum(map(time.clock_gettime, clocks))


def _step(worker: Worker, gradients: list[torch.Tensor | None]) -> None:
    for tensor, gradient in enumerate(gradients):
        assert gradient is not None
        worker.ready(tensor, gradient)
    worker.finish(list(gradients), DEADLINE_S)
    worker.commit(gradients)

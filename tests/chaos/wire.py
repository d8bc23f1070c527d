"""Checks the frames between workers and servers: payloads must not change, and each contribution must count once.

Each worker's weight is a power of 4, so the weight of a result shows how often it contains each contribution. The bucket of
rows has no weight: its results name their senders.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Sequence

import msgspec

from commlayer.cluster.servers.gather import ROW_BUCKET
from commlayer.errors import CorruptFrame
from commlayer.transport.crc import crc32c
from commlayer.transport.framing import Frame, Reader
from commlayer.transport.handshake import Hello
from commlayer.transport.protocol import Flag, Kind
from tests.chaos.frames import frames_in
from tests.chaos.reports import Finding

BASE = 4
MOST_FAULTS = 5


def weights(workers: int) -> list[int]:
    """
    >>> weights(3)
    [1, 4, 16]
    """
    return [BASE**rank for rank in range(workers)]


def digits(weight: float, workers: int) -> list[int]:
    """How often each worker's contribution is in a result of that weight.

    >>> digits(1 + 16 + 16, 3)
    [1, 0, 2]
    """
    return [int(weight) // BASE**rank % BASE if rank < workers - 1 else int(weight) // BASE**rank for rank in range(workers)]


class Seen:
    """All frames of a run. `faults` are the violations. Thread-safe."""

    def __init__(self, workers: int) -> None:
        self._workers, self._lock = workers, threading.Lock()
        self._pushed: dict[tuple[int, ...], int] = {}
        self._results: dict[tuple[int, int, int, int], tuple[int, float]] = {}
        self.faults: list[Finding] = []
        self.repeats = 0

    @property
    def contributions(self) -> int:
        """Number of contributions in results, without rows."""
        return self._workers * sum(bucket != ROW_BUCKET for _, _, bucket, _ in self._results)

    def frame(self, frame: Frame, rank: int) -> None:
        h = frame.header
        place = h.generation, h.step, h.bucket, h.round
        if h.kind == Kind.PUSH:
            check = crc32c(frame.body)
            with self._lock:
                self.repeats += (rank, *place) in self._pushed
                before = self._pushed.setdefault((rank, *place), check)
            if before != check and not h.flags & Flag.ABANDON:
                self._fault("payload", f"worker {rank} sent another payload than before for {_words(place)}")
        elif h.kind == Kind.RESULT and not h.flags & Flag.ABANDON:
            result = crc32c(frame.body), h.weight
            with self._lock:
                known = self._results.setdefault(place, result)
            if known != result:
                self._fault("payload", f"worker {rank} was told another sum than before for {_words(place)}")
            counts = self._senders(frame) if h.bucket == ROW_BUCKET else digits(h.weight, self._workers)
            if counts != [1] * self._workers:
                self._fault("contributions",
                            f"the sum of {_words(place)} has contributions {counts}, allowed: one of each worker")

    def _senders(self, frame: Frame) -> list[int]:
        """How often each worker's row is in a result of the bucket of rows."""
        senders = Counter(sender for sender, _ in msgspec.msgpack.decode(frame.body, type=list[tuple[int, bytes]]))
        return [senders[rank] for rank in range(self._workers)]

    def _fault(self, kind: str, line: str) -> None:
        with self._lock:
            if len(self.faults) < MOST_FAULTS:
                self.faults.append(Finding(kind, line))


def _words(place: Sequence[int]) -> str:
    generation, step, bucket, r = place
    return f"generation {generation}, step {step}, bucket {bucket}, round {r}"


class Stretch:
    """One connection. `rank`: the worker's rank, known after its first frame."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._readers: list[Reader | None] = [Reader(), Reader()]
        self.rank = -1

    def feed(self, way: int, data: bytes) -> None:
        """Processes bytes before any fault is applied to them."""
        reader = self._readers[way]
        if reader is None:
            return
        try:
            for frame in frames_in(reader, data):
                if frame.header.kind == Kind.HELLO:
                    with contextlib.suppress(msgspec.MsgspecError):
                        self.rank = msgspec.msgpack.decode(frame.body, type=Hello).rank
                else:
                    self._seen.frame(frame, self.rank)
        except CorruptFrame:
            self._readers[way] = None  # not a peer of this job

"""Collects the parts of uploaded plans until a plan is complete."""

from __future__ import annotations

from commlayer.cluster.messages import MAX_PLAN_NBYTES, Part, digest_of
from commlayer.errors import CorruptFrame

MOST = 2
"""Most plans kept; the oldest is dropped. A job has one."""


class _Coming:
    def __init__(self, nbytes: int) -> None:
        self.data, self.begins = bytearray(nbytes), set[int]()
        self.left = nbytes


class Plans:
    """Plans by digest."""

    def __init__(self) -> None:
        self._coming: dict[str, _Coming] = {}
        self._whole: dict[str, bytes] = {}

    def take(self, part: Part) -> None:
        """Adds a part. CorruptFrame if it fits no plan; nothing has changed then."""
        end = part.begin + len(part.data)
        if part.plan_digest in self._whole:
            return
        coming = self._coming.get(part.plan_digest)
        nbytes = len(coming.data) if coming is not None else part.nbytes
        if not 0 < part.nbytes <= MAX_PLAN_NBYTES or part.nbytes != nbytes or not 0 <= part.begin < end <= nbytes:
            raise CorruptFrame(f"sent bytes {part.begin} to {end} of a plan of {part.nbytes}, allowed {MAX_PLAN_NBYTES}")
        if coming is None:
            coming = self._coming[part.plan_digest] = _Coming(nbytes)
            while len(self._coming) > MOST:
                del self._coming[next(iter(self._coming))]
        if part.begin in coming.begins:
            return
        coming.begins.add(part.begin)
        coming.data[part.begin : end] = part.data
        coming.left -= len(part.data)
        if coming.left <= 0:
            del self._coming[part.plan_digest]
            data = bytes(coming.data)
            if digest_of(data) != part.plan_digest:
                raise CorruptFrame("sent a plan that does not match its digest")
            self._whole[part.plan_digest] = data
            while len(self._whole) > MOST:
                del self._whole[next(iter(self._whole))]

    def whole(self, digest: str) -> bytes:
        """The plan; empty if parts are missing."""
        return self._whole.get(digest, b"")

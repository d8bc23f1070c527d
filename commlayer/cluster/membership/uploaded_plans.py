"""Plans that members upload in chunks, because no call may be large."""

from __future__ import annotations

from commlayer.cluster.calls.messages import MAX_PLAN_NBYTES, PlanPart, hash_plan_bytes
from commlayer.errors import CorruptFrame

MOST = 2
"""Maximum number of uploaded plans that are kept, although a job uses only one. The oldest plan is dropped first."""


class UploadedPlans:
    """The latest plans that one member has uploaded, keyed by digest."""

    def __init__(self) -> None:
        self._chunks: dict[str, dict[int, bytes]] = {}
        """Maps the digest of an incomplete plan to its chunks. Each chunk is keyed by the position of its first byte in the
        plan."""
        self._whole: dict[str, bytes] = {}

    def add_part(self, part: PlanPart) -> None:
        """Stores a chunk of a plan. Raises CorruptFrame if the chunk does not fit its plan."""
        end = part.begin + len(part.data)
        if not 0 < part.nbytes <= MAX_PLAN_NBYTES or not 0 <= part.begin < end <= part.nbytes:
            raise CorruptFrame(f"sent bytes {part.begin} to {end} of a plan of {part.nbytes} bytes; the chunk must lie inside "
                               f"the plan, and a plan has at most {MAX_PLAN_NBYTES} bytes")
        if part.plan_digest in self._whole:
            return
        chunks = self._chunks.setdefault(part.plan_digest, {})
        chunks[part.begin] = part.data
        if sum(map(len, chunks.values())) >= part.nbytes:
            del self._chunks[part.plan_digest]
            data = b"".join(data for _, data in sorted(chunks.items()))
            if hash_plan_bytes(data) != part.plan_digest:
                raise CorruptFrame("sent a plan that does not match its digest")
            self._whole[part.plan_digest] = data
        for plans in (self._chunks, self._whole):
            while len(plans) > MOST:
                del plans[next(iter(plans))]

    def whole(self, digest: str) -> bytes:
        """Returns the plan with this digest; b"" if chunks are missing."""
        return self._whole.get(digest, b"")

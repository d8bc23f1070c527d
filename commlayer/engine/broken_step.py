"""Whether some worker broke the step off that has just been exchanged, and who. Knows buckets and weights; no worker.

Who broke off says so in place of its parts when its next pass begins: to servers with a flag and a line, in collectives by
weighing NaN. So it is in what came back, on all workers alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from commlayer.engine.bucket import WorkerBucket

BROKEN = "its backward pass broke off"


def broken_off(buckets: Sequence[WorkerBucket], *, here: bool) -> str:
    """Who broke it off and why, "" if nobody did. `buckets`: those whose results are of this step. `here`: this worker did."""
    if said := next((bucket.abandoned for bucket in buckets if bucket.abandoned), ""):
        return said
    # Collectives go in plan order, so the last one's weight is that of all who went to the end.
    last = [bucket for bucket in buckets if not bucket.served][-1:]
    weights = [bucket.weight for bucket in buckets if bucket.served] + [bucket.summed_weight() for bucket in last]
    return f"a worker: {BROKEN}" if here or any(map(math.isnan, weights)) else ""

"""Detects whether a worker aborted the step that was just exchanged, and which one.

A worker whose backward pass failed sends an abort when its next pass begins, instead of its parts: a flag with a line of text
to servers, weight NaN in collectives. So all workers see it in the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from commlayer.engine.bucket import WorkerBucket

BROKEN = "its backward pass broke off"


def broken_off(buckets: Sequence[WorkerBucket], *, here: bool) -> str:
    """Which worker aborted the step and why; "" if none did. `buckets`: those with results of this step. `here`: this worker
    did."""
    if reason := next((bucket.abandoned for bucket in buckets if bucket.abandoned), ""):
        return reason
    # Collectives run in plan order, so the last weight covers all workers that finished the pass.
    last = [bucket for bucket in buckets if not bucket.served][-1:]
    weights = [bucket.weight for bucket in buckets if bucket.served] + [bucket.summed_weight() for bucket in last]
    return f"a worker: {BROKEN}" if here or any(map(math.isnan, weights)) else ""

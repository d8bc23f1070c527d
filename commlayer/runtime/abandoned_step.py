"""A step that some worker broke off (an exception in its backward pass) and that is dropped on all. Knows flows and weights.

Who broke off says so in place of its parts when its next pass begins: to servers with a flag, in collectives by weighing NaN.
Until then the others wait, as for anybody who is late.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from commlayer.errors import StepAbandoned
from commlayer.runtime.flow import Flow
from commlayer.runtime.routes.service import BROKEN

if TYPE_CHECKING:
    from commlayer.runtime.worker import Worker

log = logging.getLogger("commlayer")


def abandon(worker: Worker, deadline_s: float) -> None:
    """This worker broke the step off. Waits until that is known everywhere; then the next step may begin."""
    worker.broken = True
    try:
        worker.finish([None] * len(worker.job.tensors), deadline_s)
    except StepAbandoned as error:
        log.warning("%s", error)
    finally:
        worker.broken = False


def broken_off(flows: Sequence[Flow], *, here: bool) -> str:
    """Who broke the step off that has just come to its end, and why, if somebody did."""
    now = [flow for flow in flows if flow.held is None]
    if said := next((flow.abandoned for flow in now if flow.abandoned), ""):
        return said
    # Collectives go in plan order, so the last one's weight is that of all who went to the end.
    last = [flow for flow in now if flow.bucket.path != "service"][-1:]
    weights = [flow.weight for flow in now if flow.bucket.path == "service"] + [flow.summed_weight() for flow in last]
    return f"a worker: {BROKEN}" if here or any(map(math.isnan, weights)) else ""

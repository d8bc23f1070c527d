"""Drops a step that this worker broke off (an exception in its backward pass), on all workers. Runs when its next pass begins.

Until then the others wait, as for anybody who is late. How they learn of it: see broken_step.py.
"""

from __future__ import annotations

import logging

from commlayer.errors import StepAbandoned
from commlayer.runtime.worker import Worker

log = logging.getLogger("commlayer")


def abandon(worker: Worker, deadline_s: float) -> None:
    """Waits until it is known everywhere; then the next step may begin."""
    worker.units.broken = True
    try:
        worker.finish([None] * len(worker.job.tensors), deadline_s)
    except StepAbandoned as error:
        log.warning("%s", error)
    finally:
        worker.units.broken = False

"""The job of a session, and one without other processes, for tests of code that reads or changes its state."""

from __future__ import annotations

from typing import Any

from commlayer.engine.job.fixed_members import FixedMembers
from commlayer.engine.job.job import DistributedJob, JobContext
from commlayer.engine.model.optimizer_state import OptimizerMemory
from commlayer.engine.worker.root_cause import WaitsFor
from commlayer.engine.worker.site import LocalSite
from commlayer.optim import OuterSGD
from commlayer.session import Session


def distributed_job(session: Session) -> DistributedJob:
    """The job of a session that trains with others."""
    job = session.inspect.context
    assert isinstance(job, DistributedJob)
    return job


class FakeJob(DistributedJob):
    """Its parts are what the test gives."""

    def __init__(self, worker: Any = None, plan: Any = None, **parts: Any) -> None:
        JobContext.__init__(self)
        self.worker, self.plan = worker, plan if plan is not None or worker is None else worker.plan
        self.members, self.local, self.waits, self.site = FixedMembers(), None, WaitsFor(), LocalSite()
        self.memory = OptimizerMemory([], None, OuterSGD())
        for name, part in parts.items():
            setattr(self, name, part)

    rank = 0  # type: ignore[assignment]
    world = 1  # type: ignore[assignment]

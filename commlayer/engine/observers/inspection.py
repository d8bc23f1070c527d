"""Implements session.inspect: the state and decisions of a session, for users and for components such as samplers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from commlayer.engine.components import Components, Pending
from commlayer.engine.job.job import DistributedJob, JobContext
from commlayer.engine.observers.trace import STEPS, trace
from commlayer.engine.worker.stopwatch import StepTiming
from commlayer.observe.prediction_check import StalePlan
from commlayer.records import Plan


class Inspection:
    """Diagnostics of one session."""

    def __init__(self, context: JobContext) -> None:
        self.context = context

    @property
    def plan(self) -> Plan | None:
        """The current plan. The value is None if there are no other ranks."""
        return self.context.plan

    @property
    def steps_locally(self) -> bool:
        """True: the current plan has local steps, so weights and optimizer states differ between ranks."""
        return self.plan is not None and self.plan.steps_locally

    @property
    def members(self) -> tuple[int, ...]:
        """For each current rank, the rank that its worker had when it joined the job. The two differ after other workers have
        left."""
        return self.context.ranks

    @property
    def may_leave(self) -> bool:
        """True: workers can leave while the others continue (setting min_workers)."""
        return self.context.elastic

    @property
    def own(self) -> int:
        """This worker's number in `members`: the rank that it had when it joined the job."""
        return self.context.id

    @property
    def exchanged_steps(self) -> int:
        """Number of training steps (`session.step`) whose weight changes all workers have. Later steps are local, and are lost
        if their worker dies."""
        return self.context.exchanged_steps

    @property
    def confirmed(self) -> int:
        """Number of training steps in which the work of each worker counts, even if it leaves now."""
        return self.context.members.confirmed if self.may_leave else self.context.exchanged_steps

    def steps_at_exit(self, member: int) -> int:
        """Returns `exchanged_steps` when a worker left: the worker contributes nothing to later steps. `member`: the
        worker's number in `members`."""
        context = self.context
        entered = 0 if context.joined is None else context.joined.exchanged_steps
        return context.members.steps_at_exit.get(member, entered)

    def catch_up(self, *, wholly: bool = False) -> None:
        """Runs an exchange that is due because this rank's optimizer step was skipped. All ranks call it between two steps.
        `wholly`: in jobs whose workers can leave, it also exchanges until all workers have the weight changes of all steps, and
        learns which of them have left."""
        context = self.context
        if context.local is not None:
            context.components.complete(Pending.DUE)
            if wholly and self.may_leave:
                context.components.complete(Pending.ALL_EXCHANGES)
        if wholly:
            context.members.settle()

    @property
    def followers(self) -> dict[str, Callable[[], str]]:
        """Maps names to functions that return state for joining workers, such as the state of a sampler."""
        return self.context.followers

    @property
    def joined_state(self) -> dict[str, str]:
        """State that this rank received when it joined a running job: results of another rank's `followers`, by name. Readers
        remove the entries that they use."""
        return {} if self.context.joined is None else self.context.joined.followed

    @property
    def components(self) -> Components:
        """The parts of the session that are called in each step, and when plan or members change."""
        return self.context.components

    def decisions(self) -> list[str]:
        """commlayer's decisions during training, such as changes of plan: one line for each, with step and reason. Only rank 0
        has all decisions."""
        return list(self.context.decisions)

    def events(self) -> list[StalePlan]:
        """Reports that another plan is needed, as records. Only rank 0 has all reports."""
        return list(self.context.events)

    def laps(self) -> list[StepTiming]:
        """Returns the computation time of this worker in each step since the last call, without waits for other ranks."""
        context = self.context
        return context.worker.stopwatch.take() if isinstance(context, DistributedJob) else []

    def trace(self, path: str | Path, steps: int = STEPS) -> None:
        """Writes a trace of the next steps, predicted and measured, on rank 0. All ranks call it together.

        Perfetto (ui.perfetto.dev) displays it; `commlayer trace FILE` compares predicted and measured times of each operation.
        With the setting `trace`, a trace is written automatically.
        """
        self.components.complete(Pending.STEP)
        trace(self.context, Path(path), steps)

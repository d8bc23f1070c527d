"""Implements session.inspect: the state and decisions of a session, for users and for components such as samplers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from commlayer.engine.connection import DistributedJob, JobContext
from commlayer.engine.observers import Observers
from commlayer.engine.step import StepTiming
from commlayer.engine.trace import STEPS, trace
from commlayer.observe.prediction_check import StalePlan
from commlayer.records import Plan


class Inspected(Protocol):
    """Interface through which an Inspection reads its session."""

    @property
    def connection(self) -> JobContext: ...

    @property
    def observers(self) -> Observers: ...

    def complete(self) -> object: ...


class Inspection:
    """Diagnostics of one session."""

    def __init__(self, inspected: Inspected) -> None:
        self._inspected = inspected

    @property
    def plan(self) -> Plan | None:
        """The current plan; None if there are no other ranks."""
        return self.connection.plan

    @property
    def connection(self) -> JobContext:
        return self._inspected.connection

    @property
    def members(self) -> tuple[int, ...]:
        """For each rank, the initial rank of its worker. The two differ after other workers have left."""
        return self.connection.ranks

    @property
    def may_leave(self) -> bool:
        """Whether workers can leave while the others continue (min_workers)."""
        return self.connection.elastic

    @property
    def own(self) -> int:
        """This worker's number in `members`: its initial rank."""
        return self.connection.id

    @property
    def carried(self) -> int:
        """Number of the session's steps (`session.step`) whose changes all workers have. Later steps are local, and are lost
        with their worker."""
        return self.connection.carried

    def parted(self, member: int) -> int:
        """Value of `carried` when a worker left: it has no share in later steps. `member` is its initial rank."""
        connection = self.connection
        entered = 0 if connection.joined is None else connection.joined.carried
        return connection.members.parted.get(member, entered) if isinstance(connection, DistributedJob) else entered

    def catch_up(self, *, wholly: bool = False) -> None:
        """Runs an exchange that is due because this rank's optimizer step was skipped. All ranks call it between two steps.
        `wholly`: if workers can leave, also exchanges until all workers have the changes of all steps."""
        connection = self.connection
        if isinstance(connection, DistributedJob) and connection.local is not None:
            connection.catch_up()
            for listener in connection.listeners if wholly and self.may_leave else ():
                listener.end_rounds()

    @property
    def followers(self) -> dict[str, Callable[[], str]]:
        """Maps names to functions that return state for joining workers, such as that of a sampler."""
        return self.connection.followers

    @property
    def given(self) -> dict[str, str]:
        """State that this rank received when it joined a running job: results of another rank's `followers`, by name. Readers
        remove the entries that they use."""
        return {} if self.connection.joined is None else self.connection.joined.followed

    @property
    def observers(self) -> Observers:
        """The observers that are called in each step."""
        return self._inspected.observers

    def decisions(self) -> list[str]:
        """commlayer's decisions during training, one line for each, with step and reason. Only rank 0 has all of them."""
        return list(self.connection.decisions)

    def events(self) -> list[StalePlan]:
        """Events that require another plan, as records. Only rank 0 has all of them."""
        return list(self.connection.events)

    def laps(self) -> list[StepTiming]:
        """Computation time of this worker in each step since the last call, without waits for other ranks."""
        connection = self.connection
        return connection.worker.stopwatch.take() if isinstance(connection, DistributedJob) else []

    def trace(self, path: str | Path, steps: int = STEPS) -> None:
        """Writes a trace of the next steps, predicted and measured, on rank 0. All ranks call it together.

        Perfetto (ui.perfetto.dev) displays it; `commlayer trace FILE` compares predicted and measured times of each operation.
        The setting `trace` writes one automatically.
        """
        self._inspected.complete()
        trace(self.connection, self.observers, Path(path), steps)

"""session.inspect: the state and decisions of a session, for users and for components such as samplers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from commlayer.engine.connection import JobContext
from commlayer.engine.observers import Observers
from commlayer.engine.step import StepTiming
from commlayer.engine.trace import STEPS, trace
from commlayer.observe import StalePlan
from commlayer.records import Plan


class Inspected(Protocol):
    """What an Inspection needs of its session."""

    @property
    def connection(self) -> JobContext: ...

    @property
    def observers(self) -> Observers: ...

    def when_connected(self, action: Callable[[], None]) -> None: ...


class Inspection:
    """Diagnostics of one session. With DDP the connection is empty before the first backward pass."""

    def __init__(self, inspected: Inspected) -> None:
        self._inspected = inspected

    @property
    def plan(self) -> Plan | None:
        """The current plan; None without other ranks."""
        return self.connection.plan

    @property
    def connection(self) -> JobContext:
        return self._inspected.connection

    @property
    def members(self) -> tuple[int, ...]:
        """By rank, the initial rank of that worker. Other workers may have left since."""
        connection = self.connection
        if connection.uplink is None or connection.members is None:
            return tuple(range(connection.world))
        return tuple(member.rank for member in connection.uplink.view.members)

    @property
    def may_leave(self) -> bool:
        """Whether workers may leave while the others continue (min_workers)."""
        return self.connection.members is not None

    @property
    def own(self) -> int:
        """This worker's entry in `members`."""
        return self.connection.id

    @property
    def carried(self) -> int:
        """Number of the session's steps (`session.step`) that all workers share. Later ones are local and are lost with their
        worker."""
        return self.connection.carried

    def parted(self, member: int) -> int:
        """`carried` when that member left, so that it has no part in later steps."""
        return self.connection.parted.get(member, self.connection.entered)

    def catch_up(self, *, wholly: bool = False) -> None:
        """Called between two steps, on all ranks: runs a due exchange if this rank's optimizer step was skipped. `wholly`: if
        workers may leave, also exchanges until all steps are shared."""
        if self.connection.local is not None:
            for act in [*self.connection.catch_up, *(self.connection.end_rounds if wholly and self.may_leave else ())]:
                act()

    @property
    def followers(self) -> dict[str, Callable[[], str]]:
        """By name: functions that return state for joining workers, such as a sampler's."""
        return self.connection.followers

    @property
    def given(self) -> dict[str, str]:
        """The state that `followers` of another rank sent when this rank joined a running job. Readers remove what they
        take."""
        return {} if self.connection.joined is None else self.connection.joined.followed

    @property
    def observers(self) -> Observers:
        """The observers called at each step."""
        return self._inspected.observers

    def decisions(self) -> list[str]:
        """commlayer's decisions during training, one line each with step and reason. Rank 0 has all of them."""
        return list(self.connection.decisions)

    def events(self) -> list[StalePlan]:
        """Events that call for another plan, as records. Rank 0 has all of them."""
        return list(self.connection.events)

    def laps(self) -> list[StepTiming]:
        """The computing time of this worker in each step since the last call, without waits for other ranks."""
        worker = self.connection.worker
        return [] if worker is None else worker.stopwatch.take()

    def trace(self, path: str | Path, steps: int = STEPS) -> None:
        """Writes a trace of the next steps, predicted and measured, on rank 0. All ranks call it together.

        Perfetto (ui.perfetto.dev) shows it; `commlayer trace FILE` compares it op by op. The setting `trace` writes one
        automatically.
        """
        self._inspected.when_connected(lambda: trace(self.connection, self.observers, Path(path), steps))

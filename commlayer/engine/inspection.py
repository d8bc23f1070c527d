"""session.inspect: what a session knows and has decided, for people who want to know and for parts that work beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from commlayer.engine.connection import Connection
from commlayer.engine.observers import Observers
from commlayer.engine.stopwatch import Lap
from commlayer.engine.trace import STEPS, trace
from commlayer.observe import StalePlan
from commlayer.records import Plan


class Inspected(Protocol):
    """What is looked into."""

    @property
    def connection(self) -> Connection: ...

    @property
    def observers(self) -> Observers: ...

    def when_connected(self, action: Callable[[], None]) -> None: ...


class Inspection:
    """Of one session. With DDP there is nobody in its connection before the first backward pass."""

    def __init__(self, inspected: Inspected) -> None:
        self._inspected = inspected

    @property
    def plan(self) -> Plan | None:
        """The plan in force, None where there is nobody to talk to."""
        return self.connection.plan

    @property
    def connection(self) -> Connection:
        """Groups, coordinator, servers and worker."""
        return self._inspected.connection

    @property
    def members(self) -> tuple[int, ...]:
        """By rank: which rank that worker had when the job began. Others may have gone since."""
        made = self.connection
        if made.uplink is None or made.members is None:
            return tuple(range(made.world))
        return tuple(member.rank for member in made.uplink.view.members)

    @property
    def may_leave(self) -> bool:
        """Whether workers may leave, and the others go on (min_workers)."""
        return self.connection.members is not None

    @property
    def own(self) -> int:
        """This one, as `members` has it."""
        return self.connection.id

    @property
    def carried(self) -> int:
        """So many of the session's steps (`session.step`) are in what all workers have; the others are local ones, which are
        lost with the worker that took them."""
        return self.connection.carried

    def parted(self, member: int) -> int:
        """The same as it was when that member went, so that it has no part in later steps."""
        return self.connection.parted.get(member, self.connection.entered)

    def catch_up(self, *, wholly: bool = False) -> None:
        """Between two steps, on all ranks: makes the exchange that is due, where this rank's optimizer step was skipped.
        `wholly`: those, too, behind which all steps are carried, where workers may leave."""
        if self.connection.local is not None:
            for act in [*self.connection.catch_up, *(self.connection.end_rounds if wholly and self.may_leave else ())]:
                act()

    @property
    def followers(self) -> dict[str, Callable[[], str]]:
        """By name: who says what a worker that joins must know of it, as a sampler that is followed does."""
        return self.connection.followers

    @property
    def given(self) -> dict[str, str]:
        """What the others' followers have said to this rank, where it has joined a running job. Whoever takes it removes it."""
        return {} if self.connection.joined is None else self.connection.joined.followed

    @property
    def observers(self) -> Observers:
        """Who looks on at each step."""
        return self._inspected.observers

    def decisions(self) -> list[str]:
        """What commlayer decided while training ran, a line each with its step and reason. Rank 0 has all of it."""
        return list(self.connection.decisions)

    def events(self) -> list[StalePlan]:
        """What happened that asks for another plan, as records. Rank 0 has all of it."""
        return list(self.connection.events)

    def laps(self) -> list[Lap]:
        """How long this worker computed in each step since the last call, without waiting for others."""
        worker = self.connection.worker
        return [] if worker is None else worker.stopwatch.take()

    def trace(self, path: str | Path, steps: int = STEPS) -> None:
        """Writes a trace of the next steps, predicted and measured, on rank 0. All ranks call it together.

        Perfetto (ui.perfetto.dev) shows it; `commlayer trace FILE` compares op by op. The setting `trace` does it by itself.
        """
        self._inspected.when_connected(lambda: trace(self.connection, self.observers, Path(path), steps))

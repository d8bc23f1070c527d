"""Defines the members of a job whose members stay; epochs/changing_members.py defines those of other jobs."""

from __future__ import annotations

import contextlib

from commlayer.engine.components import Component, ComponentOrder
from commlayer.records import Plan


class FixedMembers(Component):
    """What a job does when its members change. In this class they never do."""

    order = ComponentOrder.JOB
    elastic = False
    """True: members can leave while the others continue."""

    def __init__(self) -> None:
        self.steps_at_exit: dict[int, int] = {}
        """Training step at which each former member left, by its number in messages: the job's `exchanged_steps` then."""
        self.admitted: set[int] = set()
        """Numbers of all workers that are or were members, or will be."""
        self.followers: set[int] = set()
        """Numbers of all workers that follow the exchanges, or have done so."""
        self.row_exchanged_steps = 0
        """The job's value of `exchanged_steps` when this rank sent its last row."""
        self.next_plan: Plan | None = None
        """Plan to which the job switches between two steps, for sites of another size that want to join. None: there is no such
        plan.
        """
        self.confirmed = 0
        """Training step up to which the work of each member counts, even if it leaves now: a value of `exchanged_steps`."""

    def departed(self, wait_s: float) -> list[str]:
        """Returns the names of the members that have left the job, if this rank still counts them. Waits up to `wait_s`
        seconds for the coordinator's report."""
        return []

    def without_joins(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for operations that a joining rank would not know of: no rank can join inside it."""
        return contextlib.nullcontext()

    @property
    def catching_up(self) -> bool:
        """True: a worker follows the exchanges under the current plan, and joins later. If the plan changed, the worker would
        have to begin again."""
        return False

    @property
    def joining_sizes(self) -> set[int]:
        """Numbers of ranks of the sites that begin in one of the next steps."""
        return set()

    @property
    def admits_now(self) -> bool:
        """True: workers join in the step that this rank begins next."""
        return False

    @property
    def entering(self) -> bool:
        """True: a worker takes part in the current step for the first time."""
        return False

    def end_first_step(self) -> None:
        """Ends the first step of a rank that has joined: the other ranks include it in all calls from now on."""

    def settle(self) -> None:
        """Learns which members have taken part in the last step. All ranks call it after the same step."""

    def continue_without_departed(self) -> None:
        """Continues without members that have left, after a call of all ranks has failed because of that."""

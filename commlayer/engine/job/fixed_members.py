"""Defines the members of a job whose members stay; epochs/membership_change.py defines those of other jobs."""

from __future__ import annotations

import contextlib

from commlayer.engine.components import Component, Order
from commlayer.errors import InvalidState
from commlayer.records import Plan


class FixedMembers(Component):
    """What a job does when its members change. In this class they never do."""

    order = Order.JOB
    elastic = False
    """True: members can leave while the others continue."""

    def __init__(self) -> None:
        self.steps_at_exit: dict[int, int] = {}
        """Training step at which each former member left, by rank: the job's value of `carried` then."""

    def invites(self) -> bool:
        """Returns True if new members wait to join, so that this rank must lead all ranks to a step in which they can join."""
        return False

    def departed(self, wait_s: float) -> list[str]:
        """Returns the names of the members that have left the job, if this rank has not switched to the new epoch yet. Waits up
        to `wait_s` seconds for the coordinator's report."""
        return []

    def no_joins(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for operations that a joining rank would not know of: no rank can join inside it."""
        return contextlib.nullcontext()

    def enter_epoch(self, plan: Plan | None = None) -> None:
        """Switches to the epoch of the remaining members after EpochChanged. Raises CommError if that fails. `plan`: the plan
        to which the ranks are switching; servers might have it already."""
        raise InvalidState("E-SESSION-CLOSED", "the members of this job cannot change")

    def between(self, plan: Plan | None = None) -> None:
        """Switches to the epoch of the remaining members, if members have left between two steps. `plan`: as in `enter_epoch`.
        """

"""What a job reports to its parts: changes of members, and epochs in a declared order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import IntEnum

from commlayer.engine.worker.worker import Worker
from commlayer.errors import InvalidState
from commlayer.records import Plan


class MemberChanges:
    """Handles changes of the job's members. This class is for jobs whose members stay; membership_change.py defines the class
    for other jobs."""

    elastic = False
    """True: members can leave while the others continue."""

    def __init__(self) -> None:
        self.parted: dict[int, int] = {}
        """Maps the rank of each member that has left to the job's value of `carried`, a number of training steps, when the
        member left."""

    def check_interrupts(self, worker: Worker, complete: Callable[[], bool]) -> None:
        """Called repeatedly while a step waits for other ranks, until all data of the step has arrived (`complete`). Raises
        EpochChanged if the remaining ranks must repeat the step."""

    def unfit(self, plan: Plan) -> str:
        """Returns the reason why members cannot change under this plan; "" if they can, or if members of this job never change.
        """
        return ""

    def invites(self) -> bool:
        """Returns True if new members wait to join, so that this rank must lead all ranks to a step in which they can join."""
        return False

    def pending(self, wait_s: float) -> bool:
        """Returns True if members have left and this rank has not switched to the new epoch yet. Waits up to `wait_s` seconds
        for the coordinator's report."""
        return False

    def patience(self) -> float:
        """Returns how many seconds this rank waits after its deadline, during which the coordinator decides which ranks are too
        slow."""
        return 0.0

    def gone(self) -> list[str]:
        """Returns the names of the members that have left, for error messages."""
        return []

    def closed_door(self) -> contextlib.AbstractContextManager[None]:
        """Context manager for operations that a joining rank would not know of: no rank can join inside it."""
        return contextlib.nullcontext()

    def go(self) -> None:
        """Switches to the epoch of the remaining members after EpochChanged. Raises CommError if that fails."""
        raise InvalidState("E-SESSION-CLOSED", "the members of this job cannot change")

    def between(self, plan: Plan | None = None) -> None:
        """Switches to the epoch of the remaining members, if members have left between two steps. `plan`: the plan to which the
        ranks are switching; servers might have it already."""


class ListenerOrder(IntEnum):
    """Order in which a job calls its EpochListeners: local steps begin or end first, and hooks and checks then adapt to the new
    sync mode."""

    SCHEDULE = 0
    LOOP = 1
    DRIVER = 2
    OTHER = 3


class EpochListener:
    """A component that adapts to changes of plan and members. All ranks make each call after the same step."""

    order = ListenerOrder.OTHER

    def catch_up(self) -> None:
        """Called before all ranks make a call together between two steps. Counts and exchanges local steps that other ranks
        might have counted already."""

    def complete(self) -> None:
        """Called before a save, before a load and by the default finish(). Completes pending exchanges."""

    def finish(self) -> None:
        """Called at the normal end. Completes pending exchanges."""
        self.complete()

    def end_rounds(self) -> None:
        """Exchanges the weight changes of all local steps that have not been exchanged."""

    def before_switch(self) -> None:
        """Called when all ranks have checked that they can switch to the new plan, before the switch."""

    def after_switch(self) -> None:
        """Called when a new plan has taken effect."""

    def after_regroup(self) -> None:
        """Called when the members have changed, in the step that is repeated."""

    def after_between(self) -> None:
        """Called after `after_regroup`, if the members changed between two steps. The listener can use collectives."""

    def shares_moved(self, part: float) -> None:
        """Called when the balancer changes the workers' shares of the batch. This rank's computation per step takes `part`
        times as long."""

    def settle(self) -> None:
        """Reports to the worker the averages of the last step that the script has cleared; see Worker.mark_discarded."""

    def finish_pending(self) -> None:
        """Waits for results of the last step that are still missing, if results are applied bucket by bucket."""

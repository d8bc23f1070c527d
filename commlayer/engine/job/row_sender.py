"""Sends the row of each step, after all components have added their numbers."""

from __future__ import annotations

from commlayer.cluster.processes.rows import StepRows
from commlayer.engine.components import Component, ComponentOrder, Pending


class RowSender(Component):
    """The last component of a job. The sender sends the sections that other objects have started, as one row."""

    order = ComponentOrder.ROWS

    def __init__(self, rows: StepRows) -> None:
        self._rows = rows

    def end_step(self) -> None:
        self._rows.send()

    def end_exchange(self, *, early: bool) -> None:
        self._rows.send()

    def complete(self, pending: Pending) -> None:
        if pending >= Pending.SENT:
            self._rows.settle()

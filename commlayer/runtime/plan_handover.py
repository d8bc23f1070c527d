"""From one plan's worker to the next one's: what it owes is owed on, whatever path and codec its elements take now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.compressors.debts import Debt, pay
from commlayer.runtime.shared_buffers import pass_on

if TYPE_CHECKING:
    from commlayer.runtime.worker import Worker


def hand_over(before: Worker, after: Worker) -> None:
    """`after` goes on where `before` stopped, between two steps, and owes what it owed."""
    after.step = before.step
    after.take(before)
    pass_on(before.flows, after.flows)
    owing = [(flow, debt) for flow in before.flows for debt in flow.debts()]
    owing += before.late.debts(before.weight, before.members)
    debts = [Debt(d.tensor, d.start, d.values / after.rate_of(flow)) for flow, d in owing]
    for flow in after.flows:
        paid = pay(debts, flow.bucket.slices)
        flow.carry = None if paid is None else paid * after.rate_of(flow)
    after.counters, after.stopwatch = before.counters, before.stopwatch
    after.record(before.recorder)
    after.reorder(before.places)
    after.settle = before.settle

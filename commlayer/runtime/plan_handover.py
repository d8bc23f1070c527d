"""Passes debts, agreed values and counters from one plan's worker to the next one's, between two steps. Knows workers alone.

Debts go on whatever path and codec their elements take now, as `carry` of the buckets that hold them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.compressors.debts import Debt, pay
from commlayer.runtime.entries_sent import inherit
from commlayer.runtime.shared_buffers import pass_on

if TYPE_CHECKING:
    from commlayer.runtime.worker import Worker


def hand_over(before: Worker, after: Worker) -> None:
    """`after` goes on where `before` stopped, and owes what that owed."""
    after.step = before.step
    after.units.take(before.units)
    pass_on(before.shared_buffers, after.shared_buffers)
    owing = [(bucket, debt) for bucket in before.buckets for debt in bucket.debts()]
    owing += before.late.debts(before.weight, before.units.members)
    debts = [Debt(d.tensor, d.start, d.values / after.units.rate_of(bucket)) for bucket, d in owing]
    for bucket in after.buckets:
        paid = pay(debts, bucket.slices)
        bucket.carry = None if paid is None else paid * after.units.rate_of(bucket)
    inherit(before.buckets, after.buckets)
    after.counters, after.stopwatch = before.counters, before.stopwatch
    after.record(before.recorder)
    after.eager, after.bring_in = before.eager, before.bring_in
    after.reorder(before.places)
    after.settle = before.settle

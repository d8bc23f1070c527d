"""What a worker tells a server when the members of a job change in the middle of a step. Knows bytes; no plan, no codec."""

from __future__ import annotations

import msgspec
from msgspec import structs

from commlayer.errors import CorruptFrame, one_line
from commlayer.records import MALFORMED, Record, View
from commlayer.transport.protocol import Message, peer_name


class ViewChange(Record, frozen=True):
    """Body of a PLAN frame with the flag ABANDON."""

    view: View
    """Its members go on: they alone contribute from now on, in this order, those who join behind the others."""
    step: int
    """Under way: no member has it whole, and all do it again. What was summed of it is taken back, or thrown away."""
    undone: dict[int, int]
    """By bucket, what of the step before was not applied, as a PUSH of this one says it."""
    plan: bytes
    """In force with them."""


def wire_generation(view: View) -> int:
    """The first of a view: plans that follow each other under it count on from there.

    >>> from commlayer.records import View
    >>> wire_generation(View(1, (), ())), wire_generation(View(3, (), ()))
    (1, 131073)
    """
    return ((view.generation - 1) << 16) + 1


def amiss(change: ViewChange, generation: int, sender: int, view: View) -> str:
    """Why that cannot be what follows `view`, whoever says it; "" if it can."""
    new = change.view
    if generation != wire_generation(new) or new.generation <= view.generation:
        return f"view {new.generation} in generation {generation}, while view {view.generation} is in force"
    if structs.replace(new, generation=view.generation, members=view.members) != view:
        return "its servers or its plan are not those of the job"
    stay = tuple(m for m in view.members if m in new.members)
    joined = new.members[len(stay):]
    numbers = {m.rank for m in (*view.members, *joined)}  # given as homes come, and they take their seats as they are ready
    if not stay or new.members != (*stay, *joined) or len(numbers) < len(view.members) + len(joined):
        return "its members are none of those in force, or not in their order and ahead of who joins"
    if sender not in {m.rank for m in new.members}:
        return "its sender is none of its members"
    return ""


def read_change(message: Message) -> ViewChange:
    try:
        return msgspec.msgpack.decode(message.body, type=ViewChange)
    except MALFORMED as error:
        raise CorruptFrame(f"PLAN of other members is malformed: {one_line(error)}", peer=peer_name(message.peer)) from None

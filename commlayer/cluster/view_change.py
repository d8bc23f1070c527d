"""The message by which a worker switches a server to other members in the middle of a step."""

from __future__ import annotations

import msgspec
from msgspec import structs

from commlayer.errors import CorruptFrame, one_line
from commlayer.records import MALFORMED, Record, View
from commlayer.transport.protocol import Message, peer_name


class ViewChange(Record, frozen=True):
    """Body of a PLAN frame with the flag ABANDON."""

    view: View
    """Only its members contribute from now on, in this order; members that join come last."""
    step: int
    """The step under way. No member has received it completely, and all repeat it; the server rolls it back."""
    undone: dict[int, int]
    """By bucket, what was not applied of the step before, as in a PUSH of this step."""
    plan: bytes
    """The plan to use with this view."""


def wire_generation(view: View) -> int:
    """The first wire generation of a view; later plans under the same view continue the count.

    >>> from commlayer.records import View
    >>> wire_generation(View(1, (), ())), wire_generation(View(3, (), ()))
    (1, 131073)
    """
    return ((view.generation - 1) << 16) + 1


def amiss(change: ViewChange, generation: int, sender: int, view: View) -> str:
    """Why the change cannot follow `view`, whichever worker sends it; "" if it can."""
    new = change.view
    if generation != wire_generation(new) or new.generation <= view.generation:
        return f"view {new.generation} in generation {generation}, while view {view.generation} is in force"
    if structs.replace(new, generation=view.generation, members=view.members) != view:
        return "its servers or its plan are not those of the job"
    stay = tuple(m for m in view.members if m in new.members)
    joined = new.members[len(stay):]
    numbers = {m.rank for m in (*view.members, *joined)}  # unordered: workers join later than their homes get these numbers
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

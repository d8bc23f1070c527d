"""What a worker tells a server when the members of a job change in the middle of a step. Knows bytes; no plan, no codec."""

from __future__ import annotations

import msgspec

from commlayer.errors import CorruptFrame, one_line
from commlayer.records import MALFORMED, Record, View
from commlayer.transport.protocol import Message, peer_name


class ViewChange(Record, frozen=True):
    """Body of a PLAN frame with the flag ABANDON."""

    view: View
    """Its members go on: they alone contribute from now on, in this order."""
    step: int
    """Under way: no member has it whole, and all do it again. What was summed of it is taken back, or thrown away."""
    undone: dict[int, int]
    """By bucket, what of the step before was not applied, as a PUSH of this one says it."""
    plan: bytes
    """In force with them."""


def read_change(message: Message) -> ViewChange:
    try:
        return msgspec.msgpack.decode(message.body, type=ViewChange)
    except MALFORMED as error:
        raise CorruptFrame(f"PLAN of other members is malformed: {one_line(error)}", peer=peer_name(message.peer)) from None

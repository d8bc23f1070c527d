"""What members write of themselves, fit for logs and for all who hear of them: in one line, and no longer than it need be.

It stands in errors, in the log and in what everybody is told with each heartbeat. So it is made fit once, where calls come in.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from commlayer.cluster.messages import Heartbeat, Join
from commlayer.errors import short_line
from commlayer.records import Record

REASON_CHARS = 1000
MOST_CHARS = {"token": 64, "home": 64, "name": 255, "version": 64, "address": 300, "streams": 300, "reason": REASON_CHARS,
              "leave": REASON_CHARS}
"""By field, in whichever request it is."""
R = TypeVar("R", bound=Record)


def fit(request: R) -> R:
    """The same, for all that commlayer itself writes.

    >>> from commlayer.cluster.messages import Leave
    >>> fit(Leave("token", "no room\\nworker 0: forged")).reason
    'no room\\\\nworker 0: forged'
    """
    changed: dict[str, object] = {}
    for field, most in MOST_CHARS.items():
        said = getattr(request, field, "")
        if said != (line := short_line(said, most)):
            changed[field] = line
    if isinstance(request, Join) and request.alike:
        changed["alike"] = {short_line(name, REASON_CHARS): short_line(value, REASON_CHARS)
                            for name, value in request.alike.items()}
    if isinstance(request, Heartbeat) and request.dropped:
        changed["dropped"] = tuple(msgspec.structs.replace(gone, reason=short_line(gone.reason, REASON_CHARS))
                                   for gone in request.dropped)
    return msgspec.structs.replace(request, **changed) if changed else request

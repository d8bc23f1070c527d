"""Sanitizes text in requests: one line, bounded length.

Such text appears in errors, in logs and in the replies to all heartbeats, so it is sanitized once, when a call arrives.
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
"""Most characters by field name, in any request."""
R = TypeVar("R", bound=Record)


def fit(request: R) -> R:
    """The request with sanitized text. Text that commlayer itself writes does not change.

    >>> from commlayer.cluster.messages import Leave
    >>> fit(Leave("token", "no room\\nworker 0: forged")).reason
    'no room\\\\nworker 0: forged'
    """
    changed: dict[str, object] = {}
    for field, most in MOST_CHARS.items():
        text = getattr(request, field, "")
        if text != (line := short_line(text, most)):
            changed[field] = line
    if isinstance(request, Join) and request.alike:
        changed["alike"] = {short_line(name, REASON_CHARS): short_line(value, REASON_CHARS)
                            for name, value in request.alike.items()}
    if isinstance(request, Heartbeat) and request.dropped:
        changed["dropped"] = tuple(msgspec.structs.replace(gone, reason=short_line(gone.reason, REASON_CHARS))
                                   for gone in request.dropped)
    return msgspec.structs.replace(request, **changed) if changed else request

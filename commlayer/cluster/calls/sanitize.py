"""Sanitizes the text of requests, which appears in errors, in logs and in the replies to all heartbeats.

This happens once, when a call arrives.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from commlayer.cluster.calls.messages import Heartbeat, Join
from commlayer.errors import short_line
from commlayer.records import Record

R = TypeVar("R", bound=Record)
REASON_CHARS = 1000
MOST_CHARS = {"token": 64, "home": 64, "name": 64, "version": 64, "address": 300, "streams": 300, "reason": REASON_CHARS,
              "leave": REASON_CHARS}
"""Maximum number of characters by field name, in any request. Linux limits host names to 64."""


def sanitize(request: R) -> R:
    """Returns the request with control characters escaped and long text shortened. Text that commlayer itself writes does not
    change.

    >>> from commlayer.cluster.calls.messages import Leave
    >>> sanitize(Leave("token", "no room\\nworker 0: forged")).reason
    'no room\\\\nworker 0: forged'
    """
    changed: dict[str, object] = {}
    for field, most in MOST_CHARS.items():
        text = getattr(request, field, "")
        if text != (line := short_line(text, most)):
            changed[field] = line
    if isinstance(request, Join) and request.must_match:
        changed["must_match"] = {short_line(name, REASON_CHARS): short_line(value, REASON_CHARS)
                                 for name, value in request.must_match.items()}
    if isinstance(request, Heartbeat) and request.dropped:
        changed["dropped"] = tuple(msgspec.structs.replace(gone, reason=short_line(gone.reason, REASON_CHARS))
                                   for gone in request.dropped)
    return msgspec.structs.replace(request, **changed) if changed else request

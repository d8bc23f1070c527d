"""One line of the doctor's: what was looked at, how it stands, what was seen, how to mend it. Knows no facts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from commlayer.records import Record

Verdict = Literal["ok", "warn", "fail"]
ALLOWED = ", allowed"


class Finding(Record, frozen=True):
    """`fail`: a run would not start, or not go on; `warn`: it would, but slower or only for now. A remedy goes with both."""

    check: str
    verdict: Verdict
    seen: str
    remedy: str = ""


def ok(check: str, seen: str) -> Finding:
    return Finding(check, "ok", seen)


def warn(check: str, seen: str, remedy: str) -> Finding:
    return Finding(check, "warn", seen, remedy)


def fail(check: str, seen: str, remedy: str) -> Finding:
    return Finding(check, "fail", seen, remedy)


def of_error(check: str, error: Exception | str, remedy: str = "") -> Finding:
    """Of a line that has its remedy behind the last colon or semicolon, as errors here do, unless one is given."""
    line = " ".join(str(error).split())
    if not remedy:
        at = max(line.rfind(": "), line.rfind("; "))
        if line[:at].endswith(ALLOWED):  # which belongs to what follows
            at -= len(ALLOWED)
        line, remedy = (line[:at], line[at:].lstrip(",:; ")) if at > 0 else (line, "see docs/operations.md")
    return fail(check, line, remedy)


def usable(findings: Iterable[Finding]) -> bool:
    """Whether a run can start here."""
    return all(found.verdict != "fail" for found in findings)

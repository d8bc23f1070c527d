"""The record of a finding: the check, its verdict, what was seen, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from commlayer.records import Record

Verdict = Literal["ok", "warn", "fail"]
ALLOWED = ", allowed"


class Finding(Record, frozen=True):
    """`fail`: a run would not start or would stop. `warn`: it would run, but slower, or only for now. Both have a remedy."""

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
    """A failure from an error line. Without `remedy`, the text after the last colon or semicolon is the remedy."""
    line = " ".join(str(error).split())
    if not remedy:
        at = max(line.rfind(": "), line.rfind("; "))
        if line[:at].endswith(ALLOWED):  # the word belongs to the remedy
            at -= len(ALLOWED)
        line, remedy = (line[:at], line[at:].lstrip(",:; ")) if at > 0 else (line, "see docs/operations.md")
    return fail(check, line, remedy)


def usable(findings: Iterable[Finding]) -> bool:
    return all(found.verdict != "fail" for found in findings)

"""Findings, and the checks that return them, which run concurrently."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from commlayer.errors import error_line
from commlayer.records import Record

Verdict = Literal["ok", "warn", "fail"]
ALLOWED = ", allowed"


class Finding(Record, frozen=True):
    """The result of a check. `fail`: a run would not start or would stop. `warn`: a run would be slower, or might stop later.
    Both have a remedy. `values`: measured values for programs."""

    check: str
    verdict: Verdict
    seen: str
    remedy: str = ""
    values: dict[str, Any] = msgspec.field(default_factory=dict)


def ok(check: str, seen: str, **values: Any) -> Finding:
    return Finding(check, "ok", seen, "", values)


def warn(check: str, seen: str, remedy: str, **values: Any) -> Finding:
    return Finding(check, "warn", seen, remedy, values)


def fail(check: str, seen: str, remedy: str, **values: Any) -> Finding:
    return Finding(check, "fail", seen, remedy, values)


def judge(check: str, seen: str, remedy: str, *, failed: bool = False, doubtful: bool = False, **values: Any) -> Finding:
    verdict: Verdict = "fail" if failed else "warn" if doubtful else "ok"
    return Finding(check, verdict, seen, "" if verdict == "ok" else remedy, values)


def failure_from_error(check: str, error: Exception | str, remedy: str = "") -> Finding:
    """Converts an error line to a failure. If `remedy` is empty, the text after the last colon or semicolon becomes the
    remedy."""
    line = " ".join(str(error).split())
    if not remedy:
        at = max(line.rfind(": "), line.rfind("; "))
        if line[:at].endswith(ALLOWED):  # "allowed" belongs to the remedy
            at -= len(ALLOWED)
        line, remedy = (line[:at], line[at:].lstrip(",:; ")) if at > 0 else (line, "see docs/how-to/diagnose.md")
    return fail(check, line, remedy)


def usable(findings: Iterable[Finding]) -> bool:
    return all(finding.verdict != "fail" for finding in findings)


T = TypeVar("T")


class Check(NamedTuple, Generic[T]):
    """A check of settings `T` and its limits. `remedy`: remedy if the check exceeds its deadline."""

    name: str
    run: Callable[[T], Iterable[Finding]]
    deadline_s: float
    remedy: str


def run_checks(checks: Sequence[Check[T]], settings: T) -> Iterator[Finding]:
    """Runs all checks concurrently; yields findings in the order of the checks. A check past its deadline yields a failure."""
    begin = time.monotonic()
    results: list[queue.SimpleQueue[list[Finding]]] = [queue.SimpleQueue() for _ in checks]

    def run(check: Check[T], result: queue.SimpleQueue[list[Finding]]) -> None:
        try:
            result.put([*check.run(settings)])
        except Exception as error:  # after any failure, the other checks are still useful
            result.put([failure_from_error(check.name, error_line(error) or type(error).__name__)])

    for check, result in zip(checks, results, strict=True):
        threading.Thread(target=run, args=(check, result), name=f"doctor {check.name}", daemon=True).start()
    for check, result in zip(checks, results, strict=True):
        try:
            yield from result.get(timeout=max(0.0, begin + check.deadline_s - time.monotonic()))
        except queue.Empty:
            yield fail(check.name, f"no answer within {check.deadline_s:g} s", check.remedy)


def summary(findings: Iterable[Finding]) -> str:
    """
    >>> summary([Finding("a", "ok", ""), Finding("b", "warn", ""), Finding("c", "warn", "")])
    'usable: 1 ok, 2 warnings'
    """
    counts = Counter(finding.verdict for finding in findings)
    warnings = f"{counts['warn']} warning{'s' if counts['warn'] > 1 else ''}" if counts["warn"] else ""
    parts = [f"{counts['fail']} failed" if counts["fail"] else "", *((warnings, f"{counts['ok']} ok") if counts["fail"] else
                                                                     (f"{counts['ok']} ok", warnings))]
    return f"{'not usable' if counts['fail'] else 'usable'}: {', '.join(part for part in parts if part)}"

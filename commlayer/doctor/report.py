"""Findings of the doctor: their record, the runner of checks, and how findings are printed."""

from __future__ import annotations

import queue
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from commlayer.errors import line_of
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
        line, remedy = (line[:at], line[at:].lstrip(",:; ")) if at > 0 else (line, "see docs/how-to/diagnose.md")
    return fail(check, line, remedy)


def usable(findings: Iterable[Finding]) -> bool:
    return all(finding.verdict != "fail" for finding in findings)


class Check(NamedTuple):
    """`run` reads facts and judges them. `remedy` is for a check that exceeds its deadline."""

    name: str
    run: Callable[[], Iterable[Finding]]
    deadline_s: float
    remedy: str


def run_checks(checks: Sequence[Check]) -> Iterator[Finding]:
    """Runs all checks concurrently; yields findings in the order of the checks. A check past its deadline yields a failure."""
    begin = time.monotonic()
    results: list[queue.SimpleQueue[list[Finding]]] = [queue.SimpleQueue() for _ in checks]

    def run(check: Check, result: queue.SimpleQueue[list[Finding]]) -> None:
        try:
            result.put([*check.run()])
        except Exception as error:  # whatever fails on this machine, the other checks are still useful
            result.put([of_error(check.name, f"{line_of(error) or type(error).__name__}")])

    for check, result in zip(checks, results, strict=True):
        threading.Thread(target=run, args=(check, result), name=f"doctor {check.name}", daemon=True).start()
    for check, result in zip(checks, results, strict=True):
        try:
            yield from result.get(timeout=max(0.0, begin + check.deadline_s - time.monotonic()))
        except queue.Empty:
            yield fail(check.name, f"no answer within {check.deadline_s:g} s", check.remedy)


COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
CHECK = 10
"""Column width of a check's name."""
INDENT = 5 + CHECK
ARROW = "-> "
WIDEST = 120


def finding_lines(found: Finding, width: int) -> list[str]:
    """A finding as lines: what was seen after verdict and check, and the remedy below.

    >>> for line in finding_lines(Finding("dns", "fail", "node-7 does not resolve", "check its spelling"), 60): print(line)
    fail dns       node-7 does not resolve
                   -> check its spelling
    """
    room = max(20, min(width, WIDEST) - INDENT)
    wrapped = textwrap.wrap(found.seen, room, break_long_words=True, break_on_hyphens=False) or [""]
    rows = [f"{found.verdict:5}{found.check:{CHECK}}{wrapped[0]}", *(" " * INDENT + line for line in wrapped[1:])]
    if found.remedy:
        rest = textwrap.wrap(found.remedy, room - len(ARROW), break_long_words=True, break_on_hyphens=False)
        rows += [" " * INDENT + (ARROW if i == 0 else " " * len(ARROW)) + line for i, line in enumerate(rest)]
    return rows


def show(console: Console, found: Finding) -> None:
    first, *rest = finding_lines(found, console.width)
    text = Text(first)
    text.stylize(COLOURS[found.verdict], 0, len(found.verdict))
    console.print(text, soft_wrap=True)
    for line in rest:
        console.print(Text(line), soft_wrap=True)


def summary(findings: Iterable[Finding]) -> str:
    """
    >>> summary([Finding("a", "ok", ""), Finding("b", "warn", ""), Finding("c", "warn", "")])
    'usable: 1 ok, 2 warnings'
    """
    counts = Counter(finding.verdict for finding in findings)
    parts = [f"{counts['ok']} ok"]
    if counts["warn"]:
        parts.append(f"{counts['warn']} warning{'s' if counts['warn'] > 1 else ''}")
    if counts["fail"]:
        return ", ".join([f"not usable: {counts['fail']} failed", *parts[1:], parts[0]])
    return ", ".join([f"usable: {parts[0]}", *parts[1:]])

"""The keys of stored rows, and which rows count of those that differ only in training time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench import report
from bench.tta.links import RANKS

KEPT = report.DATA / "tta_runs.jsonl"
KEY = ("task", "link", "system", "seed", "seconds", "data")
ADDED_KEYS = {"stretch": 1.0, "hosts": RANKS}
"""Keys that were added later, and the value of rows without them. Rows with equal values of all keys are the same
measurement."""

SLOW = 3.0
"""Stretch of the races in slow motion."""


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*(row[name] for name in KEY), *(row.get(name, value) for name, value in ADDED_KEYS.items()))


def stored(path: Path | None) -> report.Store:
    return report.Store(path, key_of)


def longest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows that differ only in training time, the longest valid one: slow systems may need more time than the others."""
    result: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (not (row.get("error") or row.get("void")), row["seconds"])):
        result[key_of(row | {"seconds": 0.0})] = row
    return list(result.values())


def usual(path: Path = KEPT) -> list[dict[str, Any]]:
    """`longest` of the stored rows that were measured in real time and with the usual number of hosts."""
    return longest(row for row in stored(path).rows.values()
                   if all(row.get(name, value) == value for name, value in ADDED_KEYS.items()))


def slow_motion(path: Path = KEPT) -> list[dict[str, Any]]:
    """All rows in slow motion with the usual number of hosts."""
    return [row for row in stored(path).rows.values() if (row.get("stretch"), row.get("hosts", RANKS)) == (SLOW, RANKS)]

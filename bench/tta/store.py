"""Stores rows in a file, one line of JSON each, so that an interrupted run can resume."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.tta.links import RANKS

KEY = ("task", "link", "system", "seed", "seconds", "data")
ADDED_KEYS = {"stretch": 1.0, "hosts": RANKS}
"""Keys that were added later, and the value of rows without them. Rows with equal values of all keys are the same measurement;
the newest counts."""


class Store:
    """Rows by key. With `again`, failed and void rows count as missing."""

    def __init__(self, path: Path | None, *, again: bool = False) -> None:
        self._path = path
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                key = key_of(row)
            except (ValueError, KeyError, TypeError):
                # The last line of a run that was killed during a write; the row is measured again.
                print(f"bench: --store {path}: line {number} is not a whole row and is left out", flush=True)
                continue
            if again and (row.get("error") or row.get("void")):
                self.rows.pop(key, None)
            else:
                self.rows[key] = row

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self.rows

    def add(self, row: dict[str, Any]) -> None:
        self.rows[key_of(row)] = row
        if self._path:
            complete = not self._path.exists() or not (text := self._path.read_bytes()) or text.endswith(b"\n")
            with self._path.open("a") as file:
                file.write(("" if complete else "\n") + json.dumps(row) + "\n")


def longest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of rows that differ only in training time, the longest valid one: slow systems may need more time than the others."""
    result: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (not (row.get("error") or row.get("void")), row["seconds"])):
        result[key_of(row | {"seconds": 0.0})] = row
    return list(result.values())


def usual(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """`longest` of the rows that were measured in real time and with the usual number of hosts."""
    return longest(row for row in rows if all(row.get(name, value) == value for name, value in ADDED_KEYS.items()))


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    return (*(row[name] for name in KEY), *(row.get(name, value) for name, value in ADDED_KEYS.items()))

"""Trace files for Perfetto and Chrome, with the comparison of measured and predicted times."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from commlayer.errors import RecordError
from commlayer.files import write_whole
from commlayer.observe.deviation import Comparison
from commlayer.observe.events import NO_BUCKET, Event

Lanes = Mapping[str, Sequence[Event]]
KEY = "commlayer"
"""Key of the comparison in a trace's `otherData`, which viewers ignore."""


def by_lane(events: Iterable[Event]) -> dict[str, list[Event]]:
    """In the order in which lanes are first used."""
    lanes: dict[str, list[Event]] = {}
    for event in sorted(events, key=lambda e: e.start_s):
        lanes.setdefault(event.lane, []).append(event)
    return lanes


def write_trace(path: Path, tracks: Mapping[str, Lanes], comparison: Comparison | None = None) -> None:
    """Writes one process per track and one thread per lane, in the trace event format. The write is atomic.

    Viewers nest overlapping events of a thread, so a lane with concurrent events gets several threads.
    """
    entries: list[dict[str, Any]] = []
    for process, (track, lanes) in enumerate(tracks.items()):
        entries += [_name("process_name", process, 0, name=track), _name("process_sort_index", process, 0, sort_index=process)]
        thread = 0
        for lane, events in lanes.items():
            for number, row in enumerate(_rows(events)):
                thread += 1
                entries.append(_name("thread_name", process, thread, name=f"{lane} {number + 1}" if number else lane))
                entries.append(_name("thread_sort_index", process, thread, sort_index=thread))
                entries += [_span(event, process, thread) for event in row]
    document: dict[str, Any] = {"traceEvents": entries, "displayTimeUnit": "ms"}
    if comparison is not None:
        document["otherData"] = {KEY: msgspec.to_builtins(comparison)}
    write_whole({path: json.dumps(document).encode()})


def read_comparison(path: Path) -> Comparison:
    """Reads the comparison that `write_trace` has stored."""
    try:
        document = json.loads(path.read_text("utf-8"))
        return msgspec.convert(document["otherData"][KEY], Comparison)
    except OSError as error:
        raise RecordError("E-TRACE", f"trace {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        detail = f": {error}" if isinstance(error, msgspec.ValidationError) else ""
        raise RecordError("E-TRACE",
                          f"trace {path}: not one that commlayer wrote{detail}; the setting `trace` makes one") from None


def _rows(events: Sequence[Event]) -> list[list[Event]]:
    """As few rows as possible, without overlapping events in a row."""
    rows: list[list[Event]] = []
    for event in sorted(events, key=lambda e: (e.start_s, e.end_s)):
        free = next((row for row in rows if row[-1].end_s <= event.start_s), None)
        if free is None:
            rows.append([event])
        else:
            free.append(event)
    return rows


def _span(event: Event, process: int, thread: int) -> dict[str, Any]:
    whose = {} if event.bucket == NO_BUCKET else {"bucket": event.bucket, "nbytes": event.nbytes}
    name = event.op if event.bucket == NO_BUCKET else f"{event.op} {event.bucket}"
    return {"name": name, "cat": event.op, "ph": "X", "pid": process, "tid": thread,
            "ts": round(event.start_s * 1e6, 3), "dur": round(event.seconds * 1e6, 3), "args": whose}


def _name(kind: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args}

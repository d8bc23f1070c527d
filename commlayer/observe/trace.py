"""Predicted and measured events side by side: as a trace for Perfetto and Chrome, and as numbers. Knows files and events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from commlayer.observe.events import Event


def write_trace(path: Path, tracks: Mapping[str, Sequence[Event]]) -> None:
    """One process per track ("predicted", "measured"), one thread per lane, in the trace event format. Whole or not at all."""
    entries: list[dict[str, Any]] = []
    for process, (track, events) in enumerate(tracks.items()):
        entries.append(_name("process_name", process, 0, track))
        lanes = sorted({e.lane for e in events})
        entries += [_name("thread_name", process, 1 + number, lane) for number, lane in enumerate(lanes)]
        entries += [
            {"name": f"{e.op} {e.bucket}", "cat": e.op, "ph": "X", "pid": process, "tid": 1 + lanes.index(e.lane),
             "ts": round(e.start_s * 1e6, 3), "dur": round(e.seconds * 1e6, 3),
             "args": {"bucket": e.bucket, "nbytes": e.nbytes}}
            for e in events
        ]
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps({"traceEvents": entries, "displayTimeUnit": "ms"}))
    part.replace(path)


def compare(predicted: Sequence[Event], measured: Sequence[Event]) -> dict[str, float]:
    """Per op the median of measured / predicted seconds, over the buckets that both have."""
    seconds = {(e.op, e.bucket): e.seconds for e in predicted}
    ratios: dict[str, list[float]] = {}
    for e in measured:
        expected = seconds.get((e.op, e.bucket), 0.0)
        if expected > 0:
            ratios.setdefault(e.op, []).append(e.seconds / expected)
    return {op: median(found) for op, found in sorted(ratios.items())}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}

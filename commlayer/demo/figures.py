"""The demo's figures: rows and summary from rank 0's reports, and the best possible time of a dense step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlayer.demo.events import Progress
from commlayer.demo.settings import DENSE, Settings

HALF_NBYTES = 2


def ring_bound_s(workers: int, nbytes: float, bps: float, one_way_s: float) -> float:
    """The least time of a ring all-reduce of `nbytes`: in each of its 2(n-1) turns every host sends 1/n of the bytes.

    >>> round(ring_bound_s(4, 2_252_820, 100e6, 0.015), 3)
    0.36
    """
    turns = 2 * (workers - 1)
    return turns * (nbytes / workers * 8 / bps + one_way_s)


def results(settings: Settings, numel: int, ends: Sequence[Progress], reached: Sequence[bool]) -> dict[str, Any]:
    """{"rows", "summary"}: the dense run, the same run at the ring's bound, and the compressed run."""
    dense, compressed = (
        _row(name, codec, end, whole)
        for name, codec, end, whole in zip(("dense", "compressed"), (DENSE, settings.codec), ends, reached, strict=True)
    )
    bound_s = ring_bound_s(settings.workers, HALF_NBYTES * numel, settings.bps, settings.one_way_s)
    bound = {"run": "bound", "codec": DENSE, "reached": reached[0], "steps": ends[0].step, "step_s": bound_s,
             "train_s": ends[0].step * bound_s}
    rows = [dense, bound, compressed]
    for row in rows:
        row["speedup"] = _ratio(dense, row)
    summary = {
        "workers": settings.workers, "link_bps": settings.bps, "rtt_s": settings.rtt_s, "target": settings.target,
        "parameters": numel, "speedup": compressed["speedup"], "speedup_over_bound": _ratio(bound, compressed),
        "step_speedup": dense["step_s"] / compressed["step_s"], "sent_ratio": dense["step_nbytes"] / compressed["step_nbytes"],
    }
    return {"rows": rows, "summary": summary}


def _row(name: str, codec: str, end: Progress, reached: bool) -> dict[str, Any]:
    return {
        "run": name, "codec": codec, "reached": reached, "train_s": end.train_s, "steps": end.step, "step_s": end.step_s,
        "sent_nbytes": end.sent_nbytes, "step_nbytes": end.step_nbytes, "accuracy": end.accuracy, "loss": end.loss,
        "exposed": end.exposed,
    }


def _ratio(slow: dict[str, Any], fast: dict[str, Any]) -> float | None:
    """The speedup, or None unless both runs reached the target."""
    return slow["train_s"] / fast["train_s"] if slow["reached"] and fast["reached"] else None

"""Arguments of attach() from values that tables of cases hold: a plan or a codec, and a sync mode in the plan's words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import commlayer
from commlayer.records import Plan


def plan_or_codec(value: Any) -> dict[str, Any]:
    """The argument `plan` for a Plan or a path, `compression` for a codec, none for "auto" or None."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return {}
    return {"plan": value} if isinstance(value, Plan | Path) else {"compression": value}


def sync_of(
    every: int | None = None, codes: str | None = None, overlap: str | None = None, fragments: int | None = None,
    outer: Any = None,
) -> Any:
    """The argument `sync`, from the fields of a plan."""
    if overlap == "forward":
        return "forward"
    if every is None and codes is None:
        return None
    return commlayer.LocalSteps(every or 1, overlap=overlap == "round", fragments=fragments, outer=outer)

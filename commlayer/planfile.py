"""A plan file and what lies beside it. Knows files and records, no torch; decides nothing."""

from __future__ import annotations

from pathlib import Path

from commlayer import records
from commlayer.planner.model import Inputs
from commlayer.records import Plan


def text_of(path: str | Path, what: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{what} {path}: is no text") from None


def sidecar(path: Path) -> Path:
    """Beside plan.json, what it was made from: plan.inputs.json."""
    return path.with_name(f"{path.stem}.inputs.json")


def plan_in(path: Path) -> Plan:
    return records.decode(text_of(path, "plan").encode(), Plan, f"plan {path}")


def inputs_of(path: Path) -> Inputs:
    """What the plan in that file was made from."""
    beside = sidecar(path)
    if not beside.is_file():
        raise ValueError(f"{beside}: no such file; `commlayer plan make --out {path}` writes it beside the plan")
    return records.decode(text_of(beside, "inputs").encode(), Inputs, f"inputs {beside}")

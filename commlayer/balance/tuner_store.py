"""Stores trials on disk: a line that identifies the search, then one JSON line per trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commlayer.balance.tuner_space import SearchSpace
from commlayer.errors import RecordError
from commlayer.files import write_whole
from commlayer.records import Record, decode, encode


class Search(Record, frozen=True):
    """Identifies the search that a store's trials belong to."""

    task: str
    space: SearchSpace
    budget: float
    """Allowed relative increase of the loss, 0.005 for half a per cent."""
    seed: int = 0


class TuningTrial(Record, frozen=True):
    """One proxy run. A failed one has its reason in `error`; its figures do not count."""

    settings: dict[str, Any]
    """Raw settings as the search space has them."""
    seconds: float
    loss: float
    error: str = ""


class Store:
    """An append-only file. An incomplete last line, from a crash, is dropped."""

    def __init__(self, path: Path, search: Search) -> None:
        self.path, self.trials = path, list[TuningTrial]()
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            write_whole({path: encode(search) + b"\n"})
            return
        kept = decode(whole[0], Search, f"{path}: line 1")
        if kept != search:
            name = next(f for f in Search.__struct_fields__ if getattr(kept, f) != getattr(search, f))
            raise RecordError("E-TUNE-STORE",
                              f"{path} holds trials of another search (its {name} differs): give another --store, or delete it")
        self.trials = [decode(line, TuningTrial, f"{path}: line {i}") for i, line in enumerate(whole[1:], 2)]
        if len(whole) < len(lines):
            write_whole({path: b"".join(whole)})

    def add(self, trial: TuningTrial) -> None:
        """The trial is in the file when this returns."""
        with self.path.open("ab") as file:
            file.write(encode(trial) + b"\n")
        self.trials.append(trial)

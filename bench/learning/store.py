"""Results of `bench learning` in a file: one line of JSON per training, appended as trainings end.

A result is valid while the training's configuration and its mark, a hash of the code's results, are unchanged. So a campaign
resumes where it stopped, and trainings whose results changed are measured again.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench import Unmeasurable
from bench.virtual_training import LOOKS, STEPS, Variant
from commlayer.records import Record

FORM = 1


class Run(NamedTuple):
    """The result of a training."""

    mark: str
    curve: tuple[float, ...]
    """Validation losses; NaN once the loss is NaN or infinite."""


class _Head(Record, frozen=True):
    """The first line."""

    store: int
    steps: int
    looks: int


class _Line(Record, frozen=True):
    variant: Variant = msgspec.field(name="way")
    mark: str
    curve: tuple[float | None, ...]


HEAD = _Head(FORM, STEPS, LOOKS)


class Store:
    """A file of training results. Created by the first `add`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[Variant, Run] = {}
        if path.exists():
            self._read(path.read_bytes())

    def _read(self, data: bytes) -> None:
        whole, _, cut = data.rpartition(b"\n")
        if cut:  # the last run was killed during a write
            self.path.write_bytes(whole + b"\n" if whole else b"")
        first, *lines = whole.split(b"\n") if whole else [b""]
        if not first:
            return
        try:
            head = msgspec.json.decode(first, type=_Head)
        except msgspec.MsgspecError:
            raise Unmeasurable(f"{self.path}: line 1 is no head of a store of trainings; give another file") from None
        if head != HEAD:
            raise Unmeasurable(f"{self.path}: a store of form {head.store} with {head.steps} steps and {head.looks} looks, "
                               f"this bench has {FORM}, {STEPS} and {LOOKS}; move it away to begin again")
        for number, line in enumerate(lines, 2):
            try:
                entry = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError as error:
                raise Unmeasurable(f"{self.path}: line {number} is damaged ({error}); delete it and go on") from None
            if len(entry.curve) != LOOKS:
                raise Unmeasurable(f"{self.path}: line {number} has {len(entry.curve)} looks instead of {LOOKS}; delete it")
            self.runs[entry.variant] = Run(entry.mark, tuple(math.nan if loss is None else loss for loss in entry.curve))

    def add(self, variant: Variant, run: Run) -> None:
        self.runs[variant] = run
        curve = tuple(None if not math.isfinite(loss) else float(f"{loss:.5g}") for loss in run.curve)
        fields = {name: value for name, value in msgspec.to_builtins(variant).items() if value != _DEFAULTS.get(name)}
        line = json.dumps({"way": fields, "mark": run.mark, "curve": curve}, separators=(",", ":"))
        head = b"" if self.path.exists() and self.path.stat().st_size else msgspec.json.encode(HEAD) + b"\n"
        with self.path.open("ab") as file:
            file.write(head + line.encode() + b"\n")

    def has(self, variant: Variant, mark: str) -> bool:
        with contextlib.suppress(KeyError):
            return self.runs[variant].mark == mark
        return False


_DEFAULTS = {name: default for name, default in msgspec.to_builtins(Variant("", "")).items()
             if name not in ("task", "optimizer")}

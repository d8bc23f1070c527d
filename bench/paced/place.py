"""The records that a rank and a training system exchange, and a shared folder through which ranks exchange addresses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from bench.tasks import Batch

STEPS = "steps"
"""A file in the folder of a run: the steps of each rank so far, and the last step, 0 while it is not known. The ranks of a run
share a machine, and map it into their memory."""


class Place(NamedTuple):
    """A rank's position in the run."""

    rank: int
    ranks: int
    address: str
    folder: Path
    """Shared by all ranks."""
    samples: int
    """Number of samples in the rank's batch."""
    seed: int = 0


class TrainingSystem(NamedTuple):
    """A model as set up by a training system."""

    module: nn.Module
    """The module whose forward is called."""
    optimizer: Any
    """The object whose zero_grad and step are called."""
    end: Callable[[], dict[str, Any]] = dict
    """Shuts the system down and returns its report."""
    batches: Iterator[Batch] | None = None
    """This rank's batches, one per step. None: the batches of its rank number, of the same size on all ranks."""


def shared_text(place: Place, name: str, text: str | None = None, wait_s: float = 60.0) -> str:
    """Writes `text` for all ranks, or waits until another rank writes `name`. Only for addresses that a user would type."""
    path = place.folder / name
    if text is not None:
        part = path.with_name(f"{name}.part")
        part.write_text(text)
        os.replace(part, path)
    until = time.monotonic() + wait_s
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no rank wrote {name} within {wait_s:g} s")
        time.sleep(0.05)
    return path.read_text()

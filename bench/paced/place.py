"""Where a rank is, what a system makes of its model there, and how ranks tell each other addresses. Knows no system."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from bench.tasks import Batch


class Place(NamedTuple):
    """Where a rank is."""

    rank: int
    ranks: int
    address: str
    folder: Path
    """Shared by all ranks."""
    samples: int
    """Of its batch."""
    seed: int = 0


class Started(NamedTuple):
    """What a system makes of a model."""

    module: nn.Module
    """To call forward on."""
    optimizer: Any
    """To call zero_grad and step on."""
    end: Callable[[], dict[str, Any]] = dict
    """Ends it, and tells of it."""
    batches: Iterator[Batch] | None = None
    """This rank's, step after step; None: those of its own number, as many samples as all others have."""


def spoken(place: Place, name: str, text: str | None = None, wait_s: float = 60.0) -> str:
    """What some rank writes for all: an address. Only what a user would type passes this way."""
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

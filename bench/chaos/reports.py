"""What a worker of a chaos run is told, and what it tells. Loads no torch."""

from __future__ import annotations

from typing import Any, NamedTuple

STEPS_PER_EPOCH = 8
SETTLING = 2
"""Steps behind the last one, in which all that is owed is paid: what the first one rounds off comes with the second."""


class Task(NamedTuple):
    """What a worker is to do. `told_every`: of so many steps it tells one."""

    rank: int
    workers: int
    steps: int
    codec: str
    store: tuple[str, int]
    """Where ranks meet."""
    meeting: str
    settings: dict[str, Any]
    folder: str
    told_every: int = 1
    waits_at: int = 0
    """Behind that step it waits for an order, if there was none yet."""
    least: int = 0
    """As Setting has it."""
    behind: int = 0
    """Not 0: in place of `steps`, so many behind the one in which a home joins, of which it may be a worker."""


class Began(NamedTuple):
    """Ahead of a step, where workers may be lost in it: what it will use."""

    step: int
    epoch: int
    samples: tuple[int, ...]


class Stepped(NamedTuple):
    """After a step. `members`: those who took part in it, where that may change."""

    step: int
    digest: str
    samples: tuple[int, ...]
    at_s: float
    members: tuple[int, ...] = ()


class Finding(NamedTuple):
    """Something that is wrong with a run: of which kind, as summaries count it, and the line that says it."""

    kind: str
    line: str


class Ended(NamedTuple):
    """The last word. `peer` and `what`: of the error that ended it, if one did; `bug`: of one that is none of the network's."""

    steps: int
    at_s: float
    peer: str = ""
    what: str = ""
    bug: str = ""

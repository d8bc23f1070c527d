"""Messages between a chaos run and its workers. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

STEPS_PER_EPOCH = 8
SETTLING = 2
"""Steps after the last one that send all residuals: the second one sends what the first one rounds off."""

Elements = tuple[int, int, int]
"""Elements of a parameter: its number, and the first and the last one + 1."""


class Task(NamedTuple):
    """A worker's work. `told_every`: it reports every N-th step."""

    rank: int
    workers: int
    steps: int
    codec: str
    store: tuple[str, int]
    """Address of the store where ranks meet."""
    meeting: str
    settings: dict[str, Any]
    folder: str
    told_every: int = 1
    waits_at: int = 0
    """After this step it waits for a message, unless one has come before."""
    least: int = 0
    """See Setting.least."""
    width: int = 40
    """See Setting.width."""
    pace_s: float = 0.0
    """Pause after each step, so that training outlasts what is struck."""
    behind: int = 0
    """If not 0, training ends this many steps after a home has joined, instead of after `steps`."""


class Began(NamedTuple):
    """Sent before a step, in jobs that may lose workers: what the step will use."""

    step: int
    epoch: int
    samples: tuple[int, ...]


class Stepped(NamedTuple):
    """Sent after a step. In jobs that may lose workers, `members`: those that this worker counts then; `exits`: the last step
    in which the samples of each former member count."""

    step: int
    digest: str
    samples: tuple[int, ...]
    at_s: float
    members: tuple[int, ...] = ()
    exits: Mapping[int, int] = {}


class Summed(NamedTuple):
    """What a step of a job that may lose workers has summed: the samples of each worker that took part, in the order of their
    numbers, and whether it completed the step. Sums may lack a worker that did not. `digest`: of the weights after the step."""

    digest: str
    samples: Sequence[tuple[Sequence[int], bool]]


class Finding(NamedTuple):
    """A failed check of a run: its kind, as counted in summaries, and a line of text."""

    kind: str
    line: str


class Ended(NamedTuple):
    """A worker's last message. `peer` and `what`: of the CommError that ended it; `bug`: the traceback of any other error."""

    steps: int
    at_s: float
    peer: str = ""
    what: str = ""
    bug: str = ""

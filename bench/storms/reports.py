"""What a home of a storm trains, and what it reports. Imports no commlayer, because torchft's replicas have none."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

LOCAL, SYNC = "local steps", "sync"
LEAST = 2
"""Least number of homes with which a job goes on."""
EVERY = 20
"""Local steps per exchange."""
WIDTH, SEQUENCES, LAYERS, LR = 48, 4, 2, 1e-3
"""The task: characters of Python's handbook, by a transformer of 69 thousand parameters. A step takes 11 ms of a core."""


class Work(NamedTuple):
    """A home's training."""

    mode: str
    pace_s: float
    """Least time of a step: what is left of it after computing is slept, so that two cores carry eight homes."""


class Stepped(NamedTuple):
    """Sent after each step. `exchanges`: completed exchanges of this home."""

    step: int
    exchanges: int
    loss: float
    at_s: float
    """time.time(), as in the coordinator's events."""


class Ended(NamedTuple):
    """Sent at the end. `digest`: of the weights; "" unless training ended where the storm said. `what`: the error. `again`:
    True if the home joins again by itself, as `commlayer join` does after some errors."""

    step: int
    digest: str = ""
    what: str = ""
    again: bool = False


def line(report: Stepped | Ended) -> str:
    return json.dumps([type(report).__name__, *report])


def read_line(text: str) -> Stepped | Ended:
    """
    >>> read_line(line(Ended(3, "abc")))
    Ended(step=3, digest='abc', what='', again=False)
    """
    kind, *fields = json.loads(text)
    made: dict[str, Any] = {"Stepped": Stepped, "Ended": Ended}
    report: Stepped | Ended = made[kind](*fields)
    return report

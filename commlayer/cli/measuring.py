"""The Job of a model that a user's function makes, timed on this machine. Loads torch only to time; knows no codecs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from commlayer.cli.loading import function_of
from commlayer.records import Job

T = TypeVar("T")

def made_by(text: str) -> Callable[..., Any]:
    """The function; see cli/loading.py."""
    return function_of(text, "make", "that returns (model, loss)")


def job_of_function(text: str, batch: int | None) -> Job:
    return job_made_by(made_by(text), text, batch)


def job_made_by(make: Callable[..., Any], text: str, batch: int | None) -> Job:
    """`text` is how the user named it."""
    from torch import nn

    from commlayer.measure.model_times import timed_job

    if batch is not None and batch < 1:
        raise ValueError(f"batch of {text}: got {batch}, allowed: at least 1")
    made = _of_user(text, make)
    try:
        model, loss_of = made
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text}: expected (model, function that computes a loss): {error}") from None
    if not isinstance(model, nn.Module) or not callable(loss_of):
        raise ValueError(f"{text}: returned {type(model).__name__} and {type(loss_of).__name__}, expected a model and a "
                         "function that computes a loss")
    return _of_user(f"{text}: a step", lambda: timed_job(model, loss_of, batch=batch, name=text))


def _of_user(what: str, call: Callable[[], T]) -> T:
    """What is wrong in a user's model is one line as well: trained by itself it shows where."""
    try:
        return call()
    except Exception as error:
        raise ValueError(f"{what}: {type(error).__name__}: {error}".splitlines()[0]) from None

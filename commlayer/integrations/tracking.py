"""Logs a session's metrics to an experiment tracker: TensorBoard, W&B, Trackio, or any function that takes a flat dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commlayer.errors import InvalidInput

if TYPE_CHECKING:
    from commlayer.session import Session

Scalars = dict[str, float]


def scalars(session: Session, prefix: str = "comm/") -> Scalars:
    """Returns the session's counters as a flat dict with names as trackers expect them, such as `comm/exposed_s` and
    `comm/sent_MB`."""
    flat = {}
    for name, value in session.metrics().items():
        size = name.removesuffix("_nbytes")
        flat[prefix + (f"{size}_MB" if size != name else name)] = value / 1e6 if size != name else float(value)
    return flat


def log_to(session: Session, writer: Any, *, every: int = 10, prefix: str = "comm/") -> Callable[..., None]:
    """Returns a function to call after each step, `log(loss=...)`. Every `every` steps it logs the session's counters, and the
    keyword arguments under their own names.

    `writer`: TensorBoard's SummaryWriter; a W&B or Trackio run, or the imported module `wandb` or `trackio` after `init()`; or
    a function of (values, step). Only the rank with a writer logs metrics: pass None on the other ranks.

    >>> log = log_to(session, SummaryWriter())                                              # doctest: +SKIP
    >>> for batch in loader: ...; log(loss=loss)                                            # doctest: +SKIP
    """
    write = scalar_writer(writer)
    if every < 1:
        raise InvalidInput("E-ARGUMENT", f"every: got {every}, allowed: 1 or more steps")

    def log(**values: Any) -> None:
        if session.step % every == 0:
            write(scalars(session, prefix) | {name: float(value) for name, value in values.items()}, session.step)

    return log


def scalar_writer(writer: Any) -> Callable[[Scalars, int], None]:
    """Returns a function that writes a flat dict of one step."""
    if writer is None:
        return lambda values, step: None
    if add_scalar := getattr(writer, "add_scalar", None):  # TensorBoard

        def write(values: Scalars, step: int) -> None:
            for name, value in values.items():
                add_scalar(name, value, step)

        return write
    if log := getattr(writer, "log", None):  # W&B and Trackio
        return lambda values, step: log(values, step=step)
    if callable(writer):
        function: Callable[[Scalars, int], None] = writer
        return function
    raise InvalidInput("E-ARGUMENT", f"writer: got {type(writer).__name__}, allowed: a SummaryWriter, a run of wandb or "
                                     "trackio, a function of (values, step), or None")

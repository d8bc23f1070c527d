"""Yields a step's batches to a training loop, reports their weight to the session, and accumulates micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from commlayer.errors import InvalidInput
from commlayer.records import Plan

T = TypeVar("T")


class JobInspection(Protocol):
    """The part of session.inspect that batch assignment needs: the job's plan and members."""

    @property
    def plan(self) -> Plan | None: ...

    @property
    def members(self) -> tuple[int, ...]: ...

    @property
    def may_leave(self) -> bool: ...

    @property
    def own(self) -> int: ...

    @property
    def exchanged_steps(self) -> int: ...

    @property
    def confirmed(self) -> int: ...

    def steps_at_exit(self, member: int) -> int: ...

    def catch_up(self, *, wholly: bool = False) -> None: ...

    @property
    def followers(self) -> dict[str, Callable[[], str]]: ...

    @property
    def joined_state(self) -> dict[str, str]: ...


class TrainingSession(Protocol):
    """The part of a session that batch assignment needs."""

    @property
    def inspect(self) -> JobInspection: ...

    @property
    def step(self) -> int: ...

    def weight(self, n: float) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def flush(self) -> bool: ...

    def metrics(self) -> dict[str, float]: ...


class DrawnBatch(NamedTuple):
    """A batch of a step: all samples that a worker has in the step, or one of several micro-batches."""

    step: int
    samples: int
    """Number of samples that count in the average. 0 for a batch with which a worker without samples takes part in the step."""
    repeats: int
    """How often the batch repeats each sample in order to reach the smallest allowed batch."""
    last: bool
    computed: int
    """Number of samples in the batch, including repeats."""


class StepAssignment:
    """The step whose batches a training loop receives. The loop's body reads `fraction` and `last`."""

    def __init__(self) -> None:
        self.fraction, self.last = 1.0, True
        self.samples = self.computed = 0
        """Number of this worker's samples in the step; and number of samples that the worker computes, including repeats and
        samples of weight zero."""
        self.pending = False
        """True: the loop has received the step's last batch, and finish() was not called since."""
        self.step: int | None = None
        """Number of the step whose batches the loop receives; None before the first step."""
        self.session: TrainingSession | None = None
        self._local, self._steps_before = False, 0.0

    def run(self, batches: Sequence[tuple[Any, DrawnBatch]], session: TrainingSession | None,
            weigh: Callable[[Any], float] | None) -> Iterator[Any]:
        """Yields a step's batches; gradients are synchronized only in the last one."""
        weights = [_weight(batch, part, weigh) for batch, part in batches]
        total = sum(weights)
        self.samples = sum(part.samples for _, part in batches)
        self.computed = sum(part.computed for _, part in batches)
        if session is not None:
            session.weight(total)
        plan = None if session is None else session.inspect.plan
        self.session, self._local = session, plan is not None and plan.steps_locally
        self._steps_before = _steps(session, local=self._local)
        # A batch of weight zero must not change local weights either, since local steps pass them on to other workers.
        nothing = 0.0 if self._local else 1.0 / len(batches)
        for (batch, part), weight in zip(batches, weights, strict=True):
            self.fraction = weight / total if total else nothing
            self.last = self.pending = part.last
            with contextlib.nullcontext() if part.last or session is None else session.no_sync():
                yield batch
        self.fraction, self.last = 1.0, True

    def applied(self) -> bool:
        """Returns whether the step of the last yielded batch was averaged; with local steps, whether the optimizer step was
        taken. Assumed True without a session, or in a session of one worker."""
        if not self.pending:
            return False
        return (self.session is None or self.session.inspect.plan is None
                or _steps(self.session, local=self._local) > self._steps_before)

    def finish(self) -> None:
        """Marks the step as finished, so `applied` returns False until the next step."""
        self.pending = False


def micro_batch_sizes(samples: int, cap: int) -> list[int]:
    """Returns the sizes of the micro-batches into which `samples` are split: as few as the cap allows (0: no cap), as equal as
    possible.

    >>> micro_batch_sizes(10, 4)
    [4, 3, 3]
    """
    parts = -(-samples // cap) if cap else 1
    return [samples // parts + (i < samples % parts) for i in range(parts)]


def drawn_batches(
    step: int, own: list[T], nothing: list[T], *, least: int, cap: int
) -> Iterator[tuple[DrawnBatch, list[T]]]:
    """Splits a worker's samples of a step into batches. `own`: the samples of this worker. A worker without samples still takes
    part, with the batch `nothing` at weight zero."""
    if not own:
        yield DrawnBatch(step, 0, 1, True, len(nothing)), nothing
        return
    start, sizes = 0, micro_batch_sizes(len(own), cap)
    for i, samples in enumerate(sizes):
        # Repeat every sample equally often in a batch that is too small: this keeps the mean.
        repeats = -(-least // samples)
        part = DrawnBatch(step, samples, repeats, i == len(sizes) - 1, samples * repeats)
        yield part, own[start : start + samples] * repeats
        start += samples


def _weight(batch: Any, part: DrawnBatch, weigh: Callable[[Any], float] | None) -> float:
    if part.samples == 0:
        return 0.0
    weight = float(part.samples) if weigh is None else float(weigh(batch)) / part.repeats
    if not 0 <= weight < float("inf"):
        raise InvalidInput("E-SAMPLER-ARGUMENT",
                           f"weigh: got {weight} for a batch of step {part.step}, allowed: a finite number, 0 or more")
    return weight


def _steps(session: TrainingSession | None, *, local: bool) -> float:
    """Returns the number of averaged steps; with local steps, the number of optimizer steps."""
    if session is None:
        return 0.0
    return float(session.step if local else session.metrics().get("exchanges", 0))

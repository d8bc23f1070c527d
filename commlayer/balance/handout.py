"""Hands batches to a training loop: tells the session what each weighs, accumulates parts of a step. Knows no torch by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from commlayer.errors import InvalidInput
from commlayer.records import Plan

T = TypeVar("T")


class Planned(Protocol):
    """What it averages under."""

    @property
    def plan(self) -> Plan | None: ...

    @property
    def members(self) -> tuple[int, ...]: ...

    @property
    def may_leave(self) -> bool: ...

    @property
    def own(self) -> int: ...

    @property
    def carried(self) -> int: ...

    def parted(self, member: int) -> int: ...

    def catch_up(self, *, wholly: bool = False) -> None: ...

    @property
    def followers(self) -> dict[str, Callable[[], str]]: ...

    @property
    def given(self) -> dict[str, str]: ...


class Averaging(Protocol):
    """What is needed of a session."""

    @property
    def inspect(self) -> Planned: ...

    @property
    def step(self) -> int: ...

    def weight(self, n: float, total: float | None = None) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def drain(self) -> bool: ...

    def stats(self) -> dict[str, float]: ...


class DrawnBatch(NamedTuple):
    """A batch that was drawn: all of a worker's samples of a step, or one of several micro-batches."""

    step: int
    samples: int
    """That count: 0 for a batch that only keeps its worker in the step."""
    repeats: int
    """How often each sample is in it, so that it reaches the least size."""
    last: bool
    computed: int
    """How many samples the batch holds."""
    whole: int
    """Samples of all workers in the step."""


class Handout:
    """The step under way. `fraction` and `last` are for the loop's body."""

    def __init__(self) -> None:
        self.fraction, self.last = 1.0, True
        self.samples = self.computed = 0
        """This worker's samples in the step, and those that it computes: repeated ones, too, and those that weigh nothing."""
        self.out = False
        """Whether a step's last batch is with the loop, and the step not accounted for."""
        self.session: Averaging | None = None
        self._local, self._steps_before = False, 0.0

    def run(self, batches: Sequence[tuple[Any, DrawnBatch]], session: Averaging | None,
            weigh: Callable[[Any], float] | None, *, whole: bool = True) -> Iterator[Any]:
        """Yields a step's batches. All but the last accumulate without synchronising. `whole`: all are there whom the step was
        given out to."""
        weights = [_weight(batch, part, weigh) for batch, part in batches]
        total = sum(weights)
        self.samples = sum(part.samples for _, part in batches)
        self.computed = sum(part.computed for _, part in batches)
        if session is not None:
            # Where samples are what counts, all know the sum, and nobody need be told of a short last batch.
            session.weight(total, float(batches[0][1].whole) if weigh is None and whole else None)
        plan = None if session is None else session.inspect.plan
        self.session, self._local = session, plan is not None and plan.steps_locally
        self._steps_before = _steps(session, local=self._local)
        # What weighs nothing in an average must not move weights of this worker's own either, which others get a part of.
        nothing = 0.0 if self._local else 1.0 / len(batches)
        for (batch, part), weight in zip(batches, weights, strict=True):
            self.fraction = weight / total if total else nothing
            self.last = self.out = part.last
            with contextlib.nullcontext() if part.last or session is None else session.no_sync():
                yield batch
        self.fraction, self.last = 1.0, True

    def applied(self) -> bool:
        """Whether the step whose last batch is out has been averaged, or taken where steps are local. Without a session, and
        alone in one, that is taken for granted."""
        if not self.out:
            return False
        return (self.session is None or self.session.inspect.plan is None
                or _steps(self.session, local=self._local) > self._steps_before)

    def over(self) -> None:
        """The step is accounted for."""
        self.out = False


def split(samples: int, cap: int) -> list[int]:
    """Sizes of the micro-batches: as few as the cap allows (0: no cap), as equal as can be.

    >>> split(10, 4)
    [4, 3, 3]
    """
    parts = -(-samples // cap) if cap else 1
    return [samples // parts + (i < samples % parts) for i in range(parts)]


def drawn_batches(
    step: int, own: list[T], nothing: list[T], *, whole: int, least: int, cap: int
) -> Iterator[tuple[DrawnBatch, list[T]]]:
    """A worker's samples of a step as its batches. Where it has none the others still wait for it: `nothing` weighs nothing."""
    if not own:
        yield DrawnBatch(step, 0, 1, True, len(nothing), whole), nothing
        return
    start, sizes = 0, split(len(own), cap)
    for i, samples in enumerate(sizes):
        # Where a batch is too small each sample comes equally often: the mean stays what it is.
        repeats = -(-least // samples)
        part = DrawnBatch(step, samples, repeats, i == len(sizes) - 1, samples * repeats, whole)
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


def _steps(session: Averaging | None, *, local: bool) -> float:
    """Steps that were averaged, or under local steps, that were taken."""
    if session is None:
        return 0.0
    return float(session.step if local else session.stats().get("exchanges", 0))


class HandsOut:
    """What a loop's body asks of whoever hands it batches."""

    _handout: Handout

    @property
    def fraction(self) -> float:
        """What the loss of the batch at hand is to be multiplied by: its part of this worker's weight in the step."""
        return self._handout.fraction

    @property
    def last(self) -> bool:
        """Whether the batch at hand is this worker's last of the step, after which the optimizer steps."""
        return self._handout.last

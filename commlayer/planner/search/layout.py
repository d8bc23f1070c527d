"""Cuts a model into buckets, in the order in which they become ready."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from commlayer.planner.model import buckets
from commlayer.planner.model.default_plan import ELEMENT_NBYTES
from commlayer.planner.model.thin import full, travels
from commlayer.planner.simulation.timeline import urgent
from commlayer.records import Job, Slice, Timing

Kind = tuple[buckets.Sort, int]
"""A bucket's contents and its octave of size. Buckets of one kind begin with the same options."""


class Piece(NamedTuple):
    """A bucket, or one of the parts into which it is cut."""

    slices: tuple[Slice, ...]
    numel: int
    """Elements that are sent."""
    urgency: float


class Layout:
    """One way to cut the model. Lists are by bucket."""

    def __init__(self, job: Job, timing: Timing, limits: buckets.Limits) -> None:
        self._job, self._limits = job, limits
        groups = buckets.groups(job, limits)
        self.sizes = [sum([s.numel for s in group]) for group in groups]
        self.pieces = [Piece(group, travels(job, group), urgent(timing, group)) for group in groups]
        self.kinds: list[Kind] = [
            (buckets.sort_of(job, group), size.bit_length()) for group, size in zip(groups, self.sizes, strict=True)
        ]
        self._timing = timing
        self._cut: dict[tuple[int, tuple[int, ...]], list[Piece]] = {}
        self._turns: dict[int, Layout] = {}

    @cached_property
    def full(self) -> Layout:
        """The layout for dense gradients; this one if no gradients are sparse."""
        return self if (job := full(self._job)) is self._job else Layout(job, self._timing, self._limits)

    def in_turns(self, count: int) -> Layout:
        """A layout in which no bucket exceeds one fragment's part of the model; this one if it already complies."""
        if count not in self._turns:
            most = self._job.numel * ELEMENT_NBYTES // count
            limits = buckets.Limits(*(min(limit, most) for limit in self._limits))
            finer = self if limits == self._limits else Layout(self._job, self._timing, limits)
            self._turns[count] = self if finer.sizes == self.sizes else finer
        return self._turns[count]

    def cut(self, b: int, ends: tuple[int, ...]) -> list[Piece]:
        """The parts of bucket b that end at `ends`, and the rest."""
        if not ends:
            return [self.pieces[b]]
        if (b, ends) not in self._cut:
            cut = [buckets.between(self.pieces[b].slices, start, stop) for start, stop in pairwise((0, *ends, self.sizes[b]))]
            self._cut[b, ends] = [Piece(slices, travels(self._job, slices), urgent(self._timing, slices)) for slices in cut]
        return self._cut[b, ends]

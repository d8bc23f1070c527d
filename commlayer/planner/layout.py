"""A model cut into buckets, in the order in which they become ready. Knows no options, no prices and no cluster."""

from __future__ import annotations

from commlayer.planner import fuse
from commlayer.planner.simulate import urgent
from commlayer.records import Job, Timing

Kind = tuple[bool, int]
"""Whether it is a buffer's, and its octave of size: buckets of one kind have the same options to begin with."""


class Layout:
    """Lists are by bucket."""

    def __init__(self, job: Job, timing: Timing, limits: fuse.Limits) -> None:
        self.groups = fuse.groups(job, limits)
        self.sizes = [sum(s.numel for s in group) for group in self.groups]
        self.urgencies = [urgent(timing, group) for group in self.groups]
        self.kinds: list[Kind] = [
            (fuse.is_buffer(job, group), size.bit_length()) for group, size in zip(self.groups, self.sizes, strict=True)
        ]

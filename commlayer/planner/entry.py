"""One way to cut the model and place the servers, the options of its buckets, and the best choice. Knows no other entry."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from commlayer.planner import fuse
from commlayer.planner.costs import Prices
from commlayer.planner.critical import critical
from commlayer.planner.default import ELEMENT_NBYTES, SPREAD_NBYTES, shape_of, spread
from commlayer.planner.model import Cluster, Policy, Profile
from commlayer.planner.problem import Load, flatten
from commlayer.planner.schedule import schedule
from commlayer.planner.search import Found, Space, best_start, search
from commlayer.planner.simulate import pace, tail, urgent
from commlayer.planner.ways import DENSE, Option, Ways, free
from commlayer.records import Bucket, Job, Plan, Slice, Timing

CODES = 1e6
"""Burden of coding a bucket: more than any seconds on lanes."""
SLACK = 1e-3
"""A plan may be so much slower (as a fraction) than the best one found if it loses or codes less."""


class Inputs(NamedTuple):
    """What a plan is made from, checked."""

    job: Job
    timing: Timing
    cluster: Cluster
    profile: Profile
    policy: Policy


class Entry:
    """`useful[b]` are the options, by their numbers in `ways`, that bucket b's choice counts through."""

    def __init__(self, inputs: Inputs, ways: Ways, limits: fuse.Limits, local_steps: int = 1) -> None:
        self.inputs, self.ways, self.limits, self.local_steps = inputs, ways, limits, local_steps
        self.options, self.hosts = ways.options, ways.prices.hosts
        self.groups = fuse.groups(inputs.job, limits)
        self.sizes = [sum(s.numel for s in group) for group in self.groups]
        self.found: Found
        """The choice that emit() writes down."""
        self.useful = self._useful(self.ways)
        self.space = self._space(self.ways, self.useful)

    @cached_property
    def quick(self) -> Found:
        """The best that takes one option for every bucket to which it is open."""
        return best_start(self.space, self._starts(self.useful))

    @cached_property
    def searched(self) -> Found:
        return search(self.space, self._starts(self.useful))

    def dense(self) -> Found:
        """The best that codes nothing and takes one option for every bucket."""
        plain = [start for start, option in zip(self._starts(self.useful), self.options, strict=True) if option.codec == DENSE]
        return best_start(self.space, plain)

    def chosen(self, b: int) -> Option:
        return self.options[self.useful[b][self.found.choice[b]]]

    def bound_s(self) -> float:
        """The step if coding took no time."""
        prices = self.ways.prices
        ways = Ways(Prices(prices.cluster, free(prices.profile), prices.hosts, spread=prices.spread), self.options)
        useful = self._useful(ways)
        return search(self._space(ways, useful), self._starts(useful), width=1).step_s

    def emit(self) -> Plan:
        """The plan of the choice; buckets of servers go where least has gone so far, and so do they among a node's ranks."""
        job, cluster = self.inputs.job, self.inputs.cluster
        parts = [part for b in range(len(self.groups)) for part in self._parts(b)]
        chosen = [self.chosen(b) for b, _ in parts]
        served = [i for i, option in enumerate(chosen) if option.served]
        ranks = {node.ranks for node in cluster.nodes if node.ranks}
        per_node = ranks.pop() if len(ranks) == 1 else 1
        weights = [sum(s.numel for s in parts[i][1]) for i in served]
        server = dict(zip(served, spread(weights, max(1, len(self.hosts))), strict=True))
        owner = dict(zip(served, spread(weights, per_node), strict=True))
        buckets = tuple(
            Bucket(i, slices, option.path, option.codec, server.get(i, 0), owner.get(i, 0), shape_of(job, slices),
                   option.down, option.by_node)
            for i, ((_, slices), option) in enumerate(zip(parts, chosen, strict=True))
        )
        return Plan(job.digest(), buckets, len(self.hosts) if served else 0, per_node, self.local_steps,
                    hosts=self.hosts if served else ())

    @property
    def origins(self) -> list[int]:
        """Of each bucket that emit() makes, the one that was searched."""
        return [b for b in range(len(self.groups)) for _ in self._parts(b)]

    def _parts(self, b: int) -> list[tuple[int, tuple[Slice, ...]]]:
        """What was priced as spread over all servers is cut into as many parts, so that each has its own."""
        group, option = self.groups[b], self.chosen(b)
        parts = min(len(self.hosts), self.sizes[b] * ELEMENT_NBYTES // SPREAD_NBYTES) if option.served else 1
        if parts < 2:
            return [(b, group)]
        edges = [self.sizes[b] * i // parts for i in range(parts + 1)]
        return [(b, fuse.between(group, start, stop)) for start, stop in pairwise(edges)]

    def _useful(self, ways: Ways) -> list[list[int]]:
        """By octaves of size, so that all buckets of one octave have the same options. Dense ones always stay."""
        dense = [o for o, option in enumerate(self.options) if option.codec == DENSE]
        of: dict[tuple[bool, int], list[int]] = {}
        for kind in {self._kind(b) for b in range(len(self.groups))}:
            buffer, octave = kind
            found = [] if buffer else ways.useful(1 << (octave - 1), 1 << octave)
            of[kind] = sorted({*dense, *found})
        return [of[self._kind(b)] for b in range(len(self.groups))]

    def _kind(self, b: int) -> tuple[bool, int]:
        return fuse.is_buffer(self.inputs.job, self.groups[b]), self.sizes[b].bit_length()

    def _starts(self, useful: list[list[int]]) -> list[list[int]]:
        return [
            [mine.index(option) if option in mine else 0 for mine in useful] for option in range(len(self.options))
        ]

    def _space(self, ways: Ways, useful: list[list[int]]) -> Space:
        job, timing, _, _, policy = self.inputs
        total = sum(self.sizes)
        made = [[ways.template(o).way(size) for o in mine] for mine, size in zip(useful, self.sizes, strict=True)]
        loss = [[ways.losses[o] * size / total for o in mine] for mine, size in zip(useful, self.sizes, strict=True)]
        codes = [option.codec != DENSE for option in self.options]
        burden = [[sum(way.seconds) + CODES * codes[o] for o, way in zip(mine, each, strict=True)]
                  for mine, each in zip(useful, made, strict=True)]
        loads = [Load(each, urgent(timing, group)) for each, group in zip(made, self.groups, strict=True)]
        classes: dict[tuple[bool, int], list[int]] = {}
        for b in range(len(self.groups)):
            classes.setdefault(self._kind(b), []).append(b)
        nodes = ways.prices.groups
        problem = flatten(loads, pace(job, timing, self.groups, nodes, self.local_steps),
                          tail_s=tail(timing, nodes, self.local_steps), priority=policy.priority)
        by_size = [classes[kind] for kind in sorted(classes, key=lambda kind: -kind[1])]
        made_schedule = schedule(problem)

        def held_up(choice: Sequence[int]) -> set[int]:
            _, starts, ends = made_schedule.trace(list(choice))
            return critical(problem, choice, starts, ends)

        return Space(made_schedule, loss, burden, held_up, by_size, policy.max_loss, SLACK)

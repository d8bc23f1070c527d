"""One training scenario of the search: a sync mode, a layout of buckets, each bucket's options, and the price of a choice among
them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple, cast

from commlayer.planner import buckets
from commlayer.planner.buckets import BucketLimits, Contents, least_spread_nbytes
from commlayer.planner.convergence import Recipe
from commlayer.planner.costs import Prices, bucket_weights
from commlayer.planner.model import DENSE, Question
from commlayer.planner.search.choices import Choice, ChoiceSpace, cheapest, search, uniform
from commlayer.planner.search.options import EVENLY, Catalog
from commlayer.planner.search.placement import PlacedPart, cut_and_place
from commlayer.planner.simulation import Simulation, forward_need_s, fragments, server_prices, step_seconds, steps_locally
from commlayer.planner.tensors import all_reduce_doubles, codec_and_shape, nonzero_numel
from commlayer.records import Bucket, Job, Plan, Slice

SHARED, FINER = 4, (8, 16, 32)
"""Numbers of parts per server into which the model is cut: SHARED by default, since fewer parts could be unbalanced, and the
finer FINER, which are also tried."""
PART_S = 5e-4
"""Seconds of an exchange that an additional part must save. A part wakes a dozen threads, which costs 0.2 ms of Python at the
worker and 0.2 ms at the server, in addition to the predicted costs."""
PLACED = 0.1
"""Largest fraction by which a complete plan can be faster than the search's estimate."""
CODES = 1e6
"""Penalty for compressing a bucket, in the comparison of equally fast options: larger than any number of seconds."""

Kind = tuple[Contents, int]
"""A bucket's contents, and log2 of its size rounded up. Buckets of one kind have the same options."""


class StepTimes:
    """Predicts the step times of complete plans. Plans with the same servers share their costs."""

    def __init__(self) -> None:
        self._prices: dict[tuple[tuple[int, ...], bool], Prices] = {}

    def seconds(self, plan: Plan, question: Question) -> float:
        key = plan.hosts, plan.overlap == "round"
        if key not in self._prices:
            self._prices[key] = server_prices(plan, question)
        return step_seconds(plan, question, self._prices[key])


class PricedPiece(NamedTuple):
    """A bucket of a layout."""

    slices: tuple[Slice, ...]
    numel: int
    """Number of elements that are sent."""
    urgency: float
    kind: Kind
    weight: float
    """Weight in the whole model's convergence cost (`bucket_weights`)."""


class Layout(NamedTuple):
    """A way to cut the model into buckets."""

    job: Job
    limits: BucketLimits
    pieces: tuple[PricedPiece, ...]

    @classmethod
    def of(cls, job: Job, limits: BucketLimits, groups: Sequence[tuple[Slice, ...]], energy: Sequence[float]) -> Layout:
        pieces = []
        for group, weight in zip(groups, bucket_weights(job, groups, energy), strict=True):
            kind = buckets.classify_contents(job, group), sum(s.numel for s in group).bit_length()
            pieces.append(PricedPiece(group, nonzero_numel(job, group), forward_need_s(job.timed, group), kind, weight))
        return cls(job, limits, tuple(pieces))


class Scenario:
    """The search's input for one sync mode, one division into buckets and one set of server hosts. `useful[b]` lists the
    catalog numbers of bucket b's options; a `Choice` has one index into each of these lists."""

    def __init__(self, question: Question, times: StepTimes, catalog: Catalog, layout: Layout, recipe: Recipe) -> None:
        self.question, self.times, self.layout, self.recipe = question, times, layout, recipe
        self.catalog = catalog.hidden if recipe.overlap == "round" else catalog
        plain = Recipe(recipe.optimizer, workers=recipe.workers, numel=recipe.numel)
        self.useful = [self.catalog.useful(*piece.kind, plain) for piece in layout.pieces]
        self._placed: dict[tuple[int, ...], tuple[Plan, tuple[int, ...], float]] = {}
        """`plan`, `origins` and `price` of each PricedPlan, by the options of its choice. Without the plan's scenario, which
        would make a cycle for the garbage collector."""

    @cached_property
    def space(self) -> ChoiceSpace:
        pieces = self.layout.pieces
        loads, held_s = self.catalog.loads(self.useful, [piece.numel for piece in pieces], [piece.urgency for piece in pieces])
        excess, loss = ([[of[o] * piece.weight for o in mine] for mine, piece in zip(self.useful, pieces, strict=True)]
                        for of in self.catalog.costs(self.recipe))
        codes = [CODES * (option.codec != DENSE) for option in self.catalog.options]
        burden = [[seconds + codes[o] for o, seconds in zip(mine, of_bucket, strict=True)]
                  for mine, of_bucket in zip(self.useful, held_s, strict=True)]
        members: dict[tuple[Kind, tuple[int, ...]], list[int]] = {}
        for b, (piece, mine) in enumerate(zip(pieces, self.useful, strict=True)):
            members.setdefault((piece.kind, mine), []).append(b)
        groups = [members[key] for key in sorted(members, key=lambda key: -key[0][1])]
        parts = fragments(self.question, pieces, loads, self.catalog.prices, self.recipe)
        least_s = sum(float(each.problem.ready.reshape(each.problem.nodes, -1)[:, -1].max()) for each in parts)
        return ChoiceSpace(Simulation(parts), loss, excess, burden, groups, self.question.policy.max_loss, least_s)

    @property
    def starts(self) -> list[list[int]]:
        """Choices in which all buckets use the same option, as far as they have it."""
        places = [{option: place for place, option in enumerate(mine)} for mine in self.useful]
        tried = dict.fromkeys(option for mine in self.useful for option in mine)
        return [[of.get(option, 0) for of in places] for option in tried]

    @cached_property
    def uniform(self) -> list[Choice]:
        return uniform(self.space, self.starts)

    @cached_property
    def quick(self) -> Choice:
        """The best choice in which all buckets use the same option."""
        return cheapest(self.uniform)

    @cached_property
    def dense(self) -> Choice:
        """The best choice without compression in which all buckets use the same option."""
        options = self.catalog.options
        plain = [choice for choice in self.uniform if all(
            options[mine[place]].codec == DENSE for mine, place in zip(self.useful, choice.options, strict=True))]
        return cheapest(plain or self.uniform[:1])

    def price(self, choice: Choice) -> float:
        """Step time in seconds times the convergence factor, as the search estimates them for a choice."""
        return choice.price / self.recipe.every

    def least_price(self, choice: Choice) -> float:
        """A lower limit of the price of the complete plan for a choice."""
        placed = 1.0 if self.exact else 1 - PLACED
        return self.price(choice) * placed * (EVENLY if self.recipe.overlap == "round" else 1.0)

    @property
    def exact(self) -> bool:
        """True: the search's estimates are exact, because nothing is placed on servers and no similar nodes
        were merged."""
        return not self.catalog.prices.hosts and self.catalog.prices.cluster == self.question.cluster

    @cached_property
    def best(self) -> Choice:
        return search(self.space, self.uniform)

    def place(self, choice: Choice) -> PricedPlan:
        """Converts a choice (one option per bucket) to a complete plan, simulated with each part on its own server. Buckets are
        cut more finely if that saves enough time."""
        if choice.options not in self._placed:
            every, parts = self.recipe.every, self._parts(choice, SHARED)
            plan = self._plan(parts)
            step_s = self.times.seconds(plan, self.question)
            for finely in FINER if plan.servers else ():
                if (step_s - PART_S / every) * every <= choice.step_s:
                    break  # even the search's lower bound would not save enough for one more part
                other = self._parts(choice, finely)
                most_s = step_s - PART_S * (len(other) - len(parts)) / every
                if len(other) > len(parts) and most_s * every > choice.step_s:
                    other_s = self.times.seconds(finer := self._plan(other), self.question)
                    if other_s < most_s:
                        parts, plan, step_s = other, finer, other_s
            self._placed[choice.options] = plan, tuple(part.origin for part in parts), step_s * (1 + choice.excess)
        return PricedPlan(self, choice, *self._placed[choice.options], choice.excess)

    def _parts(self, choice: Choice, finely: int) -> list[PlacedPart]:
        chosen = [mine[place] for mine, place in zip(self.useful, choice.options, strict=True)]
        return cut_and_place(
            self.layout.job, [piece.slices for piece in self.layout.pieces], chosen, self.catalog, finely,
            fragments=self.recipe.fragments, ranks_per_node=self.question.cluster.ranks_per_node,
            last_first=not steps_locally(self.recipe),
            least_nbytes=least_spread_nbytes(fine=self.recipe.fragments > 1 or finely > SHARED))

    def _plan(self, parts: Sequence[PlacedPart]) -> Plan:
        job, ranks_per_node, result = self.question.job, self.question.cluster.ranks_per_node, []
        for i, part in enumerate(parts):
            o = self.catalog.options[part.option]
            codec, shape = codec_and_shape(o.codec, job, part.slices)
            result.append(Bucket(i, part.slices, o.path, codec, part.server, part.owner, shape, o.down, o.by_node))
        hosts = self.catalog.prices.hosts if any(bucket.served for bucket in result) else ()
        return all_reduce_doubles(Plan(
            job.digest(), tuple(result), len(hosts), ranks_per_node, self.recipe.every,
            "updates" if steps_locally(self.recipe) else "gradients",
            cast(Literal["", "round", "forward"], self.recipe.overlap), self.recipe.fragments, hosts=hosts), job)


class PricedPlan(NamedTuple):
    """A complete plan with the search's scenario and choice, its price (step seconds times convergence factor), and its
    convergence factor minus 1."""

    scenario: Scenario
    choice: Choice
    plan: Plan
    origins: tuple[int, ...]
    """For each bucket of the plan, the index of the search's bucket from which it was cut."""
    price: float
    excess: float

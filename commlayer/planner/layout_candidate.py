"""One layout with one set of servers: its buckets' options, and the search for the best choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, cast

from commlayer.planner.buckets import Sort, fragments_of
from commlayer.planner.choices import WORTH, ChoiceFound, Space, best, finest, priced, repriced, search
from commlayer.planner.convergence import Recipe
from commlayer.planner.costs import Prices, weights
from commlayer.planner.model import DENSE, Cluster, Option, Policy, Profile
from commlayer.planner.option_prices import SHARED, CandidatePart, Kind, Layout, OptionPrices, Piece, Ways, free
from commlayer.planner.problem import Load
from commlayer.planner.simulation import Round, behind_s, locally, pace, tail, turns_of
from commlayer.planner.tensors import EXACT, keeps_zeros, shaped, unrounded
from commlayer.records import Bucket, Job, Plan, Timing

Overlap = Literal["", "round", "forward"]

CODES = 1e6
"""Burden of coding a bucket: more than any seconds on lanes."""
SLACK = 1e-3
"""Fraction by which a plan may be slower than the best one found, if it loses or codes less."""
FINEST = 0.03
"""The same for seconds to a loss, which are less certain. Hidden transfers are free, so nothing is compressed more than a
link requires."""

REFINED, WIDENED = 3, 24
"""Rounds of refinement, and buckets in each."""


class SearchInputs(NamedTuple):
    job: Job
    timing: Timing
    cluster: Cluster
    profile: Profile
    policy: Policy


FINER = (2 * SHARED, 4 * SHARED)
"""Finer cuts that are tried before a part of every bucket for every server."""
PARTS_WORTH = 0.12
"""Each doubling of the number of parts must shorten a step by this fraction. A part wakes a dozen threads here and at its
server, which costs more than its price on busy processors. Four hosts on two cores took 3 to 12 % longer with 37 parts
than with 25, where 3 % less was predicted."""
NEARLY = 0.01
"""If a plan is longer than the searched choice by at most this fraction, its buckets need no finer cut."""
MOST_PARTS = 1024
"""Above this number, not every bucket is cut for every server: simulating them takes seconds, and small parts have fixed
costs."""


class Written(NamedTuple):
    """The placed parts of a choice."""

    seconds: float
    parts: list[CandidatePart]


class LayoutCandidate:
    """`useful[b]` lists the options of bucket b by their numbers in `ways`; choices are indexes into it."""

    def __init__(
        self, inputs: SearchInputs, ways: Ways, layout: Layout, recipe: Recipe | None = None,
        useful: list[list[int]] | None = None, prices: OptionPrices | None = None,
    ) -> None:
        self.inputs, self.ways, self.layout, self.recipe = inputs, ways, layout, recipe or ways.recipe
        self.local_steps = self.recipe.every
        self.options, self.hosts = ways.options, ways.prices.hosts
        self.useful = self._useful(ways) if useful is None else useful
        self._prices = prices or OptionPrices(ways, layout, self.useful)
        self._written: dict[tuple[int, ...], Written] = {}

    def otherwise(self, recipe: Recipe) -> LayoutCandidate:
        """The same candidate with another recipe."""
        return LayoutCandidate(self.inputs, self.ways, self.layout, recipe, self.useful, self._prices)

    @cached_property
    def space(self) -> Space:
        return self._space(self.ways, self.useful, self._prices)

    @property
    def fitted(self) -> bool:
        """Whether its servers sum unequal parts, in proportion to their links."""
        return len(set(self.ways.prices.spread)) > 1

    @property
    def kept_budget(self) -> bool:
        """Whether any choice keeps the loss budget."""
        return sum(map(min, self._by_choice(self.ways.under(self.recipe)[1], self.useful))) <= self.inputs.policy.max_loss

    @cached_property
    def uniform(self) -> list[ChoiceFound]:
        """Choices that use one option for every bucket that has it, and the choice with the least loss."""
        return priced(self.space, self._starts(self.useful))

    @cached_property
    def quick(self) -> ChoiceFound:
        """The best of the uniform choices."""
        return best(self.uniform)

    @cached_property
    def searched(self) -> ChoiceFound:
        return search(self.space._replace(least_s=self.least_s), states=self.uniform)

    @cached_property
    def dense(self) -> ChoiceFound:
        """The best uniform choice without compression."""
        return best([choice for choice in self.uniform if not self.uses(choice, lambda o: o.codec != DENSE)]
                    or self.uniform[:1])

    def uses(self, found: ChoiceFound, such: Callable[[Option], bool]) -> bool:
        """Whether any bucket's option satisfies the predicate."""
        return any(such(self.options[option]) for option in {*self.sent(found)})

    def refined(self, found: ChoiceFound) -> tuple[LayoutCandidate, ChoiceFound]:
        """Adds all unbeaten options for the largest critical buckets, as long as that shortens the step."""
        entry = self
        for _ in range(REFINED):
            if found.price * (1 - WORTH) <= entry.least_price:
                break
            held = [b for b in entry.space.critical(found.choice) if not self.layout.kinds[b][0]]
            useful = list(entry.useful)
            for b in sorted(held, key=lambda b: (-self.layout.sizes[b], b))[:WIDENED]:
                octave = self.layout.kinds[b][1]
                useful[b] = sorted({*useful[b], *self.ways.unbeaten(1 << (octave - 1), 1 << octave)})
            wider = LayoutCandidate(self.inputs, self.ways, self.layout, self.recipe, useful)
            choice = [new.index(old[place]) for new, old, place in zip(useful, entry.useful, found.choice, strict=True)]
            other = search(wider.space._replace(least_s=wider.least_s), [choice], width=1, thorough=False)
            if other.price > found.price * (1 - WORTH):
                break
            entry, found = wider, other
        return entry, found

    def finest(self, found: ChoiceFound) -> ChoiceFound:
        """The choice made as fine as possible at nearly the same price, also after placement. It is judged with reduced
        links, since finer options rely on hidden transfers."""
        if not self.ways.steps_count:
            return found
        leaning = (self if self.recipe.overlap == "round" else self.hidden).space
        finer = repriced(self.space, finest(leaning._replace(slack=FINEST), repriced(leaning, found)))
        return finer if self.exact(finer) <= self.exact(found) * (1 + FINEST) else found

    @cached_property
    def hidden(self) -> LayoutCandidate:
        """The candidate with links reduced to what hidden transfers can rely on."""
        hidden = self._prices.hidden
        return LayoutCandidate(self.inputs, hidden.ways, self.layout, self.recipe, self.useful, hidden)

    def sent(self, found: ChoiceFound) -> tuple[int, ...]:
        """By bucket, the number of its option in `ways`."""
        return tuple([mine[place] for mine, place in zip(self.useful, found.choice, strict=True)])

    def free_s(self) -> float:
        """Step time if coding took no time, by a narrow search; not a lower bound for other plans."""
        prices = self.ways.prices
        ways = self.ways.at(Prices(prices.cluster, free(prices.profile), prices.hosts, spread=prices.spread))
        useful = self._useful(ways)
        return search(self._space(ways, useful, OptionPrices(ways, self.layout, useful)), self._starts(useful), width=1).step_s

    def exact_s(self, found: ChoiceFound) -> float:
        """Seconds of one step of the plan that emit() would write. The search itself assumes buckets spread over all
        servers."""
        return self._as_written(found).seconds

    def exact(self, found: ChoiceFound) -> float:
        """Seconds per step of dense training, of the plan that emit() would write."""
        return self.exact_s(found) * (1 + found.excess)

    def parts(self, found: ChoiceFound) -> list[CandidatePart]:
        return self._as_written(found).parts

    def _as_written(self, found: ChoiceFound) -> Written:
        """Cuts buckets into as few parts as give every server an even share, since each part has fixed costs.

        Cuts them into one part per server if that is faster: transfers and sums of the parts run in parallel."""
        if found.choice not in self._written:
            best = self._cut(found, SHARED)
            if self.uses(found, lambda o: o.served) and best.seconds > found.step_s / self.local_steps * (1 + NEARLY):
                tried = {len(best.parts)}
                for finely in (*FINER, self._finest):
                    parts = self._prices.parts(self.sent(found), finely, self.recipe.fragments)
                    if len(parts) in tried:  # the same parts as before
                        continue
                    tried.add(len(parts))
                    enough_s = best.seconds * (1 - PARTS_WORTH * math.log2(len(parts) / len(best.parts)))
                    # Coding costs per part usually show already that fewer parts are better.
                    if len(parts) > len(best.parts) and self._coded_s(parts) / self.local_steps < enough_s:
                        finer = self._cut(found, finely)
                        best = finer if finer.seconds < enough_s else best
            self._written[found.choice] = best
        return self._written[found.choice]

    @property
    def _finest(self) -> int:
        """Cut every bucket for every server, unless that gives too many parts."""
        few = len(self.layout.sizes) * len(self.hosts) <= MOST_PARTS
        return max(self.layout.sizes) if few else max(SHARED, MOST_PARTS // len(self.hosts))

    def _coded_s(self, parts: Sequence[CandidatePart]) -> float:
        """Lower bound of a step: its forward pass, and all coding on the busiest coder."""
        busy: dict[str, float] = {}
        of: dict[int, list[int]] = {}
        for part in parts:
            of.setdefault(part.option, []).append(part.piece.numel)
        for option, numels in of.items():
            for lane, (floor_s, slope_s) in self.ways.template(option).coding:
                busy[lane] = busy.get(lane, 0.0) + floor_s * len(numels) + slope_s * sum(numels)
        fastest = max(group.node.speed for group in self.ways.prices.groups)
        return self.inputs.timing.forward_s / fastest + max(busy.values(), default=0.0)

    def _cut(self, found: ChoiceFound, finely: int) -> Written:
        placed, parts = self.ways.placed, self._prices.parts(self.sent(found), finely, self.recipe.fragments)
        if not self.uses(found, lambda o: o.served) or (placed is self.ways and self._prices.per_node == 1):
            return Written(found.step_s / self.local_steps, parts)
        loads = self._prices.placed(self.sent(found), finely, self.recipe.fragments)
        written = self._round(placed, loads, [part.piece for part in parts])
        return Written(written.schedule.run([0] * len(parts)) / self.local_steps, parts)

    def emit(self, found: ChoiceFound) -> Plan:
        job, parts = self.inputs.job, self.parts(found)
        buckets = []
        for i, part in enumerate(parts):
            option = self.options[part.option]
            codec, shape = shaped(option.codec, job, part.piece.slices)
            buckets.append(Bucket(i, part.piece.slices, option.path, codec, part.server, part.owner, shape, option.down,
                                  option.by_node))
        served = any(self.options[part.option].served for part in parts)
        plan = Plan(job.digest(), tuple(buckets), len(self.hosts) if served else 0, self._prices.per_node, self.local_steps,
                    "updates" if locally(self.recipe) else "gradients", cast(Overlap, self.recipe.overlap),
                    self.recipe.fragments, hosts=self.hosts if served else ())
        return unrounded(plan, job)

    def _useful(self, ways: Ways) -> list[list[int]]:
        """Options by kind of bucket. Dense ones always stay, unless the bucket's sort requires others."""
        dense = [o for o, option in enumerate(self.options) if option.codec == DENSE]
        of: dict[Kind, list[int]] = {}
        for kind in set(self.layout.kinds):
            sort, octave = kind
            useful_ways = [] if sort else ways.useful(1 << (octave - 1), 1 << octave)
            only = {Sort.DOUBLES: [o for o in dense if self.options[o].path == EXACT],
                    Sort.THIN: [o for o, option in enumerate(self.options) if keeps_zeros(option)]}.get(sort, [])
            of[kind] = only or sorted({*dense, *useful_ways})
        return [of[kind] for kind in self.layout.kinds]

    def _classes(self, useful: list[list[int]]) -> list[Sequence[int]]:
        """Buckets of one kind with the same options, largest first."""
        members: dict[tuple[Kind, tuple[int, ...]], list[int]] = {}
        for b, (kind, mine) in enumerate(zip(self.layout.kinds, useful, strict=True)):
            members.setdefault((kind, tuple(mine)), []).append(b)
        return [members[key] for key in sorted(members, key=lambda key: -key[0][1])]

    def _starts(self, useful: list[list[int]]) -> list[list[int]]:
        places = [{option: place for place, option in enumerate(mine)} for mine in useful]
        return [[of.get(option, 0) for of in places] for option in range(len(self.options))]

    def _space(self, ways: Ways, useful: list[list[int]], prices: OptionPrices) -> Space:
        loads, held_s = prices.loads
        excess, loss = (self._by_choice(of, useful) for of in ways.under(self.recipe))
        codes = [CODES * (option.codec != DENSE) for option in self.options]
        burden = [[seconds + codes[o] for o, seconds in zip(mine, each, strict=True)]
                  for mine, each in zip(useful, held_s, strict=True)]
        turns = self._round(ways, loads, self.layout.pieces)
        return Space(turns.schedule, loss, burden, turns.critical, self._classes(useful), self.inputs.policy.max_loss, SLACK,
                     excess=excess if ways.steps_count else None)

    def _by_choice(self, of: Sequence[float], useful: list[list[int]]) -> list[list[float]]:
        """By bucket and index in its choice: the bucket's part of an option's value for the whole model."""
        return [[of[o] * part for o in mine] for mine, part in zip(useful, self._counts, strict=True)]

    @cached_property
    def least_price(self) -> float:
        """Known lower bound for the price of any choice."""
        extra, _ = self.ways.under(self.recipe)
        return self.least_s * (1 + sum([min([extra[o] for o in mine]) * part
                                        for mine, part in zip(self.useful, self._counts, strict=True)]))

    @cached_property
    def least_s(self) -> float:
        """Lower bound: no bucket is done earlier than alone from the time the first node has it, and no step or turn
        before its computing."""
        return sum(self._least_s(places) for places in fragments_of(self.layout.pieces, self.recipe.fragments))

    def _least_s(self, places: Sequence[int]) -> float:
        """The lower bound for one turn."""
        pieces, nodes, timing = [self.layout.pieces[b] for b in places], self.ways.prices.groups, self.inputs.timing
        paces = pace(self.inputs.job, timing, [piece.slices for piece in pieces], nodes, self.recipe)
        behind = behind_s(timing, [piece.urgency for piece in pieces], nodes, self.recipe) or [0.0] * len(pieces)
        alone = [self._prices.alone_s[b] for b in places]
        ends = [min(each.ready_s[i] for each in paces) + alone[i] + behind[i] for i in range(len(pieces))]
        return max([*ends, *[each.work_s for each in paces]]) + tail(timing, nodes, self.recipe)

    @cached_property
    def _counts(self) -> list[float]:
        """Weight of each bucket's codec."""
        return weights(self.inputs.job, [piece.slices for piece in self.layout.pieces], self.inputs.profile.energy)

    def _round(self, ways: Ways, loads: Sequence[Load], pieces: Sequence[Piece]) -> Round:
        job, timing, _, _, policy = self.inputs
        return Round(turns_of(job, timing, pieces, loads, ways.prices.groups, self.recipe, priority=policy.priority))

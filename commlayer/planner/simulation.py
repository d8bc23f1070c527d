"""The verb `simulate`: a plan's step as a timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from commlayer.errors import InvalidInput
from commlayer.native import core
from commlayer.planner import buckets
from commlayer.planner.buckets import Cut, fragments_of
from commlayer.planner.convergence import Recipe
from commlayer.planner.costs import Prices, Template, hidden, recipe_of
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.model import Cluster, Group, Policy, Profile
from commlayer.planner.problem import Load, Pace, Problem, flatten, load_of
from commlayer.planner.tensors import sent_numel
from commlayer.records import Bucket, Job, Plan, Record, Slice, Timing


class Span(Record, frozen=True):
    """One task of one bucket in the simulated step; seconds from the step's start, which is the start of its forward pass."""

    bucket: int
    op: str
    lanes: tuple[str, ...]
    start_s: float
    end_s: float
    nbytes: int = 0


class Timeline(Record, frozen=True):
    step_s: float
    """From one forward pass to the next."""
    compute_s: float
    """Compute time of the slowest node: the duration of a step without communication."""
    ready_s: tuple[float, ...]
    """By bucket: when the slowest node's gradient is final, if nothing delays backward."""
    done_s: tuple[float, ...]
    """By bucket: when its last task ends. A stale bucket may end after the step."""
    spans: tuple[Span, ...]

    @property
    def exposed_s(self) -> float:
        """Time that communication and coding add to computing."""
        return self.step_s - self.compute_s


def simulate(
    plan: Plan, job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None, *,
    prices: Prices | None = None, spans: bool = True,
) -> Timeline:
    """The timeline of one step. With local steps: of the exchange after `local_steps` of them, or alongside them with
    overlap="round". With fragments: of all fragments of a round in sequence.

    `prices`: of the cluster with the plan's servers, if the caller has them. Without `spans` it has only times by bucket.
    """
    turns, templates, before_s = _lay_out(plan, job, cluster, profile, policy, prices)
    step_s = compute_s = 0.0
    ready = [before_s] * len(templates)
    done = list(ready)
    all_spans = []
    for places, problem, paces in turns:
        turn_s, starts, ends = schedule(problem).trace([0] * len(places))
        total = len(starts) // problem.steps
        at, begun = 0, 0.0
        if problem.steps > 1:
            # If steps overlap, the second step is the first one that shares lanes with another step's transfers; its own
            # transfers are followed to their end.
            at, begun = total, schedule(problem._replace(steps=1)).run([0] * len(places))
        begun -= before_s + step_s
        times = iter(zip(starts[at:], ends[at:], strict=True))
        for place in problem.order:
            b = places[place]
            option = problem.bucket_options[place]
            tasks = problem.option_tasks[option + 1] - problem.option_tasks[option]
            each = [(start_s - begun, end_s - begun) for start_s, end_s in islice(times, tasks)][: len(templates[b].steps)]
            ready[b] += max(p.ready_s[place] for p in paces) + step_s
            done[b] = max([ready[b], *[end_s for _, end_s in each]])
            all_spans += _spans(b, templates[b], sent_numel(plan, plan.buckets[b], job), each) if spans else []
        step_s += turn_s
        compute_s += max(p.work_s for p in paces) + problem.tail
    return Timeline(step_s, compute_s, tuple(ready), tuple(done), tuple(all_spans))


def _spans(b: int, template: Template, numel: int, times: Sequence[tuple[float, float]]) -> list[Span]:
    return [
        Span(b, step.op, lanes, start_s, end_s, nbytes) for step, lanes, nbytes, (start_s, end_s)
        in zip(template.steps, template.shape.lanes, template.sent(numel), times, strict=True)
    ]


def exact_s(
    plan: Plan, job: Job, cluster: Cluster, profile: Profile, policy: Policy, prices: Prices | None = None,
) -> float:
    """Seconds of one step, without the timeline. The cost of an exchange is divided among the steps that share it."""
    turns, templates, _ = _lay_out(plan, job, cluster, profile, policy, prices)
    return Round(turns).schedule.run([0] * len(templates)) / plan.local_steps


def _lay_out(
    plan: Plan, job: Job, cluster: Cluster, profile: Profile | None, policy: Policy | None, prices: Prices | None = None,
) -> tuple[list[Turn], list[Template], float]:
    """Also returns the duration of the forward pass before the problem begins."""
    profile, policy, timing = checked_inputs(job, cluster, profile, policy)
    prices = prices or Prices(hidden(cluster) if plan.overlap == "round" else cluster, profile, hosts_of(plan, cluster))
    templates = [bucket_template(prices, bucket) for bucket in plan.buckets]
    recipe = recipe_of(plan, cluster, policy)
    loads = [
        load_of([each.way(sent_numel(plan, bucket, job))], urgent(timing, bucket.slices), bucket.stale)
        for each, bucket in zip(templates, plan.buckets, strict=True)
    ]
    turns = turns_of(job, timing, plan.buckets, loads, prices.groups, recipe, priority=policy.priority)
    return turns, templates, begun_s(timing, prices.groups, recipe)


def per_step(timeline: Timeline, local_steps: int) -> float:
    """Seconds of one step if `local_steps` of them share an exchange."""
    return timeline.step_s / local_steps


def hosts_of(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """The nodes that run the plan's servers: those that it names, else the first that can."""
    able = tuple(i for i, node in enumerate(cluster.nodes) if node.server)
    if plan.hosts:
        return plan.hosts
    if plan.servers > len(able):
        raise InvalidInput("E-PLAN-INPUT",
                           f"the plan has {plan.servers} servers, but only {len(able)} nodes of the cluster can host one")
    return able[: plan.servers]


def bucket_template(prices: Prices, bucket: Bucket) -> Template:
    """Prices a bucket's path; errors name the bucket."""
    try:
        return prices.template(bucket.path, bucket.codec, bucket.server, bucket.owner, bucket.down, bucket.by_node)
    except ValueError as error:
        raise InvalidInput("E-PLAN-INPUT", f"bucket {bucket.id}: {error}") from None


def urgent(timing: Timing, slices: Sequence[Slice]) -> float:
    """When the next forward pass first needs a tensor of the bucket."""
    return min(timing.needed_s[s.tensor] for s in slices)


def pace(
    job: Job, timing: Timing, groups: Sequence[tuple[Slice, ...]], nodes: Sequence[Group], recipe: Recipe = Recipe(),
) -> tuple[Pace, ...]:
    """When each kind of node has each bucket's gradient (or weight update), and when it finishes computing. `groups`: the
    buckets of one exchange, or of one fragment."""
    step_s = timing.forward_s + timing.backward_s + timing.update_s
    if recipe.overlap == "round":
        ready, work_s = [0.0] * len(groups), recipe.every // recipe.fragments * step_s
    elif recipe.overlap == "forward":
        ready, work_s = [buckets.readiness(job, slices) for slices in groups], step_s
    elif locally(recipe):
        work_s = recipe.every // recipe.fragments * step_s
        ready = [work_s] * len(groups)
    else:
        work_s = timing.forward_s + timing.backward_s
        ready = [timing.forward_s + buckets.readiness(job, slices) for slices in groups]
    return tuple(
        Pace(group.name, tuple(at / group.node.speed for at in ready), work_s / group.node.speed)
        for group in nodes if group.workers
    )


def locally(recipe: Recipe) -> bool:
    """Whether each rank steps on its own gradients."""
    return recipe.every > 1 or recipe.codes == "updates"


def tail(timing: Timing, nodes: Sequence[Group], recipe: Recipe = Recipe()) -> float:
    """The optimizer's step on the slowest node, if it waits for all results."""
    return 0.0 if locally(recipe) or recipe.overlap else timing.update_s / _slowest(nodes)


def begun_s(timing: Timing, nodes: Sequence[Group], recipe: Recipe) -> float:
    """Duration of the forward pass that precedes the times of pace()."""
    return timing.forward_s / _slowest(nodes) if recipe.overlap == "forward" else 0.0


def behind_s(timing: Timing, urgencies: Sequence[float], nodes: Sequence[Group], recipe: Recipe) -> list[float]:
    """By bucket: what the slowest node still computes after it has the result, until the end of the period."""
    if recipe.overlap != "forward":
        return []
    return [(timing.forward_s - needed_s) / _slowest(nodes) for needed_s in urgencies]


def awaited(loads: Sequence[Load], behind: Sequence[float]) -> list[Load]:
    """Adds a task on no lane to each bucket's end, of this many seconds."""
    delayed = []
    for load, seconds in zip(loads, behind, strict=True):
        latency: list[float] = []
        at = 0
        for shape in load.shapes:
            latency += [*load.latency[at : at + len(shape.after)], seconds]
            at += len(shape.after)
        delayed.append(load._replace(shapes=tuple([shape.awaited for shape in load.shapes]), latency=latency))
    return delayed


def _slowest(nodes: Sequence[Group]) -> float:
    return min(group.node.speed for group in nodes if group.workers)


class Turn(NamedTuple):
    places: list[int]
    """Its buckets, which the problem numbers from 0."""
    problem: Problem
    paces: tuple[Pace, ...]


def turns_of(
    job: Job, timing: Timing, buckets: Sequence[Cut], loads: Sequence[Load], nodes: Sequence[Group], recipe: Recipe, *,
    priority: bool,
) -> list[Turn]:
    """The turns of a round. ValueError if there are too few buckets for the fragments."""
    turns = []
    if behind := behind_s(timing, [load.urgency for load in loads], nodes, recipe):
        loads = awaited(loads, behind)
    for places in fragments_of(buckets, recipe.fragments):
        paces = pace(job, timing, [buckets[b].slices for b in places], nodes, recipe)
        problem = flatten([loads[b] for b in places], paces, tail_s=tail(timing, nodes, recipe), priority=priority)
        turns.append(Turn(places, problem, paces))
    return turns


class Round:
    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._each = [schedule(turn.problem) for turn in turns]
        self.schedule: Timed = self._each[0] if len(turns) == 1 else self
        self._at = {b: (number, place) for number, turn in enumerate(turns) for place, b in enumerate(turn.places)}
        self._last: list[tuple[list[int], float]] = [([], math.nan)] * len(turns)
        """For each turn, the choice that was simulated last and its seconds."""

    def run(self, choice: list[int], limit: float = math.inf) -> float:
        seconds = 0.0
        for number in range(len(self._turns)):
            seconds += self._turn_s(number, choice, limit - seconds)
            if seconds > limit:
                return math.inf
        return seconds

    def sweep(
        self, choice: list[int], buckets: list[int], limit: float, now_s: float = math.nan, most: int = 0,
        only: list[int] | None = None, enough: float = -math.inf, factors: list[float] | None = None,
    ) -> list[float]:
        """`most` and `enough` apply to the round, so each turn is swept completely."""
        del now_s, most, enough
        changed: dict[int, list[int]] = {}
        for b in buckets:
            number, place = self._at[b]
            changed.setdefault(number, []).append(place)
        rest = sum(self._turn_s(number, choice) for number in range(len(self._turns)) if number not in changed)
        left = limit / min(factors or [1.0]) - rest
        swept = [self._each[number].sweep([choice[b] for b in self._turns[number].places], places, left, math.nan, 0, only)
                 for number, places in changed.items()]
        return [rest + sum(each) for each in zip(*swept, strict=True)]

    def _turn_s(self, number: int, choice: Sequence[int], limit: float = math.inf) -> float:
        mine = [choice[b] for b in self._turns[number].places]
        before, seconds = self._last[number]
        if before != mine:
            seconds = self._each[number].run(mine, limit)
            if seconds < math.inf:
                self._last[number] = mine, seconds
        return seconds


class Timed(Protocol):
    """Seconds of a step for a choice, which is one option number per bucket."""

    def run(self, choice: list[int], limit: float = math.inf) -> float:
        """Infinity if certainly above `limit`."""

    def sweep(
        self, choice: list[int], buckets: list[int], limit: float, now_s: float = math.nan, most: int = 0,
        only: list[int] | None = None, enough: float = -math.inf, factors: list[float] | None = None,
    ) -> list[float]:
        """Seconds with each option set for all of `buckets`, which have equally many options; infinity if above `limit`.

        `factors`, by option: seconds are multiplied by them before any comparison. `now_s`: seconds of the present choice, if
        known. `most`, up to 8: only this many of the shortest are needed; others may be infinity. `only`: options to try;
        others are infinity. `enough`: the sweep may stop at a step this short.
        """


class Schedule(Timed, Protocol):
    """The simulation of one exchange."""

    def trace(self, choice: list[int]) -> tuple[float, list[float], list[float]]:
        """Also the start and end of each task, by step, then by task in the order of buckets."""


def schedule(problem: Problem) -> Schedule:
    if core is None:
        raise InvalidInput("E-PACKAGE", "planning needs the native core, which is not installed: install a C++ compiler and "
                           "reinstall commlayer")
    native: Schedule = core.Schedule(problem)
    return native

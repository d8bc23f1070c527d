"""Implements `simulate`: computes a plan's step as a timeline, with the event loop of the native core."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from commlayer.errors import InvalidInput
from commlayer.native import core
from commlayer.planner import buckets
from commlayer.planner.buckets import CutBucket, divide_into_fragments
from commlayer.planner.convergence import Recipe
from commlayer.planner.costs import Prices, overlapped_cluster
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.model import Cluster, Policy, Profile, Question
from commlayer.planner.problem import Load, Problem, Template, add_final_delays
from commlayer.planner.tensors import sent_numel
from commlayer.records import Bucket, Job, Plan, Record, Slice, Timing

if TYPE_CHECKING:
    from commlayer import _core


class Span(Record, frozen=True):
    """A task of one bucket in the simulated step. Times are in seconds from the start of the step's forward pass."""

    bucket: int
    op: str
    lanes: tuple[str, ...]
    start_s: float
    end_s: float
    nbytes: int = 0


class Timeline(Record, frozen=True):
    step_s: float
    """Seconds from the start of one forward pass to the start of the next."""
    compute_s: float
    """Compute time of the slowest node: the duration of a step without communication."""
    ready_s: tuple[float, ...]
    """Seconds until the slowest node's gradient is final, for each bucket, if nothing delays backward."""
    done_s: tuple[float, ...]
    """Seconds until each bucket's last task ends. A stale bucket may end after the step."""
    spans: tuple[Span, ...]

    @property
    def exposed_s(self) -> float:
        """Seconds that communication and compression add to computing."""
        return self.step_s - self.compute_s


def simulate(
    plan: Plan, job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None, *,
    prices: Prices | None = None, spans: bool = True,
) -> Timeline:
    """Simulates one step. With local steps: `local_steps` steps and the exchange after them, or during them with
    overlap="round". With fragments: all fragments of an outer step in sequence.

    `prices`: costs for the cluster with the plan's servers, if the caller has them. `spans` False: the timeline has only times
    by bucket.
    """
    setup = _set_up(plan, checked_inputs(job, cluster, profile, policy), prices)
    step_s = compute_s = 0.0
    ready, done = [setup.before_s] * len(plan.buckets), [setup.before_s] * len(plan.buckets)
    all_spans: list[Span] = []
    for places, problem in setup.fragments:
        fragment_s, starts, ends = native_schedule(problem).trace([0] * len(places))
        at, begun = 0, 0.0
        if problem.steps > 1:
            # If steps overlap, the second step is the first that shares links with another step's transfers. The timeline shows
            # its transfers to their end.
            at, begun = len(starts) // problem.steps, native_schedule(problem._replace(steps=1)).run([0] * len(places))
        begun -= setup.before_s + step_s
        first_s, last_s = np.array(starts[at:]) - begun, np.array(ends[at:]) - begun
        slowest = problem.ready.reshape(problem.nodes, -1).max(axis=0)
        at = 0
        for place in problem.order.tolist():
            b = places[place]
            tasks = setup.templates[b].tasks
            ready[b] += float(slowest[place]) + step_s
            done[b] = max(ready[b], float(last_s[at : at + len(tasks)].max(initial=-math.inf)))
            if spans:
                numel = sent_numel(plan, plan.buckets[b], job)
                all_spans += [
                    Span(b, task.op, tuple([lane for lane, _ in task.lanes]), float(first_s[at + i]), float(last_s[at + i]),
                         int(task.nbytes(numel) + 0.5)) for i, task in enumerate(tasks)]
            at += int(problem.option_tasks[place + 1] - problem.option_tasks[place])  # overlap="forward" adds a task
        step_s += fragment_s
        compute_s += float(slowest[-1]) + problem.tail
    return Timeline(step_s, compute_s, tuple(ready), tuple(done), tuple(all_spans))


def step_seconds(plan: Plan, question: Question, prices: Prices | None = None) -> float:
    """Predicted seconds of one step, without a timeline. The cost of an exchange is divided by the number of steps that share
    it."""
    setup = _set_up(plan, question, prices)
    return Simulation(setup.fragments).run([0] * len(plan.buckets)) / plan.local_steps


class PlannedFragment(NamedTuple):
    """The part of the model that is exchanged at once; the whole model if there is only one fragment."""

    places: list[int]
    """Indices of the fragment's buckets; `problem` numbers them from 0."""
    problem: Problem


class _Setup(NamedTuple):
    fragments: list[PlannedFragment]
    templates: list[Template]
    """One template per bucket."""
    before_s: float
    """Seconds of the forward pass before the simulated problem begins."""


def _set_up(plan: Plan, question: Question, prices: Prices | None) -> _Setup:
    prices = prices or server_prices(plan, question)
    templates = [bucket_template(prices, bucket) for bucket in plan.buckets]
    recipe, timing = Recipe("", plan.codes, plan.local_steps, plan.overlap, fragments=plan.fragments), question.timing
    loads = [each.load(sent_numel(plan, bucket, question.job), forward_need_s(timing, bucket.slices), stale=bucket.stale)
             for each, bucket in zip(templates, plan.buckets, strict=True)]
    before_s = timing.forward_s / slowest_speed(prices) if recipe.overlap == "forward" else 0.0
    return _Setup(fragments(question, plan.buckets, loads, prices, recipe), templates, before_s)


def server_prices(plan: Plan, question: Question) -> Prices:
    """Costs with the plan's servers. Overlapped exchanges have only a part of the links' rates."""
    cluster = question.cluster
    usable = overlapped_cluster(cluster) if plan.overlap == "round" else cluster
    return Prices(usable, question.profile, server_hosts(plan, cluster))


def server_hosts(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """The nodes that run the plan's servers: those in `plan.hosts`, else the first nodes that can."""
    able = tuple(i for i, node in enumerate(cluster.nodes) if node.server)
    if plan.hosts:
        return plan.hosts
    if plan.servers > len(able):
        raise InvalidInput("E-PLAN-INPUT",
                           f"the plan has {plan.servers} servers, but only {len(able)} nodes of the cluster can host one")
    return able[: plan.servers]


def bucket_template(prices: Prices, bucket: Bucket) -> Template:
    """The cost template of a bucket's path; errors name the bucket."""
    try:
        return prices.template(bucket.path, bucket.codec, bucket.server, bucket.owner, bucket.down, bucket.by_node)
    except ValueError as error:
        raise InvalidInput("E-PLAN-INPUT", f"bucket {bucket.id}: {error}") from None


def forward_need_s(timing: Timing, slices: Sequence[Slice]) -> float:
    """Seconds after which the next forward pass first needs a tensor of the bucket."""
    return min([timing.needed_s[s.tensor] for s in slices])


def steps_locally(recipe: Recipe) -> bool:
    """True: each rank steps on its own gradients."""
    return recipe.every > 1 or recipe.codes == "updates"


def slowest_speed(prices: Prices) -> float:
    """Relative speed of the slowest training node."""
    return min(group.node.speed for group in prices.groups if group.workers)


def fragments(
    question: Question, cuts: Sequence[CutBucket], loads: Sequence[Load], prices: Prices, recipe: Recipe,
) -> list[PlannedFragment]:
    """Divides an outer step's exchange into fragments, each with its simulation problem. ValueError if there are fewer buckets
    than fragments.

    Times start at the step's forward pass; with overlap="forward", at the step's backward pass.
    """
    timing = question.timing
    step_s = timing.forward_s + timing.backward_s + timing.update_s
    waits = not steps_locally(recipe) and not recipe.overlap
    work_s = timing.forward_s + timing.backward_s if waits else step_s * (recipe.every // recipe.fragments)
    if recipe.overlap == "round":
        ready = [0.0] * len(cuts)
    elif steps_locally(recipe):
        ready = [work_s] * len(cuts)
    else:
        before_s = 0.0 if recipe.overlap else timing.forward_s
        ready = [before_s + buckets.readiness(question.job, cut.slices) for cut in cuts]
    if recipe.overlap == "forward":  # the slowest node computes the rest of the period after it receives the average
        rest_s = [(timing.forward_s - load.urgency) / slowest_speed(prices) for load in loads]
        loads = add_final_delays(prices.network, loads, rest_s)
    speeds = np.array([group.node.speed for group in prices.groups if group.workers])
    tail_s = timing.update_s / slowest_speed(prices) if waits else 0.0
    return [
        PlannedFragment(places, prices.network.problem(
            [loads[b] for b in places], np.array([*[ready[b] for b in places], work_s])[None] / speeds[:, None],
            tail_s=tail_s, priority=question.policy.priority))
        for places in divide_into_fragments(cuts, recipe.fragments)]


def native_schedule(problem: Problem) -> _core.Schedule:
    if core is None:
        raise InvalidInput("E-PACKAGE", "planning needs the native core, which is not installed: install a C++ compiler and "
                           "reinstall commlayer")
    schedule: _core.Schedule = core.Schedule(problem)
    return schedule


class Simulation:
    """Simulates the fragments of an outer step in sequence. A fragment is simulated again only if an option of its buckets has
    changed."""

    def __init__(self, parts: Sequence[PlannedFragment]) -> None:
        self._places = [part.places for part in parts]
        self._each = [native_schedule(part.problem) for part in parts]
        self._at = {b: (number, place) for number, part in enumerate(parts) for place, b in enumerate(part.places)}
        self._last: list[tuple[list[int], float]] = [([], math.nan)] * len(parts)
        """For each fragment, the options that were simulated last, and the resulting seconds."""

    def run(self, choice: list[int], limit: float = math.inf) -> float:
        """Seconds of the outer step with one option number per bucket; infinity if certainly above `limit`."""
        seconds = 0.0
        for number in range(len(self._each)):
            seconds += self._fragment_s(number, choice, limit - seconds)
            if seconds > limit:
                return math.inf
        return seconds

    def sweep(
        self, choice: list[int], buckets: list[int], limit: float, now_s: float, most: int, only: list[int],
        factors: list[float],
    ) -> list[float]:
        """Seconds for each option when all of `buckets`, which have the same options, use it; infinity if above `limit`.

        `factors`: seconds are multiplied by the option's factor before any comparison. `now_s`: seconds of the present choice;
        NaN if unknown. `most`, up to 8: only this many shortest times are needed; others may be infinity. `only`: options to
        try; others are infinity.
        """
        if len(self._each) == 1:
            return self._each[0].sweep(choice, buckets, limit, now_s, most, only, factors)
        changed: dict[int, list[int]] = {}
        for b in buckets:
            number, place = self._at[b]
            changed.setdefault(number, []).append(place)
        rest = sum(self._fragment_s(number, choice) for number in range(len(self._each)) if number not in changed)
        left = limit / min(factors) - rest  # `most` is for the whole outer step
        swept = [self._each[number].sweep([choice[b] for b in self._places[number]], places, left, math.nan, 0, only)
                 for number, places in changed.items()]
        return [rest + sum(each) for each in zip(*swept, strict=True)]

    def _fragment_s(self, number: int, choice: Sequence[int], limit: float = math.inf) -> float:
        mine = [choice[b] for b in self._places[number]]
        before, seconds = self._last[number]
        if before != mine:
            seconds = self._each[number].run(mine, limit)
            if seconds < math.inf:
                self._last[number] = mine, seconds
        return seconds

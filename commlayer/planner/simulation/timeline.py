"""The verb `simulate`: a plan's step as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from commlayer.errors import InvalidInput
from commlayer.planner.model.cluster import Cluster, Policy, Profile
from commlayer.planner.model.thin import sent_numel
from commlayer.planner.pricing.hidden_links import hidden
from commlayer.planner.pricing.input_checks import checked_inputs
from commlayer.planner.pricing.path_cost import Prices
from commlayer.planner.pricing.problem import load_of
from commlayer.planner.pricing.steps_needed import recipe_of
from commlayer.planner.pricing.template import Template
from commlayer.planner.simulation.computing import begun_s
from commlayer.planner.simulation.schedule import schedule
from commlayer.planner.simulation.turns import Round, Turn, turns_of
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


def exact_s(plan: Plan, job: Job, cluster: Cluster, profile: Profile, policy: Policy) -> float:
    """Seconds of one step, without the timeline. The cost of an exchange is divided among the steps that share it."""
    turns, templates, _ = _lay_out(plan, job, cluster, profile, policy)
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

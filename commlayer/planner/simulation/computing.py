"""When nodes compute and when they wait for results, by sync mode.

With an exchange in every step, a step begins with its forward pass and ends when all results have arrived and the optimizer
has stepped. With local steps, the updates are ready after the last local step.

With overlap="round" an exchange runs alongside as many steps as it covers, so a period takes the longer of the two. With
fragments, this holds for each fragment: a part of the buckets, and the steps until the next fragment.

With overlap="forward" results arrive during the next forward pass, which waits for a bucket where it first needs it. A period
then runs from one backward pass to the next. The next one begins when all results are in and the forward computation that
needs them is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.planner.model import buckets
from commlayer.planner.model.equal_nodes import Group
from commlayer.planner.model.learning import Recipe
from commlayer.planner.pricing.problem import Load, Pace
from commlayer.records import Job, Slice, Timing


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

"""When each node computes what in a step, and what waits for results, by how steps are taken. Knows no paths and no lanes.

In the plain way a step begins with its forward pass, and its end waits for all results; then the optimizer steps. What ranks
exchange of steps of their own is ready when the last of them is over. Under overlap="round" that travels beside as many steps
as it is of, so a period is as long as the longer of the two. In fragments all that is of a turn: a part of the buckets, and the
steps from one turn to the next. Under overlap="forward" results travel beside the next forward
pass, and a bucket's is waited for where that first needs it: a period is told from one backward pass to the next, which
begins when all results are in and what was computed behind each of them is over.
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
    """When each kind of node has which bucket's gradient, or change of weights, and is through with computing. `groups`: what
    goes at once; in fragments, what goes in one turn."""
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
    """The optimizer's step on the slowest node, where it waits for all results."""
    return 0.0 if locally(recipe) or recipe.overlap else timing.update_s / _slowest(nodes)


def begun_s(timing: Timing, nodes: Sequence[Group], recipe: Recipe) -> float:
    """What the step's forward pass took before the times of pace() begin."""
    return timing.forward_s / _slowest(nodes) if recipe.overlap == "forward" else 0.0


def behind_s(timing: Timing, urgencies: Sequence[float], nodes: Sequence[Group], recipe: Recipe) -> list[float]:
    """By bucket: what the slowest node computes between having its result and the end of the period."""
    if recipe.overlap != "forward":
        return []
    return [(timing.forward_s - needed_s) / _slowest(nodes) for needed_s in urgencies]


def awaited(loads: Sequence[Load], behind: Sequence[float]) -> list[Load]:
    """With so many seconds behind each bucket's last task: one more task, on no lane."""
    made = []
    for load, seconds in zip(loads, behind, strict=True):
        latency: list[float] = []
        at = 0
        for shape in load.shapes:
            latency += [*load.latency[at : at + len(shape.after)], seconds]
            at += len(shape.after)
        made.append(load._replace(shapes=tuple([shape.awaited for shape in load.shapes]), latency=latency))
    return made


def _slowest(nodes: Sequence[Group]) -> float:
    return min(group.node.speed for group in nodes if group.workers)

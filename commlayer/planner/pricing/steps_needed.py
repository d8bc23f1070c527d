"""Convergence factor and loss penalty of options and plans, relative to dense training.

A codec's values come from rows of measured trainings. A bucket is weighted by its part of the elements, and equally by its
part of the gradients' energy if that is known. Upload and download count half each.
"""

from __future__ import annotations

from collections.abc import Sequence

from commlayer.planner.model.cluster import Cluster, Policy, Profile
from commlayer.planner.model.learning import NONE, Excess, Recipe, excess
from commlayer.planner.pricing.path_cost import bare
from commlayer.records import Job, Plan, Slice


class Excesses:
    """Excess of codecs by a profile's rows. A loss measured on the user's own task replaces the rows' loss for gradients
    exchanged in each step; the extra loss of other sync modes is added to it."""

    def __init__(self, profile: Profile) -> None:
        self._rows = profile.learning
        self._losses = {bare(cost.codec): cost.task_loss for cost in profile.codecs if cost.task_loss is not None}

    def of(self, codecs: Sequence[str], down: str, recipe: Recipe) -> Excess:
        """`codecs`: the nodes' upload codecs, of which the mean counts. `down`: the download codec, if it differs."""
        ups = [self._of(codec, recipe) for codec in dict.fromkeys(codecs)]
        parts = [codecs.count(codec) / len(codecs) for codec in dict.fromkeys(codecs)]
        up = summed(parts, ups) if len(ups) > 1 else ups[0]
        return summed((0.5, 0.5), (up, self._of(down, recipe))) if down else up

    def _of(self, codec: str, recipe: Recipe) -> Excess:
        measured = excess(self._rows, codec, recipe)
        loss = self._losses.get(bare(codec)) if self._losses else None
        if loss is None:
            return measured
        plain = excess(self._rows, codec, recipe._replace(codes="gradients", every=1, overlap="", late=False))
        return measured._replace(loss=loss + max(0.0, measured.loss - plain.loss),
                              loss_high=loss + max(0.0, measured.loss_high - plain.loss_high))


def recipe_of(plan: Plan, cluster: Cluster, policy: Policy) -> Recipe:
    """A plan's recipe, with no stale results."""
    return Recipe(policy.optimizer, plan.codes, plan.local_steps, plan.overlap, False, cluster.ranks, plan.fragments)


def plan_excess(plan: Plan, job: Job, cluster: Cluster, profile: Profile, policy: Policy) -> Excess:
    known, recipe = Excesses(profile), recipe_of(plan, cluster, policy)
    each = [known.of(b.by_node or (b.codec,), b.down, recipe._replace(late=b.stale)) for b in plan.buckets]
    return summed(weights(job, [b.slices for b in plan.buckets], profile.energy), each)


def weights(job: Job, groups: Sequence[tuple[Slice, ...]], energy: Sequence[float] = ()) -> list[float]:
    """Weight of each group of slices; together 1 for the whole model.

    Energy alone would describe the present cost of coding a part. Energy moves while a model learns, mostly to parts that had
    little of it at first.
    """
    total = max(1, job.numel)
    whole, numels = sum(energy), [max(1, info.numel) for info in job.tensors]
    of = [1 / total + (energy[i] / whole / numels[i] if energy else 1 / total) for i in range(len(job.tensors))]
    return [sum([of[s.tensor] * s.numel for s in slices]) / 2 for slices in groups]


def summed(parts: Sequence[float], each: Sequence[Excess]) -> Excess:
    """
    >>> summed((0.5, 0.5), (Excess(0.1, 0.2), Excess(0.3, 0.4))).steps
    0.2
    """
    if not each:
        return NONE
    return Excess(*(sum([part * value for part, value in zip(parts, field, strict=True)]) for field in zip(*each, strict=True)))

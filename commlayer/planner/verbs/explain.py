"""The verb `explain`: one bucket's decision, with its tasks in the simulated step."""

from __future__ import annotations

from commlayer.errors import InvalidInput
from commlayer.planner.model.cluster import Cluster, Policy, Profile
from commlayer.planner.pricing.input_checks import checked_inputs, tables_profile
from commlayer.planner.pricing.steps_needed import Excesses, recipe_of
from commlayer.planner.simulation.timeline import Span, simulate
from commlayer.planner.verbs.baselines import by_itself, halves_s
from commlayer.records import Bucket, Job, Plan, Record


class Explanation(Record, frozen=True):
    bucket: Bucket
    tensors: tuple[str, ...]
    """Names of its tensors, with ranges if a tensor is cut."""
    ready_s: float
    done_s: float
    step_s: float
    compute_s: float
    """Compute time of the `local_steps` steps that share this exchange."""
    local_steps: int
    spans: tuple[Span, ...]
    steps: float = 0.0
    """The plan's convergence factor, median and cautious; 0: unknown."""
    steps_high: float = 0.0
    codec_steps: float = 0.0
    codec_steps_high: float = 0.0
    """The same if the whole model were sent like this bucket."""
    fragments: int = 1
    """Fragments of a round, which are exchanged one after the other."""
    fp16_s: float = 0.0
    """Seconds to a loss with DDP's fp16 hook, per step of dense training."""
    alone_s: float = 0.0
    """The same for one machine alone; 0: there is only one machine."""


def explain(
    plan: Plan, bucket: int, job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None,
) -> Explanation:
    """Explains one bucket. Its reason and runner-up are those that the planner wrote into the plan."""
    if not 0 <= bucket < len(plan.buckets):
        raise InvalidInput("E-PLAN-QUESTION", f"bucket {bucket}: the plan has buckets 0 to {len(plan.buckets) - 1}")
    timeline = simulate(plan, job, cluster, profile, policy)
    costs, checked_policy, timing = checked_inputs(job, cluster, profile, policy)
    alone = by_itself(timing, cluster, costs, checked_policy)
    chosen = plan.buckets[bucket]
    spans = sorted((s for s in timeline.spans if s.bucket == bucket), key=lambda s: (s.start_s, s.end_s))
    return Explanation(
        chosen, tensor_names(chosen, job), timeline.ready_s[bucket], timeline.done_s[bucket], timeline.step_s,
        timeline.compute_s, plan.local_steps, tuple(spans), plan.steps, plan.steps_high,
        *_alone(chosen, plan, cluster, profile, policy), plan.fragments, halves_s(job, cluster, costs, checked_policy),
        alone[0].to_loss_s if alone else 0.0,
    )


def _alone(bucket: Bucket, plan: Plan, cluster: Cluster, profile: Profile | None, policy: Policy | None) -> tuple[float, float]:
    policy = policy or Policy()
    profile = profile or tables_profile(cluster, policy)
    if not profile.learning:
        return 0.0, 0.0
    recipe = recipe_of(plan, cluster, policy)._replace(late=bucket.stale)
    more = Excesses(profile).of(bucket.by_node or (bucket.codec,), bucket.down, recipe)
    return 1 + more.steps, 1 + more.high


def tensor_names(bucket: Bucket, job: Job) -> tuple[str, ...]:
    names = []
    for part in bucket.slices:
        info = job.tensors[part.tensor]
        names.append(info.name if part.numel == info.numel else f"{info.name}[{part.start}:{part.stop}]")
    return tuple(names)


def bucket_of(plan: Plan, job: Job, text: str) -> int:
    """The bucket for a number or a tensor's name (of a cut tensor, its first part)."""
    if text.isdigit():
        return int(text)
    tensor = next((i for i, info in enumerate(job.tensors) if info.name == text), None)
    numbers = [b.id for b in plan.buckets for s in b.slices if s.tensor == tensor]
    if not numbers:
        raise InvalidInput("E-PLAN-QUESTION",
                           f"bucket {text!r}: neither a number from 0 to {len(plan.buckets) - 1} nor a tensor of the model")
    return min(numbers)

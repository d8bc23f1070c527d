"""Answers questions about finished plans: how one bucket is sent (`explain`) and how two plans differ (`diff`)."""

from __future__ import annotations

from operator import attrgetter

from commlayer.errors import InvalidInput
from commlayer.planner.model import Cluster, Policy, Profile
from commlayer.planner.simulation import Span, simulate
from commlayer.records import Bucket, Job, Plan, Record


class Explanation(Record, frozen=True):
    bucket: Bucket
    tensors: tuple[str, ...]
    """Names of the bucket's tensors, with element ranges if a tensor is cut."""
    ready_s: float
    done_s: float
    step_s: float
    compute_s: float
    """Compute time in seconds of the `local_steps` steps that share this exchange."""
    local_steps: int
    spans: tuple[Span, ...]
    steps: float = 0.0
    """The plan's convergence factor, median and cautious; 0: unknown."""
    steps_high: float = 0.0
    fragments: int = 1
    """Number of fragments of the model, which are exchanged one after the other."""


def explain(
    plan: Plan, bucket: int, job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None,
) -> Explanation:
    """Explains one bucket: its times from a simulation; its reason and runner-up as the planner stored them in the plan."""
    if not 0 <= bucket < len(plan.buckets):
        raise InvalidInput("E-PLAN-QUESTION", f"bucket {bucket}: the plan has buckets 0 to {len(plan.buckets) - 1}")
    timeline = simulate(plan, job, cluster, profile, policy)
    spans = sorted((s for s in timeline.spans if s.bucket == bucket), key=attrgetter("start_s", "end_s"))
    return Explanation(
        plan.buckets[bucket], tensor_names(plan.buckets[bucket], job), timeline.ready_s[bucket], timeline.done_s[bucket],
        timeline.step_s, timeline.compute_s, plan.local_steps, tuple(spans), plan.steps, plan.steps_high, plan.fragments)


def tensor_names(bucket: Bucket, job: Job) -> tuple[str, ...]:
    infos = [(job.tensors[part.tensor], part) for part in bucket.slices]
    return tuple(info.name if part.numel == info.numel else f"{info.name}[{part.start}:{part.stop}]" for info, part in infos)


def find_bucket(plan: Plan, job: Job, text: str) -> int:
    """The bucket with a number or a tensor's name; for a cut tensor, its first bucket."""
    if text.isdigit():
        return int(text)
    tensor = next((i for i, info in enumerate(job.tensors) if info.name == text), None)
    numbers = [b.id for b in plan.buckets for s in b.slices if s.tensor == tensor]
    if not numbers:
        raise InvalidInput("E-PLAN-QUESTION",
                           f"bucket {text!r}: neither a number from 0 to {len(plan.buckets) - 1} nor a tensor of the model")
    return min(numbers)


class Change(Record, frozen=True):
    tensor: str
    before: str
    after: str


class Difference(Record, frozen=True):
    fields: tuple[tuple[str, str, str], ...]
    """Differences in settings of the whole plan: name, before, after."""
    changes: tuple[Change, ...]
    step_s: tuple[float, float]
    buckets: tuple[int, int]
    steps: tuple[float, float] = (0.0, 0.0)
    """Convergence factors; 0: unknown."""
    steps_high: tuple[float, float] = (0.0, 0.0)

    @property
    def equal(self) -> bool:
        return not self.fields and not self.changes


WHOLE = ("servers", "hosts", "ranks_per_node", "local_steps", "codes", "overlap", "fragments", "ratio_over", "warmup", "schema")


def diff(before: Plan, after: Plan, job: Job | None = None) -> Difference:
    """Compares two plans tensor by tensor. With `job`, the result has the tensors' names."""
    if before.job != after.job:
        raise InvalidInput("E-PLAN-QUESTION", f"the plans are of different models: job {before.job} and job {after.job}")
    fields = [(name, str(getattr(before, name)), str(getattr(after, name))) for name in WHOLE]
    old, new = _by_tensor(before), _by_tensor(after)
    changes = tuple(
        Change(job.tensors[t].name if job else f"tensor {t}", old.get(t, "nothing"), new.get(t, "nothing"))
        for t in sorted({*old, *new}) if old.get(t) != new.get(t)
    )
    return Difference(tuple(each for each in fields if each[1] != each[2]), changes, (before.step_s, after.step_s),
                      (len(before.buckets), len(after.buckets)), (before.steps, after.steps),
                      (before.steps_high, after.steps_high))


def _by_tensor(plan: Plan) -> dict[int, str]:
    """Describes for each tensor how its buckets are sent; equal descriptions are counted."""
    spellings: dict[int, list[str]] = {}
    for bucket in plan.buckets:
        for part in bucket.slices:
            spellings.setdefault(part.tensor, []).append(how_sent(bucket))
    return {tensor: "; ".join(text if len(each) == 1 else f"{each.count(text)} x {text}" for text in dict.fromkeys(each))
            for tensor, each in spellings.items()}


def how_sent(bucket: Bucket) -> str:
    """Describes in one line how a bucket is sent."""
    parts = [bucket.codec, "over", bucket.path]
    parts += [f"down {bucket.down}"] if bucket.down else []
    parts += ["by node"] if bucket.by_node else []
    parts += ["one step stale"] if bucket.stale else []
    return " ".join(parts)

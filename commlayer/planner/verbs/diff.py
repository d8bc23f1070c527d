"""The verb `diff`: what differs between two plans, by tensor."""

from __future__ import annotations

from commlayer.errors import InvalidInput
from commlayer.records import Bucket, Job, Plan, Record


class Change(Record, frozen=True):
    tensor: str
    before: str
    after: str


class Difference(Record, frozen=True):
    fields: tuple[tuple[str, str, str], ...]
    """Differences of the whole plans: name, before, after."""
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
    """Compares by tensor; with the job, by its tensors' names."""
    if before.job != after.job:
        raise InvalidInput("E-PLAN-QUESTION", f"the plans are of different models: job {before.job} and job {after.job}")
    fields = tuple(
        (name, str(getattr(before, name)), str(getattr(after, name)))
        for name in WHOLE if getattr(before, name) != getattr(after, name)
    )
    old, new = _by_tensor(before), _by_tensor(after)
    changes = tuple(
        Change(job.tensors[t].name if job else f"tensor {t}", old.get(t, "nothing"), new.get(t, "nothing"))
        for t in sorted({*old, *new}) if old.get(t) != new.get(t)
    )
    return Difference(fields, changes, (before.step_s, after.step_s), (len(before.buckets), len(after.buckets)),
                      (before.steps, after.steps), (before.steps_high, after.steps_high))


def _by_tensor(plan: Plan) -> dict[int, str]:
    spellings: dict[int, list[str]] = {}
    for bucket in plan.buckets:
        for part in bucket.slices:
            spellings.setdefault(part.tensor, []).append(spelled(bucket))
    return {tensor: _counted(ways) for tensor, ways in spellings.items()}


def _counted(ways: list[str]) -> str:
    distinct = dict.fromkeys(ways)
    return "; ".join(way if len(ways) == 1 else f"{ways.count(way)} x {way}" for way in distinct)


def spelled(bucket: Bucket) -> str:
    """How a bucket is sent, in one line."""
    parts = [bucket.codec, "over", bucket.path]
    parts += [f"down {bucket.down}"] if bucket.down else []
    parts += ["by node"] if bucket.by_node else []
    parts += ["a step late"] if bucket.stale else []
    return " ".join(parts)

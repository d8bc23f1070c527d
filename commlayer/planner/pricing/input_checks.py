"""Validates the planner's inputs, one line per problem: a job with times, a cluster, a profile, a policy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from commlayer.codec_spec import spec_error
from commlayer.errors import InvalidInput
from commlayer.planner.model.cluster import Cluster, Line, Policy, Profile
from commlayer.planner.model.learning import row_problem
from commlayer.planner.pricing.path_cost import bare
from commlayer.planner.tables.machines import DEFAULT_CODECS, GPUS, profile_from_tables
from commlayer.records import Job, Timing

MOST_NUMEL = 1 << 36
"""Most elements of a job: more than one machine can hold a replica of, and still searchable."""
LEAST_BPS = 1000.0
"""Lowest link rate; a smaller number is probably meant in Mb/s."""


def checked_inputs(
    job: Job, cluster: Cluster, profile: Profile | None, policy: Policy | None,
) -> tuple[Profile, Policy, Timing]:
    """The inputs with defaults filled in (the tables' profile, the default policy); the first problem is raised as a
    ValueError."""
    problems = [*job_problems(job), *cluster_problems(cluster)]
    policy = Policy() if policy is None else policy
    problems += policy_problems(policy)
    if not problems and profile is None:
        profile = tables_profile(cluster, policy)
    problems += [] if profile is None else [*profile_problems(profile), *device_problems(profile, cluster)]
    if profile is not None and len(profile.energy) not in (0, len(job.tensors)):
        problems.append(f"profile {profile.source!r}: energy has {len(profile.energy)} parts for {len(job.tensors)} tensors: "
                        "measure it on this job, or leave it out")
    if problems:
        raise InvalidInput("E-PLAN-INPUT", problems[0])
    assert profile is not None
    assert job.timing is not None
    return profile, policy, job.timing


def tables_profile(cluster: Cluster, policy: Policy) -> Profile:
    """A profile of the default codecs and of those that the policy names."""
    once = {bare(codec): str(bare(codec)) for codec in (*DEFAULT_CODECS, *policy.codecs)}
    return profile_from_tables(cluster, tuple(once.values()))


def job_problems(job: Job) -> Iterator[str]:
    name = f"job {job.name!r}" if job.name else "job"
    yield from _model_problems(job, name)
    timing = job.timing
    if timing is None:
        yield f"{name} has no timing: planning needs when each gradient is ready; measure it or take a job of the tables"
        return
    if timing.device:
        yield f"{name}: its times are of {timing.device}, nodes' speeds are not: planner.on_reference(job) brings them together"
    for field in ("ready_s", "needed_s"):
        times = getattr(timing, field)
        if len(times) != len(job.tensors):
            yield f"{name}: timing.{field} has {len(times)} entries for {len(job.tensors)} tensors"
            continue
        for info, at in zip(job.tensors, times, strict=True):
            if not _time(at):
                yield f"{name}: timing.{field} of {info.name} is {at}, allowed: 0 or more"
    if timing.filled and (len(timing.filled) != len(job.tensors) or not all(0 <= part <= 1 for part in timing.filled)):
        yield f"{name}: timing.filled has {len(timing.filled)} parts, allowed: one of 0 to 1 for each tensor, or none"
    for field in ("backward_s", "forward_s", "update_s"):
        if not _time(getattr(timing, field)):
            yield f"{name}: timing.{field} is {getattr(timing, field)}, allowed: 0 or more"
    for field, times, whole_s, event in (("ready_s", timing.ready_s, timing.backward_s, "is ready"),
                                        ("needed_s", timing.needed_s, timing.forward_s, "is needed")):
        if len(times) == len(job.tensors) and times and max(times) > whole_s * (1 + 1e-9):
            late = max(range(len(times)), key=times.__getitem__)
            what = "backward" if field == "ready_s" else "forward"
            yield f"{name}: {job.tensors[late].name} {event} after {times[late]} s, but {what} is over after {whole_s} s"


def _model_problems(job: Job, name: str) -> Iterator[str]:
    if job.batch is not None and job.batch < 1:
        yield f"{name}: batch is {job.batch}, allowed: 1 or more"
    seen: set[str] = set()
    for info in job.tensors:
        if info.name in seen:
            yield f"{name}: two tensors are called {info.name!r}; each needs a name of its own"
        seen.add(info.name)
        if min(info.shape, default=0) < 0:
            yield f"{name}: shape of {info.name} is {list(info.shape)}, allowed: sizes of 0 or more"
    if job.numel > MOST_NUMEL:
        yield f"{name}: its tensors have {job.numel} elements, allowed: up to {MOST_NUMEL}"


def cluster_problems(cluster: Cluster) -> Iterator[str]:
    names = [node.name for node in cluster.nodes]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"cluster: {names.count(name)} nodes are called {name!r}; each needs a name of its own"
    if not any(node.ranks for node in cluster.nodes):
        yield "cluster: no node has ranks, so nobody trains"
    for node in cluster.nodes:
        if node.ranks < 0:
            yield f"node {node.name}: ranks is {node.ranks}, allowed: 0 or more"
        for field in ("up_bps", "down_bps"):
            value = getattr(node.link, field)
            if not (value >= LEAST_BPS and math.isfinite(value)):
                yield (f"node {node.name}: link.{field} is {value:g}, allowed: bits per second, {LEAST_BPS:g} or more; "
                       "20 Mb/s is 20e6")
        if not _time(node.link.alpha_s):
            yield f"node {node.name}: link.alpha_s is {node.link.alpha_s}, allowed: 0 or more"
        if node.ranks > 1 and not node.intra_bps > 0:
            yield f"node {node.name}: intra_bps is {node.intra_bps:g} with {node.ranks} ranks, allowed: above 0"
        if not _time(node.intra_alpha_s):
            yield f"node {node.name}: intra_alpha_s is {node.intra_alpha_s}, allowed: 0 or more"
        if not (node.speed > 0 and math.isfinite(node.speed)):
            yield f"node {node.name}: speed is {node.speed:g}, allowed: above 0 and finite"
    if not cluster.reachable and not any(node.server for node in cluster.nodes):
        yield "cluster: its nodes do not reach one another and none can host a server; set server = true on one"


def profile_problems(profile: Profile) -> Iterator[str]:
    name = f"profile {profile.source!r}"
    if not profile.codecs:
        yield f"{name} has no codecs"
    seen = set()
    for cost in profile.codecs:
        priced = (cost.codec if spec_error(cost.codec) else bare(cost.codec), cost.device)
        if priced in seen:
            yield f"{name}: {cost.codec} on {cost.device} stands there twice"
        seen.add(priced)
        where = f"{cost.codec} on {cost.device}"
        if wrong := spec_error(cost.codec):
            yield f"{name}: {wrong}"
        if cost.rounds < 1:
            yield f"{name}: rounds of {where} is {cost.rounds}, allowed: 1 or more"
        for field in ("encode", "decode", "nbytes", "reduced"):
            yield from (f"{name}: {problem}" for problem in _line_problems(field, getattr(cost, field), f" of {where}"))
        if cost.nbytes.floor_s == cost.nbytes.slope_s == 0:
            yield f"{name}: nbytes of {where} is 0 for every size, allowed: above 0"
        if cost.task_loss is not None and not _time(cost.task_loss):
            yield f"{name}: task_loss of {where} is {cost.task_loss}, allowed: 0 or more"
    for field in ("server", "copy", "inside", "across"):
        yield from (f"{name}: {problem}" for problem in _line_problems(field, getattr(profile, field)))
    if not all(map(_time, profile.energy)) or (profile.energy and not sum(profile.energy) > 0):
        yield f"{name}: energy has a part below 0, or nothing above it; allowed: 0 or more, not all 0"
    if not _time(profile.bucket_s):
        yield f"{name}: bucket_s is {profile.bucket_s}, allowed: 0 or more"


def learning_problems(profile: Profile) -> Iterator[str]:
    """Problems of a user's rows. Rows measured here are not checked for each plan."""
    for row in profile.learning:
        if wrong := row_problem(row):
            yield f"profile {profile.source!r}: learning: {wrong}"


def device_problems(profile: Profile, cluster: Cluster) -> Iterator[str]:
    """Costs for a device that no node can have; they would be ignored silently."""
    nodes = {node.device for node in cluster.nodes}
    for device in dict.fromkeys(cost.device for cost in profile.codecs):
        if device not in ("gpu", "cpu", *GPUS, *nodes):
            near = difflib.get_close_matches(device, ("gpu", "cpu", *GPUS, *nodes), 3, 0.5)
            yield (f"profile {profile.source!r}: device {device!r} is neither gpu, cpu, a GPU of the tables nor a node's"
                   + (f", nearest are {', '.join(near)}" if near else ""))


def policy_problems(policy: Policy) -> Iterator[str]:
    yield from (f"policy: {wrong}" for codec in policy.codecs if (wrong := spec_error(codec)))
    if not policy.devices or set(policy.devices) - {"gpu", "cpu"}:
        yield f"policy: devices is {', '.join(policy.devices) or 'empty'}, allowed: gpu, cpu"
    if not policy.max_loss >= 0:
        yield f"policy: max_loss is {policy.max_loss}, allowed: 0 or more"
    if policy.max_local_steps < 0:
        yield f"policy: max_local_steps is {policy.max_local_steps}, allowed: 1 or more, or 0 for as many as are usual"
    if policy.objective not in ("loss", "step"):
        yield f"policy: objective is {policy.objective!r}, allowed: loss, step"
    if policy.max_encodes < 0:
        yield f"policy: max_encodes is {policy.max_encodes}, allowed: 0 or more"


def _time(value: float) -> bool:
    return value >= 0 and math.isfinite(value)


def _line_problems(field: str, line: Line, of: str = "") -> Iterator[str]:
    for part in ("floor_s", "slope_s", "error"):
        value = getattr(line, part)
        if not _time(value):
            yield f"{field}.{part}{of} is {value}, allowed: 0 or more and finite"

"""Checks what planning starts from, all in one line each: a job with times, a cluster, a profile. Makes no decisions."""

from __future__ import annotations

import math
from collections.abc import Iterator

from commlayer.planner.model import Cluster, Line, Policy, Profile
from commlayer.planner.tables import profile_from_tables
from commlayer.records import Job, Timing


def checked_inputs(
    job: Job, cluster: Cluster, profile: Profile | None, policy: Policy | None,
) -> tuple[Profile, Policy, Timing]:
    """The same with the tables' profile and the default policy filled in, or the first problem as a ValueError."""
    problems = [*job_problems(job), *cluster_problems(cluster)]
    if not problems and profile is None:
        profile = profile_from_tables(cluster)
    policy = Policy() if policy is None else policy
    problems += [] if profile is None else profile_problems(profile)
    problems += policy_problems(policy)
    if problems:
        raise ValueError(problems[0])
    assert profile is not None
    assert job.timing is not None
    return profile, policy, job.timing


def job_problems(job: Job) -> Iterator[str]:
    name = f"job {job.name!r}" if job.name else "job"
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
    for field in ("backward_s", "forward_s", "update_s"):
        if not _time(getattr(timing, field)):
            yield f"{name}: timing.{field} is {getattr(timing, field)}, allowed: 0 or more"
    if timing.ready_s and max(timing.ready_s) > timing.backward_s * (1 + 1e-9):
        late = max(range(len(timing.ready_s)), key=timing.ready_s.__getitem__)
        yield (f"{name}: {job.tensors[late].name if late < len(job.tensors) else late} is ready after "
               f"{timing.ready_s[late]} s, but backward is over after {timing.backward_s} s")


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
            if not (value > 0 and math.isfinite(value)):
                yield f"node {node.name}: link.{field} is {value:g}, allowed: above 0"
        if not _time(node.link.alpha_s):
            yield f"node {node.name}: link.alpha_s is {node.link.alpha_s}, allowed: 0 or more"
        if node.ranks > 1 and not node.intra_bps > 0:
            yield f"node {node.name}: intra_bps is {node.intra_bps:g} with {node.ranks} ranks, allowed: above 0"
        if not _time(node.intra_alpha_s):
            yield f"node {node.name}: intra_alpha_s is {node.intra_alpha_s}, allowed: 0 or more"
        if not (node.speed > 0 and math.isfinite(node.speed)):
            yield f"node {node.name}: speed is {node.speed:g}, allowed: above 0"
    if not cluster.reachable and not any(node.server for node in cluster.nodes):
        yield "cluster: its nodes do not reach one another and none can host a server; set server = true on one"


def profile_problems(profile: Profile) -> Iterator[str]:
    name = f"profile {profile.source!r}"
    if not profile.codecs:
        yield f"{name} has no codecs"
    seen = set()
    for cost in profile.codecs:
        if (cost.codec, cost.device) in seen:
            yield f"{name}: {cost.codec} on {cost.device} stands there twice"
        seen.add((cost.codec, cost.device))
        if not cost.codec.strip() or cost.rounds < 1:
            yield f"{name}: codec {cost.codec!r} on {cost.device} has {cost.rounds} rounds, allowed: a name, and 1 or more"
        for field in ("encode", "decode", "nbytes", "reduced"):
            if not _line(getattr(cost, field)):
                yield f"{name}: {field} of {cost.codec} on {cost.device} is negative or not finite"
        if not (cost.loss >= 0 and math.isfinite(cost.loss)):
            yield f"{name}: loss of {cost.codec} on {cost.device} is {cost.loss}, allowed: 0 or more"
    for field in ("server", "copy", "inside", "across"):
        if not _line(getattr(profile, field)):
            yield f"{name}: {field} is negative or not finite"
    if not _time(profile.bucket_s):
        yield f"{name}: bucket_s is {profile.bucket_s}, allowed: 0 or more"


def policy_problems(policy: Policy) -> Iterator[str]:
    if not policy.devices or set(policy.devices) - {"gpu", "cpu"}:
        yield f"policy: devices is {', '.join(policy.devices) or 'empty'}, allowed: gpu, cpu"
    if not policy.max_loss >= 0:
        yield f"policy: max_loss is {policy.max_loss}, allowed: 0 or more"
    if policy.max_local_steps < 1:
        yield f"policy: max_local_steps is {policy.max_local_steps}, allowed: 1 or more"
    if policy.max_encodes < 0:
        yield f"policy: max_encodes is {policy.max_encodes}, allowed: 0 or more"


def _time(value: float) -> bool:
    return value >= 0 and math.isfinite(value)


def _line(line: Line) -> bool:
    return _time(line.floor_s) and _time(line.slope_s)

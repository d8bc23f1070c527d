"""Validates the planner's inputs, one line per problem: a job with times, a cluster, a profile, a policy."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from commlayer.codec_spec import spec_error
from commlayer.errors import InvalidInput, RecordError
from commlayer.planner import tables
from commlayer.planner.convergence import row_problem
from commlayer.planner.model import Cluster, Line, Link, Node, Policy, Profile, bare
from commlayer.planner.tables import DEFAULT_CODECS, GPUS, profile_from_tables
from commlayer.records import Job, Record, Timing

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


T = TypeVar("T")

RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?))?([MG])b")
GROUP = re.compile(r"(?:(\d+)x)?(?:(\d+)\*)?([A-Za-z0-9-]+)@(\S+)")
GROUP_FORM = '"3xrtx3060@100/20Mb" (down/up), "rtx4090@1Gb", "2x8*v100@25g" (2 nodes of 8 ranks)'

EXAMPLE = """\
# The machines. Rates in bit/s and seconds, or links by name: "home-DOWN/UP" and "fiber-BOTH" in Mb/s, "10g", "100m".
reachable = false             # whether nodes reach one another; over the internet they do not

[[node]]
name = "anna"
device = "rtx3060"            # a GPU of the tables, or "cpu"
link = "fiber-200"
server = true                 # others can dial it: it may host a summation server

[[node]]
name = "home"
count = 2                     # home-0 and home-1
device = "rtx3060"
link = { up_bps = 20e6, down_bps = 100e6, alpha_s = 0.01 }
server = false
"""


class WrittenNode(Record, frozen=True):
    """A node in a file: a Node with optional fields."""

    device: str
    link: str | Link
    name: str = ""
    count: int = 1
    ranks: int = 1
    intra: str = "pcie3"
    intra_bps: float = 0.0
    intra_alpha_s: float = 0.0
    speed: float = 0.0
    """Relative to a V100; 0: the table's value."""
    server: bool = True


class WrittenCluster(Record, frozen=True):
    node: tuple[WrittenNode, ...]
    reachable: bool = True


def cluster_of(text: str, what: str, *, toml: bool) -> Cluster:
    """Parses a cluster; a one-line error for the first problem."""
    data = _read(text, what, toml)
    if isinstance(data, dict) and "nodes" in data:
        cluster = _convert(data, Cluster, what)
    else:
        written = _convert(data, WrittenCluster, what)
        cluster = Cluster(tuple(n for i, w in enumerate(written.node) for n in _nodes(w, i, what)), written.reachable)
    _refuse(cluster_problems(cluster), what)
    return cluster


def profile_of(text: str, what: str, *, toml: bool) -> Profile:
    profile = _convert(_read(text, what, toml), Profile, what)
    _refuse([*profile_problems(profile), *learning_problems(profile)], what)
    return profile


def nodes_of(text: str, *, first: int = 0, what: str = "nodes") -> tuple[Node, ...]:
    """Parses nodes from a line; `what` names the text in errors.

    >>> [(n.name, n.link.up_bps) for n in nodes_of("2xrtx3060@100/20Mb,rtx4090@1Gb")]
    [('rtx3060-0', 20000000.0), ('rtx3060-1', 20000000.0), ('rtx4090-2', 1000000000.0)]
    """
    nodes: list[Node] = []
    for group in filter(None, (part.strip() for part in text.split(","))):
        match = GROUP.fullmatch(group)
        if match is None:
            raise InvalidInput("E-PLAN-INPUT", f"{what}: got {group!r}, allowed: {GROUP_FORM}")
        count, ranks, device, net = int(match[1] or 1), int(match[2] or 1), match[3].lower(), match[4]
        for _ in range(count):
            nodes.append(tables.node(f"{device}-{first + len(nodes)}", device, _table_link(net), ranks=ranks))
    if not nodes:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: got {text!r}, allowed: {GROUP_FORM}")
    return tuple(nodes)


def cluster_from_line(text: str) -> Cluster:
    """Nodes from a line. They can reach each other if all links are rack links ("10g")."""
    nodes = nodes_of(text)
    return Cluster(nodes, all(node.link.alpha_s <= tables.RACK_ALPHA_S for node in nodes))


def cluster_of_homes(text: str, server: str) -> Cluster:
    """Machines behind NAT that cannot be dialed, and a rented server that all dial; it sums and does not train. `server`: its
    link.

    >>> [(n.name, n.ranks, n.server) for n in cluster_of_homes("2xrtx3060@100/20Mb", "1Gb").nodes]
    [('server', 0, True), ('home-0', 1, False), ('home-1', 1, False)]
    """
    homes = (structs.replace(node, name=f"home-{place}", server=False)
             for place, node in enumerate(nodes_of(text, what="homes")))
    return Cluster((tables.node("server", "cpu", _table_link(server), ranks=0), *homes), reachable=False)


def rate_of(text: str) -> float:
    """
    >>> rate_of("20Mb"), rate_of("1Gb")
    (20000000.0, 1000000000.0)
    """
    match = RATE.fullmatch(text.strip())
    if match is None or match[2]:
        raise InvalidInput("E-PLAN-INPUT", f'rate: got {text!r}, allowed: a number with its unit, such as "20Mb" or "1Gb"')
    return float(match[1]) * (1e9 if match[3] == "G" else 1e6)


def _table_link(text: str) -> str:
    """The tables' name for "100/20Mb" and "1Gb"; any other text is returned unchanged."""
    match = RATE.fullmatch(text)
    if match is None:
        return text
    unit = 1000 if match[3] == "G" else 1
    down, up = float(match[1]) * unit, float(match[2] or match[1]) * unit
    return f"home-{down:g}/{up:g}" if match[2] else f"fiber-{down:g}"


def _nodes(written: WrittenNode, place: int, what: str) -> Iterator[Node]:
    name = written.name or f"{written.device}-{place}"
    if written.count < 1:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: node {name}: count is {written.count}, allowed: 1 or more")
    try:
        link = tables.link(written.link) if isinstance(written.link, str) else written.link
        speed = written.speed or tables.speed(written.device)
        if written.intra not in tables.INTRA:
            raise InvalidInput("E-PLAN-INPUT", f"intra {written.intra!r}: allowed are {', '.join(tables.INTRA)}")
    except ValueError as error:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: node {name}: {error}") from None
    intra_bps, intra_alpha_s = tables.INTRA[written.intra] if written.ranks > 1 else (0.0, 0.0)
    node = Node(name, written.ranks, written.device, link, written.intra_bps or intra_bps,
                written.intra_alpha_s or intra_alpha_s, speed, written.server)
    for i in range(written.count):
        yield structs.replace(node, name=f"{name}-{i}") if written.count > 1 else node


def _read(text: str, what: str, toml: bool) -> Any:
    try:
        return tomllib.loads(text) if toml else msgspec.json.decode(text)
    except (tomllib.TOMLDecodeError, msgspec.MsgspecError) as error:
        raise RecordError("E-PLAN-INPUT", f"{what}: {error}") from None


def _convert(data: Any, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(data, kind)
    except msgspec.MsgspecError as error:
        raise RecordError("E-PLAN-INPUT", f"{what}: {error}{remedy(error)}") from None


def remedy(error: Exception) -> str:
    """The remedy for a profile with the former field `loss`: guesses from tables, which would now count as measured."""
    guessed = "unknown field `loss`" in str(error) and "codecs[" in str(error)
    return "; an earlier version made this profile: measure again (`commlayer profile`)" if guessed else ""


def _refuse(problems: Iterable[str], what: str) -> None:
    for problem in problems:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: {problem}")

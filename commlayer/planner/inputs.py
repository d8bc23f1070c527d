"""Validates the planner's inputs (a job with timing, a cluster, a profile, a policy), with one line per problem, and parses
them."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from commlayer.codec_spec import spec_error
from commlayer.errors import InvalidInput, RecordError
from commlayer.planner.convergence import row_problem
from commlayer.planner.data import tables
from commlayer.planner.data.tables import DEFAULT_CODECS, gpus, profile_from_tables
from commlayer.planner.model import Cluster, Link, Node, Policy, Profile, Question, bare
from commlayer.records import Job, Record, complete

T = TypeVar("T")

MOST_NUMEL = 1 << 36
"""Largest number of elements of a job: more than one machine can hold a replica of, and still searchable."""
LEAST = {"up_bps": 1000.0, "down_bps": 1000.0, "speed": 1e-9, "rounds": 1, "batch": 1}
"""Least allowed values of these fields; the least value of all other fields is 0. A rate below 1000 bit/s was probably meant in
Mb/s: 20 Mb/s is 20e6."""


def checked_inputs(job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None) -> Question:
    """Validates the inputs and fills in defaults: a profile from the tables, the default policy. Raises the first problem as
    InvalidInput."""
    policy = Policy() if policy is None else policy
    problems = [*job_problems(job), *cluster_problems(cluster), *policy_problems(policy)]
    if not problems:
        profile = profile or tables_profile(cluster, policy)
        problems += profile_problems(profile, cluster)
        if len(profile.energy) not in (0, len(job.tensors)):
            problems.append(f"profile {profile.source!r}: energy has {len(profile.energy)} values for {len(job.tensors)} "
                            "tensors: measure energy on this job, or remove the field")
    if profile is None or problems:
        raise InvalidInput("E-PLAN-INPUT", problems[0])
    return Question(job, cluster, profile, policy)


def tables_profile(cluster: Cluster, policy: Policy) -> Profile:
    """A profile of the default codecs and the policy's codecs, with costs from the tables."""
    once = {bare(codec): str(bare(codec)) for codec in (*DEFAULT_CODECS, *policy.codecs)}
    return profile_from_tables(cluster, tuple(once.values()))


def number_problems(record: Record, path: str = "", of: str = "") -> Iterator[str]:
    """Reports numbers that are too small or not finite, in a record and its nested records, with one line per field."""
    for field in record.__struct_fields__:
        value = getattr(record, field)
        if isinstance(value, Record):
            yield from number_problems(value, f"{path}{field}.", of)
        elif isinstance(value, (int, float)) and not (value >= LEAST.get(field, 0) and math.isfinite(value)):
            yield f"{path}{field}{of} is {value}, allowed: {LEAST.get(field, 0):g} or more and finite"


def job_problems(job: Job) -> Iterator[str]:
    name = f"job {job.name!r}" if job.name else "job"
    names = [info.name for info in job.tensors]
    yield from (f"{name}: two tensors are called {twice!r}; each needs a name of its own" for twice in _duplicates(names))
    for info in job.tensors:
        if min(info.shape, default=0) < 0:
            yield f"{name}: shape of {info.name} is {list(info.shape)}, allowed: sizes of 0 or more"
    if job.numel > MOST_NUMEL:
        yield f"{name}: its tensors have {job.numel} elements, allowed: up to {MOST_NUMEL}"
    yield from (f"{name}: {problem}" for problem in number_problems(job))
    timing = job.timing
    if timing is None:
        yield f"{name} has no timing: planning needs the time at which each gradient is ready; measure it or use a built-in job"
        return
    if timing.device:
        yield (f"{name}: its times were measured on {timing.device}, but node speeds are relative to a V100: scale the times "
               "with planner.on_reference(job)")
    if timing.filled and (len(timing.filled) != len(names) or not all(0 <= part <= 1 for part in timing.filled)):
        yield f"{name}: timing.filled has {len(timing.filled)} values, allowed: one value from 0 to 1 per tensor, or none"
    for field, times, most_s, what in (("ready_s", timing.ready_s, timing.backward_s, "ready after"),
                                       ("needed_s", timing.needed_s, timing.forward_s, "needed after")):
        if len(times) != len(names):
            yield f"{name}: timing.{field} has {len(times)} entries for {len(names)} tensors"
            continue
        for tensor, at in zip(names, times, strict=True):
            if not 0 <= at < math.inf:
                yield f"{name}: timing.{field} of {tensor} is {at}, allowed: 0 or more"
            elif at > most_s * (1 + 1e-9):
                yield f"{name}: {tensor} is {what} {at} s, but the pass takes only {most_s} s"


def cluster_problems(cluster: Cluster) -> Iterator[str]:
    yield from (f"cluster: two nodes are called {name!r}; each needs a name of its own"
                for name in _duplicates([node.name for node in cluster.nodes]))
    if not any(node.ranks for node in cluster.nodes):
        yield "cluster: no node has ranks, so no node trains"
    for node in cluster.nodes:
        yield from (f"node {node.name}: {problem}" for problem in number_problems(node))
        if node.ranks > 1 and not node.intra_bps > 0:
            yield f"node {node.name}: intra_bps is {node.intra_bps:g} with {node.ranks} ranks, allowed: above 0"
    if not cluster.reachable and not any(node.server for node in cluster.nodes):
        yield "cluster: its nodes cannot reach each other and no node can host a server; set server = true on one"


def profile_problems(profile: Profile, cluster: Cluster | None = None) -> Iterator[str]:
    """Reports invalid values of a profile, one line each. With `cluster`, also reports costs for a device that no node
    has, which the planner would ignore."""
    name = f"profile {profile.source!r}"
    if not profile.codecs:
        yield f"{name} has no codecs"
    yield from (f"{name}: {wrong}" for cost in profile.codecs if (wrong := spec_error(cost.codec)))
    yield from (f"{name}: {codec} on {device} is listed twice" for codec, device in _duplicates(
        [(str(bare(cost.codec)), cost.device) for cost in profile.codecs if not spec_error(cost.codec)]))
    for cost in profile.codecs:
        yield from (f"{name}: {problem}" for problem in number_problems(cost, of=f" of {cost.codec} on {cost.device}"))
        if cost.nbytes.floor_s == cost.nbytes.slope_s == 0:
            yield f"{name}: nbytes of {cost.codec} on {cost.device} is 0 for every size, allowed: above 0"
    yield from (f"{name}: {problem}" for problem in number_problems(profile))
    if not all(0 <= part < math.inf for part in profile.energy) or (profile.energy and not sum(profile.energy) > 0):
        yield f"{name}: energy has a negative value, or only zeros; allowed: 0 or more, not all 0"
    known = {"gpu", "cpu", *gpus(), *(node.device for node in cluster.nodes)} if cluster else set()
    for device in sorted({cost.device for cost in profile.codecs} - known) if cluster else ():
        near = difflib.get_close_matches(device, known, 3, 0.5)
        yield (f"{name}: device {device!r} is neither gpu, cpu, a known GPU nor the device of a node"
               + (f"; similar names: {', '.join(near)}" if near else ""))


def policy_problems(policy: Policy) -> Iterator[str]:
    yield from (f"policy: {wrong}" for codec in policy.codecs if (wrong := spec_error(codec)))
    if not policy.devices or set(policy.devices) - {"gpu", "cpu"}:
        yield f"policy: devices is {', '.join(policy.devices) or 'empty'}, allowed: gpu, cpu"
    if policy.objective not in ("loss", "step"):
        yield f"policy: objective is {policy.objective!r}, allowed: loss, step"
    for field in ("max_loss", "max_local_steps", "max_encodes"):
        if not getattr(policy, field) >= 0:
            yield f"policy: {field} is {getattr(policy, field)}, allowed: 0 or more"


def _duplicates(names: Sequence[T]) -> list[T]:
    return [name for name, count in Counter(names).items() if count > 1]


NUMBER = r"(\d{1,9}(?:\.\d{1,9})?)"
UNIT = r"(?:\s*([kmg])(bits?|bytes?|b)(?:ps|/s)?)?"
RATE = re.compile(rf"{NUMBER}{UNIT}(?:\s*/\s*{NUMBER}{UNIT})?", re.IGNORECASE)
LINK_FORM = '"100/20Mb" (down/up in Mb/s), "20Mb" (in each direction), "1Gb", "10g" (in one room)'
GROUP = re.compile(r"(?:(\d{1,4})(?:\s*[x\u00d7]\s*|\s+))?(?:(\d{1,4})\s*\*\s*)?([a-z][a-z0-9 -]*?|\d{4}[a-z ]*?)\s*@\s*(.+)",
                   re.IGNORECASE)
GROUP_FORM = '"3xrtx3060@100/20Mb" (3 machines, down/up), "rtx4090@1Gb", "2x8*v100@25g" (2 machines of 8 GPUs)'
MOST_NODES = 1024

class NodeEntry(Record, frozen=True):
    """A node in a cluster file: like `Node`, but most fields have defaults."""

    device: str
    link: str | Link
    name: str = ""
    count: int = 1
    ranks: int = 1
    intra: str = "pcie3"
    intra_bps: float = 0.0
    intra_alpha_s: float = 0.0
    speed: float = 0.0
    """Compute speed relative to a V100; 0: the table's value for the device."""
    server: bool = True


class ClusterFile(Record, frozen=True):
    node: tuple[NodeEntry, ...]
    reachable: bool = True


def parse_cluster(text: str, what: str, *, toml: bool) -> Cluster:
    """Parses a cluster from TOML or JSON. Raises the first problem as a one-line error."""
    data = _read(text, what, toml)
    if isinstance(data, dict) and "nodes" in data:
        cluster = _convert(data, Cluster, what)
    else:
        written = _convert(data, ClusterFile, what)
        cluster = Cluster(tuple(n for i, w in enumerate(written.node) for n in _nodes(w, i, what)), written.reachable)
    _raise_first(cluster_problems(cluster), what)
    return cluster


def parse_profile(text: str, what: str, *, toml: bool) -> Profile:
    profile = _convert(_read(text, what, toml), Profile, what)
    learning = (f"profile {profile.source!r}: learning: {wrong}" for row in profile.learning if (wrong := row_problem(row)))
    _raise_first([*profile_problems(profile), *learning], what)
    return profile


def parse_nodes(text: str, *, first: int = 0, what: str = "nodes") -> tuple[Node, ...]:
    """Parses a comma-separated list of nodes; `what` names the text in errors.

    >>> [(n.name, n.link.up_bps) for n in parse_nodes("2xrtx3060@100/20Mb, RTX 4090 @ 1 Gbit/s")]
    [('rtx3060-0', 20000000.0), ('rtx3060-1', 20000000.0), ('rtx4090-2', 1000000000.0)]
    """
    nodes: list[Node] = []
    for group in filter(None, (part.strip() for part in text.split(","))):
        match = GROUP.fullmatch(group)
        if match is None:
            raise InvalidInput("E-PLAN-INPUT", f"{what}: got {group!r}, allowed: {GROUP_FORM}")
        count, ranks = int(match[1] or 1), int(match[2] or 1)
        if not (1 <= count <= MOST_NODES - len(nodes) and 1 <= ranks <= MOST_NODES):
            raise InvalidInput("E-PLAN-INPUT",
                               f"{what}: got {group!r}, allowed: 1 to {MOST_NODES} machines, and as many GPUs in each")
        device, link = tables.gpu_named(match[3]), parse_link(match[4], what)
        place = first + len(nodes)
        nodes += [tables.node(f"{device}-{place + i}", device, link, ranks=ranks) for i in range(count)]
    if not nodes:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: got {text!r}, allowed: {GROUP_FORM}")
    return tuple(nodes)


def cluster_from_line(text: str) -> Cluster:
    """Parses a cluster from a comma-separated list of nodes. Nodes can reach each other if all links are rack links ("10g")."""
    nodes = parse_nodes(text)
    return Cluster(nodes, all(node.link.alpha_s <= tables.links().rack_alpha_s for node in nodes))


def cluster_of_homes(text: str, server: str) -> Cluster:
    """A cluster of machines behind NAT, which accept no connections, and a rented server that all machines connect to. The
    server sums and does not train; `server` is its link.

    >>> [(n.name, n.ranks, n.server) for n in cluster_of_homes("2xrtx3060@100/20Mb", "1Gb").nodes]
    [('server', 0, True), ('home-0', 1, False), ('home-1', 1, False)]
    """
    homes = (structs.replace(node, name=f"home-{i}", server=False)
             for i, node in enumerate(parse_nodes(text, what="homes")))
    return Cluster((tables.node("server", "cpu", parse_link(server, "server"), ranks=0), *homes), reachable=False)


def parse_rate(text: str) -> float:
    """
    >>> parse_rate("20Mb"), parse_rate("1 Gbit/s")
    (20000000.0, 1000000000.0)
    """
    match = _rate_match(text.strip(), "rate")
    if match is None or match[4] or not match[2]:
        raise InvalidInput("E-PLAN-INPUT", f'rate: got {text!r}, allowed: a number with its unit, such as "20Mb" or "1Gb"')
    return _bps(match[1], match[2])


def parse_link(text: str, what: str) -> Link:
    """Parses a link: rates down/up, one rate for both directions, or the tables' name of a link.

    >>> [parse_link(text, "").down_bps / 1e6 for text in ("100/20", "100/20Mbps", "1Gb", "1 Gb/50 Mb", "10g")]
    [100.0, 100.0, 1000.0, 1000.0, 10000.0]
    """
    text = text.strip()
    match = _rate_match(text, what)
    if match is None or not (match[4] or match[2]):
        try:
            return tables.link(text)
        except InvalidInput:
            raise InvalidInput("E-LINK-NAME", f"{what}: link {text!r}, allowed: {LINK_FORM}") from None
    if match[4] and match[2] and not match[5]:
        raise InvalidInput("E-LINK-NAME", f"{what}: link {text!r} has no unit after the second rate, allowed: {LINK_FORM}")
    down, up, unit = match[1], match[4], match[5] or "m"
    down_bps = _bps(down, match[2] or unit)
    up_bps = _bps(up, unit) if up else down_bps
    if not min(down_bps, up_bps) > 0:
        raise InvalidInput("E-LINK-NAME", f"{what}: link {text!r}: rates must be above 0")
    links = tables.links()
    return Link(up_bps, down_bps, links.home_alpha_s if up else links.fiber_alpha_s)


def _bps(number: str, unit: str) -> float:
    return float(number) * {"k": 1e3, "m": 1e6, "g": 1e9}[unit.lower()]


def _rate_match(text: str, what: str) -> re.Match[str] | None:
    """Matches a rate, or two. Refuses bytes: "100MB" often means 100 Mb/s."""
    match = RATE.fullmatch(text)
    if match is not None and any(b == "B" or "y" in b.lower() for b in (match[3], match[6]) if b):
        numbers, scale = [each for each in (match[1], match[4]) if each], (match[5] or match[2]).upper()
        bits, same = "/".join(f"{8 * float(each):g}" for each in numbers), "/".join(numbers)
        raise InvalidInput("E-LINK-NAME", f'{what}: {text!r} is in bytes: write "{bits}{scale}b" in bits, or "{same}{scale}b" '
                                          "if bits were meant")
    return match


def _nodes(written: NodeEntry, place: int, what: str) -> Iterator[Node]:
    name = written.name or f"{written.device}-{place}"
    if written.count < 1:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: node {name}: count is {written.count}, allowed: 1 or more")
    try:
        node = tables.node(name, written.device, written.link, ranks=written.ranks, intra=written.intra, server=written.server,
                           relative_speed=written.speed)
    except ValueError as error:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: node {name}: {error}") from None
    node = structs.replace(node, intra_bps=written.intra_bps or node.intra_bps,
                           intra_alpha_s=written.intra_alpha_s or node.intra_alpha_s)
    for i in range(written.count):
        yield structs.replace(node, name=f"{name}-{i}") if written.count > 1 else node


def _read(text: str, what: str, toml: bool) -> Any:
    try:
        return tomllib.loads(text) if toml else msgspec.json.decode(text)
    except (tomllib.TOMLDecodeError, msgspec.MsgspecError) as error:
        raise RecordError("E-PLAN-INPUT", f"{what}: {error}") from None


def _convert(data: Any, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(data, complete(kind))
    except msgspec.MsgspecError as error:
        raise RecordError("E-PLAN-INPUT", f"{what}: {error}") from None


def _raise_first(problems: Iterable[str], what: str) -> None:
    for problem in problems:
        raise InvalidInput("E-PLAN-INPUT", f"{what}: {problem}")

"""Enumerates a cluster's options: paths that its shape and the policy allow, with codecs, by node and in each direction.

Bucket sizes are known here only as a range. A path that another one beats over the whole range is dropped. The codecs that
send most and least decide this, so that hundreds of two-level paths are priced for two codecs instead of for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from statistics import median

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner import tree
from commlayer.planner.costs import Prices, WalkedOp, bare, plus
from commlayer.planner.model import DENSE, Cluster, Line, Option, Policy, Profile
from commlayer.planner.tree import ALIASES, CODING, Op, Path, Promise, fits, on_gpus, parse, promise_of, spell

SIZES = (1 << 8, 1 << 25)
"""Elements of the smallest and largest buckets."""
SLOW = 0.6
"""A node with an uplink below this part of the median may use a codec that sends less."""


def options(prices: Prices, policy: Policy) -> list[Option]:
    """All options worth trying; dense ones first."""
    cluster, profile = prices.cluster, prices.profile
    promises = {cost.codec: promise_of(cost) for cost in profile.codecs}
    sent = {cost.codec: cost.nbytes.slope_s for cost in profile.codecs}
    result = [Option(path) for path in _dense(prices)]
    if not result:
        raise InvalidInput("E-PLAN-CODEC-COST",
                           f"profile {profile.source!r} has no cost of {DENSE}: over servers alone, nothing could go as it is")
    alike: dict[tuple[Promise, tuple[str, ...]], list[str]] = {}
    for name in sorted(allowed_codecs(profile, policy), key=lambda name: (sent[name], name)):
        if name != DENSE:
            alike.setdefault((promises[name], _priced_on(prices, name)), []).append(name)
    for (promise, priced), coded in alike.items():
        devices = [device for device in policy.devices if device in priced]
        for kinds in (_kinds(cluster), ("sum",)):
            paths = [path for path in tree.options(cluster, devices=devices, max_encodes=policy.max_encodes,
                                                      sums=promise.sums, kinds=kinds, dense=False, servers="cpu" in priced)
                     if fits(path, [promise], gpus=on_gpus(cluster) and not policy.whole_tree)]
            judges = (coded[0], coded[-1])
            kept = dict.fromkeys(path for judge in judges for path in unbeaten(prices, paths, judge, *SIZES))
            if all(node.device != "cpu" for node in cluster.nodes if node.ranks):
                kept |= dict.fromkeys(path for judge in judges for path in mixed(prices, tuple(kept), judge, devices))
            result += [Option(_name(path, cluster), name) for path in kept for name in coded]
            result += _uneven(cluster, coded, promise, [path for path in kept if tree.served(path)])
    return result


def _priced_on(prices: Prices, codec: str) -> tuple[str, ...]:
    """Devices on which every node could use the codec, according to the profile. Servers encode on CPUs."""
    priced = {cost.device for cost in prices.profile.codecs if cost.codec == codec}
    gpus = {node.device for node in prices.cluster.nodes if node.ranks and node.device != "cpu"}
    on_gpus = ("gpu",) if "gpu" in priced or gpus <= priced else ()
    return (*on_gpus, *(("cpu",) if "cpu" in priced else ()))


def _dense(prices: Prices) -> Iterator[str]:
    """Dense paths: collectives, and servers with the identity codec if it is priced."""
    cluster = prices.cluster
    plain = tree.options(cluster, max_encodes=0, kinds=_kinds(cluster))
    yield from (_name(path, cluster) for path in unbeaten(prices, plain, DENSE, *SIZES))
    if any(cost.codec == DENSE for cost in prices.profile.codecs):
        served = tree.options(cluster, devices=("cpu",), max_encodes=1, kinds=("service",), dense=False)
        yield from (_name(path, cluster) for path in unbeaten(prices, served, DENSE, *SIZES))


def _kinds(cluster: Cluster) -> tuple[tree.Kind, ...]:
    """Kinds of paths. Two-level paths, of which there are many, only if a node has several ranks."""
    return ("flat", "two-level", "service") if max(n.ranks for n in cluster.nodes) > 1 else ("flat", "service")


def _uneven(cluster: Cluster, coded: Sequence[str], promise: Promise, served: Sequence[Path]) -> Iterator[Option]:
    """Options that only a server allows: less data from slow nodes, or different codecs of one family for upload and
    download."""
    if not promise.alone:
        return
    workers = [node for node in cluster.nodes if node.ranks]
    slow = [node.link.up_bps < SLOW * median(n.link.up_bps for n in workers) for node in workers]
    families: dict[str, list[str]] = {}
    for name in coded:
        families.setdefault(parse_spec(name).family, []).append(name)
    for path in served:
        text = _name(path, cluster)
        for less, more in (pair for family in families.values() for pair in pairwise(family)):
            if any(slow) and not all(slow) and parse_spec(less).without_ratio() == parse_spec(more).without_ratio():
                yield Option(text, more, by_node=tuple(less if late else more for late in slow))
            if any(op.name == "pull" for op in path) and fits(path, [promise], down=promise):
                yield Option(text, more, down=less)
                yield Option(text, less, down=more)


def _name(path: Path, cluster: Cluster) -> str:
    """The short name of a path if it has one, else its spelling."""
    widest = max(node.ranks for node in cluster.nodes)
    return next((alias for alias in ALIASES if parse(alias, widest) == path), spell(path))


def allowed_codecs(profile: Profile, policy: Policy) -> list[str]:
    """The profile's codecs that the policy allows, as the profile spells them."""
    known = {bare(cost.codec): cost.codec for cost in profile.codecs}
    # Collectives need no price for floats.
    unknown = sorted(codec for codec in policy.codecs if bare(codec) not in {*known, bare(DENSE)})
    if unknown:
        raise InvalidInput("E-PLAN-CODEC-COST",
                           f"policy: codecs has {unknown[0]}, which profile {profile.source!r} does not price; "
                           f"it has: {', '.join(sorted(known.values()))}")
    allowed = {bare(codec) for codec in policy.codecs} or {*known}
    return sorted(text for name, text in known.items() if name in allowed)


MIXED_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
STARTS = 3
WORTH = 0.05
"""Paths that win less than this by every criterion are dropped: more options can also mislead a search."""
OTHER = {"gpu": "cpu", "cpu": "gpu"}


def mixed(prices: Prices, paths: Sequence[Path], codec: str, devices: Sequence[str]) -> tuple[Path, ...]:
    """Paths like these with coding on several devices, each the best by some criterion. Servers are excluded, since their
    payloads are coded on one device."""
    collective = [path for path in paths if not tree.served(path)]
    winners: dict[Path, None] = {}
    for size in MIXED_SIZES if len(devices) > 1 and collective else ():
        known: dict[Path, list[float]] = {}

        def respects(path: Path, size: int = size, known: dict[Path, list[float]] = known) -> list[float]:
            if path not in known:
                known[path] = _respects(prices, path, codec, size)
            return known[path]

        for respect in range(len(respects(collective[0]))):
            starts = sorted(collective, key=lambda path: respects(path)[respect])[:STARTS]
            least = respects(starts[0])[respect] * (1 - WORTH)
            for best in starts:
                while respects(better := min(_moved(best), key=lambda path: respects(path)[respect]))[respect] \
                        < respects(best)[respect]:
                    best = better
                if respects(best)[respect] < least:
                    winners[best] = None
    return tuple(path for path in winners if not tree.one_device(path))


def _moved(path: Path) -> Iterator[Path]:
    """The path with one or two coding steps on the other device."""
    codings = [place for place, op in enumerate(path) if op.name in CODING]
    for count in (1, 2):
        for moved in combinations(codings, count):
            yield tuple(Op(op.name, OTHER[op.where]) if place in moved else op for place, op in enumerate(path))


def _respects(prices: Prices, path: Path, codec: str, size: int) -> list[float]:
    """Criteria: time alone; the busiest lane; both; coding spread over devices; time alone plus load on GPUs."""
    steps = prices.steps(path, codec)
    lanes, alone = lane_s(steps, size), alone_s(steps, size)
    busiest = max(lanes.values(), default=0.0)
    coding = [seconds for lane, seconds in lanes.items() if lane.partition(":")[0] in ("compute", "cpu")]
    gpus = max((seconds for lane, seconds in lanes.items() if lane.startswith("compute")), default=0.0)
    return [alone, busiest, alone + busiest, max(coding, default=0.0), alone + gpus]


def unbeaten(
    prices: Prices, paths: Sequence[Path], codec: str, smallest: int, largest: int, *, server: int = 0, down: str = "",
) -> tuple[Path, ...]:
    """The paths that may be best for some bucket of smallest to largest elements, in their order."""
    weighed = [_weights(prices.steps(path, codec, server, down=down), (smallest, largest)) for path in paths]
    # Cheap paths first: they beat most others. The first of equal paths stays.
    order = sorted(range(len(paths)), key=lambda i: (sum(weighed[i].values()), i))
    kept: list[int] = []
    for i in order:
        if not any(_beats(weighed[j], weighed[i]) for j in kept):
            kept.append(i)
    return tuple(paths[i] for i in sorted(kept))


Weights = dict[tuple[str, int], float]
"""Seconds at each size: of each lane, and of the path alone (lane "")."""


def _beats(a: Weights, b: Weights) -> bool:
    return all(seconds <= b.get(key, 0.0) for key, seconds in a.items())


def _lanes(steps: Sequence[WalkedOp]) -> dict[str, Line]:
    lanes: dict[str, Line] = {}
    for step in steps:
        for lane, line in step.lanes:
            lanes[lane] = plus(lanes[lane], line) if lane in lanes else line
    return lanes


def lane_s(steps: Sequence[WalkedOp], numel: int) -> dict[str, float]:
    """Seconds that the path occupies each lane."""
    return {lane: line(numel) for lane, line in _lanes(steps).items()}


def _weights(steps: Sequence[WalkedOp], sizes: Sequence[int]) -> Weights:
    lanes = _lanes(steps)
    weights = {(lane, size): line(size) for size in sizes for lane, line in lanes.items()}
    for size in sizes:
        weights["", size] = alone_s(steps, size)
    return weights


def alone_s(steps: Sequence[WalkedOp], numel: int) -> float:
    """Seconds of the path on idle lanes, where steps wait for each other only on shared lanes."""
    ends: list[float] = []
    free: dict[str, float] = {}
    for step in steps:
        start = max([0.0, *(ends[i] for i in step.after), *(free.get(lane, 0.0) for lane, _ in step.lanes)])
        longest = 0.0
        for lane, line in step.lanes:
            seconds = line(numel)
            free[lane] = start + seconds
            longest = max(longest, seconds)
        ends.append(start + longest + step.latency(numel))
    return max(ends, default=0.0)

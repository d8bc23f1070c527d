"""Enumerates a cluster's options: paths that its shape and the policy allow, with codecs, by node and in each direction.

Bucket sizes are known here only as a range. A path that another one beats over the whole range is dropped. The codecs that
send most and least decide this, so that hundreds of two-level paths are priced for two codecs instead of for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner.model import grammar
from commlayer.planner.model.cluster import Cluster, Policy, Profile
from commlayer.planner.model.codec_fit import Promise, fits, on_gpus, promise_of
from commlayer.planner.model.option import DENSE, Option
from commlayer.planner.model.paths import ALIASES, Path, parse, spell
from commlayer.planner.pricing.path_cost import Prices, bare
from commlayer.planner.search.mixing import mixed
from commlayer.planner.search.prune import unbeaten

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
            paths = [path for path in grammar.options(cluster, devices=devices, max_encodes=policy.max_encodes,
                                                      sums=promise.sums, kinds=kinds, dense=False, servers="cpu" in priced)
                     if fits(path, [promise], gpus=on_gpus(cluster) and not policy.whole_tree)]
            judges = (coded[0], coded[-1])
            kept = dict.fromkeys(path for judge in judges for path in unbeaten(prices, paths, judge, *SIZES))
            if all(node.device != "cpu" for node in cluster.nodes if node.ranks):
                kept |= dict.fromkeys(path for judge in judges for path in mixed(prices, tuple(kept), judge, devices))
            result += [Option(_name(path, cluster), name) for path in kept for name in coded]
            result += _uneven(cluster, coded, promise, [path for path in kept if grammar.served(path)])
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
    plain = grammar.options(cluster, max_encodes=0, kinds=_kinds(cluster))
    yield from (_name(path, cluster) for path in unbeaten(prices, plain, DENSE, *SIZES))
    if any(cost.codec == DENSE for cost in prices.profile.codecs):
        served = grammar.options(cluster, devices=("cpu",), max_encodes=1, kinds=("service",), dense=False)
        yield from (_name(path, cluster) for path in unbeaten(prices, served, DENSE, *SIZES))


def _kinds(cluster: Cluster) -> tuple[grammar.Kind, ...]:
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

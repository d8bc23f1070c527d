"""Rules about which codecs may be used on which paths.

This module alone defines them. The planner offers only combinations that fit, and a worker refuses a plan that breaks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from commlayer.planner.model import grammar
from commlayer.planner.model.cluster import Cluster, CodecCost
from commlayer.planner.model.paths import Path


class Promise(NamedTuple):
    """What may be done with a codec's payloads."""

    sums: bool
    """An all-reduce may add them."""
    alone: bool
    """A payload can be decoded on its own and added to a dense sum."""
    answers: bool
    """A server may encode its sums with it, whatever the workers' codec is."""


def promise_of(cost: CodecCost) -> Promise:
    return Promise(cost.sums, cost.alone, cost.answers)


def misfits(
    path: Path, up: Iterable[Promise], *, down: Promise | None = None, by_node: bool = False, gpus: bool = False,
) -> Iterator[str]:
    """Reasons why these codecs cannot be used on this path, a line each. `gpus`: some worker's gradients are on a GPU."""
    if not grammar.encodes(path):
        return
    ups = list(up)
    if grammar.served(path):
        forwards = any(op.name == "forward" for op in path)
        if (forwards or down is not None) and not all(codec.alone for codec in ups):
            yield "a server sends the sum otherwise than it came, allowed are codecs of one round that sum in dense float32"
        if down is not None and not down.answers:
            yield "`down` is coded from a dense sum, allowed is a codec of one round that sums in dense float32"
        return
    if down is not None or by_node:
        yield "`down` and `by_node` are for path 'service'; here all payloads of a bucket have one codec"
    elif grammar.summing(path) and not all(codec.sums for codec in ups):
        yield "payloads go through an all-reduce, allowed are codecs whose payloads add up, such as identity()"
    elif not grammar.summing(path) and not all(codec.alone for codec in ups):
        yield ("every rank adds payloads to a dense sum, allowed are codecs of one round that need no server; "
               "put this one on path 'service', or one whose payloads add up on 'encode@cpu all.allreduce decode@cpu'")
    if gpus and grammar.summing(path):
        yield "payloads are added up in host memory alone: for a model on GPUs take a path without an all-reduce of payloads"


def fits(
    path: Path, up: Iterable[Promise], *, down: Promise | None = None, by_node: bool = False, gpus: bool = False,
) -> bool:
    return next(misfits(path, up, down=down, by_node=by_node, gpus=gpus), None) is None


def on_gpus(cluster: Cluster) -> bool:
    """Whether some worker's gradients are on a GPU."""
    return any(node.device != "cpu" for node in cluster.nodes if node.ranks)

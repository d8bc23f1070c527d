"""Nodes, the pairs that are measured, in which turns, and what is judged of their links. Knows no socket and no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commlayer.doctor.finding import Finding, fail, ok, warn
from commlayer.doctor.server_checks import rate
from commlayer.records import Record


class Node(Record, frozen=True):
    """What a node says of itself."""

    host: str
    address: str


class Pair(Record, frozen=True):
    """From node `a`, which measured, to node `b`. `error`: why not."""

    a: int
    b: int
    up_bps: float = 0.0
    down_bps: float = 0.0
    round_trip_s: float = 0.0
    error: str = ""


def turns(nodes: int) -> list[list[tuple[int, int]]]:
    """Every pair once, as few rounds as can be, each node in one pair of a round at most.

    >>> turns(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> [len(one) for one in turns(5)]
    [2, 2, 2, 2, 2]
    """
    seats = nodes + nodes % 2
    ring = [*range(1, seats)]
    rounds = []
    for shift in range(seats - 1):
        row = [0, *ring[len(ring) - shift :], *ring[: len(ring) - shift]]
        pairs = [tuple(sorted((row[i], row[seats - 1 - i]))) for i in range(seats // 2)]
        rounds.append(sorted((a, b) for a, b in pairs if b < nodes))
    return rounds


def slowest(pairs: Sequence[Pair]) -> Pair:
    """Of those that were measured."""
    return min((pair for pair in pairs if not pair.error), key=lambda pair: min(pair.up_bps, pair.down_bps))


UNEVEN = 4.0
"""So many times slower than the median, a link sets the pace of collectives alone."""


def links(nodes: Sequence[Node], pairs: Sequence[Pair]) -> Iterator[Finding]:
    names = [f"{number} ({node.host})" for number, node in enumerate(nodes)]
    for pair in (pair for pair in pairs if pair.error):
        yield fail("nodes", f"node {names[pair.a]} to node {names[pair.b]} at {nodes[pair.b].address}: {pair.error}",
                   "open ports between them, or have both join one server: commlayer serve, --join")
    good = [pair for pair in pairs if not pair.error]
    if not good:
        return
    rates = sorted(min(pair.up_bps, pair.down_bps) for pair in good)
    slow, median = slowest(good), rates[len(rates) // 2]
    count = "1 link" if len(good) == 1 else f"{len(good)} links"
    seen = f"{count}, slowest {rate(rates[0])} between node {names[slow.a]} and node {names[slow.b]}"
    if len(good) > 2 and rates[0] * UNEVEN < median:
        yield warn("nodes", f"{seen}, the median {rate(median)}", "look at that link, or plan for it: commlayer plan make")
    else:
        yield ok("nodes", seen)

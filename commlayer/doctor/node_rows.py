"""Nodes, the pairs of them that are measured, and in which turns. Knows no socket and no torch."""

from __future__ import annotations

from collections.abc import Sequence

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

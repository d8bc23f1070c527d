"""Cost of collectives: messages in sequence, and bytes through the slowest member.

For n members that each hold s bytes before, at alpha seconds per message and B bytes per second in each direction:

    allreduce        2(n-1) alpha + 2(n-1)/n s/B     ring
    reduce_scatter    (n-1) alpha +  (n-1)/n s/B     ring
    allgather         (n-1) alpha +  (n-1)   s/B     ring; as the second half of a pair, s is one shard
    alltoall          (n-1) alpha +  (n-1)/n s/B     pairwise
    reduce, broadcast  lg n alpha +          s/B     pipelined tree
    gather             lg n alpha +  (n-1)   s/B     all of it enters the root
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Moves(NamedTuple):
    """One collective among n members: messages in sequence, and how often a member's bytes pass its link."""

    messages: float
    passes: float


def _rounds(n: int) -> int:
    """lg n, rounded up."""
    return (n - 1).bit_length()


MOVES: Mapping[str, Callable[[int], Moves]] = {
    "allreduce": lambda n: Moves(2 * (n - 1), 2 * (n - 1) / n),
    "reduce_scatter": lambda n: Moves(n - 1, (n - 1) / n),
    "allgather": lambda n: Moves(n - 1, n - 1),
    "alltoall": lambda n: Moves(n - 1, (n - 1) / n),
    "reduce": lambda n: Moves(_rounds(n), min(n - 1, 1)),
    "broadcast": lambda n: Moves(_rounds(n), min(n - 1, 1)),
    "gather": lambda n: Moves(_rounds(n), n - 1),
}


def moves(name: str, n: int) -> Moves:
    return MOVES[name](n)


def crossing(name: str, n: int, per_node: int) -> float:
    """How often the bytes of one rank pass the link of the busiest node, in a collective over all n ranks.

    A ring visits node after node, so it crosses each link once per pass, for any number of ranks per node. A pairwise
    exchange sends from every rank of the node to every rank outside. In a gather, ranks on the root's own node do not cross
    its link.
    """
    outside = n - per_node
    if outside <= 0:
        return 0.0
    if name == "alltoall":
        return per_node * outside / n
    if name == "gather":
        return float(outside)
    return moves(name, n).passes

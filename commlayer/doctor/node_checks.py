"""Judges the links between nodes: a pure function over node_links' rows. Knows no socket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from commlayer.doctor.finding import Finding, fail, ok, warn
from commlayer.doctor.node_rows import Node, Pair, slowest
from commlayer.doctor.server_checks import rate

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

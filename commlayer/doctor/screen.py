"""Prints the doctor's findings, and the table of links between nodes."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from commlayer.doctor.finding import Finding
from commlayer.doctor.node_checks import Node, Pair

COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}
CHECK = 10
"""Column width of a check's name."""
INDENT = 5 + CHECK
MENDS = "-> "
WIDEST = 120
HOST = 14


def lines(found: Finding, width: int) -> list[str]:
    """A finding as lines: what was seen after verdict and check, and the remedy below.

    >>> for line in lines(Finding("dns", "fail", "master node-7 does not resolve", "check its spelling"), 60): print(line)
    fail dns       master node-7 does not resolve
                   -> check its spelling
    """
    room = max(20, min(width, WIDEST) - INDENT)
    wrapped = textwrap.wrap(found.seen, room, break_long_words=True, break_on_hyphens=False) or [""]
    rows = [f"{found.verdict:5}{found.check:{CHECK}}{wrapped[0]}", *(" " * INDENT + line for line in wrapped[1:])]
    if found.remedy:
        rest = textwrap.wrap(found.remedy, room - len(MENDS), break_long_words=True, break_on_hyphens=False)
        rows += [" " * INDENT + (MENDS if i == 0 else " " * len(MENDS)) + line for i, line in enumerate(rest)]
    return rows


def show(console: Console, found: Finding) -> None:
    first, *rest = lines(found, console.width)
    text = Text(first)
    text.stylize(COLOURS[found.verdict], 0, len(found.verdict))
    console.print(text, soft_wrap=True)
    for line in rest:
        console.print(Text(line), soft_wrap=True)


def summary(findings: Iterable[Finding]) -> str:
    """
    >>> summary([Finding("a", "ok", ""), Finding("b", "warn", ""), Finding("c", "warn", "")])
    'usable: 1 ok, 2 to look at'
    """
    counts = Counter(found.verdict for found in findings)
    parts = [f"{counts['ok']} ok"] + ([f"{counts['warn']} to look at"] if counts["warn"] else [])
    if counts["fail"]:
        return ", ".join([f"not usable: {counts['fail']} to mend", *parts[1:], parts[0]])
    return ", ".join([f"usable: {parts[0]}", *parts[1:]])


def table(nodes: Sequence[Node], pairs: Sequence[Pair]) -> list[str]:
    """Rates in Mb/s from the node of each row to the node of each column, then the longest round trip."""
    flow: dict[tuple[int, int], str] = {}
    for pair in pairs:
        flow[pair.a, pair.b] = "-" if pair.error else _mbps(pair.up_bps)
        flow[pair.b, pair.a] = "-" if pair.error else _mbps(pair.down_bps)
    wide = max(5, *(len(one) for one in flow.values())) + 1
    head = f"{'Mb/s from, to':{HOST + 3}}" + "".join(f"{i:>{wide}}" for i in range(len(nodes)))
    rows = [head]
    for i, node in enumerate(nodes):
        cells = "".join(f"{flow.get((i, j), ''):>{wide}}" for j in range(len(nodes)))
        rows.append(f"{i:>2} {node.host[:HOST]:{HOST}}{cells}")
    far = max((pair for pair in pairs if not pair.error), key=lambda p: p.round_trip_s, default=None)
    if far is not None:
        rows.append(f"farthest: {far.a} and {far.b}, {1e3 * far.round_trip_s:.3g} ms there and back")
    return rows


def _mbps(bps: float) -> str:
    """
    >>> _mbps(1.2345e9), _mbps(94.23e6), _mbps(3e5)
    ('1234', '94.2', '0.3')
    """
    return f"{bps / 1e6:.0f}" if bps >= 1e8 else f"{bps / 1e6:.3g}"

"""All ranks measure the links between them and tell each other. Knows a connection's servers and groups; plans nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from commlayer.connect import Connection
from commlayer.planner.model import Link
from commlayer.runtime import probe
from commlayer.transport.groups import Groups


class Measured(NamedTuple):
    """What one rank measured."""

    compute_s: float
    step_s: float
    up_bps: float
    down_bps: float
    alpha_s: float


def homes_of(made: Connection) -> list[int]:
    """The node of each server."""
    assert made.uplink is not None
    return [s.node for s in made.uplink.view.servers]


Ways = tuple[float, float, float]
"""(bit/s up, bit/s down, seconds to the core of the network)."""


def probed(made: Connection, budget_s: float) -> Ways:
    """Of this node's link; all ranks call it together.

    With a server on every node, each asks the next one's: all at once, and nobody measures another's transfers. Else the nodes'
    first ranks ask the first server in turn.
    """
    groups, homes = _groups(made), homes_of(made)
    nodes = groups.world // groups.ranks_per_node
    found: Ways = (0.0, 0.0, 0.0)
    if set(homes) == set(range(nodes)):
        if groups.local == 0:
            found = _ask(made, homes.index((groups.node + 1) % nodes), budget_s, groups.barrier)
        else:
            groups.barrier()
        groups.barrier()
        return found
    for node in range(nodes):
        if (groups.node, groups.local) == (node, 0) and homes:
            found = _ask(made, 0, budget_s / nodes)
        groups.barrier()
    return found


def _ask(made: Connection, server: int, budget_s: float, between: Callable[[], None] = lambda: None) -> Ways:
    assert made.uplink is not None
    link = probe.link(functools.partial(made.uplink.probe, server), budget_s, between)
    return link.up_bps, link.down_bps, link.alpha_s


def gathered(made: Connection, row: Measured) -> list[Measured]:
    """Of all ranks."""
    groups = _groups(made)
    rows = groups.gather_all(torch.tensor(row, dtype=torch.float64, device=groups.device)).tolist()
    return [Measured(*r) for r in rows]


def links_of(made: Connection, rows: Sequence[Measured]) -> list[Link]:
    """By node. Where all have probed one server, that one's node saw no network: it gets the best of the others'."""
    homes = homes_of(made)
    found = [Link(r.up_bps, r.down_bps, r.alpha_s) for r in rows[:: _groups(made).ranks_per_node]]
    if set(homes) == set(range(len(found))):
        return found
    others = [link for number, link in enumerate(found) if number != homes[0]]
    best = Link(max(o.up_bps for o in others), max(o.down_bps for o in others), min(o.alpha_s for o in others))
    return [best if number == homes[0] else link for number, link in enumerate(found)]


def _groups(made: Connection) -> Groups:
    assert made.groups is not None
    return made.groups

"""All ranks measure the links between them and tell each other. Knows a connection's servers and groups; plans nothing."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Of this node's link; all ranks call it together: the nodes' first ranks measure in turn, so none measures another's.

    A node asks the servers of the others; zeros, where there are none.
    """
    groups = _groups(made)
    assert made.uplink is not None
    found: Ways = (0.0, 0.0, 0.0)
    nodes = groups.world // groups.ranks_per_node
    away = [server.id for server in made.uplink.view.servers if server.node != groups.node]
    for node in range(nodes):
        if (groups.node, groups.local) == (node, 0) and away:
            mine_s = budget_s / nodes
            link = probe.link(probe.Asking(made.uplink.probe), away, mine_s, min(10 * mine_s + 10, groups.timeout_s))
            found = link.up_bps, link.down_bps, link.alpha_s
        groups.barrier()
    return found


def gathered(made: Connection, row: Measured) -> list[Measured]:
    """Of all ranks."""
    groups = _groups(made)
    rows = groups.gather_all(torch.tensor(row, dtype=torch.float64, device=groups.device)).tolist()
    return [Measured(*r) for r in rows]


def links_of(made: Connection, rows: Sequence[Measured]) -> list[Link]:
    """By node. One that hosts the only server saw no network: it gets the best of the others'."""
    firsts = rows[:: _groups(made).ranks_per_node]
    seen = [row for row in firsts if row.up_bps]
    best = Link(max(r.up_bps for r in seen), max(r.down_bps for r in seen), min(r.alpha_s for r in seen))
    return [Link(r.up_bps, r.down_bps, r.alpha_s) if r.up_bps else best for r in firsts]


def _groups(made: Connection) -> Groups:
    assert made.groups is not None
    return made.groups

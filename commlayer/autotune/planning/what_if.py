"""What would make a running job faster, as the planner predicts from the job's measured times and links. Runs in the planning
process."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from commlayer.planner.baselines import point
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.model import Cluster, Question

SLOW = 1.1
"""Uplinks that are at most this many times as fast as the slowest one count as slow."""
FASTER = 2.0


class LinkGains(NamedTuple):
    """Speeds to a loss, relative to the job as it is: see observe/events.WhatIfEvent. `homes`: those with the slowest uplinks,
    as numbers among the machines that train."""

    home_times: float
    uplink_times: float
    homes: tuple[int, ...]


def estimate_gains(question: Question) -> LinkGains:
    nodes = question.cluster.nodes
    homes = [number for number, node in enumerate(nodes) if node.ranks]
    slowest_bps = min(nodes[number].link.up_bps for number in homes)
    slow = [number for number in homes if nodes[number].link.up_bps <= SLOW * slowest_bps]
    another = structs.replace(nodes[homes[-1]], name="another home")
    sped_up = tuple(structs.replace(node, link=structs.replace(node.link, up_bps=FASTER * node.link.up_bps))
                    if number in slow else node for number, node in enumerate(nodes))
    now, more, faster = (_speed(question, structs.replace(question.cluster, nodes=each))
                         for each in (nodes, (*nodes, another), sped_up))
    return LinkGains(more / now, faster / now, tuple(map(homes.index, slow))) if now else LinkGains(0.0, 0.0, ())


def _speed(question: Question, cluster: Cluster) -> float:
    """The speed to a loss relative to the fastest machine alone, which is the same one in all these clusters; 0: unknown."""
    job, _, profile, policy = question
    planned = point("", 0.0, checked_inputs(job, cluster, profile, policy))
    return planned.alone_s / planned.to_loss_s if planned.to_loss_s else 0.0

"""Communication cost model for the balancer, from the planner's simulator."""

from __future__ import annotations

import functools
from collections.abc import Collection

from msgspec import structs

from commlayer.balance import Communication
from commlayer.planner import simulate
from commlayer.planner.model import Cluster, Node, Policy, Profile
from commlayer.records import Job, Plan


def communication(
    plan: Plan, job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None,
) -> Communication:
    """The cost for any set of the cluster's ranks; for Controller(communication=...), the same on all ranks.

    Assumes that all nodes compute for equally long, as balanced ones do. The overlap is modeled as a fraction of computing:
    exact without computing, and with the job's own times on all ranks.
    """
    assert job.timing is not None, "the job was planned for"
    timing = job.timing
    ranks = tuple(place for place, node in enumerate(cluster.nodes) for _ in range(node.ranks))

    def exposed_s(active: tuple[int, ...], part: float) -> float:
        scaled = structs.replace(job, timing=timing.scaled(part))
        line = simulate(plan, scaled, _only(cluster, [ranks[rank] for rank in active]), profile, policy)
        return line.exposed_s / plan.local_steps

    @functools.cache
    def seconds(active: tuple[int, ...]) -> float:
        return exposed_s(active, 0.0)

    everyone = tuple(range(len(ranks)))
    compute_s = timing.forward_s + timing.backward_s + timing.update_s
    hidden_s = seconds(everyone) - exposed_s(everyone, 1.0)
    return Communication(seconds, min(1.0, max(0.0, hidden_s / compute_s)) if compute_s else 0.0)


def _only(cluster: Cluster, places: Collection[int]) -> Cluster:
    """Removes the ranks of other nodes; these may still host servers."""
    def left(place: int, node: Node) -> Node:
        return structs.replace(node, ranks=sum(one == place for one in places), speed=1.0)

    return structs.replace(cluster, nodes=tuple(left(place, node) for place, node in enumerate(cluster.nodes)))

"""The options of a cluster: which paths its shape and the policy allow, with which codecs. Knows no prices and no sizes."""

from __future__ import annotations

from commlayer.planner.model import Cluster, Policy, Profile
from commlayer.planner.ways import DENSE, Option, allowed_codecs


def options(cluster: Cluster, profile: Profile, policy: Policy) -> list[Option]:
    codecs = allowed_codecs(profile, policy)
    sums = {c.codec for c in profile.codecs if c.sums}
    made = []
    if cluster.reachable or sum(1 for n in cluster.nodes if n.ranks) == 1:
        made.append(Option("allreduce"))
    if any(n.server for n in cluster.nodes) :
        made.append(Option("service"))
    gpu = all(n.device != "cpu" for n in cluster.nodes if n.ranks) and "gpu" in policy.devices
    for c in codecs:
        if c == DENSE: continue
        for d in ("gpu", "cpu"):
            if d == "gpu" and not gpu: continue
            if cluster.reachable:
                if c in sums: made.append(Option(f"encode@{d} all.allreduce decode@{d}", c))
                made.append(Option(f"encode@{d} all.allgather decode@{d}", c))
                made.append(Option(f"encode@{d} all.alltoall decode@{d} encode@{d} all.allgather decode@{d}", c))
            made.append(Option(f"encode@{d} net.push net.pull decode@{d}" if d == "gpu" else "service", c))
            made.append(Option(f"encode@{d} net.push net.forward decode@{d}", c))
    return made

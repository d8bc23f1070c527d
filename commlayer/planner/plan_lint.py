"""Implements `lint`: lists all problems of a plan, each with its bucket and the violated rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from commlayer.codec_spec import CodecSpec, spec_error
from commlayer.planner import tree
from commlayer.planner.data.tables import learning_rows
from commlayer.planner.inputs import cluster_problems, job_problems, profile_problems
from commlayer.planner.model import DENSE, Cluster, Profile, bare
from commlayer.planner.plan_rules import bucket_codecs, late_and_sparse, verify, verify_alone
from commlayer.planner.simulation import server_hosts
from commlayer.planner.tensors import is_buffer, uncompressed_notices
from commlayer.planner.tree import Promise, find_misfits, on_gpus, parse, promise_from_cost
from commlayer.records import SCHEMA, Bucket, Job, Plan

ANY = Promise(sums=True, alone=True, answers=True)
"""Properties assumed for codecs without a known cost."""


def lint(
    plan: Plan, job: Job | None = None, cluster: Cluster | None = None, profile: Profile | None = None,
    codec_problem: Callable[[str], str] | None = None,
) -> list[str]:
    """All problems of a plan, one line each. `codec_problem` describes what is wrong with a codec's spelling, or returns an
    empty string."""
    problems = verify_alone(plan) if job is None else verify(plan, job)
    if plan.schema != SCHEMA:
        return problems
    problems += [] if job is None or job.timing is None else list(job_problems(job))
    problems += [] if cluster is None else [*cluster_problems(cluster), *_host_problems(plan, cluster)]
    problems += [] if profile is None else profile_problems(profile)
    problems += uncompressed_notices(plan, job)
    problems += late_and_sparse(plan, learning_rows() if profile is None else profile.learning)
    for bucket in plan.buckets:
        lines = _bucket_problems(plan, bucket, job, cluster, profile, codec_problem)
        problems += [f"bucket {bucket.id}: {line}" for line in lines]
    return list(dict.fromkeys(problems))  # verify also reports a path that is not in the tree


def _bucket_problems(
    plan: Plan, bucket: Bucket, job: Job | None, cluster: Cluster | None, profile: Profile | None,
    codec_problem: Callable[[str], str] | None,
) -> Iterator[str]:
    codecs = bucket_codecs(bucket)
    wrong = [spelling_error for codec in codecs
             if (spelling_error := spec_error(codec) or (codec_problem(codec) if codec_problem else ""))]
    yield from wrong
    known = {bare(cost.codec): cost for cost in profile.codecs} if profile else {}
    if profile is not None:
        yield from (f"codec {c!r} has no cost in profile {profile.source!r}" for c in codecs if _bare(c) not in known)
    try:
        path = parse(bucket.path, plan.ranks_per_node)
    except ValueError as error:
        yield str(error)
        return
    yield from (f"path {bucket.path!r}: {line}" for line in tree.path_problems(path, cluster))
    promises = {name: promise_from_cost(cost) for name, cost in known.items()}
    up = [promises.get(_bare(codec), ANY) for codec in (bucket.codec, *bucket.by_node)]
    down = promises.get(_bare(bucket.down), ANY) if bucket.down else None
    gpus = cluster is not None and on_gpus(cluster)
    problems = find_misfits(path, up, down=down, by_node=bool(bucket.by_node), gpus=gpus)
    yield from (f"path {bucket.path!r}: {line}" for line in problems)
    if not tree.encodes(path) and bucket.codec != DENSE:
        yield f"path {bucket.path!r} has no encode step, but the codec is {bucket.codec!r}"
    if bucket.by_node and cluster is not None:
        nodes = sum(1 for node in cluster.nodes if node.ranks)
        if len(bucket.by_node) != nodes:
            yield f"by_node has {len(bucket.by_node)} codecs for {nodes} nodes with ranks"
    families = {_bare(codec).family for codec in bucket.by_node}
    if len(families) > 1:
        yield f"by_node mixes {', '.join(sorted(families))}: a server decodes one family only"
    buffer = job is not None and is_buffer(job, bucket.slices)
    if buffer and {*codecs} != {DENSE}:
        yield f"holds buffers, which are averaged uncompressed: codec must be {DENSE!r}, not {bucket.codec!r}"
    if buffer and bucket.stale:
        yield "holds buffers, which must not be applied one step late (stale)"


def _bare(codec: str) -> CodecSpec:
    """The parsed codec; a misspelled one counts as its own family."""
    return CodecSpec(codec, ()) if spec_error(codec) else bare(codec)


def _host_problems(plan: Plan, cluster: Cluster) -> Iterator[str]:
    if plan.hosts and len(plan.hosts) != plan.servers:
        yield f"hosts lists {len(plan.hosts)} nodes for {plan.servers} servers"
    for host in plan.hosts:
        if not 0 <= host < len(cluster.nodes):
            yield f"hosts: node {host}, the cluster has {len(cluster.nodes)}"
        elif not cluster.nodes[host].server:
            yield f"hosts: node {cluster.nodes[host].name} cannot host a server"
    if not plan.hosts and plan.servers:
        try:
            server_hosts(plan, cluster)
        except ValueError as error:
            yield str(error)
    ranks = sorted({node.ranks for node in cluster.nodes if node.ranks})
    if len(ranks) > 1:
        yield f"the cluster's nodes have {' and '.join(map(str, ranks))} ranks; a plan needs the same number on each node"
    elif ranks and ranks[0] != plan.ranks_per_node:
        yield f"ranks_per_node is {plan.ranks_per_node}, the cluster's nodes have {ranks[0]}"

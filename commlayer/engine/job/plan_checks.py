"""Checks whether a plan can run here: codecs that exist and fit their paths, and the nodes and device that it needs.

planner.verify checks the plan itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from commlayer.compressors import Codec, make_codec, parse, wrap
from commlayer.compressors.plan_codecs import is_download_codec, is_separable, is_summable
from commlayer.planner import tree
from commlayer.planner.buckets import divide_into_fragments
from commlayer.records import MAX_FRAME_NBYTES, Bucket, Plan


def node_problems(plan: Plan, nodes: int, per_node: int, *, cuda: bool = False, reachable: bool = True) -> list[str]:
    """Returns all reasons why a plan cannot run on these nodes, one per line, the same on every rank. `cuda`: the model is on
    GPUs. `reachable`: True if nodes can connect to one another, so that collectives can span them."""
    try:
        divide_into_fragments(plan.buckets, plan.fragments)
    except ValueError as error:
        return [str(error)]
    if plan.ranks_per_node != per_node and any(b.path != "allreduce" for b in plan.buckets):
        return [f"the plan was made for {plan.ranks_per_node} ranks per node, but this job has {per_node}: make it again, "
                "or set ranks_per_node"]
    apart = nodes > 1 and not reachable
    return [f"bucket {b.id}: {line}" for b in plan.buckets
            for line in (*_crossings(b, apart=apart), *_bucket(plan, b, nodes, cuda))]


def _crossings(bucket: Bucket, *, apart: bool) -> Iterator[str]:
    if apart and not bucket.served and any(op.name not in tree.CODING and op.where != "node"
                                           for op in tree.parse(bucket.path)):
        yield (f"path {bucket.path!r} has a collective between nodes that can reach only a server (commlayer join): use "
               "the path 'service'")


def _bucket(plan: Plan, bucket: Bucket, nodes: int, cuda: bool) -> Iterator[str]:
    if bucket.by_node and len(bucket.by_node) != nodes:
        yield f"the bucket has codecs for {len(bucket.by_node)} nodes, but this job has {nodes}"
        return
    try:
        codecs = [make_codec(bucket, node, plan) for node in (None, *range(nodes if bucket.by_node else 0))]
        for codec in codecs:
            if (nbytes := codec.bound(bucket.spec)) > MAX_FRAME_NBYTES and bucket.path == "service":
                yield (f"payloads of {codec} can have {nbytes} bytes for {bucket.numel} elements, but a frame is limited to "
                       f"{MAX_FRAME_NBYTES}: split the bucket, or use a codec that sends less")
                return
    except ValueError as error:
        yield str(error).removeprefix(f"bucket {bucket.id}: ")
        return
    if bucket.stale and bucket.path != "service":
        yield f"path {bucket.path!r} does not support results that are one step late: use the path 'service'"
    path = tree.parse(bucket.path)
    if tree.uses_server(path) and bucket.path != "service":
        yield f"path {bucket.path!r} must be written as 'service', because it uses a server (planner.lower converts it)"
        return
    up = [codec_promise(wrap(parse(text))) for text in (bucket.codec, *bucket.by_node)]
    down = codec_promise(wrap(parse(bucket.down))) if bucket.down else None
    lines = tree.find_misfits(path, up, down=down, by_node=bool(bucket.by_node), gpus=cuda)
    yield from (f"codec {bucket.codec}, path {bucket.path!r}: {line}" for line in lines)


def codec_promise(codec: Codec) -> tree.Promise:
    return tree.Promise(is_summable(codec), is_separable(codec), is_download_codec(codec))

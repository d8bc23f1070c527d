"""The assumptions that `commlayer plan make` prints before its verdict: batch, speeds, optimizer, memory and network."""

from __future__ import annotations

from collections.abc import Iterator

from commlayer.planner import tables
from commlayer.planner.explanation import rate
from commlayer.planner.model import Cluster, Node
from commlayer.planner.tables import GPUS, gpu, peak_tflops, speed
from commlayer.records import Job

OPTIMIZER = {"adam": "AdamW", "sgd": "SGD with momentum", "": "any, so the worse of AdamW and SGD counts"}
STATES_NBYTES = {"adam": 8, "sgd": 4, "": 8}
"""Bytes of optimizer state per element."""
ELEMENT_NBYTES = 4
RESERVED_GBYTES = 1.0
"""Memory that a GPU's driver and allocator keep for themselves."""


def assumptions(model: str, job: Job, cluster: Cluster, optimizer: str, *, said: bool) -> Iterator[str]:
    """Lines for the console. `model` is the user's name for it. `said`: whether the user named the optimizer, too."""
    yield f"batch: {_batch(model, job)}"
    devices = {node.device: node for node in cluster.nodes if node.ranks}
    for node in devices.values():
        yield f"computing: {_computing(model, job, node)}"
    yield f"optimizer: {OPTIMIZER[optimizer]}" + ("" if said else ", whatever the script uses; --optimizer sgd changes it")
    for device in devices:
        if device in GPUS:
            yield from _memory(model, job, device, optimizer)
    yield f"network: {_network(cluster)}"


def _batch(model: str, job: Job) -> str:
    if model in tables.PUBLISHED:
        return f"{job.batch} samples{_tokens(model)} per worker and step"
    samples = "as many samples as the model's function draws" if job.batch is None else f"{job.batch} samples"
    return f"{samples} per worker and step; its times hold for that batch"


def _tokens(model: str) -> str:
    tokens = tables.PRESETS[model].tokens if model in tables.PRESETS else tables.PUBLISHED[model].tokens
    return f" of {tokens:,} tokens" if tokens else ""


def _computing(model: str, job: Job, node: Node) -> str:
    assert job.timing is not None
    where, half = node.device, job.timing.half
    own = "" if node.speed in (0.0, speed(where, half=half) if where in ("cpu", *GPUS) else node.speed) else \
        f", taken as {node.speed:g} x a V100 as the cluster says"
    if model in tables.PRESETS:
        part, peak = tables.PRESETS[model].utilisation, peak_tflops(where) if where in ("cpu", *GPUS) else 0.0
        precision = "FP32" if where not in GPUS else gpu(where).precision
        return f"{where} in {precision}, {part * peak:.3g} TFLOP/s: {part:.0%} of the {peak:g} in its data sheet{own}"
    source = "published times of a V100" if model in tables.PUBLISHED else \
        f"the times in {model}" if model.endswith(".json") else "times measured on this machine"
    precision = "FP32" if model in tables.PUBLISHED else "the precision that they were measured in"
    return f"{where} in {precision}, from {source}, converted by data sheets (FP32){own}"


def _memory(model: str, job: Job, device: str, optimizer: str) -> Iterator[str]:
    assert job.timing is not None
    sizes = {"weights": ELEMENT_NBYTES * job.numel, "gradients": ELEMENT_NBYTES * job.numel,
             "optimizer": STATES_NBYTES[optimizer] * job.numel, "activations": job.timing.activation_nbytes}
    gbytes = {name: size / 1e9 for name, size in sizes.items()}
    required_gbytes, available, activation_gbytes = sum(gbytes.values()), gpu(device).memory_gbytes, gbytes["activations"]
    parts = ", ".join(f"{name} {size:.1f}" for name, size in gbytes.items() if size)
    unknown = "" if activation_gbytes else "; activations are not known"
    yield f"memory: {device} needs about {max(0.1, required_gbytes):.1f} of {available:g} GB ({parts}{unknown})"
    usable_gbytes = available - RESERVED_GBYTES
    if required_gbytes <= usable_gbytes:
        return
    most = int((usable_gbytes - (required_gbytes - activation_gbytes))
               / activation_gbytes * (job.batch or 0)) if activation_gbytes else 0
    remedy = "take a GPU with more memory, or checkpoint activations" if most < 1 else \
        f"--batch {most} fits" if model in tables.PRESETS else f"a batch of {most} fits"
    yield f"WARNING: this does not fit into {device}, which keeps {RESERVED_GBYTES:g} GB for itself: {remedy}"


def _network(cluster: Cluster) -> str:
    rented = [node for node in cluster.nodes if not node.ranks]
    if cluster.reachable:
        return "all nodes reach one another"
    if rented and not any(node.server for node in cluster.nodes if node.ranks):
        slowest = min(min(node.link.up_bps, node.link.down_bps) for node in rented)
        what = "a rented machine" if len(rented) == 1 else f"{len(rented)} rented machines"
        return f"homes behind NAT, which nobody dials; all dial a summation server on {what} with {rate(slowest)}"
    return "nodes do not reach one another; summation servers are on nodes that can be dialled"

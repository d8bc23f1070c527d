"""Where 1 % of a model's entries goes: the ratio in each bucket against one threshold over all, by kept energy and by loss.

4 virtual workers train with the buckets, the codecs, the pacing and the server's sums of a real job, both ways coded with
residuals, in one process. Knows no network and no time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from msgspec import structs

from bench import energy_models, report
from commlayer import planner
from commlayer.compressors import codec_of, payload
from commlayer.compressors.wrapper import Wrapper
from commlayer.control.server_codecs import ops_of
from commlayer.records import Plan
from commlayer.runtime.bucket import WorkerBucket
from commlayer.runtime.entries_sent import pace
from commlayer.runtime.model_job import job_of

WORKERS, CUT_NBYTES, RATIO = 4, 1 << 14, 0.01
CODEC = f"error_feedback(topk(ratio={RATIO}))"
WAYS = ("dense", "bucket", "plan")
SEEDS, QUICK_STEPS = (1, 2), 20


class Sent(NamedTuple):
    """Of one worker in one step."""

    kept: float
    """The part of the energy of gradient + residual that is in the entries sent."""
    alike: float
    """The same if each bucket had sent its ratio of the same vector, by sorting."""
    nbytes: int


def run(quick: bool) -> report.Result:
    """A row for each model, optimizer and way."""
    torch.set_num_threads(1)
    cases = [(model, optimizer) for model in energy_models.MODELS for optimizer in ("sgd", "adamw")]
    rows = [row(model, optimizer, way, quick) for model, optimizer in cases for way in WAYS]
    coded = [r for r in rows if r["way"] == "plan"]
    beside = [r for r in rows if r["way"] == "bucket"]
    return {"rows": rows, "summary": {
        "kept_over_sorted_per_bucket_min": min(r["kept"] / r["sorted_per_bucket"] for r in coded),
        "kept_over_own_run_per_bucket_min": min(r["kept"] / o["kept"] for r, o in zip(coded, beside, strict=True)),
        "bytes_over_per_bucket_max": max(r["nbytes"] / o["nbytes"] for r, o in zip(coded, beside, strict=True)),
        "loss_under_per_bucket_min": min(o["loss"] - r["loss"] for r, o in zip(coded, beside, strict=True)),
    }}


def row(model: str, optimizer: str, way: str, quick: bool = False) -> dict[str, Any]:
    """Means over the seeds. `nbytes`: of a worker in a step, up and down; `down_nbytes` those that come down."""
    told = [train(model, optimizer, way, seed, QUICK_STEPS if quick else 0) for seed in SEEDS[: 1 if quick else None]]
    sent = [one for _, each, _ in told for one in each]
    made: dict[str, Any] = {"model": model, "optimizer": optimizer, "way": way, "loss": fmean(loss for loss, _, _ in told)}
    if sent:
        down = fmean(fmean(nbytes) for _, _, nbytes in told)
        made |= {"kept": fmean(s.kept for s in sent), "sorted_per_bucket": fmean(s.alike for s in sent),
                 "nbytes": fmean(s.nbytes for s in sent) + down, "down_nbytes": down}
    return made


def train(model: str, optimizer: str, way: str, seed: int, steps: int = 0) -> tuple[float, list[Sent], list[int]]:
    """(loss on test data, what each worker sent in each step, bytes of each step's results)."""
    task = energy_models.MODELS[model](seed)
    parameters = list(task.model.parameters())
    made: torch.optim.Optimizer = torch.optim.AdamW(parameters, task.adamw_lr)
    if optimizer == "sgd":
        made = torch.optim.SGD(parameters, task.sgd_lr, momentum=0.9)
    feeds = [task.batches(rank, WORKERS) for rank in range(WORKERS)]
    cluster = None if way == "dense" else Cluster(task.model, way)
    sent: list[Sent] = []
    results: list[int] = []
    for step in range(steps or task.steps):
        gradients = [torch.autograd.grad(task.loss(next(feed)), parameters) for feed in feeds]
        if cluster is None:
            averages: Sequence[torch.Tensor] = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
        else:
            averages, told, nbytes = cluster.step(step, gradients)
            sent += told
            results.append(nbytes)
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.grad = average
        made.step()
    with torch.no_grad():
        return float(task.loss(task.test)), sent, results


class Cluster:
    """The coded part of a job: every worker's buckets, and one server."""

    def __init__(self, model: torch.nn.Module, ratio_over: Any) -> None:
        job = job_of(model)
        plan = planner.default_plan(job, codec=CODEC, path="service", servers=1, ranks_per_node=1, fuse_nbytes=CUT_NBYTES,
                                    cut_nbytes=CUT_NBYTES)
        self.plan: Plan = structs.replace(plan, ratio_over=ratio_over)
        self.shapes = [info.shape for info in job.tensors]
        self.ops = ops_of(self.plan, 0)
        self.accs = {number: ops.zeros(0) for number, ops in self.ops.items()}
        self.workers = [
            [WorkerBucket(b, job, codec_of(b, plan=self.plan), torch.device("cpu"), i, rank=rank)
             for i, b in enumerate(self.plan.buckets)]
            for rank in range(WORKERS)
        ]
        for buckets in self.workers:
            pace(buckets)

    def step(
        self, step: int, gradients: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[torch.Tensor], list[Sent], int]:
        """(averages, what each worker sent, bytes of the results)."""
        told = []
        for rank, (buckets, mine) in enumerate(zip(self.workers, gradients, strict=True)):
            kept = alike = whole = 0.0
            sent = 0
            for bucket in buckets:
                bucket.rewind()
                bucket.step = step
                bucket.sources = [mine[s.tensor].contiguous() for s in bucket.slices]
                bucket.gather(1 / WORKERS, 1.0)
                owed = bucket.host + bucket.state["residual"]
                nbytes = bucket.encode()
                body = bucket.payload[:nbytes]
                self.ops[bucket.id].add(0, body, self.accs[bucket.id], rank == 0)
                energy = owed.square()
                kept += float(energy[sparse(bucket).places(body, bucket.numel).long()].sum())
                alike += float(energy.topk(math.ceil(RATIO * bucket.numel)).values.sum())
                whole += float(energy.sum())
                sent += nbytes - payload.HEADER_NBYTES
            told.append(Sent(kept / whole, alike / whole, sent))
        averages = [torch.empty(shape) for shape in self.shapes]
        back = 0
        for bucket in self.workers[0]:
            out = memoryview(bytearray(bucket.bound))
            nbytes = self.ops[bucket.id].emit(0, self.accs[bucket.id], out)
            bucket.decode(out[:nbytes])
            back += nbytes - payload.HEADER_NBYTES
            for s, view in zip(bucket.slices, bucket.views_y, strict=True):
                averages[s.tensor].view(-1)[s.start : s.stop] = view.reshape(-1)
        return averages, told, back



def sparse(bucket: WorkerBucket) -> Any:
    """What is inside error feedback."""
    assert isinstance(bucket.codec, Wrapper)
    return bucket.codec.inner

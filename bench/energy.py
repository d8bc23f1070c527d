"""Top-k ratio per bucket against one threshold over the whole model, compared by kept gradient energy and by loss.

4 virtual workers train in one process with the buckets, codecs and server sums of a real job; gradients and results are coded
with residuals. Simulates no network and measures no time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import torch
from msgspec import structs

from bench import energy_models, report
from bench.virtual_training import VirtualWorkers
from commlayer import planner
from commlayer.compressors import payload
from commlayer.compressors.plan_codecs import reader_of
from commlayer.engine.buckets.bucket import EncodedBucket
from commlayer.engine.model.model_tensors import job_of

WORKERS, CUT_NBYTES, RATIO = 4, 1 << 14, 0.01
CODEC = f"error_feedback(topk(ratio={RATIO}))"
WAYS = ("dense", "bucket", "plan")
SEEDS, QUICK_STEPS = (1, 2), 20


class Sent(NamedTuple):
    """What one worker sent in one step."""

    kept: float
    """Fraction of the energy of gradient + residual that is in the entries sent."""
    alike: float
    """The same fraction if each bucket had sent its ratio of the same vector, selected by sorting."""
    nbytes: int


def run(quick: bool) -> report.Result:
    """A row for each model, optimizer and way of choosing entries."""
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
    """Means over the seeds. `nbytes`: bytes per worker and step, up and down; `down_nbytes`: those downloaded."""
    runs = [train(model, optimizer, way, seed, QUICK_STEPS if quick else 0) for seed in SEEDS[: 1 if quick else None]]
    sent = [one for _, each, _ in runs for one in each]
    record: dict[str, Any] = {"model": model, "optimizer": optimizer, "way": way, "loss": fmean(loss for loss, _, _ in runs)}
    if sent:
        down = fmean(fmean(nbytes) for _, _, nbytes in runs)
        record |= {"kept": fmean(s.kept for s in sent), "sorted_per_bucket": fmean(s.alike for s in sent),
                   "nbytes": fmean(s.nbytes for s in sent) + down, "down_nbytes": down}
    return record


def train(model: str, optimizer: str, way: str, seed: int, steps: int = 0) -> tuple[float, list[Sent], list[int]]:
    """Trains once. Returns the loss on test data, what each worker sent in each step, and the bytes of each step's results."""
    task = energy_models.MODELS[model](seed)
    parameters = list(task.model.parameters())
    method: torch.optim.Optimizer = torch.optim.AdamW(parameters, task.adamw_lr)
    if optimizer == "sgd":
        method = torch.optim.SGD(parameters, task.sgd_lr, momentum=0.9)
    feeds = [task.batches(rank, WORKERS) for rank in range(WORKERS)]
    workers = None if way == "dense" else Measured(task.model, way)
    sent: list[Sent] = []
    results: list[int] = []
    for _ in range(steps or task.steps):
        gradients = [torch.autograd.grad(task.loss(next(feed)), parameters) for feed in feeds]
        if workers is None:
            averages: Sequence[torch.Tensor] = [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]
        else:
            averages, payloads, nbytes = workers.step(gradients)
            sent += payloads
            results.append(nbytes)
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.grad = average
        method.step()
    with torch.no_grad():
        return float(task.loss(task.test)), sent, results


class Measured(VirtualWorkers):
    """Virtual workers that record what each worker sends, and from which vector."""

    def __init__(self, model: torch.nn.Module, ratio_over: Any) -> None:
        job = job_of(model)
        plan = planner.default_plan(job, codec=CODEC, path="service", servers=1, ranks_per_node=1, fuse_nbytes=CUT_NBYTES,
                                    cut_nbytes=CUT_NBYTES)
        super().__init__(job, structs.replace(plan, ratio_over=ratio_over), WORKERS)
        self._results = len(plan.buckets) * payload.HEADER_NBYTES
        self._sums = [[0.0] * 4 for _ in range(WORKERS)]

    def step(self, gradients: Sequence[Sequence[torch.Tensor]]) -> tuple[list[torch.Tensor], list[Sent], int]:
        """Returns the averages, what each worker sent, and the bytes of the results."""
        self._sums = [[0.0] * 4 for _ in range(WORKERS)]
        averages, _ = self.average(gradients)
        per_worker = [Sent(kept / total, alike / total, round(nbytes)) for kept, alike, total, nbytes in self._sums]
        return averages, per_worker, self.received - self._results

    def code(self, rank: int, worker: EncodedBucket) -> memoryview:
        energy = (worker.coder.host + torch.from_numpy(worker.ledger.state["residual"])).square()
        body = super().code(rank, worker)
        figures = (
            float(energy[positions_in(worker, body).long()].sum()),
            float(energy.topk(math.ceil(RATIO * worker.numel)).values.sum()),
            float(energy.sum()),
            len(body) - payload.HEADER_NBYTES,
        )
        self._sums[rank] = [before + more for before, more in zip(self._sums[rank], figures, strict=True)]
        return body


def positions_in(bucket: EncodedBucket, body: memoryview) -> torch.Tensor:
    """The positions of the entries in a top-k payload."""
    reader = reader_of(bucket.codec)
    assert reader is not None
    entries = reader.read(body, bucket.numel)
    return torch.empty(0) if entries is None else torch.from_numpy(entries[0])

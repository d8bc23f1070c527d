"""CLAN against LANS on both built-in tasks: loss and bytes after the same number of steps, each at its best learning rate.

Four workers and a server run in one thread (virtual_training.py) with the engine's own codecs, residuals
and sums. Learning rates come from one grid for all, chosen by the same held-out loss that is compared. Bytes are counted; time
is not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from torch import nn

from bench import report
from bench.virtual_training import VirtualWorkers
from commlayer.compressors import parse, wrap
from commlayer.engine.model.model_tensors import job_of
from commlayer.optim import CLAN, LANS
from commlayer.planner import default_plan
from examples import tuning_tasks

WORKERS, SAMPLES = 4, 16
"""WORKERS is the number of workers, SAMPLES the batch size of each worker."""
SEEDS = 3
WARM = 0.05
"""Fraction of the steps in which the learning rate rises; then it falls to zero."""
WITHIN_PCT, FEWER = 0.5, 20.0


class Case(NamedTuple):
    """A task, its number of steps, and the learning rates to try."""

    task: Callable[[int], tuning_tasks.TuningTask]
    steps: int
    rates: tuple[float, ...]


class Setting(NamedTuple):
    """An optimizer and the codec of its gradients in both directions."""

    optimizer: type[LANS]
    codec: str


class Trained(NamedTuple):
    """Result of one run: held-out loss, training loss over the last tenth, bytes per step."""

    loss: float
    train_loss: float
    nbytes: float


CASES = {
    "digits": Case(tuning_tasks.digits_task, 800, (0.005, 0.01, 0.02)),
    "chars": Case(tuning_tasks.chars_task, 800, (0.014, 0.02, 0.028)),
}
UNCOMPRESSED = Setting(LANS, "identity()"), Setting(CLAN, "identity()")
COMPRESSED = Setting(CLAN, "onebit()"), Setting(CLAN, "topk(ratio=0.1)")


def run(quick: bool) -> report.Result:
    """A row for each task, optimizer and codec."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, case in CASES.items():
        tried = case._replace(rates=case.rates[1:2]) if quick else case
        best = {setting: _best(tried, setting, 1 if quick else SEEDS) for setting in (*UNCOMPRESSED, *COMPRESSED)}
        plain = [best[setting][1] for setting in UNCOMPRESSED]
        rows += [_row(name, case.steps, setting, rate, runs, *plain) for setting, (rate, runs) in best.items()]
    coded = [row for row in rows if row["codec"] != "identity()"]
    return {"rows": rows, "summary": {
        "loss_above_lans_pct_max": max(row["above_lans_pct"] for row in coded),
        "loss_above_uncoded_clan_pct_max": max(row["above_uncoded_clan_pct"] for row in coded),
        "times_fewer_bytes_min": min(row["times_fewer_bytes"] for row in coded),
        "within": all(row["above_lans_pct"] <= WITHIN_PCT and row["times_fewer_bytes"] >= FEWER for row in coded),
    }}


def train(task: tuning_tasks.TuningTask, setting: Setting, rate: float, steps: int, seed: int) -> Trained:
    """Trains once. Equal seeds use the same samples, whatever the codec."""
    job, parameters = job_of(task.model), list(task.model.parameters())
    plan = default_plan(job, codec=str(wrap(parse(setting.codec))), path="service", servers=1, ranks_per_node=1,
                        fuse_nbytes=1 << 20, cut_nbytes=4 << 20)
    workers, optimizer = VirtualWorkers(job, plan, WORKERS), setting.optimizer(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / (WARM * steps), 1 - step / steps))
    samples, nbytes, losses = torch.Generator().manual_seed(seed), 0, []
    for step in range(steps):
        own = []
        for _ in range(WORKERS):
            x, y = task.batch(SAMPLES, samples)
            loss = nn.functional.cross_entropy(task.model(x), y)
            own.append(torch.autograd.grad(loss, parameters))
            if step >= 0.9 * steps:
                losses.append(loss.detach())
        average, carried = workers.average(own)
        nbytes += carried
        for p, g in zip(parameters, average, strict=True):
            p.grad = g
        optimizer.step()
        schedule.step()
    x, y = task.test
    with torch.no_grad():
        return Trained(nn.functional.cross_entropy(task.model(x), y).item(), torch.stack(losses).mean().item(), nbytes / steps)


def _best(case: Case, setting: Setting, seeds: int) -> tuple[float, list[Trained]]:
    """The learning rate with the lowest mean loss, and its runs."""
    tried = {rate: [train(case.task(seed), setting, rate, case.steps, seed) for seed in range(seeds)] for rate in case.rates}
    rate = min(tried, key=lambda rate: mean(run.loss for run in tried[rate]))
    return rate, tried[rate]


def _row(
    name: str, steps: int, setting: Setting, rate: float, runs: list[Trained], lans: list[Trained], clan: list[Trained],
) -> dict[str, Any]:
    nbytes, (above, error) = mean(run.nbytes for run in runs), _above(runs, lans)
    return {
        "task": name, "optimizer": setting.optimizer.__name__, "codec": setting.codec, "steps": steps, "rate": rate,
        "seeds": len(runs),
        "loss": mean(run.loss for run in runs), "train_loss": mean(run.train_loss for run in runs),
        "above_lans_pct": above, "standard_error_pct": error, "above_uncoded_clan_pct": _above(runs, clan)[0],
        "step_nbytes": nbytes, "times_fewer_bytes": mean(run.nbytes for run in lans) / nbytes,
    }


def _above(runs: list[Trained], others: list[Trained]) -> tuple[float, float]:
    """By how many percent the losses are above those of others, paired by seed, and the standard error."""
    base = mean(run.loss for run in others)
    each = [100 * (mine.loss - other.loss) / base for mine, other in zip(runs, others, strict=True)]
    return mean(each), stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0

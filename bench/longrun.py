"""`python -m bench longrun`: convergence factors of local steps over long trainings with a decayed learning rate.

Virtual workers in one process train models of different kinds for 2,000 steps and more, with the package's codecs, residuals,
sums, local steps and outer optimizers. The synchronous training is run at several lengths, each with its own whole schedule.
The factor of another training is its length over the length at which the synchronous one reaches the same final loss.

Each finished training is a line of bench/data/longrun_runs.jsonl. Ctrl-C stops; the same command resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import structs

from bench import report, virtual_training
from bench.learning import tasks as learning_tasks
from bench.learning.training import maker
from bench.virtual_training import Variant
from commlayer.planner import convergence
from commlayer.planner.data import tables

STORE = report.DATA / "longrun_runs.jsonl"
STEPS, WARMUP, LOOKS = 2000, 100, 20
SHORTER = (0.25, 0.4, 0.6, 0.8, 1.0)
"""Lengths of the synchronous trainings, as fractions of `STEPS`."""
BEYOND = 0.75
"""Shortest synchronous training to which factors are extrapolated, relative to the shortest that was run."""
LAST = 0.05
"""The learning rate at the end, as a fraction of its peak."""
LETTERS, CONTEXT = 96, 64
PACKAGES = ("numpy", "scipy", "sklearn")


@functools.cache
def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Docstrings of installed packages as character numbers: for training, and every fifth file held out."""
    parts: tuple[list[str], list[str]] = ([], [])
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        for i, file in enumerate(sorted(Path(spec.origin).parent.rglob("*.py"))):
            if "/tests/" not in str(file):
                with contextlib.suppress(SyntaxError):  # for a newer Python
                    parts[i % 5 == 4].append(learning_tasks.docstrings(file))
    return learning_tasks.character_ids(["\n".join(part) for part in parts], LETTERS)


def characters(
    make: Callable[[], torch.nn.Module], rates: Mapping[str, float], seed: int,
    loss: learning_tasks.Loss = learning_tasks.class_loss,
) -> learning_tasks.Task:
    """The model that `make` returns predicts the next character of `corpus`."""
    torch.manual_seed(seed)
    return learning_tasks.next_character(make(), corpus(), dict(rates), seed, length=CONTEXT, size=8, held_rows=256, loss=loss)


def mixed_loss(model: torch.nn.Module, batch: learning_tasks.Batch) -> torch.Tensor:
    """The loss with matrix products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        return learning_tasks.class_loss(model, batch)


def transformer(width: int, layers: int) -> torch.nn.Module:
    return learning_tasks.Transformer(width, layers, LETTERS, CONTEXT)


RATES = {"adam": 2e-3, "sgd": 0.3}
TASKS: dict[str, Callable[[int], learning_tasks.Task]] = {
    "transformer-2m": lambda seed: characters(lambda: transformer(192, 5), RATES, seed, loss=mixed_loss),
    "transformer-350k": lambda seed: characters(lambda: transformer(96, 3), RATES, seed),
    "gru-250k": lambda seed: characters(lambda: learning_tasks.Recurrent(48, 240, LETTERS), RATES, seed),
    "gru": learning_tasks.gru, "conv": learning_tasks.conv,
}


class Case(NamedTuple):
    """One training."""

    variant: Variant
    steps: int = STEPS
    schedule: str = "cosine"

    @property
    def key(self) -> str:
        return json.dumps({**structs.asdict(self.variant), "steps": self.steps, "schedule": self.schedule}, sort_keys=True)

    @classmethod
    def read(cls, key: str) -> Case:
        fields = json.loads(key)
        steps, schedule = fields.pop("steps"), fields.pop("schedule")
        return cls(Variant(**fields), steps, schedule)

    def synchronous(self, workers: int = 0) -> tuple[Case, ...]:
        """The trainings to compare with: of `workers` workers, or as many as this one has."""
        dense = structs.replace(self.variant.dense, workers=workers or self.variant.workers)
        return tuple(self._replace(variant=dense, steps=round(part * STEPS)) for part in SHORTER)


def cases(
    task: str, optimizer: str, workers: int, seed: int, schedule: str = "cosine", batches: int = 1,
) -> list[Case]:
    """The trainings of one task, the most telling first."""
    dense = Variant(task, optimizer, workers=workers, seed=seed, batches=batches)
    local = local_variants(dense)
    coded = Case(structs.replace(dense, codec="int4()"), STEPS, schedule)
    whole = Case(dense, STEPS, schedule)
    others = [structs.replace(local[0], every=every, outer=outer)
              for every, outer in ((32, "diloco"), (128, "diloco"), (2, "plain"), (4, "plain"), (8, "plain"), (32, "plain"))]
    first = [whole, alone_of(whole), *(Case(variant, STEPS, schedule) for variant in local[:3])]
    rest = [coded, *(Case(variant, STEPS, schedule) for variant in (*others, *local[3:]))]
    return list(dict.fromkeys([*first, *whole.synchronous(), *rest]))


def local_variants(dense: Variant) -> list[Variant]:
    """Local steps with the outer optimizer of the rule, the most telling first. The last ones overlap the exchange."""
    variant = structs.replace(dense, codec="int4()", codes="updates")
    overlapped = ((1, 1), (2, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8), (32, 1), (32, 4), (32, 8))
    return [*(structs.replace(variant, every=every) for every in (32, 128, 8, 2, 4)),
            *(structs.replace(variant, overlap="round", every=every, fragments=parts) for every, parts in overlapped)]


def rate_at(step: int, steps: int, schedule: str) -> float:
    """The learning rate at a step, as a fraction of its peak.

    >>> rate_at(50, 2000, "cosine"), rate_at(2000, 2000, "cosine"), rate_at(2000, 2000, "constant")
    (0.5, 0.05, 1.0)
    """
    warm = min(1.0, step / WARMUP)
    if schedule == "constant":
        return warm
    return warm * (LAST + (1 - LAST) * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2) if step > WARMUP else warm


def train(case: Case, noise: list[float] | None = None) -> list[float]:
    """Returns the validation losses, and fills `noise` as `virtual_training.train` does."""
    return virtual_training.train(case.variant, maker(TASKS, case.variant), steps=case.steps, looks=LOOKS,
                                  rate=lambda step: rate_at(step, case.steps, case.schedule), noise=noise)


class Trainings(report.Store):
    """Finished trainings by the keys of their cases: validation losses, noise scales and seconds of each."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, lambda row: row["case"])

    def final(self, case: Case) -> float | None:
        if row := self.rows.get(case.key):
            return float(row["curve"][-1])
        if case.schedule == "constant" and (row := self.rows.get(case._replace(steps=STEPS).key)):
            # A shorter training is the beginning of the longest.
            return float(row["curve"][round(LOOKS * case.steps / STEPS) - 1])
        return None


def row_of(case: Case, curve: Sequence[float], seconds: float, noise: Sequence[float] = ()) -> dict[str, Any]:
    return {"case": case.key, "curve": [round(loss, 5) for loss in curve], "noise": [round(batches, 2) for batches in noise],
            "seconds": round(seconds), "torch": str(torch.__version__)}


def factor_of(case: Case, store: Trainings, workers: int = 0) -> float | None:
    """Steps over those of the synchronous training that ends at the same loss, interpolated over the logarithm of the length;
    None if trainings are missing, or if the loss is not between those of the longest and of one a quarter shorter than the
    shortest."""
    loss = store.final(case)
    points = [(math.log(each.steps), final) for each in case.synchronous(workers) if (final := store.final(each)) is not None]
    if loss is None or len(points) < 2:
        return None
    points.sort()
    for (x0, y0), (x1, y1) in pairwise(points):
        if loss >= y1 or (x1, y1) == points[-1]:
            slope = (y1 - y0) / (x1 - x0)
            length = x0 + (loss - y0) / slope if slope < 0 else -math.inf
            return math.exp(math.log(case.steps) - length) if length >= points[0][0] + math.log(BEYOND) else None
    return None


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task", choices=[*TASKS], action="append", help="only this task; may be repeated")
    parser.add_argument("--optimizer", choices=["adam", "sgd"], default="adam")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    parser.add_argument("--batches", type=int, default=1, help="task batches per worker and step, as one larger batch")
    parser.add_argument("--show", action="store_true", help="only print what is measured")


def run(quick: bool, args: argparse.Namespace) -> report.Result:
    """Trains what is missing. A row for each training. "noise": the median noise scale, in batches of all workers together;
    "over_alone": how many times as fast as one worker alone it reaches its loss, if exchanges took no time."""
    torch.set_num_threads(1)
    store, planned = Trainings(STORE), [
        case for seed in range(args.seeds) for task in (args.task or TASKS)
        for case in cases(task, args.optimizer, args.workers, seed, args.schedule, args.batches)
        [: 5 if quick else None]]
    for case in planned:
        if not args.show and store.final(case) is None:
            begin, noise = time.perf_counter(), list[float]()
            curve = train(case, noise)
            store.add(row_of(case, curve, time.perf_counter() - begin, noise))
            print(f"{case.variant.task} {label(case)}: {store.final(case):.4f}, {time.perf_counter() - begin:.0f} s",
                  file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    pairs: list[tuple[float, float]] = []
    for case in planned:
        if (final := store.final(case)) is not None:
            row: dict[str, Any] = {"task": case.variant.task, "seed": case.variant.seed, "training": label(case),
                                   "steps": case.steps, "loss": round(final, 4)}
            if not case.variant.updates and (scale := find_noise(case, store)):
                row["noise"] = round(scale / case.variant.workers, 1)
            if factor := factor_of(case, store, args.workers):
                row["factor"] = round(factor, 2)
                if case.variant.updates and (alone := factor_of(alone_of(case), store, args.workers)):
                    row["over_alone"] = round(alone / factor, 2)
            if factor and case.variant.updates and not case.variant.outer:
                model = predicted_factor(case, find_noise(case, store))
                row |= {"model": round(model, 2), "error": f"{model / factor - 1:+.0%}"}
                pairs.append((factor, model))
            rows.append(row)
    return {"rows": rows, "summary": {"trainings": len(rows), "missing": len(planned) - len(rows), **agreement(pairs)}}


def alone_of(case: Case) -> Case:
    return case._replace(variant=structs.replace(case.variant.dense, workers=1))


def find_noise(case: Case, store: Trainings) -> float:
    """The median noise scale of the synchronous training, in batches of one worker; 0: unknown."""
    dense = store.rows.get(case._replace(variant=case.variant.dense).key, {})
    return statistics.median([float(batches) for batches in dense.get("noise", []) if batches] or [0.0])


def predicted_factor(case: Case, noise: float = 0.0) -> float:
    """The convergence factor by the planner's model. `noise`: the noise scale that was measured in the synchronous training, in
    batches of one worker; 0: unknown."""
    variant = case.variant
    return 1 + convergence.excess(tables.learning_rows(), variant.codec, recipe_of_variant(variant)._replace(noise=noise)).steps


def recipe_of_variant(variant: Variant) -> convergence.Recipe:
    return convergence.Recipe(variant.optimizer, variant.codes, variant.every, variant.overlap, variant.late, variant.workers,
                              variant.fragments, numel_of(variant.task))


@functools.cache
def numel_of(task: str) -> int:
    return sum(p.numel() for p in TASKS[task](0).model.parameters())


def agreement(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Median error of the model, and its rank correlation with the measured factors."""
    if len(pairs) < 3:
        return {}
    from scipy.stats import spearmanr

    return {"median_error_pct": 100 * statistics.median(abs(model / factor - 1) for factor, model in pairs),
            "rank_correlation": float(spearmanr(pairs).statistic)}


def label(case: Case) -> str:
    variant = case.variant
    if variant.workers == 1:
        return "alone"
    if not variant.updates:
        return "synchronous" if variant == variant.dense else f"synchronous, {variant.codec}"
    usual = "averaging" if variant.optimizer == "sgd" else "norm-matched averaging"
    outer = {"": usual, "plain": "averaging", "diloco": "Nesterov"}[variant.outer]
    overlap = f" overlapped in {variant.fragments}" if variant.overlap else ""
    return f"{variant.every} local steps{overlap}, {variant.codec}, {outer}"

"""`python -m bench.own_learning TASK FILE`: measures the convergence factor of each sync mode on your own task.

TASK is a file.py with task(seed), or module:function. FILE is for `attach(config={"learning": FILE})` and for
`commlayer plan create --learning FILE`. The method is that of the built-in table (`python -m bench learning`), with the user's
model, data, optimizer and rate.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn

from bench.learning.factors import alone_rows, costs, label, rows_of
from bench.virtual_training import LOOKS, Make, TrainingTask, Variant, train
from commlayer.cli.arguments import call_user_function, import_function
from commlayer.codec_spec import SPARSE, parse_spec
from commlayer.compressors import parse
from commlayer.errors import InvalidInput, exit_reason
from commlayer.files import write_whole
from commlayer.optim.outer import family_of
from commlayer.planner.convergence import ALONE, ALONE_AMONG
from commlayer.planner.data.tables import LearningTable, Provenance, encoded_table

CODECS = ("int4()", "topk(ratio=0.1)", "topk(ratio=0.01)")
LOCAL_STEPS = (4, 16)
LEAST_STEPS = 20
FIELDS = ("model", "optimizer", "batches", "loss", "validation")
CALLED = {"optimizer": "optimizer(model)", "batches": "batches(rank, world)", "loss": "loss(model, batch)",
          "validation": "validation(model)"}
"""The call in which each function of a task is used."""
WHAT = f"of a seed that returns a dict of {', '.join(FIELDS)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.own_learning", description=__doc__)
    parser.add_argument("task")
    parser.add_argument("out", type=Path, metavar="FILE")
    parser.add_argument("--codec", action="append", help="a codec to train with; repeatable")
    parser.add_argument("--local-steps", type=int, nargs="+", default=LOCAL_STEPS)
    parser.add_argument("--staleness", action="store_true", help="also train with one-step-stale results")
    parser.add_argument("--steps", type=int, default=240, help="steps of each training")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each mode")
    args = parser.parse_args(argv)
    if args.steps < LEAST_STEPS or args.seeds < 1:
        parser.error(f"--steps {args.steps} --seeds {args.seeds}: allowed are {LEAST_STEPS} steps or more, a seed or more")
    if not args.out.absolute().parent.is_dir():
        parser.error(f"{args.out}: the folder {args.out.absolute().parent} does not exist")
    try:
        run(args.task, args.out, args.codec or CODECS, args.local_steps, staleness=args.staleness, steps=args.steps,
            seeds=args.seeds)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(
    name: str, out: Path, codecs: Sequence[str], local_steps: Sequence[int], *, staleness: bool, steps: int, seeds: int,
) -> None:
    make = maker(name)
    for codec in codecs:
        parse(codec)
    variants = list(variants_of(codecs, local_steps, late=staleness))
    table = measure(name, make, variants, out, steps=steps, seeds=seeds)
    for row in table.rows:
        if row.workers in (0, ALONE):
            others = f"{ALONE_AMONG} together" if row.workers == ALONE else "dense"
            print(f"{label(row):56} {row.steps:.2f} times as many steps as {others}")
    print(f'{len(table.rows)} rows in {out}: commlayer plan create --learning {out}, attach(config={{"learning": "{out}"}})')


OWN = "your proxy"
"""Source that distinguishes these rows from the built-in ones."""


def variants_of(codecs: Sequence[str], local_steps: Sequence[int], *, late: bool = False) -> Iterator[Variant]:
    """The most useful configurations: each codec for gradients and for updates; local steps, with and without overlap, with
    the finest codec that is not sparse; and, if local steps are requested, overlapped updates of each step."""
    dense = Variant("", "")
    yield dense
    yield structs.replace(dense, workers=ALONE)
    codecs = [codec for codec in dict.fromkeys(codecs) if codec != dense.codec]
    yield from (structs.replace(dense, codec=codec) for codec in codecs)
    fine = next((codec for codec in codecs if parse_spec(codec).core.family not in SPARSE), dense.codec)
    for every in sorted({n for n in local_steps if n > 1}):
        yield from (structs.replace(dense, codec=fine, every=every, overlap=overlap) for overlap in ("", "round"))
    yield from (structs.replace(dense, codec=codec, codes="updates") for codec in codecs)
    if max(local_steps, default=1) > 1:
        yield structs.replace(dense, codec=fine, codes="updates", overlap="round")
    if late:
        yield structs.replace(dense, codec=fine, late=True)


def measure(
    name: str, make: Make, variants: Sequence[Variant], out: Path, *, steps: int, seeds: int,
) -> LearningTable:
    """Trains all configurations, and writes the table after each, so that an interrupted run keeps its rows. Raises
    InvalidInput with one line for a task that cannot be trained."""
    task = make(0)
    family = family_of(task.optimizer(task.model))
    if family == "other":
        raise InvalidInput("E-USER-CODE",
                           f"{name}: its optimizer is of no family that tables have; allowed: SGD, Adam and their like")
    curves: dict[Variant, Sequence[float]] = {}
    table: LearningTable | None = None
    for seed in range(seeds):
        for variant in variants:
            mine = structs.replace(variant, task=name, optimizer=family, seed=seed)
            curves[mine] = _curve_of(mine, make, steps)
            print(f"{len(curves):3}  {label(variant) + (f', seed {seed}' if seed else ''):56} loss {curves[mine][-1]:.4g}")
            if (table := _table(name, curves)) is not None:
                write_whole({out: encoded_table(table)})
    if table is None:
        raise InvalidInput("E-USER-CODE", f"{name}: nothing to compare with dense training; name a codec or local steps")
    return table


def _curve_of(variant: Variant, make: Make, steps: int) -> Sequence[float]:
    """Trains one configuration; an error in the user's code becomes one line."""
    try:
        curve = train(variant, make, steps=steps, looks=min(LOOKS, steps))
    except ValueError:
        raise
    except Exception as error:
        raise InvalidInput("E-USER-CODE", f"task {variant.task}: {exit_reason(error)}; a step of it by itself shows "
                           "where") from None
    if (least := min(curve)) <= 0:  # a diverged training gives NaN, which is valid
        raise InvalidInput("E-USER-CODE",
                           f"task {variant.task}: validation returned {least:g}, needed is a loss above 0, since others are "
                           "given as parts of it: return one that stays above 0, or train for fewer steps")
    return curve


def _table(name: str, curves: dict[Variant, Sequence[float]]) -> LearningTable | None:
    rows = rows_of(costs(curves))
    rows += alone_rows(curves) if rows else ()
    source = Provenance(datetime.date.today().isoformat(), f"python -m bench.own_learning {name}", len(curves),
                        (f"{OWN}: {name}",), str(torch.__version__), OWN)
    return LearningTable(source, rows, 1) if rows else None


def maker(name: str) -> Callable[[int], TrainingTask]:
    """The user's function, wrapped: it takes a seed and returns the checked task."""
    function = import_function(name, "task", WHAT)

    def make(seed: int) -> TrainingTask:
        return _guarded(name,
                        _fields(f"{name}: task({seed})", call_user_function(f"{name}: task({seed})", lambda: function(seed))))

    return make


def _fields(what: str, made: Any) -> dict[str, Any]:
    """The fields of a task, checked, from the result of a user's function."""
    if not isinstance(made, Mapping):
        raise InvalidInput("E-USER-CODE", f"{what} returned {type(made).__name__}, needed is a function {WHAT}")
    if absent := [field for field in FIELDS if field not in made]:
        raise InvalidInput("E-USER-CODE", f"{what} returned a dict without {', '.join(absent)}; needed is a function {WHAT}")
    for field in FIELDS:
        if not (isinstance(made[field], nn.Module) if field == "model" else callable(made[field])):
            raise InvalidInput("E-USER-CODE", f"{what}: its {field} is of type {type(made[field]).__name__}, needed is "
                               f"{'a torch.nn.Module' if field == 'model' else f'a function: {CALLED[field]}'}")
    return {field: made[field] for field in FIELDS}


def _guarded(name: str, made: dict[str, Any]) -> TrainingTask:
    """The task with its functions wrapped: an exception in one becomes a one-line error that names the function."""
    def of(field: str) -> Callable[..., Any]:
        return lambda *call_arguments: call_user_function(f"{name}: {field}", lambda: made[field](*call_arguments))

    def batches(rank: int, world: int) -> Iterator[Any]:
        feed = call_user_function(f"{name}: batches", lambda: iter(made["batches"](rank, world)))
        end = object()
        while (batch := call_user_function(f"{name}: batches", lambda: next(feed, end))) is not end:
            yield batch

    return TrainingTask(made["model"], of("optimizer"), batches, of("loss"), of("validation"))


if __name__ == "__main__":
    sys.exit(main())

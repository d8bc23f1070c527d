"""`commlayer tune TASK --learning FILE`: measures the convergence factor of each sync mode on the user's task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from commlayer.cli.user_code import function_of, of_user
from commlayer.errors import InvalidInput
from commlayer.files import write_whole
from commlayer.planner.convergence import ALONE, ALONE_AMONG

if TYPE_CHECKING:
    from commlayer.autotune.measure.virtual_training import TrainingTask, Variant
    from commlayer.planner.tables import LearningTable

CODECS = ("int4()", "topk(ratio={ratio})")
LOCAL_STEPS = (4, 16)
LEAST_STEPS = 20
BY_ITSELF = "one worker by itself"
FIELDS = ("model", "optimizer", "batches", "loss", "validation")
CALLED = {"optimizer": "optimizer(model)", "batches": "batches(rank, world)", "loss": "loss(model, batch)",
          "validation": "validation(model)"}
"""The call in which each function of a task is used."""
WHAT = f"of a seed that returns a dict of {', '.join(FIELDS)}"


def run(
    name: str, out: Path, codecs: list[str] | None, ratio: str, local_steps: tuple[int, ...], *, staleness: bool, steps: int,
    seeds: int,
) -> None:
    if steps < LEAST_STEPS or seeds < 1:
        raise InvalidInput("E-CLI-OPTION",
                           f"--steps {steps} --seeds {seeds}: allowed are {LEAST_STEPS} steps or more, and a seed or more")
    if not out.absolute().parent.is_dir():
        raise InvalidInput("E-CLI-OPTION", f"{out}: the folder {out.absolute().parent} does not exist")
    make = maker(name)
    from commlayer.autotune.measure.convergence import measured, ways_of
    from commlayer.planner.tables import written

    count = 0

    def tell(way: Variant, loss: float, table: LearningTable | None) -> None:
        nonlocal count
        count += 1
        typer.echo(f"{count:3}  {said(way):56} loss {loss:.4g}")
        if table is not None:  # written after each training, so that an interrupted run keeps its rows
            write_whole({out: written(table)})

    several = local_steps if any(n > 1 for n in local_steps) else LOCAL_STEPS
    ways = list(ways_of(spelled(codecs, ratio), several, late=staleness))
    table = measured(name, make, ways, tell, steps=steps, seeds=seeds)
    for row in table.rows:
        if row.workers == ALONE:
            typer.echo(f"{BY_ITSELF:56} {row.steps:.2f} times as many steps as {ALONE_AMONG} together")
        if row.workers == 0:
            how = f"{row.codec}{', updates' if row.codes == 'updates' and row.every == 1 else ''}"
            how += (f", every={row.every}" if row.every > 1 else "") + (", overlapped" if row.overlap else "")
            typer.echo(f"{how + (', a step late' if row.late else ''):56} {row.steps:.2f} times as many steps as dense")
    typer.echo(f'{len(table.rows)} rows in {out}: commlayer plan make --learning {out}, attach(config={{"learning": "{out}"}})')


def spelled(codecs: list[str] | None, ratio: str) -> tuple[str, ...]:
    """The codecs to measure. A codec with a ratio appears at both ends of its range, the larger ratio first."""
    from commlayer.compressors import parse

    ends = ["0.1", "0.01"] if codecs is None else ratio.split(":")[::-1]
    spellings = []
    for codec in codecs or CODECS:
        for end in ends if "{ratio}" in codec else ends[:1]:
            text = codec.replace("{ratio}", end)
            try:
                parse(text)
            except (TypeError, ValueError) as error:
                raise InvalidInput("E-CLI-OPTION", f"--codec: {error}") from None
            spellings.append(text)
    return tuple(spellings)


def maker(name: str) -> Callable[[int], TrainingTask]:
    """The user's function, wrapped: it takes a seed and returns the checked task."""
    function = function_of(name, "task", WHAT)

    def make(seed: int) -> TrainingTask:
        return _guarded(name, _fields(f"{name}: task({seed})", of_user(f"{name}: task({seed})", lambda: function(seed))))

    return make


def _fields(what: str, made: Any) -> dict[str, Any]:
    """The fields of a task, checked, from the result of a user's function."""
    from torch import nn

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
    from commlayer.autotune.measure.virtual_training import TrainingTask

    def of(field: str) -> Callable[..., Any]:
        return lambda *given: of_user(f"{name}: {field}", lambda: made[field](*given))

    def batches(rank: int, world: int) -> Iterator[Any]:
        feed = of_user(f"{name}: batches", lambda: iter(made["batches"](rank, world)))
        end = object()
        while (batch := of_user(f"{name}: batches", lambda: next(feed, end))) is not end:
            yield batch

    return TrainingTask(made["model"], of("optimizer"), batches, of("loss"), of("validation"))


def said(way: Variant) -> str:
    """The sync mode, for the console."""
    parts = [BY_ITSELF if way.workers == ALONE else way.codec, "updates" if way.codes == "updates" else "",
             f"every={way.every}" if way.every > 1 else "", 'overlap="round"' if way.overlap else "",
             "one step late" if way.late else "", f"seed {way.seed}" if way.seed else ""]
    return ", ".join(filter(None, parts))

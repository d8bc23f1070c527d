"""Learning table of a user's own task: measures how many steps sync modes and codecs cost on a small proxy.

    table = measured("task.py", make, [*ways_of(("int4()",), (4, 16))], tell)

Uses the method of the built-in table (`python -m bench learning`) with the user's model, data, optimizer and rate.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence

import torch
from msgspec import structs

from commlayer.autotune.measure import learning_costs
from commlayer.autotune.measure.learning import LOOKS, STEPS, Make, Way, train
from commlayer.codec_name import SPARSE, named
from commlayer.errors import InvalidInput, cause_of
from commlayer.optim.family import family_of
from commlayer.planner.model.learning import ALONE
from commlayer.planner.tables.learning import LearningTable, Provenance

OWN = "your proxy"
"""Source that distinguishes these rows from the built-in ones."""
Tell = Callable[[Way, float, LearningTable | None], None]
"""Called after each training with its last loss and the table so far."""


def ways_of(codecs: Sequence[str], local_steps: Sequence[int], *, late: bool = False) -> Iterator[Way]:
    """The most useful configurations: each codec for gradients and for updates; local steps, with and without overlap, with
    the finest codec that is not sparse; and, if local steps are requested, overlapped updates of each step."""
    dense = Way("", "")
    yield dense
    yield structs.replace(dense, workers=ALONE)
    codecs = [codec for codec in dict.fromkeys(codecs) if codec != dense.codec]
    yield from (structs.replace(dense, codec=codec) for codec in codecs)
    fine = next((codec for codec in codecs if named(codec).core.family not in SPARSE), dense.codec)
    for every in sorted({n for n in local_steps if n > 1}):
        yield from (structs.replace(dense, codec=fine, every=every, overlap=overlap) for overlap in ("", "round"))
    yield from (structs.replace(dense, codec=codec, codes="updates") for codec in codecs)
    if max(local_steps, default=1) > 1:
        yield structs.replace(dense, codec=fine, codes="updates", overlap="round")
    if late:
        yield structs.replace(dense, codec=fine, late=True)


def measured(name: str, make: Make, ways: Sequence[Way], tell: Tell, *, steps: int = STEPS, seeds: int = 1) -> LearningTable:
    """Trains all configurations. Raises InvalidInput with one line for a task that cannot be trained."""
    family = family_of(_optimizer(name, make))
    if family == "other":
        raise InvalidInput("E-USER-CODE",
                           f"{name}: its optimizer is of no family that tables have; allowed: SGD, Adam and their like")
    curves: dict[Way, Sequence[float]] = {}
    table: LearningTable | None = None
    for seed in range(seeds):
        for way in ways:
            mine = structs.replace(way, task=name, optimizer=family, seed=seed)
            curves[mine] = _trained(mine, make, steps)
            table = _table(name, curves)
            tell(mine, curves[mine][-1], table)
    if table is None:
        raise InvalidInput("E-USER-CODE", f"{name}: nothing to compare with dense training; name a codec or local steps")
    return table


def _trained(way: Way, make: Make, steps: int) -> Sequence[float]:
    """Trains one configuration; an error in the user's code becomes one line."""
    try:
        curve = train(way, make, steps=steps, looks=min(LOOKS, steps))
    except ValueError:
        raise
    except Exception as error:
        raise InvalidInput("E-USER-CODE", f"task {way.task}: {cause_of(error)}; a step of it by itself shows where") from None
    if (least := min(curve)) <= 0:  # a diverged training gives NaN, which is valid
        raise InvalidInput("E-USER-CODE",
                           f"task {way.task}: validation returned {least:g}, needed is a loss above 0, since others are told "
                           "as parts of it: return one that stays above 0, or train for fewer steps")
    return curve


def _optimizer(name: str, make: Make) -> torch.optim.Optimizer:
    task = make(0)
    return task.optimizer(task.model)


def _table(name: str, curves: dict[Way, Sequence[float]]) -> LearningTable | None:
    rows = learning_costs.rows(learning_costs.costs(curves))
    rows += learning_costs.alone_rows(curves) if rows else ()
    source = Provenance(datetime.date.today().isoformat(), f"commlayer tune {name} --learning", len(curves),
                        (f"{OWN}: {name}",), str(torch.__version__), OWN)
    return LearningTable(source, rows) if rows else None

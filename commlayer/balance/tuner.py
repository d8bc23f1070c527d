"""Searches for fast settings within the loss budget, on short proxy runs.

The first trial is dense; all others are compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from commlayer.balance.tuner_loss import LossModel, LossPoint, family
from commlayer.balance.tuner_space import DENSE, EXACT, SearchSpace, Settings, spelled
from commlayer.balance.tuner_store import Search, Store, TuningTrial
from commlayer.errors import InvalidInput

if TYPE_CHECKING:
    from commlayer.balance.tuner_engine import Engine

Proxy = Callable[[Settings], Mapping[str, Any]]
"""Trains for a short time with these settings: {"seconds": ..., "loss": ...}."""

STEEP = 50.0
"""Penalty for exceeding the budget: each extra per cent of loss counts as half as much time again."""

NEEDED = 'needed is a dict such as {"seconds": 3.1, "loss": 0.142}'
LONGEST = 80
"""Longest excerpt of a proxy's result in an error."""
DENSE_FAILED = "the dense run failed, with which all others are compared"


def tune(proxy: Proxy, store: Store, search: Search, engine: Engine, trials: int) -> Iterator[TuningTrial]:
    """Runs trials until there are `trials`, counting those of earlier calls; yields each new one."""
    if store.trials and store.trials[0].error:
        raise InvalidInput("E-TUNE-BASELINE",
                           f"{DENSE_FAILED}: {store.trials[0].error}; delete {store.path}, or give another --store")
    for i, trial in enumerate(store.trials):
        engine.tell(trial.settings, score(store.trials[: i + 1], search.budget))
    while len(store.trials) < trials:
        settings = engine.ask() if store.trials else first(search.space)
        trial = run(proxy, settings)
        if trial.error and not store.trials:  # not stored: the same command runs it again
            raise InvalidInput("E-TUNE-BASELINE", f"{DENSE_FAILED}: {trial.error}")
        store.add(trial)
        engine.tell(settings, score(store.trials, search.budget))
        yield trial


def first(space: SearchSpace) -> Settings:
    """Dense and exact settings, with all other dimensions at the middle."""
    return space.plain({d.name: EXACT[d.name] if d.name in EXACT else d.at(0.5) for d in space.dimensions})


def run(proxy: Proxy, settings: Settings) -> TuningTrial:
    """One trial. If the proxy fails, the trial is recorded as failed and the search continues."""
    try:
        result: Any = proxy(spelled(settings))
    except Exception as error:
        return TuningTrial(settings, 0.0, 0.0, f"{type(error).__name__}: {error}".splitlines()[0])
    try:
        seconds, loss = float(result["seconds"]), float(result["loss"])
    except (KeyError, IndexError, TypeError, ValueError):
        return TuningTrial(settings, 0.0, 0.0, f"the proxy returned {repr(result)[:LONGEST]}, {NEEDED}")
    if not (0 < seconds < math.inf and math.isfinite(loss)):
        return TuningTrial(settings, 0.0, 0.0, f"got {seconds} s and loss {loss}, allowed: finite numbers, seconds above 0")
    return TuningTrial(settings, seconds, loss)


def excess(trial: TuningTrial, dense: TuningTrial) -> float:
    """Increase of the loss over dense training, relative to dense training's loss."""
    return (trial.loss - dense.loss) / max(abs(dense.loss), 1e-9)


def price(trial: TuningTrial, dense: TuningTrial, budget: float) -> float:
    """The objective: the seconds, increased if the loss exceeds the budget."""
    return trial.seconds * (1 + STEEP * max(0.0, excess(trial, dense) - budget))


def score(trials: Sequence[TuningTrial], budget: float) -> float:
    """The last trial's objective for the engine: the logarithm of its price. A failed trial counts as the worst."""
    *others, last = trials
    if last.error:
        return max((math.log(price(t, trials[0], budget)) for t in others if not t.error), default=0.0)
    return math.log(price(last, trials[0], budget))


def best(trials: Sequence[TuningTrial], budget: float) -> TuningTrial:
    """The fastest trial within the budget; the dense one always qualifies."""
    within = [t for t in trials if not t.error and excess(t, trials[0]) <= budget]
    return min(within, key=lambda t: t.seconds)


def loss_model(trials: Sequence[TuningTrial]) -> LossModel:
    """Loss penalties of codecs, against dense training on the same batch, or against the first trial if that batch has no
    dense run.

    Trials with local steps or staleness count only if a dense trial with the same settings exists.
    """
    good = [t for t in trials if not t.error]
    dense = {_besides(t): t for t in reversed(good) if t.settings["codec"] == DENSE}
    points = []
    for trial in good:
        exact = all(trial.settings.get(name, value) == value for name, value in EXACT.items() if name != "codec")
        against = dense.get(_besides(trial), trials[0] if exact else None)
        if against is None:
            continue
        spelling = str(trial.settings["codec"])
        ratio = float(trial.settings.get("ratio", 1.0)) if "{ratio}" in spelling else 1.0
        points.append(LossPoint(family(spelling.replace("{ratio}", "1")), ratio, max(0.0, excess(trial, against))))
    return LossModel(tuple(points))


def _besides(trial: TuningTrial) -> tuple[tuple[str, Any], ...]:
    """A trial's settings without the codec."""
    return tuple(sorted((name, value) for name, value in trial.settings.items() if name not in ("codec", "ratio")))

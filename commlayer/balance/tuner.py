"""Searches for fast settings within the loss budget, by short proxy runs.

The first trial is dense; all other trials are compared with it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commlayer.balance.loss_model import LossModel, LossPoint, family
from commlayer.errors import InvalidInput, RecordError
from commlayer.files import write_whole
from commlayer.records import Record, decode, encode

if TYPE_CHECKING:
    import numpy as np

Settings = dict[str, Any]
"""Settings of a proxy run: one value per dimension of the search space, with the complete spelling in `codec`."""


class Dimension(Record, frozen=True):
    """One setting in the search space: a range from `low` to `high` on a logarithmic scale, or a choice."""

    name: str
    low: float = 0.0
    high: float = 0.0
    choices: tuple[str | int, ...] = ()

    @property
    def width(self) -> int:
        """Number of coordinates of this dimension. A text dimension has one coordinate per choice, since texts have no order;
        any other dimension has 1."""
        return len(self.choices) if self.choices and isinstance(self.choices[0], str) else 1

    def coordinates(self, value: Any) -> list[float]:
        if not self.choices:
            return [math.log(value / self.low) / math.log(self.high / self.low)]
        if self.width > 1:
            # 0.5: two choices differ as much as two numbers that are half their range apart.
            return [0.5 * (value == choice) for choice in self.choices]
        return [self.choices.index(value) / max(1, len(self.choices) - 1)]

    def at(self, u: float) -> Any:
        """Returns the value at the fraction `u` of the range."""
        if self.choices:
            return self.choices[min(len(self.choices) - 1, int(u * len(self.choices)))]
        return float(f"{self.low * (self.high / self.low) ** u:.4g}")


class SearchSpace(Record, frozen=True):
    """All dimensions of a search. `codec` is a choice of spellings in which {ratio} stands for the compression ratio."""

    dimensions: tuple[Dimension, ...]

    def at(self, units: list[float]) -> Settings:
        """Returns the raw settings at a point of the unit cube, one coordinate per dimension."""
        return self.plain({d.name: d.at(u) for d, u in zip(self.dimensions, units, strict=True)})

    def plain(self, settings: Settings) -> Settings:
        """Returns one form for equivalent settings: a codec without ratio gets the highest ratio, and local steps exclude
        staleness."""
        if settings.get("stale") and settings.get("local_steps", 1) > 1:
            settings = settings | {"stale": 0}
        ratio = next((d for d in self.dimensions if d.name == "ratio"), None)
        if ratio is not None and "{ratio}" not in str(settings.get("codec", "{ratio}")):
            return settings | {"ratio": ratio.high}
        return settings

    def coordinates(self, settings: Mapping[str, Any]) -> list[float]:
        """Returns these settings as coordinates for the search engine."""
        return [x for d in self.dimensions for x in d.coordinates(settings[d.name])]

    def check(self) -> None:
        """Raises a one-line error if no engine could search the space."""
        for d in self.dimensions:
            if not d.choices and not 0 < d.low < d.high < math.inf:
                raise InvalidInput("E-TUNE-ARGUMENT",
                                   f"{d.name}: got {d.low:g} to {d.high:g}, allowed: a range above 0, such as 0.001:0.1")


def proxy_settings(settings: Settings) -> Settings:
    """Returns settings for a proxy run: the ratio inserted into the codec's spelling, staleness as a bool."""
    stale = {"stale": bool(settings["stale"])} if "stale" in settings else {}
    return settings | stale | {"codec": str(settings["codec"]).replace("{ratio}", f"{settings['ratio']:g}")}


CODECS = ("fp16()", "int8()", "topk(ratio={ratio}, values='int8')")
DENSE = "identity()"
EXACT: dict[str, Any] = {"codec": DENSE, "local_steps": 1, "stale": 0}
"""Values of settings with which training is exact."""


def default_space(*, codecs: tuple[str, ...] = CODECS, ratio: tuple[float, float] = (0.001, 0.3),
                  batches: tuple[int, ...] = (64, 128, 256), local_steps: tuple[int, ...] = (1,),
                  staleness: bool = False) -> SearchSpace:
    """Returns the default search space: codec, ratio and batch. Local steps and staleness are included only on request, since
    neither is exact."""
    codec, batch = Dimension("codec", choices=(DENSE, *codecs)), Dimension("batch", choices=batches)
    dimensions = [codec, Dimension("ratio", *ratio), batch]
    if any(n > 1 for n in local_steps):
        dimensions.append(Dimension("local_steps", choices=tuple(sorted({EXACT["local_steps"], *local_steps}))))
    if staleness:
        dimensions.append(Dimension("stale", choices=(EXACT["stale"], 1)))
    space = SearchSpace(tuple(dimensions))
    space.check()
    return space


class Search(Record, frozen=True):
    """Identifies a search. A store keeps the trials of one search."""

    task: str
    space: SearchSpace
    budget: float
    """Allowed relative increase of the loss; 0.005 means half a per cent."""
    seed: int = 0


class TuningTrial(Record, frozen=True):
    """One proxy run. If it failed, `error` is the reason, and its time and loss do not count."""

    settings: dict[str, Any]
    """Raw settings, in the form of the search space."""
    seconds: float
    loss: float
    error: str = ""


class Store:
    """An append-only file of trials. An incomplete last line, from a crash, is dropped."""

    def __init__(self, path: Path, search: Search) -> None:
        self.path, self.trials = path, list[TuningTrial]()
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        complete_lines = [line for line in lines if line.endswith(b"\n")]
        if not complete_lines:
            write_whole({path: encode(search) + b"\n"})
            return
        kept = decode(complete_lines[0], Search, f"{path}: line 1")
        if kept != search:
            name = next(f for f in Search.__struct_fields__ if getattr(kept, f) != getattr(search, f))
            raise RecordError("E-TUNE-STORE",
                              f"{path} holds trials of another search (its {name} differs): give another --store, or delete it")
        self.trials = [decode(line, TuningTrial, f"{path}: line {i}") for i, line in enumerate(complete_lines[1:], 2)]
        if len(complete_lines) < len(lines):
            write_whole({path: b"".join(complete_lines)})

    def add(self, trial: TuningTrial) -> None:
        """Appends the trial. The trial is stored in the file when this method returns."""
        with self.path.open("ab") as file:
            file.write(encode(trial) + b"\n")
        self.trials.append(trial)


RANDOM_TRIALS = 8
CANDIDATES = 1500
LENGTHS = (0.05, 10.0)
"""Range of the Gaussian process's length scales in the unit cube, from which maximum likelihood chooses."""


METHODS = ("bayesian", "nelder-mead")


class Engine:
    """A minimizing search: ask() proposes settings, tell() takes their result."""

    def __init__(self, space: SearchSpace, seed: int, method: str = METHODS[0]) -> None:
        """`method`: a Gaussian process with expected improvement ("bayesian"), or "nelder-mead"."""
        self._space, self._seed, self._method = space, seed, method
        self._tried: list[Settings] = []
        self._values: list[float] = []

    def ask(self) -> Settings:
        """Returns settings that were not tried before, or the best settings if all were tried."""
        if self._method == "nelder-mead":
            return nelder_mead(self._space, self._tried, self._values, self._seed) or self._best()
        import numpy as np  # imported late, because `commlayer tune --help` and stored searches do not need it

        # Seeded by the number of trials, so that a resumed search continues like an uninterrupted one.
        candidates = self._candidates(np.random.default_rng([self._seed, len(self._tried)]))
        if not candidates:
            return self._best()
        return candidates[0] if len(self._tried) < RANDOM_TRIALS else self._most_promising(candidates)

    def tell(self, settings: Settings, value: float) -> None:
        self._tried.append(settings)
        self._values.append(value)

    def _best(self) -> Settings:
        return self._tried[min(range(len(self._values)), key=self._values.__getitem__)]

    def _candidates(self, random: np.random.Generator) -> list[Settings]:
        """Returns random settings and variations of the best, without those already tried."""
        candidates = [self._space.at(list(row)) for row in random.random((CANDIDATES, len(self._space.dimensions)))]
        if self._tried:
            best = self._best()
            for other in candidates[: CANDIDATES // 3]:
                kept = random.random(len(best)) < 0.6
                candidates.append(self._space.plain({name: best[name] if keep else other[name]
                                                     for keep, name in zip(kept, sorted(best), strict=True)}))
        seen = {_key(settings) for settings in self._tried}
        return [settings for settings in candidates if _key(settings) not in seen]

    def _most_promising(self, candidates: list[Settings]) -> Settings:
        """Returns the candidate with the largest expected improvement."""
        import numpy as np
        from skopt.acquisition import gaussian_ei
        from skopt.learning import GaussianProcessRegressor
        from skopt.learning.gaussian_process.kernels import Matern

        process: Any = GaussianProcessRegressor(Matern(0.5, LENGTHS, nu=2.5), normalize_y=True, noise="gaussian")
        with warnings.catch_warnings():
            # The fit warns if a length or the noise ends at a bound of its range. This is normal with few or similar trials.
            warnings.simplefilter("ignore")
            process.fit(self._points(self._tried), self._values)
        promise = gaussian_ei(self._points(candidates), process, y_opt=min(self._values), xi=0.0)
        return candidates[int(np.argmax(promise))]

    def _points(self, settings: list[Settings]) -> list[list[float]]:
        return [self._space.coordinates(one) for one in settings]


def _key(settings: Settings) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(settings.items()))


FIRST_MOVE = 0.4
"""Size of the first Nelder-Mead simplex in the unit cube. A smaller one would stay in the choices in which it begins."""
NEARBY = 0.05
"""A Nelder-Mead simplex of this size, with values that differ by less than this, has converged. Further trials begin
elsewhere."""
RESTARTS = 200


class _Untried(Exception):
    """Raised by the objective function when the search asks for settings that have no known result."""


def nelder_mead(space: SearchSpace, tried: Sequence[Settings], values: Sequence[float], seed: int) -> Settings | None:
    """Returns the next settings of a Nelder-Mead search that has tried `tried` with the results `values`; None if it finds no
    other settings.

    scipy's search runs again with the known values, up to the first settings that have none. A resumed search therefore
    continues like an uninterrupted one, and equal settings are tried once. The search begins in the middle; after it has
    converged, it begins again at random places.
    """
    import numpy as np
    from scipy.optimize import minimize

    known, width = {_key(settings): value for settings, value in zip(tried, values, strict=True)}, len(space.dimensions)

    def value_at(point: np.ndarray) -> float:
        settings = space.at(point.tolist())
        if _key(settings) not in known:
            raise _Untried(settings)
        return known[_key(settings)]

    for restart in range(RESTARTS):
        start = np.random.default_rng([seed, restart]).random(width) if restart else np.full(width, 0.5)
        moves = np.where(start < 0.5, FIRST_MOVE, -FIRST_MOVE) * np.eye(width)
        try:
            minimize(value_at, start, method="Nelder-Mead", bounds=[(0.0, 1.0)] * width, options={
                "initial_simplex": [start, *(start + moves)], "xatol": NEARBY, "fatol": NEARBY})
        except _Untried as untried:
            settings: Settings = untried.args[0]
            return settings
    return None


Proxy = Callable[[Settings], Mapping[str, Any]]
"""Function that trains for a short time with these settings and returns {"seconds": ..., "loss": ...}."""

STEEP = 50.0
"""Penalty for a loss above the budget: each extra per cent of loss counts as half as much time again."""

NEEDED = 'needed is a dict such as {"seconds": 3.1, "loss": 0.142}'
LONGEST = 80
"""Maximum number of characters of a proxy's result in an error."""
DENSE_FAILED = "the dense run failed, with which all others are compared"


def tune(proxy: Proxy, store: Store, search: Search, engine: Engine, trials: int) -> Iterator[TuningTrial]:
    """Runs trials until there are `trials` of them, including those of earlier calls. Yields each new one."""
    if store.trials and store.trials[0].error:
        raise InvalidInput("E-TUNE-BASELINE",
                           f"{DENSE_FAILED}: {store.trials[0].error}; delete {store.path}, or give another --store")
    for i, trial in enumerate(store.trials):
        engine.tell(trial.settings, score(store.trials[: i + 1], search.budget))
    while len(store.trials) < trials:
        settings = engine.ask() if store.trials else first(search.space)
        trial = run(proxy, settings)
        if trial.error and not store.trials:  # a failed first trial is not stored, so the same command repeats it
            raise InvalidInput("E-TUNE-BASELINE", f"{DENSE_FAILED}: {trial.error}")
        store.add(trial)
        engine.tell(settings, score(store.trials, search.budget))
        yield trial


def first(space: SearchSpace) -> Settings:
    """Returns the settings of the first trial: dense and exact, all other dimensions at the middle."""
    return space.plain({d.name: EXACT[d.name] if d.name in EXACT else d.at(0.5) for d in space.dimensions})


def run(proxy: Proxy, settings: Settings) -> TuningTrial:
    """Runs one trial. If the proxy fails, the trial is recorded as failed and the search continues."""
    try:
        result: Any = proxy(proxy_settings(settings))
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
    """Returns the increase of the loss over dense training, relative to dense training's loss."""
    return (trial.loss - dense.loss) / max(abs(dense.loss), 1e-9)


def price(trial: TuningTrial, dense: TuningTrial, budget: float) -> float:
    """Returns the search's objective: the trial's seconds, increased if the loss exceeds the budget."""
    return trial.seconds * (1 + STEEP * max(0.0, excess(trial, dense) - budget))


def score(trials: Sequence[TuningTrial], budget: float) -> float:
    """Returns the last trial's objective for the engine: the logarithm of its price(). A failed trial counts as the worst."""
    *others, last = trials
    if last.error:
        return max((math.log(price(t, trials[0], budget)) for t in others if not t.error), default=0.0)
    return math.log(price(last, trials[0], budget))


def best(trials: Sequence[TuningTrial], budget: float) -> TuningTrial:
    """Returns the fastest trial within the budget; the dense one always qualifies."""
    within = [t for t in trials if not t.error and excess(t, trials[0]) <= budget]
    return min(within, key=attrgetter("seconds"))


def loss_model(trials: Sequence[TuningTrial]) -> LossModel:
    """Returns each codec's loss penalties, relative to dense training on the same batch, or to the first trial if that batch
    has no dense run.

    Trials with local steps or staleness count only if a dense trial with the same settings exists.
    """
    good = [t for t in trials if not t.error]
    dense = {_settings_without_codec(t): t for t in reversed(good) if t.settings["codec"] == DENSE}
    points = []
    for trial in good:
        exact = all(trial.settings.get(name, value) == value for name, value in EXACT.items() if name != "codec")
        against = dense.get(_settings_without_codec(trial), trials[0] if exact else None)
        if against is None:
            continue
        spelling = str(trial.settings["codec"])
        ratio = float(trial.settings.get("ratio", 1.0)) if "{ratio}" in spelling else 1.0
        points.append(LossPoint(family(spelling.replace("{ratio}", "1")), ratio, max(0.0, excess(trial, against))))
    return LossModel(tuple(points))


def _settings_without_codec(trial: TuningTrial) -> tuple[tuple[str, Any], ...]:
    """Returns a trial's settings without the codec."""
    return tuple(sorted((name, value) for name, value in trial.settings.items() if name not in ("codec", "ratio")))

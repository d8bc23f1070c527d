"""The convergence model: how many more steps a training recipe needs to the same loss than dense synchronous training.

    excess(rows, "topk(ratio=0.01)", Recipe("adam", every=4)).high     # 0.2: a cautious fifth more steps than dense needs
    one_worker_factor(rows, "adam", 3, noise=85)                       # 2.9: steps of one worker alone relative to 3 workers

It has three parts, each with its own source.

More data per step. Training with batch B needs 1 + noise_scale / B times as many steps as with an unlimited batch (McCandlish
et al., 1812.06162). This law estimates one worker alone relative to several. Small models gain less than that (`LongRunLaw`).

Local steps. They lose a part of what the data of several workers gains. For models of at least `PUBLISHED_NUMEL` parameters, a
law fitted to published trainings (`LocalStepLaw`) gives this part; up to `LONG_NUMEL` parameters, one fitted to our own
long trainings does (`LongRunLaw`). For models as small as those of the short runs, the measured rows do. Between these sizes
the costs are blended. Rows measured on the user's own model are used without the laws.

Codecs and delays. Measured rows on small models, in short runs at a constant learning rate. Measured points are returned as
measured, made monotonic: a smaller ratio or more local steps never cost less. Between measured points, values are interpolated
over log(ratio) and log2(every). An unmeasured combination costs as much as the worst related measured combination. Large models
need fewer additional steps for codecs of 4 bits and more, and none from `FREE_NUMEL` parameters on.

Rows are for exchanges of the whole model that either block or are merged one outer step (H local steps) later. With F
fragments, each is merged H / F steps later; its cost is interpolated between these two. Measurements with lags of 3 and 5 of 16
steps agree. For larger models, both laws price the delay in proportion to F^-1.5 (`LongRunLaw.late_merge`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from commlayer.codec_spec import SPARSE, CodecSpec, parse_spec, spec_error
from commlayer.records import Record

FIELDS = ("steps", "high", "loss", "loss_high")
ALONE, ALONE_AMONG = 1, 4
"""A row with workers=ALONE is for one worker alone, compared with ALONE_AMONG workers that exchange in every step."""


FAMILIES = ("sgd", "adam", "muon", "lion")
LIKE: Mapping[str, str] = {"lion": "adam"}
"""Families without measurements, and the family whose rows they use: Lion's and Adam's steps have the same size for any noise
in the gradients."""


class LearningRow(Record, frozen=True):
    """The measured convergence cost of one combination of settings, over several tasks and seeds."""

    optimizer: str
    """"sgd" (with momentum), "adam" (Adam, AdamW, LANS and similar), "muon" or "lion"."""
    codes: str
    """What is compressed: "gradients" or "updates" (parameter deltas)."""
    codec: str
    """The codec as in plans, without error feedback, for example "topk(ratio=0.01)"."""
    every: int
    """Steps per exchange."""
    overlap: str
    """"" (blocking) or "round" (merged one outer step later). "forward" is exact and uses the row of ""."""
    late: bool
    """True: averaged gradients are applied one step late."""
    workers: int
    """Number of workers. 0: the row is the worst over all measured numbers. `ALONE`: one worker alone."""
    steps: float
    """Median convergence factor: steps to the same loss, relative to dense training with an exchange in every step."""
    steps_high: float
    """Cautious convergence factor: the 80th percentile."""
    loss: float
    """Median relative increase of the loss after the same number of steps: 0.01 is 1 %, the unit of loss budgets."""
    loss_high: float
    tasks: int
    runs: int
    numel: int = 0
    """Number of parameters of the largest measured model. 0: the row was measured on the user's own model."""


def row_problem(row: LearningRow) -> str:
    """Describes what is wrong with a row of a user's table; empty if the row is valid."""
    if wrong := spec_error(row.codec):
        return wrong
    allowed = {"optimizer": FAMILIES, "codes": ("gradients", "updates"), "overlap": ("", "round")}
    which = [name for name, values in allowed.items() if getattr(row, name) not in values]
    which += [name for name, least in {"every": 1, "workers": 0, "steps": 1, "steps_high": 1, "loss": 0, "loss_high": 0}.items()
              if not (getattr(row, name) >= least and math.isfinite(getattr(row, name)))]
    problems = "; ".join(f"{name} is {getattr(row, name)!r}" for name in which)
    return problems and (f"row {row.optimizer} {row.codec} every={row.every}: {problems}, "
                         f"allowed: an optimizer of {', '.join(FAMILIES)}, gradients or updates, "
                     "overlap of round or nothing, every and steps of 1 or more, workers and losses of 0 or more, all finite")


class Recipe(NamedTuple):
    """Settings of a plan, other than codecs, that affect convergence."""

    optimizer: str = "adam"
    """One of `FAMILIES`. A family without rows counts like its relative in `LIKE`; any other gets the highest cost of all."""
    codes: str = "gradients"
    every: int = 1
    overlap: str = ""
    late: bool = False
    workers: int = 4
    fragments: int = 1
    """Number of parts of the model that are exchanged one after the other."""
    numel: int = 0
    """Number of parameters of the model. 0: as many as the measured models have."""
    noise: float = 0.0
    """The gradient noise scale in batches of one worker. 0: unknown, and assumed to be large."""


class Excess(NamedTuple):
    """Convergence cost on top of dense training with an exchange in every step: additional steps and loss, median and cautious
    (`high`)."""

    steps: float = 0.0
    """Convergence factor - 1."""
    high: float = 0.0
    loss: float = 0.0
    loss_high: float = 0.0


NONE = Excess()


def one_worker_factor(rows: Iterable[LearningRow], optimizer: str, workers: float, noise: float = 0.0, numel: int = 0) -> float:
    """Steps that one worker alone needs with its own batch, relative to `workers` workers together; 0: unknown.

    `noise`: the gradient noise scale in batches of one worker; 0: unknown, so the measured trainings' scale is used. An
    unmeasured optimizer gets the smallest measured scale, which favors one worker alone. `numel`: as of `steps_alone`.
    """
    if noise:
        return steps_alone(noise, workers, numel)
    noise = measured_noise(rows, optimizer)
    return steps_alone(noise, workers) if noise else 0.0


def steps_alone(noise: float, workers: float, numel: int = 0) -> float:
    """Steps that one worker needs with its own batch, relative to steps with the batches of `workers` workers.

    `noise`: the gradient noise scale in batches of one worker; it may be infinite. `numel`: number of parameters, for which the
    law of our long trainings applies (`LongRunLaw`); 0: the noise scale alone decides, as for large models.

    >>> round(steps_alone(1.0, 4), 2), round(steps_alone(16.0, 4), 2), round(steps_alone(math.inf, 4), 2)
    (1.6, 3.4, 4.0)
    >>> steps_alone(16.0, 4, 350_000) < steps_alone(16.0, 4, 124_000_000) == steps_alone(16.0, 4)
    True
    """
    ratio = workers if noise == math.inf else (1 + noise) / (1 + noise / workers)
    return float(ratio ** (LONG_RUNS.realised_part(numel) if numel else 1.0))


class LongRunLaw(NamedTuple):
    """What our long trainings with AdamW show for models of up to `LONG_NUMEL` parameters, in logarithms of steps.

    At a fixed learning rate, small models gain less from more data per step than the noise scale promises: they realise the
    part min(1, realised (N / 1e6)^growth), for N parameters. H local steps lose the part min(1, lost ln(1 + (H - 1) / 2)
    / ln 15.5) of it, so no number of local steps takes longer than one worker alone. (H - 1) / 2 is the mean number of its own
    steps that a worker has taken since the last exchange, and 15.5 belongs to 30 local steps, so these lose the part `lost`.
    If the exchange is overlapped, its result is merged late. Merging the whole model late adds `late` times what 30 local steps
    cost. Merging it in F fragments adds F^-1.5 of that.

    The trainings have 2 to 8 workers; for more, costs are extrapolated. `python -m bench longrun-law` has the fit, and its
    error on each task when the fit omits that task.
    """

    realised: float
    growth: float
    lost: float
    late: float

    def realised_part(self, numel: int) -> float:
        return float(min(1.0, self.realised * (numel / 1e6) ** self.growth))

    def lost_part(self, every: float, fragments: int = 0) -> float:
        return min(1.0, self.lost * (math.log((every + 1) / 2) / math.log(15.5) + self.late_merge(fragments)))

    def late_merge(self, fragments: int) -> float:
        """What an overlapped exchange adds, relative to 30 local steps. 0 fragments: the exchange blocks."""
        return self.late * math.pow(fragments, -1.5) if fragments else 0.0


LONG_RUNS, LONG_RUNS_HIGH = LongRunLaw(0.74, 0.14, 0.4, 0.34), LongRunLaw(0.74, 0.14, 0.46, 0.49)
"""Median law, and the cautious law: at least 80 % of the trainings need at most its factor."""


def measured_noise(rows: Iterable[LearningRow], optimizer: str) -> float:
    """The gradient noise scale, in batches of one worker, that explains how many steps `ALONE_AMONG` workers saved in
    measurements."""
    known = {row.optimizer: row.steps for row in rows if row.workers == ALONE}
    steps = min(known.get(_known_as(optimizer, known)) or min(known.values(), default=1.0), 0.99 * ALONE_AMONG)
    return (steps - 1) / (1 - steps / ALONE_AMONG)


def late_measured(rows: Iterable[LearningRow], optimizer: str) -> bool:
    """True if one-step-late averages were measured for the optimizer's family, or for all families if the optimizer is unknown.
    Their cost is not inferred from related rows: one stale step costs some optimizers nothing and makes others diverge."""
    rows = tuple(rows)
    late = {row.optimizer for row in rows if row.late}
    return bool(rows) and late.issuperset(_families(rows, optimizer))


LATE_RATIO = 0.01
"""Ratio up to which one-step-late averages of a sparse codec must be measured with that codec: by DeCo-SGD's analysis
(2507.17346), staleness amplifies the error of compression exponentially."""


def late_allowed(rows: Iterable[LearningRow], codec: str, optimizer: str) -> bool:
    """False if `codec` sends at most `LATE_RATIO` of the entries and one-step-late averages were not measured with this kind of
    codec at this ratio, or a smaller one, for the optimizer's family."""
    core, rows = parse_spec(codec).core, tuple(rows)
    if core.family not in SPARSE or (core.ratio or 1.0) > LATE_RATIO:
        return True
    late = ((row.optimizer, parse_spec(row.codec).core) for row in rows if row.late)
    measured = {family for family, each in late if each.family == core.family and (each.ratio or 1.0) <= (core.ratio or 1.0)}
    return bool(measured) and measured.issuperset(_families(rows, optimizer))


def measured_local_steps(rows: Iterable[LearningRow]) -> int:
    """The largest number of local steps in any row; costs beyond this number are extrapolated."""
    return max((row.every for row in rows), default=1)


def _families(rows: Iterable[LearningRow], optimizer: str) -> list[str]:
    """The optimizer's family if it was measured, else all measured families."""
    known = {row.optimizer for row in rows if row.workers != ALONE}
    family = _known_as(optimizer, known)
    return [family] if family in known else sorted(known)


def _known_as(optimizer: str, known: Collection[str]) -> str:
    return optimizer if optimizer in known else LIKE.get(optimizer, optimizer)


def excess(rows: tuple[LearningRow, ...], codec: str, recipe: Recipe = Recipe()) -> Excess:
    """Convergence cost of exchanging with `codec`, spelled as in plans. Zero if there are no rows."""
    return _costs_of(_RowsById(rows)).look(codec, recipe) if rows else NONE


def _fraction_between(numel: int, low: int, high: int) -> float:
    """0 up to `low`, 1 from `high` on, and linear over the logarithm between them."""
    return min(1.0, max(0.0, math.log(numel / low) / math.log(high / low)))


class LocalStepLaw(NamedTuple):
    """Convergence factor of local steps: ln F = scale (M - 1)^power max(LEAST_SIZE, 1 - ln(N / 2e6) / sizes) ln H / ln 30, for
    M workers, N parameters and H local steps. More workers never take longer than fewer: for m < M, F of M workers is at most M
    / m times F of m workers.

    `python -m bench published` has the published trainings, the fit, and its error on each paper when the fit omits that paper.
    """

    scale: float
    power: float
    sizes: float

    def __call__(self, workers: float, numel: float, every: float) -> float:
        size = max(LEAST_SIZE, 1 - math.log(numel / 2e6) / self.sizes)
        slope = self.scale * size * math.log(every) / math.log(30)
        return math.exp(min(slope * (fewer - 1) ** self.power + math.log(workers / fewer)
                            for fewer in (workers, *range(1, math.ceil(workers)))))


LOCAL_STEPS, LOCAL_STEPS_HIGH = LocalStepLaw(0.0948, 1.15, 9.91), LocalStepLaw(0.193, 0.889, 10.4)
"""Median law, and the law for the 80th percentile. Both are fitted to AdamW models of 35 M to 15 B parameters with 2 to 16
workers and 30 to 2000 local steps."""
LEAST_SIZE = 0.1
"""Lower limit of the law's size factor: in publications, models of 3 and 15 B parameters still needed additional steps."""
MUON = 0.4
"""Muon's ln F relative to AdamW's, as published for models of 150 M to 15 B parameters (MuLoCo, 2505.23725). A transformer of
0.36 M agrees: 0.3 to 0.55."""
LOSS_EXPONENT = 0.0477
"""Exponent from steps to loss: a model trained F times as long has a loss lower by the factor F to this power (2503.09799: L ~
N^-0.0953 at 20 tokens per parameter)."""
SHORT_NUMEL, LONG_NUMEL, PUBLISHED_NUMEL, FREE_NUMEL = 350_000, 2_300_000, 35_000_000, 124_000_000
"""Model sizes in parameters: from SHORT_NUMEL on, rows of short runs no longer count for local steps; LONG_NUMEL is the largest
model of our long trainings, PUBLISHED_NUMEL the smallest of the published ones. From FREE_NUMEL on, codecs of `FREE_KINDS` cost
no steps according to Streaming DiLoCo."""


def local_step_excess(recipe: Recipe) -> Excess:
    """Convergence cost of local steps by our long trainings and by the published law, whose trainings block, all but one.

    The published law is for noise scales far above the workers' batches. With less noise a worker's own steps are nearer to
    those of all workers, so ln F is in proportion to the logarithm of the steps that more data saves.
    """
    if recipe.workers <= 1 or (recipe.every <= 1 and recipe.overlap != "round"):
        return NONE
    workers, large = recipe.workers, _fraction_between(recipe.numel, LONG_NUMEL, PUBLISHED_NUMEL)
    saved = math.log(steps_alone(recipe.noise or math.inf, workers, recipe.numel))
    if recipe.optimizer == "muon":
        saved *= MUON
    logs = []
    fragments = recipe.fragments if recipe.overlap == "round" else 0
    for own, published in ((LONG_RUNS, LOCAL_STEPS), (LONG_RUNS_HIGH, LOCAL_STEPS_HIGH)):
        # Relative to 30 local steps, a late merge is assumed to cost as much as in our own trainings.
        every = recipe.every * 30 ** own.late_merge(fragments)
        part = math.log(published(workers, recipe.numel, every)) / math.log(workers)
        logs.append(saved * ((1 - large) * own.lost_part(recipe.every, fragments) + large * part))
    steps, high = logs[0], max(logs)
    return Excess(*(math.expm1(log) for log in (steps, high, LOSS_EXPONENT * steps, LOSS_EXPONENT * high)))


class _RowsById:
    """Hashes and compares rows by identity: comparing hundreds of rows would take longer than the lookup."""

    def __init__(self, rows: tuple[LearningRow, ...]) -> None:
        self.rows = rows

    def __hash__(self) -> int:
        return id(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RowsById) and other.rows is self.rows


@functools.lru_cache(8)
def _costs_of(same: _RowsById) -> _Costs:
    return _Costs(same.rows)


class _Costs:
    """Interpolated convergence costs by optimizer and number of workers, built on first use."""

    def __init__(self, rows: tuple[LearningRow, ...]) -> None:
        self._rows = rows
        self._numel = max((row.numel for row in rows), default=0)
        """Number of parameters up to which the rows apply unchanged; 0: the rows were measured on the user's own model."""
        self._curves: dict[tuple[str, int], tuple[Curves, ...]] = {}
        self._found: dict[tuple[str, Recipe], Excess] = {}

    def look(self, codec: str, recipe: Recipe) -> Excess:
        value = self._found.get((codec, recipe))
        if value is None:
            value = self._found[codec, recipe] = self._look(codec, recipe)
        return value

    def _look(self, codec: str, recipe: Recipe) -> Excess:
        if recipe.numel > self._numel > 0:
            by_family = [self._sized(codec, recipe, name) for name in _families(self._rows, recipe.optimizer)]
            return Excess(*(max(of_field) for of_field in zip(*by_family, strict=True)))
        if recipe.overlap == "round" and recipe.fragments > 1:
            return self._sooner(codec, recipe)
        part = kind_and_point(codec, recipe.every)
        place = ExchangeMode(recipe.codes, recipe.overlap, recipe.late).plain(recipe.every)
        families = _families(self._rows, recipe.optimizer)
        each = [[curves.at(place, *part) for curves in self._of(name, recipe.workers)] for name in families]
        steps, high, loss, loss_high = (max(of_field) for of_field in zip(*each, strict=True))
        return Excess(steps, max(steps, high), loss, max(loss, loss_high))

    def _sized(self, codec: str, recipe: Recipe, family: str) -> Excess:
        """Convergence cost for a model larger than the measured ones, with the rows of one optimizer family."""
        small = recipe._replace(numel=0, optimizer=family)
        local = self.look(DENSE_CODEC, small._replace(late=False))
        weight = _fraction_between(recipe.numel, self._numel, SHORT_NUMEL)
        # More local steps never lower the cost of a codec.
        extra = [max(of_field) for of_field in zip(*(
            self._extra(codec, small._replace(every=every), recipe.numel)
            for every in sorted({2**i for i in range(recipe.every.bit_length())} | {recipe.every})), strict=True)]
        steps, high, loss, loss_high = (
            math.expm1((1 - weight) * math.log1p(own) + weight * math.log1p(others) + more)
            for own, others, more in zip(local, local_step_excess(recipe), extra, strict=True))
        return Excess(steps, max(steps, high), loss, max(loss, loss_high))

    def _extra(self, codec: str, recipe: Recipe, numel: int) -> tuple[float, ...]:
        """For each field of `Excess`, ln of the factor that late averages and a codec add to dense exchanges."""
        if recipe.every > 1:  # dense exchanges of local steps were measured with this number of workers only
            recipe = recipe._replace(workers=ALONE_AMONG)
        paid = 1 - _fraction_between(numel, self._numel, FREE_NUMEL) * (kind_and_point(codec, 1)[0] in FREE_KINDS)
        prompt, dense, coded = (self.look(DENSE_CODEC, recipe._replace(late=False)), self.look(DENSE_CODEC, recipe),
                                self.look(codec, recipe))
        return tuple(
            max(0.0, math.log1p(late) - math.log1p(own)) + paid * max(0.0, math.log1p(both) - math.log1p(late))
            for own, late, both in zip(prompt, dense, coded, strict=True))

    def _sooner(self, codec: str, recipe: Recipe) -> Excess:
        """Cost of overlapped fragments. A fragment is merged H / fragments steps after it was sent, so the cost is at most that
        of a whole outer step of delay."""
        overlapped_excess = self.look(codec, recipe._replace(fragments=1))
        blocking_excess = self.look(codec, recipe._replace(fragments=1, overlap=""))
        return Excess(*(late - max(0.0, late - soon) * (1 - 1 / recipe.fragments)
                        for late, soon in zip(overlapped_excess, blocking_excess, strict=True)))

    def _of(self, optimizer: str, workers: int) -> tuple[Curves, ...]:
        key = optimizer, workers
        if key not in self._curves:
            rows = _nearest((r for r in self._rows if r.optimizer == optimizer and r.workers != ALONE), workers)
            self._curves[key] = tuple(
                Curves({point: max(_value(r, field) for r in same) for point, same in rows.items()}) for field in FIELDS)
        return self._curves[key]


def _nearest(rows: Iterable[LearningRow], workers: int) -> dict[tuple[ExchangeMode, str, Point], list[LearningRow]]:
    """Groups rows by combination of settings. Of each group, keeps the rows for this number of workers, else the worst case."""
    by: dict[tuple[ExchangeMode, str, Point], list[LearningRow]] = {}
    for row in rows:
        by.setdefault(_point(row), []).append(row)
    counts = (workers, 0)
    return {point: next((matching for n in counts if (matching := [r for r in same if r.workers == n])), same)
            for point, same in by.items()}


def _point(row: LearningRow) -> tuple[ExchangeMode, str, Point]:
    kind, point = kind_and_point(row.codec, row.every)
    return ExchangeMode(row.codes, row.overlap, row.late).plain(row.every), kind, point


def _value(row: LearningRow, field: str) -> float:
    return max(0.0, {"steps": row.steps - 1, "high": row.steps_high - 1, "loss": row.loss, "loss_high": row.loss_high}[field])


DENSE, DENSE_CODEC = "identity", "identity()"
EXACT = ("identity", "fp16")
"""Codecs that cost no steps when gradients are compressed."""
LADDER = ("bf16", "int8", "int4", "onebit")
"""Codecs in descending order of bits per element; each costs at least as many steps as the one before."""
FREE_KINDS = ("bf16", "int8", "int4")
"""Codecs that cost large models no additional steps."""
FULL_RANK = 256
"""The rank at which powersgd counts as dense."""

Point = tuple[float, float]
Points = dict[Point, float]


class ExchangeMode(NamedTuple):
    """What is compressed and when the result is applied. Each `Place` has its own measurements."""

    codes: str = "gradients"
    overlap: str = ""
    late: bool = False

    def plain(self, every: int) -> ExchangeMode:
        """The canonical form of this place. Several local steps and overlapped outer steps always exchange updates;
        overlap="forward" is exact."""
        overlap = "" if self.overlap == "forward" else self.overlap
        return ExchangeMode("updates" if every > 1 or overlap else self.codes, overlap, self.late)


GRADIENTS = ExchangeMode()


def kind_and_point(codec: str, every: int) -> tuple[str, Point]:
    """Maps a codec and a number of local steps to the codec's kind and the coordinates -ln(ratio) and log2(every). Value types,
    blocks and wrappers are ignored."""
    kind, ratio = _kind(parse_spec(codec).core)
    return kind, (-math.log(ratio) + 0.0, math.log2(every))


def _kind(core: CodecSpec) -> tuple[str, float]:
    family = core.family
    if family == "powersgd":
        return family, core.get("rank") / FULL_RANK
    if family in EXACT:
        return DENSE, 1.0
    extra = [f"{what}={core.get(what)}" for what in ("levels", "bits") if core.get(what) is not None]
    return " ".join([family, *extra]), core.ratio or 1.0


def group_of(kind: str) -> str:
    family = kind.partition(" ")[0]
    return "sparse" if family in SPARSE else "low rank" if family == "powersgd" else "bits"


class Curves:
    """Convergence costs (>= 0) of one field of `Excess`, by codec and by `Place` (what is compressed, and when applied)."""

    def __init__(self, measured: Mapping[tuple[ExchangeMode, str, Point], float]) -> None:
        self._points: dict[ExchangeMode, dict[str, Points]] = {GRADIENTS: {DENSE: {(0.0, 0.0): 0.0}}}
        for (place, kind, point), value in measured.items():
            if (place, kind, point) != (GRADIENTS, DENSE, (0.0, 0.0)):
                self._points.setdefault(place, {}).setdefault(kind, {})[point] = value
        self._grids: dict[tuple[ExchangeMode, str], _Grid] = {}

    def at(self, place: ExchangeMode, kind: str, point: Point) -> float:
        if place not in self._points:
            return max(self.at(other, kind, point) for other in self._points)
        return (self._measured if kind in self._points[place] else self._unmeasured)(place, kind, point)

    def _blocking(self, place: ExchangeMode) -> ExchangeMode | None:
        """The place with blocking exchanges, if it was measured and differs from `place`. Delayed results never cost less than
        blocking ones."""
        blocking = place._replace(overlap="", late=False)
        return blocking if blocking != place and blocking in self._points else None

    def _measured(self, place: ExchangeMode, kind: str, point: Point) -> float:
        """The interpolated value, but at least that of blocking exchanges, which never raises it above the measured value of a
        harder point."""
        grid, blocking, (x, y) = self._grid(place, kind), self._blocking(place), point
        if blocking is None:
            return grid(point)
        most = min((v for (a, b), v in grid.points.items() if a >= x and b >= y), default=math.inf)
        return max(grid(point), min(self.at(blocking, kind, point), most))

    def _grid(self, place: ExchangeMode, kind: str) -> _Grid:
        if (place, kind) in self._grids:
            return self._grids[place, kind]
        kinds, blocking = self._points[place], self._blocking(place)
        points, blocking_kinds = dict(kinds[kind]), {} if blocking is None else self._points[blocking]
        ys = sorted({y for of_kind in (*kinds.values(), *blocking_kinds.values()) for _, y in of_kind})
        if group_of(kind) != "bits":  # ratio 1 equals dense
            points |= {(0.0, y): self.at(place, DENSE, (0.0, y)) for y in ys if DENSE in kinds}
        others = [*self._relatives(kind, {k: v for k, v in kinds.items() if k != DENSE}), kinds.get(DENSE, {})]

        def growth(x: float, before: float, after: float) -> float:
            among = _growth(others, kinds.values(), before, after)
            if blocking is None:
                return among
            return max(among, _relative(self.at(blocking, kind, (x, after)), self.at(blocking, kind, (x, before))))

        self._grids[place, kind] = _Grid(_monotonic(points), ys, growth)
        return self._grids[place, kind]

    def _relatives(self, kind: str, here: Mapping[str, Points]) -> list[Points]:
        group = [points for other, points in here.items() if group_of(other) == group_of(kind)]
        return group or list(here.values())

    def _unmeasured(self, place: ExchangeMode, kind: str, point: Point) -> float:
        """Estimates an unmeasured codec kind by the first of these that was measured at this place: the next coarser kind, the
        worst kind of its family, of its group, of all. The estimate is at least the cost of blocking exchanges, or the cost for
        gradients, scaled as for related kinds."""
        kinds, blocking, (x, y) = self._points[place], self._blocking(place), point
        near = self._near(kind, [k for k in kinds if k != DENSE] or [DENSE])
        if kind == DENSE:  # costs at most as much as a codec that sends less
            least = min(self.at(place, k, (0.0, y)) for k in near)
            return least if blocking is None else max(least, self.at(blocking, kind, point))
        highest = max(self.at(place, k, point) for k in near)
        if blocking is not None:
            base = self.at(blocking, kind, point)
            ratios = [_relative(self.at(place, k, at), self.at(blocking, k, at))
                      for k in near if k in self._points[blocking] for at in kinds[k]]
        elif place != GRADIENTS:
            base = self.at(GRADIENTS, kind, (x, 0.0))
            ratios = [_relative(self.at(place, k, (at_x, y)), self.at(GRADIENTS, k, (at_x, 0.0)))
                      for k in near if k in self._points[GRADIENTS] for at_x, _ in kinds[k]]
        else:
            return highest
        return max(highest, (1 + base) * max([1.0, *ratios]) - 1)

    def _near(self, kind: str, kinds: list[str]) -> list[str]:
        family = kind.partition(" ")[0]
        coarser = [k for k in LADDER[LADDER.index(kind) + 1 :] if k in kinds] if kind in LADDER else []
        return (coarser[:1] or [k for k in kinds if k.partition(" ")[0] == family]
                or [k for k in kinds if group_of(k) == group_of(kind)] or kinds)


class _Grid:
    """Interpolates linearly between measured points, made monotonic, over x = -ln(ratio) and y = log2(local steps)."""

    def __init__(self, points: Points, ys: Iterable[float], growth: Callable[[float, float, float], float]) -> None:
        self.points = points
        self._xs, self._ys = sorted({x for x, _ in points}), list(ys)
        self._at: Points = {}
        for i, x in enumerate(self._xs):
            for j, y in enumerate(self._ys):
                value = points.get((x, y))
                if value is None:
                    above = min((v for (a, b), v in points.items() if a >= x and b >= y), default=math.inf)
                    steps = [b for a, b in points if a == x and b < y]
                    guess = (1 + points[x, max(steps)]) * growth(x, max(steps), y) - 1 if steps else math.inf
                    easier = [self._at[self._xs[i - 1], y]] if i else []
                    easier += [self._at[x, self._ys[j - 1]]] if j else []
                    value = min(max([guess, *easier]), above)
                    if value == math.inf:
                        value = max(easier, default=0.0)
                self._at[x, y] = value

    def __call__(self, point: Point) -> float:
        """The value at a point. Beyond the last x or y, extrapolates with the last slope, or a larger slope of easier points
        (smaller x or y): otherwise lines could cross, and a harder point would cost less."""
        x, y = point
        rows: list[float] = []
        steepest = 0.0
        for b in self._ys:
            row = [self._at[a, b] for a in self._xs]
            slope = _last_slope(self._xs, row)
            steepest = max(steepest, slope)
            rows.append(_along(self._xs, x, row) + (steepest - slope) * max(0.0, x - self._xs[-1]))
        slope = _last_slope(self._ys, rows)
        easier = [_last_slope(self._ys, [self._at[a, b] for b in self._ys]) for a in self._xs if a <= x]
        return _along(self._ys, y, rows) + (max([slope, *easier]) - slope) * max(0.0, y - self._ys[-1])


def _along(places: list[float], at: float, values: list[float]) -> float:
    """Interpolates linearly between values that never decrease. Constant before the first position; the last slope continues
    beyond the last."""
    if at <= places[0] or len(places) == 1:
        return values[0]
    i = next((i for i, place in enumerate(places) if place >= at), len(places) - 1)
    if places[i] == at:
        return values[i]
    slope = (values[i] - values[i - 1]) / (places[i] - places[i - 1])
    return values[i - 1] + slope * (at - places[i - 1])


def _last_slope(places: list[float], values: list[float]) -> float:
    return (values[-1] - values[-2]) / (places[-1] - places[-2]) if len(places) > 1 else 0.0


def _monotonic(points: Points) -> Points:
    """Raises each value to the maximum over easier points (smaller or equal x and y)."""
    return {(x, y): max(v for (a, b), v in points.items() if a <= x and b <= y) for x, y in points}


def _relative(there: float, before: float) -> float:
    return (1 + there) / (1 + before)


def _growth(relatives: Iterable[Points], everybody: Collection[Points], before: float, after: float) -> float:
    """Factor by which the cost grows between two numbers of local steps: the largest among related kinds measured at both, else
    among all kinds; else the largest cost measured at `after`."""
    for some in (relatives, everybody):
        ratios = [_relative(_monotonic(points)[x, after], _monotonic(points)[x, before])
                  for points in some for x, y in points if y == after and (x, before) in points]
        if ratios:
            return max(1.0, *ratios)
    return max((1 + value for points in everybody for (_, y), value in points.items() if y == after), default=1.0)

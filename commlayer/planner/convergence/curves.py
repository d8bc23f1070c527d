"""Curves of measured convergence costs, by codec, compression ratio and number of local steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from commlayer.codec_spec import SPARSE, CodecSpec, parse_spec

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
    """Defines which values are compressed and when the result is applied. Each mode has its own measurements."""

    codes: str = "gradients"
    overlap: str = ""
    late: bool = False

    def plain(self, every: int) -> ExchangeMode:
        """The canonical form of this mode. Several local steps and overlapped outer steps always exchange updates;
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


def codec_class(kind: str) -> str:
    family = kind.partition(" ")[0]
    return "sparse" if family in SPARSE else "low rank" if family == "powersgd" else "bits"


class ConvergenceCurves:
    """Convergence costs (>= 0) of one field of `Excess`, by codec and by exchange mode."""

    def __init__(self, measured: Mapping[tuple[ExchangeMode, str, Point], float]) -> None:
        self._points: dict[ExchangeMode, dict[str, Points]] = {GRADIENTS: {DENSE: {(0.0, 0.0): 0.0}}}
        for (mode, kind, point), value in measured.items():
            if (mode, kind, point) != (GRADIENTS, DENSE, (0.0, 0.0)):
                self._points.setdefault(mode, {}).setdefault(kind, {})[point] = value
        self._grids: dict[tuple[ExchangeMode, str], _Grid] = {}

    def at(self, mode: ExchangeMode, kind: str, point: Point) -> float:
        if mode not in self._points:
            return max(self.at(other, kind, point) for other in self._points)
        return (self._measured if kind in self._points[mode] else self._unmeasured)(mode, kind, point)

    def _blocking(self, mode: ExchangeMode) -> ExchangeMode | None:
        """The mode with blocking exchanges, if it was measured and differs from `mode`. Delayed results never cost less than
        blocking ones."""
        blocking = mode._replace(overlap="", late=False)
        return blocking if blocking != mode and blocking in self._points else None

    def _measured(self, mode: ExchangeMode, kind: str, point: Point) -> float:
        """The interpolated value, but at least that of blocking exchanges, which never raises it above the measured value of a
        harder point."""
        grid, blocking, (x, y) = self._grid(mode, kind), self._blocking(mode), point
        if blocking is None:
            return grid(point)
        most = min((v for (a, b), v in grid.points.items() if a >= x and b >= y), default=math.inf)
        return max(grid(point), min(self.at(blocking, kind, point), most))

    def _grid(self, mode: ExchangeMode, kind: str) -> _Grid:
        if (mode, kind) in self._grids:
            return self._grids[mode, kind]
        kinds, blocking = self._points[mode], self._blocking(mode)
        points, blocking_kinds = dict(kinds[kind]), {} if blocking is None else self._points[blocking]
        ys = sorted({y for of_kind in (*kinds.values(), *blocking_kinds.values()) for _, y in of_kind})
        if codec_class(kind) != "bits":  # ratio 1 equals dense
            points |= {(0.0, y): self.at(mode, DENSE, (0.0, y)) for y in ys if DENSE in kinds}
        others = [*self._relatives(kind, {k: v for k, v in kinds.items() if k != DENSE}), kinds.get(DENSE, {})]

        def growth(x: float, before: float, after: float) -> float:
            among = _growth(others, kinds.values(), before, after)
            if blocking is None:
                return among
            return max(among, _ratio(self.at(blocking, kind, (x, after)), self.at(blocking, kind, (x, before))))

        self._grids[mode, kind] = _Grid(_monotonic(points), ys, growth)
        return self._grids[mode, kind]

    def _relatives(self, kind: str, here: Mapping[str, Points]) -> list[Points]:
        group = [points for other, points in here.items() if codec_class(other) == codec_class(kind)]
        return group or list(here.values())

    def _unmeasured(self, mode: ExchangeMode, kind: str, point: Point) -> float:
        """Estimates an unmeasured codec kind by a kind that was measured in this mode: the next coarser one, else the worst one
        of its family, else of its group, else of all. The estimate is at least the cost of blocking exchanges, or the cost for
        gradients, scaled as for related kinds."""
        kinds, blocking, (x, y) = self._points[mode], self._blocking(mode), point
        near = self._similar_kinds(kind, [k for k in kinds if k != DENSE] or [DENSE])
        if kind == DENSE:  # a dense exchange costs at most as much as a codec that sends less
            least = min(self.at(mode, k, (0.0, y)) for k in near)
            return least if blocking is None else max(least, self.at(blocking, kind, point))
        highest = max(self.at(mode, k, point) for k in near)
        if blocking is not None:
            base = self.at(blocking, kind, point)
            ratios = [_ratio(self.at(mode, k, at), self.at(blocking, k, at))
                      for k in near if k in self._points[blocking] for at in kinds[k]]
        elif mode != GRADIENTS:
            base = self.at(GRADIENTS, kind, (x, 0.0))
            ratios = [_ratio(self.at(mode, k, (at_x, y)), self.at(GRADIENTS, k, (at_x, 0.0)))
                      for k in near if k in self._points[GRADIENTS] for at_x, _ in kinds[k]]
        else:
            return highest
        return max(highest, (1 + base) * max([1.0, *ratios]) - 1)

    def _similar_kinds(self, kind: str, kinds: list[str]) -> list[str]:
        family = kind.partition(" ")[0]
        coarser = [k for k in LADDER[LADDER.index(kind) + 1 :] if k in kinds] if kind in LADDER else []
        return (coarser[:1] or [k for k in kinds if k.partition(" ")[0] == family]
                or [k for k in kinds if codec_class(k) == codec_class(kind)] or kinds)


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
        """Returns the value at a point. Beyond the last x or y, extrapolates with the last slope, or with a larger slope of
        points with smaller x or y. Otherwise lines could cross, and a point that must cost more would cost less."""
        x, y = point
        rows: list[float] = []
        steepest = 0.0
        for b in self._ys:
            row = [self._at[a, b] for a in self._xs]
            slope = _last_slope(self._xs, row)
            steepest = max(steepest, slope)
            rows.append(_interpolate(self._xs, x, row) + (steepest - slope) * max(0.0, x - self._xs[-1]))
        slope = _last_slope(self._ys, rows)
        easier = [_last_slope(self._ys, [self._at[a, b] for b in self._ys]) for a in self._xs if a <= x]
        return _interpolate(self._ys, y, rows) + (max([slope, *easier]) - slope) * max(0.0, y - self._ys[-1])


def _interpolate(places: list[float], at: float, values: list[float]) -> float:
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


def _ratio(there: float, before: float) -> float:
    return (1 + there) / (1 + before)


def _growth(relatives: Iterable[Points], everybody: Collection[Points], before: float, after: float) -> float:
    """Returns the factor by which the cost grows between two numbers of local steps. It is the largest factor of the related
    kinds that were measured at both numbers. Without such a kind it is the largest of all kinds, or else the largest cost
    measured at `after`."""
    for some in (relatives, everybody):
        ratios = [_ratio(_monotonic(points)[x, after], _monotonic(points)[x, before])
                  for points in some for x, y in points if y == after and (x, before) in points]
        if ratios:
            return max(1.0, *ratios)
    return max((1 + value for points in everybody for (_, y), value in points.items() if y == after), default=1.0)

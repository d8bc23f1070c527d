"""Summary of `bench tta`: seconds to a loss, and the ratios between commlayer and its alternatives.

A ratio compares seconds to the middle target, or to the easy one if neither system reached the middle target. If commlayer
did not reach the target, the ratio is "never". If the other did not, its whole training time counts, a lower bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.paced.race import LATE_PCT, at_step, reached, reached_step
from bench.tta.links import NO_LINK

Row = dict[str, Any]
Place = tuple[str, str]
"""A task and a link."""
ASKED = (1, 0)
"""Targets by priority: the middle one, then the easy one."""


class Times:
    """Seconds to each target, the median over seeds. Uses valid rows only."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows: dict[tuple[str, str, str], list[Row]] = {}
        for row in rows:
            if is_valid(row):
                self._rows.setdefault((row["task"], row["link"], row["system"]), []).append(row)
        self.groups = {row["system"]: row["group"] for row in rows}
        self.measured = list(self._rows)
        """Each measured (task, link, system)."""
        self.tasks = list(dict.fromkeys(task for task, _, _ in self._rows))

    def places(self) -> list[Place]:
        return [place for place in dict.fromkeys((task, link) for task, link, _ in self._rows) if place[1] != NO_LINK]

    def of(self, task: str, link: str, system: str) -> list[Row]:
        return self._rows.get((task, link, system)) or self._rows.get((task, NO_LINK, system), [])

    def systems(self, task: str, link: str, group: str) -> list[str]:
        return [name for *place, name in self._rows if place == [task, link] and self.groups[name] == group]

    def seconds(self, task: str, link: str, system: str, target: int) -> float:
        """Median seconds to a target; infinite if it was not reached, NaN without rows."""
        times = [reached(row["curve"], row["targets"][target]) for row in self.of(task, link, system)]
        return statistics.median(math.inf if s is None else s for s in times) if times else math.nan

    def measured_s(self, task: str, link: str, system: str) -> float:
        return statistics.median(float(row["curve"][-1][1]) for row in self.of(task, link, system))

    def ratio(self, task: str, link: str, upper: str, lower: str) -> float | None:
        """Seconds of system `upper` over those of `lower`; None if a system has no rows or neither reached a target."""
        if not (self.of(task, link, upper) and self.of(task, link, lower)):
            return None
        for target in ASKED:
            over, under = (self.seconds(task, link, name, target) for name in (upper, lower))
            if math.isfinite(over) or math.isfinite(under):
                return over / (under if math.isfinite(under) else self.measured_s(task, link, lower))
        return None

    def best(self, task: str, link: str, names: Sequence[str]) -> str | None:
        """Of these systems, the one that is first at the middle target; None if none was measured."""
        measured = [name for name in names if self.of(task, link, name)]
        return min(measured, key=lambda name: [self.seconds(task, link, name, target) for target in ASKED], default=None)


def middle(times: Times) -> list[Row]:
    """The row with the median seconds over seeds (the lower median), for each task, link and system; valid rows only."""
    result = []
    for place in times.measured:
        group = sorted(times.of(*place), key=lambda row: [Times([row]).seconds(*place, target) for target in ASKED])
        result.append(group[(len(group) - 1) // 2])
    return result


def is_valid(row: Row) -> bool:
    return not (row.get("error") or row.get("void"))


class Aim(NamedTuple):
    """The goal of one figure at all places: at most `wanted`, or with `least` at least `wanted`."""

    key: str
    what: str
    wanted: float
    least: bool = False
    system: str = "auto"
    """The system that the figure is about."""

    def worst(self, values: Mapping[Place, float]) -> Place | None:
        return (min if self.least else max)(values, key=values.__getitem__) if values else None


AIMS = (
    Aim("auto_vs_ideal_100m", "seconds of auto over those of one machine without a network", 1.25),
    Aim("auto_vs_ideal_10m", "the same at 10 Mb/s", 1.4),
    Aim("auto_vs_best_rival_100m", "seconds of the fastest rival, DDP fp16 among them, over those of auto", 1.5, least=True),
    Aim("auto_vs_best_rival_10m", "the same at 10 Mb/s", 1.5, least=True),
    Aim("auto_vs_alone", "auto over each host by itself", 1.0),
    Aim("auto_vs_ddp_fp16_1g", "auto over DDP fp16 at 1 Gb/s", 0.97),
    Aim("auto_vs_best_fixed_worst", "auto over the fastest fixed plan", 1.05),
    Aim("final_loss_delta_pct", "by how many per cent the loss at the end is above ideal's after as many steps", 1.0),
    Aim("final_loss_delta_exact_pct", "the same without local steps", 0.5, system="auto exact"),
    Aim("ideal_vs_alone_steps", "steps of ideal to the middle target over those of alone", 0.5, system="ideal"),
)
SHORT = (("100m", "100m-30ms"), ("10m", "10m-80ms"))


def by_place(times: Times) -> dict[str, dict[Place, float]]:
    """Each figure of `AIMS` at every place where it was measured."""
    everywhere = times.places()
    figures: dict[str, dict[Place, float | None]] = {}
    for short, link in SHORT:
        places = [(task, link) for task in times.tasks]
        figures[f"auto_vs_ideal_{short}"] = {place: times.ratio(*place, "auto", "ideal") for place in places}
        figures[f"auto_vs_best_rival_{short}"] = {place: _rival_over_auto(times, *place) for place in places}
    figures["auto_vs_alone"] = {place: times.ratio(*place, "auto", "alone") for place in everywhere}
    figures["auto_vs_ddp_fp16_1g"] = {(task, "1g-2ms"): times.ratio(task, "1g-2ms", "auto", "DDP fp16") for task in times.tasks}
    fixed = {place: best for place in everywhere if (best := times.best(*place, times.systems(*place, "fixed")))}
    figures["auto_vs_best_fixed_worst"] = {place: times.ratio(*place, "auto", best) for place, best in fixed.items()}
    for key, system in (("final_loss_delta_pct", "auto"), ("final_loss_delta_exact_pct", "auto exact")):
        figures[key] = {place: loss_delta_pct(times, *place, system) for place in everywhere}
    figures["ideal_vs_alone_steps"] = {(task, NO_LINK): _steps_share(times, task) for task in times.tasks}
    return {key: {place: value for place, value in each.items() if value is not None} for key, each in figures.items()}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    values = by_place(Times(rows))
    result: dict[str, Any] = {aim.key: values[aim.key][worst]
                              for aim in AIMS if (worst := aim.worst(values[aim.key])) is not None}
    measured = [row for row in rows if not row.get("error")]
    result["pace_kept"] = bool(measured) and all(row["late_pct"] <= LATE_PCT for row in measured)
    result["void_rows"], result["failed_rows"] = sum(bool(row.get("void")) for row in measured), len(rows) - len(measured)
    return {key: "never" if value == math.inf else value for key, value in result.items()}


def _rival_over_auto(times: Times, task: str, link: str) -> float | None:
    """Seconds of the best rival over those of auto, a lower bound; 0 if auto did not reach the target."""
    best = times.best(task, link, times.systems(task, link, "rival"))
    ratio = times.ratio(task, link, "auto", best) if best else None
    if ratio is None or best is None:
        return None
    return 1 / ratio if ratio else None


def loss_delta_pct(times: Times, task: str, link: str, system: str) -> float | None:
    """Percent by which the final loss is above the bound's at the same step and seed; the median over seeds."""
    bound = {row["seed"]: row["curve"] for row in times.of(task, NO_LINK, "ideal")}
    deltas = []
    for row in times.of(task, link, system):
        if row["seed"] in bound:
            step, _, loss = row["curve"][-1]
            deltas.append(100 * (loss / at_step(bound[row["seed"]], step) - 1))
    return statistics.median(deltas) if deltas else None


def _steps_share(times: Times, task: str) -> float | None:
    """Steps to the middle target with the batches of all ranks, relative to training with one rank's batches."""
    both = []
    for name in ("ideal", "alone"):
        rows = times.of(task, NO_LINK, name)
        if not rows:
            return None
        counts = [reached_step(row["curve"], row["targets"][ASKED[0]]) for row in rows]
        never = row_steps if (row_steps := rows[0]["curve"][-1][0]) and name == "alone" else math.inf
        both.append(statistics.median(never if count is None else count for count in counts))
    return both[0] / both[1]

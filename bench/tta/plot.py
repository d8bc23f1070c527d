"""Plots of `bench tta`: loss against seconds, and seconds to the middle target against bandwidth."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.tta.links import BANDWIDTH_MBPS, NO_LINK
from bench.tta.summary import ASKED, Row, Times
from bench.tta.systems import shown

AUTO = "#0072b2"
COLOURS = ("#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c510a", "#666666")
"""Distinguishable with colour blindness."""
BOUNDS = {"ideal": ":", "alone": "-."}
MARKERS = "os^D"
"""Used when colours repeat."""
DASHES = {"auto": "-", "fixed": "--", "rival": "-"}
"""Line styles by group."""
MOST = 8
"""Maximum number of lines in a panel, without the bounds; more would be unreadable."""


def draw(source: Path) -> str:
    """Writes NAME.png and NAME_bandwidth.png next to NAME.json. Returns a line with the files, or why there are none."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return "no picture: matplotlib is not installed"
    times = Times([unshown(row) for row in json.loads(source.read_text())["rows"] if row.get("_curve")])
    rows = middle(times)
    if not rows:
        return "no picture: there is no row that stands"
    wrote = [source.with_suffix(".png")]
    _curves(Figure, rows, wrote[0])
    if len({row["link"] for row in rows} & set(BANDWIDTH_MBPS)) > 1:
        wrote.append(source.with_name(f"{source.stem}_bandwidth.png"))
        _bandwidth(Figure, rows, times, wrote[1])
    return "wrote " + ", ".join(map(str, wrote))


def unshown(row: Row) -> Row:
    """The row with the leading _ of its keys removed, as in the store."""
    return {key.removeprefix("_"): value for key, value in row.items()}


def middle(times: Times) -> list[Row]:
    """The row with the median seconds over seeds (the lower median), for each task, link and system; valid rows only."""
    result = []
    for task, link, system in times.measured:
        group = times.of(task, link, system)
        result.append(sorted(group, key=lambda row: [_seconds(row, target) for target in ASKED])[(len(group) - 1) // 2])
    return result


def _seconds(row: Row, target: int) -> float:
    """Seconds of one row to a target; infinite if it was not reached."""
    return Times([row]).seconds(row["task"], row["link"], row["system"], target)


def points(times: Times, task: str) -> dict[str, list[tuple[float, float]]]:
    """By system, pairs of Mb/s and median seconds to the middle target, without links on which it was not reached."""
    result: dict[str, list[tuple[float, float]]] = {}
    for of_task, link, system in times.measured:
        seconds = times.seconds(of_task, link, system, ASKED[0])
        if of_task == task and link in BANDWIDTH_MBPS and math.isfinite(seconds):
            result.setdefault(system, []).append((BANDWIDTH_MBPS[link], seconds))
    return {system: sorted(of_system) for system, of_system in result.items()}


def _curves(figure_of: Any, rows: Sequence[Row], path: Path) -> None:
    """A panel per task and link. Each panel has the bounds."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    networks = [link for link in dict.fromkeys(row["link"] for row in rows) if link != NO_LINK]
    across = min(4, len(networks)) or 1
    panels = [(task, link) for task in tasks for link in networks if any((r["task"], r["link"]) == (task, link) for r in rows)]
    down = math.ceil(len(panels) / across) or 1
    figure = figure_of(figsize=(5.2 * across, 4.2 * down + 0.6), dpi=130, layout="constrained")
    all_axes = figure.subplots(down, across, squeeze=False).ravel()
    colours = _colours(rows)
    for axes, (task, link) in zip(all_axes, panels, strict=False):
        panel = [row for row in rows if row["task"] == task and row["link"] in (link, NO_LINK)]
        for row in _told_apart(panel):
            axes.plot([s for _, s, _ in row["curve"]], [loss for _, _, loss in row["curve"]], label=shown(row["system"]),
                      **_look(row["system"], row["group"], colours, marker=False))
        for target in panel[0]["targets"]:
            axes.axhline(target, color="#bbbbbb", linewidth=0.8, zorder=1)
        lowest = min(loss for row in panel for _, _, loss in row["curve"])
        axes.set_ylim(lowest - 0.05, min(panel[0]["curve"][0][2], panel[0]["targets"][0] + 1.2))
        axes.set_xlim(0, max(row["curve"][-1][1] for row in panel if row["link"] == NO_LINK or row["group"] == "auto")
                      if any(row["link"] == NO_LINK or row["group"] == "auto" for row in panel) else None)
        axes.set_title(f"{task}, {link}", fontsize=11)
        axes.set_xlabel("seconds")
        axes.set_ylabel("validation loss")
        axes.legend(fontsize=7, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    figure.savefig(path)


def _bandwidth(figure_of: Any, rows: Sequence[Row], times: Times, path: Path) -> None:
    """A panel per task. A system has no point on links on which it did not reach the target."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = figure_of(figsize=(6.2 * len(tasks), 4.8), dpi=130, layout="constrained")
    colours = _colours(rows)
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for of_task, link, system in times.measured:
            seconds = times.seconds(of_task, link, system, ASKED[0])
            if (of_task, link) == (task, NO_LINK) and math.isfinite(seconds):
                axes.axhline(seconds, color="#000000", linestyle=BOUNDS[system], linewidth=1.2)
                axes.annotate(system, (1000, seconds), fontsize=8, va="bottom", ha="right")
        for system, series in points(times, task).items():
            look = _look(system, times.groups[system], colours, marker=True)
            axes.plot(*zip(*series, strict=True), label=shown(system), **look)
        axes.set_xscale("log")
        axes.set_xticks(list(BANDWIDTH_MBPS.values()), [f"{mbps:g}" for mbps in BANDWIDTH_MBPS.values()])
        axes.minorticks_off()
        axes.set_xlabel("Mb/s, each way")
        axes.set_ylabel("seconds to the middle target")
        axes.set_ylim(bottom=0)
        axes.set_title(task, fontsize=11)
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _told_apart(rows: Sequence[Row]) -> list[Row]:
    """Rows to draw: bounds, auto, and the others with the lowest final loss."""
    kept = [row for row in rows if row["group"] in ("bound", "auto")]
    others = sorted((row for row in rows if row not in kept), key=lambda row: float(row["curve"][-1][2]))
    return kept + others[: MOST - 1]


def _look(system: str, group: str, colours: dict[str, int], *, marker: bool) -> dict[str, Any]:
    number = colours.get(system, 0)
    look = {"color": "#000000", "linestyle": BOUNDS[system]} if system in BOUNDS else {
        "color": COLOURS[number % len(COLOURS)] if system != "auto" else AUTO, "linestyle": DASHES[group]}
    bold = system == "auto"
    return look | {"linewidth": 2.6 if bold else 1.4, "zorder": 3 if bold else 2,
                   "marker": MARKERS[number // len(COLOURS) % len(MARKERS)] if marker else ""}


def _colours(rows: Sequence[Row]) -> dict[str, int]:
    """Colour number of each system, the same in all panels."""
    names = dict.fromkeys(row["system"] for row in rows if row["group"] != "bound" and row["system"] != "auto")
    return {name: number for number, name in enumerate(names)}

"""Plots error and speed against bits, from the rows of bench.codecs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

FAMILIES = {
    "dense": ("identity", "fp16", "bf16", "int8", "int4"),
    "dithered": ("qsgd",),
    "one bit": ("onebit",),
    "sparse": ("topk", "block_threshold", "randomk"),
    "low rank": ("powersgd",),
    "around another": ("momentum",),
    "torch": (),
}
LEAST = 1e-4
"""The position of exact codecs on the logarithmic error axis."""

LIMITS = ("stream (r += g)", "copy")


def draw_rows(json_file: Path, target: Path) -> Path | str:
    """Returns the picture's path, or one line with the reason why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "nothing: matplotlib is not installed (pip install 'commlayer[plot]')"
    rows = [row for row in json.loads(json_file.read_text())["rows"] if "bits_per_element" in row]
    best = "native" if any(row["backend"] == "native" for row in rows) else "fallback"
    n = max(row["elements"] for row in rows if row["backend"] == best)
    ours = [row for row in rows if row["backend"] == best and row["elements"] == n]
    torchs = [row for row in rows if row["backend"] == "torch" and row["elements"] == n]
    figure = Figure(figsize=(15, 8), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = (
        (left, "relative_error", "relative error of one payload", [row for row in ours if family(row) != "around another"]),
        (right, "encode_gb_per_s", "encode, GB/s", ours),
    )
    for axes, key, label, mine in shown:
        named = [*mine, *(row for row in torchs if row["codec"] not in LIMITS)]
        for name in FAMILIES:
            of_family = [row for row in named if family(row) == name]
            at = [row["bits_per_element"] for row in of_family], [max(row[key], LEAST) for row in of_family]
            axes.scatter(*at, label=name, marker="x" if name == "torch" else "o", s=28)
        label_points(axes, named, key)
        axes.set(xscale="log", yscale="log", xlabel="bits per element", ylabel=label)
        axes.grid(alpha=0.3)
    for row in torchs:
        if row["codec"] in LIMITS:
            right.axhline(row["encode_gb_per_s"], linestyle=":", color="grey")
            place = {"stream (r += g)": "bottom", "copy": "top"}[row["codec"]]
            right.annotate(row["codec"], (1, row["encode_gb_per_s"]), fontsize=7, va=place, color="grey")
    right.legend(fontsize=8)
    left.set_ylim(LEAST / 2, 8)
    left.set_xlim(right=120)
    right.set_xlim(right=120)
    figure.suptitle(f"{n:,} normal numbers, {best} backend, one thread; errors below {LEAST} are drawn there")
    figure.savefig(target, dpi=110)
    return target


def family(row: dict[str, Any]) -> str:
    if row["backend"] == "torch":
        return "torch"
    return next(name for name, members in FAMILIES.items() if row["codec"].split("(")[0] in members)


def label_points(axes: Any, rows: list[dict[str, Any]], key: str) -> None:
    """Points at the same position share a label."""
    places: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        cell = round(12 * math.log10(row["bits_per_element"])), round(16 * math.log10(max(row[key], LEAST)))
        places.setdefault(cell, []).append(row)
    for together in places.values():
        at = together[0]["bits_per_element"], max(together[0][key], LEAST)
        text = ", ".join(row["codec"] for row in together)
        axes.annotate(text, at, fontsize=6.5, textcoords="offset points", xytext=(3, 3), rotation=28, rotation_mode="anchor")

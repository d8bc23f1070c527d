"""Draws a sweep of `plan whatif` as a PNG, where matplotlib is installed. Knows curves, no planning."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from commlayer.planner.verbs.whatif import Curve, break_even


def check_plot(path: Path) -> None:
    """Before minutes are spent on the sweep."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--plot needs matplotlib: pip install "commlayer[plot]"')
    if path.suffix != ".png":
        raise ValueError(f"--plot {path}: allowed are names that end in .png")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: the folder {path.absolute().parent} does not exist")


def draw(curve: Curve, path: Path) -> None:
    """Step times over what was swept."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    wide = curve.swept == "bandwidth"
    xs = [p.x / 1e6 if wide else p.x for p in curve.points]
    for name, label, style in (("dense_s", "no compression", "o--"), ("plan_s", "plan", "o-"), ("free_s", "free coding", ":")):
        axes.plot(xs, [getattr(p, name) * 1e3 for p in curve.points], style, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("step, ms")
    if wide:
        axes.set_xscale("log")
        axes.set_xlabel("link, Mb/s each way")
        if curve.break_even_bps is not None:
            axes.axvline(curve.break_even_bps / 1e6, color="grey", linewidth=1)
            axes.annotate(f" {break_even(curve)}", (curve.break_even_bps / 1e6, 1),
                          xycoords=("data", "axes fraction"), va="top", color="grey")
    else:
        axes.set_xticks(xs, [p.label for p in curve.points])
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

"""Draws a sweep of `plan whatif` as a PNG. Needs matplotlib."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from commlayer.errors import InvalidInput
from commlayer.planner.explanation import Curve, break_even

LINES = (("dense_s", "no compression", "o--"), ("fp16_s", "DDP fp16", "o--"), ("alone_s", "one machine alone", "--"),
         ("to_loss_s", "plan", "o-"))
ROOM = 8, 30
"""Factors of the y axis' limits: space for labels below the plan, and above the larger of the plan and one machine alone.

Values far above these do not matter.
"""


def check_plot(path: Path) -> None:
    """Called before the sweep, which takes minutes."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidInput("E-PACKAGE", '--plot needs matplotlib: pip install "commlayer[plot]"')
    if path.suffix != ".png":
        raise InvalidInput("E-CLI-OPTION", f"--plot {path}: allowed are names that end in .png")
    if not path.absolute().parent.is_dir():
        raise InvalidInput("E-CLI-OPTION", f"--plot {path}: the folder {path.absolute().parent} does not exist")


def draw(curve: Curve, path: Path) -> None:
    """Draws seconds to a loss over the swept values, with the baselines and the sync mode at each point."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    wide = curve.swept == "bandwidth"
    xs = [p.x / 1e6 if wide else p.x for p in curve.points]
    for name, label, style in LINES:
        if any(getattr(p, name) for p in curve.points):
            axes.plot(xs, [getattr(p, name) * 1e3 or math.nan for p in curve.points], style, label=label)
    axes.set_yscale("log")
    axes.set_ylim(min(p.to_loss_s for p in curve.points) * 1e3 / ROOM[0],
                  max(max(p.to_loss_s, p.alone_s) for p in curve.points) * 1e3 * ROOM[1])
    axes.set_ylabel("ms to a loss, for each step of dense training" if all(p.steps for p in curve.points) else "step, ms")
    if wide:
        axes.set_xscale("log")
        axes.set_xlabel("link, Mb/s each way")
        if curve.break_even_bps is not None:
            axes.axvline(curve.break_even_bps / 1e6, color="grey", linewidth=1)
            axes.annotate(f" {break_even(curve)}", (curve.break_even_bps / 1e6, 1),
                          xycoords=("data", "axes fraction"), va="top", color="grey")
    else:
        axes.set_xticks(xs, [p.label for p in curve.points])
    for x, p in zip(xs, curve.points, strict=True):
        note = f"{p.way or 'plain'}\n{p.codec.replace(' down ', chr(10) + 'down ')}"
        axes.annotate(note, (x, p.to_loss_s * 1e3), (0, -6), textcoords="offset points",
                      rotation=90, va="top", ha="center", fontsize=7)
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

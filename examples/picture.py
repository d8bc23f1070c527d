"""Draws the pictures of char_gpt.py, images.py and lora_homes.py. Needs matplotlib: pip install "commlayer[plot]"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(
    path: str | Path, curves: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, *, log: bool = False,
    bars: Mapping[str, float] | None = None, height: str = "",
) -> None:
    """Curves over x (on a logarithmic axis: `log`); right of them `bars` with their own axis, `height`."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2 if bars else 1, figsize=(7.5, 3), layout="constrained", squeeze=False,
                                   width_ratios=(5, 2) if bars else None)
    for (name, curve), style in zip(curves.items(), (".-", ".--", ".:"), strict=False):
        axes[0, 0].plot(*zip(*curve, strict=True), style, label=name)
    axes[0, 0].set(xlabel=x, ylabel=y, xscale="log" if log else "linear")
    axes[0, 0].legend()
    if bars:
        axes[0, 1].bar(list(bars), list(bars.values()), color=["tab:blue", "tab:orange", "tab:green"][: len(bars)])
        axes[0, 1].set(ylabel=height)
    figure.savefig(path, dpi=90)

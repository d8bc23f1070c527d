"""The demo's losses over seconds: what was reached when, the picture, and the sentences about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from commlayer.demo.settings import ALONE, COMMLAYER, RTT_S, RUNS, STEP_S, DemoSettings, WorkerReport

COLORS: dict[str, str] = dict(zip(RUNS, ("yellow", "red", "green"), strict=True))
SMOOTHED = 10
"""A loss is the mean of the evaluations in 1/10 of all seconds, for every run."""
SHOWN = 1 / 15
"""Losses are shown after this fraction of all seconds; those before are far above."""
LATE = 0.1
"""Above this fraction of late passes, a note says that this machine was too slow for the demo."""
Curve = Sequence[tuple[float, float]]


@dataclasses.dataclass
class RunProgress:
    """The reports of the workers of one run."""

    losses: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """Validation losses, after the seconds at which they were measured."""
    steps: int = 0
    every: int = 1
    late: float = 0.0


class RunRow(NamedTuple):
    """A line of the table."""

    run: str
    steps: int
    loss: float | None
    """None before the first step."""
    sent_nbytes: int
    """Bytes that one home has sent over its uplink, averaged over the homes."""
    target_s: float | None
    """Seconds to the target loss. The value is None if the run has not reached the target."""


class Progress:
    """The progress of all runs."""

    def __init__(self, settings: DemoSettings) -> None:
        self.settings, self.native = settings, True
        self.runs = {run: RunProgress() for run in RUNS}

    def add_report(self, report: WorkerReport) -> None:
        run = self.runs[report.run]
        self.native &= report.native
        if report.step and report.at_s < self.settings.seconds:
            run.steps, run.every, run.late = max(run.steps, report.step), report.every, max(run.late, report.late)
            if report.loss is not None:
                run.losses.append((report.at_s, report.loss))

    def curve(self, run: str) -> Curve:
        """The smoothed loss at the time of each evaluation."""
        losses, width_s = self.runs[run].losses, self.settings.seconds / SMOOTHED
        return [(at_s, fmean(loss for other_s, loss in losses if at_s - width_s < other_s <= at_s)) for at_s, _ in losses]

    def shown(self, run: str) -> Curve:
        return [(at_s, loss) for at_s, loss in self.curve(run) if at_s >= SHOWN * self.settings.seconds]

    def target(self) -> float | None:
        """The loss of one machine alone at its end; None before its first evaluation."""
        curve = self.curve(ALONE)
        return curve[-1][1] if curve else None

    def rows(self, sent_nbytes: Mapping[str, int]) -> list[RunRow]:
        target, rows = self.target(), []
        for run in RUNS:
            curve = self.curve(run)
            reached = next((at_s for at_s, loss in curve if target is not None and loss <= target), None)
            rows.append(RunRow(run, self.runs[run].steps, curve[-1][1] if curve else None, sent_nbytes.get(run, 0), reached))
        return rows


def results(progress: Progress, rows: Sequence[RunRow]) -> dict[str, Any]:
    """The figures for --json."""
    return {"settings": progress.settings, "target": progress.target(), "rows": [row._asdict() for row in rows],
            "curves": {run: progress.curve(run) for run in RUNS}}


def run_label(progress: Progress, run: str) -> str:
    if run == ALONE:
        return "one machine alone"
    if run != COMMLAYER:
        return f"DDP, fp16 gradients, {progress.settings.homes} homes"
    every = progress.runs[run].every
    return f"commlayer, {progress.settings.homes} homes, {f'exchanges every {every} steps' if every > 1 else 'each step'}"


def reached(row: RunRow, target: float | None) -> str:
    return "-" if target is None else "not reached" if row.target_s is None else f"{row.target_s:.0f}"


def notes(progress: Progress) -> str:
    """Notes that explain which parts of the demo are simulated and which are measured."""
    settings = progress.settings
    text = [
        f"Simulated: the homes' lines, {settings.down_bps / 1e6:g} Mb/s down, {settings.up_bps / 1e6:g} Mb/s up, "
        f"{1e3 * RTT_S:g} ms there and back (a relay in this process, which every byte passes); and their GPUs, whose steps "
        f"take {1e3 * STEP_S:g} ms: this machine computes them in less and sleeps for the rest. Measured: losses, seconds, "
        "bytes. The runs train at the same time.",
        'commlayer: `commlayer serve`, and `commlayer join` in each home, TLS and sync="auto", as in real homes; each home '
        "reaches the server through one port, so its data travels over gRPC. DDP: torch's own, with its fp16 hook, over Gloo, "
        "without TLS, from home to home through the same lines.",
        "The model: a character GPT of 1.8 million parameters on Python's handbook. Losses are of text that is not trained "
        "on, smoothed, with the weights that all homes have. A machine's batch, 128 characters, is far below the noise scale: "
        "with larger batches, more machines gain less. All runs use the rate of AdamW that is best for one machine.",
    ]
    late = max(run.late for run in progress.runs.values())
    if late > LATE:
        text.append(f"WARNING: this machine is too slow or too busy: {late:.0%} of a worker's passes took longer than those of "
                    "the simulated GPU. The figures understate what several machines gain.")
    if not progress.native:
        text.append("The native core is missing: codecs used the slower numpy fallback.")
    return "\n".join(text)


def verdict(progress: Progress, rows: Sequence[RunRow]) -> str:
    target, (alone, *_, ours) = progress.target(), rows
    if target is None or alone.target_s is None:
        return "Result: the run alone has no loss to compare with: give --seconds more"
    gain = f" ({alone.target_s / ours.target_s:.1f}x)" if ours.target_s else ""
    return f"Result: seconds to loss {target:.2f}: {', '.join(f'{row.run} {reached(row, target)}' for row in rows)}{gain}"


def draw(path: Path, progress: Progress) -> str:
    """Writes the picture, if matplotlib is there. Returns a line that says where it is."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return 'Picture: needs matplotlib: pip install "commlayer[plot]"'
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds", ylabel="loss", title=f"{progress.settings.homes} simulated homes")
    for run in RUNS:
        points = [*zip(*progress.shown(run), strict=True)] or [(), ()]
        axes.plot(*points, label=run_label(progress, run), color=COLORS[run].replace("yellow", "orange"))
    if (target := progress.target()) is not None:
        axes.axhline(target, color="gray", linewidth=0.8, linestyle=":")
    axes.legend()
    figure.savefig(path, dpi=120)
    return f"Picture: {path.absolute()}"

"""Shows the progress of a demo: a panel on a terminal, a line anywhere else."""

from __future__ import annotations

import dataclasses

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from commlayer.demo.events import Began, Ended, Event, Progress
from commlayer.demo.settings import DENSE, Settings

NAMES = ("dense", "compressed")
PANEL_WIDTH = 80


@dataclasses.dataclass
class Standing:
    """The progress that workers have reported so far."""

    settings: Settings
    began: list[Began] = dataclasses.field(default_factory=list)
    progress: list[Progress] = dataclasses.field(default_factory=list)
    """The latest report of each run."""
    reached: list[bool] = dataclasses.field(default_factory=list)

    def take(self, event: Event) -> None:
        if isinstance(event, Began):
            self.began.append(event)
            self.progress.append(Progress(event.run, 0, float("nan"), 0.0, 0.0, 0.0, 0))
        elif isinstance(event, Progress):
            self.progress[event.run] = event
        elif isinstance(event, Ended):
            self.reached.append(event.reached)

    @property
    def over(self) -> bool:
        return len(self.reached) == len(NAMES)

    @property
    def training(self) -> Progress | None:
        """The progress of the current run; None while one starts or after all are over."""
        return self.progress[-1] if len(self.progress) > len(self.reached) else None


def panel(standing: Standing, wall_s: float) -> Panel:
    settings = standing.settings
    parts: list[Text | Table] = []
    for run, name in enumerate(NAMES):
        codec = (DENSE, settings.codec)[run]
        parts.append(Text.assemble((f"{run + 1}  {name}  ", "bold"), (codec, "cyan")))
        if run < len(standing.progress):
            now = standing.progress[run]
            texts = (_counts(now), _costs(now)) if now.step else ("begins",)
            parts += [_bar(now, settings.target), *(Text(f"   {text}") for text in texts)]
        else:
            parts.append(Text(f"   {waiting(standing)}" if run == len(standing.reached) else "   to come", style="dim"))
    title = f"commlayer demo: {settings.workers} workers, {link(settings)}"
    return Panel(Group(*parts), title=title, subtitle=f"{wall_s:.0f} s", title_align="left", subtitle_align="right",
                 width=PANEL_WIDTH, padding=(0, 1))


def line(standing: Standing) -> str:
    now = standing.training
    if now is None:
        return waiting(standing)
    if not now.step:
        return f"{NAMES[now.run]:10}  begins"
    costs = f"{span(now.step_s)}, {size(now.step_nbytes)} a step"
    return f"{NAMES[now.run]:10}  {_counts(now)}  accuracy {now.accuracy:5.1%}  {costs}"


def waiting(standing: Standing) -> str:
    if standing.over:
        return "all runs are over; the workers and servers are leaving"
    n = standing.settings.workers
    if standing.reached:
        return f"starting {n} fresh servers"
    return f"starting {n} workers and {n} servers; each loads PyTorch"


def link(settings: Settings) -> str:
    return f"{rate(settings.bps)} up and down per host, round trip {span(settings.rtt_s)}"


def rate(bps: float) -> str:
    return f"{bps / 1e9:g} Gb/s" if bps >= 1e9 else f"{bps / 1e6:g} Mb/s"


def span(seconds: float) -> str:
    """Three significant digits, in a suitable unit."""
    return f"{_figures(seconds * 1e3)} ms" if seconds < 1 else f"{seconds:.1f} s"


def size(nbytes: float) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{_figures(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def _figures(number: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.3g}"


def _bar(now: Progress, target: float) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_row("   test accuracy", ProgressBar(total=target, completed=min(now.accuracy, target), width=32),
                f"{now.accuracy:.1%}, to reach {target:.1%}")
    return row


def _counts(now: Progress) -> str:
    return f"step {now.step:<4} loss {now.loss:5.3f}   training {now.train_s:4.1f} s"


def _costs(now: Progress) -> str:
    return f"a step: {span(now.step_s)}, {size(now.step_nbytes)} sent; {now.exposed:.0%} of the time waiting for communication"

"""Formats the demo's output: lines of progress while it runs, then a table with notes, and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from commlayer.demo.fleet import Event, Progress, RunBegan, RunEnded
from commlayer.demo.settings import DENSE, DemoSettings

COLUMNS = ("steps", "sent in\nall", "sent a\nstep", "test\naccuracy", "step\ntime", "exposed\ncomm.", "speed-\nup")
NONE = "-"
RUN_WIDTH = 16
"""Width of the first column, in characters."""


def table(settings: DemoSettings, results: Mapping[str, Any]) -> Table:
    grid = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    grid.add_column("run", min_width=RUN_WIDTH)
    for name in (f"time to\n{settings.target:.1%}", *COLUMNS):
        grid.add_column(name, justify="right")
    for row in results["rows"]:
        grid.add_row(*_cells(row), style="bold" if row["run"] == "compressed" else "")
    return grid


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    names = {"dense": f"dense {row['codec']}", "bound": "dense, at the ring's bound (*)"}
    yield names.get(row["run"], f"{row['run']}\n{row['codec']}")
    yield f"{row['train_s']:.1f} s" if row["reached"] else "not\nreached"
    yield str(row["steps"])
    if row["run"] == "bound":
        yield from (NONE, NONE, NONE, span(row["step_s"]), NONE)
    else:
        yield from (size(row["sent_nbytes"]), size(row["step_nbytes"]), f"{row['accuracy']:.1%}", span(row["step_s"]),
                    f"{row['exposed']:.0%}")
    yield NONE if row["speedup"] is None else f"{row['speedup']:.{2 if row['speedup'] < 100 else 0}f}x"


def notes(settings: DemoSettings, results: Mapping[str, Any], *, native: bool) -> str:
    """Notes on the table: how the figures were measured, and their limits."""
    n, summary = settings.workers, results["summary"]
    bound = results["rows"][1]
    text = [
        f"(*) Computed: on this link a ring all-reduce of the fp16 gradients takes at least {span(bound['step_s'])} a step, "
        f"2(n-1)/n x bytes x 8 / rate + 2(n-1) x one-way delay with n = {n}."
    ]
    if summary["speedup_over_bound"] is not None:
        text[0] += f" The compressed run reaches the target {summary['speedup_over_bound']:.2f}x as fast."
    text += [
        f"Links are simulated inside the processes, without root: each worker is a host ({link_text(settings)}) that shares "
        "its link with its summation server. Data crosses loopback; the little that PyTorch's Gloo sends is not shaped.",
        "Both runs start from the same weights and use the same batches; the clock is stopped during evaluation. 'Sent' is "
        "what one worker pushes.",
    ]
    if not native:
        text.append("The native core is missing: codecs used the slow numpy fallback.")
    return "\n".join(text)


# ---- figures

HALF_NBYTES = 2


def ring_bound_s(workers: int, nbytes: float, bps: float, one_way_s: float) -> float:
    """The least time of a ring all-reduce of `nbytes`: in each of its 2(n-1) phases every host sends 1/n of the bytes.

    >>> round(ring_bound_s(4, 2_252_820, 100e6, 0.015), 3)
    0.36
    """
    turns = 2 * (workers - 1)
    return turns * (nbytes / workers * 8 / bps + one_way_s)


def results(settings: DemoSettings, numel: int, ends: Sequence[Progress], reached: Sequence[bool]) -> dict[str, Any]:
    """The rows of the table (uncompressed run, computed ring bound, compressed run) and a summary."""
    dense, compressed = (
        _row(name, codec, end, whole)
        for name, codec, end, whole in zip(("dense", "compressed"), (DENSE, settings.codec), ends, reached, strict=True)
    )
    bound_s = ring_bound_s(settings.workers, HALF_NBYTES * numel, settings.bps, settings.one_way_s)
    bound = {"run": "bound", "codec": DENSE, "reached": reached[0], "steps": ends[0].step, "step_s": bound_s,
             "train_s": ends[0].step * bound_s}
    rows = [dense, bound, compressed]
    for row in rows:
        row["speedup"] = _ratio(dense, row)
    summary = {
        "workers": settings.workers, "link_bps": settings.bps, "rtt_s": settings.rtt_s, "target": settings.target,
        "parameters": numel, "speedup": compressed["speedup"], "speedup_over_bound": _ratio(bound, compressed),
        "step_speedup": dense["step_s"] / compressed["step_s"], "sent_ratio": dense["step_nbytes"] / compressed["step_nbytes"],
    }
    return {"rows": rows, "summary": summary}


def _row(name: str, codec: str, end: Progress, reached: bool) -> dict[str, Any]:
    return {
        "run": name, "codec": codec, "reached": reached, "train_s": end.train_s, "steps": end.step, "step_s": end.step_s,
        "sent_nbytes": end.sent_nbytes, "step_nbytes": end.step_nbytes, "accuracy": end.accuracy, "loss": end.loss,
        "exposed": end.exposed,
    }


def _ratio(slow: dict[str, Any], fast: dict[str, Any]) -> float | None:
    """The speedup; None unless both runs reached the target."""
    return slow["train_s"] / fast["train_s"] if slow["reached"] and fast["reached"] else None


# ---- progress

NAMES = ("dense", "compressed")


@dataclasses.dataclass
class DemoProgress:
    """The progress that workers have reported so far."""

    settings: DemoSettings
    began: list[RunBegan] = dataclasses.field(default_factory=list)
    latest: list[Progress] = dataclasses.field(default_factory=list)
    """The latest report of each run."""
    reached: list[bool] = dataclasses.field(default_factory=list)

    def take(self, event: Event) -> None:
        if isinstance(event, RunBegan):
            self.began.append(event)
            self.latest.append(Progress(event.run, 0, float("nan"), 0.0, 0.0, 0.0, 0))
        elif isinstance(event, Progress):
            self.latest[event.run] = event
        elif isinstance(event, RunEnded):
            self.reached.append(event.reached)

    @property
    def over(self) -> bool:
        return len(self.reached) == len(NAMES)

    @property
    def training(self) -> Progress | None:
        """The last progress of the current run; None while a run starts or after all have ended."""
        return self.latest[-1] if len(self.latest) > len(self.reached) else None


def line(progress: DemoProgress) -> str:
    now = progress.training
    if now is None:
        return waiting(progress)
    if not now.step:
        return f"{NAMES[now.run]:10}  begins"
    accuracy = f"{now.accuracy:.1%}" if now.accuracy else "-"  # it is not measured in the first steps
    costs = f"{span(now.step_s)}, {size(now.step_nbytes)} a step"
    return (f"{NAMES[now.run]:10}  step {now.step:<4} loss {now.loss:5.3f}   training {now.train_s:4.1f} s  "
            f"accuracy {accuracy:>5}  {costs}")


def waiting(progress: DemoProgress) -> str:
    if progress.over:
        return "all runs have ended; waiting for workers and servers to exit"
    n = progress.settings.workers
    if progress.reached:
        return f"starting {n} fresh servers"
    return f"starting {n} workers and {n} servers; each loads PyTorch"


def link_text(settings: DemoSettings) -> str:
    return f"{rate(settings.bps)} up and down per host, round trip {span(settings.rtt_s)}"


def rate(bps: float) -> str:
    return f"{bps / 1e9:g} Gb/s" if bps >= 1e9 else f"{bps / 1e6:g} Mb/s"


def span(seconds: float) -> str:
    """Formats a duration with up to three significant digits and a suitable unit."""
    return f"{_figures(seconds * 1e3)} ms" if seconds < 1 else f"{seconds:.1f} s"


def size(nbytes: float) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{_figures(nbytes / factor)} {unit}"
    return f"{nbytes:.0f} B"


def _figures(number: float) -> str:
    """Formats a number with three significant digits and no exponent."""
    return f"{number:.0f}" if number >= 99.95 else f"{number:.3g}"

"""Draws the pictures of README and docs, from stored rows of `bench tta` and from the planner: `python docs/pictures.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))


from bench.tta.store import usual  # noqa: E402
from bench.tta.summary import Times, middle  # noqa: E402
from commlayer import planner  # noqa: E402
from commlayer.planner.data import tables  # noqa: E402
from commlayer.planner.model import Cluster  # noqa: E402

IMAGES = FOLDER / "images"
LINES = {
    "ideal": ("one machine with the batches of all four, no network", "#888888", ":"),
    "alone": ("each home alone", "#888888", "-."),
    "DDP fp16": ("DDP fp16", "#d55e00", "-"),
    "SparseLoCo-like H=15": ("best other: SparseLoCo-like", "#cc79a7", "-"),
    "DeMo-like": ("best other: DeMo-like", "#cc79a7", "-"),
    "auto": ('commlayer, sync="auto"', "#0072b2", "-"),
}
PANELS = {"10m-80ms": "10 Mb/s, 80 ms", "100m-30ms": "100 Mb/s, 30 ms"}
OTHERS = {"10m-80ms": "SparseLoCo-like H=15", "100m-30ms": "DeMo-like"}


def loss() -> Figure:
    """Validation loss against seconds: a small GPT on four hosts."""
    rows = middle(Times([row for row in usual() if row["task"] == "chars"]))
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (link, title) in zip(panels, PANELS.items(), strict=True):
        for system in ("ideal", "alone", "DDP fp16", OTHERS[link], "auto"):
            for row in rows:
                if row["system"] == system and row["link"] in (link, "none"):
                    label, colour, style = LINES[system]
                    seconds, losses = zip(*[(s, value) for _, s, value in row["curve"] if s <= 60], strict=True)
                    panel.plot(seconds, losses, style, color=colour, label=label, linewidth=2.4 if system == "auto" else 1.5)
        panel.set(title=title, xlabel="seconds", xlim=(0, 60))
        panel.grid(alpha=0.25)
        panel.legend(fontsize=8, frameon=False)
    panels[0].set_ylabel("validation loss")
    return figure


PARTS = {"encode@cpu": "encode", "server.add": "server", "server.emit": "server", "decode@cpu": "decode"}
ROWS = ("compute", "encode", "upload", "server", "download", "decode")
COLOURS = ("#999999", "#e69f00", "#0072b2", "#009e73", "#56b4e9", "#cc79a7")


def step() -> Figure:
    """What one of four machines does in a step, as the planner simulates it."""
    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    job = planner.builtin("resnet50", 32, "rtx3060")
    cluster = Cluster(tuple(tables.node(f"n{i}", "rtx3060", "1g") for i in range(4)))
    for panel, codec in zip(panels, ("identity()", "error_feedback(int4())"), strict=True):
        plan = planner.default_plan(job, codec=codec, path="service", servers=4, ranks_per_node=1, fuse_nbytes=1 << 20,
                                    cut_nbytes=4 << 20)
        timeline = planner.simulate(plan, job, cluster)
        bars: dict[str, list[tuple[float, float]]] = {row: [] for row in ROWS}
        bars["compute"] = [(0.0, timeline.compute_s)]
        for span in timeline.spans:
            for lane in span.lanes:
                kind, _, machine = lane.partition(":")
                if machine == "n0":
                    row = PARTS.get(span.op, {"up": "upload", "down": "download"}.get(kind, "compute"))
                    bars[row].append((span.start_s, span.end_s - span.start_s))
        for place, row in enumerate(ROWS):
            panel.broken_barh(bars[row], (place - 0.4, 0.8), color=COLOURS[place])
        panel.axvline(timeline.step_s, color="black", linewidth=1)
        what = "int4 in both directions" if "int4" in codec else "not compressed"
        panel.set(title=f"{what}: {1e3 * timeline.step_s:.0f} ms a step", yticks=range(len(ROWS)), xlim=(0, None))
        panel.set_yticklabels(ROWS)
        panel.invert_yaxis()
    panels[1].set_xlabel("seconds since the step began")
    return figure


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for draw in (loss, step):
        draw().savefig(IMAGES / f"{draw.__name__}.png", dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()

"""Renders plans as tables and text for the console."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from commlayer.config import MOST_LOSS
from commlayer.errors import InvalidInput
from commlayer.planner import tables
from commlayer.planner.explanation import Beside, Curve, Difference, Explanation, Looser, break_even, rate, spelled
from commlayer.planner.model import Cluster, Node
from commlayer.planner.plan_rules import most_used, way_of
from commlayer.planner.simulation import Timeline, per_step
from commlayer.planner.tables import GPUS, LearningTable, gpu, peak_tflops, speed
from commlayer.records import Bucket, Job, Plan, Why
from pathlib import Path
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table


PIPE_WIDTH = 120
BAR = 30
WIDE = 110
"""Columns from which a table of plans has space for names and reasons."""
SHORT_BAR = 12
LONGEST = 24
"""The longest codec or op name that a column keeps on one line."""
SEEN_S = 5e-5
"""The least time that is not shown as 0.0 ms."""
NAME = 16
"""Characters of a tensor's name in a table."""


def console_of() -> Console:
    """A console as wide as the terminal, or PIPE_WIDTH if there is none."""
    console = Console(highlight=False, markup=False)  # brackets in names are not markup
    return console if console.is_terminal else Console(highlight=False, markup=False, width=PIPE_WIDTH)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 100 else f"{seconds * 1e3:,.0f}"


def nbytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def table(title: str, *columns: str) -> Table:
    """An empty table. Columns that begin with ">" are right-aligned, for numbers."""
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        grid.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    return grid


def title(plan: Plan, job: Job, cluster: Cluster) -> str:
    """The job, and the sync mode of its plan."""
    mode = "synchronous: in every step .grad is the average of all workers"
    if not plan.steps_locally and not is_synchronous(plan):
        mode = "late results: .grad is the average of all workers, in part of the step before"
    elif plan.steps_locally:
        how = "local steps" if plan.local_steps > 1 else "steps on own gradients"
        mode = f"{how} ({way_of(plan)}): attach(plan=FILE) then takes them, and .grad is each worker's own"
    return (f"{job.name or 'job'}: {len(job.tensors)} tensors, {job.numel / 1e6:,.1f} M elements, "
            f"{cluster.ranks} ranks on {sum(1 for n in cluster.nodes if n.ranks)} nodes\nmode: {mode}")


def is_synchronous(plan: Plan) -> bool:
    """Whether each step uses the average of all gradients of that step."""
    return not plan.steps_locally and not any(bucket.stale for bucket in plan.buckets)


def summary(plan: Plan, job: Job, cluster: Cluster, timeline: Timeline) -> str:
    compute_s = timeline.compute_s / plan.local_steps
    hosts = ", ".join(cluster.nodes[i].name for i in plan.hosts)
    lines = [
        f"step {ms(per_step(timeline, plan.local_steps))} ms: computing {ms(compute_s)}, "
        f"exposed communication {ms(per_step(timeline, plan.local_steps) - compute_s)}; "
        f"with free compression {ms(plan.free_s)}",
    ]
    if job.batch and plan.step_s:
        lines.append(f"{job.batch * cluster.ranks / plan.step_s:,.1f} samples a second, all ranks together")
    if plan.servers:
        lines.append(f"servers on {hosts or f'{plan.servers} nodes'}")
    return "\n".join(lines)


def factor(steps: float, high: float) -> str:
    """
    >>> factor(1.0, 1.25), factor(1.0, 1.0), factor(0.0, 0.0)
    ('1.00 - 1.25', '1.00', 'not known')
    """
    if not steps:
        return "not known"
    return f"{steps:.2f}" if f"{steps:.2f}" == f"{high:.2f}" else f"{steps:.2f} - {high:.2f}"


def to_a_loss(rows: tuple[Beside, ...], known: bool) -> Iterator[RenderableType]:
    """A table of the plan and its baselines."""
    dense_s = next(row.to_loss_s for row in rows if row.name == "dense fp32")
    grid = table("to a loss" if known else "beside", "", ">step ms", *([">x steps", ">ms to a loss"] if known else []),
                 ">of dense fp32's")
    for row in rows:
        steps = [factor(row.steps, row.steps_high), ms(row.to_loss_s)] if known else []
        grid.add_row(row.name, ms(row.step_s), *steps, f"{row.to_loss_s / dense_s:.3g} x")
    yield grid
    if known:
        yield ("x steps: how many times as many as dense training needs, the median and cautiously; ms to a loss: cautiously, "
               "for each step of dense training; alone: the best one, with everybody's batch or its own, whichever is sooner; "
               "latencies: if links and codecs took no time")
    mine, alone = (next((row for row in rows if row.name == name), None) for name in ("this plan", "one machine alone"))
    if mine and alone and alone.to_loss_s < mine.to_loss_s:
        yield "one machine alone is sooner there than all together: faster links would be needed, or larger batches"


def spread(table: LearningTable | None, optimizer: str) -> str:
    """The error of convergence factors, if it was measured. For an optimizer of no family the larger error counts.

    `table`: their source, or None if unknown.
    """
    if table is None:
        return "x steps: by the profile's own rows, of which no spread is known"
    if known := table.provenance.errors:
        off = known.get(optimizer, max(known.values()))
        return f"x steps: on tasks held out, factors were off by {off:.0%} in the median"
    seeds = max(row.runs for row in table.rows)
    source = "one seed" if seeds == 1 else f"{seeds} seeds"
    return f"x steps: by {source} of a task of your own, of which no spread over tasks is known"


def held_up(looser: Looser | None) -> Iterator[str]:
    """The nearest plan that exceeds the loss budget."""
    if looser is not None:
        how = f"{way_of(looser.plan) or 'plain steps'} with {most_used(looser.plan)}"
        what = "to a loss" if looser.to_loss else "a step"
        yield (f"--max-loss is what holds it up: {how} would take {ms(looser.after_s)} ms {what} instead of "
               f"{ms(looser.before_s)}; {allowing(looser.loss)} allows it")


def allowing(loss: float) -> str:
    """The --max-loss that allows a plan with this loss; beyond the largest valid one, only no budget at all.

    >>> allowing(0.4511), allowing(2.31)
    ('--max-loss 0.46', 'only no --max-loss, since it loses 2.4 of the loss and 1 is the most to be named,')
    """
    least = _up(loss)
    if least <= MOST_LOSS:
        return f"--max-loss {least:g}"
    return f"only no --max-loss, since it loses {least:g} of the loss and {MOST_LOSS:g} is the most to be named,"


def _up(loss: float) -> float:
    """Rounded up to two digits.

    >>> _up(0.4511), _up(0.1), _up(0.0)
    (0.46, 0.1, 0.0)
    """
    step = 10 ** (math.floor(math.log10(loss)) - 1) if loss > 0 else 1.0
    return round(math.ceil(loss / step - 1e-9) * step, 12)


def by_decision(plan: Plan, job: Job, width: int) -> Table:
    """A table with one row for all buckets of the same decision. The largest bucket represents them, by name on a wide page."""
    wide = width >= WIDE
    alike: dict[str, list[Bucket]] = {}
    for bucket in plan.buckets:
        alike.setdefault(spelled(bucket), []).append(bucket)
    grid = table(f"{len(plan.buckets)} bucket{'s' if len(plan.buckets) != 1 else ''}", ">buckets", "codec", "path", ">elements",
                 *([">sent, received", "such as", "why"] if wide else [">such as", "why"]))
    for buckets in sorted(alike.values(), key=lambda each: -sum(b.numel for b in each)):
        first = max(buckets, key=lambda b: b.numel)
        codec = first.codec + (f" down {first.down}" if first.down else "") + (" by node" if first.by_node else "")
        grid.add_row(
            str(len(buckets)), codec + (", a step late" if first.stale else ""), first.path,
            f"{sum(b.numel for b in buckets) / job.numel:.1%}",
            *([nbytes(sum(b.why.nbytes for b in buckets if b.why)),
               f"{first.id} {shortened(job.tensors[first.slices[0].tensor].name)}"] if wide else [str(first.id)]),
            first.why.reason if first.why else "",
        )
    for column in grid.columns[1:3]:  # reasons may break anywhere, codecs and ops only between words
        column.min_width = min(LONGEST, max((len(word) for cell in column.cells for word in str(cell).split()), default=0))
    return grid


def shortened(name: str) -> str:
    """
    >>> shortened("bert.encoder.layer.10.attention.output.dense.weight")
    'bert.…nse.weight'
    """
    return name if len(name) <= NAME else f"{name[: NAME // 3]}…{name[len(name) - NAME + NAME // 3 + 1 :]}"


def explanation(told: Explanation, width: int) -> Iterator[RenderableType]:
    bucket, why = told.bucket, told.bucket.why
    names = ", ".join(told.tensors[:6]) + (f" and {len(told.tensors) - 6} more" if len(told.tensors) > 6 else "")
    yield f"bucket {bucket.id}: {bucket.numel:,} elements ({nbytes(4 * bucket.numel)}) of {names}"
    yield f"goes as {spelled(bucket)}" + (f", to server {bucket.server}" if bucket.served else "")
    if why is not None:
        yield f"because: {why.reason}"
        if why.runner_up:
            yield f"runner-up: {why.runner_up}: {with_runner_up(why)}"
    turns = f" in {told.fragments} turns" if told.fragments > 1 else ""
    what = "the step takes" if told.local_steps == 1 else f"{told.local_steps} local steps and their exchange{turns} take"
    yield (f"ready {ms(told.ready_s)} ms after the step began, done {ms(told.done_s)}; {what} {ms(told.step_s)}, "
           f"of which computing {ms(told.compute_s)}")
    if told.steps:
        to_loss_s = told.step_s / told.local_steps * told.steps_high
        yield (f"steps needed: {factor(told.steps, told.steps_high)} x those of dense training; were all sent so, "
               f"{factor(told.codec_steps, told.codec_steps_high)} x; to a loss cautiously {ms(to_loss_s)} ms "
               "for each of those")
    yield (f"beside it: DDP fp16 {ms(told.fp16_s)} ms" + (f", one machine alone {ms(told.alone_s)}" if told.alone_s else "")
           + (" to a loss" if told.steps else " a step"))
    grid = table("its tasks", "op", "lanes", ">from ms", ">to ms", ">bytes", "")
    end = max([told.step_s, *(span.end_s for span in told.spans)])
    for span in told.spans:
        size = nbytes(span.nbytes) if span.nbytes else ""
        grid.add_row(span.op, ", ".join(span.lanes), ms(span.start_s), ms(span.end_s), size,
                     bar(span.start_s / end, span.end_s / end, bar_of(width)))
    yield grid


def with_runner_up(why: Why) -> str:
    """
    >>> with_runner_up(Why(0.1, 8, "", "x", 0.003, 0.02)), with_runner_up(Why(0.1, 8, "", "x", 1e-9))
    ('a loss would come 2 % later, the step be 3.0 ms longer', 'the step would be as long')
    >>> with_runner_up(Why(0.1, 8, "", "x", -0.003, -0.02))
    'a loss would come 2 % sooner, which is too little to leave the finer for it; the step would be 3.0 ms shorter'
    """
    how = "shorter" if why.runner_up_s < 0 else "longer"
    step = f"{ms(abs(why.runner_up_s))} ms {how}" if abs(why.runner_up_s) >= SEEN_S else "as long"
    if not why.runner_up_later:
        return f"the step would be {step}"
    part = f"a loss would come {100 * abs(why.runner_up_later):.2g} %"
    if why.runner_up_later < 0:
        return f"{part} sooner, which is too little to leave the finer for it; the step would be {step}"
    return f"{part} later, the step be {step}"


def bar_of(width: int) -> int:
    return BAR if width >= WIDE else SHORT_BAR


def bar(start: float, end: float, whole: int) -> str:
    """
    >>> bar(0.5, 1.0, 30)
    '...............###############'
    """
    first = min(whole - 1, int(start * whole))
    length = max(1, round(end * whole) - first)
    return "." * first + "#" * length + "." * (whole - first - length)


def difference(told: Difference, before: str, after: str) -> Iterator[RenderableType]:
    if told.equal:
        yield "the plans decide alike"
        return
    yield (f"step {ms(told.step_s[0])} ms -> {ms(told.step_s[1])} ms; {told.buckets[0]} -> {told.buckets[1]} buckets; "
           f"{len(told.changes)} tensors go otherwise")
    if all(told.steps):
        steps = [factor(*each) for each in zip(told.steps, told.steps_high, strict=True)]
        to_loss = [ms(step_s * high) for step_s, high in zip(told.step_s, told.steps_high, strict=True)]
        yield f"steps needed {steps[0]} x -> {steps[1]} x; to a loss cautiously {to_loss[0]} ms -> {to_loss[1]} ms"
    alike: dict[tuple[str, str], list[str]] = {}
    for change in told.changes:
        alike.setdefault((change.before, change.after), []).append(change.tensor)
    grid = table("", ">tensors", "such as", before, after)
    for name, old, new in told.fields:
        grid.add_row("", name, old, new)
    for (old, new), names in sorted(alike.items(), key=lambda each: -len(each[1])):
        grid.add_row(str(len(names)), shortened(names[0]), old, new)
    yield grid
    if len(told.changes) > len(alike):
        yield "--json names every tensor"


def curve(told: Curve, width: int) -> Iterator[RenderableType]:
    known, wide = all(p.steps for p in told.points), width >= WIDE
    headers = ["with", ">step ms", *([">x steps", ">to a loss"] if known else []),
               *([">DDP fp16", ">alone"] if wide else []), ">gain", *([] if known else [">free ms"]),
               *([">samples/s"] if wide else []), *(["codec", "way"] if wide else ["codec and way"])]
    grid = table("", *headers)
    for p in told.points:
        gain, way = f"{p.lead:,.{2 if p.lead < 10 else 0}f} x", p.way or "plain"
        grid.add_row(p.label, ms(p.plan_s), *([factor(p.steps, p.steps_high), ms(p.to_loss_s)] if known else []),
                     *([ms(p.fp16_s), ms(p.alone_s) if p.alone_s else ""] if wide else []), gain,
                     *([] if known else [ms(p.free_s)]), *([f"{p.samples_per_s:,.1f}"] if wide else []),
                     *([p.codec, way] if wide else [f"{p.codec}, {way}"]))
    for column in grid.columns[1:-2]:
        column.no_wrap = True
    for column in (grid.columns[0], *grid.columns[-2:]):
        column.min_width = max((min(LONGEST, len(word)) for cell in column.cells for word in str(cell).split()), default=0)
    yield grid
    yield ("gain: of the plan over the best of no compression, DDP fp16 and one machine alone"
           + (", in seconds to a loss" if known else "") + "; codec: of most elements; way: how steps are taken"
           + ("" if known else "; free: if coding took no time"))
    if losing := [p.label for p in told.points if 0 < p.alone_s < p.to_loss_s]:
        yield f"one machine alone is sooner there than this plan: {', '.join(losing)}"
    floors = ", ".join(f"{ms(p.floor_s)} ({p.label})" for p in told.points if p.floor_s)
    yield f"latencies alone, if links and codecs took no time, ms{' to a loss' if known else ''}: {floors}"
    if kept_out := [f"{ms(p.looser_s)} ms in place of {ms(p.to_loss_s)}, which {allowing(p.looser_loss)} allows ({p.label})"
                    for p in told.points if p.looser_s]:
        yield f"the plan's --max-loss is what holds it up: {'; '.join(kept_out)}; `commlayer plan make` sets it"
    if told.swept == "bandwidth":
        yield break_even(told)


# merged: The assumptions that `commlayer plan make` prints before its verdict: batch, speeds, optimizer, memory and network.

OPTIMIZER = {"adam": "AdamW", "sgd": "SGD with momentum", "": "any, so the worse of AdamW and SGD counts"}
STATES_NBYTES = {"adam": 8, "sgd": 4, "": 8}
"""Bytes of optimizer state per element."""
ELEMENT_NBYTES = 4
RESERVED_GBYTES = 1.0
"""Memory that a GPU's driver and allocator keep for themselves."""


def assumptions(model: str, job: Job, cluster: Cluster, optimizer: str, *, said: bool) -> Iterator[str]:
    """Lines for the console. `model` is the user's name for it. `said`: whether the user named the optimizer, too."""
    yield f"batch: {_batch(model, job)}"
    devices = {node.device: node for node in cluster.nodes if node.ranks}
    for node in devices.values():
        yield f"computing: {_computing(model, job, node)}"
    yield f"optimizer: {OPTIMIZER[optimizer]}" + ("" if said else ", whatever the script uses; --optimizer sgd changes it")
    for device in devices:
        if device in GPUS:
            yield from _memory(model, job, device, optimizer)
    yield f"network: {_network(cluster)}"


def _batch(model: str, job: Job) -> str:
    if model in tables.PUBLISHED:
        return f"{job.batch} samples{_tokens(model)} per worker and step"
    samples = "as many samples as the model's function draws" if job.batch is None else f"{job.batch} samples"
    return f"{samples} per worker and step; its times hold for that batch"


def _tokens(model: str) -> str:
    tokens = tables.PRESETS[model].tokens if model in tables.PRESETS else tables.PUBLISHED[model].tokens
    return f" of {tokens:,} tokens" if tokens else ""


def _computing(model: str, job: Job, node: Node) -> str:
    assert job.timing is not None
    where, half = node.device, job.timing.half
    own = "" if node.speed in (0.0, speed(where, half=half) if where in ("cpu", *GPUS) else node.speed) else \
        f", taken as {node.speed:g} x a V100 as the cluster says"
    if model in tables.PRESETS:
        part, peak = tables.PRESETS[model].utilisation, peak_tflops(where) if where in ("cpu", *GPUS) else 0.0
        precision = "FP32" if where not in GPUS else gpu(where).precision
        return f"{where} in {precision}, {part * peak:.3g} TFLOP/s: {part:.0%} of the {peak:g} in its data sheet{own}"
    source = "published times of a V100" if model in tables.PUBLISHED else \
        f"the times in {model}" if model.endswith(".json") else "times measured on this machine"
    precision = "FP32" if model in tables.PUBLISHED else "the precision that they were measured in"
    return f"{where} in {precision}, from {source}, converted by data sheets (FP32){own}"


def _memory(model: str, job: Job, device: str, optimizer: str) -> Iterator[str]:
    assert job.timing is not None
    sizes = {"weights": ELEMENT_NBYTES * job.numel, "gradients": ELEMENT_NBYTES * job.numel,
             "optimizer": STATES_NBYTES[optimizer] * job.numel, "activations": job.timing.activation_nbytes}
    gbytes = {name: size / 1e9 for name, size in sizes.items()}
    required_gbytes, available, activation_gbytes = sum(gbytes.values()), gpu(device).memory_gbytes, gbytes["activations"]
    parts = ", ".join(f"{name} {size:.1f}" for name, size in gbytes.items() if size)
    unknown = "" if activation_gbytes else "; activations are not known"
    yield f"memory: {device} needs about {max(0.1, required_gbytes):.1f} of {available:g} GB ({parts}{unknown})"
    usable_gbytes = available - RESERVED_GBYTES
    if required_gbytes <= usable_gbytes:
        return
    most = int((usable_gbytes - (required_gbytes - activation_gbytes))
               / activation_gbytes * (job.batch or 0)) if activation_gbytes else 0
    remedy = "take a GPU with more memory, or checkpoint activations" if most < 1 else \
        f"--batch {most} fits" if model in tables.PRESETS else f"a batch of {most} fits"
    yield f"WARNING: this does not fit into {device}, which keeps {RESERVED_GBYTES:g} GB for itself: {remedy}"


def _network(cluster: Cluster) -> str:
    rented = [node for node in cluster.nodes if not node.ranks]
    if cluster.reachable:
        return "all nodes reach one another"
    if rented and not any(node.server for node in cluster.nodes if node.ranks):
        slowest = min(min(node.link.up_bps, node.link.down_bps) for node in rented)
        what = "a rented machine" if len(rented) == 1 else f"{len(rented)} rented machines"
        return f"homes behind NAT, which nobody dials; all dial a summation server on {what} with {rate(slowest)}"
    return "nodes do not reach one another; summation servers are on nodes that can be dialled"


# merged: Draws a sweep of `plan whatif` as a PNG. Needs matplotlib.

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

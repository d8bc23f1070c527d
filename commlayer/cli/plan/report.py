"""Reports of `commlayer plan` and `estimate`: assumptions, tables and explanations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from commlayer.cli.output import Part, Table, ms
from commlayer.errors import join_names
from commlayer.observe.job.answers import amount
from commlayer.planner.baselines import (
    ALONE,
    PLAN,
    SYNCHRONOUS,
    Baseline,
    Curve,
    Gains,
    TrainingCost,
    break_even,
    rate_text,
    times_text,
)
from commlayer.planner.convergence import (
    DENSE,
    DENSE_CODEC,
    FAMILIES,
    LIKE,
    LONG_NUMEL,
    MUON,
    PUBLISHED_NUMEL,
    SHORT_NUMEL,
    LearningRow,
    Recipe,
    codec_class,
    excess,
    kind_and_point,
    measured_noise,
    one_worker_factor,
)
from commlayer.planner.data import load, models, tables
from commlayer.planner.data.noise import find_noise, noise_law
from commlayer.planner.data.tables import LAUNCH_S, LearningTable, gpu, gpus, job_limit, job_speed, peak_tflops, stream_bytes_s
from commlayer.planner.explanation import Difference, Explanation, how_sent
from commlayer.planner.memory import RESERVED_GBYTES, Memory, estimate_memory
from commlayer.planner.model import Cluster, Node, Policy
from commlayer.planner.plan_rules import bucket_codecs, sync_mode
from commlayer.planner.simulation import Timeline
from commlayer.records import Bucket, BucketReason, Job, Plan

BAR = 12
"""Width in characters of the bar of a task's time."""
SEEN_S = 5e-5
"""Seconds below which a difference is shown as "same step time", since it would print as 0.0 ms."""
NAME = 16
"""Number of characters of a tensor's name in a table."""


def elements(count: int) -> str:
    """
    >>> elements(124_439_808), elements(4810)
    ('124.4 M', '4,810')
    """
    return f"{count / 1e6:,.1f} M" if count >= 1e6 else f"{count:,}"


def title(plan: Plan, job: Job, cluster: Cluster) -> str:
    """Lines that describe the job and its plan's sync mode."""
    mode = "synchronous: in every step .grad is the average of all workers"
    if not plan.steps_locally and not plan.synchronous:
        mode = "one step stale: .grad is the average of all workers, for some tensors of the previous step"
    elif plan.steps_locally:
        mode = f"{sync_mode(plan)}: between exchanges each worker steps on its own .grad"
    return (f"{job.name or 'job'}: {len(job.tensors)} tensors, {elements(job.numel)} elements, "
            f"{cluster.ranks} ranks on {sum(1 for n in cluster.nodes if n.ranks)} nodes\nmode: {mode}")


def summary(plan: Plan, job: Job, cluster: Cluster, timeline: Timeline) -> str:
    compute_s = timeline.compute_s / plan.local_steps
    hosts = ", ".join(cluster.nodes[i].name for i in plan.hosts)
    parts = [
        f"step {ms(timeline.step_s / plan.local_steps)} ms: computing {ms(compute_s)}, "
        f"exposed communication {ms(timeline.step_s / plan.local_steps - compute_s)}",
    ]
    if job.batch and plan.step_s:
        parts.append(f"{job.batch * cluster.ranks / plan.step_s:,.1f} samples a second together")
    if plan.servers:
        parts.append(f"summation servers: {hosts or f'{plan.servers} nodes'}")
    return "; ".join(parts)


def factor(steps: float, high: float) -> str:
    """
    >>> factor(1.0, 1.25), factor(1.0, 1.0), factor(0.0, 0.0)
    ('1.00 - 1.25', '1.00', 'not known')
    """
    if not steps:
        return "not known"
    return f"{steps:.2f}" if f"{steps:.2f}" == f"{high:.2f}" else f"{steps:.2f} - {high:.2f}"


def verdicts(gain: Gains, *, auto: bool, synchronous: bool) -> str:
    """Compares both sync modes with the fastest machine alone. `auto`: local steps were allowed; `synchronous`: the plan has
    none.

    >>> verdicts(Gains(2.42, 2.0, 2.42, 0.58, 0.58), auto=True, synchronous=False)
    'sync="auto": 2.4x, sync="step": 0.58x, one machine alone: 1x'
    >>> verdicts(Gains(1.2, 1.1, 1.9, 1.2, 1.9), auto=True, synchronous=True)
    'sync="auto" and sync="step": 1.2x to 1.9x, one machine alone: 1x'
    """
    modes = f"{AUTO}: {times_text(gain.plan, gain.high)}, {STEP}: " if auto and not synchronous else \
        f"{AUTO} and {STEP}: " if auto else f"{STEP}: "
    return f"{modes}{times_text(gain.step, gain.step_high)}, one machine alone: 1x"


def labels(*, exact: bool) -> Mapping[str, str]:
    """Names of the plan and of the best synchronous plan in a report, for a plan that a sync mode chooses by itself."""
    return {PLAN: STEP if exact else AUTO, SYNCHRONOUS: STEP}


def next_lines(gain: Gains, rows: Sequence[Baseline], plan: Plan, shares: Sequence[int]) -> Iterator[str]:
    """What to type, or what to do instead of training on these machines."""
    alone = next((row.node for row in rows if row.name == ALONE), "")
    if gain.high <= 1:
        yield f"Stay alone: run your script {f'on {alone}' if alone else 'as it is'}, without commlayer."
    else:
        yield f"In your script{' (docs/how-to/uneven-machines.md)' if shares else ''}:"
        if shares:
            yield f"sampler = commlayer.balance.Sampler(data, batch={sum(shares)}, shares={list(shares)})"
        yield "commlayer.attach(model, optimizer)" if plan.synchronous else f"commlayer.attach(model, optimizer, {AUTO})"


def alternatives(rows: Sequence[Baseline], known: bool, names: Mapping[str, str], steps: int = 0) -> Iterator[Part]:
    """A table of the plan and its alternatives. If there is only one machine, speed is relative to training without
    compression. `names`: what to call a row; `steps`: length of the training, 0 if unknown."""
    alone = next((row for row in rows if row.name == ALONE), next(row for row in rows if row.name == "dense fp32"))
    columns = ["", ">step ms", *([">x steps", ">ms to a loss"] if known else []), ">speed", ">GB/month",
               *([">GB"] if steps else [])]
    cells = []
    for row in rows:
        factors = [factor(row.steps, row.steps_high), ms(row.to_loss_s)] if known else []
        speed = alone.step_s * alone.steps / (row.step_s * row.steps)
        gbytes = [row.nbytes / row.step_s * MONTH_S / 1e9, *([row.nbytes * steps * row.steps / 1e9] if steps else [])]
        cells.append([names.get(row.name, row.name), ms(row.step_s), *factors,
                      f"{speed:.2f}x" if speed >= 0.1 else f"{speed:.1g}x", *(_short(each) if each else "" for each in gbytes)])
    yield Table("", columns, cells)
    gb = "GB: that one machine sends and receives in a month" + (" and in this training" if steps else "")
    yield ("x steps: convergence factor, median and cautious; ms to a loss: step time x cautious factor; speed: to a loss, "
           f"relative to {alone.name}; {gb}" if known else gb)


def training(steps: int, costs: tuple[TrainingCost, ...]) -> str:
    """
    >>> training(10_000, (TrainingCost("this plan", 31.0, 93.0, 1.24, 15.8), TrainingCost(ALONE, 0.5, 0.5)))
    'a training of 10,000 steps: 31 h, 93 GPU-hours, 1.2 for the server, 16 kWh; alone 30 min, 0.5 GPU-hours'
    """
    each = []
    for cost in costs:
        parts = [f"{_short(cost.hours)} h" if cost.hours >= 1 else f"{_short(60 * cost.hours)} min",
                 f"{_short(cost.gpu_hours)} GPU-hours"]
        parts += [f"{_short(cost.server_cost)} for the server"] if cost.server_cost else []
        parts += [f"{_short(cost.kwh)} kWh"] if cost.kwh else []
        each.append(("alone " if cost.name == ALONE else "") + ", ".join(parts))
    return f"a training of {steps:,} steps: {'; '.join(each)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


LAW_ERROR = 0.10
"""Median error of both laws of local steps, on papers (`python -m bench published`) and on tasks of our own (`python -m bench
longrun-law`) that the fit omits."""


def factor_error(table: LearningTable | None, optimizer: str, job: Job) -> str:
    """A line on the error of the convergence factors. If the optimizer's family is unknown, the line has the largest error.

    `table`: the source of the factors; None if unknown.
    """
    if table is None:
        return "x steps: from the profile's own rows; their error is unknown"
    if known := table.provenance.errors:
        off = known.get(optimizer, max(known.values()))
        if job.numel >= SHORT_NUMEL and table.provenance.numel:
            trainings = "published trainings" if job.numel > LONG_NUMEL else "our trainings"
            return (f"x steps is predicted: half of the predictions for {trainings} that the fit omits were off by less than "
                    f"{LAW_ERROR:.0%}; those for codecs, on small models, by less than {off:.0%}")
        return f"x steps is predicted: half of the predictions for tasks that the fit omits were off by less than {off:.0%}"
    seeds = max(row.runs for row in table.rows)
    source = "one seed" if seeds == 1 else f"{seeds} seeds"
    return f"x steps: from {source} of your own task; their error on other tasks is unknown"


def provenance(job: Job, optimizer: str, workers: int, plan: Plan, rows: tuple[LearningRow, ...]) -> Iterator[str]:
    """Lines that name the sources of the convergence factors."""
    noise, measured = find_noise(job) or measured_noise(rows, optimizer), max((row.numel for row in rows), default=0)
    yield ("batch size: training takes 1 + noise scale / batch times the steps of an unlimited batch (McCandlish et al., "
           f"1812.06162); with a noise scale of {_short(noise)} batches, one worker alone needs "
           f"{one_worker_factor(rows, optimizer, workers, find_noise(job), job.numel):.2f} x the steps of {workers}"
           + ("; small models gain less than that law says, by our trainings" if 0 < measured < job.numel < LONG_NUMEL else ""))
    small = f"short runs of models of up to {measured:,} parameters at a constant learning rate"
    if not measured:
        yield "local steps, codecs and delays: from your own table"
        return
    local_steps = plan.local_steps > 1 or plan.overlap == "round"
    if local_steps and job.numel > measured:
        local = excess(rows, DENSE_CODEC, Recipe(optimizer, "updates", plan.local_steps, plan.overlap, workers=workers,
                                                 fragments=plan.fragments, numel=job.numel, noise=find_noise(job)))
        sources = []
        if job.numel < PUBLISHED_NUMEL:
            sources.append(f"to our trainings of 2,000 steps with up to {LONG_NUMEL / 1e6:g} M parameters, 2 to 8 workers and "
                           "1 to 128 local steps (python -m bench longrun)")
        if job.numel > LONG_NUMEL:
            sources.append("to published trainings of 35 M to 15 B parameters, 2 to 16 workers and 30 to 2000 local steps "
                           "(2503.09799, 2509.10439, 2505.23725, 2501.18512)")
        yield (f"local steps: x {factor(1 + local.steps, 1 + local.high)} for {job.numel / 1e6:,.1f} M parameters and "
               f"{plan.local_steps} local step{'s' if plan.local_steps > 1 else ''}"
               + (", exchanged during the next ones" if plan.overlap else "") + f", by a law fitted {' and '.join(sources)}"
               + (f"; for Muon, ln x is {MUON:g} of AdamW's (2505.23725)" if optimizer == "muon" else ""))
    if local_steps and job.numel < SHORT_NUMEL:
        yield f"local steps: from {small}"
    yield f"codecs and delays: from {small}"
    if optimizer in FAMILIES and all(row.optimizer != optimizer for row in rows):
        like = f"like {OPTIMIZER[LIKE[optimizer]]}, whose steps have one size as well" if optimizer in LIKE else \
            "like the worse of the measured optimizers"
        yield f"{optimizer}: codecs and delays were not measured with it, so they count {like}"
    published = load("published", dict[str, str])
    for codec in dict.fromkeys(codec for bucket in plan.buckets for codec in bucket_codecs(bucket)):
        kind = kind_and_point(codec, 1)[0]
        if kind != DENSE and codec_class(kind) in published:
            own = excess(rows, codec, Recipe(optimizer, workers=workers))
            yield (f"{codec}: x {factor(1 + own.steps, 1 + own.high)} in every step of small models; published: "
                   f"{published[codec_class(kind)]}")
    if any(bucket.stale for bucket in plan.buckets):
        yield f"one step late, published: {published['late']}"


def decision_table(plan: Plan, job: Job) -> Table:
    """A table with one row per way of sending: all buckets that are sent in the same way share a row, which shows the largest
    of them."""
    alike: dict[str, list[Bucket]] = {}
    for bucket in plan.buckets:
        alike.setdefault(how_sent(bucket), []).append(bucket)
    rows = []
    for buckets in sorted(alike.values(), key=lambda each: -sum(b.numel for b in each)):
        first = max(buckets, key=attrgetter("numel"))
        codec = first.codec + (f" down {first.down}" if first.down else "") + (" by node" if first.by_node else "")
        rows.append([
            str(len(buckets)), codec + (", one step stale" if first.stale else ""), first.path,
            f"{sum(b.numel for b in buckets) / job.numel:.1%}", amount(sum(b.why.nbytes for b in buckets if b.why)),
            str(first.id), shortened(job.tensors[first.slices[0].tensor].name), first.why.reason if first.why else ""])
    return Table(f"{len(plan.buckets)} bucket{'s' if len(plan.buckets) != 1 else ''}", (
        ">buckets", "codec", "path", ">elements", "+>sent, received", ">such as", "+of", "why"), rows)


def shortened(name: str) -> str:
    """
    >>> shortened("bert.encoder.layer.10.attention.output.dense.weight")
    'bert.…nse.weight'
    """
    return name if len(name) <= NAME else f"{name[: NAME // 3]}…{name[len(name) - NAME + NAME // 3 + 1 :]}"


def explanation(result: Explanation) -> Iterator[Part]:
    bucket, why = result.bucket, result.bucket.why
    yield f"bucket {bucket.id}: {bucket.numel:,} elements ({amount(4 * bucket.numel)}) of {join_names(result.tensors, 6)}"
    yield f"sent as {how_sent(bucket)}" + (f", to server {bucket.server}" if bucket.served else "")
    if why is not None:
        yield f"because: {why.reason}"
        if why.runner_up:
            yield f"runner-up: {why.runner_up}: {with_runner_up(why)}"
    what = "the step takes"
    if result.local_steps > 1:
        fragments = f" in {result.fragments} fragments" if result.fragments > 1 else ""
        what = f"{result.local_steps} local steps and their exchange{fragments} take"
    yield (f"ready {ms(result.ready_s)} ms after the step began, done {ms(result.done_s)}; {what} {ms(result.step_s)}, "
           f"of which computing {ms(result.compute_s)}")
    if result.steps:
        to_loss_s = result.step_s / result.local_steps * result.steps_high
        yield (f"convergence factor {factor(result.steps, result.steps_high)}; step time x cautious factor {ms(to_loss_s)} ms")
    end = max([result.step_s, *(span.end_s for span in result.spans)])
    yield Table("tasks", ("op", "lanes", ">from ms", ">to ms", ">bytes", ""), [
        [span.op, ", ".join(span.lanes), ms(span.start_s), ms(span.end_s), amount(span.nbytes) if span.nbytes else "",
         time_bar(span.start_s / end, span.end_s / end)] for span in result.spans])


def with_runner_up(why: BucketReason) -> str:
    """
    >>> with_runner_up(BucketReason(0.1, 8, "", "x", 0.003, 0.02)), with_runner_up(BucketReason(0.1, 8, "", "x", 1e-9))
    ('2 % more time to a loss, step 3.0 ms longer', 'same step time')
    >>> with_runner_up(BucketReason(0.1, 8, "", "x", -0.003, -0.02))
    '2 % less time to a loss, too little to choose the coarser codec, step 3.0 ms shorter'
    """
    how = "shorter" if why.runner_up_s < 0 else "longer"
    step = f"step {ms(abs(why.runner_up_s))} ms {how}" if abs(why.runner_up_s) >= SEEN_S else "same step time"
    if not why.runner_up_later:
        return step
    sign = "more time to a loss" if why.runner_up_later > 0 else "less time to a loss, too little to choose the coarser codec"
    return f"{100 * abs(why.runner_up_later):.2g} % {sign}, {step}"


def time_bar(start: float, end: float) -> str:
    """
    >>> time_bar(0.5, 1.0)
    '......######'
    """
    first = min(BAR - 1, int(start * BAR))
    length = max(1, round(end * BAR) - first)
    return "." * first + "#" * length + "." * (BAR - first - length)


def difference(result: Difference, before: str, after: str) -> Iterator[Part]:
    if result.equal:
        yield "no differences"
        return
    yield (f"step {ms(result.step_s[0])} ms -> {ms(result.step_s[1])} ms; {result.buckets[0]} -> {result.buckets[1]} buckets; "
           f"{len(result.changes)} tensors are sent differently")
    if all(result.steps):
        steps = [factor(*each) for each in zip(result.steps, result.steps_high, strict=True)]
        to_loss = [ms(step_s * high) for step_s, high in zip(result.step_s, result.steps_high, strict=True)]
        yield f"convergence factor {steps[0]} -> {steps[1]}; step time x cautious factor {to_loss[0]} ms -> {to_loss[1]} ms"
    alike: dict[tuple[str, str], list[str]] = {}
    for change in result.changes:
        alike.setdefault((change.before, change.after), []).append(change.tensor)
    by_count = sorted(alike.items(), key=lambda each: -len(each[1]))
    yield Table("", (">tensors", "such as", before, after), [
        *(["", *field] for field in result.fields),
        *([str(len(names)), shortened(names[0]), old, new] for (old, new), names in by_count)])
    if len(result.changes) > len(alike):
        yield "--json names every tensor"


def curve(result: Curve) -> Iterator[Part]:
    known = all(p.steps for p in result.points)
    columns = ("with", ">step ms", *([">x steps", ">to a loss"] if known else []), "+>DDP fp16", "+>alone", ">gain",
               "+>samples/s", "codec and mode")
    yield Table("", columns, [
        [p.label, ms(p.plan_s), *([factor(p.steps, p.steps_high), ms(p.to_loss_s)] if known else []), ms(p.fp16_s),
         ms(p.alone_s) if p.alone_s else "", f"{p.lead:,.{2 if p.lead < 10 else 0}f} x", f"{p.samples_per_s:,.1f}",
         f"{p.codec}, {p.mode or 'every step'}"] for p in result.points])
    yield ("gain: of the plan over the best of no compression, DDP fp16 and one machine alone"
           + (", in seconds to a loss" if known else "") + "; codec: of most elements")
    if losing := [p.label for p in result.points if 0 < p.alone_s < p.to_loss_s]:
        yield f"one machine alone is faster than this plan: {', '.join(losing)}"
    if result.swept == "bandwidth":
        yield break_even(result)


AUTO, STEP = 'sync="auto"', 'sync="step"'
MONTH_S = 30 * 86400
OPTIMIZER = {"adam": "AdamW", "sgd": "SGD with momentum", "muon": "Muon", "lion": "Lion, which counts like AdamW",
             "": "any, so the worse of AdamW and SGD counts"}


def assumptions(
    model: str, job: Job, cluster: Cluster, policy: Policy, shares: Sequence[int] = (), *, named: bool,
) -> Iterator[str]:
    """Lines that state the estimate's assumptions. `model`: the user's name for the model. `named`: True if the user named the
    optimizer. `shares`: each worker's samples; empty if all have the same number."""
    optimizer = policy.optimizer
    yield f"machines: {_machines(cluster)}"
    yield f"batch: {_batch(model, job)}"
    devices = {node.device: node for node in cluster.nodes if node.ranks}
    for node in devices.values():
        yield f"computing: {_computing(model, job, node)}"
    yield f"optimizer: {OPTIMIZER[optimizer]}" + ("" if named else " (not read from your script; change it with --optimizer)")
    yield f"noise scale: {_noise(model, job, optimizer)}"
    for device, node in devices.items():
        if device in gpus():
            yield f"memory: {_memory(job, node, optimizer)}"
    yield f"network: {_network(cluster)}"
    if shares:
        names = [node.name for node in cluster.nodes for _ in range(node.ranks)]
        each = ", ".join(f"{name} {share}" for name, share in zip(names, shares, strict=True))
        yield f"workers: samples of a step by speed: {each}"


def _machines(cluster: Cluster) -> str:
    alike = Counter((node.device, node.ranks, node.link.down_bps, node.link.up_bps) for node in cluster.nodes if node.ranks)
    return "; ".join(
        f"{count} with {f'{ranks} {device} each' if ranks > 1 else device}, {rate_text(down)} down and {rate_text(up)} up"
        for (device, ranks, down, up), count in alike.items())


def _batch(model: str, job: Job) -> str:
    timing = job.timed
    tokens = f" of {timing.model.tokens:,} tokens" if timing.model and timing.model.tokens else ""
    count = f"{job.batch:,} {'sample' if job.batch == 1 else 'samples'}{tokens}" if job.batch else \
        "the number of samples that the model's function draws"
    pieces = timing.micro_batches
    parts = f", as {pieces} micro-batches of {-(-(job.batch or 1) // pieces)} (session.no_sync())" if pieces > 1 else ""
    return f"{count} per worker and step{parts}" + ("" if model in models.built_in() else "; the times are for this batch")


def _computing(model: str, job: Job, node: Node) -> str:
    where, timing, known = node.device, job.timed, node.device in ("cpu", *gpus())
    own = "" if not known or node.speed in (0.0, job_speed(where, timing)) else \
        f", at {node.speed:g} x a V100 as set in the cluster"
    if timing.work is None:
        built_in = model in models.built_in()
        source = "published times of a V100" if built_in else f"the times in {model}"
        precision = "FP32" if built_in else "the precision of the measurement"
        return f"{where} in {precision}, from {source}, converted by data sheets (FP32){own}"
    counted = "" if models.find_preset(model) else f"counted from {model}, "
    precision = gpu(where).precision if timing.half and where in gpus() else "FP32"
    return f"{where} in {precision}, {counted}{_limit(model, job, where) if known else 'as a V100'}{own}"


def _limit(model: str, job: Job, where: str) -> str:
    """What limits the step on this device."""
    limit, peak = job_limit(where, job.timed), peak_tflops(where)
    if limit == "stream_s":
        return f"limited by reading and writing its memory, at {stream_bytes_s(where) / 1e9:.3g} GB/s"
    if limit == "launch_s":
        return f"limited by starting kernels, in {1e6 * LAUNCH_S:g} us each"
    if not job.timed.half:
        return "from published times of a V100, converted by data sheets"
    if preset := models.find_preset(model):
        part = preset.utilisation
        return f"{part * peak:.3g} TFLOP/s: {part:.0%} of its data sheet's {peak:g}"
    return (f"{models.PRODUCTS * peak:.3g} TFLOP/s: {models.PRODUCTS:.0%} of its data sheet's {peak:g} (convolutions "
            f"{models.CONVOLUTIONS:.0%})")


def _noise(model: str, job: Job, optimizer: str) -> str:
    noise, info = find_noise(job), job.timed.model
    law = noise_law(info, job.numel)
    if not noise:
        small = measured_noise(tables.learning_rows(), optimizer)
        what = "unknown for adapters of a frozen model" if info and info.frozen > job.numel else "unknown for such a model"
        return (f"{what}: {_short(small)} batches of one worker, as in small models, or many more; to measure it, train with "
                'two workers, read session.metrics()["noise_scale"] (in batches), and set --noise-scale SAMPLES')
    batches = f"{_short(noise)} batches of one worker"
    if law is None or job.timed.noise_scale:
        preset = models.find_preset(model)
        published = preset is not None and preset.noise_scale == job.timed.noise_scale
        samples = f"{noise * job.batch:,.0f} samples{', as published' if published else ''}: " if job.batch else ""
        return f"{samples}{batches}"
    scratch = "" if model in models.built_in() else "; less if you fine-tune: then set --noise-scale"
    return f"{law.scale:,.0f} {law.unit}, {law.source}: {batches}{scratch}"


def _memory(job: Job, node: Node, optimizer: str) -> str:
    memory = estimate_memory(job, node.device, optimizer)
    gbytes = {**memory.kept, "activations": memory.activations}
    parts = ", ".join(f"{name} {size:.1f}" for name, size in gbytes.items() if size)
    unknown = "" if memory.activations else "; activations are unknown"
    sharded = estimate_memory(job, node.device, optimizer, node.ranks)
    each = f"; {max(0.1, sharded.required):.1f} if FSDP2 shards the model over its {node.ranks} GPUs" if node.ranks > 1 else ""
    return f"{node.device} needs {max(0.1, memory.required):.1f} of {memory.available:g} GB ({parts}{unknown}){each}"


class Unfit(NamedTuple):
    why: str
    remedy: str


def memory_problem(job: Job, cluster: Cluster, optimizer: str) -> Unfit | None:
    """Why the training does not fit into a machine's memory. Returns None if the job fits into the memory of all nodes."""
    for device, ranks in dict.fromkeys((n.device, n.ranks) for n in cluster.nodes if n.ranks and n.device in gpus()):
        memory, sharded = estimate_memory(job, device, optimizer), estimate_memory(job, device, optimizer, ranks)
        if not memory.fits:
            once = " even with one sample at once" if job.batch == job.timed.micro_batches else ""
            return Unfit(f"this needs {memory.required:.1f} GB{once}, and {device} has {memory.available:g}, of which its "
                         f"driver reserves {RESERVED_GBYTES:g}",
                         f"shard it over the {ranks} GPUs of each home with FSDP2, which takes {sharded.required:.1f} GB "
                         "each (docs/how-to/sharded-models.md)" if sharded.fits else _remedy(job, memory))
    return None


def _remedy(job: Job, memory: Memory) -> str:
    adapted = job.timed.model is not None and job.timed.model.frozen > job.numel
    if sum(memory.kept.values()) > memory.available - RESERVED_GBYTES:
        other = "load the frozen weights in 4 bits (QLoRA)" if adapted else "train adapters (LoRA)"
    elif job.batch is None:
        other = "name the batch with --batch, so that it can be divided into micro-batches"
    else:
        other = "checkpoint activations"
    return f"use a GPU with more memory, or {other}"


def _network(cluster: Cluster) -> str:
    rented = [node for node in cluster.nodes if not node.ranks]
    if cluster.reachable:
        return "all nodes can reach each other"
    if rented and not any(node.server for node in cluster.nodes if node.ranks):
        slowest = min(min(node.link.up_bps, node.link.down_bps) for node in rented)
        what = "a rented machine" if len(rented) == 1 else f"{len(rented)} rented machines"
        return f"homes behind NAT; all connect to a summation server on {what} with {rate_text(slowest)}"
    return "nodes cannot reach each other; summation servers are on nodes that accept connections"

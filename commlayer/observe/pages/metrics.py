"""A JobView as metrics in Prometheus's text format (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from commlayer.observe.job.job_view import JobView, Totals, WorkerRow

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = dict[str, str]
DIRECTIONS = ("up", "down")


class WorkerMetric(NamedTuple):
    """A metric with samples of each worker. `fields`: of a worker's `Totals` or `WorkerRow`, by direction or by the sample's
    suffix. `skips_zeros`: a zero is an unknown value, which is left out."""

    name: str
    kind: str
    text: str
    fields: Mapping[str, str]
    skips_zeros: bool = False


SUMS = (
    WorkerMetric("step_total", "counter", "Training steps of a rank.", {"": "steps"}),
    WorkerMetric("step_seconds", "summary", "Seconds of training steps.", {"_sum": "step_s", "_count": "timed_steps"}),
    WorkerMetric("compute_seconds_total", "counter", "Seconds in which training did not wait for communication.",
                 {"": "compute_s"}),
    WorkerMetric("exposed_seconds_total", "counter", "Seconds in which training waited for communication.", {"": "exposed_s"}),
    WorkerMetric("hidden_seconds_total", "counter", "Seconds of communication while training computed.", {"": "hidden_s"}),
    WorkerMetric("sent_bytes_total", "counter", "Payload bytes, up: sent, down: received.",
                 {"up": "sent_bytes", "down": "received_bytes"}),
    WorkerMetric("dense_bytes_total", "counter", "Bytes that uncompressed synchronous training would have sent.",
                 {"": "dense_bytes"}),
    WorkerMetric("samples_total", "counter", "Samples, as the script reports them.", {"": "samples"}, skips_zeros=True),
)
RECENT = (
    WorkerMetric("loss", "gauge", "Last training loss that the script reported.", {"": "loss"}),
    WorkerMetric("batch_share_ratio", "gauge", "Fraction of the batch of all ranks.", {"": "share"}),
    WorkerMetric("link_bytes_per_second", "gauge", "Rate of the link in recent steps.",
                 {"up": "up", "down": "down"}, skips_zeros=True),
    WorkerMetric("link_planned_bytes_per_second", "gauge", "Rate for which the plan was made.",
                 {"up": "up_planned", "down": "down_planned"}, skips_zeros=True),
)


def exposition(view: JobView, now: float) -> str:
    """All metrics of the job at the time `now`, in the clock of the events. Values that are not known yet are left out."""
    return "".join(f"{line}\n" for line in _lines(view, now))


def _lines(view: JobView, now: float) -> Iterator[str]:
    run, workers = {"run": view.job.run}, sorted(view.workers.items())
    labels = {number: {**run, "rank": str(number), "host": worker.name} for number, worker in workers}
    present = [(labels[worker.number], worker) for worker in view.present]
    totals = [(labels[number], worker.totals) for number, worker in workers]
    rows = [(at, view.row(worker, now)) for at, worker in present if worker.step.steps]
    of_workers: list[tuple[Sequence[WorkerMetric], Sequence[tuple[Labels, Totals | WorkerRow]]]]
    of_workers = [(SUMS, totals), (RECENT, rows)]
    for metrics, records in of_workers:
        for metric in metrics:
            samples = [sample for at, record in records for sample in _samples(metric, at, record)]
            yield from _metric(metric.name, metric.kind, metric.text, samples)
    yield from _metric("link_rtt_seconds", "gauge", "Shortest recent round-trip time to the coordinator.",
                       [(at, worker.link.rtt_s) for at, worker in present if worker.link.rtt_s])
    yield from _metric("peer_last_seen_timestamp_seconds", "gauge", "Time of the last event of a rank, since 1970.",
                       [(at, worker.seen) for at, worker in present if worker.seen])
    status = [view.status(worker, now) for worker in view.present]
    yield from _metric("members", "gauge", "Workers of the job: expected, present, and those of them that wait for others.", [
        (run | {"state": "expected"}, view.job.world), (run | {"state": "present"}, len(status)),
        (run | {"state": "waiting"}, sum(state in ("waits", "waiting") for state in status))])
    yield from _metric("waiting_seconds", "gauge", "Seconds for which the job has waited for members.", [
        (run | {"for": ",".join(map(view.display, wait.names)), "what": wait.what}, wait.waited_s)
        for wait in view.current_waits(now)])
    plan = view.plan
    if plan.digest:
        yield from _metric("plan_info", "gauge", "The current plan.", [
            (run | {"plan": plan.digest, "every": str(plan.local_steps), "codec": plan.codec}, 1)])
        yield from _metric("plan_predicted_step_seconds", "gauge", "Predicted seconds per step.",
                           [(run, plan.step_s)] if plan.step_s else [])
        yield from _metric("plan_convergence_factor_ratio", "gauge", "Predicted steps to a loss, relative to dense training.",
                           [(run, plan.convergence_factor)] if plan.convergence_factor else [])
    yield from _metric("plan_changes_total", "counter", "Changes of the plan after the start.", [
        (run | {"reason": reason}, count) for reason, count in sorted(view.plan_changes.items())])
    yield from _metric("guard_cosine_ratio", "gauge", "Cosine between sent and exact gradient.",
                       [(run, view.quality.cosine)] if view.quality.cosine else [])
    yield from _metric("residual_norm_ratio", "gauge", "Norm of the residual, relative to the gradient's.",
                       [(run, view.quality.residual)] if view.quality.cosine else [])
    yield from _metric("noise_scale_batches", "gauge", "Gradient noise scale in batches of one worker.",
                       [(run, view.noise_scale.batches)] if view.noise_scale.batches else [])


Sample = tuple[Labels, float] | tuple[Labels, float, str]


def _samples(metric: WorkerMetric, labels: Labels, record: Totals | WorkerRow) -> Iterator[Sample]:
    for key, field in metric.fields.items():
        value = getattr(record, field)
        if value is not None and (value or not metric.skips_zeros):
            yield (labels | {"direction": key}, value) if key in DIRECTIONS else (labels, value, key)


def _metric(name: str, kind: str, text: str, samples: list[Sample]) -> Iterator[str]:
    if not samples:
        return
    yield f"# HELP commlayer_{name} {text}"
    yield f"# TYPE commlayer_{name} {kind}"
    for labels, value, *suffix in samples:
        spelled = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"commlayer_{name}{''.join(suffix)}{{{spelled}}} {float(value)!r}"


def _escaped(text: str) -> str:
    r"""
    >>> _escaped('a"b')
    'a\\"b'
    """
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

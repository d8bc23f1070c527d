"""A JobView as metrics in Prometheus's text format (version 0.0.4)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import msgspec

from commlayer.observe.job.job_view import JobView
from commlayer.records import Record, complete

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = dict[str, str]
DIRECTIONS = ("up", "down")


class Metric(Record, frozen=True):
    """A row of metrics.toml, which says what the fields mean."""

    name: str
    kind: Literal["counter", "gauge", "summary"]
    text: str
    values: dict[str, str]
    skips_zeros: bool = False


@functools.cache
def _table() -> dict[str, tuple[Metric, ...]]:
    return msgspec.convert(tomllib.loads(Path(__file__).with_name("metrics.toml").read_text("utf-8")),
                           complete(dict[str, tuple[Metric, ...]]))


def exposition(view: JobView, now: float) -> str:
    """All metrics of the job at the time `now`, in the clock of the events. Values that are not known yet are left out."""
    return "".join(f"{line}\n" for line in _lines(view, now))


def _lines(view: JobView, now: float) -> Iterator[str]:
    run, workers, present = {"run": view.job.run}, sorted(view.workers.items()), view.present
    labels = {number: {**run, "rank": str(number), "host": worker.name} for number, worker in workers}
    records: dict[str, list[tuple[Labels, Any]]] = {
        "totals": [(labels[number], worker.totals) for number, worker in workers],
        "row": [(labels[worker.number], view.row(worker, now)) for worker in present if worker.step.steps],
        "worker": [(labels[worker.number], worker) for worker in present],
        "job": [(run, view)],
    }
    for of, metrics in _table().items():
        for metric in metrics:
            samples = [sample for at, record in records[of] for sample in _samples(metric, at, record)]
            yield from _metric(metric.name, metric.kind, metric.text, samples)
    status = [view.status(worker, now) for worker in present]
    yield from _metric("members", "gauge", "Workers of the job: expected, present, and those of them that wait for others.", [
        (run | {"state": "expected"}, view.job.world), (run | {"state": "present"}, len(status)),
        (run | {"state": "waiting"}, sum(state in ("waits", "waiting") for state in status))])
    yield from _metric("waiting_seconds", "gauge", "Seconds for which the job has waited for members.", [
        (run | {"for": ",".join(map(view.display, wait.names)), "what": wait.what}, wait.waited_s)
        for wait in view.current_waits(now)])
    plan = view.plan
    yield from _metric("plan_info", "gauge", "The current plan.", [
        (run | {"plan": plan.digest, "every": str(plan.local_steps), "codec": plan.codec}, 1)] if plan.digest else [])
    yield from _metric("plan_changes_total", "counter", "Changes of the plan after the start.", [
        (run | {"reason": reason}, count) for reason, count in sorted(view.plan_changes.items())])
    yield from _metric("residual_norm_ratio", "gauge", "Norm of the residual, relative to the gradient's.",
                       [(run, view.quality.residual)] if view.quality.cosine else [])


Sample = tuple[Labels, float] | tuple[Labels, float, str]


def _samples(metric: Metric, labels: Labels, record: Any) -> Iterator[Sample]:
    for key, field in metric.values.items():
        value = attrgetter(field)(record)
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

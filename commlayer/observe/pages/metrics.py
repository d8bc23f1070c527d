"""A JobView as metrics in Prometheus's text format (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterator

from commlayer.observe.job_view import JobView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = dict[str, str]


def exposition(view: JobView, now: float) -> str:
    """All metrics of the job at the time `now`, in the clock of the events. Values that are not known yet are left out."""
    return "".join(f"{line}\n" for line in _lines(view, now))


def _lines(view: JobView, now: float) -> Iterator[str]:
    run, workers = {"run": view.job.run}, sorted(view.workers.items())
    of = {number: {**run, "rank": str(number), "host": worker.name} for number, worker in workers}
    present = [(of[number], worker) for number, worker in workers if worker.present]
    stepping = [(labels, worker) for labels, worker in present if worker.step.steps]
    totals = [(of[number], worker.totals) for number, worker in workers]

    yield from _metric("step_total", "counter", "Training steps of a rank.", [(at, t.steps) for at, t in totals])
    yield from _metric("step_seconds", "summary", "Seconds of training steps.", [
        sample for at, t in totals for sample in ((at, t.step_s, "_sum"), (at, t.timed_steps, "_count"))])
    yield from _metric("compute_seconds_total", "counter", "Seconds in which training did not wait for communication.",
                       [(at, t.compute_s) for at, t in totals])
    yield from _metric("exposed_seconds_total", "counter", "Seconds in which training waited for communication.",
                       [(at, t.exposed_s) for at, t in totals])
    yield from _metric("hidden_seconds_total", "counter", "Seconds of communication while training computed.",
                       [(at, t.hidden_s) for at, t in totals])
    yield from _metric("sent_bytes_total", "counter", "Payload bytes, up: sent, down: received.", [
        sample for at, t in totals for sample in ((at | {"direction": "up"}, t.sent_bytes),
                                                  (at | {"direction": "down"}, t.received_bytes))])
    yield from _metric("dense_bytes_total", "counter", "Bytes that uncompressed synchronous training would have sent.",
                       [(at, t.dense_bytes) for at, t in totals])
    yield from _metric("samples_total", "counter", "Samples, as the script reports them.",
                       [(at, t.samples) for at, t in totals if t.samples])
    yield from _metric("loss", "gauge", "Last training loss that the script reported.",
                       [(at, worker.step.loss) for at, worker in stepping if worker.step.loss is not None])
    yield from _metric("batch_share_ratio", "gauge", "Fraction of the batch of all ranks.",
                       [(at, worker.step.share) for at, worker in stepping])
    yield from _metric("link_bytes_per_second", "gauge", "Rate of the link in recent steps.", [
        sample for at, worker in stepping for sample in ((at | {"direction": "up"}, worker.up_bytes_per_s),
                                                         (at | {"direction": "down"}, worker.down_bytes_per_s)) if sample[1]])
    yield from _metric("link_planned_bytes_per_second", "gauge", "Rate for which the plan was made.", [
        sample for at, worker in stepping
        for sample in ((at | {"direction": "up"}, worker.link.planned_up_bytes_per_s),
                       (at | {"direction": "down"}, worker.link.planned_down_bytes_per_s)) if sample[1]])
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

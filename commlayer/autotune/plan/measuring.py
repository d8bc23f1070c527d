"""Measures a running job, all ranks together: recorded steps, collectives, links. Knows a connection; plans nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from msgspec import structs

from commlayer.autotune.measure import collective_costs
from commlayer.autotune.measure.collective_costs import Grouped
from commlayer.autotune.measure.model_times import timing_of
from commlayer.autotune.plan.link_probes import UNKNOWN, RankMeasurement, Seen, at_least, gathered, probed
from commlayer.engine.connection import Connection
from commlayer.engine.worker import Worker
from commlayer.observe import Rates, RecordedStep
from commlayer.records import Job
from commlayer.transport.zero_chunks import CHUNK_NBYTES

PROBE_S = 1.0
"""Of all probes together, besides waiting for each other."""
GROUPS_SHARE = 0.2
"""Part of the probes' time that is for collectives."""
SLOW_BPS = 200e6
"""Over links as slow as that collectives between nodes take what the links take, and measuring them would take long."""
WAITED = 0.5
"""Part of a step."""
PROBE_AGAIN_S = 1.2
"""Of all probes of links that may have become faster."""
CHUNK = CHUNK_NBYTES // 2
"""Elements that travel or do not, together, rounded to 16 bits."""
LOOKED_AT = 4096
"""Chunks of a slice."""


class Measurements(NamedTuple):
    """What planning starts from."""

    job: Job
    """With this rank's times in it."""
    steps: list[RecordedStep]
    """Of this rank."""
    rows: list[RankMeasurement]
    """Of all ranks."""
    collectives: Grouped
    energy: tuple[float, ...] = ()
    """What each tensor's average gradient had of energy in the last step; none: it was not finite."""

    @property
    def step_s(self) -> float:
        """Seconds of a step, on the median over ranks."""
        return median(row.step_s for row in self.rows)


def measured(connection: Connection, job: Job, probe_s: float, seen: Seen | None = None) -> Measurements:
    """From the steps recorded up to now, with which recording ends, and probes that take `probe_s` together. `seen`: of this
    node's link in those steps."""
    worker, groups = connection.worker, connection.groups
    assert worker is not None
    assert groups is not None
    steps, local = worker.recorder.steps, connection.local
    worker.recorder.switch(on=False)
    timing = timing_of(steps if local is None else local.recorder.steps, len(job.tensors), worker.places)
    step_s = median(s.marks["end"] for s in steps)
    steps_s = (len(steps) + 1) * step_s  # the one in which recording began was seen, too
    told = seen if held_up(steps) else None
    if local is not None:
        local.recorder.switch(on=False)
        told, step_s = None, step_s / worker.plan.local_steps  # a round is recorded from exchange to exchange
    carried = None if seen is None else seen.carried
    expected = Rates(carried.up.bps, carried.down.bps) if carried else UNKNOWN
    ways = at_least(probed(connection, (1 - GROUPS_SHARE) * probe_s, told, steps_s, expected=expected), carried)
    row = RankMeasurement(timing.forward_s + timing.backward_s, step_s, *ways, connection.terms.balanced)
    rows = gathered(connection, row)
    collectives = Grouped(collective_costs.NONE, collective_costs.NONE)
    if groups.ranks_per_node > 1 or not any(0.0 < row.up_bps < SLOW_BPS for row in rows):
        collectives = collective_costs.measure(groups, GROUPS_SHARE * probe_s)
    if groups.ranks_per_node == 1:
        timing = structs.replace(timing, filled=filled_of(worker, groups.world))
    return Measurements(Job(job.tensors, job.batch, timing, job.name), steps, rows, collectives,
                        energy_of(worker) if local is None else ())  # a change of weights is no gradient


def held_up(steps: Sequence[RecordedStep]) -> bool:
    """Whether steps mostly waited for others behind their backward passes: beside computing a link may be busy, as rarely as
    gradients come, and is not what holds anything up."""
    waited_s = median(s.marks["end"] - s.marks["backward"] for s in steps)
    return waited_s >= WAITED * median(s.marks["end"] for s in steps)


def energy_of(worker: Worker) -> tuple[float, ...]:
    """Of what came back in the last step, which lies there until the next."""
    found = torch.zeros(len(worker.job.tensors), dtype=torch.float64)
    for bucket in worker.buckets:
        if not bucket.buffer:
            at = 0
            parts, y = [], bucket.y
            for s in bucket.slices:
                parts.append(y[at : at + s.numel].double().square().sum())
                at += s.numel
            energy = torch.stack(parts).cpu() / float(bucket.scaled) ** 2
            found.index_add_(0, torch.tensor([s.tensor for s in bucket.slices]), energy)
    whole = float(found.sum())
    return tuple(found.tolist()) if 0.0 < whole < math.inf else ()


def filled_of(worker: Worker, workers: int) -> tuple[float, ...]:
    """By tensor, the part of its gradient in the last step that was no zeros, of what this rank gave and of what came back on
    average. One of the two is still there: all gave as much, and an answer has at most what they gave together. None: all of
    everything."""
    found = [0.0] * len(worker.job.tensors)
    for bucket in worker.buckets:
        at = 0
        for s in bucket.slices:
            part = 1.0 if bucket.buffer else _nonzero(bucket.x[at : at + s.numel])
            # What codes nothing back has its answer in the place of its gradient.
            gave, came = (part, min(1.0, workers * part)) if bucket.in_means else (part / workers, part)
            found[s.tensor] += s.numel * (1.0 if part == 1.0 else (gave + came) / 2)
            at += s.numel
    parts = tuple(part / info.numel if info.numel else 1.0 for part, info in zip(found, worker.job.tensors, strict=True))
    return parts if min(parts, default=1.0) < 1.0 else ()


def _nonzero(x: torch.Tensor) -> float:
    """By some of its chunks, all of which are looked at where there are few. 1 where all of it is zero: then this step says
    nothing of others, for it had no gradient, or this rank no samples."""
    chunks = x[: x.numel() // CHUNK * CHUNK].view(-1, CHUNK)
    looked = chunks[:: (len(chunks) // LOOKED_AT) | 1]  # an odd stride: else it could meet the same place of each row
    part = float((looked != 0).any(1).float().mean()) if len(looked) else 1.0
    if part:
        return part
    return 1 / len(looked) if bool(x.any()) else 1.0

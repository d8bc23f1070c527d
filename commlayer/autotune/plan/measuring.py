"""Collective measurement of a running job: recorded steps, collectives and links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from msgspec import structs

from commlayer.autotune.measure import calibration
from commlayer.autotune.measure.calibration import CollectiveCosts
from commlayer.autotune.measure.step_times import timing_of
from commlayer.autotune.plan.link_probes import UNKNOWN, RankMeasurement, SeenTraffic, at_least, gathered, probed
from commlayer.engine.connection import JobContext
from commlayer.engine.worker import Worker
from commlayer.observe import Rates, RecordedStep
from commlayer.records import Job
from commlayer.transport.chunking import CHUNK_NBYTES

PROBE_S = 1.0
"""Time of all probes together, without the waits between ranks."""
GROUPS_SHARE = 0.2
"""Share of the probe time for collectives."""
SLOW_BPS = 200e6
"""Over slower links the links determine the time of collectives between nodes, and measuring collectives would take long."""
WAITED = 0.5
"""Fraction of a step."""
PROBE_AGAIN_S = 1.2
"""Time of a probe of links that may have become faster."""
CHUNK = CHUNK_NBYTES // 2
"""Elements of a zero chunk at 16 bits each; a chunk is sent or left out as a whole."""
LOOKED_AT = 4096
"""Largest sample of chunks per slice."""


class Measurements(NamedTuple):
    """Input of planning."""

    job: Job
    """Includes this rank's model times."""
    steps: list[RecordedStep]
    """Recorded steps of this rank."""
    rows: list[RankMeasurement]
    """Measurements of all ranks."""
    collectives: CollectiveCosts
    energy: tuple[float, ...] = ()
    """Energy of each tensor's average gradient in the last step; empty if it was not finite."""

    @property
    def step_s(self) -> float:
        """Step time, as the median over ranks."""
        return median(row.step_s for row in self.rows)


def measured(connection: JobContext, job: Job, probe_s: float, seen: SeenTraffic | None = None) -> Measurements:
    """Measures with the steps recorded so far, which ends recording, and with probes that take `probe_s` in total. `seen`:
    traffic of this node's link in those steps."""
    worker, groups = connection.worker, connection.groups
    assert worker is not None
    assert groups is not None
    steps, local = worker.recorder.steps, connection.local
    worker.recorder.switch(on=False)
    timing = timing_of(steps if local is None else local.recorder.steps, len(job.tensors), worker.places)
    step_s = median(s.marks["end"] for s in steps)
    steps_s = (len(steps) + 1) * step_s  # includes the step in which recording began
    busy_seen = seen if held_up(steps) else None
    if local is not None:
        local.recorder.switch(on=False)
        busy_seen, step_s = None, step_s / worker.plan.local_steps  # records of local steps span from exchange to exchange
    carried = None if seen is None else seen.carried
    expected = Rates(carried.up.bps, carried.down.bps) if carried else UNKNOWN
    ways = at_least(probed(connection, (1 - GROUPS_SHARE) * probe_s, busy_seen, steps_s, expected=expected), carried)
    row = RankMeasurement(timing.forward_s + timing.backward_s, step_s, *ways, connection.terms.balanced)
    rows = gathered(connection, row)
    collectives = CollectiveCosts(calibration.NO_COLLECTIVES, calibration.NO_COLLECTIVES)
    if groups.ranks_per_node > 1 or not any(0.0 < row.up_bps < SLOW_BPS for row in rows):
        collectives = calibration.measure_collectives(groups, GROUPS_SHARE * probe_s)
    if groups.ranks_per_node == 1:
        timing = structs.replace(timing, filled=filled_of(worker, groups.world))
    return Measurements(Job(job.tensors, job.batch, timing, job.name), steps, rows, collectives,
                        energy_of(worker) if local is None else ())  # an update of local steps is not a gradient


def held_up(steps: Sequence[RecordedStep]) -> bool:
    """Whether steps mostly waited for other ranks after their backward passes. Otherwise gradients may come too slowly to fill
    the link, and the link does not limit the step."""
    waited_s = median(s.marks["end"] - s.marks["backward"] for s in steps)
    return waited_s >= WAITED * median(s.marks["end"] for s in steps)


def energy_of(worker: Worker) -> tuple[float, ...]:
    """Energy of the last step's results, which stay in the buckets until the next step."""
    energies = torch.zeros(len(worker.job.tensors), dtype=torch.float64)
    for bucket in worker.buckets:
        if not bucket.buffer:
            at = 0
            parts, y = [], bucket.y
            for s in bucket.slices:
                parts.append(y[at : at + s.numel].double().square().sum())
                at += s.numel
            energy = torch.stack(parts).cpu() / float(bucket.scaled) ** 2
            energies.index_add_(0, torch.tensor([s.tensor for s in bucket.slices]), energy)
    total = float(energies.sum())
    return tuple(energies.tolist()) if 0.0 < total < math.inf else ()


def filled_of(worker: Worker, workers: int) -> tuple[float, ...]:
    """Per tensor, the nonzero fraction of the last step's gradient, averaged over this rank's gradient and the received
    average.

    Only one of the two is still in memory. The other is estimated: all ranks send equal amounts, and a result has at most the
    sum of them. Empty if all gradients are full.
    """
    nonzero = [0.0] * len(worker.job.tensors)
    for bucket in worker.buckets:
        at = 0
        for s in bucket.slices:
            part = 1.0 if bucket.buffer else _nonzero(bucket.x[at : at + s.numel])
            # Unless `in_means`, the result has overwritten the gradient.
            sent, received = (part, min(1.0, workers * part)) if bucket.in_means else (part / workers, part)
            nonzero[s.tensor] += s.numel * (1.0 if part == 1.0 else (sent + received) / 2)
            at += s.numel
    parts = tuple(part / info.numel if info.numel else 1.0 for part, info in zip(nonzero, worker.job.tensors, strict=True))
    return parts if min(parts, default=1.0) < 1.0 else ()


def _nonzero(x: torch.Tensor) -> float:
    """Estimated from a sample of chunks. 1 if all elements are zero: then the step is not representative, because this rank
    had no gradient or no samples."""
    chunks = x[: x.numel() // CHUNK * CHUNK].view(-1, CHUNK)
    sample = chunks[:: (len(chunks) // LOOKED_AT) | 1]  # an odd stride does not hit the same column of every row
    part = float((sample != 0).any(1).float().mean()) if len(sample) else 1.0
    if part:
        return part
    return 1 / len(sample) if bool(x.any()) else 1.0

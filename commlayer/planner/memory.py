"""The memory that training needs on a GPU, and the micro-batches that fit into it."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from commlayer.planner.data.tables import gpu
from commlayer.records import Job

STATES_NBYTES = {"adam": 8, "sgd": 4, "muon": 4, "lion": 4, "": 8}
"""Bytes of optimizer state per element."""
ELEMENT_NBYTES = 4
RESERVED_GBYTES = 1.0
"""GB of memory that a GPU's driver and allocator reserve."""


class Memory(NamedTuple):
    """Memory in GB that a step needs on one kind of GPU."""

    available: float
    kept: dict[str, float]
    """The parts that do not depend on the batch, by name."""
    activations: float
    """Of one backward pass; 0: unknown."""

    @property
    def required(self) -> float:
        return sum(self.kept.values()) + self.activations

    @property
    def fits(self) -> bool:
        return self.required <= self.available - RESERVED_GBYTES


def estimate_memory(job: Job, device: str, optimizer: str, ranks: int = 1) -> Memory:
    """Memory of a job on each GPU of this kind, if the model is sharded over `ranks` of them. Frozen parameters have no
    gradients and no optimizer states."""
    timing, numel = job.timed, job.numel
    sizes = {"frozen weights": timing.frozen_nbytes, "weights": ELEMENT_NBYTES * numel,
             "gradients": ELEMENT_NBYTES * numel, "optimizer": STATES_NBYTES[optimizer] * numel}
    return Memory(gpu(device).memory_gbytes, {name: size / 1e9 / ranks for name, size in sizes.items()},
                  timing.activation_nbytes / 1e9)


def with_micro_batches(job: Job, devices: list[str], optimizer: str) -> Job:
    """The job with its batch divided into as few micro-batches as fit on all these GPUs, or into single samples if none fit;
    unchanged if batch or activations are unknown."""
    pieces = 1
    for device in devices:
        memory = estimate_memory(job, device, optimizer)
        room = memory.available - RESERVED_GBYTES - sum(memory.kept.values())
        most = int(room / memory.activations * (job.batch or 1)) if memory.activations else 0
        if not memory.fits and memory.activations:
            pieces = max(pieces, -(-(job.batch or 1) // max(1, most)))
    return job if pieces == 1 else _with_micro_batch(job, -(-(job.batch or 1) // pieces))


def _with_micro_batch(job: Job, micro_batch: int) -> Job:
    """The job with micro-batches of this size. All backward passes except the last one precede the exchange, so they count as
    parts of the forward pass."""
    timing, pieces = job.timed, -(-(job.batch or 1) // micro_batch)
    backward_s = timing.backward_s / pieces
    return structs.replace(job, timing=structs.replace(
        timing, ready_s=tuple(at / pieces for at in timing.ready_s), needed_s=tuple(at / pieces for at in timing.needed_s),
        backward_s=backward_s, forward_s=timing.forward_s + timing.backward_s - backward_s, micro_batches=pieces,
        activation_nbytes=timing.activation_nbytes * micro_batch / (job.batch or 1)))

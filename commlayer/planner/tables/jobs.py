"""Built-in jobs: well-known models with the times at which their gradients become ready. Knows no machines but the tables'.

A step's compute time is published where `backward_s` says so (traces of 8 x V100 machines, reference 1.6), and elsewhere
the multiply-adds at the rate of ResNet-50's published 356 images/s (NVIDIA's DeepLearningExamples, FP32, V100-32GB).
It is spread over the layers by their multiply-adds; backward takes twice as long as forward. Other devices and
batches scale it. That is enough to plan by; a measured profile replaces it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from msgspec import structs

from commlayer.planner.tables.machines import GPU_SHARE, GPUS, speed
from commlayer.planner.tables.model_layers import Layer, layers
from commlayer.records import Job, Timing

FLOP_S = 3 * 2 * 4.09e9 * 356
"""Of training in FP32 on a V100: forward and twice as much backward, two operations a multiply-add."""
WINOGRAD_FLOP_S = 2 * 2 * 15.47e9 * 32 / 85.3e-3
"""The same where nearly all is 3x3 convolution without stride, as in VGG-16, whose backward time is published."""
UPDATE_NBYTES = 20
"""Read and written per element by SGD with momentum: gradient, momentum twice, parameter twice."""


class Work(NamedTuple):
    """A sample's, and the batch that papers use."""

    batch: int
    reads: int = 1
    """Tokens in a sample, where macs are counted by token; passes through the model in a step, where they are several."""
    backward_s: float | None = None
    """Published: of that batch on one V100."""
    flop_s: float = FLOP_S
    """Where it is not."""


WORK: Mapping[str, Work] = {
    "resnet50": Work(32),
    "resnet101": Work(32),
    "vgg16": Work(32, backward_s=85.3e-3),
    "vit-b16": Work(32),
    "bert-base": Work(8, reads=128, backward_s=66.3e-3),
    "bert-large": Work(8, reads=128),
    "gpt2": Work(20, reads=80),
    "lstm": Work(80, reads=20, backward_s=71.5e-3),
    "ugatit": Work(2, reads=4, flop_s=WINOGRAD_FLOP_S),
}
"""gpt2: sequences of 80 tokens. ugatit: each image passes each generator as itself, translated, and back."""


def builtin(name: str, batch: int | None = None, device: str = "v100") -> Job:
    """A job by name, of `batch` samples per worker, on that device."""
    if name not in WORK:
        near = difflib.get_close_matches(name, WORK, 3, 0.4)
        raise ValueError(f"model {name!r} is not built in, {'nearest are' if near else 'there are'} {', '.join(near or WORK)}")
    if batch is not None and batch < 1:
        raise ValueError(f"batch of {name}: got {batch}, allowed: at least 1")
    work, parts = WORK[name], layers(name)
    batch = batch or work.batch
    tensors = tuple(t for layer in parts for t in layer.tensors)
    flops = 2 * 2 * sum(layer.macs for layer in parts) * work.reads * work.batch
    backward_s = (work.backward_s or flops / work.flop_s) * batch / work.batch / speed(device)
    memory_bytes_s = GPUS["v100"].memory_gbytes_s * 1e9 * GPU_SHARE * speed(device)
    update_s = sum(t.numel for t in tensors) * UPDATE_NBYTES / memory_bytes_s
    return Job(tensors, batch, timing(parts, backward_s, backward_s / 2, update_s), name)


def on_reference(job: Job) -> Job:
    """The job with times as on the GPU that the tables tell speeds against."""
    if job.timing is None or not job.timing.device:
        return job
    try:
        factor = speed(job.timing.device)
    except ValueError as error:
        raise ValueError(f"job {job.name!r}: timing.device: {error}") from None
    return structs.replace(job, timing=job.timing.scaled(factor))


def timing(parts: tuple[Layer, ...], backward_s: float, forward_s: float, update_s: float) -> Timing:
    """Times by layer in proportion to its multiply-adds. A layer without tensors takes its time all the same."""
    whole = sum(layer.macs for layer in parts)
    before = [0.0, *accumulate(layer.macs / whole for layer in parts)]
    ready: list[float] = []
    needed: list[float] = []
    for layer, share in zip(parts, before, strict=False):
        ready += [backward_s * (1 - share)] * len(layer.tensors)
        needed += [forward_s * share] * len(layer.tensors)
    return Timing(tuple(max(0.0, s) for s in ready), tuple(needed), backward_s, forward_s, update_s)
